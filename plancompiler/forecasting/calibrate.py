"""Calibration: a machine file of what this host does, measured by recorded runs of small jobs.

The jobs have the ops of perceptrons and transformers in several sizes. Each runs on one rank and on
two, and every kernel's time becomes a point of a curve by op, dtype and work. So kernels are
measured as steps run them: with their neighbours, in the caches that those leave. What collectives
take gives the link, what kernels take longer on two ranks gives their slowdown, and what steps take
beside kernels gives the cost of a task.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from plancompiler.costs import generic_machine
from plancompiler.errors import UsageError
from plancompiler.executor.local_run import LocalWorld
from plancompiler.executor.timeline import Timeline
from plancompiler.executor.trace import Recording
from plancompiler.forecasting.task_time import TaskTimes
from plancompiler.forecasting.traffic import received_of_task
from plancompiler.frontend import functions as f
from plancompiler.frontend import nn, optim
from plancompiler.frontend.trace import job as tracing
from plancompiler.frontend.trace import output
from plancompiler.ir import Job, Placement
from plancompiler.ir.task import TaskKind
from plancompiler.lower.compile import compile_plans
from plancompiler.plan.plan import CollectiveSpec, ComputeSpec, Plan, Stream

MOST_LOAD = 0.3
"""Of each core: the load average beyond which what is measured here says little."""
RECORDED_STEPS = 8
WARM_STEPS = 2
"""Recorded steps that do not count: the first have everything to load."""
_PER_BYTE = 4.0
"""Kernels with more operations per byte than this go by operations, others by bytes."""
_MEASURED = 'source = "calibrated", measured = true'
_PART = 'source = "part of the measured rates"'
_SYSTEM = 'source = "the operating system: cores, and memory for each"'
_SOURCES = {
    "matrix_efficiency": _PART,
    "memory_efficiency": _PART,
    "launch_seconds": _PART,
    "devices": _SYSTEM,
    "memory_bytes": _SYSTEM,
}


class Kernel(NamedTuple):
    """What a curve is of, and one place on it."""

    kind: str
    dtype: str
    flops: float
    nbytes: float


@dataclass
class Samples:
    """What recorded runs show."""

    kernels: dict[Kernel, list[float]] = field(default_factory=dict)
    """Seconds of runs of one rank."""
    together: dict[Kernel, list[float]] = field(default_factory=dict)
    """Seconds of runs of two ranks."""
    collectives: list[tuple[float, float]] = field(default_factory=list)
    """(bytes that a rank receives, seconds)."""
    task_seconds: list[float] = field(default_factory=list)
    """Between one task of a stream and the next, where nothing is waited for."""
    step_seconds: list[float] = field(default_factory=list)
    """Of a step, beside the span of its tasks."""


def check_idle(load: float, cores: int, forced: bool) -> None:
    """A UsageError where others keep the host busy, unless that is forced."""
    if load > MOST_LOAD * cores and not forced:
        raise UsageError(
            "this machine is busy, so that what is measured says little about it",
            got=f"a load average of {load:.1f} on {cores} cores",
            expected=f"at most {MOST_LOAD * cores:.1f}",
            hint="wait until it is idle, or use --force",
        )


def calibration_jobs(ranks: int) -> Iterator[Job]:
    """The jobs that are recorded."""
    placement = Placement("cpu", list(range(ranks)), ("dp",))
    for width, batch in ((32, 64), (128, 64), (512, 64), (512, 256), (1024, 128)):
        yield _perceptron(placement, width, batch * ranks)
    for dim, length, batch in ((32, 32, 4), (64, 64, 8), (128, 128, 4), (256, 64, 8)):
        yield _transformer(placement, dim, length, batch * ranks)


def _perceptron(placement: Placement, width: int, batch: int) -> Job:
    with tracing(f"perceptron-{width}-{batch}") as job:
        layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3)).place(placement)
        x = f.normal((batch, width), placement=placement).redistribute(sbp="S(0)")
        for number, layer in enumerate(layers):
            y = layer(x)
            x = f.relu(y) if number % 2 else f.tanh(y)
        loss = f.mean(x * x)
        optim.SGD(layers.parameters(), lr=0.01, momentum=0.9).minimize(loss)
        output("loss", loss)
    return job


def _transformer(placement: Placement, dim: int, length: int, batch: int) -> Job:
    with tracing(f"transformer-{dim}-{length}-{batch}") as job:
        blocks = nn.ModuleList(nn.TransformerBlock(dim, 4) for _ in range(2)).place(placement)
        x = f.normal((batch, length, dim), placement=placement).redistribute(sbp="S(0)")
        for block in blocks:
            x = block(x)
        loss = f.mean(x * x)
        optim.AdamW(blocks.parameters(), lr=1e-4).minimize(loss)
        output("loss", loss)
    return job


def record_job(job: Job, samples: Samples) -> None:
    """Run a job with a thread for each rank, and add what its timelines show."""
    plans = compile_plans(job, job.world_size).plans
    with Recording() as recording:
        with LocalWorld(plans, record=recording.folder) as world:
            walls = []
            for _ in range(RECORDED_STEPS):
                begin = time.perf_counter()
                world.run(1)
                walls.append(time.perf_counter() - begin)
        timelines = recording.timelines()
    for timeline in timelines:
        add_timeline(samples, plans[timeline.rank], timeline)
    if len(plans) == 1:
        spans = timelines[0].ends.max(axis=1) - timelines[0].begins.min(
            axis=1, where=timelines[0].begins > 0, initial=np.iinfo(np.int64).max
        )
        samples.step_seconds += [
            wall - float(span) * 1e-9 for wall, span in zip(walls, spans, strict=True)
        ][WARM_STEPS:]


def add_timeline(samples: Samples, plan: Plan, timeline: Timeline) -> None:
    """Add what a rank's timeline shows of its kernels and collectives. A UsageError for the
    timeline of another job.
    """
    if [each.id for each in timeline.tasks] != [task.id for task in plan.tasks]:
        raise UsageError(
            "a timeline is of another job",
            got=f"{timeline.job}, rank {timeline.rank}",
            expected=f"{plan.job}, rank {plan.rank}, compiled as it was",
        )
    times = TaskTimes(generic_machine())
    alone = plan.world_size == 1
    kernels = samples.kernels if alone else samples.together
    for column, (position, _) in enumerate(timeline.columns):
        task = plan.tasks[position]
        begins, ends = timeline.begins[:, column], timeline.ends[:, column]
        seconds = [
            float(end - begin) * 1e-9
            for begin, end in list(zip(begins, ends, strict=True))[WARM_STEPS:]
            if end > begin > 0
        ]
        if isinstance(task.spec, ComputeSpec):
            work = times.work(plan, task, task.spec)
            if work is not None and seconds:
                flops, nbytes, dtype = work
                kernel = Kernel(task.spec.kind, str(dtype), flops, nbytes)
                kernels.setdefault(kernel, []).extend(seconds)
        elif isinstance(task.spec, CollectiveSpec) and seconds:
            nbytes = sum(each for _, each in received_of_task(plan, task, generic_machine()))
            samples.collectives.append((nbytes, min(seconds)))
    if alone:
        samples.task_seconds += _gaps(plan, timeline)


def _gaps(plan: Plan, timeline: Timeline) -> Iterator[float]:
    """Seconds between tasks that follow each other on the compute stream."""
    columns = [
        column
        for column, (position, _) in enumerate(timeline.columns)
        if plan.tasks[position].stream is Stream.COMPUTE
        and plan.tasks[position].kind is TaskKind.COMPUTE
    ]
    for before, after in pairwise(columns):
        for end, begin in zip(
            timeline.ends[WARM_STEPS:, before], timeline.begins[WARM_STEPS:, after], strict=True
        ):
            if begin >= end > 0:
                yield float(begin - end) * 1e-9


class CurveText(NamedTuple):
    """A curve on its way into a file."""

    kind: str
    dtype: str
    work: str
    points: tuple[tuple[float, float], ...]


def curves(kernels: dict[Kernel, list[float]]) -> Iterator[CurveText]:
    """A curve for each op and dtype: the mean of each size, as means add up to steps."""
    by_op: dict[tuple[str, str], list[Kernel]] = {}
    for kernel in kernels:
        by_op.setdefault((kernel.kind, kernel.dtype), []).append(kernel)
    for (kind, dtype), measured in sorted(by_op.items()):
        by_flops = statistics.median(each.flops / max(each.nbytes, 1) for each in measured)
        work = "flops" if by_flops > _PER_BYTE else "bytes"
        points: dict[float, list[float]] = {}
        for each in measured:
            size = each.flops if work == "flops" else each.nbytes
            if size > 0:
                points.setdefault(size, []).append(statistics.fmean(kernels[each]))
        if points:
            yield CurveText(
                kind,
                dtype,
                work,
                tuple((size, statistics.fmean(points[size])) for size in sorted(points)),
            )


def slowdown(samples: Samples) -> float:
    """How much longer kernels take with another rank at work: the median over those of both."""
    ratios = [
        statistics.fmean(samples.together[each]) / statistics.fmean(samples.kernels[each])
        for each in samples.together.keys() & samples.kernels.keys()
    ]
    return max(1.0, statistics.median(ratios)) if ratios else 1.0


def link(collectives: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Latency and bandwidth of the α–β model, by least squares over what was measured."""
    pairs = [(nbytes, seconds) for nbytes, seconds in collectives if nbytes]
    generic = generic_machine().node
    if len({nbytes for nbytes, _ in pairs}) < 2:
        return generic.latency_seconds, generic.bytes_per_second
    sizes, seconds = (np.array(each) for each in zip(*pairs, strict=True))
    # Relative errors count: small collectives are many.
    design = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    (start, per_byte), *_ = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)
    # An all-reduce of two has one round each way and its start: three messages.
    latency = max(float(start), float(seconds.min()) / 2) / 3
    rate = 1.0 / per_byte if per_byte > 0 else float((sizes / seconds).max())
    return latency, float(rate)


def _rate(work: Callable[[], object], amount: float) -> float:
    """Amount per second, of the fastest of some runs."""
    best = np.inf
    for _ in range(5):
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return float(amount / best)


def calibrate(
    name: str,
    forced: bool = False,
    jobs: Callable[[int], Iterable[Job]] = calibration_jobs,
) -> str:
    """The text of a machine file of this host, by what `jobs` of so many ranks show. A UsageError
    where it is busy, unless forced.
    """
    cores = os.cpu_count() or 1
    check_idle(os.getloadavg()[0], cores, forced)
    samples = Samples()
    for ranks in (1, 2):
        for job in jobs(ranks):
            record_job(job, samples)
    size = 1 << 10
    one, other = np.ones((size, size), np.float32), np.ones((size, size), np.float32)
    wide, target = np.ones(1 << 24, np.float32), np.ones(1 << 24, np.float32)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // cores
    figures = {
        "device": {
            "memory_bytes": memory,
            "memory_bytes_per_second": _rate(
                lambda: np.add(wide, target, out=target), 3 * wide.nbytes
            ),
            "copy_bytes_per_second": _rate(lambda: np.copyto(target, wide), wide.nbytes),
            **dict.fromkeys(("matrix_efficiency", "memory_efficiency"), 1.0),
            "launch_seconds": 0.0,
        },
        "device.flops_per_second": {"float32": _rate(lambda: one @ other, 2 * size**3)},
        "node": dict(
            zip(
                ("devices", "latency_seconds", "bytes_per_second"),
                (cores, *link(samples.collectives)),
                strict=True,
            )
        ),
        "host": {
            "slowdown": slowdown(samples),
            "task_seconds": statistics.median(samples.task_seconds),
            "step_seconds": max(0.0, statistics.median(samples.step_seconds)),
        },
    }
    return machine_text(name, figures, tuple(curves(samples.kernels)))


def machine_text(
    name: str, figures: dict[str, dict[str, float]], measured: Sequence[CurveText]
) -> str:
    """A machine file of measured figures and curves."""
    lines = [f'name = "{name}"']
    for table, values in figures.items():
        lines += ["", f"[{table}]"] + (['type = "cpu"'] if table == "device" else [])
        lines += [
            f"{key} = {{ value = {value!r}, {_SOURCES.get(key, _MEASURED)} }}"
            for key, value in values.items()
        ]
    for curve in measured:
        points = ", ".join(f"[{work!r}, {seconds!r}]" for work, seconds in curve.points)
        lines += [
            "",
            "[[device.kernel]]",
            f'kind = "{curve.kind}"',
            f'dtype = "{curve.dtype}"',
            f'work = "{curve.work}"',
            f"points = [{points}]",
        ]
    return "\n".join(lines) + "\n"
