"""Sliding windows of convolutions and pooling, as pairs of strided slices.

For one position inside the window, the elements that all windows see there are a strided slice of
the input, and the windows that see an element at all (not padding) are a slice of the output. So a
sum over windows is a loop over the few positions of a window, without padded copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.ir.halo import Reach
from plancompiler.ir.shard import Region
from plancompiler.ops.attributes import Attribute, Ints
from plancompiler.ops.registry import AttrMap

Index = tuple[int | slice, ...]


def box(*entries: int | slice) -> Index:
    """An index of an array, put together from parts."""
    return entries


@dataclass(frozen=True, slots=True)
class Window:
    """A window that slides over some trailing axes."""

    kernel: tuple[int, ...]
    """Extent of the window per axis."""
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    """Elements added before and after each axis."""
    dilation: tuple[int, ...]
    """Distance of neighbouring elements of the window."""

    @property
    def ndim(self) -> int:
        return len(self.kernel)

    @property
    def is_point(self) -> bool:
        """Whether each window is one element and windows and elements are the same."""
        return (
            prod(self.kernel) == 1
            and prod(self.stride) == 1
            and not any(before or after for before, after in self.padding)
        )

    def reach(self, axis: int) -> int:
        """Elements from the first to the last of a window."""
        return self.dilation[axis] * (self.kernel[axis] - 1) + 1

    def needs(self, axis: int, extent: int) -> Reach:
        """Which of the `extent` elements of an axis each window along it sees or passes over."""
        first = -self.padding[axis][0]
        return Reach(self.stride[axis], first, first + self.reach(axis) - 1, 1, extent)

    def within(self, elements: Region, windows: Region) -> Window:
        """The window as it slides over a box of the elements to make a box of the windows: what
        the box lacks counts as padding.
        """
        local = []
        for axis, ((low, high), (first, last)) in enumerate(
            zip(elements[-self.ndim :], windows[-self.ndim :], strict=True)
        ):
            start = first * self.stride[axis] - self.padding[axis][0]
            stop = (last - 1) * self.stride[axis] - self.padding[axis][0] + self.reach(axis)
            local.append((low - start, max(0, stop - high)))
        return replace(self, padding=tuple(local))

    def output_shape(self, kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """How many windows fit along each axis."""
        counts = []
        for axis, extent in enumerate(shape):
            before, after = self.padding[axis]
            left = extent + before + after - self.reach(axis)
            if left < 0:
                raise ShapeError(
                    f"the window of {kind} is larger than its padded input",
                    got=f"{self.reach(axis)} elements over {extent} with padding {before, after}",
                    expected="a window that fits at least once along every axis",
                )
            counts.append(left // self.stride[axis] + 1)
        return tuple(counts)

    def positions(
        self,
        shape: tuple[int, ...],
        windows: tuple[int, ...],
        rows: tuple[int, int] | None = None,
    ) -> Iterator[tuple[tuple[int, ...], Index, Index]]:
        """Each position inside the window, the windows that see an element there, and the elements.

        `shape` are the extents of the input, `windows` those of the output. `rows` limits the
        windows to a range along the first axis; their slice then counts from its start.
        """
        per_axis = []
        for axis in range(self.ndim):
            low, high = rows if rows is not None and axis == 0 else (0, windows[axis])
            per_axis.append(
                [
                    (at, *ranges)
                    for at in range(self.kernel[axis])
                    if (ranges := self._along(axis, at, shape[axis], low, high)) is not None
                ]
            )
        for chosen in product(*per_axis):
            yield (
                tuple(at for at, _, _ in chosen),
                tuple(target for _, target, _ in chosen),
                tuple(source for _, _, source in chosen),
            )

    def _along(
        self, axis: int, at: int, extent: int, low: int, high: int
    ) -> tuple[slice, slice] | None:
        stride = self.stride[axis]
        shift = at * self.dilation[axis] - self.padding[axis][0]
        first = max(low, -(shift // stride))
        last = min(high, (extent - 1 - shift) // stride + 1)
        if first >= last:
            return None
        start = first * stride + shift
        return (
            slice(first - low, last - low),
            slice(start, start + (last - 1 - first) * stride + 1, stride),
        )


WINDOW_ATTRS = ("stride", "padding", "dilation")


def window_attributes(ndim: int) -> tuple[Attribute, ...]:
    """The attributes of windows over `ndim` axes: `stride` and `dilation` per axis, and `padding`
    as before and after of the first axis, then of the next.
    """
    ones = (1,) * ndim
    return Ints("stride", ones), Ints("padding", (0,) * (2 * ndim)), Ints("dilation", ones)


def window_of(kind: str, attrs: AttrMap, kernel: tuple[int, ...]) -> Window:
    """The window that the attributes say."""
    ndim = len(kernel)
    stride, dilation, padding = attrs["stride"], attrs["dilation"], attrs["padding"]
    for name, value, count, least in (
        ("kernel", kernel, ndim, 1),
        ("stride", stride, ndim, 1),
        ("dilation", dilation, ndim, 1),
        ("padding", padding, 2 * ndim, 0),
    ):
        if len(value) != count or any(number < least for number in value):
            raise AttributeValueError(
                f"attribute {name!r} of {kind} has a wrong value",
                got=value,
                expected=f"{count} whole numbers of at least {least}",
            )
    pairs = tuple(zip(padding[::2], padding[1::2], strict=True))
    return Window(kernel, stride, pairs, dilation)
