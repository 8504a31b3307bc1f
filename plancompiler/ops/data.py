"""Ops that bring data into a job: batches of arrays, batches of token sequences, small constants.

Which rows a batch holds is a pure function of the job's seed, the op's own seed, the step and the
row's global position in the batch. So every rank reads only its own rows, all layouts see the same
data, and two ops with one seed (images and their labels) agree.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

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
)
from plancompiler.ops.kernel import of_box
from plancompiler.ops.registry import Array, AttrMap, KernelContext, OpDef, Types, register

Indices = np.ndarray[Any, np.dtype[np.int64]]


def _no_flops(inputs: Types, outputs: Types, attrs: AttrMap) -> int:
    return 0


# --- arrays_batch ---------------------------------------------------------------------------------


def read_array(path: str, key: str) -> Array:
    """One array of an npz file, read-only; ranks that are threads of a process share it."""
    try:
        status = Path(path).stat()
    except OSError as error:
        raise DataError(
            "a data file cannot be read",
            got=f"{path} ({error.strerror})",
            hint="the file must be there under this path on every machine that runs the job",
        ) from None
    return _read_version(path, key, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=16)
def _read_version(path: str, key: str, modified: int, size: int) -> Array:
    try:
        # Pickled objects stay refused: reading data must never run code.
        with Path(path).open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise DataError("a data file holds one array where several are expected", got=path)
            if key not in archive.files:
                raise DataError(
                    f"a data file has no array {key!r}",
                    got=f"{path} with {', '.join(archive.files) or 'no arrays'}",
                )
            array: Array = archive[key]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError("a data file is no readable npz archive", got=f"{path}: {error}") from None
    array.flags.writeable = False
    return array


def _arrays_infer(inputs: Types, attrs: AttrMap) -> Types:
    kind = "arrays_batch"
    expect_inputs(kind, inputs, 0)
    only_attrs(
        kind, attrs, "path", "key", "batch", "shape", "dtype", "start", "stop", "shuffle", "seed"
    )
    str_attr(attrs, "path")
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
    array = context.state.get("array")
    if array is None:
        path, key = str_attr(attrs, "path"), str_attr(attrs, "key")
        array = read_array(path, key)
        expected = TensorType(shape_attr(attrs), dtype_attr(attrs))
        if array.shape[1:] != expected.shape or array.dtype != expected.dtype.numpy:
            raise DataError(
                f"rows of {key!r} in a data file are not what the job says",
                got=f"{array.dtype}{list(array.shape[1:])} in {path}",
                expected=str(expected),
            )
        if len(array) < stop:
            raise DataError(
                f"array {key!r} of a data file is too short",
                got=f"{len(array)} rows in {path}",
                expected=f"at least {stop}",
            )
        context.state["array"] = array
    (low, high), *rest = context.output_regions[0]
    first = context.step * int_attr(attrs, "batch")
    rows = start + _row_order(context, first + low, first + high, stop - start)
    found = array if rows.size else array[:0]
    np.copyto(outputs[0], found[rows][(slice(None), *region_index(tuple(rest)))])


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
        doc="Rows start to stop of an array in an npz file, `batch` per step, epoch after epoch; "
        "shuffled anew each epoch on request.",
    )
)


# --- token_batch ----------------------------------------------------------------------------------


STORED_TOKENS = ("uint8", "uint16", "uint32", "int8", "int16", "int32", "int64")
"""What a file of tokens may hold; sequences are handed out as int64."""


def map_tokens(path: str, dtype: str, least: int) -> Array:
    """A file of tokens, memory-mapped read-only; a DataError if it holds fewer than `least`."""
    try:
        size = Path(path).stat().st_size
    except OSError as error:
        raise DataError(
            "a token file cannot be read",
            got=f"{path} ({error.strerror})",
            hint="the file must be there under this path on every machine that runs the job",
        ) from None
    itemsize = np.dtype(dtype).itemsize
    if size % itemsize or size // itemsize < least:
        raise DataError(
            "a token file is too short for a sequence, or no whole number of tokens",
            got=f"{size} bytes in {path}",
            expected=f"at least {least} tokens of {itemsize} bytes",
        )
    try:
        return np.asarray(np.memmap(path, dtype, mode="r"))
    except (OSError, ValueError) as error:
        raise DataError("a token file cannot be read", got=f"{path}: {error}") from None


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
    tokens = context.state.get("tokens")
    if tokens is None:
        tokens = map_tokens(str_attr(attrs, "path"), str_attr(attrs, "dtype"), length + 1)
        context.state["tokens"] = tokens
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
