"""Searching and selecting: places that are not zero, masks, sorted numbers, distinct elements.

How many elements a mask selects is known only when the program runs. Eager tensors find out, which
is a collective; in jobs and compiled functions `size` says it, and results have that many elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from plancompiler.errors import ShapeError, TracingError, UsageError
from plancompiler.frontend.functions.derived import Tensor, plain_number
from plancompiler.frontend.functions.shape import expand, moveaxis, stack, unsqueeze
from plancompiler.frontend.out import takes_out
from plancompiler.ir import DType
from plancompiler.ir.indexing import fixed_places, held_by, places_of_true, replaced
from plancompiler.ir.operators import Scalar, TensorOperators, in_one_dtype, one_axis
from plancompiler.ops.registry import apply, apply_one

__all__ = [
    "argwhere",
    "bucketize",
    "index_put",
    "isin",
    "masked_select",
    "nonzero",
    "searchsorted",
    "take",
    "unique",
]


@takes_out
def nonzero(
    x: Tensor,
    size: int | None = None,
    fill: int = 0,
    *,
    as_tuple: bool = True,
    out: Sequence[Tensor | None] | None = None,
) -> Any:
    """Places of the elements that are not zero (or True) in row-major order: for each axis int64
    [count].

    With `size` there are that many: the first ones, and `fill` where there are fewer. Without it a
    TracingError in jobs and compiled functions. With `as_tuple=False` they are one tensor, as in
    `argwhere`.
    """
    if not as_tuple:
        return argwhere(x, size, fill)
    places: tuple[Tensor, ...]
    places = places_of_true(x) if size is None else fixed_places(x, size, fill)
    return places


@takes_out
def argwhere(
    x: Tensor, size: int | None = None, fill: int = 0, *, out: Tensor | None = None
) -> Tensor:
    """`nonzero` as one tensor [count, axes]; of a tensor without axes [1, 0] or [0, 0]."""
    if not x.ndim:
        return argwhere(x.reshape((1,)), size, fill)[:, :0]
    places: tuple[Tensor, ...] = nonzero(x, size, fill)
    return stack(places, 1)


@takes_out
def masked_select(
    x: Tensor, mask: Tensor, size: int | None = None, *, out: Tensor | None = None
) -> Tensor:
    """The elements of x where the mask is True, in row-major order: [count]; both broadcast.

    With `size` there are that many: where the mask has fewer, the first element of x fills the
    rest. Without it a TracingError in jobs and compiled functions.
    """
    shape = _broadcast(x.shape, mask.shape) or (1,)
    places = nonzero(expand(mask, shape), size)
    return expand(x, shape)[places]


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    longest = max(len(one), len(other))
    pairs = zip(
        (1,) * (longest - len(one)) + one, (1,) * (longest - len(other)) + other, strict=True
    )
    return tuple(right if left == 1 else left for left, right in pairs)


@takes_out
def index_put(
    x: Tensor,
    index: Any,
    value: Tensor | Scalar,
    accumulate: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """What x becomes by `x[index] = value`, as a new tensor: jobs have no other way.

    The index is any that `x[index]` takes. Of equal places the last one wins, and only its value
    gets a gradient; with `accumulate` values are added, those of equal places too. IndexingError
    for an index that does not fit; AttributeValueError for a value that the dtype of x cannot hold.
    """
    mode = "add" if accumulate else "set"
    changed: Tensor = replaced(x, index, held_by(x, value), mode)
    return changed


@takes_out
def take(
    x: Tensor, indices: Tensor, axis: int | None = None, *, out: Tensor | None = None
) -> Tensor:
    """The elements of an axis at indices of any shape, which takes the place of the axis; negative
    indices count from the end. Without an axis x counts as a vector.
    """
    if axis is None:
        return take(x.reshape((-1,)), indices, 0)
    at = one_axis(axis, x.ndim)
    places = apply_one("ravel_index", indices, extents=(x.shape[at],))
    chosen = apply_one("index_select", x, places.reshape((-1,)), axis=at)
    return chosen.reshape((*x.shape[:at], *indices.shape, *x.shape[at + 1 :]))


@takes_out
def searchsorted(
    edges: Tensor,
    values: Tensor | Scalar,
    side: str | None = None,
    sorter: Tensor | None = None,
    *,
    right: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """For each value the place at which it would be put into a sorted vector [n], as int64: in
    front of equal ones (`side="left"`, the default) or behind them ("right", or `right`). Several
    sorted rows [..., n] have a row of values [..., m] each. A number has one place. UsageError for
    both sides.

    `sorter` are the places of the elements in order, where they are not sorted themselves.
    """
    if not isinstance(values, TensorOperators):
        values = edges.beside("searchsorted", plain_number(values))
    if sorter is not None:
        edges = apply_one("take_along_axis", edges, sorter, axis=edges.ndim - 1)
    ordered, wanted = in_one_dtype((edges, values))
    if right and side == "left":
        raise UsageError("searchsorted was given two sides", got="side='left' and right=True")
    side = "right" if right else side or "left"
    if ordered.ndim < 2:
        return apply_one("searchsorted", ordered, wanted, side=side)
    if ordered.shape[:-1] != wanted.shape[:-1]:
        raise ShapeError(
            "searchsorted needs a row of values for each row",
            got=f"{ordered.shape} and {wanted.shape}",
            expected="shapes that are equal but for the last axis",
        )
    # NaN comes last in order: behind all numbers, in front of or behind others of its kind.
    row, value = unsqueeze(ordered, -2), unsqueeze(wanted, -1)
    before = row < value if side == "left" else row <= value
    if ordered.dtype.is_floating:
        nan = apply_one("isnan", row), apply_one("isnan", value)
        number = nan[0].equal(False)
        before = before | (nan[1] & (number if side == "left" else number.equal(number)))
    return before.cast(DType.INT64).sum(-1)


@takes_out
def bucketize(
    x: Tensor | Scalar, edges: Tensor, right: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """For each element the range between sorted edges [n] in which it lies, from 0 to n, as int64.
    An element that is an edge lies below it, or above it where `right`.
    """
    return searchsorted(edges, x, side="right" if right else "left")


@takes_out
def isin(x: Tensor, elements: Tensor, invert: bool = False, *, out: Tensor | None = None) -> Tensor:
    """Whether each element of x is one of `elements`, or none of them where `invert`."""
    member = apply_one("isin", *in_one_dtype((x, elements)))
    return apply_one("logical_not", member) if invert else member


class Distinct(NamedTuple):
    """What `unique` gives."""

    values: Any
    """The distinct elements in order [count]."""
    first: Any
    """The place of the first of each in row-major order: int64 [count]."""
    inverse: Any
    """For each element the place of its value: int64, in the shape of x."""
    counts: Any
    """How often each value occurs: int64 [count]."""


@takes_out
def unique(
    x: Tensor,
    size: int | None = None,
    axis: int | None = None,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> Distinct:
    """The distinct elements of a tensor, of which each NaN is one of its own.

    With `axis` the distinct slices across that axis, in lexicographic order: `values` has them side
    by side along the axis, and `inverse` and `first` count along it.

    With `size` there are that many values: where x has fewer, the last one is repeated with a count
    of 0; more fail the run. Without it a TracingError in jobs and compiled functions.
    """
    if axis is not None:
        at = one_axis(axis, x.ndim)
        distinct = unique(_ranks(x, at), size)
        values = apply_one("index_select", x, distinct.first, axis=at)
        return Distinct(values, *distinct[1:])
    truths = x.dtype is DType.BOOL
    whole = x.cast(DType.UINT8) if truths else x
    most = max(1, _count(x)) if size is None else size
    values, first, inverse, counts, number = apply("unique", whole, size=most)
    if size is None:
        try:
            count = int(number)
        except TracingError as error:
            raise TracingError(
                "how many distinct elements a tensor has is known only when the program runs",
                got=error.report.got,
                hint="pc.unique(x, size=n) has shapes that are known",
            ) from error
        values, first, counts = (each[:count] for each in (values, first, counts))
    return Distinct(values.cast(DType.BOOL) if truths else values, first, inverse, counts)


def _ranks(x: Tensor, axis: int) -> Tensor:
    """For each slice across an axis a number, int64 [extent]: equal for equal slices, and greater
    for those that come later in lexicographic order.
    """
    extent = x.shape[axis]
    rows = moveaxis(x, axis, 0).reshape((extent, _count(x) // max(1, extent)))
    ranks, kinds = _inverse(rows), max(1, _count(x))
    number, below = (ranks[:, :1] * 0).sum(1), 1
    for column in range(rows.shape[1]):
        if below * kinds >= _LARGEST:  # below: what numbers are less than
            number, below = _inverse(number), max(1, extent)
        number, below = number * kinds + ranks[:, column], below * kinds
    return number


_LARGEST = 1 << 62


def _inverse(x: Tensor) -> Tensor:
    """For each element the place of its value among the distinct ones."""
    whole = x.cast(DType.UINT8) if x.dtype is DType.BOOL else x
    inverse: Tensor = apply("unique", whole, size=max(1, _count(x)))[2]
    return inverse


def _count(x: Tensor) -> int:
    count = 1
    for extent in x.shape:
        count *= extent
    return count
