"""Normalisation, with PyTorch's names and arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from plancompiler.errors import ShapeError, UsageError
from plancompiler.frontend.functions import normalization as ours
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.elementwise import full_like
from plancompiler.frontend.functions.reduction import var
from plancompiler.frontend.functions.shape import moveaxis
from plancompiler.frontend.functions.shape import pad as pad_all
from plancompiler.frontend.functions.training import moving_average_update
from plancompiler.frontend.nn.functional.public import public
from plancompiler.frontend.trace import current_recorder
from plancompiler.ir import Phase
from plancompiler.ir.operators import in_dtype, whole_numbers
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
    by running statistics [c]; times weight [c], plus bias [c]. Running statistics that are given
    beside those of the input get the share `momentum` of their means over the images.
    """
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if running_mean is not None or running_var is not None:
        space = tuple(range(2, input.ndim))
        images = input.detach() if hasattr(input, "detach") else input
        keep_statistics(
            (running_mean, running_var),
            (images.mean(space).mean(0), var(images, space).mean(0)),
            math.prod(input.shape[2:]),
            momentum,
        )
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
    the batch; times weight [c], plus bias [c]. Running statistics that are given while training
    get the share `momentum` of the batch's, in place: eager tensors, or variables of a job.
    """
    if training:
        mean, variance = ours.batch_statistics(input)
        count = math.prod(input.shape) // max(1, input.shape[1])
        keep_statistics((running_mean, running_var), (mean, variance), count, momentum)
        return ours.batch_norm(input, weight, bias, mean, variance, eps)
    if running_mean is None or running_var is None:
        raise UsageError("batch_norm needs running statistics where it does not train")
    return ours.batch_norm(input, weight, bias, running_mean, running_var, eps)


def keep_statistics(
    running: Sequence[Any], seen: Sequence[Any], count: int, momentum: float
) -> None:
    """Append the updates of running means and variances, those that are not None, by those of a
    batch, which are over `count` elements.
    """
    recorder = current_recorder()
    if not momentum:
        return
    with recorder.phase(Phase.UPDATE):
        # The variance of a batch is around its own mean, and so too small by this factor.
        unbiased = seen[1] * (count / max(1, count - 1))
        for state, new in zip(running, (seen[0], unbiased), strict=True):
            if state is not None:
                moving_average_update(state, in_dtype(new, state.dtype), decay=1.0 - momentum)


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
