"""Activation functions of each element."""

from __future__ import annotations

from plancompiler.frontend.functional import Tensor
from plancompiler.frontend.functions.elementwise import clip
from plancompiler.ops.registry import apply


def _activation(kind: str, x: Tensor, **attrs: float) -> Tensor:
    found: Tensor = apply(kind, x, **attrs)
    return found


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), without overflow."""
    return _activation("softplus", x)


def logsigmoid(x: Tensor) -> Tensor:
    """log(sigmoid(x)), without overflow."""
    return _activation("logsigmoid", x)


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), also called swish."""
    return _activation("silu", x)


def mish(x: Tensor) -> Tensor:
    """x tanh(softplus(x)) (D. Misra, 2019)."""
    return _activation("mish", x)


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """x where x > 0, else alpha (exp(x) - 1)."""
    return _activation("elu", x, alpha=float(alpha))


def selu(x: Tensor) -> Tensor:
    """Scaled elu that keeps mean 0 and variance 1 (G. Klambauer et al., 2017)."""
    return _activation("selu", x)


def leaky_relu(x: Tensor, slope: float = 0.01) -> Tensor:
    """x where x > 0, else slope * x."""
    return _activation("leaky_relu", x, slope=float(slope))


def hardtanh(x: Tensor, low: float = -1.0, high: float = 1.0) -> Tensor:
    """x, but not below `low` nor above `high`."""
    return clip(x, low, high)


def relu6(x: Tensor) -> Tensor:
    """x, but not below 0 nor above 6."""
    return clip(x, 0.0, 6.0)


def hardsigmoid(x: Tensor) -> Tensor:
    """(x + 3) / 6, but not below 0 nor above 1."""
    return _activation("hardsigmoid", x)


def hardswish(x: Tensor) -> Tensor:
    """x hardsigmoid(x) (A. Howard et al., 2019)."""
    return _activation("hardswish", x)


def softsign(x: Tensor) -> Tensor:
    """x / (1 + |x|)."""
    return _activation("softsign", x)


def gelu_exact(x: Tensor) -> Tensor:
    """x times the normal distribution function; `gelu` has the tanh form (Hendrycks and Gimpel)."""
    return _activation("gelu_exact", x)
