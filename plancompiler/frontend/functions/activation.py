"""Activation functions of each element."""

from __future__ import annotations

from plancompiler.frontend.functions.derived import Tensor, unary
from plancompiler.frontend.out import takes_out
from plancompiler.ir.operators import one_axis
from plancompiler.ops import split_softmax
from plancompiler.ops.registry import apply_one

__all__ = [
    "elu",
    "gelu",
    "gelu_exact",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "log_softmax",
    "logsigmoid",
    "mish",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "softsign",
    "tanh",
]


def _activation(kind: str, x: Tensor, **attrs: float) -> Tensor:
    return apply_one(kind, x, **attrs)


tanh = unary("tanh")
sigmoid = unary("sigmoid")
relu = unary("relu")
gelu = unary("gelu")


@takes_out
def softmax(
    x: Tensor, axis: int = -1, split_axis: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """exp(x) normalised to sum to one along an axis.

    With `split_axis` the axis may be split over devices: maxima and sums are reduced, x is not
    gathered.
    """
    at = one_axis(axis, x.ndim)
    if not x.shape[at]:
        return x.cast(x.dtype)
    if split_axis:
        shares: Tensor = split_softmax.split_softmax(x, at)
        return shares
    return apply_one("softmax", x, axis=at)


@takes_out
def log_softmax(
    x: Tensor, axis: int = -1, split_axis: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Logarithm of softmax, computed without overflow; `split_axis` as in `softmax`."""
    at = one_axis(axis, x.ndim)
    if not x.shape[at]:
        return x.cast(x.dtype)
    if split_axis:
        logarithms: Tensor = split_softmax.split_log_softmax(x, at)
        return logarithms
    return apply_one("log_softmax", x, axis=at)


softplus = unary("softplus")
logsigmoid = unary("logsigmoid")
silu = unary("silu")
mish = unary("mish")


@takes_out
def elu(x: Tensor, alpha: float = 1.0, *, out: Tensor | None = None) -> Tensor:
    """x where x > 0, else alpha (exp(x) - 1)."""
    return _activation("elu", x, alpha=float(alpha))


selu = unary("selu")


@takes_out
def leaky_relu(x: Tensor, slope: float = 0.01, *, out: Tensor | None = None) -> Tensor:
    """x where x > 0, else slope * x."""
    return _activation("leaky_relu", x, slope=float(slope))


@takes_out
def hardtanh(
    x: Tensor, low: float = -1.0, high: float = 1.0, *, out: Tensor | None = None
) -> Tensor:
    """x, but not below `low` nor above `high`; no gradient flows at either."""
    return apply_one("clip", x, low=float(low), high=float(high), edges=False)


@takes_out
def relu6(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x, but not below 0 nor above 6; no gradient flows at either."""
    return hardtanh(x, 0.0, 6.0)


hardsigmoid = unary("hardsigmoid")
hardswish = unary("hardswish")
softsign = unary("softsign")
gelu_exact = unary("gelu_exact")
