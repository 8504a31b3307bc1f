"""What any legal layouts cost at least: a bound that needs no trust in the solver.

Prices of layouts, one per value, reader and layout, turn the choice of all layouts into one choice
per op: each op chooses alone, pays for what it wants and is paid for what it makes. Whatever the
prices, as long as no way from layout to layout costs less than their difference, the sum of the
cheapest choices is a bound of all choices (Lagrangian relaxation; A. Geoffrion, 1974). The solver's
duals are such prices, once rounding is taken out of them here. The choices are those of single ops,
not of classes of alike ops.
"""

from __future__ import annotations

import numpy as np

from plancompiler.search.linear_program import GroupArcs, LayoutProblem, LinearProgram


def lower_bound(problem: LayoutProblem, program: LinearProgram, duals: np.ndarray) -> float:
    """Seconds that no legal layouts of the job undercut, by the duals of the program's rows."""
    prices = []
    for arcs, rows in zip(problem.groups, program.first_row, strict=True):
        raw = [duals[row : row + arcs.arcs.count] for row in rows]
        prices.append(_fair(arcs, raw))
    memory = 0.0
    if program.memory_row is not None:
        memory = max(0.0, -float(duals[program.memory_row]))
    tied = problem.tied
    total = -memory
    held = np.zeros(0)
    if memory:
        held = np.zeros(len(program.costs))
        of_row = program.rows == program.memory_row
        held[program.columns[of_row]] = program.values[of_row]
    for context in tied.contexts:
        candidates = problem.candidates[context.ops]
        seconds = candidates.seconds.copy()
        if memory:
            first = program.first_choice[context.ops]
            count = len(tied.classes[context.ops])
            seconds += memory * held[first : first + len(seconds)] / count
        for number in context.makes:
            if number >= 0:
                arcs = problem.groups[number]
                for each in prices[number]:
                    seconds -= each[arcs.made] / arcs.times
        for operand, number in enumerate(context.reads):
            arcs, group = problem.groups[number], tied.groups[number]
            for place, used in enumerate(problem.readers[number]):
                reader = group.readers[used]
                if (reader.ops, reader.operand) == (context.ops, operand):
                    price = prices[number][place][arcs.wanted[place]]
                    seconds += price / (arcs.times * reader.times)
        total += context.count * float(seconds.min())
    return total


def _fair(arcs: GroupArcs, raw: list[np.ndarray]) -> list[np.ndarray]:
    """Prices near those given, which no way from layout to layout undercuts.

    The readers that take part in a way share what it costs: each by what its prices ask for, and of
    what is left, all alike.
    """
    graph = arcs.arcs
    flowing = [place for place, fixed in enumerate(arcs.fixed) if not fixed]
    if not flowing:
        return raw
    costs = graph.seconds * arcs.times
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
