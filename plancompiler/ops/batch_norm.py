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
from plancompiler.ops.formula import by_formula
from plancompiler.ops.gradient import by_op, expand_to, of_one
from plancompiler.ops.kernel import contiguous, in_float32, scratch
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    KernelContext,
    Types,
    apply,
    define_op,
)


def _statistic(inputs: Types, attrs: AttrMap) -> Types:
    """One number per channel, in at least float32: a variance may leave the range of 16 bits where
    what is normalised by it does not.
    """
    shape = inputs[0].shape
    if shape[0] * element_count(shape[2:]) == 0:
        raise ShapeError("statistics of no elements have no value", got=shape)
    return (TensorType(shape[1:2], inputs[0].dtype.accumulator),)


def _variance_grad_infer(inputs: Types, attrs: AttrMap) -> Types:
    _statistic(inputs, attrs)
    return inputs[:2]


def _planes(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Arrays like x as [images, channels, space], in pieces of images that fit in cache."""
    flat = [array.reshape(*array.shape[:2], element_count(array.shape[2:])) for array in arrays]
    step = max(1, blocking.BLOCK_BYTES // max(1, flat[0][:1].nbytes))
    if not isinstance(arrays[0], np.ndarray):
        step = max(1, len(flat[0]))
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


def _mean_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (out,) = outputs
    total = context.arrays.zeros(out.shape, np.float64)
    for (x,) in _planes(*inputs):
        np.add(total, np.add.reduce(x, axis=(0, 2)), out=total)
    np.multiply(total, _shared_count(context), out=out, casting="same_kind")


def _mean_gradient(attrs: AttrMap, x: Any, y: Any, dy: Any) -> Any:
    share = dy * (1.0 / _count(x))
    return _per_channel(share if share.dtype is x.dtype else share.cast(x.dtype), x)


define_op(
    "channel_mean",
    infer=_statistic,
    operands="x F n c ... -> mean A",
    rule="n c ... -> c",
    kernel=in_float32(contiguous(_mean_kernel)),
    gradient=of_one(_mean_gradient),
    linear=((0,),),
    flops=1,
    doc="The mean of each channel of x [n, c, ...] over batch and space, in at least float32: [c].",
)


# --- the variance ---------------------------------------------------------------------------------


def _variance_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x, mean), (out,) = inputs, outputs
    total = context.arrays.zeros(out.shape, np.float64)
    for (seen,) in _planes(x):
        work = scratch(context, "work", seen.shape, seen.dtype)
        np.subtract(seen, _channel(mean), out=work)
        np.multiply(work, work, out=work)
        np.add(total, np.add.reduce(work, axis=(0, 2)), out=total)
    np.multiply(total, _shared_count(context), out=out, casting="same_kind")


def _variance_grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x, mean, dvariance), (dx, dmean) = inputs, outputs
    total = context.arrays.zeros(dmean.shape, np.float64)
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


define_op(
    "channel_variance",
    infer=_statistic,
    operands="x F n c ..., mean A c -> variance A",
    rule="n c ..., c -> c",
    kernel=in_float32(contiguous(_variance_kernel)),
    gradient=by_op("channel_variance", "channel_variance_grad"),
    flops=3,
    doc="(x [n, c, ...], mean [c]) -> the mean of (x - mean)² of each channel: [c].",
)
define_op(
    "channel_variance_grad",
    infer=_variance_grad_infer,
    operands="x F n c ..., mean A c, dvariance A c -> dx F, dmean A",
    rule="n c ..., c, c -> n c ..., c",
    kernel=in_float32(contiguous(_variance_grad_kernel)),
    gradient=by_formula(_variance_grad_formula),
    flops=3,
    inplace=((0, 0),),
    linear=((2,),),
    doc="(x, mean, dvariance) -> (dx, dmean).",
)


# --- normalisation by given statistics ------------------------------------------------------------


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


def _grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    # With r = (variance + eps) ** -1/2 and the sums a = sum dy, b = sum dy * (x - mean):
    # dx = dy * gamma * r, dmean = -gamma * r * a, dvariance = -gamma / 2 * r³ * b, dgamma = r * b.
    x, mean, variance, gamma, dy = inputs
    dx, *made = outputs
    rstd = _rstd(variance, context.attrs["eps"]).astype(np.float64)
    plain, weighted = (context.arrays.zeros(len(mean), np.float64) for _ in range(2))
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


define_op(
    "batch_norm",
    infer="x F n c ..., mean A c, variance A c, gamma F c, beta F c -> y F n c ...",
    rule="n c ..., c, c, c, c -> n c ...",
    attrs=(Float("eps", least=0.0),),
    kernel=in_float32(contiguous(_kernel)),
    gradient=by_op("batch_norm", "batch_norm_grad"),
    flops=3,
    inplace=((0, 0),),
    doc="(x [n, c, ...], mean, variance, gamma, beta) -> (x - mean) / sqrt(variance + eps) * "
    "gamma + beta, each per channel.",
)
define_op(
    "batch_norm_grad",
    infer=lambda inputs, attrs: (*inputs[:4], inputs[3]),
    operands="x F n c ..., mean A c, variance A c, gamma F c, dy F n c ... -> "
    "dx F, dmean A, dvariance A, dgamma F, dbeta F",
    rule="n c ..., c, c, c, n c ... -> n c ..., c, c, c, c",
    attrs=(Float("eps", least=0.0),),
    kernel=in_float32(contiguous(_grad_kernel)),
    gradient=by_formula(_grad_formula),
    linear=((4,),),
    flops=5,
    inplace=((0, 0), (0, 4)),
    doc="(x, mean, variance, gamma, dy) -> (dx, dmean, dvariance, dgamma, dbeta).",
)
