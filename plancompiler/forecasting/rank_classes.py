"""Classes of ranks: ranks that do alike are compiled and simulated once.

Ranks of one slice have the same tasks; what differs is the size of their shards, and what they read
of whom. Shards get no larger along a mesh axis. So where the first and the last rank of a box of
the mesh have equal tasks but for the numbers of ranks, so have all between them; what ranks read of
each other may differ between, so that there more of them are looked at. Boxes whose corners differ
are cut, until all are of a kind: that takes as many looks as there are places where shards change
their size, and not as many as there are ranks. Ranks of one class also have collectives with the
same classes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plancompiler.boxing.graph import BoxingTaskGraph
from plancompiler.boxing.slices import Slicer
from plancompiler.ir import Placement
from plancompiler.ir.shard import Region, region_shape
from plancompiler.ir.task import TaskKind, unpack_id
from plancompiler.lower.rank import plan_of_tasks
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
    """The classes of a graph's ranks. Time grows with their number; with that of ranks it hardly
    does, unless their shards are cut in other places than those that they read.
    """
    slicer = Slicer(graph)
    by_slice: dict[int, list[int]] = {}
    for rank in range(graph.world_size):
        by_slice.setdefault(id(slicer.for_rank(rank)), []).append(rank)
    placements = tuple(dict.fromkeys(placed.op.placement for placed in graph.ops))
    known = _Known(slicer)
    groups: list[_Group] = []
    for ranks in by_slice.values():
        boxes = _uniform_parts(_box_of(placements, ranks), known.form)
        groups.extend(_grouped(boxes, known.form))
    while True:
        groups.sort(key=_first)
        of_rank = _numbers(map(_ranks, groups), graph.world_size)

        def peers(rank: int, of_rank: Sequence[int] = of_rank) -> Hashable:
            return _peers(known.tasks(rank), of_rank)

        refined: list[_Group] = []
        for group in groups:
            boxes = (part for box in group for part in _uniform_parts(box, peers))
            refined.extend(_grouped(boxes, peers))
        if len(refined) == len(groups):
            break
        groups = refined
    classes: list[RankClass] = []
    for ranks in map(_ranks, groups):
        shares = [ranks]
        if len(ranks) > 1 and known.tasks(ranks[0]).outputs:
            # The one that reports outputs keeps them until then.
            shares = [ranks[:1], ranks[1:]]
        for share in shares:
            plan = plan_of_tasks(known.tasks(share[0]))
            classes.append(RankClass(plan, tuple(share), ranks[0]))
    return RankClasses(tuple(classes), _numbers((each.ranks for each in classes), graph.world_size))


class _Known:
    """The tasks of the ranks that were looked at."""

    def __init__(self, slicer: Slicer) -> None:
        self._slicer = slicer
        self._tasks: dict[int, RankTaskGraph] = {}
        self._forms: dict[int, Hashable] = {}
        self._distinct: dict[Hashable, Hashable] = {}
        """Equal forms are one object, so that they are compared fast."""

    def tasks(self, rank: int) -> RankTaskGraph:
        known = self._tasks.get(rank)
        if known is None:
            known = rebuild_rank_task_graph(self._slicer.for_rank(rank), rank)
            self._tasks[rank] = known
        return known

    def form(self, rank: int) -> Hashable:
        if rank not in self._forms:
            form = _form(self.tasks(rank))
            self._forms[rank] = self._distinct.setdefault(form, form)
        return self._forms[rank]


def _numbers(groups: Iterable[Sequence[int]], world_size: int) -> list[int]:
    """The number of each rank's group."""
    of_rank = [0] * world_size
    for number, ranks in enumerate(groups):
        for rank in ranks:
            of_rank[rank] = number
    return of_rank


# --- boxes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Box:
    """Ranks of one slice with where they are along the axes of its meshes."""

    ranks: np.ndarray[Any, np.dtype[np.int64]]
    """Ascending."""
    coordinates: np.ndarray[Any, np.dtype[np.int64]]
    """[rank, axis], of all meshes."""

    @property
    def first(self) -> int:
        return int(self.ranks[0])

    @property
    def middle(self) -> int:
        return int(self.ranks[len(self.ranks) // 2])

    def at(self, coordinates: np.ndarray[Any, np.dtype[np.int64]]) -> int | None:
        """The rank that is there, if one is."""
        places = np.flatnonzero((self.coordinates == coordinates).all(axis=1))
        return int(self.ranks[places[0]]) if places.size else None

    def nearest(self, axis: int, at: int) -> int:
        """Of the ranks at a place along an axis the one that is first along the others."""
        places = np.flatnonzero(self.coordinates[:, axis] == at)
        return int(self.ranks[places[self.coordinates[places].sum(axis=1).argmin()]])

    def cut(self, axis: int, at: int) -> tuple[_Box, _Box]:
        """The ranks before a place along an axis, and those from it on."""
        before = self.coordinates[:, axis] < at
        return (
            _Box(self.ranks[before], self.coordinates[before]),
            _Box(self.ranks[~before], self.coordinates[~before]),
        )


_Group = list[_Box]
"""Ranks that do alike."""


def _first(group: _Group) -> int:
    return min(box.first for box in group)


def _ranks(group: _Group) -> list[int]:
    return sorted(rank for box in group for rank in box.ranks.tolist())


def _grouped(boxes: Iterable[_Box], key: Callable[[int], Hashable]) -> list[_Group]:
    groups: dict[Hashable, _Group] = {}
    for box in boxes:
        groups.setdefault(key(box.first), []).append(box)
    return list(groups.values())


def _box_of(placements: Iterable[Placement], ranks: Sequence[int]) -> _Box:
    axes: dict[bytes, np.ndarray[Any, np.dtype[np.int64]]] = {}
    for placement in placements:
        if ranks[0] in placement:
            ids = np.array([placement.parallel_id(rank) for rank in ranks], np.int64)
            for axis in np.unravel_index(ids, placement.hierarchy):
                if (axis != axis[0]).any():
                    axes.setdefault(axis.tobytes(), axis)
    own = np.array(ranks, np.int64)
    return _Box(own, np.stack(list(axes.values()), axis=1) if axes else own[:, None])


def _uniform_parts(box: _Box, key: Callable[[int], Hashable]) -> Iterator[_Box]:
    """Parts of a box in which all ranks have one key: what is between two corners that have the
    same, and so have the second rank and the middle one. These two show that ranks on the diagonal
    of a mesh, such as both corners, keep what others exchange.
    """
    if len(box.ranks) == 1:
        yield box
        return
    low, high = box.coordinates.min(axis=0), box.coordinates.max(axis=0)
    one, other = box.at(low), box.at(high)
    if one is not None and other is not None:
        looked_at = (other, int(box.ranks[1]), box.middle)
        if all(key(rank) == key(one) for rank in looked_at):
            yield box
            return
    for part in box.cut(*_cut(box, key, low, high)):
        yield from _uniform_parts(part, key)


def _cut(
    box: _Box,
    key: Callable[[int], Hashable],
    low: np.ndarray[Any, np.dtype[np.int64]],
    high: np.ndarray[Any, np.dtype[np.int64]],
) -> tuple[int, int]:
    """Along which axis to cut, and where: after the first rank where only that one differs, or else
    in the middle.
    """
    axes = sorted(np.flatnonzero(low < high).tolist(), key=lambda axis: low[axis] - high[axis])
    start = key(box.nearest(axes[0], int(low[axes[0]])))
    for axis in axes:
        end = key(box.nearest(axis, int(high[axis])))
        if end != start:
            places = box.coordinates[:, axis]
            second = int(places[places > low[axis]].min())
            if key(box.nearest(axis, second)) == end:
                return axis, second
            break
    else:
        axis = axes[0]
    return axis, int(low[axis] + high[axis] + 1) // 2


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
    """The classes with which a rank has collectives. Those that stand for the members must agree on
    who they are, or some would wait for others that have no such collective.
    """
    return (
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
