"""Reductions, running sums and order along axes. `axis` is None (all axes), one or several."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from plancompiler.errors import AttributeValueError
from plancompiler.frontend.functions.derived import Axes, Tensor
from plancompiler.frontend.functions.elementwise import full_like
from plancompiler.frontend.out import takes_out
from plancompiler.ir import DType
from plancompiler.ir.operators import in_dtype, normalize_axes
from plancompiler.ir.promotion import dtypes_may_mix
from plancompiler.ops.gradient import widened
from plancompiler.ops.registry import apply, apply_one

__all__ = [
    "all",
    "any",
    "argmax",
    "argmin",
    "argsort",
    "count_nonzero",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "logsumexp",
    "max",
    "max_with_index",
    "mean",
    "min",
    "min_with_index",
    "norm",
    "prod",
    "sort",
    "std",
    "sum",
    "topk",
    "var",
]


def _truths(x: Tensor) -> Tensor:
    return in_dtype(x, DType.BOOL) if dtypes_may_mix() else x


def _reduce(kind: str, x: Tensor, axis: Axes, keepdims: bool, **attrs: float) -> Tensor:
    axes = normalize_axes(axis, x.ndim)
    return apply_one(kind, x, axes=axes, keepdims=keepdims, **attrs)


@takes_out
def prod(
    x: Tensor, axis: Axes = None, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Product over axes, in the dtype of x; of whole numbers and bool in int64."""
    # In float32 the product of a part of the axis may be out of the range that the whole is in.
    wide: Tensor = widened(x)
    product = _reduce("prod", wide, axis, keepdims)
    return product if wide is x else product.cast(x.dtype)


@takes_out
def all(
    x: Tensor, axis: Axes = None, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Whether all are True over axes; numbers are where they are not zero."""
    return _reduce("all", _truths(x), axis, keepdims)


@takes_out
def any(
    x: Tensor, axis: Axes = None, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Whether any is True over axes; numbers are where they are not zero."""
    return _reduce("any", _truths(x), axis, keepdims)


@takes_out
def count_nonzero(
    x: Tensor, axis: Axes = None, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """How many elements are not zero (or True) over axes, as int64."""
    return _reduce("count_nonzero", x, axis, keepdims)


@takes_out
def logsumexp(
    x: Tensor, axis: Axes = None, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """log(sum(exp(x))) over axes, without overflow."""
    return _reduce("logsumexp", x, axis, keepdims)


@takes_out
def var(
    x: Tensor,
    axis: Axes = None,
    keepdims: bool = False,
    correction: float = 0.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Variance over axes: squared distances from the mean, over the number less `correction`."""
    return _reduce("var", x, axis, keepdims, correction=float(correction))


@takes_out
def std(
    x: Tensor,
    axis: Axes = None,
    keepdims: bool = False,
    correction: float = 0.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Square root of `var`."""
    return _reduce("std", x, axis, keepdims, correction=float(correction))


@takes_out
def norm(
    x: Tensor,
    p: float = 2.0,
    axis: Axes = None,
    keepdims: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The p-norm over axes: sum(|x| ** p) ** (1 / p); the greatest |x| for infinite p, the least
    for minus infinity, and for 0 how many elements are not zero.

    Axes that are split leave partial sums, so no shard is gathered. Where an element or the norm is
    zero, its gradient is.
    """
    if not (isinstance(p, (int, float)) and p == p):
        raise AttributeValueError("a norm needs a number p", got=repr(p), expected="such as 2.0")
    if p == 0:
        return x.not_equal(0).cast(x.dtype).sum(axis, keepdims)
    if p == -math.inf:
        return apply_one("abs", x).min(axis, keepdims)
    if p == 1:
        return _reduce("abs_sum", x, axis, keepdims)
    if math.isinf(p):
        return _reduce("abs_max", x, axis, keepdims)
    wide: Tensor = widened(x)
    if p == 2:
        length = _unless_zero(
            _reduce("square_sum", wide, axis, keepdims), lambda total: total.sqrt()
        )
    elif p < 0:
        zero = wide.equal(0)
        safe: Tensor = apply("where", zero, full_like(wide, 1.0, shape=()), apply("abs", wide))
        powers = apply("where", zero, full_like(wide, math.inf, shape=()), safe ** float(p))
        length = powers.sum(axis, keepdims) ** (1.0 / p)
    else:
        powers = _unless_zero(apply("abs", wide), lambda size: size ** float(p))
        length = _unless_zero(powers.sum(axis, keepdims), lambda total: total ** (1.0 / p))
    return length if wide is x else length.cast(x.dtype)


def _unless_zero(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """The function of x, and zero without a slope where x is zero: roots have none there."""
    zero = x.equal(0)
    safe: Tensor = apply("where", zero, full_like(x, 1.0, shape=()), x)
    return apply_one("masked", function(safe), apply("logical_not", zero))


@takes_out
def argmin(
    x: Tensor, axis: int = -1, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Index of the least element along an axis, as int64; the first of equal ones."""
    return apply_one("argmin", x, axis=_axis(x, axis), keepdims=keepdims)


def _axis(x: Tensor, axis: int) -> int:
    return normalize_axes(axis, x.ndim)[0]


@takes_out
def cumsum(
    x: Tensor, axis: int = -1, reverse: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Sum of all elements up to each along an axis, from its end where `reverse`; of whole numbers
    and bool in int64.
    """
    return apply_one("cumsum", x, axis=_axis(x, axis), reverse=reverse)


@takes_out
def cumprod(x: Tensor, axis: int = -1, *, out: Tensor | None = None) -> Tensor:
    """Product of all elements up to each along an axis; of whole numbers and bool in int64."""
    return apply_one("cumprod", x, axis=_axis(x, axis))


@takes_out
def cummax(
    x: Tensor, axis: int = -1, *, out: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, Tensor]:
    """Greatest of all elements up to each along an axis, and its latest index as int64."""
    outputs: tuple[Tensor, Tensor] = apply("cummax", x, axis=_axis(x, axis))
    return outputs


@takes_out
def cummin(
    x: Tensor, axis: int = -1, *, out: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, Tensor]:
    """Least of all elements up to each along an axis, and its latest index as int64."""
    outputs: tuple[Tensor, Tensor] = apply("cummin", x, axis=_axis(x, axis))
    return outputs


@takes_out
def sort(
    x: Tensor,
    axis: int = -1,
    descending: bool = False,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Elements in order along an axis, and the int64 index that each had; equal ones stay so."""
    outputs: tuple[Tensor, Tensor] = apply("sort", x, axis=_axis(x, axis), descending=descending)
    return outputs


@takes_out
def argsort(
    x: Tensor, axis: int = -1, descending: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Indices that put the elements in order along an axis, as int64."""
    return apply_one("argsort", x, axis=_axis(x, axis), descending=descending)


@takes_out
def topk(
    x: Tensor,
    k: int,
    axis: int = -1,
    largest: bool = True,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """The k greatest elements along an axis (least where not `largest`) and their indices, best
    first; of equal ones the first.
    """
    outputs: tuple[Tensor, Tensor] = apply("topk", x, axis=_axis(x, axis), k=k, largest=largest)
    return outputs


@takes_out
def sum(
    x: Tensor, axis: Axes = None, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Sum over axes (all by default); of whole numbers and bool in int64."""
    return x.sum(axis, keepdims)


@takes_out
def mean(
    x: Tensor, axis: Axes = None, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Arithmetic mean over axes (all by default); of whole numbers float64, of bool float32."""
    return x.mean(axis, keepdims)


@takes_out
def max(
    x: Tensor, axis: Axes = None, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Greatest element over axes (all by default)."""
    return x.max(axis, keepdims)


@takes_out
def min(
    x: Tensor, axis: Axes = None, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Smallest element over axes (all by default)."""
    return x.min(axis, keepdims)


@takes_out
def max_with_index(
    x: Tensor,
    axis: int = -1,
    keepdims: bool = False,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Greatest element along an axis and its index as int64; the first of equal ones, to which the
    whole gradient goes.
    """
    return _at(x, x.argmax(axis, keepdims=True), _axis(x, axis), keepdims)


@takes_out
def min_with_index(
    x: Tensor,
    axis: int = -1,
    keepdims: bool = False,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Smallest element along an axis and its index as int64; the first of equal ones, to which the
    whole gradient goes.
    """
    return _at(x, argmin(x, axis, keepdims=True), _axis(x, axis), keepdims)


def _at(x: Tensor, index: Tensor, axis: int, keepdims: bool) -> tuple[Tensor, Tensor]:
    values = apply_one("take_along_axis", x, index, axis=axis)
    if keepdims:
        return values, index
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    return values.reshape(shape), index.reshape(shape)


@takes_out
def argmax(
    x: Tensor, axis: int = -1, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Index of the greatest element along an axis, as int64; the first of equal ones."""
    return x.argmax(axis, keepdims)
