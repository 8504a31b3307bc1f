"""Activation functions, each with its gradient as an op of its own.

relu6, hardtanh and the like are `clip`; see `plancompiler.frontend.functions`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from plancompiler.ops.attributes import Float
from plancompiler.ops.elementwise import ufunc_kernel
from plancompiler.ops.kernel import Direct, blocks, keep_where, scratch, with_direct
from plancompiler.ops.pointwise import register_pointwise
from plancompiler.ops.registry import Arrays, KernelContext, apply

# --- relu -----------------------------------------------------------------------------------------
# Written by hand: NumPy makes a tensor's maximum in one call, and its mask as bits; see
# `keep_where`. Small tensors take a quarter of a program's time.


def _relu_direct(context: KernelContext, dtypes: Sequence[np.dtype[Any]]) -> Direct | None:
    zero = np.zeros((), dtypes[0])  # NumPy makes an array of a number each time
    return lambda x: np.maximum(x, zero, order="C")


@with_direct(_relu_direct)
def _relu_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    np.maximum(inputs[0], 0, out=outputs[0])


def _relu_grad_direct(context: KernelContext, dtypes: Sequence[np.dtype[Any]]) -> Direct | None:
    zero, dtype = np.zeros((), dtypes[0]), dtypes[1]
    whole = np.dtype(f"i{dtype.itemsize}")  # see `keep_where`
    return lambda y, dy: np.multiply(dy.view(whole), y > zero, order="C").view(dtype)


@with_direct(_relu_grad_direct)
def _relu_grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    for y, dy, dx in blocks(*inputs, *outputs):
        mask = scratch(context, "mask", y.shape, np.dtype(np.bool_))
        np.greater(y, 0, out=mask)
        keep_where(dy, mask, dx)


register_pointwise(
    "relu",
    lambda x: apply("maximum_scalar", x, scalar=0.0),
    "max(x, 0).",
    precision="following",
    slope=lambda y: (y > 0).cast(y.dtype),
    of_output=True,
    kernel=_relu_kernel,
    grad_kernel=_relu_grad_kernel,
)


# --- by formula -----------------------------------------------------------------------------------

register_pointwise(
    "tanh",
    None,
    "The hyperbolic tangent.",
    precision="following",
    slope=lambda y: 1.0 - y * y,
    of_output=True,
    kernel=ufunc_kernel(np.tanh),
    code="tanh({0})",
)
register_pointwise(
    "sigmoid",
    # The same function as 1 / (1 + exp(-x)), and never overflows.
    lambda x: ((x * 0.5).tanh() + 1.0) * 0.5,
    "1 / (1 + exp(-x)).",
    precision="following",
    slope=lambda y: (1.0 - y) * y,
    of_output=True,
)
_SCALE = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def _gelu_slope(x: Any) -> Any:
    # With u = 2 s x (1 + c x^2) and y = 1 / (1 + exp(-u)): y (1 + (1 - y) 2 s (x + 3 c x^3)).
    square = x * x
    share = 1.0 / (((square * (-2.0 * _SCALE * _CUBIC) - 2.0 * _SCALE) * x).exp() + 1.0)
    inner = (square * (6.0 * _SCALE * _CUBIC) + 2.0 * _SCALE) * x
    return ((1.0 - share) * inner + 1.0) * share


register_pointwise(
    "gelu",
    # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)), which takes less time and keeps small results.
    lambda x: x / (((x * x * (-2.0 * _SCALE * _CUBIC) - 2.0 * _SCALE) * x).exp() + 1.0),
    "The Gaussian error linear unit in its tanh form (Hendrycks & Gimpel, 2016).",
    precision="following",
    slope=_gelu_slope,
)


def _normal_share(x: Any) -> Any:
    """The standard normal distribution function (1 + erf(x / sqrt(2))) / 2."""
    return (apply("erf", x * math.sqrt(0.5)) + 1.0) * 0.5


register_pointwise(
    "gelu_exact",
    lambda x: x * _normal_share(x),
    "x times the normal distribution function (Hendrycks & Gimpel, 2016); `gelu` has its tanh "
    "form.",
    precision="following",
    portable=False,
    slope=lambda x: _normal_share(x) + (x * x * -0.5).exp() * (1 / math.sqrt(2 * math.pi)) * x,
)
register_pointwise(
    "silu",
    lambda x: x * x.sigmoid(),
    "x sigmoid(x), also called swish.",
    precision="following",
    slope=lambda x: ((1.0 - x.sigmoid()) * x + 1.0) * x.sigmoid(),
)
register_pointwise(
    "softplus",
    lambda x: apply("maximum_scalar", x, scalar=0.0) + apply("log1p", (-abs(x)).exp()),
    "log(1 + exp(x)), without overflow.",
    slope=lambda x: x.sigmoid(),
)
register_pointwise(
    "logsigmoid",
    lambda x: apply("minimum_scalar", x, scalar=0.0) - apply("log1p", (-abs(x)).exp()),
    "log(sigmoid(x)), without overflow.",
    slope=lambda x: (-x).sigmoid(),
)


def _elu_slope(x: Any, scale: float, alpha: float) -> Any:
    above = (x > 0).cast(x.dtype)
    # Not the lesser of x and 0, whose gradient at 0 is that of x: second derivatives are 0 there.
    below = apply("clip", x, high=0.0, edges=False).exp()
    below = below if alpha == 1.0 else below * alpha
    slope = above + (1.0 - above) * below
    return slope if scale == 1.0 else slope * scale


def _elu(x: Any, scale: float, alpha: float) -> Any:
    below = apply("expm1", apply("minimum_scalar", x, scalar=0.0)) * (scale * alpha)
    above = apply("maximum_scalar", x, scalar=0.0)
    return (above if scale == 1.0 else above * scale) + below


_SELU = {"scale": 1.0507009873554805, "alpha": 1.6732632423543772}
register_pointwise(
    "elu",
    lambda x, alpha: _elu(x, 1.0, alpha),
    "x where x > 0, else alpha (exp(x) - 1).",
    slope=lambda x, alpha: _elu_slope(x, 1.0, alpha),
    schema=(Float("alpha", 1.0),),
)
register_pointwise(
    "selu",
    lambda x: _elu(x, **_SELU),
    "The scaled elu that keeps mean 0 and variance 1 (G. Klambauer et al., 2017).",
    slope=lambda x: _elu_slope(x, **_SELU),
)
register_pointwise(
    "leaky_relu",
    lambda x, slope: (
        apply("maximum_scalar", x, scalar=0.0) + apply("minimum_scalar", x, scalar=0.0) * slope
    ),
    "x where x > 0, else slope * x.",
    slope=lambda x, slope: (x > 0).cast(x.dtype) * (1.0 - slope) + slope,
    schema=(Float("slope", 0.01),),
    precision="following",
)


def _mish(x: Any) -> Any:
    # tanh(log(1 + e)) = n / (n + 2) with e = exp(x) and n = e (e + 2). From 20 on it is 1 in
    # float64, and exp(x) squared is far from overflow.
    power = apply("minimum_scalar", x, scalar=20.0).exp()
    count = (power + 2.0) * power
    return count / (count + 2.0) * x


def _mish_slope(x: Any) -> Any:
    power = apply("minimum_scalar", x, scalar=20.0).exp()
    count = (power + 2.0) * power
    tanh = count / (count + 2.0)
    return tanh + (1.0 - tanh * tanh) * x * x.sigmoid()


register_pointwise("mish", _mish, "x tanh(softplus(x)) (D. Misra, 2019).", slope=_mish_slope)


def _hardsigmoid(x: Any) -> Any:
    return apply("clip", x + 3.0, low=0.0, high=6.0, edges=False) * (1 / 6)


register_pointwise(
    "hardsigmoid",
    _hardsigmoid,
    "(x + 3) / 6, not below 0 nor above 1.",
    slope=lambda x: apply("zeros_like", x) + 1 / 6,
    flows=lambda x: abs(x) < 3.0,
)


def _hardswish_slope(x: Any) -> Any:
    above = (x >= 3.0).cast(x.dtype)
    return apply("where", abs(x) < 3.0, x * (1 / 3) + 0.5, above)


register_pointwise(
    "hardswish",
    lambda x: x * _hardsigmoid(x),
    "x hardsigmoid(x) (A. Howard et al., Searching for MobileNetV3, 2019).",
    slope=_hardswish_slope,
    flows=lambda x: x > -3.0,
)
register_pointwise(
    "softsign",
    lambda x: x / (abs(x) + 1.0),
    "x / (1 + |x|).",
    slope=lambda x: 1.0 / ((abs(x) + 1.0) * (abs(x) + 1.0)),
)
