"""Running sums, products and extremes along an axis, which stays whole."""

from __future__ import annotations

from typing import Any

import numpy as np

from plancompiler.ir.op import TensorType
from plancompiler.ops.attributes import Axis, Bool
from plancompiler.ops.formula import by_formula
from plancompiler.ops.gradient import by_op, of_one, only_first
from plancompiler.ops.kernel import in_float32
from plancompiler.ops.reduce import keeps_dtype, total_dtype
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    Gradient,
    KernelContext,
    Tensors,
    Types,
    apply,
    apply_source,
    define_op,
)
from plancompiler.ops.rule import operand_line


def axis_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    """All operands have one shape; the attribute `axis` stays whole."""
    ndim = len(inputs[0].shape)
    line = operand_line(ndim, whole=(attrs["axis"],))
    return f"{', '.join([line] * len(inputs))} -> {', '.join([line] * len(outputs))}"


def at_indices(kind: str) -> Gradient:
    """What each value's gradient adds at the value's index (the second output)."""

    def gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
        axis = attrs["axis"]
        extent = inputs[0].shape[axis]
        grad = only_first(kind, grads)
        return (apply("take_along_axis_grad", outputs[1], grad, axis=axis, extent=extent),)

    return gradient


def _reversed(array: Array, axis: int, reverse: bool) -> Array:
    return np.flip(array, axis) if reverse else array


# --- cumsum ---------------------------------------------------------------------------------------


def _total_infer(inputs: Types, attrs: AttrMap) -> Types:
    return (TensorType(inputs[0].shape, total_dtype(inputs[0].dtype)),)


def _cumsum_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    axis = context.attrs["axis"]
    reverse = context.attrs["reverse"]
    x, out = (_reversed(array, axis, reverse) for array in (inputs[0], outputs[0]))
    np.add.accumulate(x, axis=axis, dtype=out.dtype, out=out)


def _cumsum_gradient(attrs: AttrMap, x: Any, y: Any, dy: Any) -> Any:
    return apply("cumsum", dy, axis=attrs["axis"], reverse=not attrs["reverse"])


define_op(
    "cumsum",
    infer=_total_infer,
    rule=axis_rule,
    inputs=1,
    attrs=(
        Axis(),
        Bool("reverse", False),
    ),
    kernel=in_float32(_cumsum_kernel),
    gradient=of_one(_cumsum_gradient),
    linear=((0,),),
    linear_if=keeps_dtype,
    doc="The sum of all elements up to each along an axis, from its end where `reverse`; in "
    "the dtype of the input, of whole numbers and bool in int64, of "
    "those without a sign in uint64.",
)


# --- cumprod --------------------------------------------------------------------------------------


def _cumprod_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    axis = context.attrs["axis"]
    np.multiply.accumulate(inputs[0], axis=axis, dtype=outputs[0].dtype, out=outputs[0])


def _sum_of_rest(x: Array, dy: Array, zero: Array | None = None) -> Array:
    """For each element the sum, from it to the end, of dy times the running product of x, which is
    0 where `zero` says so, also behind what overflows.
    """
    products: Array = np.multiply.accumulate(x, axis=-1)
    np.multiply(products, dy, out=products)
    if zero is not None:
        np.copyto(products, 0, where=zero)
    return np.add.accumulate(products[..., ::-1], axis=-1)[..., ::-1]


def _cumprod_grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    # dx[i] is the sum over j >= i of dy[j] times the product of x[0..j] without x[i]: a division
    # by x[i] before the first zero, a one in its place at the first zero, nothing behind it.
    axis = context.attrs["axis"]
    x, dy, dx = (np.moveaxis(array, axis, -1) for array in (*inputs, *outputs))
    zeros = np.equal(x, 0)
    if isinstance(x, np.ndarray) and not zeros.any():  # of a device it would have to be awaited
        np.divide(_sum_of_rest(x, dy), x, out=dx)
        return
    count = np.add.accumulate(zeros, axis=-1, dtype=np.int64)
    first, seen, again = zeros & (count == 1), count > 0, count > 1
    at_first = _sum_of_rest(np.where(first, 1, x), dy, again)
    before = np.divide(_sum_of_rest(x, dy, seen), np.where(zeros, 1, x))
    np.copyto(dx, np.where(first, at_first, np.where(seen, 0, before)))


def _cumprod_grad_formula(attrs: AttrMap, x: Any, dy: Any) -> Any:
    """dx[i] is the sum over j >= i of dy[j] times the product of x[0..j] without x[i].

    All these products at once take memory like the square of the axis, but no division: zeros
    need no care, as in the kernel.
    """
    axis = attrs["axis"]
    order = [*range(x.ndim)]
    order[axis], order[-1] = order[-1], order[axis]
    x, dy = (each.transpose(order) for each in (x, dy))
    extent = x.shape[-1]
    size = {"rows": extent, "columns": extent, "offset": 0}
    own = apply_source(x, "eye", **size, dtype=str(x.dtype))
    beside = (*x.shape[:-1], 1, extent)
    others = x.reshape(beside) * (1.0 - own) + own
    products = apply("triu", apply("cumprod", others, axis=x.ndim), diagonal=0)
    return (products * dy.reshape(beside)).sum(-1).transpose(order)


define_op(
    "cumprod",
    infer=_total_infer,
    operands="x X -> y X",
    rule=axis_rule,
    attrs=(Axis(),),
    kernel=in_float32(_cumprod_kernel),
    gradient=by_op("cumprod", "cumprod_grad"),
    doc="The product of all elements up to each along an axis, in the dtype of the input; of "
    "whole numbers and bool in int64, of those without a sign in uint64.",
)
define_op(
    "cumprod_grad",
    infer="x F ..., dy F ... -> dx F ...",
    rule=axis_rule,
    attrs=(Axis(),),
    kernel=in_float32(_cumprod_grad_kernel),
    gradient=by_formula(_cumprod_grad_formula),
    linear=((1,),),
    doc="The gradient of cumprod, also where elements are zero: (x, dy) -> dx.",
)


# --- cummax and cummin ----------------------------------------------------------------------------


def _accumulate(ufunc: np.ufunc, x: Array, out: Array) -> None:
    """`ufunc.accumulate` along the last axis. Devices do not have it: there each step doubles the
    number of elements that each has seen (W. D. Hillis, G. L. Steele, "Data Parallel Algorithms",
    1986).
    """
    if isinstance(x, np.ndarray):
        ufunc.accumulate(x, axis=-1, out=out)
        return
    seen, made = 1, x.copy()
    while seen < x.shape[-1]:
        following = ufunc(made[..., seen:], made[..., :-seen])
        np.copyto(made[..., seen:], following)
        seen *= 2
    np.copyto(out, made)


def _register_extreme(kind: str, ufunc: np.ufunc, what: str) -> None:
    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        axis = context.attrs["axis"]
        x, values, indices = (np.moveaxis(array, axis, -1) for array in (*inputs, *outputs))
        _accumulate(ufunc, x, values)
        # An element that is the running extreme is its latest place; others keep the one before.
        places = context.arrays.arange(x.shape[-1], dtype=np.int64)
        _accumulate(np.maximum, np.equal(x, values) * places, indices)

    define_op(
        kind,
        infer="x N ... -> values N ..., indices int64 ...",
        rule=axis_rule,
        attrs=(Axis(),),
        kernel=kernel,
        gradient=at_indices(kind),
        doc=f"The {what} of all elements up to each along an axis, and its latest index.",
    )


_register_extreme("cummax", np.maximum, "greatest")
_register_extreme("cummin", np.minimum, "least")
