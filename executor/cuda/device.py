"""A CUDA device through CuPy: the one file that imports it, when a device is first opened.

Needs CuPy 14 or newer, and for several devices NCCL 2.18 or newer. Written from CuPy's sources
(`cupy/cuda/stream.pyx`, `memory.pyx`, `pinned_memory.pyx`, `cupy_backends/cuda/api/runtime.pyx`,
`cupy_backends/cuda/libs/nccl.pyx`), version 14.

Streams here do not wait for the legacy default stream, on which CuPy works while no other stream is
current. What runs there before the first step has to be waited for: `allocate` does so for its
zeros, `settle` for what kernels make when they are bound.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from plancompiler.errors import DeviceError, TransportError
from plancompiler.executor.cuda.interface import CallKind, DeviceArray, DeviceEvent, DeviceStream
from plancompiler.executor.cuda.kernels import kernel_on
from plancompiler.executor.memory import Buffer
from plancompiler.ir import DType, Reduction
from plancompiler.limits import time_limits
from plancompiler.ops.registry import Kernel, OpDef

DEVICE_VARIABLE = "PLANCOMPILER_DEVICE"
"""Environment variable that names the local device, such as `cuda:1`."""

_PORTABLE = 1
"""`cudaHostAllocPortable` and `cudaHostRegisterPortable`: pinned for all devices of the process."""

_NOT_READY = 600
"""`cudaErrorNotReady`."""

_log = logging.getLogger(__name__)


def load_cupy() -> Any:
    """CuPy, with a device to work on; a DeviceError that says what is missing."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise DeviceError(
            "a plan for CUDA devices needs CuPy, which cannot be imported",
            got=str(error),
            hint="pip install 'plancompiler[cuda12]' (or [cuda13]); `plancompiler doctor` looks",
        ) from error
    if int(cupy.__version__.split(".")[0]) < 14:
        raise DeviceError(
            "this version of CuPy is too old", got=cupy.__version__, expected="14 or newer"
        )
    return cupy


def device_count() -> int:
    """CUDA devices of this machine; DeviceError where none can be used."""
    cupy = load_cupy()
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(
            "no CUDA device can be used here",
            got=str(error),
            hint="`nvidia-smi` shows driver and devices; `plancompiler doctor` looks for both",
        ) from error


def local_device(rank: int, wanted: str | None = None) -> int:
    """Index of the device of a rank: the one that is asked for, else by order on the host.

    `wanted` is `cuda:I`; without it the environment variable PLANCOMPILER_DEVICE counts. Ranks of a
    host have consecutive numbers, so that the rank modulo the number of devices tells them apart.
    """
    text = wanted or os.environ.get(DEVICE_VARIABLE)
    kind, _, number = (text or "cuda:0").partition(":")
    # Before CuPy is asked, which may not be there: a misspelt name is not for want of it.
    if kind != "cuda" or not (number.isascii() and number.isdecimal()):
        raise DeviceError("no such device", got=repr(text), expected="cpu or cuda:I")
    count = device_count()
    index = rank % max(count, 1) if text is None else int(number)
    if index >= count:
        raise DeviceError(
            "this machine has no such device", got=f"cuda:{index}", expected=f"{count} devices"
        )
    return index


class CudaDevice:
    """One CUDA device of this machine. See `interface.Device`."""

    def __init__(self, index: int) -> None:
        self.arrays = self._cupy = cupy = load_cupy()
        self._cuda = cupy.cuda
        self._device = cupy.cuda.Device(index)
        self.use()

    def use(self) -> None:
        """See `Device.use`."""
        self._device.use()

    def allocate(self, nbytes: int) -> DeviceArray:
        """See `Device.allocate`. Memory comes from the driver, not from CuPy's pool."""
        cuda = self._cuda
        size = max(nbytes, 1)
        try:
            memory = cuda.Memory(size)
        except cuda.runtime.CUDARuntimeError as error:
            free, total = cuda.runtime.memGetInfo()
            raise DeviceError(
                "the device does not have the memory that the plan needs",
                got=f"{size} bytes asked for, {free} of {total} free ({error})",
                hint="recompute, ZeRO or micro-batches need less; `inspect --memory` shows what",
            ) from error
        pointer = cuda.MemoryPointer(memory, 0)
        pointer.memset_async(0, size)
        # Other streams would not wait for it, and the zeros could come after the first values.
        self.settle()
        return self._cupy.ndarray((nbytes,), np.uint8, memptr=pointer)

    def pinned(self, nbytes: int) -> Buffer:
        """See `Device.pinned`. Not from CuPy's pool, which rounds up to powers of two and keeps."""
        cuda = self._cuda
        memory = cuda.PinnedMemory(max(nbytes, 1), _PORTABLE)
        return np.ndarray((nbytes,), np.uint8, buffer=cuda.PinnedMemoryPointer(memory, 0))

    def pin(self, buffer: Buffer) -> Callable[[], None]:
        """See `Device.pin`. Where the system refuses, copies are right but hold up the host."""
        runtime, address = self._cuda.runtime, buffer.ctypes.data
        try:
            runtime.hostRegister(address, buffer.nbytes, _PORTABLE)
        except runtime.CUDARuntimeError as error:
            _log.warning("%d bytes of host memory cannot be pinned: %s", buffer.nbytes, error)
            return lambda: None
        return lambda: runtime.hostUnregister(address)

    def is_pinned(self, array: Any) -> bool:
        """See `Device.is_pinned`."""
        return bool(self._cuda.pinned_memory.is_memory_pinned(array.ctypes.data))

    def settle(self) -> None:
        """See `Device.settle`."""
        self._cuda.get_current_stream().synchronize()

    def stream(self, name: str) -> DeviceStream:
        """See `Device.stream`. It does not wait for the legacy default stream."""
        return self._cuda.Stream(non_blocking=True)

    def current(self) -> DeviceStream:
        """See `Device.current`: what `with stream:` of CuPy names, else the legacy default one."""
        return self._cuda.get_current_stream()

    def event(self) -> DeviceEvent:
        """See `Device.event`. A thread that waits for it sleeps."""
        return self._cuda.Event(block=True, disable_timing=True)

    def has_come(self, event: DeviceEvent) -> bool:
        """See `Device.has_come`. CuPy's `done` would not tell a broken device from a busy one."""
        runtime = self._cuda.runtime
        status = runtime.eventQuery(event.ptr)
        if status not in (0, _NOT_READY):
            raise runtime.CUDARuntimeError(status)
        return bool(status == 0)

    def timer(self) -> DeviceEvent:
        """See `Device.timer`."""
        return self._cuda.Event(block=True)

    def elapsed(self, begin: DeviceEvent, end: DeviceEvent) -> float:
        """See `Device.elapsed`. CUDA counts milliseconds, to about half a microsecond."""
        return 1e6 * float(self._cuda.get_elapsed_time(begin, end))

    def launch(self, stream: DeviceStream, work: Callable[[], object]) -> None:
        """See `Device.launch`: CuPy's calls go to the thread's current stream."""
        with stream:
            work()

    def record(self, event: DeviceEvent, stream: DeviceStream) -> None:
        """See `Device.record`."""
        event.record(stream)

    def wait(self, stream: DeviceStream, event: DeviceEvent) -> None:
        """See `Device.wait`."""
        stream.wait_event(event)

    def synchronize(self, event: DeviceEvent) -> None:
        """See `Device.synchronize`."""
        event.synchronize()

    def upload(self, stream: DeviceStream, target: DeviceArray, source: Any) -> None:
        """See `Device.upload`."""
        runtime = self._cuda.runtime
        runtime.memcpyAsync(
            target.data.ptr,
            source.ctypes.data,
            source.nbytes,
            runtime.memcpyHostToDevice,
            stream.ptr,
        )

    def download(self, stream: DeviceStream, target: Any, source: DeviceArray) -> None:
        """See `Device.download`."""
        runtime = self._cuda.runtime
        runtime.memcpyAsync(
            target.ctypes.data,
            source.data.ptr,
            target.nbytes,
            runtime.memcpyDeviceToHost,
            stream.ptr,
        )

    def kernel(self, definition: OpDef, dtypes: Iterable[DType]) -> Kernel:
        """See `Device.kernel`."""
        return kernel_on(self._cupy, definition, dtypes)

    def unique_id(self) -> bytes:
        """See `Device.unique_id`."""
        return bytes(_nccl(self._cuda).get_unique_id())

    def communicator(self, unique_id: bytes, members: int, member: int) -> NcclCommunicator:
        """See `Device.communicator`."""
        nccl = _nccl(self._cuda)
        try:
            return NcclCommunicator(nccl, nccl.NcclCommunicator(members, unique_id, member))
        except nccl.NcclError as error:
            raise TransportError(
                "NCCL could not make a communicator",
                got=str(error),
                expected=f"{members} members, each on a device of its own",
                hint="NCCL_DEBUG=INFO shows why",
            ) from error


def _nccl(cuda: Any) -> Any:
    nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        raise DeviceError(
            "several devices need NCCL, which cannot be loaded",
            hint="pip install nvidia-nccl-cu12 (or nvidia-nccl-cu13)",
        )
    return nccl


_COUNTED_BY_TARGET = (CallKind.REDUCE_SCATTER, CallKind.BROADCAST, CallKind.RECEIVE)
ABORT_SECONDS = time_limits.NCCL_ABORT
"""How long an abort waits for the launching thread to leave NCCL."""


class NcclCommunicator:
    """A member of an NCCL communicator. See `interface.DeviceCommunicator`.

    NCCL wants one thread at a time in a communicator, and an abort frees it, from whichever thread.
    So calls hold a lock, and a group holds it to its end. An abort goes on without it after a
    while: a call that waits for a rank that is gone ends by the abort only.
    """

    def __init__(self, nccl: Any, communicator: Any) -> None:
        self._nccl = nccl
        self._communicator = communicator
        self._aborted = False
        self._lock = threading.RLock()

    def _guarded(self, name: str, call: Callable[..., object], *arguments: int) -> None:
        with self._lock:
            if self._aborted:
                raise TransportError("an NCCL communicator was aborted", got=f"{name} after that")
            try:
                call(*arguments)
            except self._nccl.NcclError as error:
                raise TransportError(
                    f"NCCL's {name} failed", got=str(error), hint="NCCL_DEBUG=INFO shows why"
                ) from error

    def _number(self, name: str) -> int:
        """What NCCL calls an operation or a type."""
        return int(getattr(self._nccl, f"NCCL_{name.upper()}"))

    def group_start(self) -> None:
        """See `DeviceCommunicator.group_start`."""
        self._lock.acquire()
        try:
            self._guarded("groupStart", self._nccl.groupStart)
        except BaseException:
            self._lock.release()
            raise

    def group_end(self) -> None:
        """See `DeviceCommunicator.group_end`."""
        try:
            self._guarded("groupEnd", self._nccl.groupEnd)
        finally:
            self._lock.release()

    def call(
        self,
        kind: CallKind,
        stream: DeviceStream,
        source: DeviceArray | None,
        target: DeviceArray | None,
        how: Reduction | None = None,
        peer: int = -1,
    ) -> None:
        """See `DeviceCommunicator.call`. What is only moved goes as bytes, whatever its dtype."""
        arguments = [each.data.ptr for each in (source, target) if each is not None]
        counted: DeviceArray = target if kind in _COUNTED_BY_TARGET else source
        if how is None:
            arguments += counted.nbytes, self._number("uint8")
        else:
            arguments += counted.size, self._number(counted.dtype.name), self._number(how.name)
        if peer >= 0:
            arguments.append(peer)
        self._guarded(kind.value, getattr(self._communicator, kind.value), *arguments, stream.ptr)

    def check(self) -> None:
        """See `DeviceCommunicator.check`. Does not wait for a thread that is in NCCL."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self._aborted:
                self._guarded("check_async_error", self._communicator.check_async_error)
        finally:
            self._lock.release()

    def abort(self) -> None:
        """See `DeviceCommunicator.abort`."""
        self._leave("abort")

    def close(self) -> None:
        """See `DeviceCommunicator.close`."""
        self._leave("destroy")

    def _leave(self, how: str) -> None:
        locked = self._lock.acquire(timeout=ABORT_SECONDS)
        try:
            if not self._aborted:
                self._aborted = True
                getattr(self._communicator, how)()
        finally:
            if locked:
                self._lock.release()
