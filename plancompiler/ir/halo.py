"""Halos: pieces of a tensor axis that overlap, as windows over a split axis need them.

Where an op is split along an axis of its output, and an element of that output depends on a range
of an input, each device needs more of the input than a piece of a split: the halo around it (so
called in stencil codes and in GSPMD, Xu et al. 2021). Ranges are affine functions of the element,
rounded down, so all that is asked of them is arithmetic on whole numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reach:
    """Which elements of an axis each element i of another axis depends on: those from
    ⌊(scale i + first) / divisor⌋ to ⌊(scale i + last) / divisor⌋, as far as they exist.
    """

    scale: int
    first: int
    last: int
    divisor: int
    extent: int
    """Of the axis that is reached."""

    def start(self, low: int) -> int:
        """The first element that elements from `low` on depend on; it never falls with `low`."""
        return min(max((self.scale * low + self.first) // self.divisor, 0), self.extent)

    def stop(self, high: int) -> int:
        """Behind the last element that elements below `high` depend on; never falls with it."""
        stop = (self.scale * (high - 1) + self.last) // self.divisor + 1
        return min(max(stop, 0), self.extent)

    def inverse(self, extent: int) -> Reach:
        """Which elements of this other axis, of `extent`, depend on each element reached."""
        if self.scale == 0:
            return Reach(0, 0, extent - 1, 1, extent)
        return Reach(
            self.divisor,
            self.scale - 1 - self.last,
            self.divisor - 1 - self.first,
            self.scale,
            extent,
        )

    def __str__(self) -> str:
        return f"{self.scale}:{self.first}:{self.last}:{self.divisor}:{self.extent}"


@dataclass(frozen=True, slots=True)
class Halo:
    """Each device holds the range of the tensor's axis `axis` that its piece of another axis, of
    `pieces_of` elements in balanced pieces, depends on.

    Ranges may overlap, leave out elements that nothing depends on, and be empty. Only ops want
    inputs in this layout; no value is made in it.
    """

    axis: int
    pieces_of: int
    reaches: tuple[Reach, ...]
    """From that other axis to this one, one after another."""

    def range_of(self, low: int, high: int) -> tuple[int, int]:
        """The half-open range that the elements from `low` to below `high` depend on."""
        start, stop = self.start(low), self.stop(high)
        return start, (stop if low < high and start < stop else start)

    def start(self, low: int) -> int:
        """The first element that elements from `low` on depend on."""
        for reach in self.reaches:
            low = reach.start(low)
        return low

    def stop(self, high: int) -> int:
        """Behind the last element that elements below `high` depend on."""
        for reach in self.reaches:
            high = reach.stop(high)
        return high

    def __str__(self) -> str:
        return f"H({' '.join(map(str, (self.axis, self.pieces_of, *self.reaches)))})"


_NUMBER = r"-?\d{1,19}"
_REACH = rf" {_NUMBER}(?::{_NUMBER}){{4}}"
_PATTERN = re.compile(rf"\s*H\((\d{{1,4}}) (\d{{1,19}})((?:{_REACH}){{1,4}})\)\s*")


def parse_halo(text: str) -> Halo | None:
    """The inverse of `str`; None for what is no halo."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        return None
    axis, pieces_of, rest = match.groups()
    reaches = tuple(Reach(*map(int, each.split(":"))) for each in rest.split())
    if any(each.scale < 0 or each.divisor < 1 or each.extent < 0 for each in reaches):
        return None
    return Halo(int(axis), int(pieces_of), reaches)
