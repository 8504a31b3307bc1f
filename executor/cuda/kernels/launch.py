"""Kernels written in CUDA C++: their functions, and launches that are prepared once.

A launch through CuPy costs the host several microseconds, most of which it spends on finding out
what it was given. The arrays of a plan stay where they are, so here a launch is prepared when its
arrays are first seen, and then only made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from plancompiler.ir import DType
from plancompiler.ops.registry import Kernel, KernelContext

Array = Any
Arrays = Sequence[Array]
Make = Callable[[KernelContext, Arrays, Arrays], Callable[[], object] | None]
"""Prepares what a kernel does with these inputs and outputs; None where they do not suit it."""

C_TYPES = {
    DType.BOOL: "bool",
    DType.FLOAT16: "__half",
    DType.BFLOAT16: "__nv_bfloat16",
    DType.FLOAT32: "float",
    DType.FLOAT64: "double",
}

LARGEST_COUNT = 2**31 - 1
"""Elements and rows are counted in 32 bits."""

PREPARED = 64
"""Launches that one task keeps: its arrays are those of a few slots. Eager tensors lie elsewhere
each time, and nothing is gained by keeping theirs."""

_PLAIN = 48 << 10
"""Bytes of shared memory that a block may have unasked."""

_functions: dict[tuple[int, str, str], Any] = {}

COMMON = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fc00000)
#endif
template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack { T v[N]; };
"""
"""What all texts begin with. A pack is loaded and stored as pieces of 16 bytes."""


def writes_kernels(arrays: Any) -> bool:
    """Whether these arrays have kernels of CUDA C++."""
    return hasattr(arrays, "RawModule")


def function_of(arrays: Any, text: str, name: str, shared: int = 0) -> Any:
    """The function of a text on the current device, compiled if it is not yet; `shared` are the
    bytes of shared memory that a block has.
    """
    device = arrays.cuda.Device().id
    key = device, text, name
    function = _functions.get(key)
    if function is None:
        # Without a lock: who loads a kernel waits for its device, and that may wait for a rank of
        # another thread, which would wait for the lock.
        raw = arrays.RawModule(code=COMMON + text, options=("-std=c++17",)).get_function(name)
        if shared > _PLAIN:
            raw.max_dynamic_shared_size_bytes = shared
        function = _functions[key] = raw.kernel
    return function


def launch_of(
    arrays: Any,
    function: Any,
    grid: tuple[int, ...],
    threads: int,
    arguments: Sequence[Any],
    shared: int = 0,
) -> Callable[[], None]:
    """A launch with these arguments: arrays, or numbers as `ctypes` has them."""
    make = arrays.cuda.driver.launchKernel
    current = arrays.cuda.get_current_stream
    values = [
        ctypes.c_void_p(each.data.ptr) if hasattr(each, "data") else each for each in arguments
    ]
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    address, handle = ctypes.addressof(pointers), function.ptr
    x, y, z = (*grid, 1, 1)[:3]

    def launch(_kept: object = (values, pointers, function)) -> None:
        make(handle, x, y, z, threads, 1, 1, shared, current().ptr, address, 0)

    return launch


def prepared(name: str, make: Make, otherwise: Kernel) -> Kernel:
    """A kernel that does what `make` prepares for its arrays, and where it prepares nothing the
    same as `otherwise`.
    """

    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        known: dict[Any, Any] | None = context.state.get(name)
        if known is None:
            known = context.state[name] = {}
        if context.fixed:
            # Tuples that are kept keep their identity, and it is found sooner than anything else.
            kept = known.get((id(inputs), id(outputs)))
            if kept is None:
                run = make(context, inputs, outputs) or partial(otherwise, context, inputs, outputs)
                kept = known[id(inputs), id(outputs)] = run, inputs, outputs
            kept[0]()
            return
        key = tuple([(each.data.ptr, each.shape, each.strides) for each in (*inputs, *outputs)])
        launch = known.get(key)
        if launch is None:
            launch = make(context, inputs, outputs)
            if launch is None:
                otherwise(context, inputs, outputs)
                return
            if len(known) < PREPARED:
                known[key] = launch
        launch()

    return kernel


def all_contiguous(arrays: Arrays) -> bool:
    """Whether elements of each array lie one after another, from an address that suits packs."""
    return all(each.flags.c_contiguous and each.data.ptr % 16 == 0 for each in arrays)
