"""Indexing as NumPy has it: `x[index]` as ops, and what `x` becomes by `x[index] = value`.

An index is one entry or a tuple of them: whole numbers, slices, `...` and None, which cut and
reshape; and lists or tensors of whole numbers or truth values, which select. The first kind is a
box of the tensor, walked forwards, some axes of it turned around, and another shape. Of the second
kind, several select together: they are broadcast, and each place names one element of their axes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plancompiler.errors import AttributeValueError, IndexingError, TracingError
from plancompiler.ir.dtype import DType
from plancompiler.ir.promotion import result_dtype

Tensor = Any
"""A symbolic or eager tensor: of the class whose operators these functions are."""
Box = tuple[tuple[int, int, int], ...]
"""Start, stop and step of a slice along each axis; steps are positive."""


@dataclass(frozen=True, slots=True)
class Index:
    """An index of a tensor of known shape."""

    box: Box
    turned: tuple[int, ...]
    """Axes of the box that are walked backwards."""
    shape: tuple[int, ...]
    """The box's shape without the axes of whole numbers, and with those that None adds."""
    selected: tuple[int, ...]
    """Axes of that shape along which tensors select."""
    places: tuple[Tensor, ...]
    """Those tensors, of whole numbers."""
    target: int
    """Before which of the other axes what they select comes to stand."""

    def box_attrs(self) -> dict[str, tuple[int, ...]]:
        """The box as attributes of an op."""
        starts, stops, steps = zip(*self.box, strict=True) if self.box else ((), (), ())
        return {"starts": starts, "stops": stops, "steps": steps}

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Whether the box is all of a tensor of this shape."""
        return all(bounds == (0, extent, 1) for bounds, extent in zip(self.box, shape, strict=True))


def parse_index(tensor: Tensor, index: Any) -> Index:
    """An index as box, shape and selecting tensors. IndexingError where it does not fit."""
    given = index if isinstance(index, tuple) else (index,)
    entries = _without_dots(tensor.shape, [_listed(tensor, entry) for entry in given])
    box: list[tuple[int, int, int]] = []
    turned: list[int] = []
    shape: list[int] = []
    selected: list[int] = []
    places: list[Tensor] = []
    kinds: list[str] = []
    for entry in entries:
        axis = len(box)
        if entry is None:
            shape.append(1)
            kinds.append("other")
        elif isinstance(entry, slice):
            bounds, backwards = _forwards(entry, tensor.shape[axis])
            if backwards:
                turned.append(axis)
            box.append(bounds)
            shape.append(len(range(*bounds)))
            kinds.append("other")
        elif _is_tensor(entry):
            for each in _places_of(tensor, entry, axis):
                extent = tensor.shape[len(box)]
                selected.append(len(shape))
                places.append(each)
                box.append((0, extent, 1))
                shape.append(extent)
            kinds.append("selecting")
        else:
            position = _position(entry, tensor.shape[axis], axis)
            box.append((position, position + 1, 1))
            kinds.append("number")
    shapes = [each.shape for each in places]
    try:
        np.broadcast_shapes(*shapes)
    except ValueError:
        raise IndexingError(
            "the shapes of tensors that select together do not broadcast",
            got=" and ".join(map(str, shapes)),
        ) from None
    return Index(
        tuple(box),
        tuple(turned),
        tuple(shape),
        tuple(selected),
        tuple(places),
        _target(kinds, selected),
    )


def _target(kinds: Sequence[str], selected: Sequence[int]) -> int:
    """Where the selected axes come to stand: in their place if they and the whole numbers stand
    together, else in front, as in NumPy.
    """
    if not selected:
        return 0
    together = [at for at, kind in enumerate(kinds) if kind != "other"]
    return selected[0] if together[-1] - together[0] + 1 == len(together) else 0


def _is_tensor(entry: Any) -> bool:
    return hasattr(entry, "_apply")


def _listed(tensor: Tensor, entry: Any) -> Any:
    """A list as a tensor beside the one that it selects from; NumPy's numbers as plain ones."""
    if isinstance(entry, np.ndarray) and entry.ndim:
        return tensor.coerced("x[index]", entry)
    if not isinstance(entry, list):
        return entry
    array = np.asarray(entry)
    if not array.size:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iub":
        raise _no_index(entry)
    truth = array.dtype.kind == "b"
    made: Tensor = tensor._source(  # noqa: SLF001  # what every tensor has
        "constant",
        {
            "shape": array.shape,
            "dtype": str(DType.BOOL if truth else DType.INT64),
            "values": tuple(map(int, array.ravel().tolist())),
        },
    )[0]
    return made


def _no_index(entry: Any) -> IndexingError:
    return IndexingError(
        "this is no index",
        got=type(entry).__name__ if not _is_tensor(entry) else str(entry.dtype),
        expected="a whole number, a slice, `...`, None, or a list or tensor of whole numbers or "
        "truth values",
    )


def _without_dots(shape: Sequence[int], entries: list[Any]) -> list[Any]:
    """Entries for every axis: `...` and what is missing at the end stand for whole axes."""
    # Not `in`: a tensor would be compared element by element.
    dots = [at for at, entry in enumerate(entries) if entry is Ellipsis]
    taken = sum(_axes_of(entry) for entry in entries if entry is not Ellipsis and entry is not None)
    if len(dots) > 1 or taken > len(shape):
        raise IndexingError(
            "an index has too many entries",
            got=f"{taken} axes" + (f" and {len(dots)} times `...`" if len(dots) > 1 else ""),
            expected=f"at most {len(shape)}, and `...` once",
        )
    at = dots[0] if dots else len(entries)
    return [*entries[:at], *[slice(None)] * (len(shape) - taken), *entries[at + 1 :]]


def _axes_of(entry: Any) -> int:
    """How many axes an entry takes."""
    return entry.ndim if _is_tensor(entry) and entry.dtype is DType.BOOL else 1


def _forwards(entry: slice, extent: int) -> tuple[tuple[int, int, int], bool]:
    """Bounds of a slice, walked forwards, and whether it was given backwards."""
    try:
        start, stop, step = entry.indices(extent)
    except (TypeError, ValueError) as error:
        raise IndexingError(
            "a slice has whole numbers as bounds, and a step other than 0", got=repr(entry)
        ) from error
    count = len(range(start, stop, step))
    if step > 0:
        return ((start, max(start, stop), step) if count else (0, 0, 1)), False
    if not count:
        return (0, 0, 1), False
    return (start + (count - 1) * step, start + 1, -step), True


def _position(entry: Any, extent: int, axis: int) -> int:
    """A whole number as a position of an axis."""
    if isinstance(entry, (bool, np.bool_)):
        raise _no_index(entry)
    try:
        number = operator.index(entry)
    except TypeError:
        if not isinstance(entry, float) or not entry.is_integer():
            raise _no_index(entry) from None
        number = int(entry)
    position = number + extent if number < 0 else number
    if not 0 <= position < extent:
        raise IndexingError(
            f"an index is outside axis {axis}", got=number, expected=f"{-extent} to {extent - 1}"
        )
    return position


def _places_of(tensor: Tensor, entry: Tensor, axis: int) -> tuple[Tensor, ...]:
    """A selecting tensor as tensors of whole numbers, one for each axis that it takes."""
    if entry.dtype.is_integer:
        return (entry,)
    if entry.dtype is not DType.BOOL:
        raise _no_index(entry)
    shape = tensor.shape[axis : axis + entry.ndim]
    if any(own not in (0, other) for own, other in zip(entry.shape, shape, strict=True)):
        raise IndexingError(
            "a mask has another shape than the axes that it selects from",
            got=entry.shape,
            expected=shape,
        )
    return places_of_true(entry)


def places_of_true(mask: Tensor) -> tuple[Tensor, ...]:
    """For each axis the positions where a tensor is not zero, in row-major order: int64 [count]."""
    try:
        size = int(mask._unary("count_nonzero", axes=tuple(range(mask.ndim)), keepdims=False))  # noqa: SLF001  # as above
    except TracingError as error:
        raise TracingError(
            "how many elements a mask selects is known only when the program runs",
            got=error.report.got,
            hint="pc.nonzero(mask, size=n) has a shape that is known; pc.where(mask, x, y) and "
            "x[mask] = value need none",
        ) from error
    return fixed_places(mask, size, 0)


def fixed_places(mask: Tensor, size: int, fill: int) -> tuple[Tensor, ...]:
    """The first `size` of these, or all of them and then `fill`: one vector for each axis."""
    places = mask._unary("nonzero", size=size, fill=fill)  # noqa: SLF001  # as above
    return tuple(
        places._unary("slice", starts=(axis, 0), stops=(axis + 1, size)).reshape((size,))  # noqa: SLF001  # as above
        for axis in range(mask.ndim)
    )


# --- reading --------------------------------------------------------------------------------------


def taken(tensor: Tensor, index: Any) -> Tensor:
    """`tensor[index]`; without selecting tensors a view, where there are any."""
    if _is_tensor(index) and index.dtype is DType.BOOL and not index.ndim:
        index = bool(index)
    if isinstance(index, (bool, np.bool_)):  # a mask without axes, which copies as all masks do
        every = taken(tensor.reshape((1, *tensor.shape)), slice(0, int(index)))
        return every.cast(tensor.dtype)
    parsed = parse_index(tensor, index)
    part = _turned(box_of(tensor, parsed), parsed)
    if part.shape != parsed.shape:
        part = part.reshape(parsed.shape)
    return _select(part, parsed) if parsed.selected else part


def box_of(tensor: Tensor, parsed: Index) -> Tensor:
    """The box of a tensor."""
    if parsed.is_whole(tensor.shape):
        return tensor
    attrs = parsed.box_attrs()
    if all(step == 1 for step in attrs["steps"]):
        del attrs["steps"]
        return tensor._unary("slice", **attrs)  # noqa: SLF001  # as above
    return tensor._unary("strided_slice", **attrs)  # noqa: SLF001  # as above


def _select(part: Tensor, parsed: Index) -> Tensor:
    """The elements of a box that tensors select."""
    merged, places = _merged(part, parsed)
    at = parsed.target
    chosen = merged._apply("index_select", (merged, places.reshape((-1,))), {"axis": at})[0]  # noqa: SLF001  # as above
    return chosen.reshape((*merged.shape[:at], *places.shape, *merged.shape[at + 1 :]))


def _order(parsed: Index) -> tuple[int, ...]:
    """The order of axes in which those that are selected from stand together."""
    others = [axis for axis in range(len(parsed.shape)) if axis not in parsed.selected]
    at = parsed.target
    return (*others[:at], *parsed.selected, *others[at:])


def _merged(part: Tensor, parsed: Index) -> tuple[Tensor, Tensor]:
    """A box with the axes that are selected from as one, and the positions in it."""
    order, count = _order(parsed), len(parsed.selected)
    if order != tuple(range(len(order))):
        part = part.transpose(order)
    at = parsed.target
    extents = tuple(part.shape[at : at + count])
    if count > 1:
        part = part.reshape((*part.shape[:at], math.prod(extents), *part.shape[at + count :]))
    places = parsed.places[0]._apply("ravel_index", parsed.places, {"extents": extents})[0]  # noqa: SLF001  # as above
    return part, places


# --- writing --------------------------------------------------------------------------------------


def replaced(tensor: Tensor, index: Any, value: Tensor, mode: str = "set") -> Tensor:
    """What `tensor` becomes by `tensor[index] = value`, without a change of memory. The value has
    the same dtype and broadcasts to the elements. With mode "add" it is added to them, to an
    element that several places name several times.
    """
    if _is_tensor(index) and index.dtype is DType.BOOL:
        masked = masked_value(tensor, index, value, mode)
        if masked is not None:
            return masked
    parsed = parse_index(tensor, index)
    new = put_in_box(box_of(tensor, parsed), parsed, value, mode)
    if parsed.is_whole(tensor.shape):
        return new
    return tensor._apply("slice_scatter", (tensor, new), parsed.box_attrs())[0]  # noqa: SLF001  # as above


def put_in_box(part: Tensor, parsed: Index, value: Tensor, mode: str = "set") -> Tensor:
    """What the box of an index becomes by a value in the place of its elements, or added."""
    shape = part.shape
    if not parsed.selected:
        new = broadcast(value, parsed.shape)
        if mode == "add":
            new = _turned(part, parsed).reshape(parsed.shape) + new
    else:
        new = _put(_turned(part, parsed).reshape(parsed.shape), parsed, value, mode)
    return _turned(new.reshape(shape), parsed)


def _turned(part: Tensor, parsed: Index) -> Tensor:
    """A box with the axes turned around that are walked backwards."""
    return part._unary("flip", axes=parsed.turned) if parsed.turned else part  # noqa: SLF001  # as above


def broadcast(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A value in the shape of the elements that it is put in the place of."""
    while value.ndim > len(shape) and value.shape[0] == 1:
        value = value.reshape(value.shape[1:])
    if value.shape == shape:
        return value
    return value._unary("expand_to", shape=shape)  # noqa: SLF001  # as above


def _put(part: Tensor, parsed: Index, value: Tensor, mode: str) -> Tensor:
    """A box with a value in the place of the elements that tensors select, where of equal places
    the last one wins, or added to them.
    """
    merged, places = _merged(part, parsed)
    at, count = parsed.target, math.prod(places.shape)
    lead, rest = merged.shape[:at], merged.shape[at + 1 :]
    rows = broadcast(value, (*lead, *places.shape, *rest)).reshape((*lead, count, *rest))
    wide = places.reshape((*(1,) * at, count, *(1,) * len(rest)))
    numbers = broadcast(wide, (*lead, count, *rest))
    put = merged._apply("put_along_axis", (merged, numbers, rows), {"axis": at, "mode": mode})[0]  # noqa: SLF001  # as above
    order = _order(parsed)
    put = put.reshape(tuple(parsed.shape[axis] for axis in order))
    if order == tuple(range(len(order))):
        return put
    return put.transpose([order.index(axis) for axis in range(len(order))])


def masked_value(tensor: Tensor, mask: Tensor, value: Tensor, mode: str = "set") -> Tensor | None:
    """What `tensor` becomes by `tensor[mask] = value`, where the value is broadcast to all elements
    that the mask may select; None where it has one for each that it does select.
    """
    extra = tensor.ndim - mask.ndim
    if mask.shape != tensor.shape[: mask.ndim] or value.ndim > extra + 1:
        return None
    if value.ndim == extra + 1:
        if value.shape[0] != 1:
            return None
        value = value.reshape(value.shape[1:])
    condition = mask.reshape((*mask.shape, *(1,) * extra))
    if mode == "add":
        value = tensor + value
    return condition._apply("where", (condition, value, tensor), {})[0]  # noqa: SLF001  # as above


def held_by(tensor: Tensor, value: Any) -> Tensor:
    """A number or a tensor in the dtype of the tensor that it is to be put into.

    AttributeValueError where that would lose what the value is: a fraction in whole numbers.
    """
    dtype: DType = tensor.dtype
    if not _is_tensor(value):
        return tensor._full((), dtype, number_in(dtype, value))  # noqa: SLF001  # as above
    own: DType = value.dtype
    if own is dtype:
        return value
    if result_dtype(own, dtype) is not dtype and not (own.is_floating and dtype.is_floating):
        raise AttributeValueError(
            "a value does not fit into the dtype of the tensor that it would be put into",
            got=own,
            expected=f"what {dtype} holds",
            hint="convert the value with cast",
        )
    return value.cast(dtype)


def number_in(dtype: DType, number: Any) -> bool | int | float:
    """A number that is put into a tensor: truth values count as 0 and 1, and numbers as True where
    they are not zero.
    """
    plain: bool | int | float = number.item() if hasattr(number, "item") else number
    if dtype is DType.BOOL:
        return bool(plain)
    return int(plain) if isinstance(plain, bool) else plain
