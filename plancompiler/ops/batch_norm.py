"""Batch normalisation (S. Ioffe, C. Szegedy, 2015) as three ops that split along every axis.

The statistics of a channel are a mean (`channel_mean`) and then a mean of squares around it
(`channel_variance`): both are sums, so that devices with parts of the batch or of space hold
partial ones, and the result is that of the whole batch on any layout. `batch_norm` applies given
statistics, in training those of the batch, else running ones. Each op has its own derivative;
the chain of the three is the derivative of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from plancompiler.errors import ShapeError
from plancompiler.ir.op import TensorType
from plancompiler.ir.shard import element_count
from plancompiler.ops import kernel as blocking
from plancompiler.ops.attributes import Float
from plancompiler.ops.check import (
    FLOATS,
    expect_accumulated,
    expect_dtype,
    expect_ndim,
    expect_same_dtype,
    expect_shape,
)
from plancompiler.ops.formula import by_formula
from plancompiler.ops.gradient import expand_to
from plancompiler.ops.kernel import contiguous, in_float32, scratch
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    KernelContext,
    OpDef,
    Rule,
    Tensors,
    Types,
    apply,
    register,
)

_STATISTICS = ("mean", "variance", "gradient of the variance")


def _check(kind: str, inputs: Types, *names: str) -> TensorType:
    """Checks x and one number per channel for each of `names`; returns the type of statistics.

    Those made have at least float32: a variance may leave the range of 16 bits where what is
    normalised by it does not.
    """
    x = inputs[0]
    for tensor in inputs:
        expect_dtype(kind, tensor, FLOATS)
    expect_ndim(kind, x, 2)
    same = [x, *inputs[1 + len(names) :]]
    for tensor, name in zip(inputs[1:], names, strict=False):
        expect_shape(kind, tensor, x.shape[1:2], f"{name} (one per channel)")
        if name in _STATISTICS:
            expect_accumulated(kind, tensor, x.dtype, name)
        else:
            same.append(tensor)
    expect_same_dtype(kind, tuple(same))
    return TensorType(x.shape[1:2], x.dtype.accumulator)


def _elements(kind: str, x: TensorType) -> None:
    if x.shape[0] * element_count(x.shape[2:]) == 0:
        raise ShapeError(f"{kind} over no elements has no value", got=x.shape)


def _rule(pattern: str) -> Rule:
    """`pattern` with X for x and its like."""

    def rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
        space = " ".join(f"s{axis}" for axis in range(len(inputs[0].shape) - 2))
        return pattern.replace("X", f"n c {space}".strip())

    return rule


def _planes(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Arrays like x as [images, channels, space], in pieces of images that fit in cache."""
    flat = [array.reshape(*array.shape[:2], element_count(array.shape[2:])) for array in arrays]
    step = max(1, blocking.BLOCK_BYTES // max(1, flat[0][:1].nbytes))
    for start in range(0, len(flat[0]), step):
        yield tuple(array[start : start + step] for array in flat)


def _channel(array: Array) -> Array:
    """One number per channel, beside planes."""
    return array[:, None]


def _per_channel(tensor: Any, x: Any) -> Any:
    """One number per channel as a tensor like x."""
    return expand_to(tensor.reshape((1, x.shape[1], *(1,) * (x.ndim - 2))), x.shape)


def _count(x: Any) -> int:
    count: int = x.shape[0] * element_count(x.shape[2:])
    return count


def _others(x: Any) -> tuple[int, ...]:
    """Batch and space."""
    return (0, *range(2, x.ndim))


def _shared_count(context: KernelContext) -> float:
    """1 / elements of a channel of the whole tensor."""
    shape = context.input_shapes[0]
    return 1.0 / (shape[0] * element_count(shape[2:]))


# --- the mean -------------------------------------------------------------------------------------


def _mean_infer(inputs: Types, attrs: AttrMap) -> Types:
    mean = _check("channel_mean", inputs)
    _elements("channel_mean", inputs[0])
    return (mean,)


def _mean_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (out,) = outputs
    total = np.zeros(out.shape, np.float64)
    for (x,) in _planes(*inputs):
        np.add(total, np.add.reduce(x, axis=(0, 2)), out=total)
    np.multiply(total, _shared_count(context), out=out, casting="same_kind")


def _mean_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    (x,) = inputs
    share = grads[0] * (1.0 / _count(x))
    return (_per_channel(share if share.dtype is x.dtype else share.cast(x.dtype), x),)


register(
    OpDef(
        "channel_mean",
        infer=_mean_infer,
        rule=_rule("X -> c"),
        inputs=1,
        kernel=in_float32(contiguous(_mean_kernel)),
        gradient=_mean_gradient,
        linear=((0,),),
        flops=1,
        portable=False,
        doc="The mean of each channel of x [n, c, ...] over batch and space, in at least float32: "
        "[c].",
    )
)


# --- the variance ---------------------------------------------------------------------------------


def _variance_infer(inputs: Types, attrs: AttrMap) -> Types:
    variance = _check("channel_variance", inputs, "mean")
    _elements("channel_variance", inputs[0])
    return (variance,)


def _variance_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x, mean), (out,) = inputs, outputs
    total = np.zeros(out.shape, np.float64)
    for (seen,) in _planes(x):
        work = scratch(context, "work", seen.shape, seen.dtype)
        np.subtract(seen, _channel(mean), out=work)
        np.multiply(work, work, out=work)
        np.add(total, np.add.reduce(work, axis=(0, 2)), out=total)
    np.multiply(total, _shared_count(context), out=out, casting="same_kind")


def _variance_gradient(
    attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors
) -> Tensors:
    dx, dmean = apply("channel_variance_grad", *inputs, grads[0])
    return dx, dmean


def _variance_grad_infer(inputs: Types, attrs: AttrMap) -> Types:
    _check("channel_variance_grad", inputs, "mean", "gradient of the variance")
    _elements("channel_variance_grad", inputs[0])
    return inputs[:2]


def _variance_grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x, mean, dvariance), (dx, dmean) = inputs, outputs
    total = np.zeros(dmean.shape, np.float64)
    factor = _channel(dvariance * (2.0 * _shared_count(context)))
    for seen, made in _planes(x, dx):
        np.subtract(seen, _channel(mean), out=made)
        np.multiply(made, factor, out=made)
        np.subtract(total, np.add.reduce(made, axis=(0, 2)), out=total)
    np.copyto(dmean, total, casting="same_kind")


def _variance_grad_formula(attrs: AttrMap, x: Any, mean: Any, dvariance: Any) -> tuple[Any, Any]:
    factor = _per_channel(dvariance * (2.0 / _count(x)), x)
    dx = (x - _per_channel(mean, x)) * factor
    return dx, -dx.sum(_others(x))


register(
    OpDef(
        "channel_variance",
        infer=_variance_infer,
        rule=_rule("X, c -> c"),
        inputs=2,
        kernel=in_float32(contiguous(_variance_kernel)),
        gradient=_variance_gradient,
        flops=3,
        portable=False,
        doc="(x [n, c, ...], mean [c]) -> the mean of (x - mean)² of each channel: [c].",
    )
)
register(
    OpDef(
        "channel_variance_grad",
        infer=_variance_grad_infer,
        rule=_rule("X, c, c -> X, c"),
        inputs=3,
        kernel=in_float32(contiguous(_variance_grad_kernel)),
        gradient=by_formula(_variance_grad_formula),
        flops=3,
        inplace=((0, 0),),
        linear=((2,),),
        portable=False,
        doc="(x, mean, dvariance) -> (dx, dmean).",
    )
)


# --- normalisation by given statistics ------------------------------------------------------------


def _infer(inputs: Types, attrs: AttrMap) -> Types:
    _check("batch_norm", inputs, "mean", "variance", "gamma", "beta")
    return inputs[:1]


def _rstd(variance: Array, eps: float) -> Array:
    rstd: Array = 1.0 / np.sqrt(variance + variance.dtype.type(eps))
    return rstd


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    x, mean, variance, gamma, beta = inputs
    factor = gamma * _rstd(variance, context.attrs["eps"])
    centre, factor, shift = map(_channel, (mean, factor, beta))
    for seen, made in _planes(x, outputs[0]):
        np.subtract(seen, centre, out=made)
        np.multiply(made, factor, out=made)
        np.add(made, shift, out=made)


def _gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    passed: tuple[Any, ...] = apply("batch_norm_grad", *inputs[:4], grads[0], **attrs)
    return passed


def _grad_infer(inputs: Types, attrs: AttrMap) -> Types:
    _check("batch_norm_grad", inputs, "mean", "variance", "gamma")
    expect_shape("batch_norm_grad", inputs[4], inputs[0].shape, "gradient")
    return *inputs[:4], inputs[3]


def _grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    # With r = (variance + eps) ** -1/2 and the sums a = sum dy, b = sum dy * (x - mean):
    # dx = dy * gamma * r, dmean = -gamma * r * a, dvariance = -gamma / 2 * r³ * b, dgamma = r * b.
    x, mean, variance, gamma, dy = inputs
    dx, *made = outputs
    rstd = _rstd(variance, context.attrs["eps"]).astype(np.float64)
    plain, weighted = np.zeros((2, len(mean)), np.float64)
    centre, factor = _channel(mean), _channel((gamma * rstd).astype(x.dtype))
    for seen, passed, back in _planes(x, dy, dx):
        work = scratch(context, "work", seen.shape, seen.dtype)
        np.subtract(seen, centre, out=work)
        np.multiply(work, passed, out=work)
        np.add(weighted, np.add.reduce(work, axis=(0, 2)), out=weighted)
        np.add(plain, np.add.reduce(passed, axis=(0, 2)), out=plain)
        np.multiply(passed, factor, out=back)
    sums = (-gamma * rstd * plain, -0.5 * gamma * rstd**3 * weighted, rstd * weighted, plain)
    for target, source in zip(made, sums, strict=True):
        np.copyto(target, source, casting="same_kind")


def _grad_formula(
    attrs: AttrMap, x: Any, mean: Any, variance: Any, gamma: Any, dy: Any
) -> tuple[Any, ...]:
    rstd = apply("rsqrt", variance + attrs["eps"])
    scale = gamma * rstd
    plain = dy.sum(_others(x))
    weighted = (dy * (x - _per_channel(mean, x))).sum(_others(x))
    dvariance = scale * rstd * rstd * weighted * -0.5
    return dy * _per_channel(scale, x), -(scale * plain), dvariance, rstd * weighted, plain


register(
    OpDef(
        "batch_norm",
        infer=_infer,
        rule=_rule("X, c, c, c, c -> X"),
        inputs=5,
        attrs=(Float("eps", least=0.0),),
        kernel=in_float32(contiguous(_kernel)),
        gradient=_gradient,
        flops=3,
        inplace=((0, 0),),
        doc="(x [n, c, ...], mean, variance, gamma, beta) -> (x - mean) / sqrt(variance + eps) * "
        "gamma + beta, each per channel.",
    )
)
register(
    OpDef(
        "batch_norm_grad",
        infer=_grad_infer,
        rule=_rule("X, c, c, c, X -> X, c, c, c, c"),
        inputs=5,
        attrs=(Float("eps", least=0.0),),
        kernel=in_float32(contiguous(_grad_kernel)),
        gradient=by_formula(_grad_formula),
        linear=((4,),),
        flops=5,
        inplace=((0, 0), (0, 4)),
        portable=False,
        doc="(x, mean, variance, gamma, dy) -> (dx, dmean, dvariance, dgamma, dbeta).",
    )
)
