"""Views: strides that they have, and what stays as it is under them."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

from plancompiler.ops.registry import AttrMap, View, op_def

_BYTE = np.zeros(1, np.int8)
"""Stands for any memory where only strides matter."""

Strides = tuple[int, ...]
"""By how many elements of the base's memory a step along each axis goes on, were it whole."""

RESHAPED = View(
    lambda attrs, made: lambda array: array.reshape(made),
    lambda source, value, attrs: (
        value if value.shape == source.shape else value.reshape(source.shape)
    ),
)
"""What an op without other strides makes, which can only be another shape."""


def view_of(kind: str) -> View:
    """The view that an op makes."""
    return op_def(kind).strided or RESHAPED


def row_major(shape: tuple[int, ...]) -> Strides:
    """The strides of a tensor that is no view."""
    steps, step = [], 1
    for extent in reversed(shape):
        steps.append(step)
        step *= extent
    return tuple(reversed(steps))


def view_strides(
    kind: str,
    attrs: AttrMap,
    shape: tuple[int, ...],
    strides: Strides,
    made: tuple[int, ...],
) -> Strides | None:
    """The strides of a view of shape `made` of a tensor; None for a reshape that must copy."""
    strided = op_def(kind).strided
    if strided is None:
        return _reshaped_strides(shape, strides, made)
    return strided.take(attrs, made)(as_strided(_BYTE, shape, strides)).strides


def keeps_order(kind: str, attrs: AttrMap, shape: tuple[int, ...], made: tuple[int, ...]) -> bool:
    """Whether the view that an op makes of a tensor in row-major order is in that order.

    It is a fact of the whole tensor: a part may be in order by chance, with an extent of one, and
    then the ranks would not agree on which reshapes are views.
    """
    whole = as_strided(_BYTE, shape, row_major(shape))
    return view_of(kind).take(attrs, made)(whole).flags.c_contiguous


def in_order(shape: tuple[int, ...], strides: Strides) -> bool:
    """Whether a tensor of these strides is in row-major order."""
    return as_strided(_BYTE, shape, strides).flags.c_contiguous


def _reshaped_strides(
    shape: tuple[int, ...], strides: Strides, made: tuple[int, ...]
) -> Strides | None:
    """As PyTorch's `computeStride`: runs of axes that lie as one are cut anew."""
    if shape == made:
        return strides
    if 0 in shape:
        return row_major(made)
    steps = [1] * len(made)
    at = len(made)
    run, step = 1, strides[-1] if strides else 1
    for axis in reversed(range(len(shape))):
        run *= shape[axis]
        if axis and (shape[axis - 1] == 1 or strides[axis - 1] == run * step):
            continue
        taken = 1
        while at and (taken < run or made[at - 1] == 1):
            at -= 1
            steps[at] = taken * step
            taken *= made[at]
        if taken != run:
            return None
        if axis:
            run, step = 1, strides[axis - 1]
    return None if any(extent != 1 for extent in made[:at]) else tuple(steps)
