"""Classes of ranks: ranks that do alike are compiled and simulated once.

Ranks of one slice have the same tasks; what differs is the size of their shards, and what they read
of whom. Shards get no larger along a mesh axis, so where the first rank of a slice and the last one
have equal tasks but for the numbers of ranks, so have all between them; what ranks read of each
other may differ between, so that there more of them are looked at. Where tasks differ, the ranks
are told apart by where they are along each mesh axis: first, second, last, or between. Where even
those differ, all of them are looked at. Ranks of one class also talk to the same classes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from plancompiler.boxing.graph import BoxingTaskGraph
from plancompiler.boxing.slices import Slicer
from plancompiler.ir import Placement
from plancompiler.ir.shard import Region, region_shape
from plancompiler.ir.task import TaskKind, unpack_id
from plancompiler.lower.rank import compile_rank
from plancompiler.lower.rank_task_graph import RankTask, RankTaskGraph
from plancompiler.lower.rebuild import rebuild_rank_task_graph
from plancompiler.plan.plan import (
    CollectiveSpec,
    ComputeSpec,
    CopySpec,
    Plan,
    SliceSpec,
    TaskSpec,
)


@dataclass(frozen=True)
class RankClass:
    """Ranks that do alike."""

    plan: Plan
    """Of the first of them."""
    ranks: tuple[int, ...]
    simulated: int
    """The rank whose times are theirs."""

    @property
    def rank(self) -> int:
        return self.plan.rank


@dataclass(frozen=True)
class RankClasses:
    """All ranks of a world by class."""

    classes: tuple[RankClass, ...]
    of_rank: Sequence[int]
    """The number of each rank's class."""

    def stands_for(self, rank: int) -> int:
        """The rank that is simulated for this one."""
        return self.classes[self.of_rank[rank]].simulated

    @property
    def plans(self) -> dict[int, Plan]:
        """The plans of the ranks that are simulated."""
        return {each.rank: each.plan for each in self.classes if each.rank == each.simulated}


def rank_classes(graph: BoxingTaskGraph) -> RankClasses:
    """The classes of a graph's ranks. Time grows with the number of classes, and with the number of
    ranks only where shards are uneven.
    """
    slicer = Slicer(graph)
    by_slice: dict[int, list[int]] = {}
    for rank in range(graph.world_size):
        by_slice.setdefault(id(slicer.for_rank(rank)), []).append(rank)
    known: dict[int, RankTaskGraph] = {}

    def tasks_of(rank: int) -> RankTaskGraph:
        if rank not in known:
            known[rank] = rebuild_rank_task_graph(slicer.for_rank(rank), rank)
        return known[rank]

    placements = {*(placed.op.placement for placed in graph.ops)}

    def equal_throughout(ranks: list[int]) -> bool:
        if len(ranks) == 1:
            return True
        first = tasks_of(ranks[0])
        others = [ranks[-1]]
        if _reads_parts(first):  # of neighbours, say, which the first and the last may lack
            others += [ranks[1], ranks[len(ranks) // 2]]
        return all(_form(tasks_of(rank)) == _form(first) for rank in others)

    groups: list[list[int]] = []
    for ranks in by_slice.values():
        if equal_throughout(ranks):
            groups.append(ranks)
            continue
        parts: dict[Hashable, list[int]] = {}
        for part in _grouped(ranks, lambda rank: _where(placements, rank)):
            if equal_throughout(part):
                parts.setdefault(_form(tasks_of(part[0])), []).extend(part)
            else:
                for rank in part:
                    parts.setdefault(_form(tasks_of(rank)), []).append(rank)
        groups.extend(map(sorted, parts.values()))
    while True:
        groups.sort()
        of_rank = _numbers(groups, graph.world_size)
        refined = list(_refined(groups, known, of_rank))
        if len(refined) == len(groups):
            break
        groups = refined
    classes: list[RankClass] = []
    for ranks in groups:
        shares = [ranks]
        if len(ranks) > 1 and tasks_of(ranks[0]).outputs:
            # The one that reports outputs keeps them until then.
            shares = [ranks[:1], ranks[1:]]
        for share in shares:
            plan = compile_rank(slicer.for_rank(share[0]), share[0])
            classes.append(RankClass(plan, tuple(share), ranks[0]))
    return RankClasses(
        tuple(classes), _numbers([list(each.ranks) for each in classes], graph.world_size)
    )


def _numbers(groups: list[list[int]], world_size: int) -> list[int]:
    """The number of each rank's group."""
    of_rank = [0] * world_size
    for number, ranks in enumerate(groups):
        for rank in ranks:
            of_rank[rank] = number
    return of_rank


def _refined(
    groups: list[list[int]], known: Mapping[int, RankTaskGraph], of_rank: list[int]
) -> Iterator[list[int]]:
    """The groups, cut so that ranks of one talk to the same groups; only ranks whose tasks are
    known can be told apart.
    """
    for ranks in groups:
        if all(rank in known for rank in ranks):
            yield from _grouped(ranks, lambda rank: _peers(known[rank], of_rank))
        else:
            yield ranks


def _grouped(ranks: Iterable[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return list(groups.values())


def _where(placements: Iterable[Placement], rank: int) -> Hashable:
    """Where a rank is along each axis of its meshes: first, second, last, or between (2)."""
    return tuple(
        tuple(
            -1 if coordinate == extent - 1 else min(coordinate, 2)
            for coordinate, extent in zip(
                placement.coordinates(placement.parallel_id(rank)), placement.hierarchy, strict=True
            )
        )
        for placement in placements
        if rank in placement
    )


def _reads_parts(graph: RankTaskGraph) -> bool:
    """Whether a rank reads parts of other ranks' registers."""
    shapes = {remote.id: remote.shape for remote in graph.remote_registers}
    return any(
        isinstance(task.spec, CopySpec) and region_shape(task.spec.region) != shapes[task.inputs[0]]
        for task in graph.tasks
    )


def _form(graph: RankTaskGraph) -> Hashable:
    """All that a rank's plan is made of but for numbers of ranks, places in global tensors, and the
    outputs, which one rank of a placement reports.
    """
    return (
        tuple(
            (*unpack_id(register.id)[1:], register.shape, len(register.remote_consumers))
            for register in graph.registers.values()
        ),
        tuple((*unpack_id(each.id)[1:], each.shape) for each in graph.remote_registers),
        tuple(
            _form_of_task(graph, task) for task in graph.tasks if task.kind is not TaskKind.OUTPUT
        ),
    )


def _form_of_task(graph: RankTaskGraph, task: RankTask) -> Hashable:
    return (
        *unpack_id(task.id)[1:],
        tuple(unpack_id(register)[1:] for register in task.inputs),
        _form_of_spec(graph, task.spec),
    )


def _form_of_spec(graph: RankTaskGraph, spec: TaskSpec) -> Hashable:
    if isinstance(spec, ComputeSpec):
        return _shapes(spec.input_regions), _shapes(spec.output_regions), spec.lanes
    if isinstance(spec, CollectiveSpec):
        return len(graph.communicators[spec.communicator].ranks)
    if isinstance(spec, CopySpec):
        return region_shape(spec.region)
    if isinstance(spec, SliceSpec):
        return tuple((piece.input, region_shape(piece.source)) for piece in spec.pieces)
    return None


def _shapes(regions: tuple[Region, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(region_shape, regions))


def _peers(graph: RankTaskGraph, of_rank: Sequence[int]) -> Hashable:
    """The classes that a rank talks to, one by one."""
    return (
        tuple(of_rank[unpack_id(each.producer).rank] for each in graph.remote_registers),
        tuple(
            of_rank[unpack_id(task).rank]
            for register in graph.registers.values()
            for task in register.remote_consumers
        ),
        tuple(
            tuple(sorted({of_rank[rank] for rank in each.ranks})) for each in graph.communicators
        ),
        tuple(
            of_rank[_before(graph, task.spec)]
            for task in graph.tasks
            if isinstance(task.spec, ComputeSpec) and task.spec.lanes
        ),
    )


def _before(graph: RankTaskGraph, spec: ComputeSpec) -> int:
    """The rank from which inputs that go round come."""
    ranks = graph.communicators[spec.communicator].ranks
    return ranks[ranks.index(graph.rank) - 1]
