"""Normalisation by all batches that were seen so far (data normalisation)."""

from __future__ import annotations

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.elementwise import full_like, rsqrt
from plancompiler.frontend.out import takes_out
from plancompiler.ir.arguments import real_number
from plancompiler.ops.gradient import expand_to, widened
from plancompiler.ops.registry import apply, apply_one

__all__ = [
    "data_norm",
    "data_norm_update",
]


@takes_out
def data_norm(
    x: Tensor, count: Tensor, total: Tensor, square: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """x [n, c, *spatial] less μ = total / count, over the root of square / count, per channel.

    Statistics are [c], or [g, c] for g balanced groups of rows of x with statistics of their own.
    `data_norm_update` keeps them. ShapeError for statistics of another shape.
    """
    _check("data_norm", x, count, total, square)
    mean, variance = (widened(each) / widened(count) for each in (total, square))
    normalized: Tensor
    if count.ndim == 1:
        one, zero = (full_like(x, number, count.shape) for number in (1.0, 0.0))
        normalized = apply("batch_norm", x, mean, variance, one, zero, eps=0.0)
    else:
        normalized = (widened(x) - _by_row(mean, x)) * _by_row(rsqrt(variance), x)
    return normalized if normalized.dtype is x.dtype else normalized.cast(x.dtype)


def data_norm_update(
    x: Tensor,
    count: Tensor,
    total: Tensor,
    square: Tensor,
    decay: float = 0.9999999,
    eps: float = 1e-4,
) -> tuple[Tensor, Tensor, Tensor]:
    """The next values of variables `count`, `total` and `square`: each times `decay`, plus 1, the
    mean of x, and the mean of (x - μ)² + eps, with μ = total / count before.

    The means are over the whole batch and space per channel, on any layout, so that a batch counts
    once however many rows it has. With statistics [g, c] they are over each group of rows.
    """
    _check("data_norm_update", x, count, total, square)
    kept = real_number("decay of data_norm_update", decay)
    least = real_number("eps of data_norm_update", eps)
    if not 0.0 < kept <= 1.0 or least < 0.0:
        raise AttributeValueError(
            "data_norm_update has another decay or eps than it can use",
            got=f"decay={decay}, eps={eps}",
            expected="0 < decay <= 1 and eps >= 0",
        )
    mean = widened(total) / widened(count)
    first: Tensor
    second: Tensor
    if count.ndim == 1:
        first, second = apply("channel_mean", x), apply("channel_variance", x, mean)
    else:
        x = widened(x)
        centred = x - _by_row(mean, x)
        first, second = (_by_group(each, count.shape[0]) for each in (x, centred * centred))
    seen = (full_like(count, 1.0), first, second + least)
    changes = [each if each.dtype is count.dtype else each.cast(count.dtype) for each in seen]
    # All changes are there before the first state takes one.
    updated: list[Tensor] = [
        apply("decayed_sum_update", state, change, decay=kept)
        for state, change in zip((count, total, square), changes, strict=True)
    ]
    return updated[0], updated[1], updated[2]


def _check(kind: str, x: Tensor, *states: Tensor) -> None:
    if x.ndim < 2:
        raise ShapeError(f"{kind} needs rows and channels", got=x.shape, expected="[n, c, ...]")
    for state in states:
        shape = state.shape
        if shape[-1:] != x.shape[1:2] or len(shape) > 2 or shape != states[0].shape:
            raise ShapeError(
                f"{kind} needs statistics per channel",
                got=", ".join(str(each.shape) for each in states),
                expected=f"[{x.shape[1]}] or [groups, {x.shape[1]}] for all three",
            )


def _by_row(state: Tensor, x: Tensor) -> Tensor:
    """A state [g, c] as a tensor like x: each row has that of its group."""
    rows: Tensor = apply("group_rows", state, rows=x.shape[0], mean=False)
    if x.ndim > 2:
        rows = rows.reshape((*rows.shape, *(1,) * (x.ndim - 2)))
    expanded: Tensor = expand_to(rows, x.shape)
    return expanded


def _by_group(x: Tensor, groups: int) -> Tensor:
    """Means of groups of rows, and over space: [g, c]."""
    flat = x if x.ndim == 2 else x.mean(tuple(range(2, x.ndim)))
    return apply_one("group_sums", flat, groups=groups, mean=True)
