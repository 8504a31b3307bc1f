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

from plancompiler.boxing.exchange import Exchange, exchange_readers, exchange_sources
from plancompiler.boxing.graph import BoxingTaskGraph, RankSlice
from plancompiler.boxing.slices import Slicer
from plancompiler.ir import Broadcast, NdSbp, Partial, Placement
from plancompiler.ir.shard import local_shape, piece_shape, region_shape, shard_region
from plancompiler.ir.task import CROSSING, Primitive, TaskKind
from plancompiler.lower.emit import emit_plan
from plancompiler.lower.rank_task_graph import RankTaskGraph
from plancompiler.lower.rebuild import exchange_of, piece_axes, rebuild_rank_task_graph
from plancompiler.ops.registry import op_def
from plancompiler.plan.plan import Plan


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
            return known.peers(rank, of_rank)

        refined: list[_Group] = []
        for group in groups:
            boxes = (part for box in group for part in _uniform_parts(box, peers))
            refined.extend(_grouped(boxes, peers))
        if len(refined) == len(groups):
            break
        groups = refined
    classes: list[RankClass] = []
    for ranks in map(_ranks, groups):
        tasks = known.tasks(ranks[0])
        # The one that reports outputs keeps them until then.
        apart = len(ranks) > 1 and bool(tasks.outputs)
        # These plans are read, and not run: they are not verified.
        plan = emit_plan(tasks)
        classes.append(RankClass(plan, tuple(ranks[:1] if apart else ranks), ranks[0]))
        if apart:
            plan = emit_plan(known.tasks(ranks[1]))
            classes.append(RankClass(plan, tuple(ranks[1:]), ranks[0]))
    return RankClasses(tuple(classes), _numbers((each.ranks for each in classes), graph.world_size))


class _Known:
    """What is known of the ranks that were looked at."""

    def __init__(self, slicer: Slicer) -> None:
        self._slicer = slicer
        self._slices: dict[int, _Slice] = {}
        """By the identity of what the slicer gives."""
        self._forms: dict[int, Hashable] = {}
        self._distinct: dict[Hashable, Hashable] = {}
        """Equal forms are one object, so that they are compared fast."""

    def tasks(self, rank: int) -> RankTaskGraph:
        return rebuild_rank_task_graph(self._slicer.for_rank(rank), rank)

    def form(self, rank: int) -> Hashable:
        if rank not in self._forms:
            form = self._slice(rank).form(rank)
            self._forms[rank] = self._distinct.setdefault(form, form)
        return self._forms[rank]

    def peers(self, rank: int, of_rank: Sequence[int]) -> Hashable:
        return self._slice(rank).peers(rank, of_rank)

    def _slice(self, rank: int) -> _Slice:
        rank_slice = self._slicer.for_rank(rank)
        known = self._slices.get(id(rank_slice))
        if known is None:
            known = self._slices[id(rank_slice)] = _Slice(rank_slice, rank)
        return known


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


# --- what tells ranks of a slice apart ------------------------------------------------------------


_Layout = tuple[tuple[int, ...], Placement, NdSbp]
"""A global shape, and how it lies on a mesh."""
_MeshGroup = tuple[Placement, tuple[int, ...]]
"""Ranks of a mesh that differ along these axes only."""


class _Slice:
    """That of a slice by which the tasks of its ranks differ: so a rank is looked at without making
    its tasks, of which most differ by their shapes alone, and these by few layouts.
    """

    def __init__(self, rank_slice: RankSlice, rank: int) -> None:
        """`rank` is any of its ranks."""
        layouts: dict[_Layout, None] = {}
        read: dict[Exchange, None] = {}
        crossing: dict[Exchange, None] = {}
        groups: dict[_MeshGroup, None] = {}
        passing: dict[_MeshGroup, None] = {}
        partialised: dict[_MeshGroup, None] = {}
        pipeline = rank_slice.pipeline
        for placed in rank_slice.ops:
            op, signature = placed.op, placed.signature
            axes = piece_axes(op, pipeline)
            for value, axis, sbp in zip(
                (*op.inputs, *op.outputs),
                (*axes[0], *axes[1]),
                (*signature.inputs, *signature.outputs),
                strict=True,
            ):
                shape = value.shape
                if axis >= 0 and pipeline is not None:
                    shape = piece_shape(shape, axis, pipeline.microbatches)
                layouts[shape, op.placement, sbp] = None
            way = op_def(op.kind).passing
            if way is not None:
                hierarchy = op.placement.hierarchy
                along = way.mesh_axes(signature.inputs, signature.outputs, hierarchy)
                if along:
                    groups[op.placement, along] = passing[op.placement, along] = None
        for family in rank_slice.families:
            transfer, placement = family.transfer, family.placement
            if transfer is None:
                continue
            if family.kind in CROSSING or transfer.primitive is Primitive.EXCHANGE:
                exchange = exchange_of(family)
                if family.kind in CROSSING:
                    crossing[exchange] = None
                if rank in placement:
                    read[exchange] = None
            if rank not in placement:
                continue
            for layout in family.outputs:
                layouts[layout.shape, placement, layout.sbp] = None
            if transfer.primitive is Primitive.SLICE and transfer.src_sbp is not None:
                layouts[family.outputs[0].shape, placement, transfer.src_sbp] = None
            if transfer.primitive is Primitive.PARTIALISE:
                partialised[placement, transfer.mesh_axes] = None
            if family.kind is TaskKind.COLLECTIVE_BOXING:
                groups[placement, transfer.mesh_axes] = None
        self._layouts = tuple(
            each
            for each in layouts
            if not all(isinstance(entry, (Broadcast, Partial)) for entry in each[2])
        )
        self._read, self._crossing = tuple(read), tuple(crossing)
        self._groups, self._passing = tuple(groups), tuple(passing)
        self._partialised = tuple(partialised)

    def form(self, rank: int) -> Hashable:
        """All that a rank's plan is made of but for numbers of ranks, places in global tensors, and
        the outputs, which one rank of a placement reports.
        """
        at = _Coordinates(rank)
        return (
            tuple(
                region_shape(shard_region(shape, placement.hierarchy, sbp, at[placement]))
                for shape, placement, sbp in self._layouts
            ),
            # The first along the axes keep a value that others make nothing of.
            tuple(
                all(at[placement][axis] == 0 for axis in axes)
                for placement, axes in self._partialised
            ),
            tuple(
                tuple(
                    (
                        piece.rank == rank,
                        region_shape(piece.source),
                        local_shape(each.shape, each.src_placement, each.src_sbp, piece.rank),
                    )
                    for piece in exchange_sources(each, rank)
                )
                for each in self._read
            ),
            tuple(len(exchange_readers(each, rank)) for each in self._crossing),
        )

    def peers(self, rank: int, of_rank: Sequence[int]) -> Hashable:
        """The classes with which a rank has collectives. Those that stand for the members must
        agree on who they are, or some would wait for others that have no such collective.
        """
        numbers: dict[tuple[int, ...], int] = {}
        members = []
        for placement, axes in self._groups:
            ranks = placement.group(rank, axes)
            own = numbers.setdefault(ranks, len(numbers))  # groups of two meshes may be the same
            members.append((own, tuple(sorted({of_rank[each] for each in ranks}))))
        before = []
        for placement, axes in self._passing:  # whose inputs go round come of this one
            ranks = placement.group(rank, axes)
            before.append(of_rank[ranks[ranks.index(rank) - 1]])
        return tuple(members), tuple(before)


class _Coordinates(dict[Placement, tuple[int, ...]]):
    """A rank's places in meshes."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def __missing__(self, placement: Placement) -> tuple[int, ...]:
        place = self[placement] = placement.coordinates(placement.parallel_id(self._rank))
        return place
