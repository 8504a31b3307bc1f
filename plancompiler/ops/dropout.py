"""Dropout with a counter-based mask (see `plancompiler.ops.random`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from plancompiler.ir.shard import Region
from plancompiler.ops import random
from plancompiler.ops.attributes import Float, Int
from plancompiler.ops.gradient import of_one
from plancompiler.ops.kernel import contiguous, copy_unless_shared, of_box, piece_starts
from plancompiler.ops.registry import Array, Arrays, KernelContext, apply, define_op

_LANES = 2
"""Elements of the last axis that share one 64-bit word: each takes 32 bits of it."""
_WORDS_AT_ONCE = 1 << 15


class Mask:
    """The words behind the mask of one box, without what depends on the step.

    Word `row * words_per_row + column // _LANES` decides the elements of a row from `column` on, so
    that where a word starts does not depend on the row.
    """

    def __init__(self, shape: tuple[int, ...], region: Region, arrays: Any = np) -> None:
        shape, region = shape or (1,), region or ((0, 1),)
        low, high = region[-1]
        first, last = low // _LANES, -(-high // _LANES)
        per_row = -(-shape[-1] // _LANES)
        self.width = high - low
        self.skip = low - first * _LANES
        rows = random.offsets((*shape[:-1], per_row), (*region[:-1], (0, 1)), arrays)
        self.rows = rows.reshape(-1, 1)
        self.columns = arrays.arange(first, last, dtype=np.uint64) * np.uint64(random.GOLDEN)
        self.wide = min(len(self.columns), _WORDS_AT_ONCE)
        self.tall = min(len(self.rows), max(1, _WORDS_AT_ONCE // max(1, self.wide)))
        self.buffers = arrays.empty((2, self.tall * self.wide), np.uint64)

    def pieces(self, start: int, threshold: int) -> Iterator[tuple[slice, slice, Array]]:
        """Rows, columns and which of their elements stay, box by box of the local array."""
        for top in piece_starts(self.rows, len(self.rows), self.tall):
            rows = self.rows[top : top + self.tall]
            for left in range(0, len(self.columns), self.wide):
                columns = self.columns[left : left + self.wide]
                shape = (len(rows), len(columns))
                words = self.buffers[0, : rows.size * columns.size].reshape(shape)
                work = self.buffers[1, : rows.size * columns.size].reshape(shape)
                np.add(rows, columns + np.uint64(start), out=words)
                random.mix_words(words, work)
                keep = words.view(np.uint32) >= np.uint32(threshold)
                skip = self.skip if left == 0 else 0
                begin = left * _LANES - self.skip + skip
                keep = keep[:, skip : skip + self.width - begin]
                yield slice(top, top + self.tall), slice(begin, begin + keep.shape[1]), keep


def stream_of(context: KernelContext, rate: float) -> tuple[int, int]:
    """The start of a call's words, and the number below which a word drops its element."""
    start = random.stream_of(context)
    return start, min(round(rate * 2**32), 2**32 - 1)


def kept_in_rows(
    context: KernelContext,
    rows: np.ndarray[Any, np.dtype[np.int64]],
    width: int,
    columns: tuple[int, int],
    start: int,
    threshold: int,
) -> Array:
    """Which elements stay in some columns of rows [count], by their numbers, of a tensor whose last
    axis has the extent `width`: bool [count, columns].
    """
    low, high = columns
    first, last = low // _LANES, -(-high // _LANES)
    per_row = -(-width // _LANES)
    lines = rows.astype(np.uint64) * np.uint64(per_row * random.GOLDEN % 2**64)
    steps = context.arrays.arange(first, last, dtype=np.uint64) * np.uint64(random.GOLDEN)
    words = context.arrays.asarray(lines[:, None]) + (steps + np.uint64(start))
    random.mix_words(words, np.empty_like(words))
    skip = low - first * _LANES
    kept: Array = (words.view(np.uint32) >= np.uint32(threshold))[:, skip : skip + high - low]
    return kept


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x,), (out,) = inputs, outputs
    rate = context.attrs["rate"]
    if rate == 0.0 or x.size == 0:
        copy_unless_shared(x, out)
        return
    shape, region = context.input_shapes[0], context.input_regions[0]
    mask = of_box(context, "mask", region, lambda: Mask(shape, region, context.arrays))
    start, threshold = stream_of(context, rate)
    source, target = x.reshape(-1, mask.width), out.reshape(-1, mask.width)
    scale = 1.0 / (1.0 - rate)
    for rows, columns, keep in mask.pieces(start, threshold):
        piece = target[rows, columns]
        np.multiply(source[rows, columns], scale, out=piece)
        np.multiply(piece, keep, out=piece)


define_op(
    "dropout",
    infer="x F -> y F",
    rule="... -> ...",
    attrs=(
        Float("rate", least=0.0, below=1.0),
        Int("key"),
    ),
    kernel=contiguous(_kernel),
    gradient=of_one(lambda attrs, x, y, dy: apply("dropout", dy, **attrs)),
    linear=((0,),),
    inplace=((0, 0),),
    precision="following",
    doc="Zeroes elements with probability `rate` and scales the others by 1 / (1 - rate). The "
    "mask follows from seed, key, step and the global index, so the gradient is the same op on "
    "the gradient.",
)
