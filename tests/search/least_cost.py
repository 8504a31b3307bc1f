"""The least that any legal layouts of a job cost, without the search's linear program.

Every op's choice is a variable, every op and every value a table of costs over the choices that it
depends on. The least sum is that of all combinations, where they are few. Where they are many, one
variable after another is minimised out of the tables that have it (U. Bertelè and F. Brioschi,
Nonserial Dynamic Programming, 1972), which is exact, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plancompiler.search.linear_program import LayoutProblem
from tests.search.many_layouts import BoxingPrices

MOST_CELLS = 400_000
"""Of a table."""


@dataclass(frozen=True)
class Table:
    """Costs over the choices of some ops."""

    ops: tuple[int, ...]
    """In ascending order; an axis for each."""
    seconds: np.ndarray


def least_of_all(problem: LayoutProblem) -> float:
    """By looking at every combination of signatures."""
    counts = _counts(problem)
    tables = _tables(problem, counts)
    assert tables is not None
    return float(_joined(tables, counts).seconds.min())


def least_by_elimination(problem: LayoutProblem) -> float | None:
    """By dynamic programming; None where it would take a table of more than `MOST_CELLS`."""
    counts = _counts(problem)
    tables = _tables(problem, counts)
    if tables is None:
        return None
    left = {op for table in tables for op in table.ops}
    while left:
        touched = {op: {each for t in tables if op in t.ops for each in t.ops} for op in left}
        sizes = {op: math.prod(counts[each] for each in touched[op]) for op in left}
        op = min(left, key=lambda each: (sizes[each], each))
        if sizes[op] > MOST_CELLS:
            return None
        joined = _joined([each for each in tables if op in each.ops], counts)
        place = joined.ops.index(op)
        rest = joined.ops[:place] + joined.ops[place + 1 :]
        tables = [each for each in tables if op not in each.ops]
        tables.append(Table(rest, joined.seconds.min(axis=place)))
        left.remove(op)
    return float(sum(table.seconds for table in tables))


def combinations_of(problem: LayoutProblem) -> int:
    """How many there are."""
    return math.prod(_counts(problem))


def _counts(problem: LayoutProblem) -> list[int]:
    return [len(each.signatures) for each in problem.candidates]


def _joined(tables: Sequence[Table], counts: Sequence[int]) -> Table:
    ops = tuple(sorted({op for table in tables for op in table.ops}))
    total = np.zeros([counts[op] for op in ops])
    for table in tables:
        axes = [counts[op] if op in table.ops else 1 for op in ops]
        total += table.seconds.reshape(axes)
    return Table(ops, total)


def _tables(problem: LayoutProblem, counts: Sequence[int]) -> list[Table] | None:
    """None where a value depends on too many combinations."""
    tables = [
        Table((number,) if len(each.signatures) > 1 else (), each.seconds.squeeze())
        for number, each in enumerate(problem.candidates)
    ]
    prices = BoxingPrices()
    for group, arcs, used in zip(problem.tied.groups, problem.groups, problem.readers, strict=True):
        readers = [group.readers[place].ops for place in used]
        ops = tuple(sorted({group.maker, *readers}))
        if math.prod(counts[op] for op in ops) > MOST_CELLS:
            return None
        choices = dict(zip(ops, np.indices([counts[op] for op in ops]), strict=True))
        made = arcs.made[choices[group.maker]].reshape(-1)
        wanted = [
            each[choices[op]].reshape(-1) for op, each in zip(readers, arcs.wanted, strict=True)
        ]
        seconds = prices.of_many(arcs.arcs, np.array([made, *wanted]))
        for fixed, each in zip(arcs.fixed, wanted, strict=True):
            if fixed:
                seconds[each != made] = math.inf
        kept = tuple(op for op in ops if counts[op] > 1)
        tables.append(Table(kept, seconds.reshape([counts[op] for op in kept])))
    return tables
