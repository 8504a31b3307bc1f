"""What to change in a job that does not fit its devices: changes of its config, each forecast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from plancompiler.errors import PlanCompilerError
from plancompiler.forecasting.job_forecast import Forecast, forecast
from plancompiler.passes import Config, config_of

MOST_MICROBATCHES = 64


@dataclass(frozen=True)
class Change:
    """Settings of the compiler with which a job takes something else."""

    settings: dict[str, Any]
    forecast: Forecast

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())


def changes_of(before: Forecast) -> tuple[Change, ...]:
    """Forecasts of the job with less memory per rank: those that fit first, the fastest of them
    first, then those that come nearest.

    Tried are the stages of ZeRO, recomputation, more micro-batches, bfloat16, and pairs of the
    first two. What the job cannot be compiled with is left out; so is what saves no memory.
    """
    changes = []
    for settings in _candidates(config_of(before.job)):
        job = replace(before.job, config=replace(config_of(before.job), **settings))
        try:
            after = forecast(job, before.machine, ranks=before.ranks)
        except PlanCompilerError:
            continue  # no data-parallel axis, say, or batches that cannot be cut so
        if after.worst.memory.total < before.worst.memory.total:
            changes.append(Change(settings, after))
    return tuple(
        sorted(
            changes,
            key=lambda each: (
                not each.forecast.fits,
                each.forecast.step_seconds
                if each.forecast.fits
                else float(each.forecast.worst.memory.total),
            ),
        )
    )


def _candidates(config: Config) -> Iterator[dict[str, Any]]:
    stages = [{"zero": stage} for stage in (1, 2, 3) if stage > config.zero]
    recompute: dict[str, Any] = {"recompute": "auto"}
    again = [recompute] if config.recompute != "auto" else []
    yield from stages
    yield from again
    yield from ({**stage, **each} for stage in stages for each in again)
    count = 2 * config.microbatches
    while count <= min(MOST_MICROBATCHES, 8 * config.microbatches):
        yield {"microbatches": count}
        count *= 2
    if config.precision == "float32":
        yield {"precision": "bfloat16"}
