"""The BLAS that NumPy has loaded: its kernels, who chose them, and how fast they are."""

from __future__ import annotations

import os
import platform
import time
from functools import lru_cache
from typing import Any

import numpy as np
import threadpoolctl

from plancompiler.blas import kernel_choice
from plancompiler.blas.numba_choice import numba_version

_MEASURED_SIDE = 1024
_MEASURED_RUNS = 5


def _numpys_libraries() -> list[dict[str, Any]]:
    """What threadpoolctl says of the BLAS that NumPy uses; another package may bring its own."""
    pools = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    return [pool for pool in pools if "numpy" in pool.get("filepath", "")] or pools


def kernel_environment() -> dict[str, str]:
    """What makes a child load the kernel set of this process, which may have loaded NumPy before
    plancompiler could choose one; nothing where the user's environment names a set."""
    if os.environ.get(kernel_choice.VARIABLE):
        return {}
    sets = {
        pool["architecture"]
        for pool in _numpys_libraries()
        if pool["internal_api"] == "openblas" and pool.get("architecture")
    }
    return {kernel_choice.VARIABLE: sets.pop()} if len(sets) == 1 else {}


@lru_cache(maxsize=1)
def numeric_kernels() -> str:
    """What the last bits of this process's results depend on: NumPy with the instructions that it
    uses, the BLAS with its kernels, and numba where it compiles loops. Ranks of one job should all
    have the same."""
    instructions = np.show_config(mode="dicts")["SIMD Extensions"]["found"]
    libraries = {
        f"{pool['internal_api']} {pool['version']} with {pool.get('architecture', 'unknown')} "
        "kernels"
        for pool in _numpys_libraries()
    }
    numpy = f"NumPy {np.__version__} on {platform.machine()} with {' '.join(instructions)}"
    loops = [f"loops by numba {version}"] if (version := numba_version()) else []
    return ", ".join([numpy, *sorted(libraries), *loops])


def describe() -> str:
    """The loaded BLAS libraries: version, kernels and who chose them, threads."""
    if os.environ.get(kernel_choice.VARIABLE):
        chooser = f"by {kernel_choice.VARIABLE}"
    else:
        chooser = "by plancompiler" if kernel_choice.CHOSEN else "by the library"
    descriptions = [
        f"{pool['internal_api']} {pool['version']}, {pool.get('architecture', 'unknown')} kernels "
        f"(chosen {chooser}), {pool['num_threads']} threads"
        for pool in threadpoolctl.threadpool_info()
        if pool["user_api"] == "blas"
    ]
    return "; ".join(descriptions) or "none that threadpoolctl knows; its threads cannot be limited"


def faster_kernels() -> str | None:
    """What to do for faster products in this process; None where its kernels are the right ones.

    NumPy may have been loaded before plancompiler, which then could not choose.
    """
    wanted = kernel_choice.kernel_set_for(kernel_choice.this_cpu(), os.environ)
    loaded = {
        pool.get("architecture")
        for pool in threadpoolctl.threadpool_info()
        if pool["internal_api"] == "openblas"
    }
    if wanted is None or not loaded or wanted in loaded:
        return None
    return (
        f"NumPy was loaded before plancompiler, with OpenBLAS's {', '.join(map(str, loaded))} "
        f"kernels; on this CPU {wanted} is faster: import plancompiler first, or set "
        f"{kernel_choice.VARIABLE}={wanted}"
    )


def measured_gflops() -> float:
    """10⁹ float32 operations per second of one core in a matrix product of 1024 cubed.

    The time is this thread's on the CPU, so that what else the machine does changes it little.
    """
    left = np.ones((_MEASURED_SIDE, _MEASURED_SIDE), np.float32)
    right, out = left.copy(), np.empty_like(left)
    seconds = []
    with threadpoolctl.threadpool_limits(limits=1, user_api="blas"):
        for _ in range(_MEASURED_RUNS):
            begin = time.thread_time()
            np.matmul(left, right, out=out)
            seconds.append(time.thread_time() - begin)
    return float(2 * _MEASURED_SIDE**3 / min(seconds) / 1e9)
