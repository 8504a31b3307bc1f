"""Ops that bring data into a job: batches of arrays, batches of token sequences, constants.

Which rows a batch holds is a pure function of the job's seed, the op's own seed, the step and the
row's global position in the batch. So every rank reads only its own rows, all layouts see the same
data, and two ops with one seed (images and their labels) agree.
"""

from __future__ import annotations

from math import prod

import numpy as np

from plancompiler.errors import AttributeValueError, DataError
from plancompiler.ir.op import TensorType
from plancompiler.ir.shard import region_index, region_shape
from plancompiler.ops import random
from plancompiler.ops.attributes import Bool, Dtype, Floats, Int, Shape, Text, Texts
from plancompiler.ops.kernel import of_box
from plancompiler.ops.registry import Array, Arrays, AttrMap, KernelContext, Types, define_op
from plancompiler.ops.stored import (
    Indices,
    StoredRows,
    mapped_tokens,
    stored_array,
    stored_tensor,
)

# --- arrays_batch ---------------------------------------------------------------------------------


def _arrays_infer(inputs: Types, attrs: AttrMap) -> Types:
    start, stop = attrs["start"], attrs["stop"]
    if stop <= start:
        raise AttributeValueError(
            "attribute 'stop' has a wrong value", got=stop, expected=f"at least {start + 1}"
        )
    return (TensorType((attrs["batch"], *attrs["shape"]), attrs["dtype"]),)


def _arrays_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    attrs = context.attrs
    start, stop = attrs["start"], attrs["stop"]
    stored = context.state.get("stored")
    if stored is None:
        stored = context.state["stored"] = _stored_rows(attrs, stop)
    (low, high), *rest = context.output_regions[0]
    first = context.step * attrs["batch"]
    rows = start + _row_order(context, first + low, first + high, stop - start)
    stored.read(rows, region_index(tuple(rest)), outputs[0], context.arrays)


def _stored_rows(attrs: AttrMap, stop: int) -> StoredRows:
    """The files' rows, which must be what the job was told."""
    key, expected = attrs["key"], TensorType(attrs["shape"], attrs["dtype"])
    paths = attrs["paths"]
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
    positions: Indices = context.arrays.arange(first, last, dtype=np.int64)
    epochs, rows = np.divmod(positions, count)
    if context.attrs["shuffle"]:
        orders: dict[int, Indices] = context.state.setdefault("orders", {})
        for epoch in range(first // count, -(-last // count)):
            if epoch not in orders:
                orders.clear()  # one at a time: they are as long as the data
                key = f"rows {context.attrs['seed']} epoch {epoch}"
                orders[epoch] = random.permutation(context.seed, key, count, context.arrays)
            inside = epochs == epoch
            rows[inside] = orders[epoch][rows[inside]]
    return rows


define_op(
    "arrays_batch",
    infer=_arrays_infer,
    rule="-> ...",
    attrs=(
        Texts("paths", least=1),
        Text("key"),
        Int("batch", least=1),
        Shape(),
        Dtype("dtype"),
        Int("start", least=0),
        Int("stop", least=1),
        Bool("shuffle"),
        Int("seed", least=0),
    ),
    kernel=_arrays_kernel,
    flops=0,
    source=True,
    files=("paths",),
    portable=False,
    doc="Rows start to stop of an array in npz files, one file after another, `batch` per "
    "step, epoch after epoch; shuffled anew each epoch on request.",
)


# --- token_batch ----------------------------------------------------------------------------------


STORED_TOKENS = ("uint8", "uint16", "uint32", "int8", "int16", "int32", "int64")
"""What a file of tokens may hold; sequences are handed out as int64."""


def _tokens_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    attrs = context.attrs
    length = attrs["length"]
    if "tokens" not in context.state:
        path, dtype = attrs["path"], attrs["dtype"]
        context.state["tokens"] = mapped_tokens(path, dtype, length + 1)
    file, tokens = context.state["tokens"]
    file.check()
    (low, high), (left, right) = context.output_regions[0]
    first = context.step * attrs["batch"]
    # One random word per sequence, by its position among all sequences of the run.
    start = random.stream(context.seed, f"tokens {attrs['seed']}")
    words = random.words(start, (first + high,), ((first + low, first + high),), context.arrays)
    begins = (words % np.uint64(len(tokens) - length)).tolist()
    shift = attrs["shift"]
    for row, begin in zip(outputs[0], begins, strict=True):
        np.copyto(row, tokens[begin + shift + left : begin + shift + right], casting="unsafe")


define_op(
    "token_batch",
    infer="-> tokens int64 batch length",
    rule="-> ...",
    attrs=(
        Text("path"),
        Text("dtype", among=STORED_TOKENS),
        Int("batch", least=1),
        Int("length", least=1),
        Int("shift", least=0),
        Int("seed", least=0),
    ),
    kernel=_tokens_kernel,
    flops=0,
    source=True,
    files=("path",),
    portable=False,
    doc="`batch` sequences of `length` tokens from random places of a memory-mapped file, "
    "moved on by `shift` (0: the tokens, 1: their successors), as int64.",
)


# --- constant -------------------------------------------------------------------------------------


def _constant_infer(inputs: Types, attrs: AttrMap) -> Types:
    shape, values = attrs["shape"], attrs["values"]
    if len(values) != prod(shape):
        raise AttributeValueError(
            "a constant needs one value per element", got=len(values), expected=prod(shape)
        )
    return (TensorType(shape, attrs["dtype"]),)


def _constant_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    region = context.output_regions[0]

    def read_box() -> Array:
        dtype = context.attrs["dtype"].numpy
        whole = context.arrays.array(context.attrs["values"], dtype).reshape(
            context.output_shapes[0]
        )
        box: Array = whole[region_index(region)].reshape(region_shape(region))
        return box

    np.copyto(outputs[0], of_box(context, "box", region, read_box))


define_op(
    "constant",
    infer=_constant_infer,
    rule="-> ...",
    attrs=(
        Shape(),
        Dtype("dtype"),
        Floats("values"),
    ),
    kernel=_constant_kernel,
    flops=0,
    doc="A small tensor whose elements are written in the job.",
)


def _stored_constant_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    attrs, region = context.attrs, context.output_regions[0]

    def read_box() -> Array:
        whole = stored_tensor(attrs["file"], attrs["key"])
        expected = TensorType(attrs["shape"], attrs["dtype"])
        if whole.shape != expected.shape or whole.dtype != expected.dtype.numpy:
            raise DataError(
                "a stored constant is not what the job says",
                got=f"{whole.dtype}{list(whole.shape)} in {attrs['file']}",
                expected=str(expected),
            )
        box: Array = context.arrays.ascontiguousarray(whole[region_index(region)])
        return box.reshape(region_shape(region))

    np.copyto(outputs[0], of_box(context, "box", region, read_box))


define_op(
    "stored_constant",
    infer="-> x dtype shape",
    rule="-> ...",
    inputs=0,
    attrs=(
        Shape(),
        Dtype("dtype"),
        Text("file"),
        Text("key"),
    ),
    kernel=_stored_constant_kernel,
    flops=0,
    files=("file",),
    doc="A tensor whose elements lie in a safetensors file, of which each device reads its part "
    "once.",
)
