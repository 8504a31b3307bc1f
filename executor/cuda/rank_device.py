"""One rank's device as memory and as what can fail, for programs that decide at run time."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from plancompiler.errors import PlanCompilerError
from plancompiler.executor.cuda.interface import Device, DeviceCommunicator, abort_all, close_all
from plancompiler.executor.cuda.launched import LaunchWatch
from plancompiler.executor.memory import Array
from plancompiler.executor.threads import await_threads


class RankDevice:
    """One rank's device: its arrays, its communicators, and the error that has stopped it."""

    def __init__(self, device: Device, rank: int) -> None:
        self.device = device
        self.arrays: Any = device.arrays
        self.communicators: list[DeviceCommunicator] = []
        """Those that were made here, to be ended with it."""
        self.watch = LaunchWatch(device, f"plancompiler-launched-{rank}")
        self._failure: PlanCompilerError | None = None
        self._aborting: list[threading.Thread] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """See `Space.empty`."""
        array: Array = self.arrays.empty(shape, dtype)
        return array

    def full(self, shape: tuple[int, ...], value: float, dtype: np.dtype[Any]) -> Array:
        """See `Space.full`."""
        array: Array = self.arrays.full(shape, value, dtype)
        return array

    def holds(self, value: object) -> bool:
        """Whether something is an array of this space."""
        return isinstance(value, self.arrays.ndarray)

    def adopt(self, value: object) -> Array:
        """Any library's array on the device, by CUDA's array interface; memory is shared."""
        array: Array = self.arrays.asarray(value)
        return array

    def put(self, array: Array) -> Array:
        """See `Space.put`."""
        if self.holds(array):
            return array.copy()
        # Devices know this machine's order of bytes only.
        given = np.asarray(array, array.dtype.newbyteorder("="), order="C")
        placed = self.empty(given.shape, given.dtype)
        if placed.size:
            placed.set(given)  # type: ignore[attr-defined]  # CuPy's arrays have it
            if self.device.is_pinned(given):
                self.device.settle()  # it is read later than this returns, and may be changed
        return placed

    def get(self, array: Array) -> Array:
        """See `Space.get`: here the host waits."""
        copy: Array = self.arrays.asnumpy(array)
        self.check()  # what an aborted operation leaves are no numbers
        return copy

    def check(self) -> None:
        """Raise the error for which this rank was stopped, if it was."""
        if self._failure is not None:
            raise self._failure

    def abort(self, error: PlanCompilerError) -> None:
        """End what waits for NCCL, as a rank has failed; who reads a value is told."""
        if self._failure is None:
            self._failure = error
        self._aborting += abort_all(tuple(self.communicators))

    def close(self) -> None:
        """Let go of everything; what was launched ends before."""
        self.device.use()
        if self._failure is None:
            self.watch.drain()
        self.watch.close()
        await_threads(self._aborting)
        close_all(self.communicators)
        self.communicators.clear()
