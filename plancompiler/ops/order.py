"""Order along an axis, which stays whole: sort, argsort and topk.

Equal elements keep their order; NaN counts as the greatest, as in NumPy.
"""

from __future__ import annotations

import numpy as np

from plancompiler.errors import AttributeValueError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ir.shard import element_count
from plancompiler.ops.attributes import Axis, Bool, Int
from plancompiler.ops.registry import Array, Arrays, AttrMap, KernelContext, Types, define_op
from plancompiler.ops.scan import at_indices, axis_rule

_PARTITION_FROM = 256
"""Rows from this length on are partitioned before the few greatest are sorted."""


def stable_order(x: Array, descending: bool) -> Array:
    """Indices that sort the last axis, equal elements in the order they have."""
    order: Array
    if descending:
        # Sorted backwards from the back, equal elements come in their order from the front.
        order = x.shape[-1] - 1 - np.argsort(x[..., ::-1], axis=-1, kind="stable")[..., ::-1]
    else:
        order = np.argsort(x, axis=-1, kind="stable")
    return order


def _order(x: Array, descending: bool) -> Array:
    """The same, sooner where floats differ, as most do: NumPy's unstable sort is the faster one."""
    if x.dtype.kind != "f" or x.shape[-1] == 0:
        return stable_order(x, descending)
    order: Array = np.argsort(x, axis=-1)
    values = np.take_along_axis(x, order, axis=-1)
    # Only rows without equal elements have one order; NaN, which equals nothing, stands last.
    tied = np.equal(values[..., 1:], values[..., :-1]).any(axis=-1) | np.isnan(values[..., -1])
    if descending:
        order = order[..., ::-1]
    if tied.any():
        order = np.array(order)
        order[tied] = stable_order(x[tied], descending)
    return order


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


def _sort_flops(inputs: Types, outputs: Types, attrs: AttrMap) -> int:
    extent = inputs[0].shape[attrs["axis"]]
    return element_count(inputs[0].shape) * max(1, extent.bit_length())


# --- sort and argsort -----------------------------------------------------------------------------


def _sort_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    axis = context.attrs["axis"]
    x, values, indices = (np.moveaxis(array, axis, -1) for array in (*inputs, *outputs))
    order = _order(x, context.attrs["descending"])
    np.copyto(indices, order)
    np.copyto(values, np.take_along_axis(x, order, axis=-1))


def _argsort_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    axis = context.attrs["axis"]
    order = _order(np.moveaxis(inputs[0], axis, -1), context.attrs["descending"])
    np.copyto(np.moveaxis(outputs[0], axis, -1), order)


define_op(
    "sort",
    infer="x N ... -> values N ..., indices int64 ...",
    rule=axis_rule,
    attrs=(Axis(), Bool("descending", False)),
    kernel=_sort_kernel,
    gradient=at_indices("sort"),
    flops=_sort_flops,
    portable=False,
    doc="The elements in order along an axis, and the int64 index that each had.",
)
define_op(
    "argsort",
    infer="x N ... -> indices int64 ...",
    rule=axis_rule,
    attrs=(Axis(), Bool("descending", False)),
    kernel=_argsort_kernel,
    flops=_sort_flops,
    doc="The int64 indices that put the elements in order along an axis.",
)


# --- topk -----------------------------------------------------------------------------------------


def _topk_infer(inputs: Types, attrs: AttrMap) -> Types:
    shape = inputs[0].shape
    axis = attrs["axis"]
    count = attrs["k"]
    if count > shape[axis]:
        raise AttributeValueError(
            "topk is asked for more elements than its axis has",
            got=f"k {count} for shape {shape}",
            expected=f"at most {shape[axis]}",
        )
    kept = (*shape[:axis], count, *shape[axis + 1 :])
    return TensorType(kept, inputs[0].dtype), TensorType(kept, DType.INT64)


def _topk_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    axis = context.attrs["axis"]
    x, values, indices = (np.moveaxis(array, axis, -1) for array in (*inputs, *outputs))
    largest = context.attrs["largest"]
    order = _first_of_order(x, values.shape[-1], largest)
    np.copyto(indices, order)
    np.copyto(values, np.take_along_axis(x, order, axis=-1))


define_op(
    "topk",
    infer=_topk_infer,
    operands="x N -> values N, indices int64",
    rule=axis_rule,
    attrs=(
        Axis(),
        Int("k", least=0),
        Bool("largest", True),
    ),
    kernel=_topk_kernel,
    gradient=at_indices("topk"),
    flops=1,
    portable=False,
    doc="The k greatest elements along an axis (the least where `largest` is False), the first "
    "of them first, and their int64 indices.",
)
