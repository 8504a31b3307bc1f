"""One BLAS thread per rank, as ranks are threads or processes and would fight for cores; and what
the loaded BLAS is.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import threadpoolctl

from plancompiler import blas_kernels

THREAD_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
)
"""What decides how many threads a BLAS library starts with."""
_MEASURED_SIDE = 1024
_MEASURED_RUNS = 5


def blas_threads_chosen() -> bool:
    """Whether the user's environment says how many BLAS threads to use."""
    return any(os.environ.get(name) for name in THREAD_VARIABLES)


def one_thread_environment() -> dict[str, str]:
    """This process's environment with one BLAS thread for a child, unless the user chose."""
    environment = dict(os.environ)
    if not blas_threads_chosen():
        environment.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    return environment


class _Limit:
    """Holds this process's BLAS at one thread while anyone has taken it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._takers = 0
        self._limits: threadpoolctl.threadpool_limits | None = None

    def take(self) -> None:
        with self._lock:
            self._takers += 1
            if self._limits is None and not blas_threads_chosen():
                self._limits = threadpoolctl.threadpool_limits(limits=1, user_api="blas")

    def give_back(self) -> None:
        with self._lock:
            self._takers -= 1
            if self._takers == 0 and self._limits is not None:
                self._limits.restore_original_limits()
                self._limits = None


_LIMIT = _Limit()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Within the block (several may overlap) BLAS has one thread, unless the user chose."""
    _LIMIT.take()
    try:
        yield
    finally:
        _LIMIT.give_back()


def _numpys_libraries() -> list[dict[str, Any]]:
    """What threadpoolctl says of the BLAS that NumPy uses; another package may bring its own."""
    pools = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    return [pool for pool in pools if "numpy" in pool.get("filepath", "")] or pools


def kernel_environment() -> dict[str, str]:
    """What makes a child load the kernel set of this process, which may have loaded NumPy before
    plancompiler could choose one; nothing where the user's environment names a set."""
    if os.environ.get(blas_kernels.VARIABLE):
        return {}
    sets = {
        pool["architecture"]
        for pool in _numpys_libraries()
        if pool["internal_api"] == "openblas" and pool.get("architecture")
    }
    return {blas_kernels.VARIABLE: sets.pop()} if len(sets) == 1 else {}


@lru_cache(maxsize=1)
def numeric_kernels() -> str:
    """What the last bits of this process's results depend on: NumPy with the instructions that it
    uses, and the BLAS with its kernels. Ranks of one job should all have the same."""
    instructions = np.show_config(mode="dicts")["SIMD Extensions"]["found"]
    libraries = {
        f"{pool['internal_api']} {pool['version']} with {pool.get('architecture', 'unknown')} "
        "kernels"
        for pool in _numpys_libraries()
    }
    numpy = f"NumPy {np.__version__} on {platform.machine()} with {' '.join(instructions)}"
    return ", ".join([numpy, *sorted(libraries)])


def describe() -> str:
    """The loaded BLAS libraries: version, kernels and who chose them, threads."""
    if os.environ.get(blas_kernels.VARIABLE):
        chooser = f"by {blas_kernels.VARIABLE}"
    else:
        chooser = "by plancompiler" if blas_kernels.CHOSEN else "by the library"
    found = [
        f"{pool['internal_api']} {pool['version']}, {pool.get('architecture', 'unknown')} kernels "
        f"(chosen {chooser}), {pool['num_threads']} threads"
        for pool in threadpoolctl.threadpool_info()
        if pool["user_api"] == "blas"
    ]
    return "; ".join(found) or "none that threadpoolctl knows; its threads cannot be limited"


def faster_kernels() -> str | None:
    """What to do for faster products in this process; None where its kernels are the right ones.

    NumPy may have been loaded before plancompiler, which then could not choose.
    """
    wanted = blas_kernels.kernel_set_for(blas_kernels.this_cpu(), os.environ)
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
        f"{blas_kernels.VARIABLE}={wanted}"
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
