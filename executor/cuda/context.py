"""Communicators of devices for code that decides at run time what to exchange.

A `DeviceContext` is a `CommContext` whose arrays lie on devices. The members meet over the host's
link as ever: they wait for each other there, with deadlines, compare what they call, and publish
dtypes and shapes. Then each asks NCCL, and its host goes on: what it asks of arrays next comes
after the operation. So the hosts go in step, each ahead of its device.

NCCL's own communicator is made when the group first meets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from plancompiler.errors import PlanCompilerError, TransportError
from plancompiler.executor.comm.context import CommContext, CommStream, ContextOwner
from plancompiler.executor.comm.deferred import DeferredCalls, StreamThread, Work
from plancompiler.executor.comm.flight_recorder import LAUNCHED, CommRecord
from plancompiler.executor.comm.operations import (
    Arrays,
    Operation,
    Operations,
    PublishedArrays,
    Rounds,
)
from plancompiler.executor.comm.rendezvous import Rendezvous
from plancompiler.executor.cuda.bootstrap import join
from plancompiler.executor.cuda.collective import Launch, launch_of, run_programs
from plancompiler.executor.cuda.interface import (
    Device,
    DeviceArray,
    DeviceCommunicator,
    DeviceEvent,
)
from plancompiler.executor.cuda.launched import LaunchedGroup
from plancompiler.executor.cuda.rank_device import RankDevice
from plancompiler.executor.memory import Array
from plancompiler.limits.time_limits import if_unseen

Result = TypeVar("Result")


class DeviceContext(CommContext):
    """One rank's member of a group of ranks with a device each; made by `CommContextManager`.

    Operations return when they are launched; a deadline holds for the meeting of the hosts, and
    once more for the devices. Arrays of the host are exchanged by the host.
    """

    device_type = "cuda"

    def __init__(
        self, space: RankDevice, rendezvous: Rendezvous, owner: ContextOwner, stream: str
    ) -> None:
        super().__init__(rendezvous, owner, stream)
        self.calls = Operations(rendezvous.ranks, rendezvous.member, space.arrays)
        self._space = space
        self.device = space.device
        self._beside = space.device.stream(stream) if stream else None
        self._communicator: DeviceCommunicator | None = None
        self._event: DeviceEvent = None
        """Comes when what was launched last has ended; None for nothing."""
        self._held: list[DeviceArray] = []
        """What must stay until then."""
        self._records: Sequence[CommRecord] = ()
        """Of the operations that run now."""
        self._launched: LaunchedGroup | None = None
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
        call: str,
        header: Callable[[], str],
        work: Callable[[Rounds], Result],
    ) -> Result:
        """See `CommContext.meet`."""
        self._space.check()

        def joined(rounds: Rounds) -> Result:
            if self._communicator is None and self.size > 1:
                self._join(rounds)
            return work(rounds)

        self._records = records
        try:
            result = super().meet(records, call, header, joined)
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
        return result

    def finish(self, operation: Operation[Result], published: PublishedArrays) -> Result:
        """See `CommContext.finish`: the result's elements come when the device has run it."""
        if not operation.on_device:
            return super().finish(operation, published)
        launch = launch_of(self._space.arrays, operation, published)
        self._launch([launch])
        return launch.result

    def finish_pair(
        self, sent: Sequence[Operation[Any]], received: Sequence[Operation[Any]], came: Arrays
    ) -> list[Any]:
        """See `CommContext.finish_pair`: both directions are one group of calls."""
        arrays = self._space.arrays
        launches = [launch_of(arrays, each, ()) for each in sent if each.on_device]
        results: list[Any] = []
        for operation, array in zip(received, came, strict=True):
            if operation.on_device:
                launches.append(launch_of(arrays, operation, [(array,)]))
                results.append(launches[-1].result)
            else:
                results.append(operation.finish([(array,)]))
        self._launch(launches)
        return results

    def _launch(self, launches: Sequence[Launch[Any]]) -> None:
        device, beside = self.device, self._beside
        programs = [launch.program for launch in launches]
        if not programs:
            return
        if self._launched is None:
            self._launched = LaunchedGroup(
                self._records, self._communicator, if_unseen(self.deadline), self._expired
            )
            self._space.watch.add(self._launched)
        compute = device.current()
        stream = compute if beside is None else beside
        if beside is not None:
            made = device.event()
            device.record(made, compute)
            device.wait(beside, made)
        device.launch(stream, partial(run_programs, programs, self._communicator, stream))
        self._event = device.event()
        device.record(self._event, stream)
        self._held += programs

    def _join(self, rounds: Rounds) -> None:
        """Join NCCL's communicator, whose name the first member makes."""
        device = self.device
        name = device.unique_id() if self.member == 0 else b""
        own = np.frombuffer(name, np.uint8) if name else np.empty(0, np.uint8)
        first = rounds.round("joining", (own,), lambda names: names[0][0].tobytes())
        label = f"a communicator of ranks {list(self.ranks)}"
        self._communicator = join(
            device, first, self.size, self.member, label, if_unseen(self.deadline)
        )
        self._space.communicators.append(self._communicator)

    def _expired(self, error: PlanCompilerError) -> None:
        """What was launched has failed: who waits for this rank, on the host or a device, ends."""
        self._space.abort(error)
        self._owner.abort(error)


# --- beside what the rank computes ----------------------------------------------------------------


class DeviceWork(Work[Result]):
    """An operation that was launched on the communicator stream."""

    def __init__(self, record: CommRecord, device: Device) -> None:
        super().__init__(record, threaded=True)
        self._device = device
        self._event: DeviceEvent = None

    def launched(self, result: Result, event: DeviceEvent) -> None:
        """Give it its result, and the event by which that is there."""
        self._event = event
        self.end(result)

    def wait(self) -> Result:
        """The result; what is asked of arrays from now on comes after the operation. The host does
        not wait. Raises the error with which the operation failed.
        """
        result = super().wait()
        if self._event is not None:
            self._device.wait(self._device.current(), self._event)
        return result

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
            result = context.run_recorded(operation, work.record)
            where = context if operation.peer is None else context.pair(operation.peer)
            work.launched(result, where.launched() if isinstance(where, DeviceContext) else None)
        except PlanCompilerError as error:  # it is raised where somebody waits for the work
            work.fail(error)
        return work
