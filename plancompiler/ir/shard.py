"""Shards: which part of a global tensor a device holds. Everything here is a pure function.

Splits are balanced: n elements over k devices give the first `n mod k` devices one more. Nested
splits of one tensor axis over several mesh axes cut the outer shard again, in mesh-axis order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import EllipsisType

from plancompiler.errors import AttributeValueError
from plancompiler.ir.halo import Halo
from plancompiler.ir.placement import Placement
from plancompiler.ir.sbp import NdSbp, Split

Range = tuple[int, int]
"""Half-open range of indices along one tensor axis."""
Region = tuple[Range, ...]
"""One range per tensor axis: a box of a tensor."""


def balanced_range(extent: int, parts: int, index: int) -> Range:
    """The range of piece `index` when `extent` elements are cut into `parts` balanced pieces."""
    base, extra = divmod(extent, parts)
    start = index * base + min(index, extra)
    return start, start + base + (1 if index < extra else 0)


def flat_range(extent: int, parts: int, part: int) -> tuple[int, int]:
    """Slice `part` of `parts` of a flat array: from part·extent/parts, rounded down."""
    return part * extent // parts, (part + 1) * extent // parts


def flat_slice(op: str, extent: int, num: int, index: int) -> slice:
    """Slice `index` of `num` of a flat array, as `flat_range` says, for an operation of that name.

    AttributeValueError for a slice that does not exist.
    """
    if num < 1 or not 0 <= index < num:
        raise AttributeValueError(
            f"{op} needs the number of a slice",
            got=f"slice {index} of {num}",
            expected="0 <= id < num",
        )
    return slice(*flat_range(extent, num, index))


@lru_cache(maxsize=65536)
def shard_region(
    shape: tuple[int, ...], hierarchy: tuple[int, ...], sbp: NdSbp, coordinates: tuple[int, ...]
) -> Region:
    """The box of the global tensor that the device at `coordinates` holds (whole for B and P)."""
    region = [(0, extent) for extent in shape]
    windows: dict[Halo, Range] = {}
    for entry, parts, coordinate in zip(sbp.entries, hierarchy, coordinates, strict=True):
        if isinstance(entry, Split):
            region[entry.axis] = _piece(region[entry.axis], parts, coordinate)
        elif isinstance(entry, Halo):
            whole = (0, entry.pieces_of)
            windows[entry] = _piece(windows.get(entry, whole), parts, coordinate)
            region[entry.axis] = entry.range_of(*windows[entry])
    return tuple(region)


def _piece(whole: Range, parts: int, index: int) -> Range:
    start, stop = whole
    low, high = balanced_range(stop - start, parts, index)
    return start + low, start + high


def rank_region(shape: tuple[int, ...], placement: Placement, sbp: NdSbp, rank: int) -> Region:
    """The box of the global tensor that `rank` holds."""
    coordinates = placement.coordinates(placement.parallel_id(rank))
    return shard_region(shape, placement.hierarchy, sbp, coordinates)


def region_shape(region: Region) -> tuple[int, ...]:
    """Shape of a box."""
    return tuple(stop - start for start, stop in region)


def local_shape(
    shape: tuple[int, ...], placement: Placement, sbp: NdSbp, rank: int
) -> tuple[int, ...]:
    """Shape of the shard that `rank` holds."""
    return region_shape(rank_region(shape, placement, sbp, rank))


def piece_shape(shape: Sequence[int], axis: int, microbatches: int) -> tuple[int, ...]:
    """Shape of one micro-batch's piece of a tensor; `axis` -1 stands for the whole tensor."""
    return tuple(
        extent // microbatches if number == axis else extent for number, extent in enumerate(shape)
    )


def piece_region(
    first: Region, axis: int, extent: int, microbatches: int, microbatch: int
) -> Region:
    """A device's box of the global tensor for a micro-batch, from its box for the first one.

    `extent` is the global one of the axis along which micro-batches are taken (-1: none).
    """
    if axis < 0 or microbatch == 0:
        return first
    shift = extent // microbatches * microbatch
    return tuple(
        (start + shift, stop + shift) if number == axis else (start, stop)
        for number, (start, stop) in enumerate(first)
    )


def intersect(left: Region, right: Region) -> Region | None:
    """The common box of two boxes, or None where it is empty."""
    common = []
    for (start, stop), (other_start, other_stop) in zip(left, right, strict=True):
        low, high = max(start, other_start), min(stop, other_stop)
        if low >= high:
            return None
        common.append((low, high))
    return tuple(common)


def relative(region: Region, origin: Region) -> Region:
    """`region` in coordinates that start at the corner of `origin`."""
    return tuple(
        (start - base, stop - base) for (start, stop), (base, _) in zip(region, origin, strict=True)
    )


def region_index(region: Region) -> tuple[slice | EllipsisType, ...]:
    """The box as an index of an array that always gives a view, of a scalar array too."""
    return tuple(slice(start, stop) for start, stop in region) or (...,)


SHORT_BYTES = 4096
"""Of a run of elements that lie together: longer ones are copied as fast as the memory can."""


def lie_apart(shape: Sequence[int], axis: int, itemsize: int) -> bool:
    """Whether the parts of a tensor along an axis are scattered in memory, in short runs, as along
    inner axes they are; never along axis -1, which stands for none.
    """
    if axis <= 0 or element_count(shape[:axis]) <= 1:
        return False
    return element_count(shape[axis:]) * itemsize < SHORT_BYTES


def element_count(shape: Sequence[int]) -> int:
    """Number of elements of a tensor of this shape."""
    count = 1
    for extent in shape:
        count *= extent
    return count
