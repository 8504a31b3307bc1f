"""A run of a job on this host, to learn from or to compare with: what it holds, what goes between
its ranks, what steps take.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from plancompiler.executor.local_run import LocalWorld
from plancompiler.executor.timeline import Timeline
from plancompiler.forecasting.counted_wire import CountedWorld
from plancompiler.forecasting.job_forecast import Forecast
from plancompiler.ir import Job
from plancompiler.lower.compile import compile_plans
from plancompiler.plan.plan import Plan

WARM_STEPS = 7
"""Steps before those that are timed."""
RUN_SECONDS = 0.5
"""For about which a job is timed, where nothing else is asked for."""
LEAST_STEPS, MOST_STEPS = 15, 255
QUARTILE = 0.25
"""Which quantile of the steps is said to be what a step takes: what else the machine does only adds
to it."""


class RunningJob(Protocol):
    """A job at work, such as a session."""

    @property
    def step_seconds(self) -> list[float]:
        """Of each step so far."""

    @property
    def plans(self) -> Mapping[int, Plan]:
        """By rank."""

    def run(self, steps: int) -> Iterable[object]:
        """Run so many steps; what they put out."""

    def timelines(self) -> tuple[Timeline, ...]:
        """What was recorded."""


class Open(Protocol):
    """Starts a job; `plancompiler.running.session.run` does."""

    def __call__(
        self, job: Job, ranks: int, backend: str, *, record: bool, cache: bool
    ) -> AbstractContextManager[RunningJob]:
        """The job at work on so many ranks, `threads` or `processes`."""


def run_steps(running: RunningJob, steps: int | None = None) -> float:
    """Run a job warm, and then for so many steps, or about RUN_SECONDS; the seconds of a step."""
    for _ in running.run(WARM_STEPS):
        pass
    if steps is None:
        wanted = int(RUN_SECONDS / max(running.step_seconds[-1], 1e-6))
        steps = min(MOST_STEPS, max(LEAST_STEPS, wanted))
    before = len(running.step_seconds)
    for _ in running.run(steps):
        pass
    return float(np.quantile(running.step_seconds[before:], QUARTILE))


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """What a run of a job came to."""

    memory_bytes: int
    """Of arrays of all ranks, once they are prepared as threads: what NumPy took, as Python traced
    it."""
    traffic_bytes: int
    """Of data that came to all ranks in a step, counted where threads that share no memory handed
    it over."""
    step_seconds: float
    """The lower quartile of the timed steps."""

    def json(self, forecast: Forecast) -> dict[str, Any]:
        """As `plancompiler forecast --check --json` adds it: `measured`, and `error`, which is
        relative to what was measured.
        """
        return {
            "measured": {
                "memory_bytes": self.memory_bytes,
                "traffic_bytes": self.traffic_bytes,
                "step_seconds": self.step_seconds,
            },
            "error": {
                "memory": _error(total_memory(forecast), self.memory_bytes),
                "traffic": _error(forecast.traffic_bytes, self.traffic_bytes),
                "step": _error(forecast.step_seconds, self.step_seconds),
            },
        }


def _error(predicted: float, measured: float) -> float:
    """Relative to what was measured, or where that is nothing, to what was predicted."""
    return (predicted - measured) / (measured or predicted or 1.0)


def total_memory(forecast: Forecast) -> int:
    """Bytes that all ranks hold."""
    return sum(each.count * each.memory.total for each in forecast.classes)


def run_measured(forecast: Forecast, opened: Open, steps: int | None = None) -> MeasuredRun:
    """Run the job of a forecast as its `backend` says. A FeedError for a job that is fed."""
    held = held_memory(forecast)
    # Tracing and counting make steps slower, so that they are timed in a run of their own.
    seconds = step_of(forecast, opened, steps)
    return MeasuredRun(held, sent_payload(forecast), seconds)


def step_of(forecast: Forecast, opened: Open, steps: int | None = None) -> float:
    """What a step of the job of a forecast takes, in seconds."""
    with opened(
        forecast.job, forecast.ranks, forecast.backend, record=False, cache=False
    ) as running:
        return run_steps(running, steps)


def held_memory(forecast: Forecast) -> int:
    """Bytes of arrays of all ranks, once they are prepared."""
    plans = compile_plans(forecast.job, forecast.ranks).plans
    tracemalloc.start()
    try:
        before = held_arrays()
        with LocalWorld(plans):
            return held_arrays() - before
    finally:
        tracemalloc.stop()


def sent_payload(forecast: Forecast) -> int:
    """Bytes of data that go between all ranks in a step."""
    with CountedWorld(compile_plans(forecast.job, forecast.ranks).plans) as world:
        return world.payload_of_step().total()


def held_arrays() -> int:
    """Bytes of NumPy's arrays. One without elements is given a byte, which is not counted."""
    gc.collect()
    only = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    traces = tracemalloc.take_snapshot().filter_traces([only]).traces
    return sum(trace.size for trace in traces if trace.size > 1)
