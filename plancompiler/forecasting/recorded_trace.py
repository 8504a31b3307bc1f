"""A timeline's file read back, as `run --trace` and `submit --trace` write it: the job that ran,
and when each of its tasks did.

The file holds the job as text, which is compiled again: that gives the shapes and layouts that the
events do not have. They must be the plans whose digests the file holds, so that the job is the one
that the times are of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from plancompiler.costs.measured_tasks import PROCESSES, THREADS
from plancompiler.errors import UsageError, WireFormatError
from plancompiler.executor.timeline import LABELS, Timeline, register_labels, task_labels
from plancompiler.ir import verify_job
from plancompiler.ir.job_parser import parse_job
from plancompiler.ir.strict_json import JsonObject, parse_json
from plancompiler.ir.whole_file import read_file
from plancompiler.lower.compile import compile_plans
from plancompiler.ops.verify_types import verify_types
from plancompiler.plan.digest import plan_digest
from plancompiler.plan.plan import Plan

MAX_BYTES = 1 << 30
MAX_PARTS = 1 << 25
MAX_STEPS = 1 << 20

_Times = dict[tuple[str, int], dict[int, tuple[int, int]]]
"""(task, micro-batch) → step → when it began and ended, in nanoseconds."""


def read_trace(path: Path) -> tuple[dict[int, Plan], str, tuple[Timeline, ...]]:
    """Plans by rank, `threads` or `processes`, and the timelines of all ranks.

    Raises UsageError for a file that cannot be read, that does not say which job it is of, or that
    is of another one; WireFormatError for one that is damaged.
    """
    what = f"the timeline {path}"
    data = read_file("a timeline", path, pipes=True)
    trace = JsonObject(parse_json(data, what, max_bytes=MAX_BYTES, max_parts=MAX_PARTS), what)
    if not isinstance(about := trace.get("otherData"), dict) or "job" not in about:
        raise UsageError(
            "a timeline does not say which job it is of",
            got=str(path),
            expected="a file that `run --trace` or `submit --trace` has written",
        )
    run = trace.inner("otherData")
    backend = run.text("backend")
    if backend not in (THREADS, PROCESSES):
        raise run.refused("backend", backend, f"{THREADS} or {PROCESSES}")
    job = parse_job(run.text("job"), str(path))
    verify_job(job)
    verify_types(job)
    times = _times_by_rank(trace)
    if sorted(times) != list(range(len(times))) or len(times) < job.world_size:
        raise WireFormatError(
            f"{what} lacks ranks", got=f"{len(times)} ranks", expected=f"those of {job.name}"
        )
    plans = dict(compile_plans(job, len(times)).plans)
    digests = _digests(trace)
    for rank, plan in plans.items():
        if (expected := plan_digest(plan)) != digests.get(rank):
            raise UsageError(
                "a timeline is of another job",
                rank=rank,
                got=f"the plan {digests[rank]}" if rank in digests else "times of no plan",
                expected=f"the plan {expected}, which {job.name} compiles to as its text says",
                hint="learn from the file as it was written, with the version that wrote it",
            )
    return plans, backend, tuple(_timeline(plans[rank], times[rank]) for rank in sorted(plans))


def _digests(trace: JsonObject) -> dict[int, str]:
    """Of the plans of ranks."""
    return {
        event.number("pid"): event.inner("args").text("labels")
        for event in trace.objects("traceEvents")
        if event.get("ph") == "M" and event.get("name") == LABELS
    }


def _times_by_rank(trace: JsonObject) -> dict[int, _Times]:
    ranks: dict[int, _Times] = {}
    for event in trace.objects("traceEvents"):
        if event.get("ph") != "X":
            continue
        begin, lasted = event.get("ts"), event.get("dur")
        if not all(type(each) in (int, float) and 0 <= each < 1e15 for each in (begin, lasted)):
            raise event.refused("ts", begin, "microseconds")
        args = event.inner("args")
        step, microbatch = args.number("step", 0, MAX_STEPS), args.number("microbatch")
        if args.get("unfinished"):
            continue
        # A time of 0 would say that it did not happen.
        first = round(begin * 1e3) + 1
        times = ranks.setdefault(event.number("pid"), {})
        runs = times.setdefault((event.text("name"), microbatch), {})
        runs[step] = first, first + round(lasted * 1e3)
    return ranks


def _timeline(
    plan: Plan, times: Mapping[tuple[str, int], Mapping[int, tuple[int, int]]]
) -> Timeline:
    tasks = task_labels(plan)
    actions = [(task.name, run) for task in tasks for run in range(task.runs)]
    if set(times) != set(actions) or len(set(actions)) != len(actions):
        raise UsageError(
            "a timeline is of another job",
            rank=plan.rank,
            got=_strangest(times, actions),
            expected=f"the tasks of {plan.job}, compiled as its text says",
        )
    steps = sorted(set.intersection(*(set(each) for each in times.values())))
    begins, ends = np.zeros((2, len(steps), len(actions)), np.int64)
    for column, action in enumerate(actions):
        for row, step in enumerate(steps):
            begins[row, column], ends[row, column] = times[action][step]
    first = steps[0] if steps else 0
    return Timeline(plan.job, plan.rank, first, tasks, register_labels(plan), begins, ends)


def _strangest(times: Mapping[tuple[str, int], object], actions: Sequence[tuple[str, int]]) -> str:
    unknown = sorted({name for name, _ in set(times) - set(actions)})
    return f"the task {unknown[0]!r}" if unknown else f"{len(times)} tasks of {len(actions)}"
