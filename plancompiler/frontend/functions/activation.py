"""Activation functions of each element."""

from __future__ import annotations

from plancompiler.frontend.functional import Tensor
from plancompiler.frontend.out import takes_out
from plancompiler.ops.registry import apply


def _activation(kind: str, x: Tensor, **attrs: float) -> Tensor:
    found: Tensor = apply(kind, x, **attrs)
    return found


@takes_out
def softplus(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """log(1 + exp(x)), without overflow."""
    return _activation("softplus", x)


@takes_out
def logsigmoid(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """log(sigmoid(x)), without overflow."""
    return _activation("logsigmoid", x)


@takes_out
def silu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x sigmoid(x), also called swish."""
    return _activation("silu", x)


@takes_out
def mish(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x tanh(softplus(x)) (D. Misra, 2019)."""
    return _activation("mish", x)


@takes_out
def elu(x: Tensor, alpha: float = 1.0, *, out: Tensor | None = None) -> Tensor:
    """x where x > 0, else alpha (exp(x) - 1)."""
    return _activation("elu", x, alpha=float(alpha))


@takes_out
def selu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Scaled elu that keeps mean 0 and variance 1 (G. Klambauer et al., 2017)."""
    return _activation("selu", x)


@takes_out
def leaky_relu(x: Tensor, slope: float = 0.01, *, out: Tensor | None = None) -> Tensor:
    """x where x > 0, else slope * x."""
    return _activation("leaky_relu", x, slope=float(slope))


@takes_out
def hardtanh(
    x: Tensor, low: float = -1.0, high: float = 1.0, *, out: Tensor | None = None
) -> Tensor:
    """x, but not below `low` nor above `high`; no gradient flows at either."""
    found: Tensor = apply("clip", x, low=float(low), high=float(high), edges=False)
    return found


@takes_out
def relu6(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x, but not below 0 nor above 6; no gradient flows at either."""
    return hardtanh(x, 0.0, 6.0)


@takes_out
def hardsigmoid(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """(x + 3) / 6, but not below 0 nor above 1."""
    return _activation("hardsigmoid", x)


@takes_out
def hardswish(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x hardsigmoid(x) (A. Howard et al., 2019)."""
    return _activation("hardswish", x)


@takes_out
def softsign(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x / (1 + |x|)."""
    return _activation("softsign", x)


@takes_out
def gelu_exact(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x times the normal distribution function; `gelu` has the tanh form (Hendrycks and Gimpel)."""
    return _activation("gelu_exact", x)
