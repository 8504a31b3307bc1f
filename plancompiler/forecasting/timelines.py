"""A forecast's step over time, small enough to draw: what ranks do, and the memory they use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from plancompiler.forecasting.job_forecast import COMMUNICATION, Forecast
from plancompiler.forecasting.user_lines import written
from plancompiler.ir.task import unpack_id
from plancompiler.plan.memory_report import memory_report
from plancompiler.plan.plan import CollectiveSpec, ComputeSpec, Plan, Stream, Task
from plancompiler.simulate.simulation import Run

SEVERAL = "several tasks"
MOST_BARS = 24_000
"""Of all rows together."""
MOST_POINTS = 40_000
"""Of all curves together."""
POINTS = 600
"""Of a curve, where there are few."""
COMMUNICATING = "communication"


@dataclass(frozen=True, slots=True)
class Bar:
    """A rank does one thing, or several short ones."""

    begin: float
    """Seconds since the step began."""
    end: float
    kind: str
    """Of its segment, such as `forward`; or `communication`."""
    label: str


@dataclass(frozen=True, slots=True)
class Row:
    """What a rank computes, or what it communicates."""

    rank: int
    what: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Bytes that a rank of a class uses."""

    rank: int
    nbytes: tuple[int, ...]
    """The most in each of equal parts of the step."""


def step_window(forecast: Forecast) -> tuple[float, float]:
    """When the last simulated step begins and ends: from the end of the step before, some of whose
    successor's tasks have run by then.
    """
    simulation = forecast.simulation
    last = simulation.last_step
    before = (run.end for run in simulation.runs if run.step < last)
    return max(before, default=0.0), simulation.makespan


def rows_of(forecast: Forecast) -> tuple[Row, ...]:
    """Two rows for each simulated rank. Neighbours that are too short to see are joined."""
    start, stop = step_window(forecast)
    bars: dict[tuple[int, str], list[Bar]] = {}
    for rank in forecast.simulation.plans:
        for what in ("computation", COMMUNICATING):
            bars[rank, what] = []
    for run in _in_order(forecast):
        begin = max(run.begin, start)
        if run.end <= begin:
            continue
        plan = forecast.simulation.plans[run.rank]
        segment = plan.segments[run.task.segment]
        moves = run.task.kind in COMMUNICATION
        label = (
            f"{segment}, micro-batch {run.microbatch}"
            if segment.kind.per_microbatch and not moves
            else what_runs(run.task)
        )
        kind = COMMUNICATING if moves else str(segment.kind)
        row = bars[run.rank, COMMUNICATING if moves else "computation"]
        row.append(Bar(begin - start, run.end - start, kind, label))
    most = max(1, MOST_BARS // len(bars))
    return tuple(
        Row(rank, what, tuple(_joined(row, most, stop - start)))
        for (rank, what), row in bars.items()
    )


def _in_order(forecast: Forecast) -> list[Run]:
    return sorted(forecast.simulation.runs, key=lambda run: run.begin)


def what_runs(task: Task) -> str:
    """A task's op or primitive, and the user's line."""
    spec = task.spec
    if isinstance(spec, ComputeSpec):
        what = spec.kind
    else:
        what = str(spec.primitive if isinstance(spec, CollectiveSpec) else task.kind)
    return f"{what} {written(task.source)}".rstrip()


def _joined(bars: list[Bar], most: int, span: float) -> list[Bar]:
    grain = span * 1e-9
    joined = _join(bars, grain)
    while len(joined) > most:
        grain = max(2 * grain, span / 4096)
        joined = _join(joined, grain)
    return joined


def _join(bars: Iterable[Bar], grain: float) -> list[Bar]:
    """Joins neighbours that do the same, and different ones if both are shorter than the grain."""
    joined: list[Bar] = []
    for bar in bars:
        before = joined[-1] if joined else None
        if before is None or bar.begin - before.end > grain:
            joined.append(bar)
        elif bar.label == before.label:
            joined[-1] = replace(before, end=max(bar.end, before.end))
        elif max(bar.end - bar.begin, before.end - before.begin) < grain:
            joined[-1] = replace(before, end=max(bar.end, before.end), label=SEVERAL)
        else:
            joined.append(bar)
    return joined


def memory_curves(forecast: Forecast) -> tuple[MemoryCurve, ...]:
    """One for each class of ranks: variables, what transport takes, and what is alive of the arena
    when tasks of its compute stream run.

    What segments of a pipeline carry to others counts with all its slots (`memory_report`).
    """
    start, stop = step_window(forecast)
    by_rank: dict[int, list[Run]] = {}
    for run in _in_order(forecast):
        # Other streams run ahead: their place in the plan does not tell what is alive.
        if run.task.stream is Stream.COMPUTE:
            by_rank.setdefault(run.rank, []).append(run)
    classes = forecast.rank_classes.classes
    points = max(2, min(POINTS, MOST_POINTS // len(classes)))
    width = (stop - start) / points or 1.0
    curves = []
    for each, known in zip(classes, forecast.classes, strict=True):
        fixed = known.memory.total - known.memory.activations
        live = _live(each.plan)
        tops: list[int | None] = [None] * points
        ends = [0] * points
        last = 0
        for run in by_rank.get(each.simulated, ()):
            alive = live.get(unpack_id(run.task.id)[1:])
            if alive is None:
                continue
            if run.begin < start:
                last = alive
                continue
            point = min(points - 1, int((run.begin - start) / width))
            before = tops[point]
            tops[point] = alive if before is None else max(before, alive)
            ends[point] = alive
        filled = []
        for point, top in enumerate(tops):
            filled.append(fixed + (last if top is None else max(top, last)))
            last = last if top is None else ends[point]
        curves.append(MemoryCurve(known.rank, tuple(filled)))
    return tuple(curves)


def _live(plan: Plan) -> Mapping[tuple[int, ...], int]:
    """Task without its rank → bytes alive while it runs."""
    report = memory_report(plan)
    return {
        tuple(unpack_id(task.id)[1:]): alive
        for task, alive in zip(plan.tasks, report.live, strict=True)
    }
