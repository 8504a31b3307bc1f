"""Softmax, its logarithm and cross-entropy, with their gradients. The class axis stays whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from plancompiler.errors import ExecutionError, ShapeError
from plancompiler.ir.shard import element_count
from plancompiler.ops import row_loops
from plancompiler.ops.attributes import Axis, Int
from plancompiler.ops.formula import by_formula
from plancompiler.ops.gradient import by_op
from plancompiler.ops.kernel import contiguous, in_float32, row_blocks, rows_of, scratch
from plancompiler.ops.numba_loops import row_loop
from plancompiler.ops.registry import Array, Arrays, AttrMap, KernelContext, Types, apply, define_op
from plancompiler.ops.scan import axis_rule


def _flops(inputs: Types, outputs: Types, attrs: AttrMap) -> int:
    return 5 * element_count(inputs[0].shape)


def _row_pieces(axis: int, *arrays: Array) -> Iterable[tuple[Array, ...]]:
    """The arrays cut into pieces of whole rows along `axis`, the last axis of each piece."""
    if axis == arrays[0].ndim - 1 and all(array.flags.c_contiguous for array in arrays):
        return row_blocks(arrays[0].shape[-1], *map(rows_of, arrays))
    return [tuple(np.moveaxis(array, axis, -1) for array in arrays)]


def _row_sum(context: KernelContext, rows: Array) -> Array:
    """The sum of each row, as a column: a product with ones, which is three times faster."""
    width = rows.shape[-1]
    ones = context.state.get("ones")
    if ones is None or ones.dtype != rows.dtype:
        ones = context.state["ones"] = context.arrays.ones((width, 1), rows.dtype)
    totals: Array = np.matmul(rows, ones)
    return totals


def _row_max(rows: Array) -> Array:
    """The greatest element of each row, as a column."""
    greatest: Array
    if rows.ndim == 2:
        # To find its place and look it up takes half the time of a reduction.
        greatest = rows[np.arange(len(rows), like=rows), rows.argmax(axis=-1)][:, None]
    else:
        greatest = np.maximum.reduce(rows, axis=-1, keepdims=True)
    return greatest


def _axis_infer(inputs: Types, attrs: AttrMap) -> Types:
    shape = inputs[0].shape
    if shape[attrs["axis"]] == 0:
        raise ShapeError("softmax over an empty axis has no value", got=shape)
    return inputs[:1]


def _softmax_rows(context: KernelContext, x: Array, y: Array) -> None:
    """Softmax along the last axis; `y` may be `x`."""
    np.subtract(x, _row_max(x), out=y)
    np.exp(y, out=y)
    np.multiply(y, np.reciprocal(_row_sum(context, y)), out=y)


def _softmax_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    axis = context.attrs["axis"]
    for x, y in _row_pieces(axis, *inputs, *outputs):
        _softmax_rows(context, x, y)


def _softmax_grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    axis = context.attrs["axis"]
    loop = row_loop(row_loops.softmax_grad, *inputs, *outputs)
    if loop is not None and axis == inputs[0].ndim - 1:
        loop(*map(rows_of, (*inputs, *outputs)))
        return
    for y, dy, dx in _row_pieces(axis, *inputs, *outputs):
        work = scratch(context, "work", y.shape, y.dtype)
        np.multiply(y, dy, out=work)
        np.subtract(dy, _row_sum(context, work), out=dx)
        np.multiply(dx, y, out=dx)


def _log_softmax_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    axis = context.attrs["axis"]
    for x, y in _row_pieces(axis, *inputs, *outputs):
        work = scratch(context, "work", x.shape, x.dtype)
        np.subtract(x, _row_max(x), out=y)
        np.exp(y, out=work)
        np.subtract(y, np.log(_row_sum(context, work)), out=y)


def _log_softmax_grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    axis = context.attrs["axis"]
    for y, dy, dx in _row_pieces(axis, *inputs, *outputs):
        work = scratch(context, "work", y.shape, y.dtype)
        np.exp(y, out=work)
        np.multiply(work, _row_sum(context, dy), out=work)
        np.subtract(dy, work, out=dx)


def _softmax_grad_formula(attrs: AttrMap, y: Any, dy: Any) -> Any:
    return (dy - (y * dy).sum(attrs["axis"], keepdims=True)) * y


def _log_softmax_grad_formula(attrs: AttrMap, y: Any, dy: Any) -> Any:
    return dy - y.exp() * dy.sum(attrs["axis"], keepdims=True)


define_op(
    "softmax",
    infer=_axis_infer,
    operands="x F -> y F",
    rule=axis_rule,
    attrs=(Axis(),),
    kernel=in_float32(_softmax_kernel),
    gradient=by_op("softmax", "softmax_grad"),
    flops=_flops,
    inplace=((0, 0),),
    doc="exp(x) over its sum along an axis.",
)
define_op(
    "softmax_grad",
    infer=_axis_infer,
    operands="y F ..., dy F ... -> dx F",
    rule=axis_rule,
    attrs=(Axis(),),
    kernel=in_float32(_softmax_grad_kernel),
    gradient=by_formula(_softmax_grad_formula),
    linear=((1,),),
    flops=_flops,
    inplace=((0, 1),),
    doc="The gradient of softmax: (y, dy) -> dx.",
)
define_op(
    "log_softmax",
    infer=_axis_infer,
    operands="x F -> y F",
    rule=axis_rule,
    attrs=(Axis(),),
    kernel=in_float32(_log_softmax_kernel),
    gradient=by_op("log_softmax", "log_softmax_grad"),
    flops=_flops,
    inplace=((0, 0),),
    doc="The logarithm of softmax along an axis.",
)
define_op(
    "log_softmax_grad",
    infer=_axis_infer,
    operands="y F ..., dy F ... -> dx F",
    rule=axis_rule,
    attrs=(Axis(),),
    kernel=in_float32(_log_softmax_grad_kernel),
    gradient=by_formula(_log_softmax_grad_formula),
    linear=((1,),),
    flops=_flops,
    inplace=((0, 0), (0, 1)),
    doc="The gradient of log_softmax: (y, dy) -> dx.",
)


# --- cross-entropy --------------------------------------------------------------------------------

IGNORE_INDEX = -100
"""The label of examples that do not count, unless the attribute `ignore_index` says otherwise."""


def _labels(context: KernelContext, labels: Array, classes: int) -> tuple[Array, Array | None]:
    """Flat labels that can be used as indices, and which of them count (None: all)."""
    flat = labels.reshape(-1)
    ignored = context.attrs["ignore_index"]
    counts = flat != ignored
    wrong = counts & ((flat < 0) | (flat >= classes))
    if wrong.any():
        raise ExecutionError(
            "a label of cross_entropy is no class",
            got=int(flat[np.argmax(wrong)]),
            expected=f"0 to {classes - 1}, or {ignored} to leave an example out",
        )
    if np.count_nonzero(counts) == counts.size:
        return flat, None
    return np.where(counts, flat, 0), counts


def _cross_entropy_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    logits, labels = inputs
    classes = logits.shape[-1]
    flat, counts = _labels(context, labels, classes)
    loss = outputs[0].reshape(-1)
    for x, label, result in row_blocks(classes, rows_of(logits), flat, loss):
        work = scratch(context, "work", x.shape, x.dtype)
        top = _row_max(x)
        np.subtract(x, top, out=work)
        picked = work[np.arange(len(label), like=label), label]
        np.exp(work, out=work)
        np.log(_row_sum(context, work)[:, 0], out=result)
        np.subtract(result, picked, out=result)
    if counts is not None:
        loss[~counts] = 0


def _cross_entropy_grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (logits, labels, dloss), (out,) = inputs, outputs
    classes = logits.shape[-1]
    flat, counts = _labels(context, labels, classes)
    scale = dloss.reshape(flat.size)
    if counts is not None:
        scale = np.where(counts, scale, scale.dtype.type(0))
    for x, label, factor, dx in row_blocks(classes, rows_of(logits), flat, scale, rows_of(out)):
        _softmax_rows(context, x, dx)
        dx[np.arange(len(label), like=label), label] -= 1
        np.multiply(dx, factor[:, None], out=dx)


def _cross_entropy_grad_formula(attrs: AttrMap, logits: Any, labels: Any, dloss: Any) -> Any:
    """Cross-entropy is nll_loss of log_softmax; this is one's gradient of the other's."""
    last = logits.ndim - 1
    dlogs = apply("nll_loss_grad", labels, dloss, **attrs, classes=logits.shape[-1])
    return apply("log_softmax_grad", apply("log_softmax", logits, axis=last), dlogs, axis=last)


define_op(
    "cross_entropy",
    infer="logits F!, labels i -> loss A",
    rule="... [v], ... -> ...",
    attrs=(Int("ignore_index", IGNORE_INDEX),),
    kernel=in_float32(contiguous(_cross_entropy_kernel)),
    gradient=by_op("cross_entropy", "cross_entropy_grad"),
    flops=_flops,
    doc="Minus the log-softmax of each row of logits at its label, in at least float32; zero "
    "where the label is `ignore_index`.",
)
define_op(
    "cross_entropy_grad",
    infer="logits F!, labels i, dloss A -> dlogits F",
    rule="... [v], ..., ... -> ... [v]",
    attrs=(Int("ignore_index", IGNORE_INDEX),),
    kernel=in_float32(contiguous(_cross_entropy_grad_kernel)),
    gradient=by_formula(_cross_entropy_grad_formula),
    linear=((2,),),
    flops=_flops,
    inplace=((0, 0),),
    doc="The gradient of cross_entropy: (logits, labels, dloss) -> dlogits.",
)
