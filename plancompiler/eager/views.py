"""Views: which ops can hand out the memory of their input instead of a copy, and how.

A view is possible where every rank finds its part of the result in its own part of the input: axes
that are cut must not be split, and nothing may have to move. Where that is not so, the op makes a
tensor of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any

import numpy as np

from plancompiler.eager.spec import TensorSpec
from plancompiler.errors import AttributeValueError
from plancompiler.ir import AttrValue, Split
from plancompiler.ir.operators import TensorOperators
from plancompiler.ops.registry import Array

Alias = Callable[[Array], Array]


def alias_of(
    kind: str, attrs: Mapping[str, AttrValue], used: TensorSpec, made: TensorSpec
) -> Alias | None:
    """What makes this rank's part of an op's result a view of its part of the input; None where it
    has to be a copy. Reshapes are not among these: they depend on how the array lies in memory.
    """
    given: Mapping[str, Any] = attrs
    if kind == "transpose":
        axes = given["axes"]
        return lambda array: array.transpose(axes)
    if kind == "expand_to":
        shape = made.local_shape
        return lambda array: np.broadcast_to(array, shape)
    if kind not in ("slice", "strided_slice") or not made.inside or made.sbp != used.sbp:
        # An op that splits what all ranks have: a change of the result would not reach all copies.
        return None
    steps = given.get("steps", (1,) * len(used.shape))
    split = {entry.axis for entry in used.sbp if isinstance(entry, Split)}
    if any(made.shape[axis] != used.shape[axis] for axis in split):
        return None
    index = [
        slice(None)
        if axis in split
        else slice(given["starts"][axis], given["stops"][axis], steps[axis])
        for axis in range(len(used.shape))
    ]
    place: tuple[slice | EllipsisType, ...] = (*index, ...)
    return lambda array: array[place]


def keeps_order(
    kind: str, attrs: Mapping[str, AttrValue], used: TensorSpec, made: TensorSpec
) -> bool:
    """Whether a view that `alias_of` makes of a tensor in row-major order is in that order.

    It is a fact of the whole tensor: a part may be in order by chance, with an extent of one, and
    then the ranks would not agree on which reshapes are views.
    """
    given: Mapping[str, Any] = attrs
    if kind == "transpose":
        moved = [axis for axis in given["axes"] if used.shape[axis] != 1]
        return moved == sorted(moved)
    if kind == "expand_to":
        return math.prod(used.shape) == math.prod(made.shape)
    ndim = len(made.shape)
    first = next((axis for axis, extent in enumerate(made.shape) if extent != 1), ndim)
    return made.shape[first + 1 :] == used.shape[first + 1 :] and (
        first == ndim or given.get("steps", (1,) * ndim)[first] == 1
    )


def only_thin(used: TensorSpec, made: TensorSpec) -> bool:
    """Whether a reshape only adds and drops axes of extent 1: then it is a view in any order."""
    return [each for each in used.shape if each != 1] == [each for each in made.shape if each != 1]


def strided(tensor: TensorOperators, index: Any) -> TensorOperators:
    """Basic indexing with slices of any positive step."""
    entries = index if isinstance(index, tuple) else (index,)
    if Ellipsis in entries:
        at = entries.index(Ellipsis)
        missing = tensor.ndim - len(entries) + 1
        entries = (*entries[:at], *(slice(None),) * missing, *entries[at + 1 :])
    starts, stops, steps = [], [], []
    whole: list[Any] = []
    for axis, extent in enumerate(tensor.shape):
        entry = entries[axis] if axis < len(entries) else slice(None)
        start, stop, step = 0, extent, 1
        if isinstance(entry, slice):
            start, stop, step = entry.indices(extent)
            if step < 1:
                raise AttributeValueError(
                    "a slice must have a positive step",
                    got=repr(entry),
                    hint="pc.flip walks an axis backwards",
                )
            entry = slice(None)
        starts.append(start)
        stops.append(max(start, stop))
        steps.append(step)
        whole.append(entry)
    attrs: dict[str, AttrValue] = {
        "starts": tuple(starts),
        "stops": tuple(stops),
        "steps": tuple(steps),
    }
    found = tensor._apply("strided_slice", (tensor,), attrs)[0]  # noqa: SLF001  # every tensor's door
    return found[tuple(whole)]
