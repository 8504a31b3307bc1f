"""Shapes: axes added, dropped and merged; tensors joined, cut, repeated, moved and padded."""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

from plancompiler.errors import AttributeValueError, ShapeError, TracingError, UsageError
from plancompiler.frontend.functions.derived import Axes, Tensor, joined
from plancompiler.frontend.out import takes_out
from plancompiler.ir import DType, Placement
from plancompiler.ir.operators import (
    SbpLike,
    Scalar,
    TensorOperators,
    normalize_axes,
    one_axis,
    whole_numbers,
)
from plancompiler.ops.check import broadcast_shapes
from plancompiler.ops.registry import apply, apply_one, apply_source

__all__ = [
    "broadcast_arrays",
    "chunk",
    "concat",
    "diag",
    "diag_embed",
    "diagonal",
    "diff",
    "expand",
    "flatten",
    "flip",
    "matrix_transpose",
    "meshgrid",
    "moveaxis",
    "pad",
    "permute",
    "redistribute",
    "repeat",
    "repeat_interleave",
    "reshape",
    "roll",
    "slice",
    "split",
    "squeeze",
    "stack",
    "strided_slice",
    "tile",
    "trace",
    "transpose",
    "tril",
    "triu",
    "unbind",
    "unsqueeze",
]


_PIECES = 1 << 16
"""Pieces, some of them empty, that an axis is cut into at most if it has fewer elements."""


# --- axes -----------------------------------------------------------------------------------------


@takes_out
def permute(x: Tensor, axes: Sequence[int], *, out: Tensor | None = None) -> Tensor:
    """Axes in another order; negative ones count from the end."""
    return x.transpose([axis + x.ndim if axis < 0 else axis for axis in axes])


@takes_out
def squeeze(x: Tensor, axis: Axes = None, *, out: Tensor | None = None) -> Tensor:
    """Without axes of extent 1: all of them, or those named, which must have extent 1."""
    if axis is None:
        return x.reshape([extent for extent in x.shape if extent != 1])
    axes = normalize_axes(axis, x.ndim)
    if any(x.shape[each] != 1 for each in axes):
        raise AttributeValueError(
            "squeeze needs axes of extent 1", got=f"axes {axes} of shape {x.shape}"
        )
    return x.reshape([extent for each, extent in enumerate(x.shape) if each not in axes])


@takes_out
def unsqueeze(x: Tensor, axis: int | Sequence[int], *, out: Tensor | None = None) -> Tensor:
    """With new axes of extent 1, at these positions of the result."""
    count = len(whole_numbers("axes", axis))
    axes = normalize_axes(axis, x.ndim + count)
    extents = iter(x.shape)
    return x.reshape([1 if each in axes else next(extents) for each in range(x.ndim + count)])


@takes_out
def flatten(x: Tensor, start: int = 0, stop: int = -1, *, out: Tensor | None = None) -> Tensor:
    """Axes from `start` to `stop`, both included, merged into one; a scalar gets one axis."""
    if x.ndim == 0:
        return x.reshape((1,))
    first, last = one_axis(start, x.ndim), one_axis(stop, x.ndim)
    if first > last:
        raise AttributeValueError("flatten needs axes in order", got=(start, stop))
    merged = math.prod(x.shape[first : last + 1])
    return x.reshape((*x.shape[:first], merged, *x.shape[last + 1 :]))


@takes_out
def expand(x: Tensor, shape: Sequence[int], *, out: Tensor | None = None) -> Tensor:
    """x broadcast to a shape, as in NumPy; -1 keeps the extent of x there."""
    lead = len(shape) - x.ndim
    if any(extent == -1 and axis < lead for axis, extent in enumerate(shape)):
        raise AttributeValueError("a new axis needs an extent", got=tuple(shape))
    full = tuple(
        x.shape[axis - lead] if extent == -1 else extent for axis, extent in enumerate(shape)
    )
    return apply_one("expand_to", x, shape=full)


@takes_out
def broadcast_arrays(
    *tensors: Tensor, out: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, ...]:
    """Tensors in the shape to which they broadcast together, as in NumPy."""
    shape = broadcast_shapes("broadcast_arrays", [tensor.shape for tensor in tensors])
    return tuple(expand(tensor, shape) for tensor in tensors)


@takes_out
def moveaxis(
    x: Tensor,
    source: int | Sequence[int],
    destination: int | Sequence[int],
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Axes moved to other positions; the rest keep their order."""
    given = whole_numbers("axes", source), whole_numbers("axes", destination)
    for each in given:
        normalize_axes(each, x.ndim)
    old, new = ([axis % x.ndim for axis in each] for each in given)
    if len(old) != len(new):
        raise AttributeValueError(
            "moveaxis needs a position for each axis", got=f"{source} to {destination}"
        )
    order = [axis for axis in range(x.ndim) if axis not in old]
    for position, axis in sorted(zip(new, old, strict=True)):
        order.insert(position, axis)
    return x.transpose(order)


@takes_out
def matrix_transpose(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Each matrix [..., m, n] transposed: [..., n, m]."""
    if x.ndim < 2:
        raise ShapeError("a matrix has two axes", got=x.shape, expected="[..., m, n]")
    return moveaxis(x, -1, -2)


@takes_out
def meshgrid(
    *vectors: Tensor, indexing: str = "xy", out: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, ...]:
    """Coordinates of a grid from those along each axis: a tensor of the grid's shape for each
    vector. With `indexing` "ij" the first vector runs along the first axis, with "xy" along the
    second, as in NumPy.
    """
    if indexing not in ("xy", "ij"):
        raise AttributeValueError(
            "meshgrid was given another indexing", got=indexing, expected="'xy' or 'ij'"
        )
    for vector in vectors:
        if vector.ndim > 1:
            raise ShapeError("meshgrid takes vectors", got=vector.shape, expected="[n]")
    count = len(vectors)
    axes = list(range(count))
    if indexing == "xy" and count > 1:
        axes[:2] = [1, 0]
    wide = [
        vector.reshape([-1 if each == axis else 1 for each in range(count)])
        for vector, axis in zip(vectors, axes, strict=True)
    ]
    return broadcast_arrays(*wide) if wide else ()


# --- joining and cutting --------------------------------------------------------------------------


@takes_out
def stack(tensors: Sequence[Tensor], axis: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Tensors of one shape side by side along a new axis."""
    if not tensors:
        raise UsageError("stack needs at least one tensor")
    new = one_axis(axis, tensors[0].ndim + 1)
    return concat([unsqueeze(tensor, new) for tensor in tensors], new)


@takes_out
def split(
    x: Tensor,
    sizes: int | Sequence[int],
    axis: int = 0,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, ...]:
    """Pieces along an axis: of these sizes, which add up to its extent, or all of one size (the
    last may be smaller).
    """
    at = one_axis(axis, x.ndim)
    extent = x.shape[at]
    given = whole_numbers("sizes", sizes)
    if not isinstance(sizes, (list, tuple)) and len(given) == 1:
        size = given[0]
        if size < 1:
            raise AttributeValueError("split needs pieces of at least 1", got=size)
        given = tuple(min(size, extent - start) for start in range(0, extent, size))
    sizes = given
    if sum(sizes) != extent or min(sizes, default=0) < 0:
        raise AttributeValueError(
            "the pieces of a split must add up to its axis",
            got=f"{tuple(sizes)} for extent {extent}",
        )
    pieces = []
    start = 0
    for size in sizes:
        starts, stops = [0] * x.ndim, list(x.shape)
        starts[at], stops[at] = start, start + size
        piece: Tensor = apply("slice", x, starts=tuple(starts), stops=tuple(stops))
        pieces.append(piece)
        start += size
    return tuple(pieces)


@takes_out
def chunk(
    x: Tensor, chunks: int, axis: int = 0, *, out: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, ...]:
    """Pieces along an axis, as in PyTorch: of an extent that `chunks` divides, rounded up. The last
    may be smaller, and there may be fewer of them; `tensor_split` makes balanced ones.
    """
    extent = x.shape[one_axis(axis, x.ndim)]
    most = max(extent, _PIECES)
    if not 1 <= chunks <= most:
        raise AttributeValueError(
            "chunk cannot make this many pieces", op="chunk", got=chunks, expected=f"1 to {most}"
        )
    return split(x, -(-extent // chunks) if extent else [0] * chunks, axis)


@takes_out
def unbind(
    x: Tensor, axis: int = 0, *, out: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, ...]:
    """The tensors along an axis, without it."""
    return tuple(squeeze(piece, axis) for piece in split(x, 1, axis))


@takes_out
def strided_slice(
    x: Tensor,
    starts: Sequence[int],
    stops: Sequence[int],
    steps: Sequence[int],
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Every `steps[i]`-th element from `starts[i]` to `stops[i]` along every axis i."""
    return apply_one(
        "strided_slice", x, starts=tuple(starts), stops=tuple(stops), steps=tuple(steps)
    )


# --- moving and repeating -------------------------------------------------------------------------


@takes_out
def flip(x: Tensor, axis: Axes = None, *, out: Tensor | None = None) -> Tensor:
    """Elements in reverse order along axes (all by default): a copy, where `x[::-1]` is a view."""
    turned = apply_one("flip", x, axes=normalize_axes(axis, x.ndim))
    return turned.cast(x.dtype)


@takes_out
def roll(
    x: Tensor, shifts: int | Sequence[int], axis: Axes = None, *, out: Tensor | None = None
) -> Tensor:
    """Elements moved by `shifts` places along axes, around the end; a shift per axis. Without axes
    x counts as a vector, and keeps its shape.
    """
    if axis is None:
        return roll(x.reshape((-1,)), shifts, 0).reshape(x.shape)
    moves, axes = whole_numbers("shifts", shifts), whole_numbers("axes", axis)
    return apply_one(
        "roll", x, shifts=moves, axes=tuple(each + x.ndim if each < 0 else each for each in axes)
    )


@takes_out
def diff(
    x: Tensor,
    n: int = 1,
    axis: int = -1,
    prepend: Tensor | None = None,
    append: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The differences of neighbours along an axis, `n` times over; of truth values whether they
    differ. Taken 0 times it is x. `prepend` and `append` are joined to x first.
    """
    if n < 0:
        raise AttributeValueError("diff is taken 0 times or more", got=n)
    at = one_axis(axis, x.ndim)
    if n == 0:
        return x.cast(x.dtype)
    parts = [each for each in (prepend, x, append) if each is not None]
    joint = x if len(parts) == 1 else concat(parts, at)
    for _ in range(n):
        extent = joint.shape[at]
        lead = (builtins.slice(None),) * at
        later = joint[(*lead, builtins.slice(1, None))]
        earlier = joint[(*lead, builtins.slice(None, max(extent - 1, 0)))]
        joint = later.not_equal(earlier) if joint.dtype is DType.BOOL else later - earlier
    return joint


@takes_out
def tile(x: Tensor, repeats: int | Sequence[int], *, out: Tensor | None = None) -> Tensor:
    """The whole tensor repeated along each axis; the shorter of both gets leading ones."""
    repeats = whole_numbers("repeats", repeats)
    if len(repeats) > x.ndim:
        x = x.reshape((1,) * (len(repeats) - x.ndim) + x.shape)
    return apply_one("tile", x, repeats=(1,) * (x.ndim - len(repeats)) + tuple(repeats))


@takes_out
def repeat(
    x: Tensor,
    repeats: int | Sequence[int] | Tensor,
    axis: int | None = None,
    total: int | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Each element of an axis several times in a row; without an axis of x as a vector.

    `repeats` is one number, or one for each element: a list, or a tensor. Of a tensor the sum must
    be known: eager tensors find out, which is a collective; in jobs and compiled functions `total`
    says it, and more or fewer fail the run or repeat the last element.
    """
    if axis is None:
        return repeat(x.reshape((-1,)), repeats, 0, total)
    at = one_axis(axis, x.ndim)
    if isinstance(repeats, TensorOperators):
        numbers: Any = repeats
        ends = apply_one("cumsum", repeats.reshape((-1,)), axis=0).cast(DType.INT64)
        count = total
        if count is None:
            try:
                count = int(numbers.sum())
            except TracingError as error:
                raise TracingError(
                    "how often elements are repeated is known only when the program runs",
                    got=error.report.got,
                    hint="pc.repeat(x, repeats, axis, total=n) has a shape that is known",
                ) from error
        if ends.shape != (1,):
            places = apply_source(x, "arange", start=0, step=1, count=count, dtype="int64")
            sources = apply_one("searchsorted", ends, places, side="right")
            return apply_one("index_select", x, sources, axis=at)
        repeats = count // max(1, x.shape[at]) if total is not None else int(numbers)
    given = whole_numbers("repeats", repeats)
    if len(given) == 1:
        return _in_a_row(x, given[0], at)
    if len(given) != x.shape[at] or min(given, default=0) < 0:
        raise AttributeValueError(
            "repeat needs a number for each element of its axis",
            got=given,
            expected=f"{x.shape[at]} numbers of at least 0",
        )
    pieces = [
        _in_a_row(piece, number, at) for piece, number in zip(split(x, 1, at), given, strict=True)
    ]
    return concat(pieces, at)


@takes_out
def repeat_interleave(
    x: Tensor,
    repeats: int | Sequence[int] | Tensor,
    axis: int | None = None,
    total: int | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`repeat`."""
    return repeat(x, repeats, axis, total)


def _in_a_row(x: Tensor, repeats: int, axis: int) -> Tensor:
    """Each element of an axis `repeats` times in a row."""
    lead, rest = x.shape[: axis + 1], x.shape[axis + 1 :]
    if 1 in (repeats, lead[-1]):  # else a reshape of what is expanded would be a view of x
        return apply_one("tile", x, repeats=(*(1,) * axis, repeats, *(1,) * len(rest)))
    wide = expand(x.reshape((*lead, 1, *rest)), (*lead, repeats, *rest))
    return wide.reshape((*lead[:-1], lead[-1] * repeats, *rest))


@takes_out
def pad(
    x: Tensor,
    low: Sequence[int],
    high: Sequence[int],
    value: Scalar = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`low[i]` elements of `value` before and `high[i]` after every axis i."""
    number = float(value) if x.dtype.is_floating else value
    if not x.dtype.is_floating and not x.dtype.is_integer:
        number = bool(value)
    return apply_one("pad", x, low=tuple(low), high=tuple(high), value=number)


# --- diagonals and triangles ----------------------------------------------------------------------


@takes_out
def diagonal(
    x: Tensor, offset: int = 0, axis1: int = 0, axis2: int = 1, *, out: Tensor | None = None
) -> Tensor:
    """Diagonal of each matrix along two axes, which become the last one: [..., d]; a positive
    offset lies above the main one. `pc.linalg.diagonal` takes the last two axes. Eager, it is a
    view.
    """
    axes = one_axis(axis1, x.ndim), one_axis(axis2, x.ndim)
    if axes[0] == axes[1]:
        raise AttributeValueError("a diagonal runs along two axes", got=(axis1, axis2))
    if axes != (x.ndim - 2, x.ndim - 1):
        x = moveaxis(x, axes, (-2, -1))
    return apply_one("diagonal", x, offset=offset)


@takes_out
def diag_embed(
    x: Tensor, offset: int = 0, axis1: int = -2, axis2: int = -1, *, out: Tensor | None = None
) -> Tensor:
    """Square matrices of zeros with x [..., d] on a diagonal: [..., d + |offset|, d + |offset|].
    Their rows and columns are two axes of the result, by default the last ones.
    """
    size = x.shape[-1] + abs(offset) if x.ndim else 0
    made = apply_one("diag_embed", x, rows=size, columns=size, offset=offset)
    axes = one_axis(axis1, made.ndim), one_axis(axis2, made.ndim)
    if axes[0] == axes[1]:
        raise AttributeValueError("a diagonal runs along two axes", got=(axis1, axis2))
    return made if axes == (x.ndim - 1, x.ndim) else moveaxis(made, (-2, -1), axes)


@takes_out
def diag(x: Tensor, offset: int = 0, *, out: Tensor | None = None) -> Tensor:
    """A vector as a diagonal matrix, or a copy of the diagonal of a matrix."""
    return diag_embed(x, offset) if x.ndim == 1 else diagonal(x, offset).cast(x.dtype)


@takes_out
def trace(
    x: Tensor, offset: int = 0, axis1: int = 0, axis2: int = 1, *, out: Tensor | None = None
) -> Tensor:
    """Sum of a diagonal of each matrix along two axes. `pc.linalg.trace` takes the last two."""
    return diagonal(x, offset, axis1, axis2).sum(-1)


@takes_out
def tril(x: Tensor, diagonal: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Matrices with zeros above a diagonal."""
    return apply_one("tril", x, diagonal=diagonal)


@takes_out
def triu(x: Tensor, diagonal: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Matrices with zeros below a diagonal."""
    return apply_one("triu", x, diagonal=diagonal)


@takes_out
def reshape(x: Tensor, shape: Sequence[int], *, out: Tensor | None = None) -> Tensor:
    """The same elements in another shape; one extent may be -1."""
    return x.reshape(shape)


@takes_out
def transpose(
    x: Tensor,
    axes: int | Sequence[int] | None = None,
    second: int | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Axes permuted; without `axes`, reversed. Two numbers exchange these axes, as in PyTorch."""
    if isinstance(axes, int) and second is not None:
        return x.transpose(axes, second)
    return x.transpose() if axes is None else x.transpose(whole_numbers("axes", axes))


@takes_out
def concat(tensors: Sequence[Tensor], axis: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Tensors joined along an axis; the other extents are equal."""
    if not tensors:
        raise UsageError(
            "concat needs at least one tensor", got="none", expected="a sequence of tensors"
        )
    return joined("concat", tensors, axis=one_axis(axis, tensors[0].ndim))


@takes_out
def slice(
    x: Tensor, starts: Sequence[int], stops: Sequence[int], *, out: Tensor | None = None
) -> Tensor:
    """The box `starts[i]:stops[i]` along every axis i; `x[1:, ...]` is the short form."""
    return apply_one("slice", x, starts=tuple(starts), stops=tuple(stops))


@takes_out
def redistribute(
    x: Tensor,
    placement: Placement | None = None,
    sbp: SbpLike | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The same value on another placement and/or with another SBP."""
    return x.redistribute(placement, sbp)
