"""`plancompiler compile --explain`: what each pass did to a job, and what came of it; and what each
stage of a pipeline does in a step.

After each pass the job is given layouts and transport as if it were the last, so that rows can be
compared. That repeats the compiler's work per pass, which only this command does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from plancompiler.boxing.bucket_report import BucketReport, bucket_reports
from plancompiler.boxing.build import build_boxing_task_graph
from plancompiler.boxing.fuse import fuse_reductions
from plancompiler.boxing.graph import BoxingTaskGraph
from plancompiler.boxing.infer_sbp import infer_sbp
from plancompiler.boxing.report import boxing_costs
from plancompiler.boxing.slices import slice_for_rank
from plancompiler.boxing.step_time import step_time
from plancompiler.boxing.streams import choose_streams
from plancompiler.cli.output import format_bytes, print_result, print_table
from plancompiler.costs import Machine, machine_of_job
from plancompiler.ir import Job
from plancompiler.ir.pipeline import Pipeline, SegmentKind
from plancompiler.ir.task import TaskKind
from plancompiler.lower.compile import with_chosen_regions
from plancompiler.lower.rank import compile_rank
from plancompiler.passes import config_of, each_pass
from plancompiler.plan.plan import Plan
from plancompiler.simulate import simulate, slot_cost

SLOTS_SHOWN = 24
"""Slots of a stage that a table shows."""


@dataclass(frozen=True, slots=True)
class Explained:
    """The job after one step of the compiler."""

    name: str
    """A pass, `traced` for the job before all, `fuse_reductions` for boxing's own."""
    summary: str
    notes: tuple[str, ...]
    """What was left alone, and why."""
    changes: tuple[str, ...]
    """What was changed where, where the summary does not say it."""
    buckets: tuple[BucketReport, ...]
    """Of `fuse_reductions`: each reduction that there is, with what it reduces."""
    ops: int
    collectives: int
    bytes_per_rank: int
    """Received in a step by the busiest rank of each transport, added up."""
    arena_bytes: int
    """Of rank 0."""
    predicted_seconds: float
    """Of a step on the machine of the config: `plancompiler.boxing.step_time`."""


def explain(job: Job, world_size: int) -> Iterator[Explained]:
    """The job as traced, after each pass of its config, and with its reductions fused."""
    job, machine = with_chosen_regions(job, world_size), machine_of_job(job)
    graph = _boxed(job, world_size)
    yield _explained("traced", "as the program says", graph, machine)
    for record, after in each_pass(job):
        if after.ops != job.ops:
            graph = _boxed(after, world_size)
        job = after
        yield _explained(record.name, record.summary, graph, machine, record.notes, record.changes)
    before = graph
    graph, fused = fuse_reductions(graph, config_of(job).fuse_bytes, machine)
    yield _explained(
        "fuse_reductions",
        f"{fused.before} reductions became {fused.after} "
        f"({_size_of_buckets(config_of(job).fuse_bytes)})",
        graph,
        machine,
        buckets=bucket_reports(before, fused),
    )


def _size_of_buckets(fuse_bytes: int | str) -> str:
    if isinstance(fuse_bytes, str):
        return "buckets by estimated times"
    return f"buckets of up to {format_bytes(fuse_bytes)}"


def _boxed(job: Job, world_size: int) -> BoxingTaskGraph:
    graph = build_boxing_task_graph(infer_sbp(job), world_size)
    return choose_streams(graph, config_of(job).streams)


def _explained(
    name: str,
    summary: str,
    graph: BoxingTaskGraph,
    machine: Machine,
    notes: tuple[str, ...] = (),
    changes: tuple[str, ...] = (),
    buckets: tuple[BucketReport, ...] = (),
) -> Explained:
    return Explained(
        name=name,
        summary=summary,
        notes=notes,
        changes=changes,
        buckets=buckets,
        ops=len(graph.ops),
        collectives=sum(family.kind is TaskKind.COLLECTIVE_BOXING for family in graph.families),
        bytes_per_rank=sum(cost.bytes_per_rank for cost in boxing_costs(graph)),
        arena_bytes=compile_rank(slice_for_rank(graph, 0), 0).arena_bytes,
        predicted_seconds=step_time(graph, machine).seconds,
    )


def print_explained(steps: list[Explained]) -> None:
    """A table of what came of each step, and below it what each did and left alone."""
    print_table(
        ("after", ">ops", ">collectives", ">bytes a rank", ">arena of rank 0", ">predicted step"),
        (
            (
                each.name,
                each.ops,
                each.collectives,
                format_bytes(each.bytes_per_rank),
                format_bytes(each.arena_bytes),
                f"{each.predicted_seconds * 1e3:.3f} ms",
            )
            for each in steps
        ),
    )
    print_result()
    for each in steps:
        print_result(f"{each.name}: {each.summary}")
        for change in (*each.changes, *each.buckets):
            print_result(f"  + {change}")
        for note in each.notes:
            print_result(f"  - {note}")


@dataclass(frozen=True, slots=True)
class ExplainedStage:
    """A stage of a job's pipeline."""

    stage: int
    schedule: str
    slots: str
    """`F0 F1 B0`: forward, backward and weight slots by micro-batch; where a stage has several
    chunks, by chunk and micro-batch: `F2.0`."""
    in_flight: int
    """Most micro-batches (of each chunk) begun and not finished at once."""
    bubble_fraction: float | None
    """Share of the micro-batches' time in which its ranks idle, simulated with slots that all take
    as long, but a backward with its weight part twice as long; None without the plans of all ranks.
    """


def explain_pipeline(pipeline: Pipeline | None, plans: Mapping[int, Plan]) -> list[ExplainedStage]:
    """What each stage does in a step; nothing for a job without a pipeline."""
    if pipeline is None:
        return []
    bubbles = _bubbles(pipeline, plans)
    return [
        ExplainedStage(
            stage=stage,
            schedule=pipeline.schedule,
            slots=" ".join(_letters(pipeline, stage)),
            in_flight=pipeline.activations(stage),
            bubble_fraction=bubbles.get(stage),
        )
        for stage in range(pipeline.stages)
    ]


def _letters(pipeline: Pipeline, stage: int) -> Iterator[str]:
    for number, microbatch in pipeline.slots(stage):
        segment = pipeline.segments[number]
        if segment.kind.per_microbatch:
            chunk = f"{segment.chunk}." if pipeline.chunks > pipeline.stages else ""
            yield f"{segment.kind.name[0]}{chunk}{microbatch}"


def _bubbles(pipeline: Pipeline, plans: Mapping[int, Plan]) -> dict[int, float]:
    """Stage → bubble fraction of its ranks; empty where ranks are missing."""
    if any(len(plans) < plan.world_size for plan in plans.values()):
        return {}
    ranks: dict[int, list[int]] = {}
    for rank, plan in plans.items():
        stages = {each.chunk % pipeline.stages for each in plan.segments if each.chunk >= 0}
        for stage in stages:
            ranks.setdefault(stage, []).append(rank)
    weights_apart = pipeline.schedule == "zero_bubble"
    seconds = {
        SegmentKind.FORWARD: 1.0,
        SegmentKind.BACKWARD: 1.0 if weights_apart else 2.0,
        SegmentKind.WEIGHT: 1.0,
    }
    simulation = simulate(plans, slot_cost(plans, seconds))
    return {stage: simulation.bubble_fraction(ranks=those) for stage, those in ranks.items()}


def print_explained_pipeline(stages: list[ExplainedStage]) -> None:
    """A line for each stage."""
    print_table(
        (">stage", "schedule", "slots", ">in flight", ">simulated bubble"),
        (
            (
                each.stage,
                each.schedule,
                _shortened(each.slots),
                each.in_flight,
                "-" if each.bubble_fraction is None else f"{each.bubble_fraction:.1%}",
            )
            for each in stages
        ),
    )


def _shortened(slots: str) -> str:
    slots_shown = slots.split()
    more = len(slots_shown) - SLOTS_SHOWN
    return slots if more <= 0 else f"{' '.join(slots_shown[:SLOTS_SHOWN])} ... {more} more"
