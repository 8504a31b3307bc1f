"""Selecting and placing elements by index tensors, whose numbers count from 0.

An index outside its axis fails the run. Where the axis is split, each device takes or places what
it holds, and nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from plancompiler.errors import AttributeValueError, ShapeError, TracingError
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.elementwise import full_like
from plancompiler.frontend.out import takes_out
from plancompiler.ir import DType
from plancompiler.ir.operators import Scalar, TensorOperators, filled, in_dtype, one_axis
from plancompiler.ops.check import broadcast_shapes
from plancompiler.ops.registry import apply, apply_one

__all__ = [
    "bincount",
    "embedding",
    "gather",
    "index_add",
    "index_copy",
    "index_fill",
    "index_reduce",
    "index_select",
    "masked_scatter",
    "one_hot",
    "put",
    "put_along_axis",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "take_along_axis",
]


# --- along one axis, an index for each element ----------------------------------------------------


@takes_out
def take_along_axis(
    x: Tensor, indices: Tensor, axis: int | None, *, out: Tensor | None = None
) -> Tensor:
    """For each index the element of x there along `axis`; the other axes of both broadcast. Without
    an axis x counts as a vector.
    """
    if axis is None:
        return take_along_axis(x.reshape((-1,)), indices, 0)
    at = one_axis(axis, x.ndim)
    if indices.ndim == x.ndim:
        shape = broadcast_shapes(
            "take_along_axis", [(*s[:at], 1, *s[at + 1 :]) for s in (x.shape, indices.shape)]
        )
        x, indices = (_expanded(each, shape, at) for each in (x, indices))
    return apply_one("take_along_axis", x, indices, axis=at)


def _expanded(x: Tensor, shape: Sequence[int], axis: int) -> Tensor:
    """x broadcast to a shape, but for its own extent of one axis."""
    wanted = (*shape[:axis], x.shape[axis], *shape[axis + 1 :])
    return x if x.shape == wanted else apply_one("expand_to", x, shape=wanted)


@takes_out
def gather(
    x: Tensor,
    axis: int,
    indices: Tensor,
    *,
    sparse_grad: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """For each index the element of x there along `axis`. On the other axes there may be fewer
    indices than elements: the first elements are meant. `sparse_grad` changes nothing.
    """
    if not x.ndim:
        return gather(x.reshape((1,)), axis, indices.reshape((-1,))).reshape(indices.shape)
    at = one_axis(axis, x.ndim)
    return apply_one("take_along_axis", _first(x, indices.shape, at), indices, axis=at)


def _first(x: Tensor, shape: Sequence[int], axis: int | None = None) -> Tensor:
    """The first elements of each axis, as many as a shape has; one axis may stay whole."""
    stops = tuple(
        extent if each == axis or each >= len(shape) else min(extent, shape[each])
        for each, extent in enumerate(x.shape)
    )
    if stops == x.shape:
        return x
    return apply_one("slice", x, starts=(0,) * x.ndim, stops=stops)


_MODES = {
    "set": "set",
    "add": "add",
    "sum": "add",
    "multiply": "mul",
    "mul": "mul",
    "prod": "mul",
    "amax": "max",
    "max": "max",
    "amin": "min",
    "min": "min",
}
"""What an update does to the element at its index, by NumPy's and PyTorch's names."""


@takes_out
def put_along_axis(
    x: Tensor,
    indices: Tensor,
    updates: Tensor | Scalar,
    axis: int,
    mode: str = "set",
    *,
    out: Tensor | None = None,
) -> Tensor:
    """x with updates, or one number, at the indices along `axis`. On the other axes there may be
    fewer indices than elements, and on all axes fewer than updates: the first ones are meant.

    `mode` is "set" (of equal indices the last wins, and only its update gets a gradient), "add",
    "mul", "max" or "min"; PyTorch's names of these are known, too.
    """
    if mode not in _MODES:
        raise AttributeValueError(
            "updates are put in another way", got=repr(mode), expected=", ".join(_MODES)
        )
    at = one_axis(axis, x.ndim)
    if isinstance(updates, TensorOperators):
        updates = in_dtype(_first(updates, indices.shape), x.dtype)
    else:
        updates = full_like(x, updates, indices.shape)
    part = _first(x, indices.shape, at)
    put = apply_one("put_along_axis", part, indices, updates, axis=at, mode=_MODES[mode])
    if part is x:
        return put
    bounds = {"starts": (0,) * x.ndim, "stops": part.shape, "steps": (1,) * x.ndim}
    return apply_one("slice_scatter", x, put, **bounds)


@takes_out
def scatter(
    x: Tensor,
    axis: int,
    indices: Tensor,
    updates: Tensor | Scalar,
    mode: str = "set",
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`put_along_axis` under the name and argument order of other systems."""
    return put_along_axis(x, indices, updates, axis, mode)


@takes_out
def scatter_add(
    x: Tensor, axis: int, indices: Tensor, updates: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """x with updates added at the indices along `axis`."""
    return put_along_axis(x, indices, updates, axis, "add")


@takes_out
def scatter_reduce(
    x: Tensor,
    axis: int,
    indices: Tensor,
    updates: Tensor,
    mode: str,
    include_self: bool = True,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """x with updates at the indices along `axis`, reduced with the element there, or only with each
    other where not `include_self`: `mode` is "sum", "prod", "mean", "amax" or "amin". Equal
    extremes share the gradient.
    """
    if mode not in _NEUTRAL:
        raise AttributeValueError(
            "updates are reduced in another way", got=repr(mode), expected=", ".join(_NEUTRAL)
        )
    base = x
    if not include_self:
        base = put_along_axis(x, indices, _neutral(x, mode), axis)
    if mode != "mean":
        return put_along_axis(base, indices, updates, axis, mode)
    total = put_along_axis(base, indices, updates, axis, "add")
    counted = x.dtype if x.dtype.is_floating else DType.INT64
    ones = filled(x, _one(counted), dtype=counted)
    if not include_self:
        ones = put_along_axis(ones, indices, 0 * _one(counted), axis)
    count = put_along_axis(ones, indices, _one(counted), axis, "add")
    count = apply_one("maximum_scalar", count, scalar=_one(counted))
    mean = total / count if x.dtype.is_floating else total // count
    return in_dtype(mean, x.dtype)


_NEUTRAL = {"sum": 0, "mean": 0, "prod": 1, "amax": -math.inf, "amin": math.inf}
"""What a reduction begins with."""


def _neutral(x: Tensor, mode: str) -> Scalar:
    number = _NEUTRAL[mode]
    if x.dtype.is_floating:
        return float(number)
    if mode in ("amax", "amin"):
        limits = np.iinfo(str(x.dtype))
        return int(limits.min if mode == "amax" else limits.max)
    return int(number)


def _one(dtype: DType) -> Scalar:
    return 1.0 if dtype.is_floating else 1


# --- whole slices of an axis by one index ---------------------------------------------------------


def _in_our_order(x: Tensor, first: Any, second: Any, third: Any) -> tuple[Tensor, Any, int]:
    """Indices, what is done there, and the axis: PyTorch names the axis first."""
    if isinstance(first, int) and isinstance(second, TensorOperators):
        first, second, third = second, third, first
    return first, second, one_axis(third, x.ndim)


@takes_out
def index_select(
    x: Tensor, indices: Tensor | int, axis: int | Tensor = 0, *, out: Tensor | None = None
) -> Tensor:
    """The elements of an axis at the indices [i], in their order; also called in PyTorch's order,
    `(x, axis, indices)`.
    """
    places, _, at = _in_our_order(x, indices, axis, axis)
    return apply_one("index_select", x, places, axis=at)


@takes_out
def index_add(
    x: Tensor,
    indices: Tensor | int,
    updates: Tensor,
    axis: int | Tensor = 0,
    alpha: Scalar = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """x with updates, times `alpha`, added at the indices [i] of an axis; also called in PyTorch's
    order, `(x, axis, indices, updates)`.
    """
    places, pieces, at = _in_our_order(x, indices, updates, axis)
    pieces = pieces if alpha == 1 else pieces * alpha
    added: Tensor = apply("index_select_grad", places, pieces, axis=at, extent=x.shape[at])
    return x + added


def _wide(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Indices [i] of an axis for every element of the other axes."""
    count = math.prod(indices.shape)
    shape = tuple(count if each == axis else extent for each, extent in enumerate(x.shape))
    row = indices.reshape([count if each == axis else 1 for each in range(x.ndim)])
    return apply_one("expand_to", row, shape=shape)


@takes_out
def index_copy(
    x: Tensor,
    indices: Tensor | int,
    updates: Tensor,
    axis: int | Tensor = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """x with updates in place of the slices of an axis at the indices [i]; also called in PyTorch's
    order, `(x, axis, indices, updates)`.
    """
    places, pieces, at = _in_our_order(x, indices, updates, axis)
    changed: Tensor = put_along_axis(x, _wide(x, places, at), pieces, at)
    return changed


@takes_out
def index_fill(
    x: Tensor,
    indices: Tensor | int,
    value: Tensor | Scalar,
    axis: int | Tensor = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """x with one value in the slices of an axis at the indices [i]; also called in PyTorch's order,
    `(x, axis, indices, value)`.
    """
    places, filling, at = _in_our_order(x, indices, value, axis)
    wide = _wide(x, places, at)
    if isinstance(filling, TensorOperators):
        filling = apply_one("expand_to", filling, shape=wide.shape)
    changed: Tensor = put_along_axis(x, wide, filling, at)
    return changed


@takes_out
def index_reduce(
    x: Tensor,
    indices: Tensor | int,
    updates: Tensor,
    axis: int | Tensor,
    mode: str,
    include_self: bool = True,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`scatter_reduce` with whole slices of an axis, at the indices [i]; also called in PyTorch's
    order, `(x, axis, indices, updates, mode)`.
    """
    places, pieces, at = _in_our_order(x, indices, updates, axis)
    changed: Tensor = scatter_reduce(x, at, _wide(x, places, at), pieces, mode, include_self)
    return changed


@takes_out
def put(
    x: Tensor,
    indices: Tensor,
    updates: Tensor | Scalar,
    accumulate: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """x with updates at places that count its elements in row-major order, from the end where they
    are negative; added there if `accumulate`.
    """
    count = math.prod(x.shape)
    places = apply_one("ravel_index", indices, extents=(count,)).reshape((-1,))
    if isinstance(updates, TensorOperators):
        updates = updates.reshape((-1,))
    mode = "add" if accumulate else "set"
    return put_along_axis(x.reshape((count,)), places, updates, 0, mode).reshape(x.shape)


@takes_out
def masked_scatter(
    x: Tensor, mask: Tensor, updates: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """x with the first updates, in row-major order, where the mask is True; mask and x broadcast.
    Fewer updates than that fail the run.
    """
    shape = broadcast_shapes("masked_scatter", [x.shape, mask.shape])
    mask, x = (each if each.shape == shape else _broadcast(each, shape) for each in (mask, x))
    flat = mask.reshape((-1,))
    numbers = apply_one("cumsum", flat.cast(DType.INT64), axis=0) - 1
    places = apply_one("where", flat, numbers, full_like(numbers, 0, ()))
    if not math.prod(updates.shape):
        return masked_scatter(x, mask, full_like(x, _one(x.dtype), (1,)))
    taken = apply_one("index_select", in_dtype(updates, x.dtype).reshape((-1,)), places, axis=0)
    return apply_one("where", mask, taken.reshape(shape), x)


def _broadcast(x: Tensor, shape: Sequence[int]) -> Tensor:
    return apply_one("expand_to", x, shape=tuple(shape))


# --- counts and tables ----------------------------------------------------------------------------


def _greatest(x: Tensor, call: str) -> int:
    """The greatest number of an eager tensor, -1 where it has none."""
    greatest: Any = x.max() if math.prod(x.shape) else -1
    try:
        return int(greatest)
    except TracingError as error:
        raise TracingError(
            "the greatest number is known only when the program runs",
            got=error.report.got,
            hint=f"pc.{call}, classes=n) has a shape that is known",
        ) from error


@takes_out
def one_hot(
    ids: Tensor, classes: int = -1, dtype: DType | str = "float32", *, out: Tensor | None = None
) -> Tensor:
    """1 at each id and zeros elsewhere: ids [...] as [..., classes].

    With -1 there are as many classes as the greatest id says, as in `bincount`.
    """
    if classes == -1:
        classes = _greatest(ids, "one_hot(ids") + 1
    return apply_one("one_hot", ids, classes=classes, dtype=str(DType.parse(dtype)))


@takes_out
def bincount(
    x: Tensor,
    classes: int | None = None,
    weights: Tensor | None = None,
    minlength: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """How often each number from 0 to classes - 1 occurs: int64 [classes]; with `weights` [...] the
    sum of the weights of its places, in their dtype.

    Without `classes` there are as many as the greatest number says, but at least `minlength`; eager
    tensors find out, which is a collective, and jobs raise a TracingError.
    """
    if classes is None:
        classes = max(_greatest(x, "bincount(x") + 1, minlength)
    if weights is None:
        return apply_one("bincount", x, classes=classes)
    if weights.shape != x.shape:
        raise ShapeError("each number has a weight", got=weights.shape, expected=x.shape)
    flat = weights if weights.dtype.is_floating else weights.cast(DType.FLOAT64)
    total: Tensor = apply(
        "index_select_grad", x.reshape((-1,)), flat.reshape((-1,)), axis=0, extent=classes
    )
    return total


@takes_out
def embedding(table: Tensor, ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rows of table [count, dim] by ids [...]: [..., dim]."""
    return apply_one("embedding", table, ids)
