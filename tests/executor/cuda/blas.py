"""cuBLAS's product of stacks on memory of the host, as its documentation defines it: by columns."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np

from plancompiler.ir import DType

OP_N, OP_T = 0, 1
COMPUTE_32F, COMPUTE_64F, COMPUTE_32F_FAST_TF32 = 68, 70, 77
TYPES = {
    2: np.dtype(np.float16),
    14: DType.BFLOAT16.numpy,
    0: np.dtype(np.float32),
    1: np.dtype(np.float64),
}


def stack(address, dtype, rows, columns, leading, apart, count):
    """Column-major matrices in memory, as a view [count, rows, columns]."""
    assert leading >= max(1, rows)
    assert count == 1 or apart > 0
    size = dtype.itemsize
    reach = (count - 1) * apart + (columns - 1) * leading + rows
    memory = (ctypes.c_uint8 * (reach * size)).from_address(address)
    return np.ndarray(
        (count, rows, columns), dtype, memory, 0, (apart * size, size, leading * size)
    )


class HostCuda:
    """`cupy.cuda`, as far as products need it."""

    def __init__(self):
        self.calls = []
        self.runtime = SimpleNamespace(CUDA_R_16F=2, CUDA_R_16BF=14, CUDA_R_32F=0, CUDA_R_64F=1)
        self.cublas = SimpleNamespace(
            CUBLAS_OP_N=OP_N,
            CUBLAS_OP_T=OP_T,
            CUBLAS_COMPUTE_32F=COMPUTE_32F,
            CUBLAS_COMPUTE_64F=COMPUTE_64F,
            CUBLAS_COMPUTE_32F_FAST_TF32=COMPUTE_32F_FAST_TF32,
            CUBLAS_GEMM_DEFAULT=-1,
            gemmEx=self._single,
            gemmStridedBatchedEx=self._gemm,
        )

    def get_cublas_handle(self):
        return 7

    def _single(self, *given):
        """One product: that of a stack, without distances and a count."""
        *first, beta, c, c_type, ldc, compute, algo = given
        handle, transa, transb, m, n, k, alpha, a, a_type, lda, b, b_type, ldb = first
        self._gemm(
            *(handle, transa, transb, m, n, k, alpha, a, a_type, lda, 0, b, b_type, ldb, 0),
            *(beta, c, c_type, ldc, 0, 1, compute, algo),
        )

    def _gemm(
        self,
        handle,
        transa,
        transb,
        m,
        n,
        k,
        alpha,
        a,
        a_type,
        lda,
        stride_a,
        b,
        b_type,
        ldb,
        stride_b,
        beta,
        c,
        c_type,
        ldc,
        stride_c,
        count,
        compute,
        algo,
    ):
        assert (handle, algo) == (7, -1)
        self.calls.append((str(TYPES[c_type]), compute))
        wide = np.dtype(np.float64 if compute == COMPUTE_64F else np.float32)
        one, zero = (
            np.ndarray((), wide, (ctypes.c_uint8 * wide.itemsize).from_address(each))
            for each in (alpha, beta)
        )
        assert (one, zero) == (1, 0)
        shapes = [(k, m) if transa else (m, k), (n, k) if transb else (k, n)]
        left = stack(a, TYPES[a_type], *shapes[0], lda, stride_a, count).astype(wide)
        right = stack(b, TYPES[b_type], *shapes[1], ldb, stride_b, count).astype(wide)
        if transa:
            left = left.swapaxes(1, 2)
        if transb:
            right = right.swapaxes(1, 2)
        target = stack(c, TYPES[c_type], m, n, ldc, stride_c, count)
        target[...] = np.matmul(left, right).astype(target.dtype)
