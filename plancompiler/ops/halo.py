"""Signatures of ops with windows: one for each axis of windows, which is split.

Each device then needs the range of an input that its windows see: its piece of that axis with a
halo. The gradient by an input is split likewise: its elements need the windows that see them, so
nothing is added up across devices.
"""

from __future__ import annotations

from plancompiler.ir.halo import Halo, Reach
from plancompiler.ir.sbp import Sbp, Split


def needed(axis: int, pieces_of: int, *reaches: Reach) -> Sbp:
    """The layout of an input of which each element of a split axis, of extent `pieces_of`, needs
    along `axis` what the reaches say, one after another: a split where that is the element at its
    own place.
    """
    alike = all(
        each.scale == each.divisor and 0 <= each.first <= each.last < each.divisor
        for each in reaches
    )
    if alike and reaches[-1].extent == pieces_of:
        return Split(axis)
    return Halo(axis, pieces_of, reaches)
