"""Layer norms, sums over leading axes, and transposes of outer axes, in CUDA C++.

Rows are read as packs of 16 bytes and kept in registers, so that each element is read once; sums
are in float32, in one order, so that their bits are the same in each run.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from plancompiler.executor.cuda.kernels.launch import (
    C_TYPES,
    LARGEST_COUNT,
    Array,
    Arrays,
    all_contiguous,
    function_of,
    launch_of,
)
from plancompiler.ir import DType
from plancompiler.ops.kernel import scratch
from plancompiler.ops.registry import KernelContext

Launch = Callable[[], None]

PACK = 8
LANES = 32
WARPS = 4
"""Of a block, each with rows of its own."""
BLOCKS = 264
"""Of the sums over rows: two for each multiprocessor of a large device."""
WIDEST = 4
"""Packs of a row that a lane keeps in registers: wider rows are those of several warps, which then
are all of a block."""
MOST = 16
"""Of which there are no more."""
SUMMED = 8
"""Warps of a block that sums columns: each takes one row after another."""
PIECES = 264
"""Blocks that do."""

_FLOAT = np.dtype(np.float32)
_NARROW = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)

NORM_TEXT = """
__device__ inline float over_lanes(float x) {
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// The sum over the warps of a row, of which there are SPLIT.
__device__ inline float over_row(float x) {
  x = over_lanes(x);
#if SPLIT > 1
  __shared__ float parts[SPLIT];
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int warp = 0; warp < SPLIT; ++warp) x += parts[warp];
#endif
  return x;
}

// x [rows, WIDTH] -> y, and of each row its mean and one over its standard deviation.
extern "C" __global__ void __launch_bounds__(THREADS) layer_norm(
    const T* x, const T* gamma, const T* beta, T* y, float* mean, float* rstd, int rows,
    float eps) {
  const int lane = threadIdx.x % LANES;
  const int row = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
  if (row >= rows) return;
  const Pack<T, 8>* source = (const Pack<T, 8>*)(x + (long long)row * WIDTH);
  float kept[PACKS][8];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    if (i * LANES + lane < WIDTH / 8) {
      const Pack<T, 8> pack = source[i * LANES + lane];
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += kept[i][j] = (float)pack.v[j];
    }
  }
  const float average = over_row(sum) / WIDTH;
  float square = 0;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    if (i * LANES + lane < WIDTH / 8) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        kept[i][j] -= average;
        square += kept[i][j] * kept[i][j];
      }
    }
  }
  const float scale = 1.0f / sqrtf(over_row(square) / WIDTH + eps);
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    if (i * LANES + lane < WIDTH / 8) {
      const Pack<T, 8> by = ((const Pack<T, 8>*)gamma)[i * LANES + lane];
      const Pack<T, 8> more = ((const Pack<T, 8>*)beta)[i * LANES + lane];
      Pack<T, 8> out;
#pragma unroll
      for (int j = 0; j < 8; ++j)
        out.v[j] = (T)(kept[i][j] * scale * (float)by.v[j] + (float)more.v[j]);
      ((Pack<T, 8>*)(y + (long long)row * WIDTH))[i * LANES + lane] = out;
    }
  }
  if (lane == 0) {
    mean[row] = average;
    rstd[row] = scale;
  }
}

// dx, and per block the sums of dy * h and of dy in sums [blocks, 2, WIDTH].
extern "C" __global__ void __launch_bounds__(THREADS) layer_norm_grad(
    const T* x, const T* gamma, const float* mean, const float* rstd, const T* dy, T* dx,
    float* sums, int rows) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  float* shared = (float*)shared_memory;
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, warps = blockDim.x / LANES;
  float of_gamma[PACKS][8], of_beta[PACKS][8];
#pragma unroll
  for (int i = 0; i < PACKS; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) of_gamma[i][j] = of_beta[i][j] = 0;
  for (int row = blockIdx.x * warps + warp; row < rows; row += gridDim.x * warps) {
    const float average = mean[row], scale = rstd[row];
    float unit[PACKS][8], pulled[PACKS][8];
    float sum = 0, product = 0;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      if (i * LANES + lane < WIDTH / 8) {
        const Pack<T, 8> a = ((const Pack<T, 8>*)(x + (long long)row * WIDTH))[i * LANES + lane];
        const Pack<T, 8> b = ((const Pack<T, 8>*)(dy + (long long)row * WIDTH))[i * LANES + lane];
        const Pack<T, 8> c = ((const Pack<T, 8>*)gamma)[i * LANES + lane];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float h = ((float)a.v[j] - average) * scale, slope = (float)b.v[j];
          const float g = slope * (float)c.v[j];
          of_gamma[i][j] += slope * h;
          of_beta[i][j] += slope;
          unit[i][j] = h;
          pulled[i][j] = g;
          sum += g;
          product += g * h;
        }
      }
    }
    sum = over_row(sum) / WIDTH;
    product = over_row(product) / WIDTH;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      if (i * LANES + lane < WIDTH / 8) {
        Pack<T, 8> out;
#pragma unroll
        for (int j = 0; j < 8; ++j)
          out.v[j] = (T)((pulled[i][j] - sum - unit[i][j] * product) * scale);
        ((Pack<T, 8>*)(dx + (long long)row * WIDTH))[i * LANES + lane] = out;
      }
    }
  }
  for (int at = 0; at < 2; ++at) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i)
      if (i * LANES + lane < WIDTH / 8)
#pragma unroll
        for (int j = 0; j < 8; ++j)
          shared[warp * WIDTH + (i * LANES + lane) * 8 + j] = at ? of_beta[i][j] : of_gamma[i][j];
    __syncthreads();
    for (int column = threadIdx.x; column < WIDTH; column += blockDim.x) {
      float sum = 0;
      for (int other = 0; other < warps; ++other) sum += shared[other * WIDTH + column];
      sums[((long long)blockIdx.x * 2 + at) * WIDTH + column] = sum;
    }
    __syncthreads();
  }
}
"""
"""T is the type of elements, WIDTH the length of a row, SPLIT how many warps share it, LANES their
lanes, THREADS those of a block, PACKS how many packs a lane has."""

SUM_TEXT = """
// x [rows, width] -> sums [gridDim.y, width]; a block sums 256 columns of some rows.
extern "C" __global__ void column_sums(const T* x, float* sums, int rows, int width, int each) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  float* shared = (float*)shared_memory;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int column = (blockIdx.x * 32 + lane) * 8;
  const int end = min(rows, (int)(blockIdx.y + 1) * each);
  float total[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (column < width)
    for (int row = blockIdx.y * each + warp; row < end; row += warps) {
      const Pack<T, 8> pack = *(const Pack<T, 8>*)(x + (long long)row * width + column);
#pragma unroll
      for (int j = 0; j < 8; ++j) total[j] += (float)pack.v[j];
    }
#pragma unroll
  for (int j = 0; j < 8; ++j) shared[warp * 256 + lane * 8 + j] = total[j];
  __syncthreads();
  for (int at = threadIdx.x; at < 256; at += blockDim.x) {
    if (blockIdx.x * 256 + at < width) {
      float sum = 0;
      for (int other = 0; other < warps; ++other) sum += shared[other * 256 + at];
      sums[(long long)blockIdx.y * width + blockIdx.x * 256 + at] = sum;
    }
  }
}

// The second half: y[i] = sum over r of sums[r * apart + i]. A block has 32 columns.
extern "C" __global__ void add_up(
    const float* sums, U* y, int rows, int width, int apart) {
  __shared__ float shared[8][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = blockIdx.x * 32 + lane;
  float total = 0;
  if (column < width)
    for (int row = warp; row < rows; row += 8) total += sums[(long long)row * apart + column];
  shared[warp][lane] = total;
  __syncthreads();
  if (warp == 0 && column < width) {
    for (int other = 1; other < 8; ++other) total += shared[other][lane];
    y[column] = (U)total;
  }
}

// All numbers as one sum, by one block of 1024 threads.
extern "C" __global__ void total(const float* sums, U* y, int count) {
  __shared__ float shared[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float sum = 0;
  for (int at = threadIdx.x; at < count; at += 1024) sum += sums[at];
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane == 0) shared[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    sum = shared[lane];
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) y[0] = (U)sum;
  }
}
"""
"""T is the type of elements, U that of sums."""

TRANSPOSE_TEXT = """
// Packs of 16 bytes: y [a, b, c, packs] = x with the distances of its axes, in packs.
extern "C" __global__ void transpose(
    const uint4* x, uint4* y, unsigned int count, unsigned int b, unsigned int c,
    unsigned int packs, unsigned int at_a, unsigned int at_b, unsigned int at_c) {
  for (unsigned int i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += gridDim.x * blockDim.x) {
    unsigned int rest = i;
    const unsigned int pack = rest % packs; rest /= packs;
    const unsigned int third = rest % c; rest /= c;
    const unsigned int second = rest % b; rest /= b;
    y[i] = x[rest * at_a + second * at_b + third * at_c + pack];
  }
}
"""


def _type(array: Array) -> str | None:
    dtype = DType.parse(array.dtype)
    return C_TYPES[dtype] if dtype in _NARROW else None


def norm_text(kind: str, width: int) -> str:
    """The text of layer norms of rows of this type and width."""
    split = _split(width)
    packs = -(-width // (PACK * LANES * split))
    return (
        f"#define T {kind}\n#define WIDTH {width}\n#define SPLIT {split}\n"
        f"#define LANES {LANES * split}\n#define THREADS {LANES * _warps(width)}\n"
        f"#define PACKS {packs}\n" + NORM_TEXT
    )


def _split(width: int) -> int:
    """How many warps share a row of layer norms."""
    return -(-width // (WIDEST * PACK * LANES))


def _warps(width: int) -> int:
    """How many warps a block of layer norms has."""
    split = _split(width)
    return WARPS if split == 1 else split


def _suits(arrays: Arrays, width: int, wide: Arrays) -> str | None:
    """The type of rows that the kernels above take, whose statistics `wide` are float32."""
    kinds = {_type(each) for each in arrays}
    size = max(each.size for each in arrays)
    if len(kinds) > 1 or width % PACK or not 0 < size <= LARGEST_COUNT * PACK:
        return None
    if _split(width) > MOST or not all_contiguous(arrays):
        return None
    if any(each.dtype.name != "float32" or not each.flags.c_contiguous for each in wide):
        return None
    return kinds.pop()


def layer_norm(context: KernelContext, inputs: Arrays, outputs: Arrays) -> Launch | None:
    """A layer norm as one launch."""
    (x, gamma, beta), (y, mean, rstd) = inputs, outputs
    width = x.shape[-1]
    kind = _suits([x, gamma, beta, y], width, [mean, rstd])
    if kind is None or x.size // width > LARGEST_COUNT:
        return None
    rows, warps = x.size // width, _warps(width)
    beside = warps // _split(width)
    function = function_of(context.arrays, norm_text(kind, width), "layer_norm")
    return launch_of(
        context.arrays,
        function,
        (-(-rows // beside),),
        warps * LANES,
        [*inputs, *outputs, ctypes.c_int(rows), ctypes.c_float(context.attrs["eps"])],
    )


def layer_norm_grad(context: KernelContext, inputs: Arrays, outputs: Arrays) -> Launch | None:
    """Its gradient: one launch for rows, one that adds up what their blocks have summed."""
    (x, gamma, mean, rstd, dy), (dx, dgamma, dbeta) = inputs, outputs
    width = x.shape[-1]
    kind = _suits([x, gamma, dy, dx, dgamma, dbeta], width, [mean, rstd])
    if kind is None or x.size // width > LARGEST_COUNT:
        return None
    rows, arrays, warps = x.size // width, context.arrays, _warps(width)
    beside = warps // _split(width)
    blocks = min(BLOCKS, -(-rows // beside))
    sums = scratch(context, "sums", (blocks, 2, width), _FLOAT)
    shared = beside * width * 4
    function = function_of(arrays, norm_text(kind, width), "layer_norm_grad", shared)
    first = launch_of(
        arrays,
        function,
        (blocks,),
        warps * LANES,
        [x, gamma, mean, rstd, dy, dx, sums, ctypes.c_int(rows)],
        shared,
    )
    second = _adding(arrays, kind, sums, dgamma, blocks, width, 2 * width)
    third = _adding(arrays, kind, sums[:, 1], dbeta, blocks, width, 2 * width)

    def run(_kept: Array = sums) -> None:
        first()
        second()
        third()

    return run


def sum_text(kind: str) -> str:
    """The text of sums of this type."""
    return f"#define T {kind}\n#define U {kind}\n" + SUM_TEXT


def _adding(
    arrays: Any, kind: str, sums: Array, target: Array, rows: int, width: int, apart: int
) -> Launch:
    numbers = [ctypes.c_int(each) for each in (rows, width, apart)]
    function = function_of(arrays, sum_text(kind), "add_up")
    return launch_of(arrays, function, (-(-width // LANES),), 8 * LANES, [sums, target, *numbers])


def leading_sum(context: KernelContext, inputs: Arrays, outputs: Arrays) -> Launch | None:
    """A sum over the leading axes, or over all, as one launch for pieces of rows and one that adds
    those up.
    """
    (x,), (out,) = inputs, outputs
    axes = sorted(context.attrs["axes"])
    if axes != list(range(len(axes))) or not axes or x.size == 0:
        return None
    rows, width = math.prod(x.shape[: len(axes)]), math.prod(x.shape[len(axes) :])
    whole = width == 1
    if whole:
        width = LANES * PACK
        rows = x.size // width
    kind = _type(x)
    if kind is None or width % PACK or x.size != rows * width or out.dtype != x.dtype:
        return None
    if max(rows, width) > LARGEST_COUNT // 2 or not all_contiguous([x]) or not rows:
        return None
    if not out.flags.c_contiguous:
        return None
    arrays, text = context.arrays, sum_text(kind)
    beside = -(-width // (LANES * PACK))
    each = max(SUMMED, -(-rows // max(1, PIECES // beside)))
    pieces = -(-rows // each)
    sums = scratch(context, "sums", (pieces, width), _FLOAT)
    first = launch_of(
        arrays,
        function_of(arrays, text, "column_sums"),
        (beside, pieces),
        SUMMED * LANES,
        [x, sums, *map(ctypes.c_int, (rows, width, each))],
        SUMMED * LANES * PACK * 4,
    )
    if whole:
        function = function_of(arrays, text, "total")
        second = launch_of(arrays, function, (1,), 1024, [sums, out, ctypes.c_int(sums.size)])
    else:
        second = _adding(arrays, kind, sums, out, pieces, width, width)

    def run(_kept: Array = sums) -> None:
        first()
        second()

    return run


def transpose(context: KernelContext, inputs: Arrays, outputs: Arrays) -> Launch | None:
    """A transpose of the axes before the last as a copy of packs."""
    (x,), (y,) = inputs, outputs
    axes = tuple(context.attrs["axes"])
    last = x.ndim - 1
    if not 3 <= x.ndim <= 4 or axes[-1] != last or x.size == 0:
        return None
    nbytes = x.shape[-1] * x.itemsize
    if nbytes % 16 or x.nbytes // 16 > LARGEST_COUNT or not all_contiguous([x, y]):
        return None
    if x.dtype != y.dtype:
        return None
    packs = nbytes // 16
    apart = [x.strides[axis] // 16 for axis in axes[:-1]]
    extents = [x.shape[axis] for axis in axes[:-1]]
    if len(extents) == 2:
        apart, extents = [0, *apart], [1, *extents]
    count = x.nbytes // 16
    numbers = [count, *extents[1:], packs, *apart]
    arrays = context.arrays
    return launch_of(
        arrays,
        function_of(arrays, TRANSPOSE_TEXT, "transpose"),
        (min(-(-count // 256), 132 * 16),),
        256,
        [x, y, *map(ctypes.c_uint32, numbers)],
    )
