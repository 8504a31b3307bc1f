"""Communicators of devices for code that decides at run time what to exchange.

A `DeviceContext` is a `CommContext` whose arrays lie on devices. The members meet over the host's
transport as ever: they wait for each other there, with deadlines, compare what they call, and show
dtypes and shapes. Then each asks NCCL, and its host goes on: what it asks of arrays next comes
after the operation. So the hosts go in step, each ahead of its device.

NCCL's own communicator is made when the group first meets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from plancompiler.errors import PlanCompilerError, TransportError
from plancompiler.executor.comm.context import Board, Called, CommContext, CommStream, Owner
from plancompiler.executor.comm.deferred import DeferredCalls, StreamThread, Work
from plancompiler.executor.comm.flight_recorder import LAUNCHED, CommRecord
from plancompiler.executor.comm.operations import Arrays, Link, Operation, Shown
from plancompiler.executor.cuda.interface import (
    Communicator,
    Device,
    DeviceArray,
    DeviceEvent,
    DeviceStream,
    grouped,
)
from plancompiler.executor.cuda.launched import Launched
from plancompiler.executor.cuda.meeting import join
from plancompiler.executor.cuda.operations import DeviceOperation, DeviceOperations, Launch
from plancompiler.executor.cuda.rank_device import RankDevice
from plancompiler.executor.memory import Array
from plancompiler.ir import Reduction
from plancompiler.limits.time_limits import if_unseen

Found = TypeVar("Found")


class DeviceContext(CommContext):
    """One rank's member of a group of ranks with a device each; made by `CommContextManager`.

    Operations return when they are launched; a deadline holds for the meeting of the hosts, and
    once more for the devices. Arrays of the host are exchanged by the host.
    """

    device_type = "cuda"

    def __init__(self, space: RankDevice, board: Board, owner: Owner, stream: str) -> None:
        super().__init__(board, owner, stream)
        self.calls = DeviceOperations(space.arrays, board.ranks, board.member)
        self._space = space
        self.device = space.device
        self._beside = space.device.stream(stream) if stream else None
        self._communicator: Communicator | None = None
        self._event: DeviceEvent = None
        """Comes when what was launched last has ended; None for nothing."""
        self._held: list[DeviceArray] = []
        """What must stay until then."""
        self._records: Sequence[CommRecord] = ()
        """Of the operations that run now."""
        self._launched: Launched | None = None
        """What was launched of them."""

    def deferred(self, thread: Callable[[], StreamThread]) -> CommStream:
        """See `CommContext.deferred`: a CUDA stream needs no thread."""
        return DeviceStreamCalls(self)

    def index(self, places: Array) -> Array:
        """See `CommContext.index`."""
        return self._space.put(places)

    def launched(self) -> DeviceEvent:
        """The event that comes when all that was launched so far has ended; None for nothing."""
        return self._event

    def meet(
        self,
        records: Sequence[CommRecord],
        called: Called,
        work: Callable[[Link], Found],
    ) -> Found:
        """See `CommContext.meet`."""
        self._space.check()

        def joined(link: Link) -> Found:
            if self._communicator is None:
                self._communicator = self._joined(link)
            return work(link)

        self._records = records
        try:
            found = super().meet(records, called, joined)
        except BaseException as error:
            if self._launched is not None:
                self._space.watch.drop(self._launched)
                self._launched = None
            if isinstance(error, TransportError):
                self._space.check()  # NCCL does not say for what it was aborted
            raise
        launched, self._launched = self._launched, None
        if launched is not None:
            for record in records:
                record.state, record.end = LAUNCHED, 0.0
            if self._beside is not None:
                launched.held = self._held
            # On the compute stream whoever uses the memory next comes later anyway.
            self._held = []
            launched.event = self._event
        return found

    def finish(self, operation: Operation[Found], shown: Shown) -> Found:
        """See `CommContext.finish`: the result's elements come when the device has run it."""
        if not isinstance(operation, DeviceOperation):
            return super().finish(operation, shown)
        launch: Launch[Found] = operation.launch(shown)
        self._launch([launch])
        return launch.found

    def finish_pair(
        self, sent: Sequence[Operation[Any]], received: Sequence[Operation[Any]], came: Arrays
    ) -> list[Any]:
        """See `CommContext.finish_pair`: both directions are one group of calls."""
        launches = [each.launch(()) for each in sent if isinstance(each, DeviceOperation)]
        found: list[Any] = []
        for operation, array in zip(received, came, strict=True):
            if isinstance(operation, DeviceOperation):
                launches.append(operation.launch([(array,)]))
                found.append(launches[-1].found)
            else:
                found.append(operation.finish([(array,)]))
        self._launch(launches)
        return found

    def _launch(self, launches: Sequence[Launch[Any]]) -> None:
        device, communicator, beside = self.device, self._communicator, self._beside
        if communicator is None or not launches:
            return
        if self._launched is None:
            self._launched = Launched(
                self._records, communicator, if_unseen(self.deadline), self._expired
            )
            self._space.watch.add(self._launched)
        compute = device.current()
        stream = compute if beside is None else beside
        if beside is not None:
            made = device.event()
            device.record(made, compute)
            device.wait(beside, made)
        device.launch(stream, partial(_run, launches, communicator, stream))
        self._event = device.event()
        device.record(self._event, stream)
        self._held += [array for launch in launches for array in launch.held]

    def _joined(self, link: Link) -> Communicator:
        """Join NCCL's communicator, whose name the first member makes."""
        if self.size == 1:
            return AloneCommunicator()
        device = self.device
        name = device.unique_id() if self.member == 0 else b""
        shown = np.frombuffer(name, np.uint8) if name else np.empty(0, np.uint8)
        first = link.round("joining", (shown,), lambda found: found[0][0].tobytes())
        label = f"a communicator of ranks {list(self.ranks)}"
        communicator = join(device, first, self.size, self.member, label, if_unseen(self.deadline))
        self._space.communicators.append(communicator)
        return communicator

    def _expired(self, error: PlanCompilerError) -> None:
        """What was launched has failed: who waits for this rank, on the host or a device, ends."""
        self._space.abort(error)
        self._owner.abort(error)


def _run(launches: Sequence[Launch[Any]], communicator: Communicator, stream: DeviceStream) -> None:
    for launch in launches:
        launch.pack()
    with grouped(communicator):
        for launch in launches:
            launch.call(communicator, stream)
    for launch in launches:
        launch.unpack()


# --- beside what the rank computes ----------------------------------------------------------------


class DeviceWork(Work[Found]):
    """An operation that was launched on the communicator stream."""

    def __init__(self, record: CommRecord, device: Device) -> None:
        super().__init__(record, threaded=True)
        self._device = device
        self._event: DeviceEvent = None

    def launched(self, found: Found, event: DeviceEvent) -> None:
        """Give it its result, and the event by which that is there."""
        self._event = event
        self.end(found)

    def wait(self) -> Found:
        """The result; what is asked of arrays from now on comes after the operation. The host does
        not wait. Raises the error with which the operation failed.
        """
        found = super().wait()
        if self._event is not None:
            self._device.wait(self._device.current(), self._event)
        return found

    @property
    def done(self) -> bool:
        """See `Work.done`."""
        return super().done and (self._event is None or self._device.has_come(self._event))


class DeviceStreamCalls(CommStream):
    """One rank's member of a group on the communicator stream of its device.

    The hosts meet at once, in the calling thread; the devices do the rest beside what they compute.
    """

    _context: DeviceContext

    def __init__(self, context: DeviceContext) -> None:
        self.ranks = context.ranks
        self.member = context.member
        self._context = context
        DeferredCalls.__init__(self, context.calls, self._launch)

    def _launch(self, operation: Operation[Any]) -> Work[Any]:
        context = self._context
        work: DeviceWork[Any] = DeviceWork(context.recorded(operation), context.device)
        work.started.set()
        try:
            found = context.run_recorded(operation, work.record)
            where = context if operation.peer is None else context.pair(operation.peer)
            work.launched(found, where.launched() if isinstance(where, DeviceContext) else None)
        except PlanCompilerError as error:  # it is raised where somebody waits for the work
            work.fail(error)
        return work


# --- a group of one -------------------------------------------------------------------------------


class AloneCommunicator:
    """A communicator of one member: what it reads of all is its own. See `Communicator`."""

    def __init__(self) -> None:
        self._sent: deque[DeviceArray] = deque()

    def group_start(self) -> None:
        """See `Communicator.group_start`."""

    def group_end(self) -> None:
        """See `Communicator.group_end`."""

    def all_reduce(
        self, stream: DeviceStream, source: DeviceArray, target: DeviceArray, how: Reduction
    ) -> None:
        """See `Communicator.all_reduce`."""
        np.copyto(target, source)

    def reduce_scatter(
        self, stream: DeviceStream, source: DeviceArray, target: DeviceArray, how: Reduction
    ) -> None:
        """See `Communicator.reduce_scatter`."""
        np.copyto(target, source)

    def reduce(
        self,
        stream: DeviceStream,
        source: DeviceArray,
        target: DeviceArray,
        how: Reduction,
        root: int,
    ) -> None:
        """See `Communicator.reduce`."""
        np.copyto(target, source)

    def all_gather(self, stream: DeviceStream, source: DeviceArray, target: DeviceArray) -> None:
        """See `Communicator.all_gather`."""
        np.copyto(target.reshape(-1), source.reshape(-1))

    def broadcast(
        self, stream: DeviceStream, source: DeviceArray, target: DeviceArray, root: int
    ) -> None:
        """See `Communicator.broadcast`."""
        np.copyto(target, source)

    def send(self, stream: DeviceStream, source: DeviceArray, peer: int) -> None:
        """See `Communicator.send`."""
        self._sent.append(source)

    def receive(self, stream: DeviceStream, target: DeviceArray, peer: int) -> None:
        """See `Communicator.receive`."""
        np.copyto(target, self._sent.popleft())

    def check(self) -> None:
        """See `Communicator.check`."""

    def abort(self) -> None:
        """See `Communicator.abort`."""

    def close(self) -> None:
        """See `Communicator.close`."""
