"""`plancompiler inspect`: print compiled plans, or an imported model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import click

from plancompiler.boxing.graph import BoxingTaskGraph
from plancompiler.boxing.report import boxing_costs
from plancompiler.boxing.serde import graph_from_bytes
from plancompiler.boxing.verify import verify_boxing_graph
from plancompiler.cli.compile import print_costs
from plancompiler.cli.job_file import is_model_folder
from plancompiler.cli.options import json_option
from plancompiler.cli.output import format_bytes, print_json, print_result, print_table
from plancompiler.cli.plan_view import plain_data, plans_to_dot
from plancompiler.errors import PlanCompilerError, UsageError
from plancompiler.ir.arguments import is_file, is_folder
from plancompiler.plan.compiled_plans import GRAPH_FILE
from plancompiler.plan.memory_report import MemoryReport, memory_report
from plancompiler.plan.plan import Plan
from plancompiler.plan.serde import plan_from_bytes
from plancompiler.plan.text import format_plan

_BARS = " ▁▂▃▄▅▆▇█"
_PLAN_NAME = re.compile(r"rank_(\d+)\.plan")


@click.command("inspect")
@click.argument("path", metavar="PLAN_DIR|PLAN_FILE|MODEL_DIR", type=click.Path(path_type=Path))
@click.option(
    "--rank", "ranks", type=click.IntRange(min=0), multiple=True, help="Only this rank; repeatable."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "dot", "json"]),
    default="text",
    show_default=True,
    help="text to read, dot for Graphviz, json for programs.",
)
@click.option("--memory", is_flag=True, help="Instead: the arena over time, and what fills it.")
@click.option("--boxing", is_flag=True, help="Instead: every layout change and its estimated cost.")
@json_option
def inspect_command(
    path: Path, ranks: tuple[int, ...], form: str, memory: bool, boxing: bool, as_json: bool
) -> None:
    """Print the plans that `plancompiler compile --out` wrote, or a model that was imported.

    Of a plan per stream in order: each task with its op, source line, SBP, inputs, outputs, bytes,
    memory block and offset. Of the folder of a model: its inputs, parameters and operations, with
    its author's names and lines.

    \b
    Example:
      plancompiler compile examples/mlp.py --ranks 2 --out plans
      plancompiler inspect plans --rank 0
      plancompiler inspect plans --format dot | dot -Tsvg -o plans.svg
      plancompiler inspect plans --rank 0 --memory
      plancompiler inspect plans --boxing
      plancompiler inspect model
    """
    as_json = as_json or form == "json"
    if is_model_folder(str(path)):
        if ranks or memory or boxing or form == "dot":
            raise UsageError(
                "a model that was imported has no plans yet",
                got=str(path),
                hint=f"write them with `plancompiler compile {path} --ranks N --out DIR`, and "
                "inspect DIR",
            )
        # Only models need the importers, and everything that their rules are written with.
        from plancompiler.cli.model_view import model_data, print_model  # noqa: PLC0415  # see above

        described = model_data(path)
        (print_json if as_json else print_model)(described)
        return
    if boxing:
        transfers = boxing_costs(read_graph(path))
        if as_json:
            print_json({"transfers": [plain_data(each) for each in transfers]})
        else:
            print_costs(transfers)
        return
    plans = [read_plan(file) for file in plan_files(path, ranks)]
    if memory:
        reports = [memory_report(plan) for plan in plans]
        if as_json:
            print_json({"memory": [plain_data(report) for report in reports]})
        else:
            for report in reports:
                print_memory(report)
    elif as_json:
        print_json({"plans": [plain_data(plan) for plan in plans]})
    elif form == "dot":
        print_result(plans_to_dot(plans), end="")
    else:
        print_result("\n".join(format_plan(plan) for plan in plans), end="")


def print_memory(report: MemoryReport) -> None:
    """The sizes of a plan's memory, and the table of what is alive at the peak."""
    print_result(
        f"rank {report.rank}: arena {format_bytes(report.arena_bytes)}, "
        f"lower bound {format_bytes(report.lower_bound)} (ratio {report.ratio:.4f}), "
        f"variables {format_bytes(report.variable_bytes)}"
    )
    print_result(f"alive over the step: {timeline(report.live)}")
    print_table(
        ("alive at the peak", ">bytes", "made by", ">from task", ">to task", "source"),
        (
            (each.name, format_bytes(each.nbytes), each.op, each.first, each.last, each.source)
            for each in report.at_peak
        ),
    )


def timeline(live: Sequence[int], width: int = 64) -> str:
    """Bytes alive along the step as a line of bars, each the most of its share of the tasks."""
    if not live:
        return ""
    count = min(width, len(live))
    edges = [len(live) * column // count for column in range(count + 1)]
    tops = [max(live[low:high]) for low, high in pairwise(edges)]
    highest = max(*tops, 1)
    return "".join(_BARS[top * (len(_BARS) - 1) // highest] for top in tops)


def read_graph(path: Path) -> BoxingTaskGraph:
    """The boxing task graph that `compile --out` wrote beside the plans."""
    file = path / GRAPH_FILE
    if not is_file(file):
        raise UsageError(
            "the folder holds no boxing task graph",
            got=str(path),
            expected=f"a folder with {GRAPH_FILE}",
            hint="write it with `plancompiler compile FILE --ranks N --out DIR`",
        )
    try:
        graph = graph_from_bytes(file.read_bytes())
        verify_boxing_graph(graph)
    except PlanCompilerError as error:
        raise error.at(source=file) from None
    return graph


def plan_files(path: Path, ranks: tuple[int, ...]) -> list[Path]:
    """The plan file at `path`, or those of a folder: all of them, or the given ranks', by rank."""
    if is_file(path):
        if ranks:
            raise UsageError("--rank chooses among the plans of a folder", got=f"the file {path}")
        return [path]
    if not is_folder(path):
        raise UsageError(
            "there is no such plan file or folder",
            got=str(path),
            expected="what `plancompiler compile --out` wrote",
        )
    files = {
        int(match[1]): file
        for file in path.iterdir()
        if (match := _PLAN_NAME.fullmatch(file.name)) is not None
    }
    if not files:
        raise UsageError(
            "the folder holds no plans",
            got=str(path),
            expected="files rank_R.plan",
            hint="write them with `plancompiler compile FILE --ranks N --out DIR`",
        )
    for rank in ranks:
        if rank not in files:
            raise UsageError(
                "the folder has no plan for this rank",
                rank=rank,
                got=str(path),
                expected=f"one of {', '.join(map(str, sorted(files)))}",
            )
    return [files[rank] for rank in (ranks or sorted(files))]


def read_plan(file: Path) -> Plan:
    """The plan in a file; a damaged file is a WireFormatError that names it."""
    try:
        return plan_from_bytes(file.read_bytes())
    except PlanCompilerError as error:
        raise error.at(source=file) from None
