"""Prices of layouts, raised until they prove as much as prices can.

With a price for each layout of each value, every op chooses alone (see `certificate.py`): the
bound is the sum of the cheapest choices. It is raised by one value after another: what an op's
other choices cost beyond its cheapest one is of no use to the bound, so the op passes a share of
it on to those that read its values, as higher prices, and on the way back, to those that made
them. No step lowers the bound. This is sequential tree-reweighted message passing (V. Kolmogorov,
2006), with the shortest ways between layouts as the costs of pairs, and the price of an arc that
several readers use shared out among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plancompiler.search.linear_program import GroupArcs, LayoutProblem

MOST_SWEEPS = 120
"""After which the bound is taken as it is."""
PATIENCE = 4
"""Sweeps that together must raise the bound."""
PROGRESS = 1e-4
"""By how much of itself, so that it is worth going on."""


class _ByLayout:
    """Candidates sorted by the layout in which they make or take a value."""

    def __init__(self, layouts: np.ndarray) -> None:
        self.order = np.argsort(layouts, kind="stable")
        ordered = layouts[self.order]
        self.starts = _starts(ordered)
        self.layouts = ordered[self.starts]
        """Each once."""

    def least(self, seconds: np.ndarray) -> np.ndarray:
        """The least of the candidates of each layout."""
        return np.minimum.reduceat(seconds[self.order], self.starts)


class _Ways:
    """Arcs in one direction, sorted by where they end."""

    def __init__(self, begins: np.ndarray, ends: np.ndarray) -> None:
        self.order = np.argsort(ends, kind="stable")
        self.begins = begins[self.order]
        ordered = ends[self.order]
        self.starts = _starts(ordered)
        self.ends = ordered[self.starts]

    def spread(self, seconds: np.ndarray, arcs: np.ndarray) -> np.ndarray:
        """What each layout costs that is reached from the others, over arcs at these costs (R.
        Bellman, 1958). `seconds`: what each costs by itself; infinite for those that must be
        reached.
        """
        spread, costs = seconds.copy(), arcs[self.order]
        while len(costs):
            through = np.minimum.reduceat(spread[self.begins] + costs, self.starts)
            lower = through < spread[self.ends]
            if not lower.any():
                break
            spread[self.ends[lower]] = through[lower]
        return spread


def _starts(ordered: np.ndarray) -> np.ndarray:
    """Where each run of equals starts."""
    return np.flatnonzero(np.diff(ordered, prepend=-1))


@dataclass(slots=True)
class _Reader:
    """One operand of a class of ops, which reads a group of values."""

    price: np.ndarray
    """Per layout: what the reader pays for it, and the maker is paid, in seconds per value."""
    wanted: np.ndarray
    by_layout: _ByLayout
    contexts: list[int]
    times: int
    fixed: bool
    share: np.ndarray
    """Of each arc's cost, what these prices use."""


@dataclass(slots=True)
class _Group:
    """A group of values whose layouts have prices."""

    count: int
    """Layouts."""
    heads: np.ndarray
    tails: np.ndarray
    forth: _Ways
    back: _Ways
    made: np.ndarray
    by_layout: _ByLayout
    makers: list[int]
    readers: list[_Reader]
    left: np.ndarray
    """Of each arc's cost, what no reader's prices use."""


class PriceAscent:
    """Prices for a problem, and what each op pays under them."""

    def __init__(self, problem: LayoutProblem) -> None:
        tied = problem.tied
        self.problem = problem
        self.memory_price = 0.0
        """Seconds for each byte that a device holds."""
        self._paid = [problem.candidates[each.ops].seconds.copy() for each in tied.contexts]
        makers: list[list[int]] = [[] for _ in tied.groups]
        reading: list[dict[tuple[int, int], list[int]]] = [{} for _ in tied.groups]
        for number, context in enumerate(tied.contexts):
            for made in context.makes:
                if made >= 0:
                    makers[made].append(number)
            for operand, read in enumerate(context.reads):
                reading[read].setdefault((context.ops, operand), []).append(number)
        self._groups: list[_Group] = []
        self._makes, self._reads = np.zeros(len(tied.contexts)), np.zeros(len(tied.contexts))
        for number, arcs in enumerate(problem.groups):
            at = []
            for place in problem.readers[number]:
                reader = tied.groups[number].readers[place]
                at.append((reading[number][reader.ops, reader.operand], reader.times))
            group = _group(arcs, makers[number], at)
            self._groups.append(group)
            for each in group.readers if group.count > 1 else ():
                self._makes[group.makers] += 1
                self._reads[each.contexts] += 1

    @property
    def prices(self) -> list[list[np.ndarray]]:
        """Per group and reader, the price of each layout in seconds per value."""
        return [[reader.price for reader in group.readers] for group in self._groups]

    def bound(self) -> float:
        """Seconds that no legal layouts undercut, but for rounding; of seconds and memory where
        memory has a price.
        """
        contexts = self.problem.tied.contexts
        return sum(
            each.count * float(paid.min()) for each, paid in zip(contexts, self._paid, strict=True)
        )

    def climb(self, sweeps: int = MOST_SWEEPS) -> None:
        """Raise the bound for as long as that is worth the time, by at most so many sweeps."""
        bounds = [self.bound()]
        for _ in range(sweeps):
            self._sweep()
            bounds.append(self.bound())
            if len(bounds) > PATIENCE:
                gained = bounds[-1] - bounds[-1 - PATIENCE]
                if gained <= PROGRESS * abs(bounds[-1]):
                    return

    def set_memory_price(self, price: float) -> None:
        """Let each byte that is held cost so many seconds."""
        problem = self.problem
        for context, paid in zip(problem.tied.contexts, self._paid, strict=True):
            paid += (price - self.memory_price) * problem.candidates[context.ops].held_bytes
        self.memory_price = price

    def held_bytes(self) -> float:
        """What the cheapest choices hold; of equals, those that hold least."""
        problem, total = self.problem, 0.0
        for context, paid in zip(problem.tied.contexts, self._paid, strict=True):
            held = problem.candidates[context.ops].held_bytes
            if held.any():
                cheapest = paid <= paid.min() + 1e-9 * (abs(paid.min()) + 1e-12)
                total += context.count * float(held[cheapest].min())
        return total

    def excess(self) -> list[np.ndarray]:
        """Per class and candidate: layouts with it cost at least so much more than the bound."""
        problem = self.problem
        excess = [np.zeros(len(each.signatures)) for each in problem.candidates]
        for context, paid in zip(problem.tied.contexts, self._paid, strict=True):
            excess[context.ops] += context.count * (paid - paid.min())
        return excess

    def arc_excess(self) -> list[np.ndarray]:
        """Per group and arc: layouts whose values go this way cost at least so much more."""
        excess = []
        for group, arcs in zip(self._groups, self.problem.groups, strict=True):
            least = np.full(len(group.heads), np.inf)
            for reader in group.readers:
                if not reader.fixed:
                    falls = reader.price[group.tails] - reader.price[group.heads]
                    np.minimum(least, np.maximum(falls, 0.0), out=least)
            excess.append((group.left + least) * arcs.times)
        return excess

    def _sweep(self) -> None:
        """Pass on what is of no use where it is, once from makers to readers and once back."""
        most = np.maximum(self._makes, self._reads)
        waiting = np.where(self._makes > 0, most, 1.0)
        for group in self._groups:
            if group.count > 1:
                self._forth(group, waiting)
        waiting = most.copy()
        for group in reversed(self._groups):
            if group.count > 1:
                self._back(group, waiting)

    def _forth(self, group: _Group, waiting: np.ndarray) -> None:
        for place, reader in enumerate(group.readers):
            spare = self._spare(group.makers, group.by_layout, waiting, 1)
            layouts = group.by_layout.layouts
            spare += reader.price[layouts]
            if reader.fixed:
                price = reader.price.copy()
                price[layouts] = spare
            else:
                seconds = np.full(group.count, np.inf)
                seconds[layouts] = spare
                price = group.forth.spread(seconds, _allowed(group, place))
            self._set(group, reader, price)

    def _back(self, group: _Group, waiting: np.ndarray) -> None:
        for place, reader in enumerate(group.readers):
            spare = self._spare(reader.contexts, reader.by_layout, waiting, reader.times)
            layouts = reader.by_layout.layouts
            spare -= reader.price[layouts]
            if reader.fixed:
                price = reader.price.copy()
                price[layouts] = -spare
            else:
                seconds = np.full(group.count, np.inf)
                seconds[layouts] = spare
                price = -group.back.spread(seconds, _allowed(group, place))
                # From some layouts, such as those with halos, no way leads on.
                known = np.isfinite(price)
                price[~known] = price[known].min()
            self._set(group, reader, price)

    def _spare(
        self, contexts: Sequence[int], by_layout: _ByLayout, waiting: np.ndarray, times: int
    ) -> np.ndarray:
        """Per layout, what the ops of all these contexts can pass on, in seconds per value."""
        least: np.ndarray | None = None
        for number in contexts:
            paid = self._paid[number]
            each = by_layout.least(paid - paid.min()) * (times / waiting[number])
            waiting[number] = max(1.0, waiting[number] - 1.0)
            least = each if least is None else np.minimum(least, each)
        assert least is not None  # every group has makers, and every reader ops
        return least

    def _set(self, group: _Group, reader: _Reader, price: np.ndarray) -> None:
        change = price - reader.price
        for number in group.makers:
            self._paid[number] -= change[group.made]
        for number in reader.contexts:
            self._paid[number] += change[reader.wanted] / reader.times
        reader.price = price
        if not reader.fixed:
            share = np.maximum(price[group.heads] - price[group.tails], 0.0)
            group.left = np.maximum(group.left + (reader.share - share), 0.0)
            reader.share = share


def _group(arcs: GroupArcs, makers: list[int], at: Sequence[tuple[list[int], int]]) -> _Group:
    graph = arcs.arcs
    readers = [
        _Reader(
            np.zeros(graph.count),
            wanted,
            _ByLayout(wanted),
            contexts,
            times,
            fixed,
            np.zeros(len(graph.heads)),
        )
        for wanted, fixed, (contexts, times) in zip(arcs.wanted, arcs.fixed, at, strict=True)
    ]
    return _Group(
        graph.count,
        graph.heads,
        graph.tails,
        _Ways(graph.tails, graph.heads),
        _Ways(graph.heads, graph.tails),
        arcs.made,
        _ByLayout(arcs.made),
        makers,
        readers,
        graph.seconds.copy(),
    )


def _allowed(group: _Group, place: int) -> np.ndarray:
    """Of each arc's cost, what this reader's prices may use: what they use, and of what nobody
    uses, as much as those readers get that come after it.
    """
    waiting = sum(not reader.fixed for reader in group.readers[place:])
    return group.readers[place].share + group.left / waiting
