"""One BLAS thread per rank, as ranks are threads or processes and would fight for cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import threadpoolctl

THREAD_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
)
"""What decides how many threads a BLAS library starts with."""


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
