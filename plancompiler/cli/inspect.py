"""`plancompiler inspect`: print compiled plans."""

from __future__ import annotations

import re
from pathlib import Path

import click

from plancompiler.cli.options import json_option
from plancompiler.cli.output import format_bytes, print_json, print_table
from plancompiler.cli.plan_view import plain_data, plans_to_dot
from plancompiler.errors import PlanCompilerError, UsageError
from plancompiler.plan.memory_report import MemoryReport, memory_report
from plancompiler.plan.plan import Plan
from plancompiler.plan.serde import plan_from_bytes
from plancompiler.plan.text import format_plan

_PLAN_NAME = re.compile(r"rank_(\d+)\.plan")


@click.command("inspect")
@click.argument("path", metavar="PLAN_DIR|PLAN_FILE", type=click.Path(path_type=Path))
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
@click.option("--memory", is_flag=True, help="Instead: what is alive where the arena is fullest.")
@json_option
def inspect_command(
    path: Path, ranks: tuple[int, ...], form: str, memory: bool, as_json: bool
) -> None:
    """Print the plans that `plancompiler compile --out` wrote.

    Per stream in order: each task with its op, source line, SBP, inputs, outputs, bytes, memory
    block and offset.

    \b
    Example:
      plancompiler compile examples/mlp.py --ranks 2 --out plans
      plancompiler inspect plans --rank 0
      plancompiler inspect plans --format dot | dot -Tsvg -o plans.svg
      plancompiler inspect plans --rank 0 --memory
    """
    as_json = as_json or form == "json"
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
        click.echo(plans_to_dot(plans), nl=False)
    else:
        click.echo("\n".join(format_plan(plan) for plan in plans), nl=False)


def print_memory(report: MemoryReport) -> None:
    """The sizes of a plan's memory, and the table of what is alive at the peak."""
    click.echo(
        f"rank {report.rank}: arena {format_bytes(report.arena_bytes)}, "
        f"lower bound {format_bytes(report.lower_bound)} (ratio {report.ratio:.4f}), "
        f"variables {format_bytes(report.variable_bytes)}"
    )
    print_table(
        ("alive at the peak", ">bytes", "made by", ">from task", ">to task", "source"),
        (
            (each.name, format_bytes(each.nbytes), each.op, each.first, each.last, each.source)
            for each in report.at_peak
        ),
    )


def plan_files(path: Path, ranks: tuple[int, ...]) -> list[Path]:
    """The plan file at `path`, or those of a folder: all of them, or the given ranks', by rank."""
    if path.is_file():
        if ranks:
            raise UsageError("--rank chooses among the plans of a folder", got=f"the file {path}")
        return [path]
    if not path.is_dir():
        raise UsageError("there is no such plan file or folder", got=str(path))
    found = {
        int(match[1]): file
        for file in path.iterdir()
        if (match := _PLAN_NAME.fullmatch(file.name)) is not None
    }
    if not found:
        raise UsageError(
            "the folder holds no plans",
            got=str(path),
            expected="files rank_R.plan",
            hint="write them with `plancompiler compile FILE --ranks N --out DIR`",
        )
    for rank in ranks:
        if rank not in found:
            raise UsageError(
                "the folder has no plan for this rank",
                rank=rank,
                got=str(path),
                expected=f"one of {', '.join(map(str, sorted(found)))}",
            )
    return [found[rank] for rank in (ranks or sorted(found))]


def read_plan(file: Path) -> Plan:
    """The plan in a file; a damaged file is a WireFormatError that names it."""
    try:
        return plan_from_bytes(file.read_bytes())
    except PlanCompilerError as error:
        raise error.at(source=file) from None
