"""Activation functions, with PyTorch's names and arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.frontend.functions import activation as ours
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.elementwise import abs as abs_of
from plancompiler.frontend.functions.elementwise import where
from plancompiler.frontend.functions.random import rand_like
from plancompiler.frontend.functions.training import dropout as drop
from plancompiler.frontend.nn.functional.public import public
from plancompiler.ir import DType
from plancompiler.ir.operators import filled, normalize_axes
from plancompiler.ops.registry import apply_one

relu = ours.relu
sigmoid = ours.sigmoid
tanh = ours.tanh
logsigmoid = ours.logsigmoid
silu = ours.silu
mish = ours.mish
selu = ours.selu
softsign = ours.softsign
hardsigmoid = ours.hardsigmoid
hardswish = ours.hardswish
relu6 = ours.relu6


@public
def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """x times the normal distribution function at x (D. Hendrycks and K. Gimpel, 2016), or its
    approximation by "tanh".
    """
    if approximate not in ("none", "tanh"):
        raise AttributeValueError(
            "unknown approximation of gelu", got=repr(approximate), expected="'none' or 'tanh'"
        )
    return ours.gelu(input) if approximate == "tanh" else ours.gelu_exact(input)


@public
def elu(input: Tensor, alpha: float = 1.0) -> Tensor:
    """x where x > 0, else alpha (exp(x) - 1)."""
    return ours.elu(input, alpha)


@public
def celu(input: Tensor, alpha: float = 1.0) -> Tensor:
    """x where x > 0, else alpha (exp(x / alpha) - 1) (J. T. Barron, 2017)."""
    if alpha == 0:
        raise AttributeValueError("celu divides by its alpha", got=alpha, expected="not 0")
    return ours.elu(input * (1.0 / alpha), 1.0) * alpha


@public
def leaky_relu(input: Tensor, negative_slope: float = 0.01) -> Tensor:
    """x where x > 0, else negative_slope x."""
    return ours.leaky_relu(input, negative_slope)


@public
def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """x where x > 0, else weight x; the weight is one number, or one for each channel (axis 1)."""
    count = weight.shape[0] if weight.ndim else 1
    if count != 1 and (input.ndim < 2 or input.shape[1] != count):
        raise ShapeError(
            "prelu needs one weight, or one for each channel",
            got=f"{weight.shape} for {input.shape}",
        )
    across = weight.reshape((1, count, *(1,) * (input.ndim - 2)) if count != 1 else ())
    return where(input > 0.0, input, across * input)


@public
def rrelu(
    input: Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False
) -> Tensor:
    """x where x > 0, else x times a slope: drawn for each element between `lower` and `upper` while
    training, else their mean (B. Xu et al., 2015).
    """
    if not training:
        return ours.leaky_relu(input, (lower + upper) / 2)
    return where(input >= 0.0, input, input * (rand_like(input) * (upper - lower) + lower))


@public
def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """x, but not below `min_val` nor above `max_val`."""
    return ours.hardtanh(input, min_val, max_val)


@public
def hardshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    """x where |x| > lambd, else 0."""
    return where(abs_of(input) > lambd, input, 0.0)


@public
def softshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    """x moved towards 0 by lambd, and 0 where it would pass it."""
    if lambd < 0:
        raise AttributeValueError("softshrink moves towards 0", got=lambd, expected="at least 0")
    return input - apply_one("clip", input, low=-float(lambd), high=float(lambd))


@public
def tanhshrink(input: Tensor) -> Tensor:
    """x - tanh(x)."""
    return input - input.tanh()


@public
def threshold(input: Tensor, threshold: float, value: float) -> Tensor:
    """x where x > threshold, else `value`."""
    return where(input > threshold, input, float(value))


@public
def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + exp(beta x)) / beta, and x itself where beta x > threshold."""
    smooth = (
        ours.softplus(input * float(beta)) * (1.0 / beta) if beta != 1 else ours.softplus(input)
    )
    return where(input * float(beta) > threshold, input, smooth)


@public
def glu(input: Tensor, dim: int = -1) -> Tensor:
    """The first half of an axis times the sigmoid of the second (Y. Dauphin et al., 2017)."""
    axis = normalize_axes(dim, input.ndim)[0]
    extent = input.shape[axis]
    if extent % 2:
        raise ShapeError("glu halves an axis", got=input.shape, expected="an even extent")
    lead = (slice(None),) * axis
    return (
        input[(*lead, slice(0, extent // 2))] * input[(*lead, slice(extent // 2, None))].sigmoid()
    )


def _along(x: Tensor, dim: int | None, dtype: DType | str | None) -> tuple[Tensor, int]:
    """The tensor in a dtype, and the axis: without one, that of PyTorch's old default."""
    if dtype is not None:
        x = x.cast(dtype)
    return x, (0 if x.ndim in (0, 1, 3) else 1) if dim is None else dim


@public
def softmax(input: Tensor, dim: int | None = None, *, dtype: DType | str | None = None) -> Tensor:
    """exp(x) over its sum along an axis."""
    return ours.softmax(*_along(input, dim, dtype))


@public
def log_softmax(
    input: Tensor, dim: int | None = None, *, dtype: DType | str | None = None
) -> Tensor:
    """The logarithm of softmax along an axis."""
    return ours.log_softmax(*_along(input, dim, dtype))


@public
def softmin(input: Tensor, dim: int | None = None, *, dtype: DType | str | None = None) -> Tensor:
    """softmax(-x) along an axis."""
    x, axis = _along(input, dim, dtype)
    return ours.softmax(-x, axis)


@public
def gumbel_softmax(logits: Tensor, tau: float = 1.0, hard: bool = False, dim: int = -1) -> Tensor:
    """softmax((logits + noise) / tau) with noise of the Gumbel distribution (E. Jang et al., 2016);
    with `hard` 1 for its greatest element and 0 for all others, with the gradient of the soft one.
    """
    noise = rand_like(logits)
    tiny = 1e-20 if logits.dtype is not DType.FLOAT16 else 1e-7
    gumbel = -(-(noise + tiny).log() + tiny).log()
    soft: Tensor = ours.softmax((logits + gumbel) * (1.0 / tau), dim)
    if not hard:
        return soft
    axis = normalize_axes(dim, soft.ndim)[0]
    best = apply_one("argmax", soft, axis=axis, keepdims=False)
    ones = apply_one("one_hot", best, classes=soft.shape[axis], dtype=str(soft.dtype))
    order = [*range(axis), soft.ndim - 1, *range(axis, soft.ndim - 1)]
    placed: Tensor = ones.transpose(order) + soft - apply_one("stop_gradient", soft)
    return placed


# --- dropout --------------------------------------------------------------------------------------


def _check_share(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise AttributeValueError("a dropout probability is a share", got=p, expected="0 to 1")


def _dropped(x: Tensor, p: float) -> Tensor:
    return x * 0.0 if p == 1.0 else drop(x, p)


@public
def dropout(input: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """While training, elements are zeroed with probability p, the others scaled by 1 / (1 - p)."""
    _check_share(p)
    return _dropped(input, p) if training and p else input


def _of_channels(axes: int) -> Callable[..., Any]:
    def function(input: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
        _check_share(p)
        if not training or not p:
            return input
        if input.ndim not in (axes + 1, axes + 2):
            raise ShapeError(
                "dropout of channels needs another number of axes",
                got=input.shape,
                expected=f"{axes + 1} or {axes + 2}",
            )
        lead = input.shape[: input.ndim - axes]
        ones = filled(input, 1.0, (*lead, *(1,) * axes))
        return input * _dropped(ones, p)

    function.__name__ = function.__qualname__ = f"dropout{axes}d"
    function.__doc__ = (
        f"While training, whole channels of [n, c, ...] with {axes} axes of space are zeroed with "
        "probability p, the others scaled by 1 / (1 - p) (J. Tompson et al., 2015)."
    )
    return public(function)


dropout1d, dropout2d, dropout3d = map(_of_channels, (1, 2, 3))

_SATURATED = -1.7580993408473766
"""What selu approaches to the left."""


@public
def alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False) -> Tensor:
    """While training, elements become selu's value far to the left with probability p; then all are
    scaled and moved, so that mean 0 and variance 1 stay (G. Klambauer et al., 2017).
    """
    _check_share(p)
    return _saturated(input, p, input.shape) if training and p else input


@public
def feature_alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False) -> Tensor:
    """`alpha_dropout` of whole channels of [n, c, ...]."""
    _check_share(p)
    shape = (*input.shape[:2], *(1,) * (input.ndim - 2))
    return _saturated(input, p, shape) if training and p else input


def _saturated(x: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
    if p == 1.0:
        return x * 0.0
    kept = _dropped(filled(x, 1.0, shape), p) > 0.0
    scale = ((1 - p) * (1 + p * _SATURATED**2)) ** -0.5
    dropped: Tensor = where(kept, x, _SATURATED) * scale + (-scale * _SATURATED * p)
    return dropped
