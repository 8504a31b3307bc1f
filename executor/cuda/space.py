"""`DeviceSpace`: a rank's device for programs that decide at run time what to do.

Arrays are made of CuPy's pool, and work on them runs on the calling thread's current stream, as
CuPy's own calls do: the legacy default one, or that of `with stream:`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from plancompiler.errors import PlanCompilerError
from plancompiler.executor.comm.context import Board, Owner
from plancompiler.executor.cuda.context import DeviceContext
from plancompiler.executor.cuda.device import CudaDevice, local_device
from plancompiler.executor.cuda.interface import Communicator, Device, abort_all
from plancompiler.executor.cuda.launched import LaunchWatch
from plancompiler.executor.memory import Array
from plancompiler.ir import DType
from plancompiler.ops.registry import Kernel, KernelContext, OpDef


class DeviceSpace:
    """One rank's device. See `Space`."""

    def __init__(self, device: Device, rank: int) -> None:
        self.device = device
        self.arrays: Any = device.arrays
        self.communicators: list[Communicator] = []
        """Those that were made here, to be ended with it."""
        self.watch = LaunchWatch(device, f"plancompiler-launched-{rank}")
        self._failure: PlanCompilerError | None = None

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """See `Space.empty`."""
        found: Array = self.arrays.empty(shape, dtype)
        return found

    def full(self, shape: tuple[int, ...], value: float, dtype: np.dtype[Any]) -> Array:
        """See `Space.full`."""
        found: Array = self.arrays.full(shape, value, dtype)
        return found

    def holds(self, value: object) -> bool:
        """Whether something is an array of this space."""
        return isinstance(value, self.arrays.ndarray)

    def adopt(self, value: object) -> Array:
        """Any library's array on the device, by CUDA's array interface; memory is shared."""
        found: Array = self.arrays.asarray(value)
        return found

    def put(self, array: Array) -> Array:
        """See `Space.put`."""
        if self.holds(array):
            return array.copy()
        # Devices know this machine's order of bytes only.
        given = np.asarray(array, array.dtype.newbyteorder("="), order="C")
        found = self.empty(given.shape, given.dtype)
        if found.size:
            found.set(given)  # type: ignore[attr-defined]  # CuPy's arrays have it
            if self.device.is_pinned(given):
                self.device.settle()  # it is read later than this returns, and may be changed
        return found

    def get(self, array: Array) -> Array:
        """See `Space.get`: here the host waits."""
        found: Array = self.arrays.asnumpy(array)
        self.check()  # what an aborted operation leaves are no numbers
        return found

    def check(self) -> None:
        """Raise the error for which this rank was stopped, if it was."""
        if self._failure is not None:
            raise self._failure

    def kernel(self, definition: OpDef, dtypes: Iterable[DType]) -> Kernel:
        """See `Space.kernel`: kernels on devices want contiguous arrays, and some elements."""
        inner = self.device.kernel(definition, dtypes)

        def kernel(context: KernelContext, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            if outputs and all(out.size == 0 for out in outputs):
                return
            given = (*inputs, *outputs)
            if all(array.flags.c_contiguous for array in given):
                inner(context, inputs, outputs)
                return
            # One copy of each: an output may be an input that changes in place.
            copies = {id(array): array.copy() for array in given if not array.flags.c_contiguous}
            inner(
                context,
                [copies.get(id(array), array) for array in inputs],
                [copies.get(id(array), array) for array in outputs],
            )
            for array in outputs:
                if id(array) in copies:
                    np.copyto(array, copies[id(array)])

        return kernel

    def context(self, board: Board, owner: Owner, stream: str) -> DeviceContext:
        """See `Space.context`."""
        return DeviceContext(self, board, owner, stream)

    def abort(self, error: PlanCompilerError) -> None:
        """End what waits for NCCL, as a rank has failed; who reads a value is told."""
        if self._failure is None:
            self._failure = error
        abort_all(tuple(self.communicators))

    def close(self) -> None:
        """Let go of everything; what was launched ends before."""
        self.device.use()
        if self._failure is None:
            self.watch.drain()
        self.watch.close()
        for communicator in self.communicators:
            with contextlib.suppress(Exception):
                communicator.close()
        self.communicators.clear()


def open_space(rank: int, wanted: Device | str | None) -> DeviceSpace:
    """The space of a rank's device: what is wanted, else by the rank's place on its host."""
    if wanted is None or isinstance(wanted, str):
        wanted = CudaDevice(local_device(rank, wanted))
    return DeviceSpace(wanted, rank)
