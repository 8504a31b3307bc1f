"""More reductions along axes: products, truth values, norms, logsumexp, variance and counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from plancompiler.errors import AttributeValueError
from plancompiler.ir.dtype import DType
from plancompiler.ir.operators import filled
from plancompiler.ir.sbp import Reduction
from plancompiler.ops.attributes import Float
from plancompiler.ops.check import ANY, FLOATS
from plancompiler.ops.gradient import accumulated, expand_to, masked, of_one, over_positive
from plancompiler.ops.kernel import in_float32
from plancompiler.ops.reduce import (
    REDUCED,
    keeps_partial,
    kept_axes,
    reduction_infer,
    reduction_rule,
    total_dtype,
    whole_reduction_rule,
)
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    KernelContext,
    Tensors,
    Types,
    apply,
    define_op,
)


def _axes(context: KernelContext, x: Array) -> tuple[tuple[int, ...], bool]:
    """The reduced axes and whether they stay."""
    return context.attrs["axes"], context.attrs["keepdims"]


# --- prod -----------------------------------------------------------------------------------------


def _prod_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x,), (out,) = inputs, outputs
    axes, keepdims = _axes(context, x)
    np.multiply.reduce(x, axis=axes, dtype=out.dtype, out=out, keepdims=keepdims)


def _prod_gradient(attrs: AttrMap, x: Any, y: Any, dy: Any) -> Any:
    # The product of the others: that of all nonzero ones without x, times the zeros among them.
    # One such zero is kept as what it is, an element, for second derivatives go through it (unless
    # the other product overflows: 0 times infinity is no number); of two the product is taken as
    # constant, which only third derivatives would see.
    axes = attrs["axes"]
    is_zero = x.equal(0)
    none, one = (filled(x, value, ()) for value in (0.0, 1.0))
    safe, zeros = apply("where", is_zero, one, x), apply("where", is_zero, x, none)
    product = apply("prod", safe, axes=axes, keepdims=True)
    count = is_zero.cast(x.dtype)
    others = count.sum(axes, keepdims=True) - count
    rest = product / safe
    by_one = apply("logical_and", others.equal(1), apply("isfinite", rest))
    kept = masked(rest, by_one) * (zeros.sum(axes, keepdims=True) - zeros)
    grad = expand_to(kept_axes(dy, attrs, x), x.shape)
    return grad * (masked(rest, others.equal(0)) + kept)


define_op(
    "prod",
    infer=reduction_infer("prod", empty=True, dtypes=ANY, result=total_dtype),
    rule=reduction_rule,
    inputs=1,
    attrs=REDUCED,
    kernel=in_float32(_prod_kernel),
    gradient=accumulated(of_one(_prod_gradient)),
    reduction=Reduction.PROD,
    extra=keeps_partial(Reduction.PROD),
    flops=1,
    doc="The product over axes, in the dtype of the input; of whole numbers "
    "and bool in int64, of those without a sign in uint64.",
)


# --- all, any, count_nonzero ----------------------------------------------------------------------


def _register_truth(kind: str, ufunc: np.ufunc, reduction: Reduction, doc: str) -> None:
    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        axes, keepdims = _axes(context, inputs[0])
        ufunc.reduce(inputs[0], axis=axes, out=outputs[0], keepdims=keepdims)

    define_op(
        kind,
        infer=reduction_infer(kind, empty=True, dtypes=frozenset({DType.BOOL})),
        rule=reduction_rule,
        inputs=1,
        attrs=REDUCED,
        kernel=kernel,
        reduction=reduction,
        extra=keeps_partial(reduction),
        flops=1,
        doc=doc,
    )


_register_truth("all", np.logical_and, Reduction.MIN, "Whether all are True, over axes.")
_register_truth("any", np.logical_or, Reduction.MAX, "Whether any is True, over axes.")


def _count_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    axes, keepdims = _axes(context, inputs[0])
    truths = inputs[0] if inputs[0].dtype == np.bool_ else np.not_equal(inputs[0], 0)
    np.add.reduce(truths, axis=axes, dtype=np.int64, out=outputs[0], keepdims=keepdims)


define_op(
    "count_nonzero",
    infer=reduction_infer("count_nonzero", empty=True, dtypes=ANY, result=lambda _: DType.INT64),
    rule=reduction_rule,
    inputs=1,
    attrs=REDUCED,
    kernel=_count_kernel,
    flops=1,
    doc="How many elements are not zero (or True), over axes, as int64.",
)


# --- the parts of norms ---------------------------------------------------------------------------


def _square_sum_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x,), (out,) = inputs, outputs
    axes, keepdims = _axes(context, x)
    if len(axes) == x.ndim and x.flags.c_contiguous:
        # An inner product reads x once and writes nothing.
        flat = x.reshape(-1)
        out.fill(np.dot(flat, flat))
    else:
        np.add.reduce(np.square(x), axis=axes, dtype=out.dtype, out=out, keepdims=keepdims)
    scale = context.attrs["grad_scale"]
    if scale != 1.0:
        np.multiply(out, scale * scale, out=out)


def _square_sum_gradient(
    attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors
) -> Tensors:
    x = inputs[0]
    slope = grads[0] * (2.0 * attrs["grad_scale"] ** 2)
    return (x * expand_to(kept_axes(slope, attrs, x), x.shape),)


define_op(
    "square_sum",
    infer=reduction_infer("square_sum", empty=True, dtypes=FLOATS),
    rule=reduction_rule,
    inputs=1,
    attrs=(*REDUCED, Float("grad_scale", 1.0)),
    scaled=(0,),
    kernel=in_float32(_square_sum_kernel),
    gradient=_square_sum_gradient,
    flops=2,
    doc="The sum of squares over axes: the square of the 2-norm.",
)


def _abs_sum_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x,), (out,) = inputs, outputs
    axes, keepdims = _axes(context, x)
    # Widened first: the least number of a narrow dtype has no absolute value in it.
    sizes = np.absolute(x.astype(out.dtype, copy=False))
    np.add.reduce(sizes, axis=axes, dtype=out.dtype, out=out, keepdims=keepdims)


def _abs_sum_gradient(attrs: AttrMap, x: Any, y: Any, dy: Any) -> Any:
    return apply("sign", x) * expand_to(kept_axes(dy, attrs, x), x.shape)


define_op(
    "abs_sum",
    infer=reduction_infer("abs_sum", empty=True, result=total_dtype),
    rule=reduction_rule,
    inputs=1,
    attrs=REDUCED,
    kernel=in_float32(_abs_sum_kernel),
    gradient=of_one(_abs_sum_gradient),
    flops=2,
    doc="The sum of absolute values over axes, the 1-norm; of whole numbers in int64, of "
    "those without a sign in uint64.",
)


def _abs_max_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x,), (out,) = inputs, outputs
    axes, keepdims = _axes(context, x)
    # No absolute value is below 0, which so is that of no elements.
    np.maximum.reduce(np.absolute(x), axis=axes, out=out, keepdims=keepdims, initial=0)


def _abs_max_gradient(attrs: AttrMap, x: Any, y: Any, dy: Any) -> Any:
    mask = abs(x).equal(kept_axes(y, attrs, x))
    ties = mask.cast(x.dtype).sum(attrs["axes"], keepdims=True)
    share = expand_to(kept_axes(dy, attrs, x) / ties, x.shape)
    return masked(apply("sign", x) * share, mask)


define_op(
    "abs_max",
    infer=reduction_infer("abs_max", empty=True),
    rule=reduction_rule,
    inputs=1,
    attrs=REDUCED,
    kernel=_abs_max_kernel,
    gradient=accumulated(of_one(_abs_max_gradient)),
    reduction=Reduction.MAX,
    flops=2,
    doc="The greatest absolute value over axes: the maximum norm; equal ones share the "
    "gradient equally.",
)


# --- logsumexp ------------------------------------------------------------------------------------


def _logsumexp_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x,), (out,) = inputs, outputs
    axes, keepdims = _axes(context, x)
    greatest = np.maximum.reduce(x, axis=axes, keepdims=True)
    # Where all are minus infinity, or one is infinite, the greatest is the answer already.
    shift = np.where(np.isfinite(greatest), greatest, 0)
    work = context.arrays.empty(x.shape, x.dtype)  # of 0-d arrays NumPy would make numbers
    np.subtract(x, shift, out=work)
    np.exp(work, out=work)
    total = np.log(np.add.reduce(work, axis=axes, keepdims=True)) + shift
    np.copyto(out, total if keepdims else total.reshape(out.shape))


def _logsumexp_gradient(
    attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors
) -> Tensors:
    x = inputs[0]
    share = (x - kept_axes(outputs[0], attrs, x)).exp()
    return (share * expand_to(kept_axes(grads[0], attrs, x), x.shape),)


define_op(
    "logsumexp",
    infer=reduction_infer("logsumexp", empty=False, dtypes=FLOATS),
    rule=whole_reduction_rule,
    inputs=1,
    attrs=REDUCED,
    kernel=in_float32(_logsumexp_kernel),
    gradient=accumulated(_logsumexp_gradient),
    flops=4,
    doc="log(sum(exp(x))) over axes, which stay whole; without overflow.",
)


# --- var and std ----------------------------------------------------------------------------------


def _degrees(kind: str, shape: tuple[int, ...], attrs: AttrMap) -> float:
    """The number of reduced elements less the correction."""
    count: int = math.prod(shape[axis] for axis in attrs["axes"])
    correction: float = attrs["correction"]
    if count and correction >= count:
        raise AttributeValueError(
            f"{kind} needs more elements than its correction",
            got=f"correction {correction:g} for {count} elements",
        )
    return count - correction if count else math.nan


def _spread(context: KernelContext, x: Array, out: Array) -> None:
    """The variance: the mean of squared distances from the mean, in two passes."""
    axes, keepdims = _axes(context, x)
    shape = context.input_shapes[0]
    count = math.prod(shape[axis] for axis in axes)
    if not count:
        out.fill(np.nan)
        return
    mean = np.add.reduce(x, axis=axes, keepdims=True) / count
    work = context.arrays.empty(x.shape, x.dtype)  # of 0-d arrays NumPy would make numbers
    np.subtract(x, mean, out=work)
    np.square(work, out=work)
    np.add.reduce(work, axis=axes, out=out, keepdims=keepdims)
    np.divide(out, _degrees("var", shape, context.attrs), out=out)


def _register_spread(
    kind: str, finish: Callable[..., Any] | None, slope: Callable[[Any, Any], Any], doc: str
) -> None:
    """`slope(y, dy)` is the gradient of the variance."""
    check = reduction_infer(kind, empty=True, dtypes=FLOATS)

    def infer(inputs: Types, attrs: AttrMap) -> Types:
        outputs = check(inputs, attrs)
        _degrees(kind, inputs[0].shape, attrs)
        return outputs

    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        _spread(context, inputs[0], outputs[0])
        if finish is not None:
            finish(outputs[0], out=outputs[0])

    def gradient(attrs: AttrMap, x: Any, y: Any, dy: Any) -> Any:
        scale = slope(y, dy) * (2.0 / _degrees(kind, x.shape, attrs))
        centred = x - x.mean(attrs["axes"], keepdims=True)
        return centred * expand_to(kept_axes(scale, attrs, x), x.shape)

    define_op(
        kind,
        infer=infer,
        rule=whole_reduction_rule,
        inputs=1,
        attrs=(*REDUCED, Float("correction", 0.0, least=0.0)),
        kernel=in_float32(kernel),
        gradient=accumulated(of_one(gradient)),
        flops=4,
        doc=doc,
    )


_register_spread(
    "var",
    None,
    lambda y, dy: dy,
    "The variance over axes, which stay whole; it divides by the number less `correction`. "
    "That of no elements is NaN.",
)
_register_spread(
    "std",
    np.sqrt,
    # Where all elements are equal, so is their mean: this is multiplied by zeros.
    lambda y, dy: over_positive(dy, y) * 0.5,
    "The square root of `var`, over axes, which stay whole; its gradient is zero where it is.",
)
