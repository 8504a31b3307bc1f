"""Attention block by block: which queries see which keys, and how the results of blocks are joined.

A block is a piece of the keys and values. Where these are split over devices the blocks go round
the ring of them (H. Liu, M. Zaharia, P. Abbeel, 2023); the results of blocks are joined by the
logarithms of their softmax's sums (M. Milakov, N. Gimelshein, 2018), and gradients of keys and
values go round with their block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from plancompiler.ir.shard import Range, balanced_range
from plancompiler.ops.attention_tiles import Window, causal_diagonal
from plancompiler.ops.registry import Array, Arrays, AttrMap, KernelContext
from plancompiler.ops.ring import Ring
from plancompiler.ops.zigzag import runs_of

BlockKernel = Callable[[KernelContext, Window, Arrays, Arrays], None]
"""Attention, or its gradient, of some queries to the keys of a block. Results of halves are asked
for in float32, normalisers in float64."""


def is_in_blocks(context: KernelContext) -> bool:
    """Whether a call has to go block by block."""
    return context.ring is not None or bool(context.attrs["zigzag"] and context.attrs["causal"])


class _Part(NamedTuple):
    """Queries and keys that have to do with each other, as pieces of local arrays."""

    rows: slice
    columns: slice
    window: Window


class _Blocks:
    """How the queries of a device and the keys of each block have to do with each other."""

    def __init__(self, context: KernelContext) -> None:
        self.ring: Ring | None = context.ring
        self.attrs: AttrMap = context.attrs
        self.row = context.input_regions[0][2]
        self.length, self.keys = context.input_shapes[0][2], context.input_shapes[1][2]
        self.diagonal = causal_diagonal(context.attrs, self.length, self.keys)
        order = context.attrs["zigzag"] if self.diagonal is not None else 0
        self._order = order
        self._queries = runs_of(order, self.length, self.row)

    @property
    def own(self) -> int:
        """The number of the block that this device holds."""
        return 0 if self.ring is None else self.ring.member

    @property
    def count(self) -> int:
        return 1 if self.ring is None else self.ring.size

    def range_of(self, block: int) -> Range:
        """The keys of a block."""
        return balanced_range(self.keys, self.count, block)

    def parts(self, block: int) -> Iterator[_Part]:
        """What there is to do with a block."""
        low, high = self.range_of(block)
        for keys in runs_of(self._order, self.keys, (low, high)):
            columns = slice(keys.start, keys.start + keys.length)
            for queries in self._queries:
                hidden, shift = 0, None
                if self.diagonal is not None:
                    # Query i of the run sees the keys of the run up to i + shift.
                    shift = queries.position + self.diagonal - keys.position
                    hidden = max(0, -shift)
                    shift = max(0, shift)
                    if shift >= keys.length - 1:
                        shift = None
                if hidden < queries.length:
                    first = queries.start + hidden
                    yield _Part(
                        slice(first, queries.start + queries.length),
                        columns,
                        Window(self.row[0] + first, low + keys.start, self.keys, shift),
                    )


def parts_of(context: KernelContext) -> Iterator[tuple[slice, slice, Window]]:
    """The queries and keys of a call that have to do with each other: places in the local arrays,
    and their window. All keys are here.
    """
    return _Blocks(context).parts(0)


def attend_in_blocks(
    context: KernelContext, inputs: Arrays, outputs: Arrays, kernel: BlockKernel
) -> None:
    """The result and the normalisers of a device's queries; `kernel` makes those of one block."""
    query, key, value, *mask = inputs
    result, normaliser = outputs
    blocks = _Blocks(context)
    wide, arrays = wide_dtype(query.dtype), context.arrays
    total = arrays.zeros(result.shape, wide)
    # A normaliser is about as large as the greatest score. In float32 its rounding would come back
    # as an error of the weights that is as many times larger than that of a result.
    level = arrays.full(normaliser.shape, -np.inf, np.float64)
    for block, key, value in _round(blocks, key, value):  # noqa: B020  # from own to last
        for rows, columns, window in blocks.parts(block):
            given = (_of(query, rows), *(_of(each, columns) for each in (key, value)))
            made = tuple(
                arrays.empty((*each.shape[:2], rows.stop - rows.start, *each.shape[3:]), dtype)
                for each, dtype in ((result, wide), (normaliser, level.dtype))
            )
            kernel(context, window, (*given, *_masks(mask, rows, window, columns)), made)
            _join(_of(total, rows), _of(level, rows), *made)
    if mask:  # a query that sees no key
        level[level == -np.inf] = np.inf
    np.copyto(result, total, casting="same_kind")
    np.copyto(normaliser, level, casting="same_kind")


def _join(result: Array, level: Array, part: Array, part_level: Array) -> None:
    """Add the result of a block to that of the blocks before it, in place."""
    # Where a query saw no key of the block, its normaliser there is infinite.
    seen = np.where(part_level == np.inf, -np.inf, part_level)
    joined = np.logaddexp(level, seen)
    base = np.where(joined == -np.inf, 0, joined)
    for each, its in ((result, level), (part, seen)):
        np.multiply(each, np.exp(its - base).astype(each.dtype)[..., None], out=each)
    np.add(result, part, out=result)
    np.copyto(level, joined)


def pull_back_in_blocks(
    context: KernelContext, inputs: Arrays, outputs: Arrays, kernel: BlockKernel
) -> None:
    """The gradients of queries, keys and values; `kernel` makes those of one block."""
    query, key, value, result, normaliser, passed, *mask = inputs
    blocks = _Blocks(context)
    wide, arrays = wide_dtype(query.dtype), context.arrays
    by_query = (query, result, normaliser, passed)
    dquery = arrays.zeros(query.shape, wide)

    def pulled(block: int, key: Array, value: Array) -> tuple[Array, Array]:
        """What this device's queries add to the gradients of a block."""
        sums = tuple(arrays.zeros(each.shape, wide) for each in (key, value))
        for rows, columns, window in blocks.parts(block):
            by_row = [_of(each, rows) for each in by_query]
            by_column = [_of(each, columns) for each in (key, value)]
            given = (by_row[0], *by_column, *by_row[1:])
            made = tuple(arrays.empty(each.shape, wide) for each in given[:3])
            kernel(context, window, (*given, *_masks(mask, rows, window, columns)), made)
            for target, part in zip(
                (_of(dquery, rows), *(_of(each, columns) for each in sums)), made, strict=True
            ):
                np.add(target, part, out=target)
        return sums

    ring = blocks.ring
    if ring is None:
        sums = pulled(0, key, value)
    else:
        sums = _round_with_sums(ring, blocks, (key, value), pulled)
    for target, source in zip(outputs, (dquery, *sums), strict=True):
        np.copyto(target, source, casting="same_kind")


def _round_with_sums(
    ring: Ring,
    blocks: _Blocks,
    own: tuple[Array, Array],
    pulled: Callable[[int, Array, Array], tuple[Array, Array]],
) -> tuple[Array, Array]:
    """The gradients of this device's keys and values, to which every device adds its part.

    The sums of a block start at the device after the one that holds it, and follow the block.
    """
    size, member = ring.size, ring.member
    _give(ring, 0, own)
    mine = pulled(member, *own)
    ring.turn()
    for turn in range(1, size):
        block = (member - turn) % size
        extent = _extent(blocks.range_of(block))
        shapes = [(*each.shape[:2], extent, each.shape[3]) for each in own]
        pieces = _take(ring, 0, shapes)
        if turn < size - 1:
            _give(ring, 0, pieces)
        sums = pulled(block, *pieces)
        if turn > 1:
            for total, before in zip(sums, _take(ring, 2, shapes), strict=True):
                np.add(total, before, out=total)
        _give(ring, 2, sums)
        ring.turn()
    for total, others in zip(mine, _take(ring, 2, [each.shape for each in own]), strict=True):
        np.add(total, others, out=total)
    return mine


def _round(blocks: _Blocks, key: Array, value: Array) -> Iterator[tuple[int, Array, Array]]:
    """Every block with its keys and values, beginning with this device's own."""
    pieces = (key, value)
    ring = blocks.ring
    if ring is None:
        yield 0, key, value
        return
    for turn in range(ring.size):
        block = (ring.member - turn) % ring.size
        if turn:
            ring.turn()
            extent = _extent(blocks.range_of(block))
            shapes = [(*each.shape[:2], extent, each.shape[3]) for each in (key, value)]
            pieces = _take(ring, 0, shapes)
        if turn < ring.size - 1:
            _give(ring, 0, pieces)
        yield block, *pieces


def _give(ring: Ring, lane: int, arrays: tuple[Array, Array]) -> None:
    for number, array in enumerate(arrays):
        ring.give(lane + number, array)


def _take(ring: Ring, lane: int, shapes: Sequence[tuple[int, ...]]) -> tuple[Array, Array]:
    first, second = (ring.take(lane + number, shape) for number, shape in enumerate(shapes))
    return first, second


def _extent(piece: Range) -> int:
    return piece[1] - piece[0]


def _of(array: Array, along: slice) -> Array:
    """Part of the sequence of an array [batch, heads, sequence, ...]."""
    part: Array = array[:, :, along]
    return part


def _masks(mask: Arrays, rows: slice, window: Window, columns: slice) -> list[Array]:
    """The part of a device's mask that is for some queries and keys."""
    keys = slice(window.column, window.column + columns.stop - columns.start)
    return [mask_part(each, rows, keys) for each in mask]


def mask_part(mask: Array, rows: slice, keys: slice) -> Array:
    """Part of a mask, in which extents may be 1."""
    whole = slice(None)
    rows, keys = (
        each if extent > 1 else whole
        for each, extent in zip((rows, keys), mask.shape[2:], strict=True)
    )
    part: Array = mask[:, :, rows, keys]
    return part


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """In which results of blocks of arrays of this dtype are added up."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype
