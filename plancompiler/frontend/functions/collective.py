"""Communication by name: layouts demanded along a mesh axis, and rows sent to experts.

A tensor's value is global, so none of these changes it; they say where it is put together. `along`
names the mesh axis (or gives its position); it may be left out for a mesh of one axis.
"""

from __future__ import annotations

import math
from typing import Any

from plancompiler.errors import AttributeValueError, PlacementMismatchError, ShapeError
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.out import takes_out
from plancompiler.ir import BROADCAST, NdSbp, Placement, Split
from plancompiler.ir.operators import one_axis
from plancompiler.ir.shard import flat_slice
from plancompiler.ops.collective import mesh_axis, redistribute_along, reduced
from plancompiler.ops.registry import apply, apply_one

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_gradient",
    "all_to_all",
    "global_gather",
    "global_scatter",
    "partial_all_gather",
    "partial_recv",
    "partial_send",
    "partial_transfer",
    "reduce_scatter",
]


Along = str | int | None


@takes_out
def all_reduce(x: Tensor, along: Along = None, *, out: Tensor | None = None) -> Tensor:
    """A value that is partial along a mesh axis (by default along all), reduced: P → B.

    Its gradient passes as it is: backward is the identity. What is not partial stays as it is. In a
    job, what is partial along other mesh axes is reduced too.
    """
    placement = _placement(x)
    total: Tensor = reduced(x, None if along is None else mesh_axis(placement, along))
    return total


@takes_out
def all_reduce_gradient(x: Tensor, along: Along = None, *, out: Tensor | None = None) -> Tensor:
    """The mirror image of `all_reduce`: the value as it is, its gradient reduced here.

    Without it the gradient of a broadcast value that is used with split data stays partial until it
    is needed whole. Put it where a tensor-parallel region begins, `all_reduce` where it ends.
    """
    placement = _placement(x)
    position = -1 if along is None else mesh_axis(placement, along)
    return apply_one("place_gradient", x, along=position)


@takes_out
def all_gather(x: Tensor, along: Along = None, *, out: Tensor | None = None) -> Tensor:
    """A value whole on all devices along a mesh axis: S → B. Its gradient is split like `x`."""
    _placement(x)
    gathered: Tensor = redistribute_along(x, along, BROADCAST)
    return gathered


@takes_out
def reduce_scatter(
    x: Tensor, axis: int = 0, along: Along = None, *, out: Tensor | None = None
) -> Tensor:
    """A value split by its axis `axis` along a mesh axis: of a partial one, P → S; its gradient is
    gathered.
    """
    _placement(x)
    scattered: Tensor = redistribute_along(x, along, Split(one_axis(axis, x.ndim)))
    return scattered


@takes_out
def all_to_all(
    x: Tensor, split_axis: int, along: Along = None, *, out: Tensor | None = None
) -> Tensor:
    """A split value, split by its axis `split_axis` instead along a mesh axis: S(i) → S(j)."""
    _placement(x)
    exchanged: Tensor = redistribute_along(x, along, Split(one_axis(split_axis, x.ndim)))
    return exchanged


@takes_out
def partial_transfer(
    x: Tensor, placement: Placement, along: Along = None, *, out: Tensor | None = None
) -> Tensor:
    """A value on another placement, of which each rank sends a slice only.

    What is the same on all n devices along a mesh axis crosses once instead of n times: rank i
    sends flat slice i to its counterpart, and the slices are gathered there. That is
    `partial_send`, `partial_recv` and `partial_all_gather` in one, for activations between the
    stages of a pipeline (the scatter-gather of D. Narayanan et al., 2021). The gradient comes back
    likewise. Both meshes have as many axes.
    """
    own = _placement(x)
    if not isinstance(placement, Placement) or placement.ndim != own.ndim:
        raise PlacementMismatchError(
            "partial_transfer needs meshes of equally many axes",
            got=f"{own} and {placement}",
            hint="x.redistribute(placement, sbp) goes between any two",
        )
    position = mesh_axis(own, along)
    there: Along = position
    if own.axes is not None and placement.axes is not None and isinstance(along, str):
        there = along
    sliced: Any = redistribute_along(x.reshape(-1), position, Split(0))
    moved = sliced.redistribute(placement)
    moved = apply("place_gradient", moved, along=mesh_axis(placement, there), split=0)
    transferred: Tensor = redistribute_along(moved, there, BROADCAST).reshape(x.shape)
    return transferred


@takes_out
def partial_send(
    x: Tensor,
    placement: Placement,
    num: int,
    id: int,  # noqa: A002  # the usual name
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Slice `id` of `num` of the flat tensor, broadcast on another placement, for `partial_recv`.

    Of m elements that is [id·m/num, (id+1)·m/num), rounded down; nothing else is sent. What is the
    same on several ranks crosses in slices by one `partial_send` for each, or all at once by
    `partial_transfer`. AttributeValueError for a slice that does not exist.
    """
    _placement(x)
    count = math.prod(x.shape)
    piece: Tensor = x.reshape(-1)[flat_slice("partial_send", count, num, id)]
    return piece.redistribute(placement, NdSbp.broadcast(placement.ndim))


@takes_out
def partial_recv(
    x: Tensor,
    piece: Tensor,
    num: int,
    id: int,  # noqa: A002  # the usual name
    *,
    out: Tensor | None = None,
) -> Tensor:
    """A tensor with slice `id` of `num` of its flat elements replaced by what `partial_send` gave.

    All other elements are those of `x`, which lies where `piece` does. ShapeError for a piece of
    another slice's length.
    """
    _placement(x)
    count = math.prod(x.shape)
    place = flat_slice("partial_recv", count, num, id)
    if piece.shape != (place.stop - place.start,):
        raise ShapeError(
            f"this is not slice {id} of {num} of the tensor",
            got=piece.shape,
            expected=f"({place.stop - place.start},), of a tensor of shape {x.shape}",
        )
    bounds = {"starts": (place.start,), "stops": (place.stop,), "steps": (1,)}
    return apply_one("slice_scatter", x.reshape(-1), piece, **bounds).reshape(x.shape)


@takes_out
def partial_all_gather(x: Tensor, along: Along = None, *, out: Tensor | None = None) -> Tensor:
    """A value whole on all n devices along a mesh axis, of which device i gives flat slice i.

    What device i holds of the other slices is not read. Slices are balanced: of m elements the
    first m mod n have one element more.
    """
    position = mesh_axis(_placement(x), along)
    sliced: Any = redistribute_along(x.reshape(-1), position, Split(0))
    gathered: Tensor = redistribute_along(sliced, position, BROADCAST)
    return gathered.reshape(x.shape)


# --- rows to experts ------------------------------------------------------------------------------


@takes_out
def global_scatter(
    x: Tensor,
    counts: Tensor,
    capacity: int,
    overflow: str = "error",
    along: Along = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Rows sent to the devices of their experts: [g, r, ...] → [g, e, capacity, ...].

    `x` has g groups of r rows each, one or more for each device along the mesh axis; a group's rows
    are sorted by expert, and `counts` [g, e] (whole numbers, zeros allowed) says how many are for
    each of e experts. Each group has `capacity` places for each expert; places without a row are
    zero. The result is split by expert along the mesh axis: from groups split there, one
    all-to-all. Rows beyond the capacity fail the run, or with `overflow="drop"` are left out.
    `global_gather` is the inverse and the gradient.
    """
    _rows("global_scatter", x, counts, 2)
    position = mesh_axis(_placement(x), along)
    packed = apply("pack_rows", x, counts, capacity=capacity, overflow=overflow)
    packed = apply("place_gradient", packed, along=position, split=0)
    scattered: Tensor = redistribute_along(packed, position, Split(1))
    return scattered


@takes_out
def global_gather(
    y: Tensor,
    counts: Tensor,
    rows: int,
    overflow: str = "error",
    along: Along = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Rows brought back from the devices of their experts: [g, e, capacity, ...] → [g, rows, ...].

    The inverse and the gradient of `global_scatter`, with the same `counts`: along the mesh axis
    the result is split by group again. Rows that were dropped, and rows beyond the counts, are
    zero.
    """
    _rows("global_gather", y, counts, 3)
    position = mesh_axis(_placement(y), along)
    back = apply("place_gradient", y, along=position, split=1)
    back = redistribute_along(back, position, Split(0))
    unpacked: Tensor = apply("unpack_rows", back, counts, rows=rows, overflow=overflow)
    return unpacked


def _rows(kind: str, x: Any, counts: Any, least: int) -> None:
    _placement(counts)
    if _placement(x) is not None and x.ndim < least:
        raise ShapeError(
            f"{kind} takes groups of rows", got=x.shape, expected=f"at least {least} axes"
        )


def _placement(x: Any) -> Placement:
    """Where a tensor lies."""
    placement = getattr(x, "placement", None)
    if not isinstance(placement, Placement):
        raise AttributeValueError(
            "a tensor is needed here",
            got=type(x).__name__,
            hint="pc.tensor(array, placement, sbp), or pc.input in a job",
        )
    return placement
