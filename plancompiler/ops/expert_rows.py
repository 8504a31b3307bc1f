"""Mixture of experts: rows on their way to experts that are split over devices, and back.

Experts form pieces, of which devices hold some. A piece has places for `bound` rows, whichever of
its experts they are for: shapes are known ahead, but no expert has a limit of its own. With as many
pieces as experts the bound is a capacity (D. Lepikhin et al., "GShard", 2020); with fewer, rows of
a busy expert take the places that others of its piece leave, and products of rows with their
expert's weight are made segment by segment (T. Gale et al., "MegaBlocks", 2022).

Where rows are split over devices as pieces are, only rows that leave their device are moved: an
uneven all-to-all, of which `places` says everything on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from plancompiler.errors import AttributeValueError, ExecutionError, ShapeError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ir.shard import balanced_range, element_count
from plancompiler.ops.attributes import Bool, Int, Text
from plancompiler.ops.exchange import Exchange
from plancompiler.ops.kernel import on_host
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    KernelContext,
    Tensors,
    Types,
    apply,
    define_op,
    stops,
)
from plancompiler.ops.routing import OVERFLOW

# --- expert_places --------------------------------------------------------------------------------


def _places_infer(inputs: Types, attrs: AttrMap) -> Types:
    experts, pieces = attrs["experts"], attrs["pieces"]
    if experts % pieces:
        raise AttributeValueError(
            "experts cannot be dealt evenly to pieces", got=f"{experts} experts, {pieces} pieces"
        )
    return (
        TensorType(inputs[0].shape, DType.INT64),
        TensorType((pieces, experts // pieces), DType.INT64),
    )


def _places_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (chosen,), (places, counts), attrs = inputs, outputs, context.attrs
    experts, pieces, bound = attrs["experts"], attrs["pieces"], attrs["bound"]
    expert = chosen.reshape(-1).astype(np.int64)
    if expert.size and not -1 <= expert.min() <= expert.max() < experts:
        raise ExecutionError(
            "rows are sent to experts that do not exist",
            got=f"experts {int(expert.min())} to {int(expert.max())}",
            expected=f"0 to {experts - 1}, or -1 for a row that goes nowhere",
        )
    each = experts // pieces
    (rows,) = np.nonzero(expert >= 0)
    piece = expert[rows] // each
    wanted = np.bincount(piece, minlength=pieces)
    if wanted.max(initial=0) > bound:
        if attrs["overflow"] != "drop":
            fullest = int(wanted.argmax())
            raise ExecutionError(
                "experts get more rows than there are places for",
                got=f"{int(wanted[fullest])} rows for experts {fullest * each} to "
                f"{fullest * each + each - 1} (piece {fullest})",
                expected=f"at most the bound of {bound}",
                hint="allow a larger bound, or drop rows with overflow='drop'",
            )
        # The first rows of each piece stay, whichever of its experts they are for.
        order = np.argsort(piece, kind="stable")
        number = _number_in_run(piece[order], pieces)
        rows = np.sort(rows[order[number < bound]])
    target = expert[rows]
    kept = np.bincount(target, minlength=experts).reshape(pieces, each)
    order = np.argsort(target, kind="stable")
    piece = target[order] // each
    flat = places.reshape(-1)
    flat.fill(-1)
    flat[rows[order]] = piece * bound + _number_in_run(piece, pieces)
    np.copyto(counts, kept)


def _number_in_run(runs: Array, count: int) -> Array:
    """0, 1, 2, … for the elements of each run, of which there are `count`; `runs` is sorted."""
    lengths = np.bincount(runs, minlength=count)
    starts = np.cumsum(lengths) - lengths
    numbers: Array = np.arange(len(runs), like=runs) - starts[runs]
    return numbers


define_op(
    "expert_places",
    infer=_places_infer,
    operands="chosen i t k -> places int64 t k, counts int64 p m",
    rule="[t] [k] -> [t] [k], [p] [m]",
    attrs=(
        Int("experts", least=1),
        Int("pieces", least=1),
        Int("bound", least=0),
        Text("overflow", "error", among=OVERFLOW),
    ),
    kernel=_places_kernel,
    gradient=stops,
    flops=0,
    portable=False,
    doc="(experts [t, k] that rows are sent to; -1: none) -> (places [t, k], counts [pieces, "
    "experts of a piece]): a piece has `bound` places, and its rows are sorted by expert; -1 is no "
    "place. More rows fail the run, or with `overflow` 'drop' the last ones have no place.",
)


# --- scatter_rows and gather_rows -----------------------------------------------------------------


def _rest(first: TensorType) -> str:
    return " ".join(f"r{axis}" for axis in range(2, len(first.shape)))


def _scatter_infer(inputs: Types, attrs: AttrMap) -> Types:
    x, places = inputs
    if len(x.shape) < 2 or x.shape[0] != places.shape[0] or x.shape[1] not in (1, places.shape[1]):
        raise ShapeError(
            "scatter_rows needs a row for each place, or one for all of a token",
            got=f"rows {x.shape}, places {places.shape}",
        )
    return (TensorType((attrs["pieces"], attrs["bound"], *x.shape[2:]), x.dtype),)


def _gather_infer(inputs: Types, attrs: AttrMap) -> Types:
    rows, places = inputs
    return (TensorType((*places.shape, *rows.shape[2:]), rows.dtype),)


def _scatter_exchange(inputs: Types, size: int) -> int:
    """The most rows that a device sends away, of so many devices."""
    first, last = balanced_range(inputs[1].shape[0], size, 0)
    return (last - first) * inputs[1].shape[1]


def _gather_exchange(inputs: Types, size: int) -> int:
    pieces, bound = inputs[0].shape[:2]
    first, last = balanced_range(pieces, size, 0)
    return (last - first) * bound


class _Routes:
    """Which places each device's rows have, and who holds them; the same on all devices."""

    def __init__(self, places: Array, size: int, pieces: int, bound: int) -> None:
        """`places` are all there are, [t, k]."""
        tokens, choices = places.shape
        flat = places.reshape(-1)
        (self.rows,) = np.nonzero(flat >= 0)
        self.places = flat[self.rows]
        self.home = _owner(self.rows // max(1, choices), tokens, size)
        self.away = _owner(self.places // max(1, bound), pieces, size)

    def coming(self, home: Array, away: Array, size: int, member: int) -> list[range]:
        """Which of the rows that each device gives are for one of them, when rows go from `home` to
        `away`.
        """
        counts = np.zeros((size, size), np.int64, like=home)
        np.add.at(counts, (home, away), 1)
        stops = np.cumsum(counts, axis=1)[:, member].tolist()
        return [
            range(stop - count, stop)
            for stop, count in zip(stops, counts[:, member].tolist(), strict=True)
        ]

    def between(self, home: int, away: int) -> tuple[Array, Array]:
        """The rows that one device has and another holds the places of: numbers of rows, places."""
        both = (self.home == home) & (self.away == away)
        return self.rows[both], self.places[both]


def _owner(number: Array, extent: int, size: int) -> Array:
    """Which device has each of some elements of an axis that is split in balanced pieces."""
    ends = np.array([balanced_range(extent, size, member)[1] for member in range(size)])
    owners: Array = np.searchsorted(ends, number, side="right")
    return owners


def _scatter_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x, places), (out,) = inputs, outputs
    (first, _), (_, bound) = context.output_regions[0][:2]
    out.fill(0)
    target = _flat(out)
    width = places.shape[1]
    if context.peers is None:
        own = places.reshape(-1) - first * bound
        (rows,) = np.nonzero((own >= 0) & (own < len(target)))
        target[own[rows]] = _row(x, rows, width)
        return
    peers = context.peers
    routes = _Routes(places, peers.size, context.output_shapes[0][0], bound)
    token = context.input_regions[0][0][0]
    away = [routes.between(peers.member, other)[0] - token * width for other in range(peers.size)]
    here = [routes.between(other, peers.member)[1] - first * bound for other in range(peers.size)]
    coming = routes.coming(routes.home, routes.away, peers.size, peers.member)
    came = peers.exchange([_row(x, rows, width) for rows in away], coming)
    for where, rows in zip(here, came, strict=True):
        target[where] = rows


def _flat(array: Array) -> Array:
    """The first two axes as one."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _row(x: Array, numbers: Array, width: int) -> Array:
    """Rows by their numbers [token, choice], flat; x [tokens, 1 or choices, ...]."""
    token = numbers // max(1, width)
    choice = numbers % max(1, width) if x.shape[1] > 1 else 0
    rows: Array = x[token, choice]
    return rows


def _gather_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (rows, places), (out,) = inputs, outputs
    (first, _), (_, bound) = context.input_regions[0][:2]
    source = _flat(rows)
    out.fill(0)
    target = _flat(out)
    width = places.shape[1]
    if context.peers is None:
        own = places.reshape(-1) - first * bound
        (held,) = np.nonzero((own >= 0) & (own < len(source)))
        target[held] = source[own[held]]
        return
    peers = context.peers
    routes = _Routes(places, peers.size, context.input_shapes[0][0], bound)
    token = context.output_regions[0][0][0]
    away = [routes.between(other, peers.member)[1] - first * bound for other in range(peers.size)]
    here = [routes.between(peers.member, other)[0] - token * width for other in range(peers.size)]
    coming = routes.coming(routes.away, routes.home, peers.size, peers.member)
    came = peers.exchange([source[each] for each in away], coming)
    for where, part in zip(here, came, strict=True):
        target[where] = part


def _scatter_gradients(
    attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors
) -> Tensors:
    x, places = inputs
    back: Any = apply("gather_rows", grads[0], places)
    return back if x.shape[1] == places.shape[1] else back.sum(1, keepdims=True), None


def _gather_gradients(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    rows, places = inputs
    pieces, bound = rows.shape[:2]
    return apply("scatter_rows", grads[0], places, pieces=pieces, bound=bound), None


define_op(
    "scatter_rows",
    infer=_scatter_infer,
    operands="x X ..., places i t k -> rows X",
    rule=lambda inputs, outputs, attrs: (
        f"[t] [k] {_rest(inputs[0])}, [t] [k] -> p [c] {_rest(inputs[0])}"
    ),
    attrs=(Int("pieces", least=1), Int("bound", least=0)),
    kernel=_scatter_kernel,
    gradient=_scatter_gradients,
    linear=((0,),),
    passing=Exchange(rows=_scatter_exchange),
    flops=0,
    takes_bfloat16=True,
    doc="(x [t, k or 1, ...], places [t, k] of `expert_places`) -> rows [pieces, bound, ...] with "
    "each row of x at its place, the others zero. Split over devices along t and pieces, only rows "
    "that leave their device are moved.",
)
define_op(
    "gather_rows",
    infer=_gather_infer,
    operands="rows X ..., places i t k -> y X",
    rule=lambda inputs, outputs, attrs: (
        f"[p] [c] {_rest(inputs[0])}, t [k] -> t [k] {_rest(inputs[0])}"
    ),
    kernel=_gather_kernel,
    gradient=_gather_gradients,
    linear=((0,),),
    passing=Exchange(rows=_gather_exchange),
    flops=0,
    takes_bfloat16=True,
    doc="(rows [pieces, bound, ...], places [t, k]) -> [t, k, ...]: the row at each place, zero "
    "for -1; the gradient of scatter_rows.",
)


# --- products by expert ---------------------------------------------------------------------------


def _segments(counts: Array) -> Iterator[tuple[int, int, slice]]:
    """Piece, expert in it, and its rows; of counts on the host."""
    for piece, each in enumerate(counts.tolist()):
        start = 0
        for expert, count in enumerate(each):
            yield piece, expert, slice(start, start + count)
            start += count


def _product_infer(inputs: Types, attrs: AttrMap) -> Types:
    rows, counts, weight = inputs
    given, made = weight.shape[2:] if not attrs["transpose"] else weight.shape[:1:-1]
    if rows.shape[2] != given or weight.shape[:2] != counts.shape:
        raise ShapeError(
            "grouped_matmul needs a matrix for each expert, of as many rows as there are features",
            got=f"rows {rows.shape}, counts {counts.shape}, weights {weight.shape}",
        )
    return (TensorType((*rows.shape[:2], made), rows.dtype),)


def _product_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    matrix = "f d" if attrs["transpose"] else "d f"
    return f"p [c] d, p [m], p [m] {matrix} -> p [c] f"


def _product_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (rows, counts, weight), (out,) = inputs, outputs
    if context.attrs["transpose"]:
        weight = weight.swapaxes(-1, -2)
    counts = on_host(context, counts)
    for piece, count in enumerate(counts.sum(axis=1).tolist()):
        out[piece, count:].fill(0)
    for piece, expert, span in _segments(counts):
        np.matmul(rows[piece, span], weight[piece, expert], out=out[piece, span])


def _product_gradients(
    attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors
) -> Tensors:
    (rows, counts, weight), (dy,) = inputs, grads
    turned = attrs["transpose"]
    drows = apply("grouped_matmul", dy, counts, weight, transpose=not turned)
    left, right = (dy, rows) if turned else (rows, dy)
    return drows, None, apply("grouped_matmul_weight", left, right, counts)


def _weight_gradients(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    (left, right, counts), (dweight,) = inputs, grads
    return (
        apply("grouped_matmul", right, counts, dweight, transpose=True),
        apply("grouped_matmul", left, counts, dweight),
        None,
    )


def _weight_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (left, right, counts), (out,) = inputs, outputs
    for piece, expert, span in _segments(on_host(context, counts)):
        np.matmul(left[piece, span].T, right[piece, span], out=out[piece, expert])


def _flops(inputs: Types, outputs: Types, attrs: AttrMap) -> int:
    return 2 * element_count(inputs[0].shape) * outputs[0].shape[-1]


define_op(
    "grouped_matmul",
    infer=_product_infer,
    operands="rows F p c d, counts i p m, weight F p m e f -> y F",
    rule=_product_rule,
    attrs=(Bool("transpose", False),),
    kernel=_product_kernel,
    gradient=_product_gradients,
    linear=((0,), (2,)),
    flops=_flops,
    doc="(rows [p, c, d], counts [p, m], weight [p, m, d, f]) -> [p, c, f]: the rows of each "
    "piece, sorted by expert, each times its expert's matrix (with `transpose` [p, m, f, d]); rows "
    "beyond the counts become zero.",
)
define_op(
    "grouped_matmul_weight",
    infer="left F p c d, right F p c f, counts i p m -> dweight F p m d f",
    rule="p [c] d, p [c] f, p [m] -> p [m] d f",
    kernel=_weight_kernel,
    gradient=_weight_gradients,
    linear=((0,), (1,)),
    flops=_flops,
    doc="(left [p, c, d], right [p, c, f], counts [p, m]) -> the sum of leftᵀ right over each "
    "expert's rows: the gradient of grouped_matmul's weight.",
)
