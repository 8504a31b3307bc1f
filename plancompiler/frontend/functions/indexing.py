"""Selecting and placing elements by index tensors, whose numbers count from 0.

An index outside its axis fails the run. Where the axis is split, each device takes or places what
it holds, and nothing is gathered.
"""

from __future__ import annotations

from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.out import takes_out
from plancompiler.ir import DType
from plancompiler.ir.operators import one_axis
from plancompiler.ops.registry import apply, apply_one

__all__ = [
    "bincount",
    "embedding",
    "gather",
    "index_add",
    "index_select",
    "one_hot",
    "put_along_axis",
    "scatter",
    "scatter_add",
    "take_along_axis",
]


@takes_out
def take_along_axis(x: Tensor, indices: Tensor, axis: int, *, out: Tensor | None = None) -> Tensor:
    """For each index the element of x there along `axis`; the other axes of both agree."""
    return apply_one("take_along_axis", x, indices, axis=one_axis(axis, x.ndim))


@takes_out
def gather(x: Tensor, axis: int, indices: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`take_along_axis` under the name and argument order of other systems."""
    return take_along_axis(x, indices, axis)


@takes_out
def put_along_axis(
    x: Tensor,
    indices: Tensor,
    updates: Tensor,
    axis: int,
    mode: str = "set",
    *,
    out: Tensor | None = None,
) -> Tensor:
    """x with updates at the indices along `axis`; the other axes agree.

    `mode` is "set" (of equal indices the last wins, and only its update gets a gradient) or "add".
    """
    return apply_one("put_along_axis", x, indices, updates, axis=one_axis(axis, x.ndim), mode=mode)


@takes_out
def scatter(
    x: Tensor,
    axis: int,
    indices: Tensor,
    updates: Tensor,
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
def index_select(x: Tensor, indices: Tensor, axis: int = 0, *, out: Tensor | None = None) -> Tensor:
    """The elements of an axis at the indices [i], in their order."""
    return apply_one("index_select", x, indices, axis=one_axis(axis, x.ndim))


@takes_out
def index_add(
    x: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, *, out: Tensor | None = None
) -> Tensor:
    """x with updates added at the indices [i] of an axis."""
    at = one_axis(axis, x.ndim)
    added: Tensor = apply("index_select_grad", indices, updates, axis=at, extent=x.shape[at])
    return x + added


@takes_out
def one_hot(
    ids: Tensor, classes: int, dtype: DType | str = "float32", *, out: Tensor | None = None
) -> Tensor:
    """1 at each id and zeros elsewhere: ids [...] as [..., classes]."""
    return apply_one("one_hot", ids, classes=classes, dtype=str(DType.parse(dtype)))


@takes_out
def bincount(ids: Tensor, classes: int, *, out: Tensor | None = None) -> Tensor:
    """How often each number from 0 to classes - 1 occurs: int64 [classes]."""
    return apply_one("bincount", ids, classes=classes)


@takes_out
def embedding(table: Tensor, ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rows of table [count, dim] by ids [...]: [..., dim]."""
    return apply_one("embedding", table, ids)
