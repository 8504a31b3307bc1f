"""What kernels share: work buffers that outlive a call, and pieces that fit in cache.

A chain of ufuncs over large arrays is bound by memory: every step reads and writes all of it. The
kernels here run such chains piece by piece instead, with `out=`, so that only the first read and
the last write leave the cache. On arrays of devices they run whole: there every call is a launch,
and no cache is worth one.

A kernel that makes arrays makes them with `context.arrays`, the namespace of what it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from plancompiler.ir.dtype import DType
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    Kernel,
    KernelContext,
    OpDef,
)

T = TypeVar("T")

Direct = Callable[..., Array]
"""A kernel as one function of its input arrays that makes its only output, in C order."""
DirectForm = Callable[[KernelContext, Sequence[np.dtype[Any]]], Direct | None]
"""That of a kernel for a context and the dtypes of inputs and output; None where it has none."""

_DIRECT_FORMS: dict[Kernel, DirectForm] = {}

BLOCK_BYTES = 1 << 18
"""Bytes of one array's piece: smaller ones lose to the cost of calls, larger ones to memory."""


def scratch(
    context: KernelContext, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Array:
    """An uninitialised work buffer of this shape; the next call, of this or another kernel with the
    same `work`, may be given the same memory.
    """
    size = math.prod(shape)
    key = name, dtype
    buffer = context.work.get(key)
    if buffer is None or buffer.size < size:
        buffer = context.work[key] = None  # so that both are never held
        buffer = context.work[key] = context.arrays.empty(size, dtype)
    view: Array = buffer[:size].reshape(shape)
    return view


def scratches(
    context: KernelContext, shape: tuple[int, ...], dtypes: tuple[np.dtype[Any], ...]
) -> Sequence[Array]:
    """Work buffers of this shape and these dtypes, as `scratch`; no others share their memory."""
    key = shape, dtypes
    buffers: Sequence[Array] | None = context.work.get(key)
    if buffers is None:
        buffers = context.work[key] = [context.arrays.empty(shape, dtype) for dtype in dtypes]
    return buffers


def is_numpy(arrays: Any) -> bool:
    """Whether a namespace of arrays is NumPy's, or stands for it."""
    return arrays is np or stands_in(arrays)


def stands_in(array: Any) -> bool:
    """Whether an array, or a namespace, only stands for one of NumPy: a kernel is run dry, to see
    what memory it takes.
    """
    return type(array) is not np.ndarray and getattr(array, "stands_for", None) is np


def piece_starts(array: Any, size: int, step: int) -> Sequence[int]:
    """Where pieces of an axis begin that are treated alike; in a dry run two of them and the last,
    which may be shorter.
    """
    starts = range(0, size, step)
    return (*starts[:2], *starts[-1:]) if len(starts) > 3 and stands_in(array) else starts


def once(context: KernelContext, name: str, make: Callable[[AttrMap], T]) -> T:
    """What a kernel reads off its attributes the first time, and keeps in the context."""
    made: T | None = context.state.get(name)
    if made is None:
        made = context.state[name] = make(context.attrs)
    return made


def of_box(context: KernelContext, name: str, box: Hashable, make: Callable[[], T]) -> T:
    """What a kernel makes once for a box of the global tensor and keeps in the context.

    Each micro-batch of a step has boxes of its own.
    """
    known: dict[Hashable, T] = context.state.setdefault(name, {})
    if box not in known:
        known[box] = make()
    return known[box]


def blocks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Flat pieces of arrays of one shape, cut at the same elements.

    Arrays that are not all contiguous come whole, in one piece; so do those of devices.
    """
    size = arrays[0].size
    if size <= BLOCK_BYTES // 8:  # small, whatever the dtype
        yield arrays
        return
    step = max(1, BLOCK_BYTES // max(array.itemsize for array in arrays))
    on_host = isinstance(arrays[0], np.ndarray)
    if size <= step or not on_host or not all(array.flags.c_contiguous for array in arrays):
        yield arrays
        return
    flat = [array.reshape(-1) for array in arrays]
    for start in piece_starts(flat[0], size, step):
        yield tuple(array[start : start + step] for array in flat)


def row_blocks(width: int, *arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Pieces of whole rows of 2-D arrays with one number of rows; `width` is that of the widest."""
    rows = arrays[0].shape[0]
    step = max(1, BLOCK_BYTES // max(1, width * arrays[0].itemsize))
    if not isinstance(arrays[0], np.ndarray):
        step = max(1, rows)
    for start in piece_starts(arrays[0], rows, step):
        yield tuple(array[start : start + step] for array in arrays)


def rows_of(array: Array) -> Array:
    """A contiguous array as `[rows, last axis]`, sharing its memory."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def copy_unless_shared(source: Array, target: Array) -> None:
    """Copy, unless both are the same memory already (a view that the memory planner made)."""
    if not np.may_share_memory(source, target):
        np.copyto(target, source)


_WHOLE: dict[int, np.dtype[Any]] = {
    2: np.dtype(np.int16),
    4: np.dtype(np.int32),
    8: np.dtype(np.int64),
}


def on_host(context: KernelContext, array: Array) -> Array:
    """A small array as one of the host, which has to wait where a device has it."""
    copied: Array = array if is_numpy(context.arrays) else context.arrays.asnumpy(array)
    return copied


def keep_where(x: Array, mask: Array, out: Array) -> None:
    """x where the mask is true, else 0, whatever x is there; arrays of floating numbers.

    Bits are multiplied, as whole numbers: infinities and NaN times 0 would be NaN.
    """
    whole = _WHOLE[x.dtype.itemsize]
    np.multiply(x.view(whole), mask, out=out.view(whole))


def contiguous(kernel: Kernel) -> Kernel:
    """The kernel, with arrays of other layouts copied: what it reshapes then shares its memory."""

    def packed(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        if all(array.flags.c_contiguous for array in (*inputs, *outputs)):
            kernel(context, inputs, outputs)
            return
        results = [context.arrays.empty(array.shape, array.dtype) for array in outputs]
        kernel(context, [array.copy() for array in inputs], results)
        for source, target in zip(results, outputs, strict=True):
            np.copyto(target, source)

    return packed


def in_float32(kernel: Kernel) -> Kernel:
    """The kernel, computing float16 in float32: NumPy's float16 is slow, and its sums are poor."""
    wide = _through_float32(kernel, np.dtype(np.float16))
    form = _DIRECT_FORMS.get(kernel)

    def widened(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        if any(array.dtype == np.float16 for array in (*inputs, *outputs)):
            wide(context, inputs, outputs)
        else:
            kernel(context, inputs, outputs)

    return widened if form is None else with_direct(form)(widened)


UfuncCall = tuple[np.ufunc, tuple[object | None, ...]]
"""A NumPy function and its arguments before `out`: a number, or None for the next tensor."""

_UFUNC_CALLS: dict[Kernel, Callable[[AttrMap], UfuncCall]] = {}


def with_ufunc_call(form: Callable[[AttrMap], UfuncCall]) -> Callable[[Kernel], Kernel]:
    """Say that a kernel is one call of a NumPy function."""

    def given(kernel: Kernel) -> Kernel:
        _UFUNC_CALLS[kernel] = form
        return kernel

    return given


def ufunc_call(kernel: Kernel, attrs: AttrMap) -> UfuncCall | None:
    """The call of a NumPy function that a kernel is with these attributes; None for others."""
    form = _UFUNC_CALLS.get(kernel)
    return None if form is None else form(attrs)


def with_direct(form: DirectForm) -> Callable[[Kernel], Kernel]:
    """Give a kernel a direct form: with small arrays, making the output and naming it with `out=`
    takes longer than all the work.
    """

    def given(kernel: Kernel) -> Kernel:
        _DIRECT_FORMS[kernel] = form
        return kernel

    return given


def direct_kernel(
    kernel: Kernel, context: KernelContext, dtypes: Sequence[np.dtype[Any]], shape: tuple[int, ...]
) -> Direct | None:
    """The direct form of a kernel, if there is one for a context and the dtypes of its inputs and
    its output; `shape` is that of the output on this rank.
    """
    form = _DIRECT_FORMS.get(kernel)
    # Of 0-d arrays NumPy makes numbers, and halves are computed in float32.
    if form is None or not shape or any(dtype.itemsize == 2 for dtype in dtypes):
        return None
    return form(context, dtypes)


def kernel_for(definition: OpDef, dtypes: Iterable[np.dtype[Any]]) -> Kernel:
    """An op's kernel for arrays of these dtypes.

    The arithmetic of bfloat16 is that of float32, rounded once at the end: what `ml_dtypes` has for
    its dtype is slower, incomplete, and sums in 8 bits.
    """
    native = definition.takes_bfloat16 or definition.moves or definition.view
    if native or not any(
        dtype.itemsize == 2 and dtype.name == str(DType.BFLOAT16) for dtype in dtypes
    ):
        return definition.kernel
    return _through_float32(definition.kernel, DType.BFLOAT16.numpy)


def _through_float32(kernel: Kernel, narrow: np.dtype[Any]) -> Kernel:
    """The kernel, given float32 in place of a narrower dtype."""

    def wide_of(array: Array) -> np.dtype[Any]:
        return np.dtype(np.float32) if array.dtype == narrow else array.dtype

    def widened(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        wide = [context.arrays.empty(array.shape, wide_of(array)) for array in outputs]
        kernel(context, [array.astype(wide_of(array), copy=False) for array in inputs], wide)
        for source, target in zip(wide, outputs, strict=True):
            np.copyto(target, source, casting="same_kind")

    return widened
