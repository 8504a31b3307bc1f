"""What data normalisation needs beside batch normalisation: sums that decay, and statistics of
groups of rows.

A group is a balanced piece of the rows, as splits cut them. Groups and rows that are split over as
many devices as there are groups never meet rows of other devices.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.ir.op import TensorType
from plancompiler.ir.shard import Range, balanced_range
from plancompiler.ops.attributes import Bool, Float, Int
from plancompiler.ops.gradient import by_op
from plancompiler.ops.kernel import blocks, in_float32, scratch
from plancompiler.ops.registry import Arrays, AttrMap, KernelContext, Types, define_op
from plancompiler.ops.rule import Signature
from plancompiler.ops.shards import cut_together, shards_stay_whole

# --- sums that decay ------------------------------------------------------------------------------


def _decayed_infer(inputs: Types, attrs: AttrMap) -> Types:
    if attrs["decay"] > 1.0:
        raise AttributeValueError(
            "attribute 'decay' has a wrong value", got=attrs["decay"], expected="at most 1"
        )
    return inputs[:1]


def _decayed_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    # As state - (1 - decay) * state: in float32 a decay close to 1 is known less well than 1 less
    # it.
    lost = 1.0 - context.attrs["decay"]
    for state, value, out in blocks(*inputs, *outputs):
        work = scratch(context, "work", state.shape, state.dtype)
        np.multiply(state, lost, out=work)
        np.subtract(value, work, out=work)
        np.add(state, work, out=out)


define_op(
    "decayed_sum_update",
    infer=_decayed_infer,
    operands="state F, summand F -> state F",
    rule="..., ... -> ...",
    attrs=(Float("decay", least=0.0),),
    kernel=in_float32(_decayed_kernel),
    flops=3,
    mutates=((0, 0),),
    skippable=True,
    doc="(state, value) -> decay * state + value.",
)


# --- groups of rows -------------------------------------------------------------------------------


def _pieces(rows: int, groups: int, part: Range, held: Range) -> Iterator[tuple[int, Range, int]]:
    """Of each group held here: its number among them, its rows in the part, from 0, and how many
    rows it has in all.
    """
    for group in range(*held):
        low, high = balanced_range(rows, groups, group)
        start = max(low, part[0])
        stop = max(min(high, part[1]), start)
        yield group - held[0], (start - part[0], stop - part[0]), high - low


def _expect_rows(kind: str, shape: tuple[int, ...], rows: int, groups: int) -> None:
    if rows < groups:
        raise ShapeError(
            f"{kind} needs a row for every group", got=shape, expected=f"at least {groups} rows"
        )


def _sums_infer(inputs: Types, attrs: AttrMap) -> Types:
    kind = "group_sums"
    (x,) = inputs
    groups = attrs["groups"]
    _expect_rows(kind, x.shape, x.shape[0], groups)
    return (TensorType((groups, *x.shape[1:]), x.dtype),)


def _sums_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x,), (out,) = inputs, outputs
    rows, groups = context.input_shapes[0][0], context.output_shapes[0][0]
    part, held = context.input_regions[0][0], context.output_regions[0][0]
    mean = context.attrs["mean"]
    for number, (start, stop), size in _pieces(rows, groups, part, held):
        total = np.add.reduce(x[start:stop], axis=0, dtype=np.float64)
        factor = 1.0 / size if mean else 1.0
        np.multiply(total, factor, out=out[number, ...], casting="same_kind")


def _rows_infer(inputs: Types, attrs: AttrMap) -> Types:
    kind = "group_rows"
    (state,) = inputs
    if state.shape[0] == 0:
        raise ShapeError(f"{kind} needs at least one group", got=state.shape)
    rows = attrs["rows"]
    _expect_rows(kind, (rows, *state.shape[1:]), rows, state.shape[0])
    return (TensorType((rows, *state.shape[1:]), state.dtype),)


def _rows_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (state,), (out,) = inputs, outputs
    rows, groups = context.output_shapes[0][0], context.input_shapes[0][0]
    part, held = context.output_regions[0][0], context.input_regions[0][0]
    mean = context.attrs["mean"]
    out.fill(0)
    for number, (start, stop), size in _pieces(rows, groups, part, held):
        np.multiply(state[number], 1.0 / size if mean else 1.0, out=out[start:stop, ...])


def _a_group_each(
    inputs: Types, outputs: Types, attrs: AttrMap, parts: int
) -> tuple[Signature, ...]:
    """Rows and groups split over as many devices as there are groups."""
    groups = min(inputs[0].shape[0], outputs[0].shape[0])
    return cut_together(1, 1) if parts == groups else ()


define_op(
    "group_sums",
    infer=_sums_infer,
    operands="x F rows ... -> sums F",
    rule="n ... -> g ...",
    attrs=(
        Int("groups", least=1),
        Bool("mean"),
    ),
    kernel=in_float32(_sums_kernel),
    gradient=by_op("group_sums", "group_rows"),
    linear=((0,),),
    extra=_a_group_each,
    legal=shards_stay_whole,
    flops=1,
    doc="x [n, ...] -> [groups, ...]: sums over `groups` balanced groups of rows; with `mean` "
    "over the number of rows of each.",
)
define_op(
    "group_rows",
    infer=_rows_infer,
    operands="dsums F groups ... -> dx F",
    rule="g ... -> n ...",
    attrs=(
        Int("rows", least=0),
        Bool("mean"),
    ),
    kernel=in_float32(_rows_kernel),
    gradient=by_op("group_rows", "group_sums"),
    linear=((0,),),
    extra=_a_group_each,
    legal=shards_stay_whole,
    doc="state [groups, ...] -> [rows, ...]: for each of `rows` rows the state of its group; "
    "with `mean` over the number of rows of the group. The transpose of group_sums.",
)
