"""Rows that go to experts: packed into places of one size, and back.

A group of rows (those of one data-parallel rank, say) is sorted by expert, with a count for each.
`pack_rows` gives each expert of each group `capacity` places, so that all shapes are known ahead;
the change of layout from groups split to experts split is then one all-to-all. `unpack_rows` is the
inverse and the gradient (the layout is that of GShard: D. Lepikhin et al., 2020).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from plancompiler.errors import ExecutionError
from plancompiler.ops.attributes import Int, Text
from plancompiler.ops.gradient import by_op
from plancompiler.ops.kernel import on_host
from plancompiler.ops.registry import Array, Arrays, AttrMap, KernelContext, Types, define_op

OVERFLOW = ("error", "drop")
"""What becomes of rows beyond an expert's capacity, by the attribute `overflow`."""


def _runs(
    context: KernelContext, counts: Array, rows: int, capacity: int, experts: tuple[int, int]
) -> Iterator[tuple[int, int, int, int]]:
    """Of each group and expert held here: both their places, the first row, and how many rows."""
    drop = context.attrs["overflow"] == "drop"
    counts = on_host(context, counts).astype(np.int64, copy=False)
    ends = np.cumsum(counts, axis=1)
    if counts.size and (counts.min() < 0 or ends[:, -1].max() > rows):
        worst = int(np.argmax((counts.min(axis=1) < 0) | (ends[:, -1] > rows)))
        raise ExecutionError(
            "the counts of a group do not fit its rows",
            got=f"counts {counts[worst].tolist()}",
            expected=f"counts of at least 0, together at most {rows}",
        )
    if not drop and counts.size and counts.max() > capacity:
        fullest = int(counts.argmax()) % counts.shape[1]
        raise ExecutionError(
            "an expert gets more rows of a group than it has places for",
            got=f"{int(counts.max())} rows for expert {fullest}",
            expected=f"at most the capacity of {capacity}",
            hint="allow more capacity, or drop rows with overflow='drop'",
        )
    low, high = experts
    for group in range(counts.shape[0]):
        for expert in range(low, high):
            count = int(counts[group, expert])
            first = int(ends[group, expert]) - count
            yield group, expert - low, first, min(count, capacity)


# --- pack_rows ------------------------------------------------------------------------------------


def _pack_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    rest = " ".join(f"a{axis}" for axis in range(2, len(inputs[0].shape)))
    return f"g [r] {rest}, g [k] -> g e [c] {rest}"


def _pack_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (rows, counts), (out,) = inputs, outputs
    experts, capacity = context.output_regions[0][1], out.shape[2]
    out.fill(0)
    for group, expert, first, count in _runs(context, counts, rows.shape[1], capacity, experts):
        out[group, expert, :count] = rows[group, first : first + count]


define_op(
    "pack_rows",
    infer="x X groups rows ..., counts i groups experts -> packed X groups experts capacity ...",
    rule=_pack_rule,
    attrs=(Int("capacity", least=0), Text("overflow", "error", among=OVERFLOW)),
    kernel=_pack_kernel,
    gradient=by_op("pack_rows", "unpack_rows"),
    linear=((0,),),
    flops=0,
    takes_bfloat16=True,
    doc="(rows [g, r, ...], counts [g, e]) -> [g, e, capacity, ...]: each group's rows, sorted "
    "by expert, in places by expert, the others zero. Rows beyond the capacity fail the run, "
    "or with `overflow` 'drop' are left out.",
)


# --- unpack_rows ----------------------------------------------------------------------------------


def _unpack_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    rest = " ".join(f"a{axis}" for axis in range(3, len(inputs[0].shape)))
    return f"g e [c] {rest}, g [k] -> g [r] {rest}"


def _unpack_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (packed, counts), (out,) = inputs, outputs
    experts, capacity = context.input_regions[0][1], packed.shape[2]
    out.fill(0)
    for group, expert, first, count in _runs(context, counts, out.shape[1], capacity, experts):
        out[group, first : first + count] = packed[group, expert, :count]


define_op(
    "unpack_rows",
    infer="dpacked X groups experts capacity ..., counts i groups experts -> dx X groups rows ...",
    rule=_unpack_rule,
    attrs=(Int("rows", least=0), Text("overflow", "error", among=OVERFLOW)),
    kernel=_unpack_kernel,
    gradient=by_op("unpack_rows", "pack_rows"),
    linear=((0,),),
    flops=0,
    takes_bfloat16=True,
    doc="(packed [g, e, c, ...], counts [g, e]) -> [g, rows, ...]: the inverse of pack_rows; "
    "rows that were dropped, and those beyond the counts, are zero.",
)
