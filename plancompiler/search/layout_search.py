"""The best layouts of a job on its mesh, with a bound on what any others cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from plancompiler.ir import Job, NdSbp
from plancompiler.ops.rule import NdSignature
from plancompiler.search.certificate import lower_bound
from plancompiler.search.highs_solver import solve
from plancompiler.search.infeasible import why_nothing_fits
from plancompiler.search.layout_arcs import LayoutArcs, least_seconds
from plancompiler.search.linear_program import (
    LayoutProblem,
    column_count,
    layout_problem,
    linear_program,
)
from plancompiler.search.narrowed_problem import affordable, narrowed_problem
from plancompiler.search.price_ascent import PATIENCE, PriceAscent
from plancompiler.search.tied_ops import TiedGraph, tie_ops
from plancompiler.search.whole_choices import least_of_whole_choices

ROUNDS = (2, 4, 8)
"""Of refinement, one after another, until the gap is small."""
GAP = 0.01
"""The difference between the layouts and the bound, over the layouts, that is good enough."""
KEPT = 16
"""Jobs whose layouts are kept."""
FEW_CANDIDATES = 2
"""Per class, among which layouts are looked for first."""
CLOSE = 1e-3
"""The gap at which no more candidates are looked at, where there are many."""
MANY = 1000
"""Candidates up to which the best layouts are searched for, whatever the gap."""
MOST_COLUMNS = 60_000
"""Of a linear program that is solved although the gap is good enough."""
HALVINGS = 4
"""Of what layouts may cost above the bound, to look at fewer of them first."""
EASILY_LIMITED = 10_000
"""Of one with a limit of memory that takes seconds: what costs little more than the bound is looked
at first, so that better layouts leave less to look at."""
MOST_LIMITED = 20_000
"""Of one with a limit of memory, which takes minutes beyond that, once layouts are known."""
PRICES = 24
"""Of memory that are tried, at most."""
SETTLED_FACTOR, SETTLED_SWEEPS = 1.1, 12
"""From one price of memory to the next, and sweeps at each, once prices of layouts have settled."""
FEW_OPS = 300
"""Ops up to which the search goes on until the gap is `CLOSE`: that takes next to no time, unless
memory has a limit and there are many candidates."""
NEARLY_ALL = 0.75
"""Of the ops that many classes are not worth a search of their own."""
MOST_OPS = 2000
"""Ops up to which each is decided about by itself where few rounds leave a gap."""


@dataclass(frozen=True)
class LayoutSearch:
    """What a search found."""

    job: Job
    signatures: tuple[NdSignature, ...]
    """Of the job's ops."""
    objective_seconds: float
    bound_seconds: float
    """No legal layouts of the job cost less."""
    variables: int
    """Columns of the linear program."""
    classes: int
    """Ops that were decided about."""
    seconds: float
    held_bytes: float
    """What a device holds for the whole step: variables, and what backward computation reads."""
    times: Mapping[str, int]
    """Per value, how many are like it."""
    split_parameters: bool = False
    whole: Mapping[str, int] | None = None
    """As they were given to `search_layouts`."""

    @property
    def gap(self) -> float:
        """By how much the objective may be too high, over itself."""
        if not self.objective_seconds:
            return 0.0
        return max(0.0, 1.0 - self.bound_seconds / self.objective_seconds)

    def layouts(self) -> dict[str, NdSbp]:
        """The layout of each value."""
        return {
            value.name: sbp
            for op, signature in zip(self.job.ops, self.signatures, strict=True)
            for value, sbp in zip(op.outputs, signature.outputs, strict=True)
        }


def search_layouts(
    job: Job,
    memory_bytes: float | None = None,
    without: tuple[str, NdSbp] | None = None,
    certify: bool = True,
    split_parameters: bool = False,
    whole: Mapping[str, int] | None = None,
    tied: TiedGraph | None = None,
) -> LayoutSearch:
    """The cheapest legal layouts of all ops of a job, by the additive objective: the work of a
    device, and the boxing of all values, one after another.

    What the user has placed stays. Without `certify` the bound may be far from what is possible,
    though the layouts are as good. `without` names a value and a layout that it must not have.
    With `split_parameters` large parameters are in as many pieces as can be. `whole` has axes of
    values, by their names, that are not split. `tied` are the job's ops after the first rounds,
    where they are known.
    UsageError where nothing fits.
    """
    begin = time.perf_counter()
    first, *finer = ROUNDS
    tries: list[int | None] = [first, None] if len(job.ops) <= MOST_OPS else [first, *finer]
    best: LayoutSearch | None = None
    tied = tied or tie_ops(job, first)
    if len(job.ops) <= MOST_OPS and len(tied.classes) > NEARLY_ALL * len(job.ops):
        tries = [None]  # hardly less to decide about than each op by itself
    for rounds in tries:
        problem = layout_problem(
            tied if rounds == first else tie_ops(job, rounds),
            without=without,
            split_parameters=split_parameters,
            whole=whole,
        )
        result = _search(problem, memory_bytes, begin)
        if result is not None and (best is None or result.gap < best.gap):
            best = replace(result, split_parameters=split_parameters, whole=whole)
        few = len(job.ops) <= FEW_OPS and (memory_bytes is None or not _has_many(problem))
        if best is not None and (best.gap <= (CLOSE if few else GAP) or not (certify or few)):
            break
    if best is None:
        raise why_nothing_fits(job, memory_bytes)
    return best


def known_layouts(job: Job, memory_bytes: float | None = None) -> tuple[NdSignature, ...]:
    """The signatures of `search_layouts`, without a good bound. Those of the latest jobs are kept:
    a job is compiled again for a forecast, or with another recomputation.
    """
    signatures = _KNOWN.get((str(job), memory_bytes))
    if signatures is None:
        result = search_layouts(job, memory_bytes, certify=False)
        keep_layouts(result, memory_bytes)
        signatures = result.signatures
    return signatures


def keep_layouts(result: LayoutSearch, memory_bytes: float | None) -> None:
    """Let `known_layouts` know them."""
    _KNOWN[str(result.job), memory_bytes] = result.signatures
    for oldest in list(_KNOWN)[:-KEPT]:
        _KNOWN.pop(oldest, None)


_KNOWN: dict[tuple[str, float | None], tuple[NdSignature, ...]] = {}


def _search(
    problem: LayoutProblem, memory_bytes: float | None, begin: float
) -> LayoutSearch | None:
    """The best layouts that these classes have in common; None where none fits.

    Prices of layouts are raised first. A linear program then decides among the few candidates that
    are not too dear by these prices; where its layouts cost more than those that were left out at
    least do, among more of them.
    """
    tied = problem.tied
    if not all(each.signatures for each in problem.candidates):
        return None
    if memory_bytes is not None and least_bytes(problem) > memory_bytes:
        return None
    ascent = PriceAscent(problem)
    ascent.climb()
    if memory_bytes is not None:
        _price_memory(ascent, memory_bytes)
    best: tuple[float, list[int]] | None = None
    solved = 0.0  # what the solver knows of layouts that classes have in common
    count = FEW_CANDIDATES * len(problem.candidates)
    many = _has_many(problem)
    close = CLOSE if many else 0.0
    # With a limit the program is hard to solve: what is nearly as good is not looked for.
    enough = 0.9 * GAP if many and memory_bytes is not None else 0.0
    refused = 0.0  # margin above the bound within which nothing is legal
    alone = len(tied.classes) == len(tied.job.ops)  # each op is decided about by itself
    near_ones = True  # whether layouts a little above the bound may be better than the best known
    is_settled = False  # whether the price of memory was searched again
    while True:
        if best is not None and not is_settled:
            is_settled = _price_memory_again(ascent, memory_bytes, (1 - GAP) * best[0])
        most = affordable(ascent, count)
        if best is None and refused:
            # Many candidates may be as cheap as the best ones: all of them at once would be too
            # much for the solver, where a little more than the bound is enough.
            little = CLOSE * _bound(ascent, memory_bytes)
            if memory_bytes is not None or _columns(ascent, little) > MOST_COLUMNS:
                little *= 0.1
            more = max(4 * refused, little)
            most = min(most, more) if more < _bound(ascent, memory_bytes) else np.inf
        if best is not None:
            most = min(most, max(0.0, (1 - enough) * best[0] - _bound(ascent, memory_bytes)))
        narrowed = narrowed_problem(ascent, most)
        less = None
        if best is not None and memory_bytes is not None and near_ones:
            less = _less(ascent, most, column_count(narrowed))
        if less is not None:
            most, narrowed = less, narrowed_problem(ascent, less)
        left_out = _bound(ascent, memory_bytes) + most  # what is not looked at costs more
        if best is not None:
            near = best[0] - _bound(ascent, memory_bytes) <= GAP * best[0]
            limited = memory_bytes is not None
            if column_count(narrowed) > (
                MOST_LIMITED if limited else MOST_COLUMNS if near else np.inf
            ):
                break
        wanted = np.inf if best is None else (1 - enough) * best[0]
        places, bound = _least(ascent, narrowed, memory_bytes, wanted)
        solved = max(solved, min(left_out, bound))
        before = best
        if places is None:
            refused = max(refused, most)
        else:
            cost = _tied_seconds(problem, places)
            if best is None or cost < best[0]:
                best = cost, places
        near_ones = less is None or best is not before
        bound = _bound(ascent, memory_bytes)
        if most == np.inf or (
            best and (1 - enough) * best[0] <= max(left_out, solved, bound + close * best[0])
        ):
            break
        if best is not None and memory_bytes is not None and count > MANY and not alone:
            break  # it is memory that leaves a gap, as a class is split as a whole
        if less is None:
            count *= 4
    if best is None:
        return None
    held = sum(
        float(each.held_bytes[place]) * len(members)
        for each, place, members in zip(problem.candidates, best[1], tied.classes, strict=True)
    )
    if not is_settled:
        _price_memory_again(ascent, memory_bytes, (1 - GAP) * best[0])
    bound = lower_bound(problem, ascent.prices, ascent.memory_price, memory_bytes)
    if alone:
        bound = max(bound, solved)
        wanted = (1 - 0.9 * GAP) * best[0]
        if memory_bytes is not None and bound < (1 - GAP) * best[0]:
            narrowed = narrowed_problem(ascent, wanted - _bound(ascent, memory_bytes))
            if column_count(narrowed) <= MOST_COLUMNS:
                program = linear_program(narrowed, memory_bytes)
                bound = max(bound, least_of_whole_choices(program, wanted))
    bound = min(bound, best[0])  # they are sums of the same numbers in another order
    return LayoutSearch(
        tied.job,
        _signatures(problem, best[1]),
        best[0],
        bound,
        column_count(problem),
        len(problem.candidates),
        time.perf_counter() - begin,
        held,
        {name: len(group.names) for group in tied.groups for name in group.names},
    )


def _least(
    ascent: PriceAscent, problem: LayoutProblem, memory_bytes: float | None, wanted: float
) -> tuple[list[int] | None, float]:
    """The candidates, by class, of the best layouts in a narrowed problem, None where none are
    known; and what any cost at least. Of layouts that cost more than is `wanted` it need not find
    the best.
    """
    program = linear_program(problem, memory_bytes)
    solution = solve(program, wanted)
    if solution.columns is None:
        return None, solution.bound
    if memory_bytes is not None:
        # Among few candidates memory may be no matter, though it is among all.
        before, price = _bound(ascent, memory_bytes), ascent.memory_price
        _set_price(ascent, solution.memory_price / memory_bytes)
        if _bound(ascent, memory_bytes) < before:
            _set_price(ascent, price)
    places = []
    for first, candidates, each in zip(
        program.first_choice, problem.candidates, ascent.problem.candidates, strict=True
    ):
        chosen = int(np.argmax(solution.columns[first : first + len(candidates.signatures)]))
        places.append(each.signatures.index(candidates.signatures[chosen]))
    return places, solution.bound


def _less(ascent: PriceAscent, most: float, columns: int) -> float | None:
    """Less than so many seconds above the bound, where the program is large and that makes it
    easy.
    """
    for _ in range(HALVINGS):
        if columns <= EASILY_LIMITED:
            return None
        most /= 2
        if _columns(ascent, most) <= EASILY_LIMITED:
            return most
    return None


def _columns(ascent: PriceAscent, most: float) -> int:
    """Of the program of candidates that have a part in layouts so far above the bound."""
    return column_count(narrowed_problem(ascent, most))


def _set_price(ascent: PriceAscent, price: float) -> None:
    ascent.set_memory_price(price)
    ascent.climb()


def _signatures(problem: LayoutProblem, places: Sequence[int]) -> tuple[NdSignature, ...]:
    """Those of all ops, by the candidates of their classes."""
    return tuple(
        problem.candidates[number].signatures[places[number]] for number in problem.tied.class_of
    )


def _has_many(problem: LayoutProblem) -> bool:
    return sum(len(each.signatures) for each in problem.candidates) > MANY


def _bound(ascent: PriceAscent, memory_bytes: float | None) -> float:
    return ascent.bound() - (0.0 if memory_bytes is None else ascent.memory_price * memory_bytes)


def least_bytes(problem: LayoutProblem) -> float:
    """What a device must hold at least."""
    return sum(
        float(each.held_bytes.min()) * len(members)
        for each, members in zip(problem.candidates, problem.tied.classes, strict=True)
    )


def _price_memory(ascent: PriceAscent, memory_bytes: float) -> None:
    """About the price of memory that proves most."""
    free = _Tried(0.0, _bound(ascent, memory_bytes), ascent.held_bytes() - memory_bytes)
    if free.slope > 0:
        price = 1e-6 * ascent.bound() / memory_bytes
        _search_price(ascent, memory_bytes, free, price, 4.0, PATIENCE)


def _price_memory_again(ascent: PriceAscent, memory_bytes: float | None, wanted: float) -> bool:
    """More nearly the price of memory that proves most, if less is proved than is wanted; whether
    it was searched. While prices of layouts have not settled, a price too high may seem too low;
    now they are near those that prove most.
    """
    if memory_bytes is None or not ascent.memory_price or _bound(ascent, memory_bytes) >= wanted:
        return False
    price = ascent.memory_price
    _search_price(ascent, memory_bytes, None, price, SETTLED_FACTOR, SETTLED_SWEEPS)
    return True


def _search_price(
    ascent: PriceAscent,
    memory_bytes: float,
    low: _Tried | None,
    price: float,
    factor: float,
    sweeps: int,
) -> None:
    """Set the price of memory that proves most of those that are tried, beginning with `price`;
    `low` is one that is too low. By `factor` it goes to the side on which nothing was tried.

    The bound is concave in it, and what the cheapest choices hold says how it goes on to both
    sides: where the lines of a price too low and one too high meet is the next one to try (J.
    Kelley, 1960). There the choices of both sides cost the same, so that few of those that are
    little dearer are needed to hold as much as there is.
    """
    high: _Tried | None = None
    for _ in range(PRICES):
        ascent.set_memory_price(price)
        ascent.climb(sweeps)
        tried = _Tried(price, _bound(ascent, memory_bytes), ascent.held_bytes() - memory_bytes)
        if tried.slope > 0:
            low = tried
        else:
            high = tried
        if high is None:
            price *= factor
            continue
        if low is None:
            price /= factor
            continue
        if high.price - low.price < 0.01 * high.price:
            break
        price = (low.price + high.price) / 2
        if low.slope > high.slope:
            met = high.bound - low.bound + low.slope * low.price - high.slope * high.price
            met /= low.slope - high.slope
            # Prices of layouts that have not settled may say that it is outside.
            if low.price < met < high.price:
                price = met
    best = max((each for each in (low, high) if each is not None), key=lambda each: each.bound)
    _set_price(ascent, best.price)


@dataclass(frozen=True)
class _Tried:
    """A price of memory."""

    price: float
    bound: float
    slope: float
    """Of the bound, by the price: what the choices hold beyond the limit."""


def _tied_seconds(problem: LayoutProblem, places: Sequence[int]) -> float:
    """The additive objective of the candidates of classes: that of all their ops."""
    tied, total = problem.tied, 0.0
    for members, candidates, place in zip(tied.classes, problem.candidates, places, strict=True):
        total += len(members) * float(candidates.seconds[place])
    distances: dict[int, np.ndarray] = {}
    for group, arcs, used in zip(tied.groups, problem.groups, problem.readers, strict=True):
        readers = [group.readers[each].ops for each in used]
        numbers = {
            int(layouts[places[reader]])
            for reader, layouts in zip(readers, arcs.wanted, strict=True)
        }
        made = int(arcs.made[places[group.maker]])
        if numbers - {made}:
            total += arcs.times * _steps_seconds(distances, arcs.arcs, made, sorted(numbers))
    return total


def objective_seconds(problem: LayoutProblem, signatures: Sequence[NdSignature]) -> float:
    """The additive objective of any legal signatures of the job's ops."""
    tied = problem.tied
    places = [
        {signature: place for place, signature in enumerate(each.signatures)}
        for each in problem.candidates
    ]
    total = 0.0
    of_op = {}
    for op, number, signature in zip(tied.job.ops, tied.class_of, signatures, strict=True):
        total += float(problem.candidates[number].seconds[places[number][signature]])
        of_op[op.name] = signature
    made = {
        value.name: sbp
        for op in tied.job.ops
        for value, sbp in zip(op.outputs, of_op[op.name].outputs, strict=True)
    }
    placements = {value.name: op.placement for op in tied.job.ops for value in op.outputs}
    wanted: dict[str, set[NdSbp]] = {}
    for op in tied.job.ops:
        for value, sbp in zip(op.inputs, of_op[op.name].inputs, strict=True):
            if placements[value.name].hierarchy == op.placement.hierarchy:
                wanted.setdefault(value.name, set()).add(sbp)
    distances: dict[int, np.ndarray] = {}
    known: dict[object, float] = {}
    for group, arcs in zip(tied.groups, problem.groups, strict=True):
        graph = arcs.arcs
        for name in group.names:
            key = id(graph), made[name], frozenset(wanted.get(name, ()))
            if key not in known:
                known[key] = _boxing_seconds(distances, graph, key[1], key[2])
            total += known[key]
    return total


def _boxing_seconds(
    distances: dict[int, np.ndarray], graph: LayoutArcs, made: NdSbp, wanted: frozenset[NdSbp]
) -> float:
    if wanted <= {made}:
        return 0.0
    numbers = [graph.number_of[sbp] for sbp in wanted]
    return _steps_seconds(distances, graph, graph.number_of[made], numbers)


def _steps_seconds(
    distances: dict[int, np.ndarray], graph: LayoutArcs, made: int, wanted: Sequence[int]
) -> float:
    if id(graph) not in distances:
        distances[id(graph)] = graph.distances()
    return least_seconds(distances[id(graph)], made, wanted)
