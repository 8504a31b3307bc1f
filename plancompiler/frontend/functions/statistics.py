"""Statistics: quantiles and other elements by their order, totals without NaN, covariances,
histograms.

Elements are put in order along whole axes; a split axis is gathered first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.frontend.functions.derived import Axes, Tensor
from plancompiler.frontend.functions.elementwise import full_like
from plancompiler.frontend.functions.reduction import Indexed, sort, std, var
from plancompiler.frontend.functions.shape import flip, moveaxis, stack
from plancompiler.frontend.out import takes_out
from plancompiler.ir import DType
from plancompiler.ir.operators import Scalar, TensorOperators, in_dtype, normalize_axes, one_axis
from plancompiler.ir.promotion import floating_dtype
from plancompiler.ops.registry import apply, apply_one, apply_source

__all__ = [
    "aminmax",
    "corrcoef",
    "cov",
    "histc",
    "histogram",
    "kthvalue",
    "median",
    "mode",
    "nanmax",
    "nanmean",
    "nanmedian",
    "nanmin",
    "nanquantile",
    "nansum",
    "quantile",
    "std_mean",
    "var_mean",
]


# --- elements by their order ----------------------------------------------------------------------


@takes_out
def kthvalue(
    x: Tensor,
    k: int,
    axis: int = -1,
    keepdims: bool = False,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> Indexed[Tensor]:
    """The k-th smallest element along an axis, counted from 1, and its int64 index."""
    at = one_axis(axis, x.ndim)
    extent = x.shape[at]
    if not 1 <= k <= extent:
        raise AttributeValueError(
            "an axis has no such element", got=f"k {k}", expected=f"1 to {extent}"
        )
    values, places = sort(x, at)
    return Indexed(*(_element(each, k - 1, at, keepdims) for each in (values, places)))


def _element(x: Tensor, place: int, axis: int, keepdims: bool) -> Tensor:
    """The elements at one place of an axis."""
    part = x[(*(slice(None),) * axis, slice(place, place + 1))]
    return part if keepdims else part.reshape((*x.shape[:axis], *x.shape[axis + 1 :]))


@takes_out
def mode(
    x: Tensor,
    axis: int = -1,
    keepdims: bool = False,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> Indexed[Tensor]:
    """The most frequent element along an axis, the least of equally frequent ones, and the last of
    its int64 indices.
    """
    at = one_axis(axis, x.ndim)
    extent = x.shape[at]
    if not extent:
        raise ShapeError("mode needs an element", got=x.shape, expected=f"axis {at} not empty")
    values, places = sort(x, at)
    before = (*(slice(None),) * at, slice(0, extent - 1))
    after = (*(slice(None),) * at, slice(1, extent))
    beside = [1] * (x.ndim - at - 1)
    numbers = apply_source(x, "arange", start=0, step=1, count=extent, dtype="int64")
    numbers = numbers.reshape([extent, *beside])
    begins = values[after].not_equal(values[before]).cast(DType.INT64) * numbers[1:]
    low, high = [0] * x.ndim, [0] * x.ndim
    low[at] = 1
    # Where each run of equal elements begins; it ends where it is longest.
    starts = apply_one("pad", begins, low=tuple(low), high=tuple(high), value=0)
    first: Tensor = apply("cummax", starts, axis=at)[0]
    longest = apply_one("argmax", numbers - first, axis=at, keepdims=True)
    value, place = (
        apply_one("take_along_axis", each, longest, axis=at) for each in (values, places)
    )
    if keepdims:
        return Indexed(value, place)
    shape = (*x.shape[:at], *x.shape[at + 1 :])
    return Indexed(value.reshape(shape), place.reshape(shape))


_ROUNDINGS = ("linear", "lower", "higher", "nearest", "midpoint")


@takes_out
def quantile(
    x: Tensor,
    q: Tensor | float | Sequence[float],
    axis: Axes = None,
    keepdims: bool = False,
    interpolation: str = "linear",
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The number below which a share q of the elements lies, over axes (all by default): that at
    place q * (n - 1) of n elements in order, from 0 to 1.

    Between two elements it is interpolated, "linear", or it is the "lower", "higher" or "nearest"
    one, or their "midpoint". Several shares are a new first axis. NaN where an element is NaN.
    """
    return _quantile("quantile", x, q, axis, keepdims, interpolation, skip=False)


@takes_out
def nanquantile(
    x: Tensor,
    q: Tensor | float | Sequence[float],
    axis: Axes = None,
    keepdims: bool = False,
    interpolation: str = "linear",
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`quantile` of the elements that are not NaN; NaN where there are none."""
    return _quantile("nanquantile", x, q, axis, keepdims, interpolation, skip=True)


@takes_out
def median(
    x: Tensor, axis: Axes = None, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """The element in the middle of all in order, or the mean of the two there, over axes (all by
    default), as in NumPy; `kthvalue` gives the lower of the two.
    """
    return quantile(x, 0.5, axis, keepdims, "midpoint")


@takes_out
def nanmedian(
    x: Tensor, axis: Axes = None, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """`median` of the elements that are not NaN; NaN where there are none."""
    return nanquantile(x, 0.5, axis, keepdims, "midpoint")


def _quantile(
    name: str,
    x: Tensor,
    q: Any,
    axis: Axes,
    keepdims: bool,
    interpolation: str,
    *,
    skip: bool,
) -> Tensor:
    if interpolation not in _ROUNDINGS:
        raise AttributeValueError(
            f"{name} knows no such interpolation",
            got=repr(interpolation),
            expected=", ".join(_ROUNDINGS),
        )
    if not x.dtype.is_floating:
        x = x.cast(floating_dtype(x.dtype))
    axes = () if not x.ndim and axis in (0, -1) else normalize_axes(axis, x.ndim)
    others = tuple(each for each in range(x.ndim) if each not in axes)
    left = tuple(x.shape[each] for each in others)
    count = math.prod(x.shape[each] for each in axes)
    if not count:
        raise ShapeError(
            f"{name} needs an element", got=x.shape, expected="axes that are not empty"
        )
    ordered = sort(x.transpose((*others, *axes)).reshape((*left, count)), -1)[0]
    shape = tuple(1 if each in axes else n for each, n in enumerate(x.shape)) if keepdims else left
    if isinstance(q, TensorOperators):
        shares: Any = in_dtype(q, x.dtype).reshape((-1,))
        made: Tensor = _at_shares(ordered, shares, interpolation, skip)
        return moveaxis(made, -1, 0).reshape((*q.shape, *shape))
    numbers = list(q) if isinstance(q, (list, tuple)) else [q]
    for number in numbers:
        if not 0 <= float(number) <= 1:
            raise AttributeValueError(f"{name} needs shares", got=number, expected="0 to 1")
    pieces = [
        _at_shares(ordered, float(number), interpolation, skip).reshape(shape) for number in numbers
    ]
    return stack(pieces, 0) if isinstance(q, (list, tuple)) else pieces[0]


def _at_shares(ordered: Tensor, shares: Any, interpolation: str, skip: bool) -> Tensor:
    """Elements [..., n] in order, those at shares: a vector [k], or one number: [..., k]."""
    nan = apply_one("isnan", ordered)
    # Places are counted in float64: float32 cannot name those of more than 2**24 elements.
    last: Any = apply_one("logical_not", nan).cast(DType.FLOAT64).sum(-1, keepdims=True) - 1.0
    if not skip:
        last = full_like(last, float(ordered.shape[-1] - 1))
    wide = shares.cast(DType.FLOAT64) if isinstance(shares, TensorOperators) else shares
    # Of no elements all are NaN, the first of them too.
    place = apply_one("maximum_scalar", last * wide, scalar=0.0)
    if interpolation == "nearest":
        place = apply_one("round", place)
    low = apply_one("floor", place)
    high = apply_one("ceil", place)
    weight = (place - low).cast(ordered.dtype)
    if interpolation == "midpoint":
        weight = low.not_equal(high).cast(ordered.dtype) * 0.5
    below, above = (_taken(ordered, each.cast(DType.INT64)) for each in (low, high))
    made: Tensor
    if interpolation == "lower":
        made = below
    elif interpolation == "higher":
        made = above
    else:
        # Equal neighbours stay what they are, infinite ones too.
        step = apply_one("where", below.equal(above), full_like(below, 0.0, ()), above - below)
        made = below + step * weight
    if skip:
        return made
    spoilt = apply_one("any", nan, axes=(ordered.ndim - 1,), keepdims=True)
    return apply_one("where", spoilt, full_like(made, math.nan, ()), made)


def _taken(ordered: Tensor, places: Tensor) -> Tensor:
    return apply_one("take_along_axis", ordered, places, axis=ordered.ndim - 1)


# --- totals without NaN ---------------------------------------------------------------------------


def _without_nan(x: Tensor, number: float) -> tuple[Tensor, Tensor]:
    """x with a number in place of NaN, and where it is none."""
    if not x.dtype.is_floating:
        return x, x.equal(x)
    nan = apply_one("isnan", x)
    return apply_one("where", nan, full_like(x, number, ()), x), apply_one("logical_not", nan)


@takes_out
def nansum(
    x: Tensor,
    axis: Axes = None,
    keepdims: bool = False,
    dtype: DType | str | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`sum` of the elements that are not NaN."""
    return _without_nan(x, 0.0)[0].sum(axis, keepdims, dtype)


@takes_out
def nanmean(
    x: Tensor,
    axis: Axes = None,
    keepdims: bool = False,
    dtype: DType | str | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`mean` of the elements that are not NaN; NaN where there are none."""
    if dtype is not None:
        x = x.cast(dtype)
    if not x.dtype.is_floating:
        return x.mean(axis, keepdims)
    values, valid = _without_nan(x, 0.0)
    wide = x.dtype.accumulator
    count = valid.cast(wide).sum(axis, keepdims)
    return in_dtype(in_dtype(values, wide).sum(axis, keepdims) / count, x.dtype)


def _extreme(x: Tensor, axis: Axes, keepdims: bool, sign: float) -> Tensor:
    values, valid = _without_nan(x, -sign * math.inf)
    made = values.max(axis, keepdims) if sign > 0 else values.min(axis, keepdims)
    if not x.dtype.is_floating:
        return made
    axes = normalize_axes(axis, x.ndim)
    some = apply_one("any", valid, axes=axes, keepdims=keepdims)
    return apply_one("where", some, made, full_like(made, math.nan, ()))


@takes_out
def nanmax(
    x: Tensor, axis: Axes = None, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """`max` of the elements that are not NaN; NaN where there are none."""
    return _extreme(x, axis, keepdims, 1.0)


@takes_out
def nanmin(
    x: Tensor, axis: Axes = None, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """`min` of the elements that are not NaN; NaN where there are none."""
    return _extreme(x, axis, keepdims, -1.0)


# --- several at once ------------------------------------------------------------------------------


@takes_out
def aminmax(
    x: Tensor,
    axis: Axes = None,
    keepdims: bool = False,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """The least and the greatest element over axes."""
    return x.min(axis, keepdims), x.max(axis, keepdims)


@takes_out
def var_mean(
    x: Tensor,
    axis: Axes = None,
    keepdims: bool = False,
    correction: float = 0.0,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """`var` and `mean` over axes."""
    return var(x, axis, keepdims, correction), x.mean(axis, keepdims)


@takes_out
def std_mean(
    x: Tensor,
    axis: Axes = None,
    keepdims: bool = False,
    correction: float = 0.0,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """`std` and `mean` over axes."""
    return std(x, axis, keepdims, correction), x.mean(axis, keepdims)


# --- covariances ----------------------------------------------------------------------------------


@takes_out
def cov(
    x: Tensor,
    correction: float = 1.0,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Covariances of variables, the rows of x [variables, observations]: [variables, variables]; of
    one variable its variance, a scalar.

    Each observation counts `fweights` times and has the weight `aweights`; sums are divided by
    their total less `correction`, as in NumPy.
    """
    if x.ndim > 2:
        raise ShapeError("cov needs a row for each variable", got=x.shape, expected="2 axes")
    rows = x.reshape((-1, x.shape[-1])) if x.ndim else x.reshape((1, 1))
    if not rows.dtype.is_floating:
        rows = rows.cast(floating_dtype(rows.dtype))
    count = rows.shape[1]
    if fweights is None and aweights is None:
        centred = rows - rows.mean(1, keepdims=True)
        made = (centred @ centred.transpose()) / max(count - float(correction), 0.0)
        return made if rows.shape[0] != 1 else made.reshape(())
    given = [each.cast(rows.dtype) for each in (fweights, aweights) if each is not None]
    weights = given[0] if len(given) == 1 else given[0] * given[1]
    total = weights.sum()
    mean = (rows * weights).sum(1, keepdims=True) / total
    centred = rows - mean
    divisor = total - float(correction)
    if aweights is not None:
        divisor = total - (weights * aweights.cast(rows.dtype)).sum() / total * float(correction)
    made = (centred * weights) @ centred.transpose() / divisor
    return made if rows.shape[0] != 1 else made.reshape(())


@takes_out
def corrcoef(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Correlations of variables, the rows of x [variables, observations], from -1 to 1."""
    made = cov(x)
    if made.ndim < 2:
        return made / made
    deviations = apply_one("diagonal", made, offset=0).sqrt()
    shares = made / deviations.reshape((-1, 1)) / deviations
    return apply_one("clip", shares, low=-1.0, high=1.0)


# --- histograms -----------------------------------------------------------------------------------


@takes_out
def histc(
    x: Tensor,
    bins: int = 100,
    low: Scalar = 0,
    high: Scalar = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """How many elements lie in each of `bins` equal ranges from `low` to `high`, in the dtype of x:
    [bins]. The last range has its upper end; elements outside are not counted. Where both bounds
    are equal they are the least and the greatest element.
    """
    counts, _ = _histogram("histc", x, bins, None if low == high else (low, high))
    return in_dtype(counts, x.dtype)


@takes_out
def histogram(
    x: Tensor,
    bins: int | Tensor = 10,
    range: Sequence[Scalar] | None = None,  # noqa: A002  # as NumPy calls it
    weights: Tensor | None = None,
    density: bool = False,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """How many elements lie in each range, or the sum of their weights, and the ends of the ranges:
    [n] and [n + 1]. `bins` is how many equal ranges there are between the bounds `range`, by
    default the least and the greatest element; or the ends themselves. With `density` the shares
    of all, over the widths. Counts are int64, unless weighed.
    """
    counts, ends = _histogram("histogram", x, bins, range, weights)
    if density:
        shares = counts.cast(ends.dtype)
        counts = shares / (ends[1:] - ends[:-1]) / shares.sum()
    return counts, ends


def _histogram(
    name: str,
    x: Tensor,
    bins: int | Tensor,
    bounds: Sequence[Scalar] | None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    flat = x.reshape((-1,))
    if not flat.dtype.is_floating:
        flat = flat.cast(DType.FLOAT64)
    if isinstance(bins, TensorOperators):
        ends: Tensor = in_dtype(bins, flat.dtype)
        count = ends.shape[0] - 1
    else:
        count = bins
        if count < 1:
            raise AttributeValueError(f"{name} needs ranges", got=count, expected="1 or more")
        ends = _equal_ends(name, flat, count, bounds)
    # The range above each element's lower end; the upper end of the last one belongs to it.
    places: Tensor = apply("searchsorted", ends, flat, side="right") - 1
    top = flat.equal(_element(ends, count, 0, True))
    places = apply_one("where", top, full_like(places, count - 1, ()), places)
    inside = (places >= 0) & (places < count) & apply_one("logical_not", apply_one("isnan", flat))
    places = apply_one("where", inside, places, full_like(places, count, ()))
    if weights is None:
        return apply_one("bincount", places, classes=count + 1)[:count], ends
    wide = weights.reshape((-1,))
    wide = wide if wide.dtype.is_floating else wide.cast(DType.FLOAT64)
    total: Tensor = apply("index_select_grad", places, wide, axis=0, extent=count + 1)
    return total[:count], ends


def _equal_ends(name: str, flat: Tensor, count: int, bounds: Sequence[Scalar] | None) -> Tensor:
    steps: Tensor = apply_source(
        flat, "arange", start=0, step=1, count=count + 1, dtype=str(flat.dtype)
    )
    shares: Tensor = steps / float(count)
    if bounds is not None:
        low, high = (float(each) for each in bounds)
        if not low < high < math.inf or low == -math.inf:
            raise AttributeValueError(
                f"{name} needs bounds in order", got=tuple(bounds), expected="finite numbers"
            )
        return shares * (high - low) + low
    if not flat.shape[0]:
        return shares
    first, last = flat.min(), flat.max()
    same = first.equal(last).cast(flat.dtype) * 0.5
    first, last = first - same, last + same
    # From both ends, so that the last one is exactly the greatest element.
    return flip(shares, 0) * first + shares * last
