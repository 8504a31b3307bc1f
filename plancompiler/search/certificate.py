"""What any legal layouts cost at least: a bound that needs no trust in the solver.

Prices of layouts, one per value, reader and layout, turn the choice of all layouts into one choice
per op: each op chooses alone, pays for what it wants and is paid for what it makes. Whatever the
prices, as long as no way from layout to layout costs less than their difference, the sum of the
cheapest choices is a bound of all choices (Lagrangian relaxation; A. Geoffrion, 1974). Where the
prices come from does not matter: they are made fair here. The choices are those of single ops, not
of classes of alike ops.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plancompiler.search.linear_program import GroupArcs, LayoutProblem

ROUNDING = 1e-12
"""Of the bound, more than what adding it up may have rounded away."""


def lower_bound(
    problem: LayoutProblem,
    prices: Sequence[Sequence[np.ndarray]],
    memory_price: float = 0.0,
    memory_bytes: float | None = None,
) -> float:
    """Seconds that no legal layouts of the job undercut: by prices of layouts, per group, reader
    and layout in seconds per value, and of memory, in seconds per byte, where it has a limit.
    """
    fair = [_fair(arcs, each) for arcs, each in zip(problem.groups, prices, strict=True)]
    tied = problem.tied
    total = 0.0 if memory_bytes is None else -memory_price * memory_bytes
    for context in tied.contexts:
        candidates = problem.candidates[context.ops]
        seconds = candidates.seconds.copy()
        seconds += memory_price * candidates.held_bytes
        for number in context.makes:
            if number >= 0:
                for price in fair[number]:
                    seconds -= price[problem.groups[number].made]
        for operand, number in enumerate(context.reads):
            arcs, group = problem.groups[number], tied.groups[number]
            for place, used in enumerate(problem.readers[number]):
                reader = group.readers[used]
                if (reader.ops, reader.operand) == (context.ops, operand):
                    seconds += fair[number][place][arcs.wanted[place]] / reader.times
        total += context.count * float(seconds.min())
    return total - ROUNDING * abs(total)


def _fair(arcs: GroupArcs, raw: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Prices near those given, which no way from layout to layout undercuts.

    The readers that take part in a way share what it costs: each by what its prices ask for, and of
    what is left, all alike.
    """
    graph = arcs.arcs
    flowing = [place for place, fixed in enumerate(arcs.fixed) if not fixed]
    if not flowing:
        return raw
    costs = graph.seconds
    asked = np.array(
        [np.maximum(raw[place][graph.heads] - raw[place][graph.tails], 0) for place in flowing]
    )
    total = asked.sum(axis=0)
    shares = asked * np.minimum(1.0, costs / np.maximum(total, 1e-300))
    shares += np.maximum(costs - shares.sum(axis=0), 0.0) / len(flowing)
    fair = list(raw)
    for place, share in zip(flowing, shares, strict=True):
        price = raw[place].copy()
        while True:
            before = price.copy()
            np.minimum.at(price, graph.heads, price[graph.tails] + share)
            if np.array_equal(before, price):
                break
        fair[place] = price
    return fair
