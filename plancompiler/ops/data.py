"""Ops that bring data into a job: batches of arrays, batches of token sequences, small constants.

Which rows a batch holds is a pure function of the job's seed, the op's own seed, the step and the
row's global position in the batch. So every rank reads only its own rows, all layouts see the same
data, and two ops with one seed (images and their labels) agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from plancompiler.errors import AttributeValueError, DataError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ir.shard import region_index, region_shape
from plancompiler.ops import random
from plancompiler.ops.check import (
    bool_attr,
    dtype_attr,
    expect_inputs,
    floats_attr,
    int_attr,
    only_attrs,
    shape_attr,
    str_attr,
    strs_attr,
)
from plancompiler.ops.kernel import of_box
from plancompiler.ops.registry import Array, AttrMap, KernelContext, OpDef, Types, register
from plancompiler.ops.stored import Indices, StoredRows, mapped_tokens, stored_array


def _no_flops(inputs: Types, outputs: Types, attrs: AttrMap) -> int:
    return 0


# --- arrays_batch ---------------------------------------------------------------------------------


def _arrays_infer(inputs: Types, attrs: AttrMap) -> Types:
    kind = "arrays_batch"
    expect_inputs(kind, inputs, 0)
    only_attrs(
        kind, attrs, "paths", "key", "batch", "shape", "dtype", "start", "stop", "shuffle", "seed"
    )
    strs_attr(attrs, "paths", least=1)
    str_attr(attrs, "key")
    bool_attr(attrs, "shuffle")
    int_attr(attrs, "seed", least=0)
    start = int_attr(attrs, "start", least=0)
    int_attr(attrs, "stop", least=start + 1)
    batch = int_attr(attrs, "batch", least=1)
    return (TensorType((batch, *shape_attr(attrs)), dtype_attr(attrs)),)


def _arrays_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    attrs = context.attrs
    start, stop = int_attr(attrs, "start"), int_attr(attrs, "stop")
    stored = context.state.get("stored")
    if stored is None:
        stored = context.state["stored"] = _stored_rows(attrs, stop)
    (low, high), *rest = context.output_regions[0]
    first = context.step * int_attr(attrs, "batch")
    rows = start + _row_order(context, first + low, first + high, stop - start)
    stored.read(rows, region_index(tuple(rest)), outputs[0])


def _stored_rows(attrs: AttrMap, stop: int) -> StoredRows:
    """The files' rows, which must be what the job was told."""
    key, expected = str_attr(attrs, "key"), TensorType(shape_attr(attrs), dtype_attr(attrs))
    paths = strs_attr(attrs, "paths")
    shards = [stored_array(path, key) for path in paths]
    for shard in shards:
        if (
            shard.shape[1:] != expected.shape
            or shard.dtype.newbyteorder("=") != expected.dtype.numpy
        ):
            raise DataError(
                f"rows of {key!r} in a data file are not what the job says",
                got=f"{shard.dtype}{list(shard.shape[1:])} in {shard.file.path}",
                expected=str(expected),
            )
    stored = StoredRows(shards)
    if len(stored) < stop:
        where = paths[0] if len(paths) == 1 else f"{len(paths)} files, {paths[0]} the first"
        raise DataError(
            f"array {key!r} of a job's data files is too short",
            got=f"{len(stored)} rows in {where}",
            expected=f"at least {stop}",
        )
    return stored


def _row_order(context: KernelContext, first: int, last: int, count: int) -> Indices:
    """Rows that stand at positions `first` to `last` of the endless sequence of epochs.

    Each epoch is all `count` rows once: in order, or in a random order of its own.
    """
    positions = np.arange(first, last, dtype=np.int64)
    epochs, rows = np.divmod(positions, count)
    if bool_attr(context.attrs, "shuffle"):
        orders: dict[int, Indices] = context.state.setdefault("orders", {})
        wanted = np.unique(epochs).tolist()
        for epoch in list(orders):
            if epoch not in wanted:
                del orders[epoch]
        for epoch in wanted:
            if epoch not in orders:
                key = f"rows {int_attr(context.attrs, 'seed')} epoch {epoch}"
                orders[epoch] = random.permutation(context.seed, key, count)
            inside = epochs == epoch
            rows[inside] = orders[epoch][rows[inside]]
    return rows


register(
    OpDef(
        "arrays_batch",
        infer=_arrays_infer,
        rule="-> ...",
        kernel=_arrays_kernel,
        flops=_no_flops,
        source=True,
        files=("paths",),
        doc="Rows start to stop of an array in npz files, one file after another, `batch` per "
        "step, epoch after epoch; shuffled anew each epoch on request.",
    )
)


# --- token_batch ----------------------------------------------------------------------------------


STORED_TOKENS = ("uint8", "uint16", "uint32", "int8", "int16", "int32", "int64")
"""What a file of tokens may hold; sequences are handed out as int64."""


def _tokens_infer(inputs: Types, attrs: AttrMap) -> Types:
    kind = "token_batch"
    expect_inputs(kind, inputs, 0)
    only_attrs(kind, attrs, "path", "dtype", "batch", "length", "shift", "seed")
    str_attr(attrs, "path")
    str_attr(attrs, "dtype", among=STORED_TOKENS)
    int_attr(attrs, "seed", least=0)
    int_attr(attrs, "shift", least=0)
    batch, length = int_attr(attrs, "batch", least=1), int_attr(attrs, "length", least=1)
    return (TensorType((batch, length), DType.INT64),)


def _tokens_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    attrs = context.attrs
    length = int_attr(attrs, "length")
    if "tokens" not in context.state:
        path, dtype = str_attr(attrs, "path"), str_attr(attrs, "dtype")
        context.state["tokens"] = mapped_tokens(path, dtype, length + 1)
    file, tokens = context.state["tokens"]
    file.check()
    (low, high), (left, right) = context.output_regions[0]
    first = context.step * int_attr(attrs, "batch")
    # One random word per sequence, by its position among all sequences of the run.
    start = random.stream(context.seed, f"tokens {int_attr(attrs, 'seed')}")
    words = random.words(start, (first + high,), ((first + low, first + high),))
    begins = (words % np.uint64(len(tokens) - length)).tolist()
    shift = int_attr(attrs, "shift")
    for row, begin in zip(outputs[0], begins, strict=True):
        np.copyto(row, tokens[begin + shift + left : begin + shift + right], casting="unsafe")


register(
    OpDef(
        "token_batch",
        infer=_tokens_infer,
        rule="-> ...",
        kernel=_tokens_kernel,
        flops=_no_flops,
        source=True,
        files=("path",),
        doc="`batch` sequences of `length` tokens from random places of a memory-mapped file, "
        "moved on by `shift` (0: the tokens, 1: their successors), as int64.",
    )
)


# --- constant -------------------------------------------------------------------------------------


def _constant_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_inputs("constant", inputs, 0)
    only_attrs("constant", attrs, "shape", "dtype", "values")
    shape, values = shape_attr(attrs), floats_attr(attrs, "values")
    if len(values) != prod(shape):
        raise AttributeValueError(
            "a constant needs one value per element", got=len(values), expected=prod(shape)
        )
    return (TensorType(shape, dtype_attr(attrs)),)


def _constant_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    region = context.output_regions[0]

    def found() -> Array:
        dtype = dtype_attr(context.attrs).numpy
        whole = np.array(context.attrs["values"], dtype).reshape(context.output_shapes[0])
        return whole[region_index(region)].reshape(region_shape(region))

    np.copyto(outputs[0], of_box(context, "found", region, found))


register(
    OpDef(
        "constant",
        infer=_constant_infer,
        rule="-> ...",
        kernel=_constant_kernel,
        flops=_no_flops,
        doc="A small tensor whose elements are written in the job.",
    )
)
