"""The best layouts of a job on its mesh, with a bound on what any others cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plancompiler.errors import UsageError
from plancompiler.ir import Job, NdSbp
from plancompiler.ops.rule import NdSignature
from plancompiler.search.certificate import lower_bound
from plancompiler.search.highs_solver import solve
from plancompiler.search.layout_arcs import LayoutArcs, least_seconds
from plancompiler.search.linear_program import LayoutProblem, layout_problem, linear_program
from plancompiler.search.tied_ops import TiedGraph, tie_ops

ROUNDS = (2, 4, 8)
"""Of refinement, one after another, until the gap is small."""
GAP = 0.01
"""The difference between the layouts and the bound, over the layouts, that is good enough."""
KEPT = 16
"""Jobs whose layouts are kept."""
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
) -> LayoutSearch:
    """The cheapest legal layouts of all ops of a job, by the additive objective: the work of a
    device, and the boxing of all values, one after another.

    What the user has placed stays. Without `certify` the bound may be far from what is possible,
    though the layouts are as good. `without` names a value and a layout that it must not have.
    UsageError where nothing fits.
    """
    begin = time.perf_counter()
    first, *finer = ROUNDS
    tries = [first, None] if len(job.ops) <= MOST_OPS else [first, *finer]
    best: LayoutSearch | None = None
    for rounds in tries:
        result = _search(tie_ops(job, rounds), memory_bytes, begin, without)
        if result is not None and (best is None or result.gap < best.gap):
            best = result
        if best is not None and (best.gap <= GAP or not certify):
            break
    if best is None:
        raise UsageError(
            "no layouts fit",
            got="no limit" if memory_bytes is None else f"{memory_bytes:.0f} bytes of memory",
            hint="allow more memory, or pin less",
        )
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
    tied: TiedGraph, memory_bytes: float | None, begin: float, without: tuple[str, NdSbp] | None
) -> LayoutSearch | None:
    """What a program over these classes gives; None where nothing fits that alike ops have in
    common.
    """
    problem = layout_problem(tied, without=without)
    if not all(each.signatures for each in problem.candidates):
        return None
    program = linear_program(problem, memory_bytes)
    solution = solve(program)
    if solution is None:
        return None
    chosen, held = [], 0.0
    for number, (first, candidates) in enumerate(
        zip(program.first_choice, problem.candidates, strict=True)
    ):
        values = solution.columns[first : first + len(candidates.signatures)]
        place = int(np.argmax(values))
        chosen.append(candidates.signatures[place])
        if problem.kept[number]:
            held += float(candidates.held_bytes[place]) * len(tied.classes[number])
    signatures = tuple(chosen[number] for number in tied.class_of)
    return LayoutSearch(
        tied.job,
        signatures,
        objective_seconds(problem, signatures),
        lower_bound(problem, program, solution.duals),
        len(program.costs),
        len(problem.candidates),
        time.perf_counter() - begin,
        held,
        {name: len(group.names) for group in tied.groups for name in group.names},
    )


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
            if placements[value.name] == op.placement:
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
    if id(graph) not in distances:
        distances[id(graph)] = graph.distances()
    numbers = [graph.number_of[sbp] for sbp in wanted]
    return least_seconds(distances[id(graph)], graph.number_of[made], numbers)
