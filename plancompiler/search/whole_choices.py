"""What whole choices within a limit cost at least, where the linear program proves little.

The price of memory lets a part of a class be split. Where a few large tensors are split or not,
layouts that just miss the limit cost little more than the bound, though nothing between is legal.
Two things raise it: rows that hold for whole choices only (mixed-integer rounding: G. Nemhauser and
L. Wolsey, 1990), and deciding about a class in two ways (A. Land and A. Doig, 1960).
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from plancompiler.search.highs_solver import Relaxation
from plancompiler.search.linear_program import LinearProgram

MOST_CASES = 32
"""That are looked at."""
PART = 1e-6
"""Of a column or a unit, above what the solver's tolerances and rounding amount to."""
LEAST_PART = 1e-3
"""Of a unit, over which differences are divided."""


def least_of_whole_choices(program: LinearProgram, enough: float) -> float:
    """Seconds that no whole choices of a program with a limit undercut, by the solver's word: as
    many as few cases prove, at most `enough`.
    """
    held, classes = _held(program), _classes(program)
    relaxation = Relaxation(program)
    cases: list[tuple[float, int, np.ndarray]] = [(-np.inf, 0, np.zeros(program.choices, bool))]
    for number in range(1, 2 * MOST_CASES, 2):
        if not cases or cases[0][0] >= enough:
            break
        _, _, closed = heappop(cases)
        seconds, columns = relaxation.least(closed)
        row = _rounded_row(held, classes, columns) if seconds < enough else None
        if row is not None:
            relaxation.add_row(*row)
            seconds, columns = relaxation.least(closed)
        if seconds >= enough:
            continue
        split = _in_parts(held, classes, columns)
        if split is None:
            enough = seconds  # these choices may be legal
            continue
        each, amount = split
        for side in (0, 1):
            without = closed.copy()
            without[each] |= (held[each] > amount) == bool(side)
            heappush(cases, (seconds, number + side, without))
    return min(enough, cases[0][0]) if cases else enough


def _held(program: LinearProgram) -> np.ndarray:
    """What each candidate holds, over the limit."""
    held, of_memory = np.zeros(program.choices), program.rows == program.memory_row
    held[program.columns[of_memory]] = program.values[of_memory]
    return held


def _classes(program: LinearProgram) -> list[slice]:
    bounds = [*program.first_choice.tolist(), program.choices]
    return [slice(*each) for each in pairwise(bounds)]


def _in_parts(
    held: np.ndarray, classes: list[slice], columns: np.ndarray
) -> tuple[slice, float] | None:
    """The class of which the parts that hold more and less are most alike, and an amount between
    them; None where no class is in such parts.
    """
    best: tuple[float, slice, float] | None = None
    for each in classes:
        taken = held[each][columns[each] > PART]
        if np.ptp(taken):
            amount = float(taken.min() + taken.max()) / 2
            above = float(columns[each][held[each] > amount].sum())
            if best is None or abs(above - 0.5) < best[0]:
                best = abs(above - 0.5), each, amount
    return None if best is None else best[1:]


def _rounded_row(
    held: np.ndarray, classes: list[slice], columns: np.ndarray
) -> tuple[np.ndarray, float] | None:
    """Weights of candidates, and the least that whole choices have of them; None where the columns
    have no less.

    What is counted is how much less candidates hold than the most of those that the columns take
    parts of, in units of the greatest such difference.
    """
    taken = [held[each][columns[each] > PART] for each in classes]
    unit = max(float(np.ptp(each)) for each in taken)
    if not unit:
        return None
    needed = (sum(float(each.max()) for each in taken) - 1.0) / unit
    part = needed - np.floor(needed)
    if part < LEAST_PART:
        return None
    weights = np.zeros(len(held))
    for each, those in zip(classes, taken, strict=True):
        saved = (those.max() - held[each]) / unit
        whole = np.floor(saved + PART)
        weights[each] = whole + np.minimum(1.0, np.maximum(saved - whole, 0.0) / part)
    least = float(np.ceil(needed))
    return None if weights @ columns >= least - PART else (weights, least)
