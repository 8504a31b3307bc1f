"""Kernels that put, add and count elements at indices on devices.

Devices add, and find extremes, in memory that many threads write to at once. CuPy does that for few
dtypes, and in any order, so that the last bits of sums may differ between runs. What this device
does not hold goes to one place more, behind all others: to leave it out, the host would have to
wait for how much that is. An index that is out of range makes everything NaN, where there is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from plancompiler.ops.indexing import PUTS
from plancompiler.ops.kernel import contiguous, in_float32
from plancompiler.ops.registry import Kernel, KernelContext

Array = Any
Arrays = Sequence[Array]

_SIGN = 1 << 63
_EXTREMES = {"max": np.maximum, "min": np.minimum}


def _scatter(ufunc: np.ufunc, target: Array, flat: Array, values: Array) -> None:
    """`ufunc.at` of a flat array: `add`, `maximum` or `minimum`."""
    dtype = target.dtype
    if dtype.kind == "f" or dtype == np.uint64:
        ufunc.at(target, flat, values)
    elif dtype.itemsize < 8:
        work = target.astype(np.int32 if dtype.kind == "i" else np.uint32)
        ufunc.at(work, flat, values.astype(work.dtype))
        np.copyto(target, work, casting="unsafe")
    else:
        # Sums wrap around alike; extremes are in order once the sign is turned.
        turned = np.uint64(0 if ufunc is np.add else _SIGN)
        work = target.view(np.uint64) ^ turned
        ufunc.at(work, flat, values.view(np.uint64) ^ turned)
        np.copyto(target, (work ^ turned).view(np.int64))


def _held(context: KernelContext, indices: Array, axis: int) -> tuple[Array, Array]:
    """Indices within this device's part of an axis of the output, as int64, and which are in it."""
    low, high = context.output_regions[0][axis]
    numbers = indices.astype(np.int64)
    return numbers - low, (numbers >= low) & (numbers < high)


def _flat_places(
    context: KernelContext, indices: Array, axis: int, shape: tuple[int, ...]
) -> Array:
    """Row-major positions in an array of `shape` of indices along an axis, in an array like them;
    its size for those that are not held here.
    """
    numbers, inside = _held(context, indices, axis)
    inner = math.prod(shape[axis + 1 :])
    outer = context.arrays.arange(math.prod(shape[:axis])) * (shape[axis] * inner)
    beside = context.arrays.arange(inner)
    rows = (outer.size, indices.shape[axis], inner)
    flat = numbers.reshape(rows) * inner + outer[:, None, None] + beside
    return np.where(inside.reshape(rows), flat, math.prod(shape)).reshape(-1)


def _spoil(context: KernelContext, indices: Array, axis: int, out: Array) -> None:
    """NaN everywhere where an index is out of range."""
    if out.dtype.kind == "f":
        extent = context.output_shapes[0][axis]
        np.copyto(out, math.nan, where=((indices < 0) | (indices >= extent)).any())


def _with_place(context: KernelContext, x: Array) -> Array:
    """The elements, flat, and a place behind them."""
    work = context.arrays.zeros(x.size + 1, x.dtype)
    np.copyto(work[:-1], x.reshape(-1))
    return work


def _last_of_equal(context: KernelContext, flat: Array, values: Array, size: int) -> Array:
    """The values, each the last of those that have its place: whoever writes last writes these."""
    number = context.arrays.arange(flat.size, dtype=np.uint64)
    last = context.arrays.zeros(size, np.uint64)
    np.maximum.at(last, flat, number)
    return values[last[flat].view(np.int64)]


def _put_along_axis(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x, indices, updates), (out,) = inputs, outputs
    axis, mode = context.attrs["axis"], context.attrs["mode"]
    work, values = _with_place(context, x), updates.reshape(-1)
    flat = _flat_places(context, indices, axis, out.shape)
    if mode in PUTS:
        work[flat] = _last_of_equal(context, flat, values, work.size)
    elif mode == "add":
        _scatter(np.add, work, flat, values)
    elif mode == "mul":
        # No two updates of one place along the axis have the same place.
        by_place = flat.reshape(math.prod(x.shape[:axis]), indices.shape[axis], -1)
        factors = values.reshape(by_place.shape)
        for number in range(indices.shape[axis]):
            places = by_place[:, number]
            work[places] = work[places] * factors[:, number]
    else:
        _scatter(_EXTREMES[mode], work, flat, values)
        if out.dtype.kind == "f":
            # What is no number is neither greater nor less, and wins.
            broken = context.arrays.zeros(work.size, np.uint32)
            np.add.at(broken, flat, np.isnan(values).astype(np.uint32))
            before = np.isnan(_with_place(context, x))
            np.copyto(work, math.nan, where=(broken > 0) | before)
    np.copyto(out, work[:-1].reshape(out.shape))
    _spoil(context, indices, axis, out)


def _take_along_axis_grad(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (indices, dy), (out,) = inputs, outputs
    axis = context.attrs["axis"]
    work = context.arrays.zeros(out.size + 1, out.dtype)
    _scatter(np.add, work, _flat_places(context, indices, axis, out.shape), dy.reshape(-1))
    np.copyto(out, work[:-1].reshape(out.shape))
    _spoil(context, indices, axis, out)


def _index_select_grad(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (indices, dy), (out,) = inputs, outputs
    axis = context.attrs["axis"]
    along = [1] * dy.ndim
    along[axis] = indices.size
    every = np.broadcast_to(indices.reshape(tuple(along)), dy.shape)
    work = context.arrays.zeros(out.size + 1, out.dtype)
    _scatter(np.add, work, _flat_places(context, every, axis, out.shape), dy.reshape(-1))
    np.copyto(out, work[:-1].reshape(out.shape))
    _spoil(context, indices, axis, out)


def _bincount(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (ids,), (out,) = inputs, outputs
    numbers, inside = _held(context, ids.reshape(-1), 0)
    counts = context.arrays.zeros(out.size + 1, np.uint64)
    ones = context.arrays.ones(numbers.size, np.uint64)
    np.add.at(counts, np.where(inside, numbers, out.size), ones)
    np.copyto(out, counts[:-1].view(np.int64))


AT_INDICES_KERNELS: dict[str, Kernel] = {
    "bincount": contiguous(_bincount),
    "index_select_grad": in_float32(contiguous(_index_select_grad)),
    "put_along_axis": in_float32(contiguous(_put_along_axis)),
    "take_along_axis_grad": in_float32(contiguous(_take_along_axis_grad)),
}
"""By op kind, in place of the host's kernels."""
