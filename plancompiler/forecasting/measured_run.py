"""A run of a forecast job on this host, to compare: what it holds and what its steps take."""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from dataclasses import dataclass
from typing import Any

import numpy as np

from plancompiler.executor.local_run import LocalWorld
from plancompiler.forecasting.job_forecast import Forecast
from plancompiler.lower.compile import compile_plans

WARM_STEPS = 2
"""Steps before those that are timed."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """What a run of a job came to, its ranks as threads of this process."""

    memory_bytes: int
    """Of arrays of all ranks, once they are prepared: what NumPy took, as Python traced it."""
    step_seconds: float
    """The median of the timed steps."""
    steps: int

    def json(self, forecast: Forecast) -> dict[str, Any]:
        """As `plancompiler forecast --check --json` adds it: `measured`, and `error`, which is
        relative to what was measured.
        """
        predicted = total_memory(forecast)
        return {
            "measured": {"memory_bytes": self.memory_bytes, "step_seconds": self.step_seconds},
            "error": {
                "memory": predicted / self.memory_bytes - 1.0,
                "step": forecast.step_seconds / self.step_seconds - 1.0,
            },
        }


def total_memory(forecast: Forecast) -> int:
    """Bytes that all ranks hold."""
    return sum(each.count * each.memory.total for each in forecast.classes)


def run_measured(forecast: Forecast, steps: int) -> MeasuredRun:
    """Run the job of a forecast with a thread for each rank. A FeedError for a job that is fed."""
    plans = compile_plans(forecast.job, forecast.ranks).plans
    tracemalloc.start()
    try:
        before = _held_arrays()
        with LocalWorld(plans):
            held = _held_arrays() - before
    finally:
        tracemalloc.stop()
    # Tracing makes steps slower, so that they are timed in a run of their own.
    with LocalWorld(plans) as world:
        world.run(WARM_STEPS)
        seconds = []
        for _ in range(steps):
            begin = time.perf_counter()
            world.run(1)
            seconds.append(time.perf_counter() - begin)
    return MeasuredRun(held, statistics.median(seconds), steps)


def _held_arrays() -> int:
    """Bytes of NumPy's arrays. One without elements is given a byte, which is not counted."""
    gc.collect()
    only = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    traces = tracemalloc.take_snapshot().filter_traces([only]).traces
    return sum(trace.size for trace in traces if trace.size > 1)
