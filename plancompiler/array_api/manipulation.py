"""Manipulation, indexing and dtype functions of the array API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plancompiler.array_api.placement import placement_of
from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.frontend import functions
from plancompiler.ir import DType, Placement
from plancompiler.ops import check

Axis = int | Sequence[int]


def astype(x: Any, dtype: DType, /, *, copy: bool = True, device: Placement | None = None) -> Any:
    """The same values as another dtype; the tensor itself where nothing changes and `copy` is
    False.
    """
    wanted = DType.parse(dtype)
    made = x if wanted is x.dtype and not copy else x.cast(wanted)
    return made if device is None else made.redistribute(placement=placement_of(device))


def broadcast_arrays(*arrays: Any) -> tuple[Any, ...]:
    """Tensors in the shape to which they broadcast together."""
    return functions.broadcast_arrays(*arrays) if arrays else ()


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape to which shapes broadcast together. ValueError, as the standard says, where they do
    not.
    """
    try:
        return check.broadcast_shapes("broadcast_shapes", shapes) if shapes else ()
    except ShapeError as error:
        raise ValueError(str(error)) from error


def broadcast_to(x: Any, /, shape: Sequence[int]) -> Any:
    """A tensor broadcast to a shape."""
    return functions.expand(x, shape)


def concat(arrays: Sequence[Any], /, *, axis: int | None = 0) -> Any:
    """Tensors joined along an axis; without one, as vectors."""
    if axis is None:
        return functions.concat([each.reshape((-1,)) for each in arrays])
    return functions.concat(list(arrays), axis)


def expand_dims(x: Any, /, axis: Axis = 0) -> Any:
    """A tensor with new axes of extent 1 at these positions of the result."""
    return functions.unsqueeze(x, axis)


def flip(x: Any, /, *, axis: Axis | None = None) -> Any:
    """Elements in reverse order along axes (all by default)."""
    return functions.flip(x, axis)


def moveaxis(x: Any, source: Axis, destination: Axis, /) -> Any:
    """Axes moved to other positions; the rest keep their order."""
    return functions.moveaxis(x, source, destination)


def permute_dims(x: Any, /, axes: Sequence[int]) -> Any:
    """Axes in another order."""
    return functions.permute(x, axes)


def repeat(x: Any, repeats: Any, /, *, axis: int | None = None) -> Any:
    """Each element of an axis several times in a row; without an axis, of all elements."""
    return functions.repeat(x, repeats, axis)


def reshape(x: Any, /, shape: Sequence[int], *, copy: bool | None = None) -> Any:
    """The same elements in another shape, as a view unless `copy` is True."""
    return functions.reshape(+x if copy else x, shape)


def roll(x: Any, /, shift: Axis, *, axis: Axis | None = None) -> Any:
    """Elements moved by `shift` places along axes, around the end; without axes, as a vector."""
    if axis is None:
        return functions.roll(x.reshape((-1,)), shift, 0).reshape(x.shape)
    if isinstance(axis, int) or not isinstance(shift, int):
        return functions.roll(x, shift, axis)
    return functions.roll(x, (shift,) * len(axis), axis)


def squeeze(x: Any, /, axis: Axis) -> Any:
    """A tensor without these axes, of extent 1; ValueError, as the standard says, for others."""
    try:
        return functions.squeeze(x, axis)
    except AttributeValueError as error:
        raise ValueError(str(error)) from error


def stack(arrays: Sequence[Any], /, *, axis: int = 0) -> Any:
    """Tensors of one shape side by side along a new axis."""
    return functions.stack(list(arrays), axis)


def tile(x: Any, repetitions: Sequence[int], /) -> Any:
    """The whole tensor repeated along each axis."""
    return functions.tile(x, repetitions)


def unstack(x: Any, /, *, axis: int = 0) -> tuple[Any, ...]:
    """The tensors along an axis, without it."""
    return functions.unbind(x, axis)


def take(x: Any, indices: Any, /, *, axis: int | None = None) -> Any:
    """The elements of an axis at indices of any shape; a vector needs no axis."""
    if axis is None:
        if x.ndim != 1:
            raise ValueError("take from a tensor of several axes needs an axis")
        axis = 0
    return functions.take(x, indices, axis)


def take_along_axis(x: Any, indices: Any, /, *, axis: int = -1) -> Any:
    """For each index the element of x there along an axis; the other axes broadcast."""
    at = axis % x.ndim
    lead = [
        check.broadcast_shapes("take_along_axis", [(one,), (other,)])[0]
        for one, other in zip(x.shape, indices.shape, strict=True)
    ]
    own, places = list(lead), list(lead)
    own[at], places[at] = x.shape[at], indices.shape[at]
    wrapped = functions.where(indices < 0, indices + x.shape[at], indices)
    return functions.take_along_axis(
        functions.expand(x, own), functions.expand(wrapped, places), at
    )
