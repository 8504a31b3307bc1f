"""Signatures of ops with windows: one for each axis of windows, which is split.

Each device then needs the range of an input that its windows see: its piece of that axis with a
halo. The gradient by an input is split likewise: its elements need the windows that see them, so
nothing is added up across devices.
"""

from __future__ import annotations

from collections.abc import Callable

from plancompiler.ir.halo import Halo, Reach
from plancompiler.ir.op import TensorType
from plancompiler.ir.sbp import Sbp, Split
from plancompiler.ops.rule import Signature


def needed(axis: int, pieces_of: int, *reaches: Reach) -> Sbp:
    """The layout of an input of which each element of a split axis, of extent `pieces_of`, needs
    along `axis` what the reaches say, one after another: a split where that is the element at its
    own place.
    """
    in_place = all(
        each.scale == each.divisor and 0 <= each.first <= each.last < each.divisor
        for each in reaches
    )
    if in_place and reaches[-1].extent == pieces_of:
        return Split(axis)
    return Halo(axis, pieces_of, reaches)


def over_axes(
    cut: TensorType, ndim: int, signature: Callable[[int, int], Signature]
) -> tuple[Signature, ...]:
    """A signature for each of the last `ndim` axes of `cut`, the tensor whose pieces devices have:
    `signature(place among these axes, axis)`, where there is something to split.
    """
    first = len(cut.shape) - ndim
    return tuple(
        signature(axis - first, axis)
        for axis in range(first, len(cut.shape))
        if cut.shape[axis] > 1
    )
