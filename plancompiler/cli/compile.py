"""`plancompiler compile`: plans of a job, without running them."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

from plancompiler.boxing.graph import BoxingTaskGraph
from plancompiler.boxing.report import TransferCost, boxing_costs
from plancompiler.boxing.serde import graph_to_bytes
from plancompiler.cli.config_options import config_options, configured
from plancompiler.cli.explain import (
    explain,
    explain_pipeline,
    print_explained,
    print_explained_pipeline,
)
from plancompiler.cli.job_file import load_job
from plancompiler.cli.options import (
    Setting,
    job_argument,
    json_option,
    mode_option,
    output_option,
    settings_option,
)
from plancompiler.cli.output import format_bytes, print_json, print_note, print_result, print_table
from plancompiler.cli.plan_view import plain_data
from plancompiler.costs import machine_of_job
from plancompiler.errors import VerifyError
from plancompiler.ir import Job
from plancompiler.ir.whole_file import naming_output, write_whole
from plancompiler.lower.compile import MODES, Compilation, compile_plans, resolve_mode
from plancompiler.lower.profile import RANK_STAGES
from plancompiler.plan.compiled_plans import SUMMARY_FILE, CompiledPlans
from plancompiler.plan.serde import plan_to_bytes
from plancompiler.running.world_size import world_size_of


@click.command("compile")
@job_argument
@click.option(
    "--ranks", type=click.IntRange(min=1), help="World size; by default what the job needs."
)
@mode_option
@click.option(
    "--rank",
    "only_ranks",
    type=click.IntRange(min=0),
    multiple=True,
    help="Lower only this rank; may be repeated. Other ranks are not built.",
)
@output_option(
    "--out",
    "the folder of plans",
    "Folder for rank_R.plan (binary), rank_R.txt (text), the boxing graph and summary.json; "
    "`plancompiler run` takes it.",
    folder=True,
)
@click.option(
    "--check-modes", is_flag=True, help="Compile in all four modes; fail where plans differ."
)
@click.option("--costs", is_flag=True, help="List every layout change and what it should cost.")
@click.option(
    "--explain", "explaining", is_flag=True, help="Show what each pass did, and what came of it."
)
@click.option("--profile", is_flag=True, help="Show what each stage of the compiler took.")
@config_options
@settings_option
@json_option
def compile_command(
    target: str,
    ranks: int | None,
    mode: str | None,
    only_ranks: tuple[int, ...],
    out: Path | None,
    check_modes: bool,
    costs: bool,
    explaining: bool,
    profile: bool,
    config: Mapping[str, Any],
    settings: Mapping[str, Setting],
    as_json: bool,
) -> None:
    """Compile a job into one plan per rank and report sizes, times and the plans' digest.

    \b
    Example:
      plancompiler compile examples/gpt.py --ranks 8 -D dp=2 -D tp=2 -D pp=2 --check-modes
      plancompiler compile examples/mlp.py --ranks 2 --out plans
    """
    mode = resolve_mode(mode)
    begin = time.perf_counter()
    job = configured(load_job(target, settings, ranks), config)
    trace_seconds = time.perf_counter() - begin
    world_size = world_size_of(job, ranks)
    only = only_ranks or None
    compilation = compile_plans(job, world_size, mode, only)
    summary = summarize(compilation, trace_seconds)
    if check_modes:
        check_all_modes(job, world_size, compilation, only)
        summary["modes_equal"] = True
    parts: list[tuple[str, Sequence[Any], Callable[[Any], None]]] = []
    if costs:
        parts.append(
            ("transfers", boxing_costs(compilation.graph, machine_of_job(job)), print_costs)
        )
    if explaining:
        parts.append(("explain", list(explain(job, world_size)), print_explained))
        stages = explain_pipeline(compilation.graph.pipeline, compilation.plans)
        if stages:
            parts.append(("pipeline", stages, print_explained_pipeline))
    if profile:
        parts.append(("profile", profile_of(compilation, trace_seconds), print_profile))
    for name, rows, _ in parts:
        summary[name] = [plain_data(each) for each in rows]
    if out is not None:
        write_plans(compilation, summary, out)
    if as_json:
        print_json(summary)
        return
    print_table(("what", "value"), _lines(summary))
    for _, rows, show in parts:
        print_result()
        show(rows)


def summarize(compilation: Compilation, trace_seconds: float) -> dict[str, Any]:
    """What `compile --json` prints."""
    plans = compilation.plans.values()
    master = {"trace": trace_seconds, **compilation.master_seconds}
    rank_seconds = list(compilation.rank_seconds.values())
    plan_bytes = [len(plan_to_bytes(plan)) for plan in plans]
    return {
        "mode": compilation.mode,
        "ranks": compilation.world_size,
        "logical_ops": len(compilation.graph.ops),
        "boxing_edges": count_boxing_edges(compilation.graph),
        "boxing_families": sum(
            family.transfer is not None for family in compilation.graph.families
        ),
        "boxing_graph_bytes": compilation.graph_bytes,
        "slice_bytes": _spread(len(data) for data in compilation.slices.values()),
        "distinct_slices": compilation.distinct_slices,
        "master_seconds": {**master, "total": sum(master.values())},
        "rank_seconds": {"median": statistics.median(rank_seconds), "max": max(rank_seconds)},
        "tasks_per_rank": _spread(len(plan.tasks) for plan in plans),
        "plan_bytes": {"median": statistics.median(plan_bytes), "max": max(plan_bytes)},
        "arena_bytes": {"max": max(plan.arena_bytes for plan in plans)},
        "peak_live_bytes": {"max": max(plan.peak_live_bytes for plan in plans)},
        "peak_rss_mib": peak_rss_mib(),
        "digest": compilation.digest,
    }


@dataclass(frozen=True, slots=True)
class StageTime:
    """Wall time of a stage of the compiler."""

    part: str
    """`master`, or `ranks`: what workers do, added up over the compiled ranks."""
    stage: str
    """`pass NAME` for a pass."""
    seconds: float
    share: float
    """Of the seconds of all stages."""


def profile_of(compilation: Compilation, trace_seconds: float) -> list[StageTime]:
    """What each stage took, in the order in which they run."""
    master = compilation.master_seconds
    passes = sum(record.seconds for record in compilation.passes)
    spent = {
        ("master", "trace"): trace_seconds,
        # The first verification of the job and, with recompute=auto, trials that choose regions.
        ("master", "before passes"): max(0.0, master["passes"] - passes),
    }
    for record in compilation.passes:
        spent["master", f"pass {record.name}"] = record.seconds
    for stage in ("sbp", "boxing", "serialize"):
        spent["master", stage] = master[stage]
    for stage in RANK_STAGES:
        took = [each[stage] for each in compilation.rank_stages.values() if stage in each]
        if took:
            spent["ranks", stage] = sum(took)
    spent["ranks", "verify together"] = compilation.together_seconds
    total = sum(spent.values())
    return [
        StageTime(part, stage, seconds, seconds / total) for (part, stage), seconds in spent.items()
    ]


def print_profile(stages: Iterable[StageTime]) -> None:
    """One line per stage."""
    print_table(
        ("part", "stage", ">ms", ">share"),
        (
            (each.part, each.stage, f"{each.seconds * 1e3:.1f}", f"{each.share:.1%}")
            for each in stages
        ),
    )


def print_costs(transfers: Iterable[TransferCost]) -> None:
    """One line per layout change, in global order."""
    print_table(
        ("value", "change", "from", "to", ">devices", ">bytes a rank", ">estimate", "source"),
        (
            (
                each.name,
                each.primitive,
                each.before,
                each.after,
                each.devices,
                format_bytes(each.bytes_per_rank),
                f"{each.seconds * 1e6:.1f} us",
                each.source,
            )
            for each in transfers
        ),
    )


def count_boxing_edges(graph: BoxingTaskGraph) -> int:
    """Op inputs that arrive through transport families."""
    transport = {family.number for family in graph.families if family.transfer is not None}
    return sum(source.family in transport for placed in graph.ops for source in placed.inputs)


def peak_rss_mib() -> float:
    """The most memory this process has held, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def check_all_modes(
    job: Job, world_size: int, reference: Compilation, only: tuple[int, ...] | None
) -> None:
    """Compile in the other modes too; a VerifyError names the first rank and line that differ."""
    for mode in MODES:
        if mode == reference.mode:
            continue
        begin = time.perf_counter()
        other = compile_plans(job, world_size, mode, only)
        compare_texts(reference.mode, reference.texts, mode, other.texts)
        seconds = time.perf_counter() - begin
        print_note(f"{mode}: the same plans as {reference.mode} ({seconds:.2f} s)")


def compare_texts(
    left_mode: str, left: Mapping[int, str], right_mode: str, right: Mapping[int, str]
) -> None:
    """Check that two modes gave the same plan texts."""
    for rank in sorted(left):
        lines = zip_longest(left[rank].splitlines(), right[rank].splitlines(), fillvalue="(ended)")
        for number, (one, other) in enumerate(lines, start=1):
            if one != other:
                raise VerifyError(
                    f"modes {left_mode} and {right_mode} gave different plans",
                    rank=rank,
                    got=f"line {number} in {right_mode}: {other.strip()}",
                    expected=f"line {number} in {left_mode}: {one.strip()}",
                )


def write_plans(compilation: Compilation, summary: Mapping[str, Any], out: Path) -> None:
    """Write plans, their texts and the summary, in place of those of an earlier run."""
    CompiledPlans(
        compilation.job,
        compilation.world_size,
        compilation.plans,
        graph_to_bytes(compilation.graph),
    ).save(out)
    with naming_output("a compiled file", out / SUMMARY_FILE):
        write_whole(out / SUMMARY_FILE, ((json.dumps(summary, indent=2) + "\n").encode(),))
    print_note(f"wrote {len(compilation.plans)} plans to {out}")


def _spread(counts: Iterable[int]) -> dict[str, float]:
    listed = list(counts)
    return {"min": min(listed), "median": statistics.median(listed), "max": max(listed)}


def _lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    slices, ranks = summary["slice_bytes"], summary["rank_seconds"]
    tasks, plans = summary["tasks_per_rank"], summary["plan_bytes"]
    slice_sizes = f"{format_bytes(slices['min'])} to {format_bytes(slices['max'])}"
    rank_times = f"median {_milliseconds(ranks['median'])}, max {_milliseconds(ranks['max'])}"
    return [
        ("mode", summary["mode"]),
        ("ranks", str(summary["ranks"])),
        ("logical ops", str(summary["logical_ops"])),
        ("boxing edges", str(summary["boxing_edges"])),
        ("boxing families", str(summary["boxing_families"])),
        ("boxing graph", format_bytes(summary["boxing_graph_bytes"])),
        ("slice", f"{slice_sizes}, {summary['distinct_slices']} distinct"),
        *(
            (f"master: {stage}", _milliseconds(spent))
            for stage, spent in summary["master_seconds"].items()
        ),
        ("per rank", rank_times),
        ("tasks per rank", f"{tasks['min']} to {tasks['max']}"),
        ("plan", f"median {format_bytes(plans['median'])}, max {format_bytes(plans['max'])}"),
        ("arena", f"max {format_bytes(summary['arena_bytes']['max'])}"),
        ("peak live", f"max {format_bytes(summary['peak_live_bytes']['max'])}"),
        ("peak RSS", f"{summary['peak_rss_mib']:.0f} MiB"),
        ("digest", summary["digest"]),
    ]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
