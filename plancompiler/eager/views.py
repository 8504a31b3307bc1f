"""Views: which ops make a view of their input, how it shares memory, and how it is written.

Whether the result of an op is a view is a fact of the whole tensor, as in NumPy and PyTorch, and
the same in every layout. A view shares memory where every rank finds its part of the result in its
own part of the input: axes that are cut must not be split, and nothing may have to move. Where that
is not so, the view is a copy that is kept up to date (see `materialized_view`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from plancompiler.eager.spec import AttrMap, TensorSpec
from plancompiler.eager.tensor import DistTensor
from plancompiler.ir import Split
from plancompiler.ops.registry import Array

Alias = Callable[[Array], Array]


def view_by(kind: str, attrs: AttrMap, made: tuple[int, ...]) -> Alias:
    """What makes an array of shape `made` of an array, as an op that makes views does; it shares
    memory, but for reshapes of some arrays.
    """
    given: Mapping[str, Any] = attrs
    if kind == "transpose":
        axes = given["axes"]
        return lambda array: array.transpose(axes)
    if kind == "expand_to":
        return lambda array: np.broadcast_to(array, made)
    if kind not in ("slice", "strided_slice"):
        return lambda array: array.reshape(made)
    steps = given.get("steps", (1,) * len(made))
    index = tuple(map(slice, given["starts"], given["stops"], steps))
    place: tuple[slice | EllipsisType, ...] = (*index, ...)
    return lambda array: array[place]


def alias_of(kind: str, attrs: AttrMap, used: TensorSpec, made: TensorSpec) -> Alias | None:
    """What makes this rank's part of an op's result a view of its part of the input; None where it
    has to be a copy. Reshapes are not among these: they depend on how the array lies in memory.
    """
    if kind in ("slice", "strided_slice"):
        if not made.inside or made.sbp != used.sbp:
            # It splits what all ranks have: a change of the result would not reach all copies.
            return None
        split = {entry.axis for entry in used.sbp if isinstance(entry, Split)}
        if any(made.shape[axis] != used.shape[axis] for axis in split):
            return None
    elif kind not in ("transpose", "expand_to"):
        return None
    return view_by(kind, attrs, made.local_shape)


_BYTE = np.zeros(1, np.int8)
"""Stands for any memory where only strides matter."""

Strides = tuple[int, ...]
"""By how many elements of the base's memory a step along each axis goes on, were it whole."""


def row_major(shape: tuple[int, ...]) -> Strides:
    """The strides of a tensor that is no view."""
    found, step = [], 1
    for extent in reversed(shape):
        found.append(step)
        step *= extent
    return tuple(reversed(found))


def view_strides(
    kind: str,
    attrs: AttrMap,
    shape: tuple[int, ...],
    strides: Strides,
    made: tuple[int, ...],
) -> Strides | None:
    """The strides of a view of shape `made` of a tensor; None for a reshape that must copy."""
    given: Mapping[str, Any] = attrs
    if kind == "transpose":
        return tuple(strides[axis] for axis in given["axes"])
    if kind == "expand_to":
        new = len(made) - len(shape)
        kept = zip(shape, strides, made[new:], strict=True)
        return (0,) * new + tuple(
            stride if before == after else 0 for before, stride, after in kept
        )
    if kind == "strided_slice":
        return tuple(stride * step for stride, step in zip(strides, given["steps"], strict=True))
    if kind == "reshape":
        return _reshaped_strides(shape, strides, made)
    return strides


def keeps_order(kind: str, attrs: AttrMap, used: TensorSpec, made: TensorSpec) -> bool:
    """Whether a view that `alias_of` makes of a tensor in row-major order is in that order.

    It is a fact of the whole tensor: a part may be in order by chance, with an extent of one, and
    then the ranks would not agree on which reshapes are views.
    """
    whole = as_strided(_BYTE, used.shape, row_major(used.shape))
    return view_by(kind, attrs, made.shape)(whole).flags.c_contiguous


def strides_of(tensor: DistTensor) -> Strides:
    """The strides of a tensor that may be a view."""
    source, plan = tensor.source, tensor.by
    if source is None:
        return row_major(tensor.shape)
    if plan is None:
        return strides_of(source) if source.shape == tensor.shape else row_major(tensor.shape)
    found = view_strides(plan.kind, plan.attrs, source.shape, strides_of(source), tensor.shape)
    assert found is not None
    return found


def makes_view(
    tensor: DistTensor,
    kind: str,
    attrs: AttrMap,
    made: tuple[int, ...],
) -> bool:
    """Whether what an op that can make views makes of a tensor is one."""
    if kind != "reshape" or not tensor.is_view:
        return True
    return view_strides(kind, attrs, tensor.shape, strides_of(tensor), made) is not None


def _reshaped_strides(
    shape: tuple[int, ...], strides: Strides, made: tuple[int, ...]
) -> Strides | None:
    """As PyTorch's `computeStride`: runs of axes that lie as one are cut anew."""
    if 0 in shape:
        return row_major(made)
    found = [1] * len(made)
    at = len(made)
    run, step = 1, strides[-1] if strides else 1
    for axis in reversed(range(len(shape))):
        run *= shape[axis]
        if axis and (shape[axis - 1] == 1 or strides[axis - 1] == run * step):
            continue
        taken = 1
        while at and (taken < run or made[at - 1] == 1):
            at -= 1
            found[at] = taken * step
            taken *= made[at]
        if taken != run:
            return None
        if axis:
            run, step = 1, strides[axis - 1]
    return None if any(extent != 1 for extent in made[:at]) else tuple(found)


def only_thin(used: TensorSpec, made: TensorSpec) -> bool:
    """Whether a reshape only adds and drops axes of extent 1: then it is a view in any order."""
    return [each for each in used.shape if each != 1] == [each for each in made.shape if each != 1]
