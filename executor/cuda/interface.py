"""What the launcher needs of a device: memory, streams, events, kernels, communicators.

Work is *launched* on a stream and runs later, in the stream's order. An event that was recorded on
a stream has come when all that was launched there before has run; another stream can wait for it,
and so can the host. An event that was never recorded counts as come.

`CudaDevice` is the one on real devices. The tests have one that keeps launched work in queues and
runs it in seeded orders, as late and as mixed as streams and events allow.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, Protocol

from plancompiler.executor.memory import Buffer
from plancompiler.ir import DType, Reduction
from plancompiler.ops.registry import Kernel, OpDef

DeviceArray = Any
"""An n-dimensional array in device memory, with NumPy's methods and dtypes."""
DeviceStream = Any
DeviceEvent = Any


class CallKind(enum.Enum):
    """What a group calls, by NCCL's name, or a copy of what stays with a member."""

    COPY = "copy"
    ALL_REDUCE = "allReduce"
    """The reduction of all sources into every target; may be in place."""
    REDUCE_SCATTER = "reduceScatter"
    """Equal part i of the reduction of all flat sources into member i's target."""
    REDUCE = "reduce"
    """The reduction of all sources into the root's target; others' targets stay as they are."""
    ALL_GATHER = "allGather"
    """All sources, of one size, one after another into every target."""
    BROADCAST = "broadcast"
    """The root's source into every target."""
    SEND = "send"
    """The source to the peer's RECEIVE."""
    RECEIVE = "recv"
    """Into the target, from the peer's SEND of equal size."""


class DeviceCommunicator(Protocol):
    """A device's member of a group. Calls are launched on a stream, in one order on all members.

    Buffers are contiguous arrays of one dtype. Calls between `group_start` and `group_end` run
    together, so that none waits for another; see `grouped`.
    """

    def group_start(self) -> None:
        """Begin calls that run together."""

    def group_end(self) -> None:
        """Launch the calls since `group_start`."""

    def call(
        self,
        kind: CallKind,
        stream: DeviceStream,
        source: DeviceArray | None,
        target: DeviceArray | None,
        how: Reduction | None = None,
        peer: int = -1,
    ) -> None:
        """Make one call; `peer` is the member that is root or peer, where there is one."""

    def check(self) -> None:
        """Raise TransportError where a launched call has failed."""

    def abort(self) -> None:
        """End all launched calls, whatever the other members do. The last call but `close`."""

    def close(self) -> None:
        """Let go of it."""


@contextmanager
def grouped(communicator: DeviceCommunicator) -> Iterator[None]:
    """A group of calls, which ends whatever happens in it: else all later calls of the thread would
    belong to it, and none be launched.
    """
    communicator.group_start()
    try:
        yield
    except BaseException:
        with suppress(Exception):  # the first error says why
            communicator.group_end()
        raise
    communicator.group_end()


ABORT_PATIENCE = 1.5
"""Seconds that who aborts waits for communicators to end."""
CLOSE_PATIENCE = 0.1
"""Seconds that who closes waits for communicators to end."""


def abort_all(communicators: Iterable[DeviceCommunicator]) -> list[threading.Thread]:
    """End all that communicators have launched, side by side and after a while unattended: NCCL may
    wait for the other members to abort theirs, and the caller may have to tell them. Returns the
    threads that are then still at it, for which the caller waits when it is closed.
    """
    calls = [each.abort for each in communicators]
    return _side_by_side(calls, "plancompiler-abort", ABORT_PATIENCE, daemon=True)


def close_all(communicators: Iterable[DeviceCommunicator]) -> None:
    """Let go of communicators, side by side and after a while unattended. Between processes of one
    host, NCCL waits until the other members do so too. They may do it in another order, and much
    later: a compiled function is gone when the garbage collector of a rank has found it. The
    process ends after that.
    """
    calls = [each.close for each in communicators]
    _side_by_side(calls, "plancompiler-leave", CLOSE_PATIENCE, daemon=False)


def _side_by_side(
    calls: Iterable[Callable[[], None]], name: str, seconds: float, *, daemon: bool
) -> list[threading.Thread]:
    """Make calls in threads of their own, whatever they raise; those that last longer."""
    threads = [
        threading.Thread(target=_tried, args=(call,), name=name, daemon=daemon) for call in calls
    ]
    for thread in threads:
        thread.start()
    until = monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - monotonic()))
    return [thread for thread in threads if thread.is_alive()]


def _tried(call: Callable[[], None]) -> None:
    with suppress(Exception):
        call()


class Device(Protocol):
    """One device, as the launcher sees it."""

    arrays: Any
    """The array namespace: `empty`, `zeros`, … make arrays of this device."""

    def use(self) -> None:
        """Make it the calling thread's device."""

    def allocate(self, nbytes: int) -> DeviceArray:
        """Zeroed bytes in one allocation, aligned to 256, kept until the last view is gone."""

    def pinned(self, nbytes: int) -> Buffer:
        """Host memory from and to which copies run beside the host."""

    def pin(self, buffer: Buffer) -> Callable[[], None]:
        """Make host memory that is there already such memory; returns what takes it back."""

    def is_pinned(self, array: Any) -> bool:
        """Whether a host array lies in pinned memory: copies of it run beside the host."""

    def settle(self) -> None:
        """Hold the calling thread until what it asked of arrays outside of `launch` has run."""

    def stream(self, name: str) -> DeviceStream:
        """A new stream; `name` is for people."""

    def current(self) -> DeviceStream:
        """The calling thread's stream, on which what it asks of arrays outside of `launch` runs."""

    def event(self) -> DeviceEvent:
        """A new event."""

    def has_come(self, event: DeviceEvent) -> bool:
        """Whether an event has come; nobody waits."""

    def timer(self) -> DeviceEvent:
        """A new event that knows when it came."""

    def elapsed(self, begin: DeviceEvent, end: DeviceEvent) -> float:
        """Nanoseconds between two timers that have come; less than 0 where `end` came first."""

    def launch(self, stream: DeviceStream, work: Callable[[], object]) -> None:
        """Let a stream run what `work` asks of arrays."""

    def record(self, event: DeviceEvent, stream: DeviceStream) -> None:
        """Let an event come when all that the stream was given so far has run."""

    def wait(self, stream: DeviceStream, event: DeviceEvent) -> None:
        """Hold what the stream is given from now on until an event has come."""

    def synchronize(self, event: DeviceEvent) -> None:
        """Hold the calling thread until an event has come; others run on."""

    def upload(self, stream: DeviceStream, target: DeviceArray, source: Any) -> None:
        """Let a stream copy a pinned, contiguous host array; it must stay until that has run."""

    def download(self, stream: DeviceStream, target: Any, source: DeviceArray) -> None:
        """Let a stream copy to a pinned, contiguous host array."""

    def kernel(self, definition: OpDef, dtypes: Iterable[DType]) -> Kernel:
        """An op's kernel on arrays of this device."""

    def unique_id(self) -> bytes:
        """A new communicator's name, for its members to share."""

    def communicator(self, unique_id: bytes, members: int, member: int) -> DeviceCommunicator:
        """Join a communicator; returns when all members have."""
