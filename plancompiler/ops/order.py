"""Order along an axis, which stays whole: sort, argsort and topk.

Equal elements keep their order; NaN counts as the greatest, as in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from plancompiler.errors import AttributeValueError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ops.check import (
    NUMBERS,
    axis_attr,
    bool_attr,
    expect_dtype,
    expect_inputs,
    int_attr,
    only_attrs,
)
from plancompiler.ops.gradient import only_first
from plancompiler.ops.reduce import input_flops
from plancompiler.ops.registry import (
    Array,
    AttrMap,
    Gradient,
    KernelContext,
    OpDef,
    Types,
    apply,
    register,
)
from plancompiler.ops.scan import axis_rule

_PARTITION_FROM = 256
"""Rows from this length on are partitioned before the few greatest are sorted."""


def _stable_order(x: Array, descending: bool) -> Array:
    """Indices that sort the last axis, equal elements in the order they have."""
    found: Array
    if descending:
        # Sorted backwards from the back, equal elements come in their order from the front.
        found = x.shape[-1] - 1 - np.argsort(x[..., ::-1], axis=-1, kind="stable")[..., ::-1]
    else:
        found = np.argsort(x, axis=-1, kind="stable")
    return found


def _order(x: Array, descending: bool) -> Array:
    """The same, sooner where floats differ, as most do: NumPy's unstable sort is the faster one."""
    if x.dtype.kind != "f" or x.shape[-1] == 0:
        return _stable_order(x, descending)
    found: Array = np.argsort(x, axis=-1)
    values = np.take_along_axis(x, found, axis=-1)
    # Only rows without equal elements have one order; NaN, which equals nothing, stands last.
    tied = np.equal(values[..., 1:], values[..., :-1]).any(axis=-1) | np.isnan(values[..., -1])
    if descending:
        found = found[..., ::-1]
    if tied.any():
        found = np.array(found)
        found[tied] = _stable_order(x[tied], descending)
    return found


def _first_of_order(x: Array, count: int, descending: bool) -> Array:
    """The first `count` columns of `_order`, in linear time for long rows."""
    extent = x.shape[-1]
    if extent < _PARTITION_FROM or 8 * count > extent or count == 0:
        return _order(x, descending)[..., :count]
    at = extent - count if descending else count - 1
    bound = np.partition(x, at, axis=-1)[..., at : at + 1]
    better = np.greater(x, bound) if descending else np.less(x, bound)
    ties = np.equal(x, bound)
    missing = count - np.add.reduce(better, axis=-1, dtype=np.int64, keepdims=True)
    ties &= np.add.accumulate(ties, axis=-1, dtype=np.int64) <= missing
    chosen = np.logical_or(better, ties, out=better)
    columns = np.nonzero(chosen)[-1]
    if columns.size != chosen.size // extent * count:
        # NaN compares with nothing.
        return _order(x, descending)[..., :count]
    candidates = columns.reshape(*x.shape[:-1], count)
    order = _order(np.take_along_axis(x, candidates, axis=-1), descending)
    return np.take_along_axis(candidates, order, axis=-1)


def _scatter_gradient(kind: str) -> Gradient:
    """What each value's gradient adds at the value's index (the second output)."""

    def gradient(
        attrs: AttrMap, inputs: Sequence[Any], outputs: Sequence[Any], grads: Sequence[Any]
    ) -> Sequence[Any]:
        axis = axis_attr(attrs, inputs[0].ndim)
        extent = inputs[0].shape[axis]
        grad = only_first(kind, grads)
        return (apply("take_along_axis_grad", outputs[1], grad, axis=axis, extent=extent),)

    return gradient


def _sort_flops(inputs: Types, outputs: Types, attrs: AttrMap) -> int:
    extent = inputs[0].shape[axis_attr(attrs, len(inputs[0].shape))]
    return input_flops(inputs, outputs, attrs) * max(1, extent.bit_length())


# --- sort and argsort -----------------------------------------------------------------------------


def _check(kind: str, inputs: Types, attrs: AttrMap) -> None:
    expect_inputs(kind, inputs, 1)
    only_attrs(kind, attrs, "axis", "descending")
    expect_dtype(kind, inputs[0], NUMBERS)
    axis_attr(attrs, len(inputs[0].shape))
    bool_attr(attrs, "descending", False)


def _sort_infer(inputs: Types, attrs: AttrMap) -> Types:
    _check("sort", inputs, attrs)
    return inputs[0], TensorType(inputs[0].shape, DType.INT64)


def _argsort_infer(inputs: Types, attrs: AttrMap) -> Types:
    _check("argsort", inputs, attrs)
    return (TensorType(inputs[0].shape, DType.INT64),)


def _sort_kernel(context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    axis = axis_attr(context.attrs, inputs[0].ndim)
    x, values, indices = (np.moveaxis(array, axis, -1) for array in (*inputs, *outputs))
    order = _order(x, bool_attr(context.attrs, "descending", False))
    np.copyto(indices, order)
    np.copyto(values, np.take_along_axis(x, order, axis=-1))


def _argsort_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    axis = axis_attr(context.attrs, inputs[0].ndim)
    order = _order(np.moveaxis(inputs[0], axis, -1), bool_attr(context.attrs, "descending", False))
    np.copyto(np.moveaxis(outputs[0], axis, -1), order)


register(
    OpDef(
        "sort",
        infer=_sort_infer,
        rule=axis_rule,
        kernel=_sort_kernel,
        gradient=_scatter_gradient("sort"),
        flops=_sort_flops,
        doc="The elements in order along an axis, and the int64 index that each had.",
    )
)
register(
    OpDef(
        "argsort",
        infer=_argsort_infer,
        rule=axis_rule,
        kernel=_argsort_kernel,
        flops=_sort_flops,
        doc="The int64 indices that put the elements in order along an axis.",
    )
)


# --- topk -----------------------------------------------------------------------------------------


def _topk_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_inputs("topk", inputs, 1)
    only_attrs("topk", attrs, "axis", "k", "largest")
    expect_dtype("topk", inputs[0], NUMBERS)
    shape = inputs[0].shape
    axis = axis_attr(attrs, len(shape))
    count = int_attr(attrs, "k", least=0)
    bool_attr(attrs, "largest", True)
    if count > shape[axis]:
        raise AttributeValueError(
            "topk is asked for more elements than its axis has",
            got=f"k {count} for shape {shape}",
            expected=f"at most {shape[axis]}",
        )
    kept = (*shape[:axis], count, *shape[axis + 1 :])
    return TensorType(kept, inputs[0].dtype), TensorType(kept, DType.INT64)


def _topk_kernel(context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    axis = axis_attr(context.attrs, inputs[0].ndim)
    x, values, indices = (np.moveaxis(array, axis, -1) for array in (*inputs, *outputs))
    largest = bool_attr(context.attrs, "largest", True)
    order = _first_of_order(x, values.shape[-1], largest)
    np.copyto(indices, order)
    np.copyto(values, np.take_along_axis(x, order, axis=-1))


register(
    OpDef(
        "topk",
        infer=_topk_infer,
        rule=axis_rule,
        kernel=_topk_kernel,
        gradient=_scatter_gradient("topk"),
        flops=input_flops,
        doc="The k greatest elements along an axis (the least where `largest` is False), the first "
        "of them first, and their int64 indices.",
    )
)
