"""Products of stacks of matrices, each as one call of cuBLAS.

CuPy's `matmul` hands two matrices to cuBLAS as they are. Stacks it does not: those of float16 it
multiplies as copies in float32, those of bfloat16 by no cuBLAS at all, and operands that are
transposed it copies (`cupy/_core/_routines_linalg.pyx`, version 14). `gemm_of` says how such a
product is one `cublasGemmStridedBatchedEx` on the operands where they lie: halves are multiplied by
tensor cores and added up in float32.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plancompiler.ops.kernel import rows_of
from plancompiler.ops.matmul import matmul_operands
from plancompiler.ops.registry import KernelContext

Array = Any

TF32_VARIABLE = "CUPY_TF32"
"""CuPy's own environment variable: 1 lets products of float32 run in TF32."""
_LARGEST = 2**31 - 1
"""cuBLAS counts rows, columns and matrices in 32 bits."""

_TYPES = {
    "float16": "CUDA_R_16F",
    "bfloat16": "CUDA_R_16BF",
    "float32": "CUDA_R_32F",
    "float64": "CUDA_R_64F",
}
"""By dtype the name of cuBLAS's number for it."""

# What cuBLAS multiplies by, read when the call is made: 1 and 0 in the type in which it adds up.
_ONE = {name: np.array(1, name) for name in ("float32", "float64")}
_ZERO = {name: np.array(0, name) for name in ("float32", "float64")}


@dataclass(frozen=True, slots=True)
class Matrices:
    """How a stack of matrices lies in memory; distances in elements."""

    transposed: bool
    """Whether columns lie one after another rather than rows."""
    leading: int
    """From a row, or column, to the next."""
    apart: int
    """From a matrix to the next."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """left @ right = out for stacks of `count` matrices [m, k] @ [k, n], as they lie in memory."""

    m: int
    n: int
    k: int
    count: int
    left: Matrices
    right: Matrices
    out: Matrices


def gemm_of(left: Array, right: Array, out: Array) -> Gemm | None:
    """The call for a product of stacks, or None where it takes more than one."""
    shapes = left.shape[:-2], right.shape[:-2], out.shape[:-2]
    if left.ndim < 3 or len(set(shapes)) > 1 or not out.size or not left.size:
        return None
    if left.dtype != out.dtype or right.dtype != out.dtype or out.dtype.name not in _TYPES:
        return None
    places = [_matrices(each) for each in (left, right, out)]
    m, n, k = out.shape[-2], out.shape[-1], left.shape[-1]
    count = math.prod(out.shape[:-2])
    numbers = [m, n, k, count, *(each.leading for each in places if each is not None)]
    if None in places or max(numbers) > _LARGEST:
        return None
    first, second, third = (each for each in places if each is not None)
    if third.transposed:
        return None
    return Gemm(m, n, k, count, first, second, third)


def _matrices(array: Array) -> Matrices | None:
    """How a stack lies, None where cuBLAS has no words for it."""
    size = array.itemsize
    if any(stride % size or stride < 0 for stride in array.strides):
        return None
    strides = [stride // size for stride in array.strides]
    rows, columns = array.shape[-2:]
    row, column = strides[-2:]
    if (column == 1 or columns == 1) and (row >= columns or rows == 1):
        transposed, leading = False, max(row, columns)
    elif (row == 1 or rows == 1) and (column >= rows or columns == 1):
        transposed, leading = True, max(column, rows)
    else:
        return None
    # Axes of the stack must follow one another with one distance throughout.
    apart, reach = 0, 0
    for extent, stride in zip(array.shape[-3::-1], strides[-3::-1], strict=True):
        if extent == 1:
            continue
        if reach == 0:
            apart, reach = stride, stride * extent
        elif stride == reach:
            reach = stride * extent
        else:
            return None
        if apart == 0:
            return None
    return Matrices(transposed, leading, apart)


def product(context: KernelContext, left: Array, right: Array, out: Array | None = None) -> Array:
    """left @ right, in the dtype of the two; into `out`, which shares no memory with them."""
    if out is None:
        out = context.arrays.empty((*left.shape[:-1], right.shape[-1]), left.dtype)
    cuda = getattr(context.arrays, "cuda", None)
    gemm = gemm_of(left, right, out) if cuda is not None else None
    if gemm is None:
        np.matmul(left, right, out=out)
    else:
        _call_of(cuda, gemm, left, right, out)()
    return out


def matrix_product(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> Callable[[], None] | None:
    """The op `matmul` as one prepared call, where it is one."""
    a, b, out = matmul_operands(context, inputs, outputs)
    return _prepared(context, a, b, out)


def contraction(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> Callable[[], None] | None:
    """The op `contract_leading` as one prepared call, where it is one."""
    a, b = inputs
    if not (a.flags.c_contiguous and b.flags.c_contiguous):
        return None
    return _prepared(context, rows_of(a).T, rows_of(b), outputs[0])


def _prepared(
    context: KernelContext, left: Array, right: Array, out: Array
) -> Callable[[], None] | None:
    if left.ndim == right.ndim == 2:
        left, right, out = left[None], right[None], out[None]
    gemm = gemm_of(left, right, out)
    return None if gemm is None else _call_of(context.arrays.cuda, gemm, left, right, out)


def _call_of(cuda: Any, gemm: Gemm, left: Array, right: Array, out: Array) -> Callable[[], None]:
    # cuBLAS stores by columns. What lies by rows is to it the transpose, so it is asked for
    # outᵀ = rightᵀ leftᵀ, in which the operands and m and n change places.
    cublas, name = cuda.cublas, out.dtype.name
    number = getattr(cuda.runtime, _TYPES[name])
    wide = "float64" if name == "float64" else "float32"
    if wide == "float64":
        compute = cublas.CUBLAS_COMPUTE_64F
    elif name == "float32" and os.environ.get(TF32_VARIABLE, "0") not in ("", "0"):
        compute = cublas.CUBLAS_COMPUTE_32F_FAST_TF32
    else:
        compute = cublas.CUBLAS_COMPUTE_32F
    operation = {False: cublas.CUBLAS_OP_N, True: cublas.CUBLAS_OP_T}
    one, zero = _ONE[wide].ctypes.data, _ZERO[wide].ctypes.data
    sizes = (
        operation[gemm.right.transposed],
        operation[gemm.left.transposed],
        gemm.n,
        gemm.m,
        gemm.k,
    )
    first, second, third = (
        (array.data.ptr, number, lies.leading)
        for array, lies in ((right, gemm.right), (left, gemm.left), (out, gemm.out))
    )
    last = compute, cublas.CUBLAS_GEMM_DEFAULT
    handle = cuda.get_cublas_handle
    if gemm.count == 1:
        call, alone = cublas.gemmEx, (*sizes, one, *first, *second, zero, *third, *last)
        return lambda: call(handle(), *alone)
    stacked = (
        *(*sizes, one, *first, gemm.right.apart, *second, gemm.left.apart),
        *(zero, *third, gemm.out.apart, gemm.count, *last),
    )
    many = cublas.gemmStridedBatchedEx
    return lambda: many(handle(), *stacked)
