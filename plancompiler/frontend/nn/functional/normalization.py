"""Normalisation, with PyTorch's names and arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plancompiler.errors import ShapeError, UsageError
from plancompiler.frontend.functions import normalization as ours
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.elementwise import full_like
from plancompiler.frontend.functions.shape import moveaxis
from plancompiler.frontend.functions.shape import pad as pad_all
from plancompiler.frontend.nn.functional.public import public
from plancompiler.ir.operators import whole_numbers
from plancompiler.ops.registry import apply_one


def _last_axes(
    x: Tensor, shape: int | Sequence[int], *given: Tensor | None
) -> tuple[tuple[int, ...], int]:
    """The extents of the normalised axes, which are the last ones, and their product."""
    extents = whole_numbers("normalized_shape", shape)
    for each in (
        x.shape[x.ndim - len(extents) :],
        *(one.shape for one in given if one is not None),
    ):
        if not extents or each != extents:
            raise ShapeError(
                "the last axes do not have the normalised shape", got=each, expected=extents
            )
    return extents, math.prod(extents)


def _flat(x: Tensor, shape: tuple[int, ...], count: int) -> Tensor:
    return x if len(shape) == 1 else x.reshape((*x.shape[: x.ndim - len(shape)], count))


@public
def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """The input normalised to mean 0 and variance 1 over its last axes, those of
    `normalized_shape`; times weight, plus bias, both of that shape (J. L. Ba et al., 2016).
    """
    shape, count = _last_axes(input, normalized_shape, weight, bias)
    gamma = full_like(input, 1.0, (count,)) if weight is None else _flat(weight, shape, count)
    beta = full_like(input, 0.0, (count,)) if bias is None else _flat(bias, shape, count)
    return ours.layer_norm(_flat(input, shape, count), gamma, beta, eps).reshape(input.shape)


@public
def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """The input over the root of its mean square over its last axes, those of `normalized_shape`;
    times weight. `eps` is the dtype's smallest step at 1 by default.
    """
    shape, count = _last_axes(input, normalized_shape, weight)
    gamma = full_like(input, 1.0, (count,)) if weight is None else _flat(weight, shape, count)
    least = _STEPS[str(input.dtype)] if eps is None else eps
    return ours.rms_norm(_flat(input, shape, count), gamma, least).reshape(input.shape)


_STEPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


@public
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """x [n, c, *space] normalised over each of `num_groups` groups of channels and all of space;
    times weight [c], plus bias [c].
    """
    return ours.group_norm(input, num_groups, weight, bias, eps)


@public
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """x [n, c, *space] normalised over space, per image and channel, or without `use_input_stats`
    by running statistics [c]; times weight [c], plus bias [c].
    """
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    _refuse_running(running_mean, running_var)
    return ours.instance_norm(input, weight, bias, eps)


@public
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """x [n, c, ...] normalised per channel by running statistics [c], or while training by those of
    the batch; times weight [c], plus bias [c]. What runs along is kept by `pc.nn.BatchNorm2d`.
    """
    if training:
        _refuse_running(running_mean, running_var)
        return ours.batch_norm(input, weight, bias, eps=eps)
    if running_mean is None or running_var is None:
        raise UsageError("batch_norm needs running statistics where it does not train")
    return ours.batch_norm(input, weight, bias, running_mean, running_var, eps)


def _refuse_running(*given: Tensor | None) -> None:
    if any(each is not None for each in given):
        raise UsageError(
            "a function does not change running statistics",
            got="running statistics while training",
            expected="None",
            hint="pc.nn.BatchNorm2d keeps them; pc.moving_average_update changes a variable",
        )


@public
def local_response_norm(
    input: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Tensor:
    """x [n, c, ...] over (k + alpha times the mean square of `size` neighbouring channels, zeros
    beside the outermost)^beta (A. Krizhevsky et al., 2012).
    """
    if input.ndim < 3:
        raise ShapeError(
            "channels and space are needed", got=input.shape, expected="3 axes or more"
        )
    squares = moveaxis(apply_one("square", input), 1, -1)
    low, high = [0] * squares.ndim, [0] * squares.ndim
    low[-1], high[-1] = size // 2, (size - 1) // 2
    means = apply_one("avg_pool1d", pad_all(squares, low, high), kernel=(size,), stride=(1,))
    return input / (moveaxis(means, -1, 1) * alpha + k) ** beta
