"""Zigzag order of a sequence, in which every device has the same work in causal attention.

The positions of a sequence are cut into 2n parts; piece i of n holds parts i and 2n - 1 - i, the
early and the late ones together (Z. Zhu, "ring-flash-attention", 2024; the Llama 3 team, 2024).
Pieces are balanced, and of a piece of odd length the early part has one position more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ir.shard import Range, balanced_range
from plancompiler.ops.attributes import Bool, Int
from plancompiler.ops.registry import Array, Arrays, AttrMap, KernelContext, Types, define_op


class Run(NamedTuple):
    """Neighbours along a piece of a sequence whose positions are neighbours too."""

    start: int
    """The place of the first in the piece."""
    position: int
    length: int


def runs_of(order: int, extent: int, piece: Range) -> list[Run]:
    """The runs of a piece of a sequence of `extent` in zigzag order of `order` pieces (0: in its
    own order).
    """
    low, high = piece
    if not order:
        return [Run(0, low, high - low)] if low < high else []
    rising, falling = 0, extent
    runs = []
    for number in range(min(order, extent)):
        start, stop = balanced_range(extent, order, number)
        half = (stop - start + 1) // 2
        falling -= stop - start - half
        for first, last, position in (
            (start, start + half, rising),
            (start + half, stop, falling),
        ):
            begin, end = max(first, low), min(last, high)
            if begin < end:
                runs.append(Run(begin - low, position + begin - first, end - begin))
        rising += half
    return runs


def positions_of(order: int, extent: int, piece: Range, arrays: Any = np) -> Array:
    """The position of each element of a piece: int64."""
    runs = runs_of(order, extent, piece)
    parts = [arrays.arange(run.position, run.position + run.length) for run in runs]
    return np.concatenate(parts) if parts else arrays.empty(0, np.int64)


def _infer(inputs: Types, attrs: AttrMap) -> Types:
    return (TensorType((attrs["count"],), DType.INT64),)


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    attrs, piece = context.attrs, context.output_regions[0][0]
    count, order = attrs["count"], attrs["pieces"]
    if attrs["inverse"]:
        places = np.empty(count, np.int64)
        places[positions_of(order, count, (0, count))] = np.arange(count)
        places = places[slice(*piece)]
    else:
        places = positions_of(order, count, piece)
    np.copyto(outputs[0], context.arrays.asarray(places))


define_op(
    "zigzag_order",
    infer=_infer,
    rule="-> n",
    attrs=(Int("count", least=0), Int("pieces", least=1), Bool("inverse", False)),
    kernel=_kernel,
    flops=0,
    doc="The position of each of `count` elements of a sequence in zigzag order of some pieces; "
    "with `inverse` the place of each position in that order.",
)
