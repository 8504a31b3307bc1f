"""Kernels of CUDA C++ compiled for the host: blocks run one after another, and the threads of one
as fibers, which go on to where they wait for each other. What warps do together is written out.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from types import SimpleNamespace

from plancompiler.executor.cuda.kernels.flash import TENSOR_CORES
from tests.executor.cuda.blas import HostCuda
from tests.executor.cuda.strict import StrictNamespace

COMPILER = shutil.which("g++") or shutil.which("clang++")

PRELUDE = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>
using namespace std;
#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(x)

template <int BITS> struct Half {  // of 16 bits, of which BITS are fraction
  uint16_t bits;
  Half() = default;
  Half(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if (BITS == 7) {
      bits = (u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
      return;
    }
    const uint16_t sign = (u >> 16) & 0x8000;
    const float a = fabsf(x);
    if (!(a < 65520.0f)) bits = sign | (a == a ? 0x7c00 : 0x7e00);
    else if (a < ldexpf(1, -14)) bits = sign | (uint16_t)nearbyintf(ldexpf(a, 24));
    else {
      int exponent;
      const float fraction = frexpf(a, &exponent);
      const int rounded = (int)nearbyintf(ldexpf(fraction, 11)) - 1024;
      bits = sign | (uint16_t)(((exponent + 14) << 10) + rounded);
    }
  }
  operator float() const {
    if (BITS == 7) {
      const uint32_t u = (uint32_t)bits << 16;
      float x;
      memcpy(&x, &u, 4);
      return x;
    }
    const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
    const float a = exponent == 31 ? (fraction ? NAN : INFINITY)
                    : exponent ? ldexpf(1024 + fraction, exponent - 25) : ldexpf(fraction, -24);
    return bits & 0x8000 ? -a : a;
  }
};
typedef Half<10> __half;
typedef Half<7> __nv_bfloat16;
struct uint4 { unsigned x, y, z, w; };

struct Index { unsigned x, y, z; };
static Index threadIdx, blockIdx, blockDim, gridDim;
static unsigned char* shared_memory;

struct Barrier { int count = 0, turn = 0; };
struct Fiber {
  ucontext_t context;
  vector<char> stack;
  bool done;
  vector<function<void()>> copies;
};
static vector<Fiber> fibers;
static vector<Barrier> of_warps;
static Barrier of_block;
static ucontext_t scheduler;
static function<void()>* body;
struct Slot { uint64_t words[8]; };
static vector<Slot> slots;

static void meet(Barrier& barrier, int members) {
  const int turn = barrier.turn;
  if (++barrier.count == members) { barrier.count = 0; ++barrier.turn; return; }
  while (barrier.turn == turn) swapcontext(&fibers[threadIdx.x].context, &scheduler);
}
static void meet_warp() { meet(of_warps[threadIdx.x / 32], 32); }
static void __syncthreads() { meet(of_block, blockDim.x); }

template <class V> static V __shfl_xor_sync(unsigned, V value, int step) {
  memcpy(slots[threadIdx.x].words, &value, sizeof value);
  meet_warp();
  V other;
  memcpy(&other, slots[threadIdx.x ^ step].words, sizeof value);
  meet_warp();
  return other;
}

static void enter() {
  (*body)();
  fibers[threadIdx.x].done = true;
  swapcontext(&fibers[threadIdx.x].context, &scheduler);
}

static void run(unsigned gx, unsigned gy, unsigned gz, unsigned threads, unsigned shared,
                function<void()> call) {
  gridDim = {gx, gy, gz};
  blockDim = {threads, 1, 1};
  body = &call;
  vector<unsigned char> memory(shared + 64);
  shared_memory = (unsigned char*)(((uintptr_t)memory.data() + 63) / 64 * 64);
  fibers.resize(threads);
  slots.resize(threads);
  for (unsigned block = 0; block < gx * gy * gz; ++block) {
    blockIdx = {block % gx, block / gx % gy, block / gx / gy};
    memset(shared_memory, 0xff, shared);
    of_warps.assign((threads + 31) / 32, Barrier());
    of_block = Barrier();
    for (unsigned i = 0; i < threads; ++i) {
      Fiber& fiber = fibers[i];
      fiber.stack.resize(1 << 16);
      fiber.done = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, enter, 0);
    }
    for (bool left = true; left;) {
      left = false;
      for (unsigned i = 0; i < threads; ++i)
        if (!fibers[i].done) {
          threadIdx = {i, 0, 0};
          swapcontext(&scheduler, &fibers[i].context);
          left = true;
        }
    }
  }
}
"""

MATRICES = r"""
static unsigned two(T a, T b) {
  unsigned bits;
  memcpy(&bits, &a, 2);
  memcpy((char*)&bits + 2, &b, 2);
  return bits;
}
static T half_of(uint64_t word, int which) {
  T half;
  memcpy(&half, (const char*)&word + 2 * which, 2);
  return half;
}
static void gather(unsigned (&r)[4], const T* row, bool transposed) {
  if ((uintptr_t)row % 16) abort();
  slots[threadIdx.x].words[0] = (uintptr_t)row;
  meet_warp();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 * 32;
  for (int m = 0; m < 4; ++m) {
    auto at = [&](int i, int j) { return ((const T*)slots[warp + m * 8 + i].words[0])[j]; };
    const int i = lane / 4, j = lane % 4 * 2;
    r[m] = transposed ? two(at(j, i), at(j + 1, i)) : two(at(i, j), at(i, j + 1));
  }
  meet_warp();
}
static void load_matrices(unsigned (&r)[4], const T* row) { gather(r, row, false); }
static void load_transposed(unsigned (&r)[4], const T* row) { gather(r, row, true); }
static void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b, unsigned d) {
  const uint64_t words[] = {a[0], a[1], a[2], a[3], b, d};
  memcpy(slots[threadIdx.x].words, words, sizeof words);
  meet_warp();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 * 32;
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    for (int k = 0; k < 16; ++k) {
      const Slot& left = slots[warp + row % 8 * 4 + k % 8 / 2];
      const Slot& right = slots[warp + column * 4 + k % 8 / 2];
      c[e] += (float)half_of(left.words[row / 8 + k / 8 * 2], k % 2) *
              (float)half_of(right.words[4 + k / 8], k % 2);
    }
  }
  meet_warp();
}
// A copy is made as late as it may be.
static void copy_beside(T* shared, const T* source, bool there) {
  if ((uintptr_t)shared % 16 || (uintptr_t)source % 16) abort();
  fibers[threadIdx.x].copies.push_back([=] {
    if (there) memcpy(shared, source, 16); else memset(shared, 0, 16);
  });
}
static void begin_copies() {}
static void await_copies() {
  auto& copies = fibers[threadIdx.x].copies;
  for (auto& copy : copies) copy();
  copies.clear();
}
static float power_of_two(float x) { return exp2f(x); }
"""


def host_text(code: str) -> str:
    """The text of kernels for a compiler of the host, each with a function that launches it."""
    code = re.sub(r"#include <cuda.*", "", code)
    code = code.replace("extern __shared__ __align__(16) unsigned char shared_memory[];", "")
    code = code.replace(TENSOR_CORES, MATRICES)
    launchers = []
    for name, declared in re.findall(
        r'extern "C" __global__ void (?:__launch_bounds__\(\w+\) )?(\w+)\(([^{]*)\) \{', code
    ):
        types = [re.sub(r"\w+$", "", each.strip()) for each in declared.split(",")]
        given = ", ".join(f"*({kind}*)p[{at}]" for at, kind in enumerate(types))
        launchers.append(
            f'extern "C" void host_{name}(unsigned x, unsigned y, unsigned z, unsigned threads, '
            f"unsigned shared, void** p) {{ run(x, y, z, threads, shared, [&] {{ {name}({given}); "
            "}); }"
        )
    return "\n".join([code, *launchers])


class Emulated(StrictNamespace):
    """Host arrays whose kernels of CUDA C++ run on the host."""

    def __init__(self, folder) -> None:
        super().__init__(HostCuda())
        self.launched: list[str] = []
        """Names of the kernels that were launched."""
        self._folder = folder
        self._names: dict[int, tuple[str, object]] = {}
        self.cuda.Device = lambda: SimpleNamespace(id=id(self), compute_capability="90")
        self.cuda.get_current_stream = lambda: SimpleNamespace(ptr=0)
        self.cuda.driver = SimpleNamespace(launchKernel=self._launch)

    def _launch(self, function, x, y, z, threads, _, __, shared, stream, parameters, extra):
        name, call = self._names[function]
        self.launched.append(name)
        call(*map(ctypes.c_uint, (x, y, z, threads, shared)), ctypes.c_void_p(parameters))

    def _compile(self, *arguments):
        subprocess.run([COMPILER, "-std=c++17", "-fPIC", "-O1", "-w", *arguments], check=True)

    def RawModule(self, code, options):  # noqa: N802  (CuPy's name)
        prelude = self._folder / "prelude.h"
        if not prelude.exists():  # compiled, too: most kernels are shorter than what it includes
            prelude.write_text(PRELUDE)
            self._compile("-x", "c++-header", prelude, "-o", f"{prelude}.gch")
        stem = self._folder / hashlib.sha256(code.encode()).hexdigest()[:16]
        stem.with_suffix(".cpp").write_text(host_text(code))
        source, library_file = stem.with_suffix(".cpp"), stem.with_suffix(".so")
        self._compile("-include", prelude, "-shared", source, "-o", library_file)
        library = ctypes.CDLL(str(library_file))

        def get_function(name):
            call = getattr(library, f"host_{name}")
            number = len(self._names) + 1
            self._names[number] = name, call
            return SimpleNamespace(kernel=SimpleNamespace(ptr=number))

        return SimpleNamespace(get_function=get_function)
