"""Reductions, running sums and order along axes. `axis` is None (all axes), one or several."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple

from plancompiler.errors import AttributeValueError
from plancompiler.frontend.functions.derived import Axes, Tensor
from plancompiler.frontend.functions.elementwise import full_like, maximum, minimum
from plancompiler.frontend.out import takes_out
from plancompiler.ir import DType
from plancompiler.ir.operators import TensorOperators, in_dtype, normalize_axes, one_axis
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
    "cumulative_trapezoid",
    "logcumsumexp",
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
    "trapezoid",
    "var",
]


class Indexed(NamedTuple, Generic[Tensor]):
    """Elements that were taken along an axis, and where they were."""

    values: Tensor
    indices: Tensor
    """Of the elements along the axis: int64, in the shape of `values`."""


def _truths(x: Tensor) -> Tensor:
    return in_dtype(x, DType.BOOL) if dtypes_may_mix() else x


def _reduce(kind: str, x: Tensor, axis: Axes, keepdims: bool, **attrs: float) -> Tensor:
    axes = () if not x.ndim and axis in (0, -1) else normalize_axes(axis, x.ndim)
    return apply_one(kind, x, axes=axes, keepdims=keepdims, **attrs)


@takes_out
def prod(
    x: Tensor,
    axis: Axes = None,
    keepdims: bool = False,
    dtype: DType | str | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Product over axes, in the dtype of x; of whole numbers and bool in int64. With `dtype` that
    of the numbers in that.
    """
    x = x if dtype is None else x.cast(dtype)
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
    p: float | str = 2.0,
    axis: Axes = None,
    keepdims: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The p-norm over axes: sum(|x| ** p) ** (1 / p); the greatest |x| for infinite p, the least
    for minus infinity, and for 0 how many elements are not zero; "fro" is 2.

    Axes that are split leave partial sums, so no shard is gathered. Where an element or the norm is
    zero, its gradient is.
    """
    if p == "fro":
        p = 2.0
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
def argmax(
    x: Tensor, axis: int | None = None, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Index of the greatest element along an axis, as int64; the first of equal ones. Without an
    axis that of all elements in row-major order.
    """
    return _place("argmax", x, axis, keepdims)


@takes_out
def argmin(
    x: Tensor, axis: int | None = None, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Index of the least element along an axis, as int64; the first of equal ones. Without an axis
    that of all elements in row-major order.
    """
    return _place("argmin", x, axis, keepdims)


def _place(kind: str, x: Tensor, axis: int | None, keepdims: bool) -> Tensor:
    if axis is None:
        place = apply_one(kind, x.reshape((-1,)), axis=0, keepdims=False)
        return place.reshape((1,) * x.ndim) if keepdims else place
    return apply_one(kind, x, axis=one_axis(axis, x.ndim), keepdims=keepdims)


@takes_out
def cumsum(
    x: Tensor,
    axis: int | None = None,
    reverse: bool = False,
    dtype: DType | str | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Sum of all elements up to each along an axis, from its end where `reverse`; of whole numbers
    and bool in int64, with `dtype` of the numbers in that. Without an axis x counts as a vector.
    """
    wide, at = _run_along(x, axis, dtype)
    return apply_one("cumsum", wide, axis=at, reverse=reverse)


@takes_out
def cumprod(
    x: Tensor,
    axis: int | None = None,
    dtype: DType | str | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Product of all elements up to each along an axis; of whole numbers and bool in int64, with
    `dtype` of the numbers in that. Without an axis x counts as a vector.
    """
    wide, at = _run_along(x, axis, dtype)
    return apply_one("cumprod", wide, axis=at)


def _run_along(x: Tensor, axis: int | None, dtype: DType | str | None) -> tuple[Tensor, int]:
    x = x if dtype is None else x.cast(dtype)
    return (x.reshape((-1,)), 0) if axis is None else (x, one_axis(axis, x.ndim))


@takes_out
def logcumsumexp(x: Tensor, axis: int = -1, *, out: Tensor | None = None) -> Tensor:
    """log(sum(exp(...))) of all elements up to each along an axis, without overflow."""
    at = one_axis(axis, x.ndim)
    total, reach = x, 1
    # Each round doubles how many elements a sum has (W. D. Hillis and G. L. Steele, 1986).
    while reach < x.shape[at]:
        later = apply_one("logaddexp", _from(total, at, reach), _from(total, at, 0, -reach))
        total = apply_one("concat", _from(total, at, 0, reach), later, axis=at)
        reach *= 2
    return total if total is not x else x.cast(x.dtype)


def _from(x: Tensor, axis: int, start: int, stop: int | None = None) -> Tensor:
    """A part of an axis."""
    return x[(*(slice(None),) * axis, slice(start, stop))]


@takes_out
def trapezoid(
    y: Tensor,
    x: Tensor | None = None,
    dx: float = 1.0,
    axis: int = -1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The integral along an axis of a function with the values y at places x, or `dx` apart, which
    is straight between them.
    """
    return _trapezoids(y, x, dx, axis).sum(axis)


@takes_out
def cumulative_trapezoid(
    y: Tensor,
    x: Tensor | None = None,
    dx: float = 1.0,
    axis: int = -1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The integrals, as `trapezoid`, from the first place to each later one."""
    return cumsum(_trapezoids(y, x, dx, axis), axis)


def _trapezoids(y: Tensor, x: Tensor | None, dx: float, axis: int) -> Tensor:
    at = one_axis(axis, y.ndim)
    heights = _from(y, at, 1) + _from(y, at, 0, -1)
    if x is None:
        return heights * (0.5 * dx)
    along = at if x.ndim == y.ndim else x.ndim - 1
    widths = _from(x, along, 1) - _from(x, along, 0, -1)
    if x.ndim == 1:
        widths = widths.reshape((-1, *(1,) * (y.ndim - at - 1)))
    return heights * widths * 0.5


@takes_out
def cummax(
    x: Tensor, axis: int = -1, *, out: Sequence[Tensor | None] | None = None
) -> Indexed[Tensor]:
    """Greatest of all elements up to each along an axis, and its latest index as int64."""
    return Indexed(*apply("cummax", x, axis=one_axis(axis, x.ndim)))


@takes_out
def cummin(
    x: Tensor, axis: int = -1, *, out: Sequence[Tensor | None] | None = None
) -> Indexed[Tensor]:
    """Least of all elements up to each along an axis, and its latest index as int64."""
    return Indexed(*apply("cummin", x, axis=one_axis(axis, x.ndim)))


@takes_out
def sort(
    x: Tensor,
    axis: int = -1,
    descending: bool = False,
    *,
    stable: bool = True,
    out: Sequence[Tensor | None] | None = None,
) -> Indexed[Tensor]:
    """Elements in order along an axis, and the int64 index that each had; equal ones stay so,
    whatever `stable` allows.
    """
    return Indexed(*apply("sort", x, axis=one_axis(axis, x.ndim), descending=descending))


@takes_out
def argsort(
    x: Tensor,
    axis: int = -1,
    descending: bool = False,
    *,
    stable: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Indices that put the elements in order along an axis, as int64; equal ones stay so, whatever
    `stable` allows.
    """
    return apply_one("argsort", x, axis=one_axis(axis, x.ndim), descending=descending)


@takes_out
def topk(
    x: Tensor,
    k: int,
    axis: int = -1,
    largest: bool = True,
    sorted: bool = True,  # noqa: A002  # as PyTorch calls it
    *,
    out: Sequence[Tensor | None] | None = None,
) -> Indexed[Tensor]:
    """The k greatest elements along an axis (least where not `largest`) and their indices, best
    first, whatever `sorted` allows; of equal ones the first.
    """
    return Indexed(*apply("topk", x, axis=one_axis(axis, x.ndim), k=k, largest=largest))


@takes_out
def sum(
    x: Tensor,
    axis: Axes = None,
    keepdims: bool = False,
    dtype: DType | str | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Sum over axes (all by default); of whole numbers and bool in int64. With `dtype` that of the
    numbers in that.
    """
    return x.sum(axis, keepdims, dtype)


@takes_out
def mean(
    x: Tensor,
    axis: Axes = None,
    keepdims: bool = False,
    dtype: DType | str | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Arithmetic mean over axes (all by default); of whole numbers float64, of bool float32. With
    `dtype` that of the numbers in that.
    """
    return x.mean(axis, keepdims, dtype)


@takes_out
def max(
    x: Tensor, axis: Axes = None, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Greatest element over axes (all by default). With a tensor in place of the axes it is
    `maximum`, as in PyTorch.
    """
    return maximum(x, axis) if isinstance(axis, TensorOperators) else x.max(axis, keepdims)


@takes_out
def min(
    x: Tensor, axis: Axes = None, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Smallest element over axes (all by default). With a tensor in place of the axes it is
    `minimum`, as in PyTorch.
    """
    return minimum(x, axis) if isinstance(axis, TensorOperators) else x.min(axis, keepdims)


@takes_out
def max_with_index(
    x: Tensor,
    axis: int = -1,
    keepdims: bool = False,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> Indexed[Tensor]:
    """Greatest element along an axis and its index as int64; the first of equal ones, to which the
    whole gradient goes.
    """
    return _at(x, argmax(x, axis, keepdims=True), one_axis(axis, x.ndim), keepdims)


@takes_out
def min_with_index(
    x: Tensor,
    axis: int = -1,
    keepdims: bool = False,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> Indexed[Tensor]:
    """Smallest element along an axis and its index as int64; the first of equal ones, to which the
    whole gradient goes.
    """
    return _at(x, argmin(x, axis, keepdims=True), one_axis(axis, x.ndim), keepdims)


def _at(x: Tensor, index: Tensor, axis: int, keepdims: bool) -> Indexed[Tensor]:
    values = apply_one("take_along_axis", x, index, axis=axis)
    if keepdims:
        return Indexed(values, index)
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    return Indexed(values.reshape(shape), index.reshape(shape))
