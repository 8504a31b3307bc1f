"""What tasks take by what was measured of their like.

The mean is a sum of terms that no machine undercuts: a start, and so much per operation and per
byte, none below 0, by least squares of relative errors; of transport also so much per task before
it. What is left of the measured points, in logarithms, is interpolated by kriging (Gaussian-process
regression: C. E. Rasmussen and C. K. I. Williams, 2006, algorithm 2.1, with a squared exponential
over logarithms of sizes). So near measured sizes a forecast follows what caches and narrow products
do there; far from them it is the mean. How far a point reaches and how much it scatters are chosen
by the marginal likelihood.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

Vector = np.ndarray[Any, np.dtype[np.float64]]

ALONE, THREADS, PROCESSES = "alone", "threads", "processes"
WORLDS = (ALONE, THREADS, PROCESSES)
"""Beside what a task was measured: no other rank, ranks in the same process, ranks in others."""

_REACHES = (1.0, 2.0, 4.0, 8.0)
"""Doublings of a size over which points tell of each other."""
_SCATTERS = (0.02, 0.05, 0.1, 0.2)
"""Of measured points, relative."""
_CELL = 0.5
"""Doublings of a size within which kernels count as one, by their mean: so the many small ones of a
step do not outweigh the few large ones. The work grows with the cube of the points."""
_NBYTES = 3
"""The place of bytes among sizes."""
_ANY = "*"
"""All forms together."""


class Sizes(NamedTuple):
    """What the time of a task goes by."""

    rows: float
    """Elements of the result but for its last axis."""
    columns: float
    """Of the last axis of the result."""
    flops: float
    nbytes: float
    """Read and written."""
    since: float
    """Bytes that others touched since the inputs were last in use: whether caches hold them."""


@dataclass(frozen=True, slots=True)
class MeasuredTasks:
    """Measured times of tasks of one kind."""

    kind: str
    """Of the op, or a primitive of collectives, or one of `forecasting.task_time`."""
    dtype: str
    """Empty for what has none."""
    form: str
    """Attributes that choose among a kernel's ways, such as `transpose_b`."""
    world: str
    """One of `WORLDS`."""
    points: tuple[tuple[Sizes, float], ...]
    """(sizes, seconds)"""


@dataclass(frozen=True, slots=True)
class KernelCost:
    """What kernels of one kind take where other ranks of the host are at work, too."""

    start_seconds: float
    seconds_per_flop: float
    seconds_per_byte: float
    """Read or written."""

    def seconds(self, flops: float, nbytes: float) -> float:
        """Seconds of one kernel."""
        return self.start_seconds + flops * self.seconds_per_flop + nbytes * self.seconds_per_byte


def kernel_costs(measured: Iterable[MeasuredTasks]) -> dict[tuple[str, str], KernelCost]:
    """By kind and dtype, what kernels cost on the whole: the mean over all forms and both worlds
    that have other ranks.
    """
    points: dict[tuple[str, str], list[tuple[Sizes, float]]] = {}
    for each in measured:
        if each.dtype and each.world != ALONE:
            points.setdefault((each.kind, each.dtype), []).extend(each.points)
    costs = {}
    for key, known in sorted(points.items()):
        sizes, seconds = _merged(*_arrays(known))
        design = _terms(sizes, True) / seconds[:, None]
        costs[key] = KernelCost(*(float(f"{each:.4g}") for each in _least_squares(design)))
    return costs


_Key = tuple[str, str, str, str]


class TaskModels:
    """Times of tasks by what was measured of their kinds."""

    def __init__(self, measured: Iterable[MeasuredTasks]) -> None:
        self._measured = {
            (each.kind, each.dtype, each.form, each.world): each.points for each in measured
        }
        self._models: dict[_Key, _Model | None] = {}
        self._slowdowns: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._measured)

    def seconds(
        self, kind: str, sizes: Sizes, world: str, dtype: str = "", form: str = ""
    ) -> float | None:
        """Seconds of a task: of its form where that was measured, else of all forms together, else
        as alone, by how much longer other kinds take in this world; None for a kind that was not
        measured.
        """
        model = self._model((kind, dtype, form, world)) or self._any_form(kind, dtype, world)
        if model is not None:
            return model.seconds(sizes)
        if world == ALONE:
            return None
        alone = self.seconds(kind, sizes, ALONE, dtype, form)
        return None if alone is None else alone * self.slowdown(world)

    def slowdown(self, world: str) -> float:
        """How much longer kernels take in a world than alone: the median over all points."""
        if world not in self._slowdowns:
            ratios = [
                seconds / alone
                for (kind, dtype, form, where), points in self._measured.items()
                if where == world and dtype
                for sizes, seconds in points
                if (alone := self.seconds(kind, sizes, ALONE, dtype, form)) is not None
            ]
            self._slowdowns[world] = float(np.median(ratios)) if ratios else 1.0
        return self._slowdowns[world]

    def _model(self, key: _Key) -> _Model | None:
        if key not in self._models:
            points = self._measured.get(key)
            self._models[key] = None if points is None else _Model(points, bool(key[1]))
        return self._models[key]

    def _any_form(self, kind: str, dtype: str, world: str) -> _Model | None:
        key = (kind, dtype, _ANY, world)
        if key not in self._models:
            points = tuple(
                point
                for (of, type_, _, where), points in self._measured.items()
                if (of, type_, where) == (kind, dtype, world)
                for point in points
            )
            self._models[key] = _Model(points, bool(dtype)) if points else None
        return self._models[key]


class _Model:
    """A mean and what is left of it, fitted to points."""

    def __init__(self, points: tuple[tuple[Sizes, float], ...], computes: bool) -> None:
        """`computes`: of kernels times grow with operations beyond the measured ones. Of
        transport they stand for how late members may come, and only bytes go on to count.
        """
        sizes, seconds = _arrays(points)
        if computes:
            sizes, seconds = _merged(sizes, seconds)
        self._computes = computes
        self._terms = _least_squares(_terms(sizes, computes) / seconds[:, None])
        self._places = _logarithms(sizes)
        self._longest = float(seconds.max())
        self._most = sizes.max(axis=0)
        if computes:
            self._most[:] = np.inf
        self._most[_NBYTES] = np.inf
        self._works = bool(sizes[:, :3].any())
        """Whether there is work with which times grow beyond the measured ones."""
        left = np.log(seconds / (_terms(sizes, computes) @ self._terms))
        # Where points lie far from all others, the mean of what is left holds.
        self._shift = float(left.mean())
        left -= self._shift
        self._reach, self._weights = _kriging(self._places, left)

    def seconds(self, sizes: Sizes) -> float:
        place = np.minimum(np.array([sizes], np.float64), self._most)
        near = _covariance(_logarithms(place), self._places, self._reach)
        left = float((near @ self._weights)[0])
        mean = float((_terms(place, self._computes) @ self._terms)[0])
        seconds = mean * float(np.exp(left + self._shift))
        return seconds if self._works else min(seconds, self._longest)


def _arrays(points: Sequence[tuple[Sizes, float]]) -> tuple[Vector, Vector]:
    return (
        np.array([each for each, _ in points], np.float64),
        np.array([each for _, each in points], np.float64),
    )


def _merged(sizes: Vector, seconds: Vector) -> tuple[Vector, Vector]:
    """Means of the points of each cell."""
    cells = np.round(_logarithms(sizes) / _CELL)
    _, cell_of, counts = np.unique(cells, axis=0, return_inverse=True, return_counts=True)
    sums = np.zeros((len(counts), sizes.shape[1] + 1))
    np.add.at(sums, cell_of.reshape(-1), np.column_stack([sizes, seconds]))
    means = sums / counts[:, None]
    return means[:, :-1], means[:, -1]


def _terms(sizes: Vector, computes: bool) -> Vector:
    """What the mean is a sum of. `rows` count tasks where nothing is computed. Those of kernels
    mostly grow with their bytes, so that what is due to which cannot be told.
    """
    rows, _, flops, nbytes, _ = sizes.T
    terms = [np.ones_like(rows), flops, nbytes]
    return np.stack(terms if computes else [*terms, rows], axis=1)


def _logarithms(sizes: Vector) -> Vector:
    return np.log2(1.0 + sizes)


def _least_squares(design: Vector) -> Vector:
    """Factors, none below 0, with which the terms come nearest to 1: the term furthest below 0 is
    left out until none is.
    """
    scale = np.abs(design).max(axis=0)
    scale[scale == 0] = 1.0
    kept = list(range(design.shape[1]))
    while True:
        chosen, *_ = np.linalg.lstsq(
            design[:, kept] / scale[kept], np.ones(len(design)), rcond=1e-9
        )
        worst = int(chosen.argmin())
        if chosen[worst] >= 0 or len(kept) == 1:
            break
        del kept[worst]
    factors = np.zeros(design.shape[1])
    factors[kept] = np.maximum(chosen, 0.0) / scale[kept]
    if not factors.any():
        factors[0] = 1.0 / design[:, 0].mean()
    return factors


def _covariance(one: Vector, other: Vector, reach: float) -> Vector:
    apart = ((one[:, None, :] - other[None, :, :]) ** 2).sum(axis=2)
    covariance: Vector = np.exp(-0.5 * apart / reach**2)
    return covariance


def _kriging(places: Vector, left: Vector) -> tuple[float, Vector]:
    """The reach and the weights of points of greatest marginal likelihood."""
    spread = max(float(left.std()), 1e-3)
    best: tuple[float, float, Vector] | None = None
    for reach, scatter in product(_REACHES, _SCATTERS):
        covariance = _covariance(places, places, reach)
        noise = (scatter / spread) ** 2
        factor = np.linalg.cholesky(covariance + (noise + 1e-9) * np.eye(len(places)))
        half = np.linalg.solve(factor, left)
        fit = -0.5 * float(half @ half) / spread**2 - float(
            np.log(np.diag(factor)).sum() + len(left) * np.log(spread)
        )
        if best is None or fit > best[0]:
            best = fit, reach, np.linalg.solve(factor.T, half)
    assert best is not None
    return best[1], best[2]
