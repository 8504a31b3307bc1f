"""What the master keeps of a job besides its state: its bytes for the workers, its events.

All of it belongs to the thread of the master's event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from plancompiler.cluster.chunks import Parcel, Reservation
from plancompiler.cluster.messages import (
    CompileFinished,
    JobEvent,
    JobRequest,
    PhaseChanged,
    RankOutputs,
    RankTimeline,
    StepDone,
    StepsDropped,
    StepsFailed,
    StepsSkipped,
    TicketDone,
    Waiting,
)
from plancompiler.errors import ClusterError, PlanCompilerError
from plancompiler.ir import Job
from plancompiler.master.changes import Changes
from plancompiler.master.kept_log import KeptLog
from plancompiler.master.masters_half import SLICES_MODE
from plancompiler.proto.cluster_pb2 import Chunk


@dataclass(frozen=True, slots=True)
class Retention:
    """What a master keeps for readers that come late or read slowly. They miss the oldest steps."""

    job_bytes: int = 64 << 20
    """`--keep-outputs-bytes`: of the outputs of one job."""
    jobs: int = 4
    """`--keep-jobs`: jobs whose outputs and plans are kept, those that ended last. All of them
    together keep at most `jobs * job_bytes` of outputs, and as much of plans."""


_EVENT_OVERHEAD = 512
_JOB = 0
"""Where a job's own bytes are among those of its tickets, which count from 1."""
_RELAY_CHUNKS = 4
"""Chunks of a rank's upload that wait for the client to take them."""


Piece = TypeVar("Piece")


class JobChannel:
    """What the I/O shell holds of one job."""

    def __init__(
        self,
        job: Job | bytes,
        request: JobRequest,
        owner: str = "",
        event_bytes: int = Retention().job_bytes,
        reservation: Reservation | None = None,
        outputs: tuple[str, ...] = (),
        data: bytes = b"",
        log: KeptLog | None = None,
    ) -> None:
        self.job: Job | bytes | None = job
        """Until it is compiled; its bytes, which take less memory, where it has to wait."""
        self.request = request
        self.saved = request.save
        """The folder of the checkpoint that was asked for last, on the workers' hosts."""
        self.is_awaited = False
        """Whether the client that submitted it is yet to listen: its outputs are kept till then."""
        self.owner = owner
        """Who submitted it."""
        self.outputs = outputs
        """Of each step, by name."""
        self.data = data
        """The job's bytes, for those who ask for what it was compiled into."""
        self.digest = ""
        """Over the plans of all ranks, once they are there."""
        self.parcels: Mapping[int, Parcel] = {}
        """What each rank fetches; ranks with equal slices share one parcel."""
        self.graph: Parcel | None = None
        """The boxing task graph, of a job that is compiled only."""
        self.plans: dict[int, Parcel] = {}
        """What ranks made, of a job that is compiled only."""
        self._plan_reservations: list[Reservation] = []
        self.feeds: dict[int, Parcel] = {}
        """By ticket."""
        self._reservations = {} if reservation is None else {_JOB: reservation}
        """What the job and, by ticket, feeds hold of the master's memory for uploads."""
        self.relays: dict[int, Relay[Chunk]] = {}
        """By ticket."""
        self.sent_bytes = 0
        """Of parcels, to all workers."""
        self.log = log or KeptLog(1)
        """What its ranks printed."""
        self.readers = 0
        """How many follow its events."""
        self.has_forgotten = False
        """Whether it was told to keep no outputs."""
        self._events: list[JobEvent | None] = []
        self.waiting: Waiting | None = None
        """Which ranks the job waits for, and so why it does not begin, as its readers hear."""
        self._changes = Changes()
        self._limit = event_bytes
        self._held = 0
        self._trimmed = 0
        """Events before this index that held outputs are gone."""
        self._first_step = -1
        self._latest_step = -1
        self._dropped_through = -1
        self._ended = False

    # --- events ---------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Of outputs that are kept for readers."""
        return self._held

    @property
    def plan_bytes(self) -> int:
        """Of what is kept for those who ask what the job was compiled into."""
        parcels = {id(parcel): parcel for parcel in (*self.parcels.values(), *self.plans.values())}
        return len(self.data) + sum(parcel.wire_bytes for parcel in parcels.values())

    def publish(self, event: JobEvent) -> None:
        """Add an event for all readers, present and future; of what is missing only the latest."""
        if isinstance(event, Waiting):
            self.waiting = event
            self.wake()
            return
        self.waiting = None
        self._events.append(event)
        if isinstance(event, RankOutputs):
            if self._first_step < 0:
                self._first_step = event.step
            self._latest_step = max(self._latest_step, event.step)
            self._held += _size(event)
            if self._held > self._limit:
                self._trim(self._latest_step)
        elif isinstance(event, (TicketDone, StepsFailed)):
            self.drop_feeds(event.ticket)
        elif isinstance(event, CompileFinished):
            self.digest = event.digest
        elif _is_end(event):
            self._ended = True
        self.wake()

    @property
    def dropped_through(self) -> int:
        """The last step whose outputs are not kept any longer; -1 where all are."""
        return self._dropped_through

    def wake(self) -> None:
        """Let readers look again; they yield nothing new where there is none."""
        self._changes.tell()

    def forget_outputs(self) -> None:
        """Keep only what happened, not what was computed."""
        self.has_forgotten = True
        self._limit = 0
        self._trim(self._latest_step + 1)
        self._events = [
            None if isinstance(event, RankTimeline) else event for event in self._events
        ]

    def _trim(self, before_step: int) -> None:
        """Drop outputs of old steps until the rest fits."""
        while self._held > self._limit and self._trimmed < len(self._events):
            event = self._events[self._trimmed]
            if isinstance(event, (RankOutputs, StepDone)):
                if event.step >= before_step:
                    return
                self._dropped_through = max(self._dropped_through, event.step)
                self._events[self._trimmed] = None
                if isinstance(event, RankOutputs):
                    self._held -= _size(event)
            self._trimmed += 1

    async def read(self, since: int = 0) -> AsyncIterator[list[JobEvent]]:
        """All events from the beginning to the job's end, each time those that there are; none when
        woken without one. Of steps before `since` it says only how many there were, ahead of the
        first other one or of the end.
        """
        position = 0
        told_through = since - 1
        skips = since > 0
        waiting: Waiting | None = None
        self.readers += 1
        try:
            while True:
                if position == len(self._events) and self.waiting in (None, waiting):
                    if self._ended:
                        return
                    await self._changes.wait()
                batch = self._events[position:]
                dropped_through = self._dropped_through
                told_through = max(told_through, self._first_step - 1)
                position += len(batch)
                events: list[JobEvent] = []
                for event in batch:
                    if isinstance(event, (RankOutputs, StepDone)):
                        if event.step <= dropped_through:
                            event = None
                        elif event.step < since:
                            continue
                    if skips and (isinstance(event, (RankOutputs, StepDone)) or _is_end(event)):
                        skips = False
                        if count := self._steps_before(since):
                            events.append(StepsSkipped(count))
                    if event is None:
                        if dropped_through > told_through:
                            events.append(StepsDropped(dropped_through - told_through))
                            told_through = dropped_through
                        continue
                    if isinstance(event, StepDone):
                        told_through = max(told_through, event.step)
                    events.append(event)
                if self.waiting is not None and self.waiting is not waiting:
                    waiting = self.waiting
                    events.append(waiting)
                yield events
        finally:
            self.readers -= 1

    def _steps_before(self, since: int) -> int:
        """How many of the steps so far come before this one."""
        if self._first_step < 0:
            return 0
        return max(0, min(since, self._latest_step + 1) - self._first_step)

    # --- bytes ----------------------------------------------------------------------------------

    async def compiled(self) -> None:
        """Return when there is what the job was compiled into, or never will be."""
        while not self._ended and (self.request.compile_only or not self.digest):
            await self._changes.wait()

    def keep_plan(self, rank: int, plan: Parcel, reservation: Reservation) -> None:
        """Hold the plan that a rank has made; ClusterError where the job has ended meanwhile."""
        if self._ended:
            raise ClusterError("nobody waits for this plan any longer", rank=rank)
        self.plans[rank] = plan
        self._plan_reservations.append(reservation)

    def restore_plans(self, plans: Mapping[int, Parcel], graph: Parcel) -> None:
        """Hold what an earlier master had of a job that is compiled only."""
        self.plans, self.graph = dict(plans), graph

    def compiled_parts(self) -> list[tuple[str, tuple[int, ...], Parcel]]:
        """The graph, where there is one, and the plans or, in their place, the slices of ranks:
        kind, ranks and bytes.
        """
        parts = [] if self.graph is None else [("graph", (), self.graph)]
        mode = "slice" if self.request.mode == SLICES_MODE and not self.plans else "plan"
        ranks_of: dict[int, list[int]] = {}
        parcels = self.plans or self.parcels
        for rank, parcel in sorted(parcels.items()):
            ranks_of.setdefault(id(parcel), []).append(rank)
        return parts + [(mode, tuple(ranks), parcels[ranks[0]]) for ranks in ranks_of.values()]

    def forget_plans(self) -> None:
        """Let go of what the job was compiled into."""
        self.data, self.parcels, self.graph = b"", {}, None
        self.plans.clear()
        for reservation in self._plan_reservations:
            reservation.close()
        self._plan_reservations.clear()

    def keep_feeds(self, ticket: int, feeds: Parcel, reservation: Reservation) -> None:
        """Hold what workers fetch for a ticket, until it is done."""
        self.feeds[ticket], self._reservations[ticket] = feeds, reservation

    def drop_feeds(self, ticket: int) -> None:
        """Let go of a ticket's feeds, if there are any."""
        self.feeds.pop(ticket, None)
        reservation = self._reservations.pop(ticket, None)
        if reservation is not None:
            reservation.close()

    def release(self) -> None:
        """Let go of what only a running job needs."""
        self.job = None
        for reservation in self._reservations.values():
            reservation.close()
        self._reservations.clear()
        if not self.digest:
            self.forget_plans()
        self.log.close()
        self.feeds.clear()
        relays, self.relays = list(self.relays.values()), {}
        for relay in relays:
            relay.close()


class Relay(Generic[Piece]):
    """Carries every rank's upload to one client, in rank order and without keeping it."""

    def __init__(self, world_size: int) -> None:
        self._waiting: list[deque[Piece | None]] = [deque() for _ in range(world_size)]
        self._changes = Changes()
        self._closed = False
        self._ended = False
        self.error: PlanCompilerError | None = None
        """Why the upload has no end."""

    async def put(self, rank: int, chunk: Piece | None) -> None:
        """Hand over a rank's next chunk, or None after its last; waits until there is room.

        Raises ClusterError once the relay is closed.
        """
        waiting = self._waiting[rank]
        while not self._closed and len(waiting) >= _RELAY_CHUNKS:
            await self._changes.wait()
        if self._closed:
            raise ClusterError("nobody waits for this upload any longer")
        waiting.append(chunk)
        self._changes.tell()

    async def chunks(self) -> AsyncIterator[Piece]:
        """All chunks of all ranks, rank by rank."""
        for waiting in self._waiting:
            while True:
                while not waiting and not self._closed and not self._ended:
                    await self._changes.wait()
                if not waiting:
                    raise ClusterError("what was asked of the workers did not come to its end")
                chunk = waiting.popleft()
                self._changes.tell()
                if chunk is None:
                    break
                yield chunk

    def end(self) -> None:
        """Nothing comes after what waits to be taken."""
        self._ended = True
        self._changes.tell()

    def close(self) -> None:
        """Wake everyone who waits."""
        self._closed = True
        self._changes.tell()


def _is_end(event: JobEvent | None) -> bool:
    return isinstance(event, PhaseChanged) and event.phase.is_end


def _size(event: RankOutputs) -> int:
    return len(event.arrays) + _EVENT_OVERHEAD
