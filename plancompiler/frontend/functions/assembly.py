"""Tensors joined, cut and turned under the names that NumPy and PyTorch users type.

All of them are made of the functions in `shape`, and so are their gradients and layouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from plancompiler.errors import AttributeValueError, ShapeError, UsageError
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.shape import (
    concat,
    diagonal,
    expand,
    flip,
    pad,
    split,
    stack,
    unsqueeze,
)
from plancompiler.frontend.out import takes_out
from plancompiler.ir.operators import (
    TensorOperators,
    filled,
    normalize_axes,
    one_axis,
    whole_numbers,
)
from plancompiler.ir.shard import balanced_range
from plancompiler.ops.check import broadcast_shapes
from plancompiler.ops.registry import apply, apply_one

__all__ = [
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
    "block_diag",
    "broadcast_tensors",
    "broadcast_to",
    "cartesian_prod",
    "cat",
    "column_stack",
    "diagflat",
    "diagonal_scatter",
    "dsplit",
    "dstack",
    "fliplr",
    "flipud",
    "hsplit",
    "hstack",
    "movedim",
    "narrow",
    "ravel",
    "rot90",
    "select",
    "select_scatter",
    "slice_scatter",
    "swapaxes",
    "tensor_split",
    "unflatten",
    "unfold_axis",
    "vsplit",
    "vstack",
]


# --- joining --------------------------------------------------------------------------------------


@takes_out
def cat(tensors: Sequence[Tensor], axis: int = 0, *, out: Tensor | None = None) -> Tensor:
    """`concat`."""
    return concat(tensors, axis)


def _one_by_one(tensors: Sequence[Tensor | Sequence[Tensor]]) -> Sequence[Tensor]:
    """Tensors that are given one by one, as in PyTorch, or all in one list."""
    given: Any = tensors
    one_list = len(given) == 1 and isinstance(given[0], (list, tuple))
    several: Sequence[Tensor] = given[0] if one_list else given
    return several


def _several(name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    if not tensors:
        raise UsageError(f"{name} needs at least one tensor", op=name, got="none")
    return list(tensors)


@takes_out
def atleast_1d(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x, of which a scalar gets one axis."""
    return x if x.ndim else x.reshape((1,))


@takes_out
def atleast_2d(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x, with leading axes of extent 1 until it has two."""
    return x if x.ndim >= 2 else x.reshape((1,) * (2 - x.ndim) + x.shape)


@takes_out
def atleast_3d(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x with three axes: a vector becomes [1, n, 1], a matrix [m, n, 1]."""
    return x if x.ndim >= 3 else atleast_2d(x).reshape((*atleast_2d(x).shape, 1))


@takes_out
def vstack(tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """Tensors joined along their first axis; vectors are rows."""
    return concat([atleast_2d(each) for each in _several("vstack", tensors)], 0)


@takes_out
def hstack(tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """Tensors joined along their second axis, vectors along their only one."""
    given = [atleast_1d(each) for each in _several("hstack", tensors)]
    return concat(given, 0 if given[0].ndim == 1 else 1)


@takes_out
def dstack(tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """Tensors joined along their third axis."""
    return concat([atleast_3d(each) for each in _several("dstack", tensors)], 2)


@takes_out
def column_stack(tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """Tensors joined along their second axis; vectors are columns."""
    given = _several("column_stack", tensors)
    columns = [
        each if each.ndim > 1 else each.reshape((math.prod(each.shape), 1)) for each in given
    ]
    return concat(columns, 1)


@takes_out
def block_diag(*tensors: Tensor | Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """A matrix of zeros with matrices along its diagonal, one by one or in a list; vectors are
    rows.
    """
    matrices = [atleast_2d(each) for each in _several("block_diag", _one_by_one(tensors))]
    width = sum(each.shape[1] for each in matrices)
    left, rows = 0, []
    for each in matrices:
        if each.ndim != 2:
            raise ShapeError("block_diag takes matrices", got=each.shape, expected="2 axes")
        rows.append(pad(each, (0, left), (0, width - left - each.shape[1])))
        left += each.shape[1]
    return concat(rows, 0)


@takes_out
def cartesian_prod(*tensors: Tensor | Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """All rows with an element of each vector, one by one or in a list, the last one changing
    first.
    """
    vectors = _several("cartesian_prod", _one_by_one(tensors))
    if len(vectors) == 1:
        return vectors[0].reshape(vectors[0].shape)
    shape = [each.shape[0] for each in vectors]
    columns = []
    for at, vector in enumerate(vectors):
        beside = vector.reshape([shape[at] if each == at else 1 for each in range(len(shape))])
        columns.append(expand(beside, shape).reshape((math.prod(shape),)))
    return stack(columns, 1)


@takes_out
def broadcast_to(x: Tensor, shape: Sequence[int], *, out: Tensor | None = None) -> Tensor:
    """`expand`."""
    return expand(x, shape)


@takes_out
def broadcast_tensors(
    *tensors: Tensor, out: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, ...]:
    """Tensors in the shape to which all of them broadcast."""
    shape = broadcast_shapes("broadcast_tensors", [each.shape for each in tensors])
    return tuple(expand(each, shape) for each in tensors)


# --- cutting --------------------------------------------------------------------------------------


@takes_out
def narrow(x: Tensor, axis: int, start: int, length: int, *, out: Tensor | None = None) -> Tensor:
    """`length` elements of an axis from `start` on."""
    at = one_axis(axis, x.ndim)
    extent = x.shape[at]
    start = start + extent if start < 0 else start
    if not (start >= 0 and length >= 0 and start + length <= extent):
        raise AttributeValueError(
            "narrow goes beyond its axis", got=f"{start} to {start + length} of {extent}"
        )
    starts, stops = [0] * x.ndim, list(x.shape)
    starts[at], stops[at] = start, start + length
    return apply_one("slice", x, starts=tuple(starts), stops=tuple(stops))


@takes_out
def select(x: Tensor, axis: int, index: int, *, out: Tensor | None = None) -> Tensor:
    """The elements at one place of an axis, without the axis."""
    at = one_axis(axis, x.ndim)
    return narrow(x, at, index, 1).reshape((*x.shape[:at], *x.shape[at + 1 :]))


@takes_out
def tensor_split(
    x: Tensor,
    parts: int | Sequence[int] | Tensor,
    axis: int = 0,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, ...]:
    """That many pieces along an axis, of sizes that differ by at most one, or the pieces between
    the places that are listed; a tensor of these is read, which is a collective.
    """
    if isinstance(parts, TensorOperators):
        numbers: Any = parts
        return tensor_split(x, numbers.tolist(), axis)
    extent = x.shape[one_axis(axis, x.ndim)]
    if not isinstance(parts, (list, tuple)):
        count, *more = whole_numbers("parts", parts)
        if count < 1 or more:
            raise AttributeValueError("tensor_split makes 1 piece or more", got=parts)
        ranges = [balanced_range(extent, count, index) for index in range(count)]
        return split(x, [stop - start for start, stop in ranges], axis)
    places = [
        min(max(each + extent if each < 0 else each, 0), extent)
        for each in whole_numbers("places", parts)
    ]
    bounds = list(zip([0, *places], [*places, extent], strict=True))
    return tuple(narrow(x, axis, start, max(0, stop - start)) for start, stop in bounds)


def _split_along(
    name: str, x: Tensor, parts: int | Sequence[int], axis: int, least: int
) -> tuple[Tensor, ...]:
    if x.ndim < least:
        raise ShapeError(f"{name} needs more axes", op=name, got=x.shape, expected=f"{least}")
    if isinstance(parts, int) and (parts < 1 or x.shape[axis] % parts):
        raise AttributeValueError(
            f"{name} makes equal pieces", op=name, got=f"{parts} of extent {x.shape[axis]}"
        )
    return tensor_split(x, parts, axis)


@takes_out
def hsplit(
    x: Tensor, parts: int | Sequence[int], *, out: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, ...]:
    """Equal pieces along the second axis, of a vector along its only one; or between places."""
    return _split_along("hsplit", x, parts, 0 if x.ndim == 1 else 1, 1)


@takes_out
def vsplit(
    x: Tensor, parts: int | Sequence[int], *, out: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, ...]:
    """Equal pieces along the first axis, or the pieces between places."""
    return _split_along("vsplit", x, parts, 0, 2)


@takes_out
def dsplit(
    x: Tensor, parts: int | Sequence[int], *, out: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, ...]:
    """Equal pieces along the third axis, or the pieces between places."""
    return _split_along("dsplit", x, parts, 2, 3)


@takes_out
def unfold_axis(x: Tensor, axis: int, size: int, step: int, *, out: Tensor | None = None) -> Tensor:
    """Windows of `size` elements of an axis, `step` apart, along a new last axis: PyTorch's method
    `unfold`. Eager, it is a view, which can be changed in place if the windows do not overlap.
    """
    if not x.ndim:
        return unfold_axis(x.reshape((1,)), 0, size, step).reshape((size,))
    at = one_axis(axis, x.ndim)
    extent = x.shape[at]
    if not (0 <= size <= extent and step > 0):
        raise AttributeValueError(
            "windows do not fit an axis", got=f"size {size}, step {step} of extent {extent}"
        )
    return apply_one("unfold_axis", x, axis=at, size=size, step=step)


# --- turning --------------------------------------------------------------------------------------


@takes_out
def ravel(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """All elements along one axis."""
    return x.reshape((math.prod(x.shape),))


@takes_out
def unflatten(x: Tensor, axis: int, sizes: Sequence[int], *, out: Tensor | None = None) -> Tensor:
    """One axis as several; one of their extents may be -1."""
    at = one_axis(axis, x.ndim)
    sizes = whole_numbers("sizes", sizes)
    known = math.prod(each for each in sizes if each != -1)
    if -1 in sizes and known:
        sizes = tuple(x.shape[at] // known if each == -1 else each for each in sizes)
    return x.reshape((*x.shape[:at], *sizes, *x.shape[at + 1 :]))


@takes_out
def movedim(
    x: Tensor,
    source: int | Sequence[int],
    destination: int | Sequence[int],
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Axes moved to other places; the others keep their order."""
    pairs = []
    for given in (source, destination):
        numbers = whole_numbers("axes", given)
        normalize_axes(numbers, x.ndim)
        pairs.append([each + x.ndim if each < 0 else each for each in numbers])
    if len(pairs[0]) != len(pairs[1]):
        raise AttributeValueError("movedim needs a place for each axis", got=(source, destination))
    order = [each for each in range(x.ndim) if each not in pairs[0]]
    for place, axis in sorted(zip(pairs[1], pairs[0], strict=True)):
        order.insert(place, axis)
    return x.transpose(order) if order else x.reshape(())


@takes_out
def swapaxes(x: Tensor, first: int, second: int, *, out: Tensor | None = None) -> Tensor:
    """Two axes exchanged."""
    if not x.ndim:
        return x.reshape(())
    order = list(range(x.ndim))
    one, other = one_axis(first, x.ndim), one_axis(second, x.ndim)
    order[one], order[other] = order[other], order[one]
    return x.transpose(order)


@takes_out
def fliplr(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The second axis in reverse order."""
    return flip(x, 1)


@takes_out
def flipud(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The first axis in reverse order."""
    return flip(x, 0)


@takes_out
def rot90(
    x: Tensor, k: int = 1, axes: Sequence[int] = (0, 1), *, out: Tensor | None = None
) -> Tensor:
    """The plane of two axes turned k times by 90 degrees, from the first towards the second."""
    first, second = (one_axis(each, x.ndim) for each in axes)
    if first == second:
        raise AttributeValueError("rot90 turns a plane of two axes", got=tuple(axes))
    turns = k % 4
    if turns == 2:
        return flip(x, (first, second))
    if turns == 1:
        return swapaxes(flip(x, second), first, second)
    return flip(swapaxes(x, first, second), second) if turns else flip(x, ())


# --- putting pieces in ----------------------------------------------------------------------------


@takes_out
def slice_scatter(
    x: Tensor,
    piece: Tensor,
    axis: int = 0,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """x with `piece` in place of `start:stop:step` of an axis."""
    at = one_axis(axis, x.ndim)
    extent = x.shape[at]
    places = range(*slice(start, stop, step).indices(extent))
    wanted = (*x.shape[:at], len(places), *x.shape[at + 1 :])
    if piece.shape != wanted or step < 1:
        raise ShapeError(
            "a piece does not fit its place", got=f"{piece.shape}, step {step}", expected=wanted
        )
    if not places:
        return x.cast(x.dtype)
    last = places[-1] + 1
    within = _spread(piece, at, step)
    marks = _spread(_ones(piece), at, step)
    low, high = [0] * x.ndim, [0] * x.ndim
    low[at], high[at] = places[0], extent - last
    number = apply_one("pad", within, low=tuple(low), high=tuple(high), value=_nought(x))
    mask = apply_one("pad", marks, low=tuple(low), high=tuple(high), value=False)
    return apply_one("where", mask, number, x)


def _nought(x: Tensor) -> float | int | bool:
    return 0.0 if x.dtype.is_floating else 0 if x.dtype.is_integer else False


def _ones(x: Tensor) -> Tensor:
    """True everywhere."""
    return filled(x, True, dtype=x.dtype.parse("bool"))


def _spread(x: Tensor, axis: int, step: int) -> Tensor:
    """The elements of an axis, `step` apart, with zeros between them."""
    if step == 1:
        return x
    wide = unsqueeze(x, axis + 1)
    high = [0] * wide.ndim
    high[axis + 1] = step - 1
    padded = apply_one("pad", wide, low=(0,) * wide.ndim, high=tuple(high), value=_nought(x))
    joined = padded.reshape((*x.shape[:axis], x.shape[axis] * step, *x.shape[axis + 1 :]))
    return narrow(joined, axis, 0, (x.shape[axis] - 1) * step + 1)


@takes_out
def select_scatter(
    x: Tensor, piece: Tensor, axis: int, index: int, *, out: Tensor | None = None
) -> Tensor:
    """x with `piece` at one place of an axis."""
    at = one_axis(axis, x.ndim)
    place = index + x.shape[at] if index < 0 else index
    return slice_scatter(x, unsqueeze(piece, at), at, place, place + 1)


@takes_out
def diagonal_scatter(
    x: Tensor,
    piece: Tensor,
    offset: int = 0,
    axis1: int = 0,
    axis2: int = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """x with `piece` on a diagonal of two axes; the piece's last axis runs along it."""
    moved = movedim(x, (axis1, axis2), (-2, -1))
    rows, columns = moved.shape[-2:]
    wanted = diagonal(moved, offset, -2, -1).shape
    if wanted != piece.shape:
        raise ShapeError(
            "a piece does not fit its diagonal",
            got=piece.shape,
            expected=wanted,
        )
    places = {"rows": rows, "columns": columns, "offset": offset}
    mask: Tensor = apply("diag_embed", _ones(piece), **places)
    put = apply_one("where", mask, apply("diag_embed", piece, **places), moved)
    return movedim(put, (-2, -1), (axis1, axis2))


@takes_out
def diagflat(x: Tensor, offset: int = 0, *, out: Tensor | None = None) -> Tensor:
    """All elements on a diagonal of a square matrix."""
    size = math.prod(x.shape) + abs(offset)
    return apply_one("diag_embed", ravel(x), rows=size, columns=size, offset=offset)
