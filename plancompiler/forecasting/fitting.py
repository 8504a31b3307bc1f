"""What to change in a job that does not fit its devices: changes of its config, each forecast."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from plancompiler.errors import PlanCompilerError
from plancompiler.forecasting.job_forecast import Forecast, forecast
from plancompiler.lower.collector import collector_paused
from plancompiler.passes import Config, config_of

ENOUGH = 3
"""With so many changes that fit no more are looked for."""
MOST_MICROBATCHES = 64
MOST_COMBINATIONS = 8
"""How many changes of several settings are forecast at most."""


@dataclass(frozen=True)
class Change:
    """Settings of the compiler with which a job takes something else."""

    settings: dict[str, Any]
    forecast: Forecast

    def order(self, limit: float) -> tuple[bool, float]:
        """By which changes are sorted on devices of `limit` bytes."""
        return _order(self.forecast.worst.memory.total, self.forecast.step_seconds, limit)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())


@collector_paused()  # which else would look at all that one forecast holds after each other
def changes_of(before: Forecast) -> tuple[Change, ...]:
    """Forecasts of the job with less memory per rank: those that fit first, the fastest of them
    first, then those that come nearest.

    Tried are bfloat16, the schedule 1f1b, more micro-batches, the stages of ZeRO and recomputation,
    those first that mostly cost least, until ENOUGH of them fit. Where none is enough, or there are
    fewer, so are combinations: those first that should fit, and be the fastest, if every setting
    saves and costs the same share as it does alone. What the job cannot be compiled with is left
    out; so is what saves no memory.
    """
    limit = before.machine.device.memory_bytes
    alone: list[Change] = []
    for settings in _candidates(config_of(before.job)):
        if sum(each.forecast.fits for each in alone) >= ENOUGH:
            break
        change = _change(before, settings)
        if change is not None:
            alone.append(change)
    changes = list(alone)
    expected = sorted(_combinations(before, alone), key=lambda each: each.order(limit))
    for each in expected[:MOST_COMBINATIONS]:
        if len(changes) >= ENOUGH and any(known.forecast.fits for known in changes):
            break
        change = _change(before, each.settings)
        if change is not None:
            changes.append(change)
    return tuple(sorted(changes, key=lambda each: each.order(limit)))


def _change(before: Forecast, settings: dict[str, Any]) -> Change | None:
    job = replace(before.job, config=replace(config_of(before.job), **settings))
    try:
        after = forecast(job, before.machine, ranks=before.ranks, backend=before.backend)
    except PlanCompilerError:
        return None  # no data-parallel axis, say, or batches that cannot be cut so
    saves = after.worst.memory.total < before.worst.memory.total
    return Change(settings, after) if saves else None


@dataclass(frozen=True)
class _Combination:
    """Several settings, and what they should take together."""

    settings: dict[str, Any]
    memory_bytes: float
    seconds: float

    def order(self, limit: float) -> tuple[bool, float]:
        return _order(self.memory_bytes, self.seconds, limit)


def _order(memory_bytes: float, seconds: float, limit: float) -> tuple[bool, float]:
    """What fits comes first, the fastest of it first, and then what comes nearest."""
    fits = memory_bytes <= limit
    return (not fits, seconds if fits else memory_bytes)


def _combinations(before: Forecast, alone: list[Change]) -> Iterator[_Combination]:
    memory, seconds = before.worst.memory.total, before.step_seconds
    by_name: dict[str, list[Change]] = {}
    for each in alone:
        by_name.setdefault(next(iter(each.settings)), []).append(each)
    for count in range(2, len(by_name) + 1):
        for names in itertools.combinations(by_name, count):
            for parts in itertools.product(*(by_name[name] for name in names)):
                yield _Combination(
                    {name: value for part in parts for name, value in part.settings.items()},
                    memory * math.prod(one.forecast.worst.memory.total / memory for one in parts),
                    seconds * math.prod(one.forecast.step_seconds / seconds for one in parts),
                )


def _candidates(config: Config) -> Iterator[dict[str, Any]]:
    """Settings with which a job may take less memory, those first that mostly cost least."""
    if config.precision == "float32":
        yield {"precision": "bfloat16"}
    if config.microbatches > 1 and config.schedule == "gpipe":
        yield {"schedule": "1f1b"}
    more = [config.microbatches << power for power in (1, 2, 3)]
    more = [count for count in more if count <= MOST_MICROBATCHES]
    stages = [stage for stage in (1, 2, 3) if stage > config.zero]
    yield from ({"microbatches": count} for count in more[:1])
    yield from ({"zero": stage} for stage in stages[:1])
    if config.recompute != "auto":
        yield {"recompute": "auto"}
    yield from ({"zero": stage} for stage in stages[1:])
    yield from ({"microbatches": count} for count in more[1:])
