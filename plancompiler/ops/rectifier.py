"""More activation functions, each with its gradient as one op of its own: (x, dy) -> dx.

All run piece by piece in cache. relu6, hardtanh and the like are `clip`; see
`plancompiler.frontend.functions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from plancompiler.ops.check import (
    FLOATS,
    expect_dtype,
    expect_inputs,
    expect_shape,
    float_attr,
    only_attrs,
)
from plancompiler.ops.elementwise import BINARY_RULE, UNARY_RULE
from plancompiler.ops.erf import WORK, erf
from plancompiler.ops.formula import by_slope
from plancompiler.ops.kernel import blocks, in_float32, keep_where, scratch
from plancompiler.ops.registry import (
    Array,
    AttrMap,
    Infer,
    Kernel,
    KernelContext,
    OpDef,
    Types,
    apply,
    register,
)


class Work(Protocol):
    """A work buffer by name, of the shape and dtype of the piece (or another dtype)."""

    def __call__(self, name: str, dtype: np.dtype[Any] | None = None) -> Array: ...


Forward = Callable[..., None]
"""`(work, x, y, **attributes)`: y of a piece x, written into `y`, which may be `x`."""
Backward = Callable[..., None]
"""`(work, x, dy, dx, **attributes)`: dx of a piece, written into `dx`, which may be `x` or `dy`."""
Slope = Callable[..., Any]
"""`(x, **attributes)`: dx / dy of a tensor, for second derivatives."""

_BOOL = np.dtype(np.bool_)


def _buffer(
    context: KernelContext, like: Array, name: str, dtype: np.dtype[Any] | None = None
) -> Array:
    return scratch(context, name, like.shape, like.dtype if dtype is None else dtype)


def _kernel_of(function: Forward | Backward, defaults: Mapping[str, float]) -> Kernel:
    def kernel(context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        numbers = {name: float_attr(context.attrs, name, defaults[name]) for name in defaults}
        for arrays in blocks(*inputs, *outputs):
            function(partial(_buffer, context, arrays[0]), *arrays, **numbers)

    return in_float32(kernel)


def _infer_of(kind: str, count: int, defaults: Mapping[str, float]) -> Infer:
    def infer(inputs: Types, attrs: AttrMap) -> Types:
        expect_inputs(kind, inputs, count)
        only_attrs(kind, attrs, *defaults)
        for name, default in defaults.items():
            float_attr(attrs, name, default)
        expect_dtype(kind, inputs[0], FLOATS)
        for tensor in inputs[1:]:
            expect_dtype(kind, tensor, frozenset({inputs[0].dtype}), "gradient")
            expect_shape(kind, tensor, inputs[0].shape, "gradient")
        return inputs[:1]

    return infer


def _register(
    kind: str, forward: Forward, backward: Backward, formula: Slope, doc: str, **defaults: float
) -> None:
    """Register an activation and its gradient; `defaults` are its attributes."""
    grad_kind = f"{kind}_grad"

    def gradient(
        attrs: AttrMap, inputs: Sequence[Any], outputs: Sequence[Any], grads: Sequence[Any]
    ) -> Sequence[Any]:
        return (apply(grad_kind, inputs[0], grads[0], **attrs),)

    register(
        OpDef(
            kind,
            infer=_infer_of(kind, 1, defaults),
            rule=UNARY_RULE,
            kernel=_kernel_of(forward, defaults),
            gradient=gradient,
            inplace=((0, 0),),
            doc=doc,
        )
    )
    register(
        OpDef(
            grad_kind,
            infer=_infer_of(grad_kind, 2, defaults),
            rule=BINARY_RULE,
            kernel=_kernel_of(backward, defaults),
            gradient=by_slope(lambda x, **given: formula(x, **{**defaults, **given})),
            linear=((1,),),
            inplace=((0, 0), (0, 1)),
            doc=f"The gradient of {kind}: (x, dy) -> dx.",
        )
    )


def _sigmoid(x: Array, out: Array) -> None:
    # (1 + tanh(x / 2)) / 2 is the same function, and never overflows.
    np.multiply(x, 0.5, out=out)
    np.tanh(out, out=out)
    np.add(out, 1, out=out)
    np.multiply(out, 0.5, out=out)


# --- softplus and logsigmoid ----------------------------------------------------------------------


def _log1p_exp_of_minus_size(x: Array, out: Array) -> None:
    np.absolute(x, out=out)
    np.negative(out, out=out)
    np.exp(out, out=out)
    np.log1p(out, out=out)


def _softplus(work: Work, x: Array, y: Array) -> None:
    tail = work("tail")
    _log1p_exp_of_minus_size(x, tail)
    np.maximum(x, 0, out=y)
    np.add(y, tail, out=y)


def _softplus_grad(work: Work, x: Array, dy: Array, dx: Array) -> None:
    share = work("share")
    _sigmoid(x, share)
    np.multiply(share, dy, out=dx)


def _logsigmoid(work: Work, x: Array, y: Array) -> None:
    tail = work("tail")
    _log1p_exp_of_minus_size(x, tail)
    np.minimum(x, 0, out=y)
    np.subtract(y, tail, out=y)


def _logsigmoid_grad(work: Work, x: Array, dy: Array, dx: Array) -> None:
    share = work("share")
    np.negative(x, out=share)
    _sigmoid(share, share)
    np.multiply(share, dy, out=dx)


_register(
    "softplus",
    _softplus,
    _softplus_grad,
    lambda x: x.sigmoid(),
    "log(1 + exp(x)), without overflow.",
)
_register(
    "logsigmoid",
    _logsigmoid,
    _logsigmoid_grad,
    lambda x: (-x).sigmoid(),
    "log(sigmoid(x)), without overflow.",
)


# --- silu and mish --------------------------------------------------------------------------------


def _silu(work: Work, x: Array, y: Array) -> None:
    share = work("share")
    _sigmoid(x, share)
    np.multiply(x, share, out=y)


def _silu_grad(work: Work, x: Array, dy: Array, dx: Array) -> None:
    # With s = sigmoid(x): s (1 + x (1 - s)).
    share, slope = work("share"), work("slope")
    _sigmoid(x, share)
    np.subtract(1, share, out=slope)
    np.multiply(slope, x, out=slope)
    np.add(slope, 1, out=slope)
    np.multiply(slope, share, out=slope)
    np.multiply(slope, dy, out=dx)


_MISH_LIMIT = 20.0
"""From here on tanh(softplus(x)) is 1 in float64, and exp(x) squared is far from overflow."""


def _tanh_of_softplus(x: Array, out: Array, power: Array) -> None:
    """tanh(log(1 + e)) = n / (n + 2) with e = exp(x) and n = e (e + 2); `power` becomes e."""
    np.minimum(x, _MISH_LIMIT, out=power)
    np.exp(power, out=power)
    np.add(power, 2, out=out)
    np.multiply(out, power, out=out)
    np.divide(out, out + 2, out=out)


def _mish(work: Work, x: Array, y: Array) -> None:
    tanh = work("tanh")
    _tanh_of_softplus(x, tanh, work("power"))
    np.multiply(x, tanh, out=y)


def _mish_grad(work: Work, x: Array, dy: Array, dx: Array) -> None:
    # With t = tanh(softplus(x)): t + x (1 - t^2) sigmoid(x).
    tanh, slope = work("tanh"), work("power")
    _tanh_of_softplus(x, tanh, slope)
    np.multiply(tanh, tanh, out=slope)
    np.subtract(1, slope, out=slope)
    np.multiply(slope, x, out=slope)
    share = work("share")
    _sigmoid(x, share)
    np.multiply(slope, share, out=slope)
    np.add(slope, tanh, out=slope)
    np.multiply(slope, dy, out=dx)


def _silu_slope(x: Any) -> Any:
    share = x.sigmoid()
    return ((1.0 - share) * x + 1.0) * share


def _mish_slope(x: Any) -> Any:
    tanh = apply("softplus", x).tanh()
    return tanh + (1.0 - tanh * tanh) * x * x.sigmoid()


_register("silu", _silu, _silu_grad, _silu_slope, "x sigmoid(x), also called swish.")
_register("mish", _mish, _mish_grad, _mish_slope, "x tanh(softplus(x)) (D. Misra, 2019).")


# --- elu, selu and leaky_relu ---------------------------------------------------------------------

_SELU_SCALE = 1.0507009873554805
_SELU_ALPHA = 1.6732632423543772


def _scaled_elu(work: Work, x: Array, y: Array, scale: float, alpha: float) -> None:
    below = work("below")
    np.minimum(x, 0, out=below)
    np.expm1(below, out=below)
    np.multiply(below, scale * alpha, out=below)
    np.maximum(x, 0, out=y)
    if scale != 1.0:
        np.multiply(y, scale, out=y)
    np.add(y, below, out=y)


def _scaled_elu_grad(
    work: Work, x: Array, dy: Array, dx: Array, scale: float, alpha: float
) -> None:
    slope, above = work("below"), work("above", _BOOL)
    np.greater(x, 0, out=above)
    np.minimum(x, 0, out=slope)
    np.exp(slope, out=slope)
    np.multiply(slope, scale * alpha, out=slope)
    np.copyto(slope, scale, where=above)
    np.multiply(slope, dy, out=dx)


def _elu(work: Work, x: Array, y: Array, alpha: float) -> None:
    _scaled_elu(work, x, y, 1.0, alpha)


def _elu_grad(work: Work, x: Array, dy: Array, dx: Array, alpha: float) -> None:
    _scaled_elu_grad(work, x, dy, dx, 1.0, alpha)


def _selu(work: Work, x: Array, y: Array) -> None:
    _scaled_elu(work, x, y, _SELU_SCALE, _SELU_ALPHA)


def _selu_grad(work: Work, x: Array, dy: Array, dx: Array) -> None:
    _scaled_elu_grad(work, x, dy, dx, _SELU_SCALE, _SELU_ALPHA)


def _leaky_relu(work: Work, x: Array, y: Array, slope: float) -> None:
    below = work("below")
    np.minimum(x, 0, out=below)
    np.multiply(below, slope, out=below)
    np.maximum(x, 0, out=y)
    np.add(y, below, out=y)


def _leaky_relu_grad(work: Work, x: Array, dy: Array, dx: Array, slope: float) -> None:
    slopes, above = work("below"), work("above", _BOOL)
    np.greater(x, 0, out=above)
    slopes.fill(slope)
    np.copyto(slopes, 1, where=above)
    np.multiply(slopes, dy, out=dx)


def _scaled_elu_slope(x: Any, scale: float, alpha: float) -> Any:
    above = (x > 0).cast(x.dtype)
    below = apply("clip", x, high=0.0, edges=False).exp() * alpha
    return (above + (1.0 - above) * below) * scale


def _leaky_relu_slope(x: Any, slope: float) -> Any:
    return (x > 0).cast(x.dtype) * (1.0 - slope) + slope


_register(
    "elu",
    _elu,
    _elu_grad,
    lambda x, alpha: _scaled_elu_slope(x, 1.0, alpha),
    "x where x > 0, else alpha (exp(x) - 1).",
    alpha=1.0,
)
_register(
    "selu",
    _selu,
    _selu_grad,
    lambda x: _scaled_elu_slope(x, _SELU_SCALE, _SELU_ALPHA),
    "The scaled elu that keeps mean 0 and variance 1 (G. Klambauer et al., 2017).",
)
_register(
    "leaky_relu",
    _leaky_relu,
    _leaky_relu_grad,
    _leaky_relu_slope,
    "x where x > 0, else slope * x.",
    slope=0.01,
)


# --- hardsigmoid, hardswish and softsign ----------------------------------------------------------


def _hard_share(x: Array, out: Array) -> None:
    """(x + 3) / 6, from 0 to 1."""
    np.add(x, 3, out=out)
    np.clip(out, 0, 6, out=out)
    np.multiply(out, 1 / 6, out=out)


def _hardsigmoid(work: Work, x: Array, y: Array) -> None:
    _hard_share(x, y)


def _hardsigmoid_grad(work: Work, x: Array, dy: Array, dx: Array) -> None:
    size, inside = work("size"), work("inside", _BOOL)
    np.absolute(x, out=size)
    np.less(size, 3, out=inside)
    np.multiply(dy, 1 / 6, out=dx)
    keep_where(dx, inside, dx)


def _hardswish(work: Work, x: Array, y: Array) -> None:
    share = work("share")
    _hard_share(x, share)
    np.multiply(x, share, out=y)


def _hardswish_grad(work: Work, x: Array, dy: Array, dx: Array) -> None:
    # (2 x + 3) / 6 between -3 and 3, 0 below and 1 above.
    slope, mask = work("share"), work("outside", _BOOL)
    np.multiply(x, 1 / 3, out=slope)
    np.add(slope, 0.5, out=slope)
    np.greater_equal(x, 3, out=mask)
    np.copyto(slope, 1, where=mask)
    np.greater(x, -3, out=mask)
    np.multiply(slope, dy, out=dx)
    keep_where(dx, mask, dx)


def _softsign(work: Work, x: Array, y: Array) -> None:
    size = work("size")
    np.absolute(x, out=size)
    np.add(size, 1, out=size)
    np.divide(x, size, out=y)


def _softsign_grad(work: Work, x: Array, dy: Array, dx: Array) -> None:
    size = work("size")
    np.absolute(x, out=size)
    np.add(size, 1, out=size)
    np.multiply(size, size, out=size)
    np.divide(dy, size, out=dx)


def _hardswish_slope(x: Any) -> Any:
    inside, above = (mask.cast(x.dtype) for mask in (abs(x) < 3, x >= 3))
    return inside * (x * (1 / 3) + 0.5) + above


def _softsign_slope(x: Any) -> Any:
    size = abs(x) + 1.0
    return 1.0 / (size * size)


_register(
    "hardsigmoid",
    _hardsigmoid,
    _hardsigmoid_grad,
    lambda x: (abs(x) < 3).cast(x.dtype) * (1 / 6),
    "(x + 3) / 6, not below 0 nor above 1.",
)
_register(
    "hardswish",
    _hardswish,
    _hardswish_grad,
    _hardswish_slope,
    "x hardsigmoid(x) (A. Howard et al., Searching for MobileNetV3, 2019).",
)
_register("softsign", _softsign, _softsign_grad, _softsign_slope, "x / (1 + |x|).")


# --- gelu_exact -----------------------------------------------------------------------------------


def _normal_share(work: Work, x: Array, out: Array) -> None:
    """The standard normal distribution function (1 + erf(x / sqrt(2))) / 2."""
    np.multiply(x, math.sqrt(0.5), out=out)
    erf(out, out, [work(name) for name in WORK])
    np.add(out, 1, out=out)
    np.multiply(out, 0.5, out=out)


def _gelu_exact(work: Work, x: Array, y: Array) -> None:
    share = work("share")
    _normal_share(work, x, share)
    np.multiply(x, share, out=y)


def _gelu_exact_grad(work: Work, x: Array, dy: Array, dx: Array) -> None:
    # With the normal distribution function F and its density f: F(x) + x f(x).
    share, density = work("share"), work("density")
    _normal_share(work, x, share)
    np.multiply(x, x, out=density)
    np.multiply(density, -0.5, out=density)
    np.exp(density, out=density)
    np.multiply(density, 1 / math.sqrt(2 * math.pi), out=density)
    np.multiply(density, x, out=density)
    np.add(density, share, out=density)
    np.multiply(density, dy, out=dx)


def _gelu_exact_slope(x: Any) -> Any:
    share = apply("erf", x * math.sqrt(0.5)) * 0.5 + 0.5
    return share + (x * x * -0.5).exp() * x * (1 / math.sqrt(2 * math.pi))


_register(
    "gelu_exact",
    _gelu_exact,
    _gelu_exact_grad,
    _gelu_exact_slope,
    "x times the normal distribution function (Hendrycks & Gimpel, 2016); `gelu` has its tanh "
    "form.",
)
