"""Slice exchange: moving a value between placements, box by box.

Each destination device's box is intersected with the source devices' boxes. Sources that are
broadcast are read from one replica; sources that are partial are all read and combined. Every
function is pure, so any rank can compute what any other rank reads.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from plancompiler.boxing.planner import BoxingStep, boxing_path, canonical, keeps_halo
from plancompiler.costs import (
    LinkCost,
    Machine,
    MeshLinks,
    exchange_link,
    generic_machine,
    links_of,
)
from plancompiler.costs.primitive import boxes_seconds
from plancompiler.ir import Broadcast, DType, NdSbp, Partial, Placement, Reduction, Split
from plancompiler.ir.halo import Halo
from plancompiler.ir.shard import (
    Range,
    Region,
    balanced_range,
    element_count,
    intersect,
    lie_apart,
    region_shape,
    relative,
    shard_region,
)


@dataclass(frozen=True, slots=True)
class SourcePiece:
    """A box that a destination device reads from one source device."""

    lane: int
    """Its number among the boxes that this destination reads: ids have no room for numbers of
    source devices, of which there may be as many as ranks."""
    rank: int
    source: Region
    """In the source shard's local coordinates."""
    target: Region
    """In the destination shard's local coordinates."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A value's move from one placement and layout to another, in one exchange of boxes."""

    shape: tuple[int, ...]
    src_placement: Placement
    src_sbp: NdSbp
    dst_placement: Placement
    dst_sbp: NdSbp

    @property
    def reduction(self) -> Reduction | None:
        """How several source parts combine; None where the source is not partial."""
        return next((e.reduction for e in self.src_sbp if isinstance(e, Partial)), None)

    @property
    def busiest_ranks(self) -> tuple[int, ...]:
        """Destination ranks to judge the exchange by: the first, which often reads what it has
        itself, and the last. Halos reach into both neighbours of the one in the middle.
        """
        ranks = self.dst_placement.rank_list
        middle = (ranks[len(ranks) // 2],) if self.dst_sbp.has_halo else ()
        return (ranks[0], *middle, ranks[-1])

    def fill(self, dst_rank: int) -> Reduction | None:
        """Whose identity a destination rank holds instead of the value; None where it holds that.

        Along a partial mesh axis the first device holds the value. Reductions nest, the innermost
        first, so the innermost axis along which a device is not first decides.
        """
        dst = self.dst_placement
        coordinates = dst.coordinates(dst.parallel_id(dst_rank))
        for entry, coordinate in reversed(list(zip(self.dst_sbp, coordinates, strict=True))):
            if isinstance(entry, Partial) and coordinate and entry.reduction is not Reduction.AVG:
                return entry.reduction
        return None

    def region(self, dst_rank: int) -> Region:
        """The box that a destination rank holds."""
        coordinates = self.dst_placement.coordinates(self.dst_placement.parallel_id(dst_rank))
        return shard_region(self.shape, self.dst_placement.hierarchy, self.dst_sbp, coordinates)


def exchange_sources(exchange: Exchange, dst_rank: int) -> tuple[SourcePiece, ...]:
    """What a destination rank reads, in the order of source parallel ids.

    A destination that is not first along a partial mesh axis reads nothing (it holds the
    reduction's identity). Of several replicas the rank itself is read, else the one at the
    destination's own mesh coordinates, else they are taken in turn, so that no source serves all.
    """
    return tuple(_sources(exchange, dst_rank))


def _sources(exchange: Exchange, dst_rank: int) -> Iterator[SourcePiece]:
    src, dst = exchange.src_placement, exchange.dst_placement
    dst_id = dst.parallel_id(dst_rank)
    dst_coordinates = dst.coordinates(dst_id)
    if exchange.fill(dst_rank) is not None:
        return
    dst_region = exchange.region(dst_rank)
    replica = _replica(exchange, dst_rank, dst_id, dst_coordinates)
    pinned = tuple(
        coordinate if isinstance(entry, Broadcast) else None
        for entry, coordinate in zip(exchange.src_sbp, replica, strict=True)
    )
    lane = 0
    for coordinates in _overlapping(exchange.shape, src, exchange.src_sbp, dst_region, pinned):
        src_region = shard_region(exchange.shape, src.hierarchy, exchange.src_sbp, coordinates)
        common = intersect(src_region, dst_region)
        if common is not None:
            parallel_id = src.parallel_id_at(coordinates)
            yield SourcePiece(
                lane,
                src.rank_list[parallel_id],
                relative(common, src_region),
                relative(common, dst_region),
            )
            lane += 1


def exchange_readers(exchange: Exchange, src_rank: int) -> tuple[tuple[int, int], ...]:
    """The (destination rank, lane) pairs that read a source rank from afar.

    The inverse of `exchange_sources`: of the destinations whose boxes overlap the source's, those
    that read it and not another replica. Nothing is done for destinations that do not overlap.
    """
    src, dst = exchange.src_placement, exchange.dst_placement
    if src_rank not in src:
        return ()
    src_id = src.parallel_id(src_rank)
    region = shard_region(exchange.shape, src.hierarchy, exchange.src_sbp, src.coordinates(src_id))
    pinned = tuple(
        0 if isinstance(entry, Partial) and entry.reduction is not Reduction.AVG else None
        for entry in exchange.dst_sbp
    )
    readers = []
    for coordinates in _overlapping(exchange.shape, dst, exchange.dst_sbp, region, pinned):
        dst_rank = dst.rank_list[dst.parallel_id_at(coordinates)]
        if dst_rank == src_rank:
            continue
        pieces = (piece for piece in _sources(exchange, dst_rank) if piece.rank == src_rank)
        piece = next(pieces, None)
        if piece is not None:
            readers.append((dst_rank, piece.lane))
    return tuple(sorted(readers))


def _overlapping(
    shape: tuple[int, ...],
    placement: Placement,
    sbp: NdSbp,
    box: Region,
    pinned: tuple[int | None, ...],
) -> Iterator[tuple[int, ...]]:
    """Coordinates, in row-major order, of the devices whose boxes may overlap `box`.

    Along a split mesh axis only the pieces that reach into the box are walked, so the work grows
    with what is found and not with the placement. `pinned` fixes coordinates of other mesh axes.
    """
    windows: dict[Halo, Range] = {}
    """Of halos, the piece of the other axis so far."""

    def descend(axis: int, region: Region, chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if axis == placement.ndim:
            yield chosen
            return
        entry, parts = sbp[axis], placement.hierarchy[axis]
        if isinstance(entry, Halo):
            whole = windows.get(entry, (0, entry.pieces_of))
            for coordinate in _reaching(entry, whole, parts, box[entry.axis]):
                low, high = balanced_range(whole[1] - whole[0], parts, coordinate)
                windows[entry] = (whole[0] + low, whole[0] + high)
                yield from descend(axis + 1, region, (*chosen, coordinate))
            windows[entry] = whole
            return
        if not isinstance(entry, Split):
            fixed = pinned[axis]
            for coordinate in range(parts) if fixed is None else (fixed,):
                yield from descend(axis + 1, region, (*chosen, coordinate))
            return
        start, stop = region[entry.axis]
        low, high = max(start, box[entry.axis][0]), min(stop, box[entry.axis][1])
        if low >= high:
            return
        first = _piece_with(stop - start, parts, low - start)
        last = _piece_with(stop - start, parts, high - 1 - start)
        for coordinate in range(first, last + 1):
            piece_start, piece_stop = balanced_range(stop - start, parts, coordinate)
            inner = (start + piece_start, start + piece_stop)
            narrowed = (*region[: entry.axis], inner, *region[entry.axis + 1 :])
            yield from descend(axis + 1, narrowed, (*chosen, coordinate))

    yield from descend(0, tuple((0, extent) for extent in shape), ())


def _reaching(halo: Halo, whole: Range, parts: int, box: Range) -> range:
    """Which of the balanced pieces of `whole` may depend on an element of `box`.

    Starts and stops of what pieces depend on never fall from one piece to the next.
    """
    extent = whole[1] - whole[0]
    pieces = range(min(parts, extent))  # the others are empty

    def start(piece: int) -> int:
        return halo.start(whole[0] + balanced_range(extent, parts, piece)[0])

    def stop(piece: int) -> int:
        return halo.stop(whole[0] + balanced_range(extent, parts, piece)[1])

    first = bisect_right(pieces, box[0], key=stop)
    return pieces[first : bisect_left(pieces, box[1], lo=first, key=start)]


def _piece_with(extent: int, parts: int, element: int) -> int:
    """The balanced piece that holds an element."""
    base, extra = divmod(extent, parts)
    longer = extra * (base + 1)
    if element < longer:
        return element // (base + 1)
    return extra + (element - longer) // base


def _replica(
    exchange: Exchange, dst_rank: int, dst_id: int, dst_coordinates: tuple[int, ...]
) -> tuple[int, ...]:
    src, dst = exchange.src_placement, exchange.dst_placement
    if dst_rank in src:
        return src.coordinates(src.parallel_id(dst_rank))
    if src.hierarchy == dst.hierarchy:
        return dst_coordinates
    return src.coordinates(dst_id % src.size)


@dataclass(frozen=True, slots=True)
class BoxingPlan:
    """Steps on the source placement, then at most one exchange."""

    before: tuple[BoxingStep, ...]
    exchange: Exchange | None
    seconds: float


@lru_cache(maxsize=16384)
def plan_boxing(
    src_placement: Placement,
    src_sbp: NdSbp,
    dst_placement: Placement,
    dst_sbp: NdSbp,
    shape: tuple[int, ...],
    dtype: DType,
    machine: Machine | None = None,
) -> BoxingPlan:
    """How to bring a value from one placement and layout to another; total over all pairs.

    On one placement that is the cheapest path of primitives, or one exchange where the path takes
    several steps and moves more. Between placements it is an exchange, after a reduction on the
    source placement where that moves fewer bytes.
    """
    machine = machine or generic_machine()
    links = links_of(machine, src_placement)
    options = []
    if src_placement == dst_placement and not _needs_exchange(src_placement, src_sbp, dst_sbp):
        steps = boxing_path(src_sbp, dst_sbp, shape, dtype, src_placement.hierarchy, links)
        options.append(BoxingPlan(steps, None, sum(step.seconds for step in steps)))
        if len(steps) < 2:
            return options[0]
    for middle in _middles(src_placement, src_sbp, dst_placement, dst_sbp, shape):
        steps = boxing_path(src_sbp, middle, shape, dtype, src_placement.hierarchy, links)
        before = sum(step.seconds for step in steps)
        least = min((option.seconds for option in options), default=math.inf)
        exchange = Exchange(shape, src_placement, middle, dst_placement, dst_sbp)
        seconds = before + exchange_seconds(exchange, dtype, machine, least - before)
        options.append(BoxingPlan(steps, exchange, seconds))
    return min(options, key=lambda option: option.seconds)


@lru_cache(maxsize=16384)
def halo_seconds(
    before: NdSbp,
    after: NdSbp,
    shape: tuple[int, ...],
    dtype: DType,
    hierarchy: tuple[int, ...],
    links: MeshLinks | None = None,
) -> tuple[tuple[BoxingStep, ...], float]:
    """How a layout with halos is reached on a mesh: primitives, and the seconds of the exchange."""
    mesh = links.placement if links and links.placement is not None else _mesh(hierarchy)
    plan = plan_boxing(mesh, before, mesh, after, shape, dtype, links and links.machine)
    return plan.before, plan.seconds - sum(step.seconds for step in plan.before)


@lru_cache(maxsize=64)
def _mesh(hierarchy: tuple[int, ...]) -> Placement:
    """Some mesh of this hierarchy, for links that are all the same."""
    return Placement("cpu", np.arange(math.prod(hierarchy)).reshape(hierarchy))


def _needs_exchange(placement: Placement, before: NdSbp, after: NdSbp) -> bool:
    """Whether no primitives lead from one layout to another on one placement."""
    hierarchy = placement.hierarchy
    return after.has_halo and not keeps_halo(
        canonical(before, hierarchy), canonical(after, hierarchy)
    )


def _middles(
    placement: Placement,
    sbp: NdSbp,
    dst_placement: Placement,
    dst_sbp: NdSbp,
    shape: tuple[int, ...],
) -> list[NdSbp]:
    """Layouts on the source placement from which to exchange.

    Parts of one plain reduction can be combined at the destination; otherwise, or where it moves
    fewer bytes, they are reduced first: to broadcast, or to a split of the largest tensor axis.
    Halos may come from neighbours once the value is split along their axis.
    """
    partial = {entry for entry in sbp if isinstance(entry, Partial)}
    middles = []
    if dst_sbp.has_halo and placement == dst_placement:
        split = dst_sbp.without_halos()
        if split != sbp:
            middles.append(split)
    if not partial:
        return [*middles, sbp]
    whole = sbp.reduced()
    middles.append(whole)
    if shape:
        largest = max(range(len(shape)), key=lambda axis: (shape[axis], -axis))
        middles.append(
            NdSbp(tuple(Split(largest) if isinstance(entry, Partial) else entry for entry in sbp))
        )
    if len(partial) == 1 and Partial(Reduction.AVG) not in partial:
        middles.append(sbp)
    return middles


def exchange_seconds(
    exchange: Exchange, dtype: DType, machine: Machine, limit: float = math.inf
) -> float:
    """What the busier of two destination devices reads from other ranks, box after box; infinite
    where that takes longer than `limit`, as then no more boxes are looked at.
    """
    link = exchange_link(machine, exchange.src_placement, exchange.dst_placement)
    return max(
        _receive_seconds(exchange, dtype, rank, link, limit) for rank in exchange.busiest_ranks
    )


def received_bytes(exchange: Exchange, dtype: DType, dst_rank: int) -> int:
    """Bytes that a destination rank reads from other ranks."""
    return sum(
        element_count(region_shape(piece.source)) * dtype.itemsize
        for piece in exchange_sources(exchange, dst_rank)
        if piece.rank != dst_rank
    )


def _receive_seconds(
    exchange: Exchange, dtype: DType, dst_rank: int, link: LinkCost, limit: float
) -> float:
    count = nbytes = packed = 0
    src, made = exchange.src_placement, region_shape(exchange.region(dst_rank))
    for piece in _sources(exchange, dst_rank):
        size = element_count(region_shape(piece.source)) * dtype.itemsize
        packed += size * _lies_apart(piece.target, made, dtype)
        if piece.rank != dst_rank:
            count += 1
            nbytes += size
            if boxes_seconds(count, 0, link) > limit:
                return math.inf
            at = src.coordinates(src.parallel_id(piece.rank))
            held = shard_region(exchange.shape, src.hierarchy, exchange.src_sbp, at)
            packed += size * _lies_apart(piece.source, region_shape(held), dtype)
    if exchange.dst_sbp.has_halo:  # neighbours are heard all at once, of their borders only
        return boxes_seconds(count, nbytes, link, at_once=True)
    return boxes_seconds(count, nbytes, link) + packed * link.per_copied_byte


def _lies_apart(box: Region, shape: Sequence[int], dtype: DType) -> bool:
    """Whether a box of a part of this shape is scattered in its memory, in short runs."""
    sides = enumerate(zip(box, shape, strict=True))
    cut = [axis for axis, ((start, stop), extent) in sides if stop - start < extent]
    return lie_apart(shape, cut[-1] if cut else -1, dtype.itemsize)
