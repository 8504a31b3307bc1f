"""Normalisation beside `layer_norm`. gamma and beta scale and shift what was normalised."""

from __future__ import annotations

from collections.abc import Sequence

from plancompiler.errors import ShapeError, UsageError
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.elementwise import full_like
from plancompiler.frontend.out import takes_out
from plancompiler.ops.registry import apply, apply_one

__all__ = [
    "batch_norm",
    "batch_statistics",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "rms_norm",
]


@takes_out
def rms_norm(
    x: Tensor, gamma: Tensor | None = None, eps: float = 1e-5, *, out: Tensor | None = None
) -> Tensor:
    """x over the root of its mean square along the last axis, times gamma (B. Zhang and R.
    Sennrich, 2019).
    """
    if gamma is None:
        gamma = full_like(x, 1.0, x.shape[-1:])
    if x.shape[-1:] == (0,):
        return x * gamma  # no elements, and no mean of them
    normalized: Tensor = apply("rms_norm", x, gamma, eps=float(eps))[0]
    return normalized


@takes_out
def group_norm(
    x: Tensor,
    groups: int,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """x [n, c, *spatial] normalised to mean 0 and variance 1 over each of `groups` groups of
    channels and all of space, per image; times gamma [c], plus beta [c] (Y. Wu and K. He, 2018).
    """
    gamma, beta = _affine(x, gamma, beta)
    if 0 in x.shape[2:]:  # no elements, and no mean of them
        wide = (-1, *(1,) * (x.ndim - 2))
        return x * gamma.reshape(wide) + beta.reshape(wide)
    normalized: Tensor = apply("group_norm", x, gamma, beta, groups=groups, eps=float(eps))[0]
    return normalized


@takes_out
def instance_norm(
    x: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """x [n, c, *spatial] normalised over space, per image and channel: one channel a group."""
    return group_norm(x, _channels(x), gamma, beta, eps)


@takes_out
def batch_statistics(
    x: Tensor, *, out: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel of x [n, c, *spatial] over batch and space: [c] each, in at
    least float32.

    Both are means over the whole batch on any layout: where batch or space are split, devices hold
    partial sums, which are reduced.
    """
    mean: Tensor = apply("channel_mean", x)
    variance: Tensor = apply("channel_variance", x, mean)
    return mean, variance


@takes_out
def batch_norm(
    x: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    mean: Tensor | None = None,
    variance: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """x [n, c, *spatial] less the mean of its channel, over the root of its variance + eps, times
    gamma [c], plus beta [c] (S. Ioffe and C. Szegedy, 2015).

    Without `mean` and `variance` these are those of the batch, as in training, and gradients flow
    through them. Give running ones to infer with; `moving_average_update` keeps such.
    """
    if (mean is None) != (variance is None):
        raise UsageError("batch_norm needs both mean and variance, or neither")
    if mean is None or variance is None:
        mean, variance = batch_statistics(x)
    gamma, beta = _affine(x, gamma, beta)
    return apply_one("batch_norm", x, mean, variance, gamma, beta, eps=float(eps))


def _channels(x: Tensor) -> int:
    if x.ndim < 2:
        raise ShapeError(
            "normalisation needs an axis of channels", got=x.shape, expected="[n, c, *spatial]"
        )
    return x.shape[1]


def _affine(x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """gamma and beta of channels, by default 1 and 0."""
    return _or_neutral(x, gamma, beta, (_channels(x),))


def _or_neutral(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    return (
        full_like(x, 1.0, shape) if gamma is None else gamma,
        full_like(x, 0.0, shape) if beta is None else beta,
    )


@takes_out
def layer_norm(
    x: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """x normalised to mean 0 and variance 1 along its last axis, times gamma, plus beta."""
    if gamma is None or beta is None:
        gamma, beta = _or_neutral(x, gamma, beta, x.shape[-1:])
    if x.shape[-1:] == (0,):
        return x * gamma + beta  # no elements, and no mean of them
    normalized: Tensor = apply("layer_norm", x, gamma, beta, eps=eps)[0]
    return normalized
