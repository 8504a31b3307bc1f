"""Attention of halves on tensor cores, without scores in memory (T. Dao, 2023).

A block of four warps has 64 queries, or 64 keys, a warp 16 of them; it goes through the others
tile by tile, and the next tile is copied to shared memory while this one is computed. Scores, their
weights and the results stay in registers, sums are in float32. The gradients of keys and values,
and those of queries, are two kernels, which both compute the scores anew: so no two blocks add to
the same place, and the bits are the same in each run.

How a warp's threads share out matrices is that of `mma.m16n8k16` and `ldmatrix` (PTX ISA, "Warp
Level Matrix Multiply-Accumulate Instructions"). The functions in `TENSOR_CORES` are the only ones
that speak to them: the tests compile the text after it for the host, with others in their place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from plancompiler.executor.cuda.kernels.launch import (
    C_TYPES,
    Arrays,
    all_contiguous,
    function_of,
    launch_of,
)
from plancompiler.ir import DType
from plancompiler.ops.attention_blocks import is_in_blocks
from plancompiler.ops.attention_tiles import window_of
from plancompiler.ops.kernel import scratch
from plancompiler.ops.registry import KernelContext

Launch = Callable[[], None]

ROWS = 64
"""Queries, or keys, of a block."""
THREADS = 128
WIDEST = 128
"""Elements of a head: more do not fit into registers."""
LARGEST = 65535
"""Heads of all batches: they are the second axis of a grid."""
_CAPABILITY = 80
"""The first devices with these instructions."""

TENSOR_CORES = """
__device__ inline unsigned place_of(const void* shared) {
  return (unsigned)__cvta_generic_to_shared(shared);
}

// Four 8 x 8 matrices; each thread names a row of eight elements.
__device__ inline void load_matrices(unsigned (&r)[4], const T* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(place_of(row)) : "memory");
}

// The same, each matrix transposed.
__device__ inline void load_transposed(unsigned (&r)[4], const T* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(place_of(row)) : "memory");
}

// c [16, 8] += a [16, 16] b [16, 8]
__device__ inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b, unsigned d) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(d));
}

// 16 bytes to shared memory, beside what the thread does; zeros where there is nothing.
__device__ inline void copy_beside(T* shared, const T* source, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(place_of(shared)), "l"(source), "r"(there ? 16 : 0) : "memory");
}

__device__ inline void begin_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ inline void await_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

__device__ inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
"""

TEXT = """
#define STRIDE (D + 8)
#define LOG2E 1.4426950408889634f

__device__ inline unsigned pair_of(float low, float high) {
  union { T halves[2]; unsigned bits; } pair;
  pair.halves[0] = (T)low;
  pair.halves[1] = (T)high;
  return pair.bits;
}

__device__ inline unsigned pair_at(const T* place, bool there) {
  return there ? *(const unsigned*)place : 0u;
}

__device__ inline float low_of(unsigned bits) {
  union { unsigned bits; T halves[2]; } pair;
  pair.bits = bits;
  return (float)pair.halves[0];
}

__device__ inline float high_of(unsigned bits) {
  union { unsigned bits; T halves[2]; } pair;
  pair.bits = bits;
  return (float)pair.halves[1];
}

// Rows `first` and following of [rows, D] to a tile; zeros behind the last.
template <int COUNT>
__device__ inline void load_tile(T* tile, const T* source, int first, int rows) {
  for (int i = threadIdx.x; i < COUNT * (D / 8); i += 128) {
    const int row = i / (D / 8), pack = i % (D / 8);
    const bool there = first + row < rows;
    copy_beside(tile + row * STRIDE + pack * 8,
                source + (there ? (long long)(first + row) * D + pack * 8 : 0), there);
  }
}

// The rows of this warp as left operands.
__device__ inline void load_left(unsigned (&r)[4], const T* tile, int row, int column, int lane) {
  load_matrices(r, tile + (row + (lane & 15)) * STRIDE + column + (lane >> 4) * 8);
}

// Right operands: of the transpose of 16 rows of a tile, two blocks of eight columns.
__device__ inline void load_right(unsigned (&r)[4], const T* tile, int row, int column, int lane) {
  load_matrices(r, tile + (row + (lane & 7) + ((lane >> 4) << 3)) * STRIDE + column +
                       ((lane >> 3) & 1) * 8);
}

// Of 16 rows as they are, two blocks of eight columns.
__device__ inline void load_rows(unsigned (&r)[4], const T* tile, int row, int column, int lane) {
  load_transposed(r, tile + (row + (lane & 15)) * STRIDE + column + (lane >> 4) * 8);
}

// Scores of 16 columns as a left operand.
__device__ inline void left_of(unsigned (&r)[4], const float (&a)[4], const float (&b)[4]) {
  r[0] = pair_of(a[0], a[1]);
  r[1] = pair_of(a[2], a[3]);
  r[2] = pair_of(b[0], b[1]);
  r[3] = pair_of(b[2], b[3]);
}

// Query i sees the keys up to i + shift where CAUSAL. `scale` is that of scores.
extern "C" __global__ void __launch_bounds__(128) attention(
    const T* query, const T* key, const T* value, T* result, float* normaliser,
    int length, int keys, int group, int shift, float scale) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  T* tiles = (T*)shared_memory;  // keys and values, twice
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Blocks that see most keys come first.
  const int first = (gridDim.x - 1 - blockIdx.x) * 64;
  const long long head = blockIdx.y;
  query += head * length * D;
  result += head * length * D;
  normaliser += head * length;
  key += head / group * keys * D;
  value += head / group * keys * D;

  const int seen = CAUSAL ? min(keys, first + 64 + shift) : keys;
  const int count = (seen + 63) / 64;
  load_tile<64>(tiles, key, 0, keys);
  load_tile<64>(tiles + 64 * STRIDE, value, 0, keys);
  load_tile<64>(tiles + 128 * STRIDE, query, first, length);
  begin_copies();
  await_copies();
  __syncthreads();
  unsigned q[D / 16][4];
#pragma unroll
  for (int k = 0; k < D / 16; ++k) load_left(q[k], tiles + 128 * STRIDE, warp * 16, k * 16, lane);
  __syncthreads();

  float out[D / 8][4];
#pragma unroll
  for (int n = 0; n < D / 8; ++n) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0;
  float top[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
  const float factor = scale * LOG2E;
  const int row = first + warp * 16 + (lane >> 2);

  for (int tile = 0; tile < count; ++tile) {
    const T* own_keys = tiles + (tile & 1) * 128 * STRIDE;
    const T* own_values = own_keys + 64 * STRIDE;
    if (tile) {
      await_copies();
      __syncthreads();
    }
    if (tile + 1 < count) {
      T* next = tiles + ((tile + 1) & 1) * 128 * STRIDE;
      load_tile<64>(next, key, (tile + 1) * 64, keys);
      load_tile<64>(next + 64 * STRIDE, value, (tile + 1) * 64, keys);
      begin_copies();
    }
    float score[8][4];
#pragma unroll
    for (int n = 0; n < 8; ++n) score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0;
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        unsigned b[4];
        load_right(b, own_keys, n * 16, k * 16, lane);
        multiply(score[2 * n], q[k], b[0], b[1]);
        multiply(score[2 * n + 1], q[k], b[2], b[3]);
      }
    const int column = tile * 64 + (lane & 3) * 2;
    if (tile * 64 + 64 > keys || (CAUSAL && tile * 64 + 63 > first + warp * 16 + shift))
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int at = column + n * 8 + (e & 1);
          if (at >= keys || (CAUSAL && at > row + (e >> 1) * 8 + shift)) score[n][e] = -INFINITY;
        }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float high = top[half];
#pragma unroll
      for (int n = 0; n < 8; ++n)
        high = fmaxf(high, fmaxf(score[n][2 * half], score[n][2 * half + 1]));
      high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
      high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
      const float before = power_of_two((top[half] - high) * factor), level = high * factor;
      top[half] = high;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          score[n][e] = power_of_two(score[n][e] * factor - level);
          sum += score[n][e];
        }
      total[half] = total[half] * before + sum;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        out[n][2 * half] *= before;
        out[n][2 * half + 1] *= before;
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      unsigned weight[4];
      left_of(weight, score[2 * k], score[2 * k + 1]);
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        unsigned b[4];
        load_rows(b, own_values, k * 16, n * 16, lane);
        multiply(out[2 * n], weight, b[0], b[1]);
        multiply(out[2 * n + 1], weight, b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = total[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const int at = row + half * 8;
    if (at >= length) continue;
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      *(unsigned*)(result + (long long)at * D + n * 8 + (lane & 3) * 2) =
          pair_of(out[n][2 * half] / sum, out[n][2 * half + 1] / sum);
    if ((lane & 3) == 0) normaliser[at] = top[half] * scale + logf(sum);
  }
}

// The gradient of queries, and `pull`: of each query the sum of passed * result.
extern "C" __global__ void __launch_bounds__(128) query_gradient(
    const T* query, const T* key, const T* value, const T* result, const float* normaliser,
    const T* passed, T* gradient, float* pull, int length, int keys, int group, int shift,
    float scale) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  T* tiles = (T*)shared_memory;  // keys and values, twice
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = (gridDim.x - 1 - blockIdx.x) * 64;
  const long long head = blockIdx.y;
  query += head * length * D;
  result += head * length * D;
  passed += head * length * D;
  gradient += head * length * D;
  normaliser += head * length;
  pull += head * length;
  key += head / group * keys * D;
  value += head / group * keys * D;

  const int seen = CAUSAL ? min(keys, first + 64 + shift) : keys;
  const int count = (seen + 63) / 64;
  load_tile<64>(tiles, key, 0, keys);
  load_tile<64>(tiles + 64 * STRIDE, value, 0, keys);
  load_tile<64>(tiles + 128 * STRIDE, query, first, length);
  load_tile<64>(tiles + 192 * STRIDE, passed, first, length);
  begin_copies();
  const int row = first + warp * 16 + (lane >> 2);
  float level[2], slope[2];
  const float factor = scale * LOG2E;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = row + half * 8;
    level[half] = at < length ? normaliser[at] * LOG2E : INFINITY;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const long long place = (long long)at * D + n * 8 + (lane & 3) * 2;
      const unsigned a = pair_at(result + place, at < length);
      const unsigned b = pair_at(passed + place, at < length);
      sum += low_of(a) * low_of(b) + high_of(a) * high_of(b);
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    slope[half] = sum;
    if ((lane & 3) == 0 && at < length) pull[at] = sum;
  }
  await_copies();
  __syncthreads();
  unsigned q[D / 16][4], dy[D / 16][4];
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    load_left(q[k], tiles + 128 * STRIDE, warp * 16, k * 16, lane);
    load_left(dy[k], tiles + 192 * STRIDE, warp * 16, k * 16, lane);
  }
  __syncthreads();

  float out[D / 8][4];
#pragma unroll
  for (int n = 0; n < D / 8; ++n) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0;
  for (int tile = 0; tile < count; ++tile) {
    const T* own_keys = tiles + (tile & 1) * 128 * STRIDE;
    const T* own_values = own_keys + 64 * STRIDE;
    if (tile) {
      await_copies();
      __syncthreads();
    }
    if (tile + 1 < count) {
      T* next = tiles + ((tile + 1) & 1) * 128 * STRIDE;
      load_tile<64>(next, key, (tile + 1) * 64, keys);
      load_tile<64>(next + 64 * STRIDE, value, (tile + 1) * 64, keys);
      begin_copies();
    }
    const int column = tile * 64 + (lane & 3) * 2;
    const bool edge =
        tile * 64 + 64 > keys || (CAUSAL && tile * 64 + 63 > first + warp * 16 + shift);
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // 16 keys at a time: so few scores are alive at once
      float score[2][4], pushed[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) score[n][e] = pushed[n][e] = 0;
#pragma unroll
      for (int c = 0; c < D / 16; ++c) {
        unsigned b[4];
        load_right(b, own_keys, k * 16, c * 16, lane);
        multiply(score[0], q[c], b[0], b[1]);
        multiply(score[1], q[c], b[2], b[3]);
        load_right(b, own_values, k * 16, c * 16, lane);
        multiply(pushed[0], dy[c], b[0], b[1]);
        multiply(pushed[1], dy[c], b[2], b[3]);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int half = e >> 1, at = column + k * 16 + n * 8 + (e & 1);
          float weight = power_of_two(score[n][e] * factor - level[half]);
          if (edge && (at >= keys || (CAUSAL && at > row + half * 8 + shift))) weight = 0;
          score[n][e] = weight * (pushed[n][e] - slope[half]) * scale;
        }
      unsigned left[4];
      left_of(left, score[0], score[1]);
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        unsigned b[4];
        load_rows(b, own_keys, k * 16, n * 16, lane);
        multiply(out[2 * n], left, b[0], b[1]);
        multiply(out[2 * n + 1], left, b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = row + half * 8;
    if (at >= length) continue;
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      *(unsigned*)(gradient + (long long)at * D + n * 8 + (lane & 3) * 2) =
          pair_of(out[n][2 * half], out[n][2 * half + 1]);
  }
}

// The gradients of keys and values: a block has 64 keys, and goes through the queries of all heads
// that share them. Scores are transposed: rows are keys.
extern "C" __global__ void __launch_bounds__(128) key_gradient(
    const T* query, const T* key, const T* value, const float* normaliser, const float* pull,
    const T* passed, T* key_out, T* value_out, int length, int keys, int group, int shift,
    float scale) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  T* tiles = (T*)shared_memory;  // queries and what is passed to them, twice
  T* own = tiles + 4 * QUERIES * STRIDE;  // keys and values
  float* numbers = (float*)(own + 128 * STRIDE);  // levels and pulls of queries, twice
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = blockIdx.x * 64;
  const long long pair = blockIdx.y;
  key += pair * keys * D;
  value += pair * keys * D;
  key_out += pair * keys * D;
  value_out += pair * keys * D;
  query += pair * group * length * D;
  passed += pair * group * length * D;
  normaliser += pair * group * length;
  pull += pair * group * length;

  const int start = CAUSAL ? max(0, first - shift) / QUERIES : 0;
  const int each = max(0, (length + QUERIES - 1) / QUERIES - start);
  const int count = each * group;
  const float factor = scale * LOG2E;
  const int row = first + warp * 16 + (lane >> 2);

  auto begin = [&](int number) {
    const int head = number / each, at = (start + number % each) * QUERIES;
    T* next = tiles + (number & 1) * 2 * QUERIES * STRIDE;
    load_tile<QUERIES>(next, query + (long long)head * length * D, at, length);
    load_tile<QUERIES>(next + QUERIES * STRIDE, passed + (long long)head * length * D, at, length);
    begin_copies();
    float* into = numbers + (number & 1) * 2 * QUERIES;
    if (threadIdx.x < QUERIES) {
      const int place = at + threadIdx.x;
      into[threadIdx.x] =
          place < length ? normaliser[(long long)head * length + place] * LOG2E : INFINITY;
      into[QUERIES + threadIdx.x] = place < length ? pull[(long long)head * length + place] : 0.0f;
    }
  };

  load_tile<64>(own, key, first, keys);
  load_tile<64>(own + 64 * STRIDE, value, first, keys);
  if (count) begin(0); else begin_copies();
  await_copies();
  __syncthreads();
#if KEPT
  unsigned k_left[D / 16][4], v_left[D / 16][4];
#pragma unroll
  for (int c = 0; c < D / 16; ++c) {
    load_left(k_left[c], own, warp * 16, c * 16, lane);
    load_left(v_left[c], own + 64 * STRIDE, warp * 16, c * 16, lane);
  }
#endif
  float of_key[D / 8][4], of_value[D / 8][4];
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) of_key[n][e] = of_value[n][e] = 0;

  for (int number = 0; number < count; ++number) {
    if (number) {
      await_copies();
      __syncthreads();
    }
    if (number + 1 < count) begin(number + 1);
    const T* own_queries = tiles + (number & 1) * 2 * QUERIES * STRIDE;
    const T* own_passed = own_queries + QUERIES * STRIDE;
    const float* level = numbers + (number & 1) * 2 * QUERIES;
    const float* slope = level + QUERIES;
    const int at = (start + number % each) * QUERIES;
    const bool edge = CAUSAL && first + warp * 16 + 15 > at + shift;
#pragma unroll
    for (int k = 0; k < QUERIES / 16; ++k) {
      float score[2][4], pushed[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) score[n][e] = pushed[n][e] = 0;
#pragma unroll
      for (int c = 0; c < D / 16; ++c) {
#if !KEPT
        unsigned a[4], d[4];
        load_left(a, own, warp * 16, c * 16, lane);
        load_left(d, own + 64 * STRIDE, warp * 16, c * 16, lane);
#else
        const unsigned (&a)[4] = k_left[c];
        const unsigned (&d)[4] = v_left[c];
#endif
        unsigned b[4];
        load_right(b, own_queries, k * 16, c * 16, lane);
        multiply(score[0], a, b[0], b[1]);
        multiply(score[1], a, b[2], b[3]);
        load_right(b, own_passed, k * 16, c * 16, lane);
        multiply(pushed[0], d, b[0], b[1]);
        multiply(pushed[1], d, b[2], b[3]);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int column = k * 16 + n * 8 + (lane & 3) * 2 + (e & 1);
          float weight = power_of_two(score[n][e] * factor - level[column]);
          if (edge && row + (e >> 1) * 8 > at + column + shift) weight = 0;
          pushed[n][e] = weight * (pushed[n][e] - slope[column]) * scale;
          score[n][e] = weight;
        }
      unsigned weight[4], left[4];
      left_of(weight, score[0], score[1]);
      left_of(left, pushed[0], pushed[1]);
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        unsigned b[4];
        load_rows(b, own_passed, k * 16, n * 16, lane);
        multiply(of_value[2 * n], weight, b[0], b[1]);
        multiply(of_value[2 * n + 1], weight, b[2], b[3]);
        load_rows(b, own_queries, k * 16, n * 16, lane);
        multiply(of_key[2 * n], left, b[0], b[1]);
        multiply(of_key[2 * n + 1], left, b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int place = row + half * 8;
    if (place >= keys) continue;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const long long to = (long long)place * D + n * 8 + (lane & 3) * 2;
      *(unsigned*)(key_out + to) = pair_of(of_key[n][2 * half], of_key[n][2 * half + 1]);
      *(unsigned*)(value_out + to) = pair_of(of_value[n][2 * half], of_value[n][2 * half + 1]);
    }
  }
}
"""
"""T is the type of elements, D how many a head has, CAUSAL 0 or 1, QUERIES how many queries a block
of keys takes at a time, KEPT whether its keys and values stay in registers."""


def definitions(kind: str, width: int, causal: bool) -> str:
    """What the text above leaves open."""
    kept = width <= 64
    name = "bf16" if kind == C_TYPES[DType.BFLOAT16] else "f16"
    return (
        f'#define T {kind}\n#define KIND "{name}"\n#define D {width}\n'
        f"#define CAUSAL {int(causal)}\n#define QUERIES {64 if kept else 32}\n"
        f"#define KEPT {int(kept)}\n"
    )


def shared_bytes(width: int) -> tuple[int, int]:
    """Of a block with queries, and of one with keys."""
    row, queries = 2 * (width + 8), 64 if width <= 64 else 32
    return 4 * ROWS * row, (4 * queries + 2 * ROWS) * row + 16 * queries


class _Call:
    """A call that these kernels take."""

    def __init__(self, context: KernelContext, query: Any, key: Any, shift: int | None) -> None:
        self.arrays = context.arrays
        self.width = query.shape[3]
        heads, length = query.shape[0] * query.shape[1], query.shape[2]
        self.pairs, keys = key.shape[0] * key.shape[1], key.shape[2]
        self.heads, self.length, self.keys = heads, length, keys
        kind = C_TYPES[DType.parse(query.dtype)]
        self.text = definitions(kind, self.width, shift is not None) + TENSOR_CORES + TEXT
        self.numbers = [
            *map(ctypes.c_int, (length, keys, heads // self.pairs, shift or 0)),
            ctypes.c_float(context.attrs["scale"]),
        ]

    def launch(self, name: str, rows: int, heads: int, arguments: Arrays, shared: int) -> Launch:
        function = function_of(self.arrays, self.text, name, shared)
        grid = -(-rows // ROWS), heads
        return launch_of(self.arrays, function, grid, THREADS, [*arguments, *self.numbers], shared)


def _call_of(context: KernelContext, arrays: Arrays, others: Arrays) -> _Call | None:
    """The call, where `arrays` (first the query, the key and the value) are halves, whose heads
    suit tensor cores, and `others` float32.
    """
    query, key, value = arrays[:3]
    width = query.shape[3]
    if is_in_blocks(context) or context.attrs["dropout"]:
        return None
    if value.shape != key.shape or width % 16 or not 0 < width <= WIDEST:
        return None
    if {each.dtype.name for each in arrays} not in ({"float16"}, {"bfloat16"}):
        return None
    if {each.dtype.name for each in others} != {"float32"} or context.attrs["scale"] <= 0:
        return None
    if not all_contiguous([*arrays, *others]) or not query.size or not key.size:
        return None
    if query.shape[0] * query.shape[1] > LARGEST:
        return None
    shift = window_of(context).shift
    if shift is not None and shift < 0:
        return None
    if int(context.arrays.cuda.Device().compute_capability) < _CAPABILITY:
        return None
    return _Call(context, query, key, shift)


def attention(context: KernelContext, inputs: Arrays, outputs: Arrays) -> Launch | None:
    """Attention without a mask as one launch."""
    if len(inputs) != 3:
        return None
    call = _call_of(context, [*inputs, outputs[0]], [outputs[1]])
    if call is None:
        return None
    shared, _ = shared_bytes(call.width)
    return call.launch("attention", call.length, call.heads, [*inputs, *outputs], shared)


def attention_grad(context: KernelContext, inputs: Arrays, outputs: Arrays) -> Launch | None:
    """Its gradient as two launches."""
    if len(inputs) != 6:
        return None
    query, key, value, result, normaliser, passed = inputs
    call = _call_of(context, [query, key, value, result, passed, *outputs], [normaliser])
    if call is None:
        return None
    pull = scratch(context, "pull", normaliser.shape, np.dtype(np.float32))
    of_queries, of_keys = shared_bytes(call.width)
    dquery, dkey, dvalue = outputs
    first = call.launch(
        "query_gradient", call.length, call.heads, [*inputs, dquery, pull], of_queries
    )
    given = [query, key, value, normaliser, pull, passed, dkey, dvalue]
    second = call.launch("key_gradient", call.keys, call.pairs, given, of_keys)

    def run(_kept: Any = pull) -> None:
        first()
        second()

    return run
