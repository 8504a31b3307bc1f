"""Learning rates that who runs a job feeds, in place of those that the job's ops compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from plancompiler.errors import FeedError
from plancompiler.executor.memory import Array

Rates = Mapping[int, Sequence[float]]
"""By the number of an optimizer its rates, one for each step of a run."""

FEED = "plancompiler.learning_rates"
"""Under this name they travel beside the arrays that a step is fed."""


class FedRates:
    """The rates of the steps of one run; see `KernelContext.rates`."""

    def __init__(self) -> None:
        self._rates: Rates = {}
        self._first = 0

    def feed(self, rates: Rates, first_step: int, steps: int) -> None:
        """Have these for the steps that come next. FeedError where they are not one per step."""
        for optimizer, values in rates.items():
            if len(values) != steps:
                raise FeedError(
                    f"optimizer {optimizer} needs a learning rate for each step",
                    got=f"{len(values)} rates",
                    expected=f"{steps} rates",
                )
        self._rates, self._first = rates, first_step

    def __call__(self, optimizer: int, step: int) -> float | None:
        values = self._rates.get(optimizer)
        return None if values is None else values[step - self._first]


def rates_to_feeds(rates: Rates) -> dict[str, Array]:
    """Rates as an array to feed: a row for each optimizer, with its number in front."""
    rows = [[float(optimizer), *values] for optimizer, values in rates.items()]
    return {FEED: np.array(rows, np.float64)} if rows else {}


def rates_from_feeds(feeds: Mapping[str, Array]) -> dict[int, list[float]]:
    """The rates that are among feeds. FeedError where they are none."""
    array = feeds.get(FEED)
    if array is None:
        return {}
    if array.ndim != 2 or array.dtype != np.float64 or not np.isfinite(array).all():
        raise FeedError(
            "learning rates do not fit", got=f"{array.dtype}{list(array.shape)}", expected="float64"
        )
    return {int(number): values for number, *values in array.tolist()}
