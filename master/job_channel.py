"""What the master keeps of a job besides its state: its bytes for the workers, its events."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping

from plancompiler.cluster.chunks import Parcel
from plancompiler.cluster.messages import (
    JobEvent,
    JobRequest,
    PhaseChanged,
    RankOutputs,
    RankTimeline,
    StepDone,
    StepsDropped,
    TicketDone,
)
from plancompiler.errors import ClusterError, DeadlineError
from plancompiler.ir import Job
from plancompiler.proto.cluster_pb2 import Chunk

EVENT_BYTES = 64 << 20
"""Outputs that are kept for readers; a reader that falls further behind misses the oldest steps."""
_EVENT_OVERHEAD = 512
_POLL_SECONDS = 0.5
_RELAY_CHUNKS = 4
"""Chunks of a rank's upload that wait for the client to take them."""


class JobChannel:
    """One job's things at the edge. All methods may be called from any thread."""

    def __init__(self, job: Job, request: JobRequest, event_bytes: int = EVENT_BYTES) -> None:
        self.job: Job | None = job
        """Until it is compiled."""
        self.request = request
        self.parcels: Mapping[int, Parcel] = {}
        """What each rank fetches; ranks with equal slices share one parcel."""
        self.feeds: dict[int, Parcel] = {}
        """By ticket."""
        self.relays: dict[int, Relay] = {}
        """By ticket."""
        self.sent_bytes = 0
        """Of parcels, to all workers."""
        self._events: list[JobEvent | None] = []
        self._changed = threading.Condition()
        self._limit = event_bytes
        self._held = 0
        self._trimmed = 0
        """Events before this index that held outputs are gone."""
        self._first_step = -1
        self._latest_step = -1
        self._dropped_through = -1
        self._ended = False

    # --- events ---------------------------------------------------------------------------------

    def publish(self, event: JobEvent) -> None:
        """Add an event for all readers, present and future."""
        with self._changed:
            self._events.append(event)
            if isinstance(event, RankOutputs):
                if self._first_step < 0:
                    self._first_step = event.step
                self._latest_step = max(self._latest_step, event.step)
                self._held += _size(event)
                if self._held > self._limit:
                    self._trim(self._latest_step)
            elif isinstance(event, TicketDone):
                self.feeds.pop(event.ticket, None)
            elif isinstance(event, PhaseChanged) and event.phase.is_end:
                self._ended = True
            self._changed.notify_all()

    def forget_outputs(self) -> None:
        """Keep only what happened, not what was computed."""
        with self._changed:
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

    def read(self, is_wanted: Callable[[], bool]) -> Iterator[JobEvent | None]:
        """All events from the beginning to the job's end; None now and then while none comes."""
        position = 0
        told_through = -1
        while is_wanted():
            with self._changed:
                if position == len(self._events):
                    if self._ended:
                        return
                    self._changed.wait(_POLL_SECONDS)
                batch = self._events[position:]
                dropped_through = self._dropped_through
                told_through = max(told_through, self._first_step - 1)
            position += len(batch)
            if not batch:
                yield None
            for event in batch:
                if isinstance(event, (RankOutputs, StepDone)) and event.step <= dropped_through:
                    event = None
                if event is None:
                    if dropped_through > told_through:
                        yield StepsDropped(dropped_through - told_through)
                        told_through = dropped_through
                    continue
                if isinstance(event, StepDone):
                    told_through = max(told_through, event.step)
                yield event

    # --- bytes ----------------------------------------------------------------------------------

    def count_sent(self, nbytes: int) -> None:
        """So many bytes are about to be sent to a worker."""
        with self._changed:
            self.sent_bytes += nbytes

    def release(self) -> None:
        """Let go of what only a running job needs."""
        with self._changed:
            self.job = None
            self.parcels = {}
            self.feeds.clear()
            relays, self.relays = list(self.relays.values()), {}
        for relay in relays:
            relay.close()


class Relay:
    """Carries every rank's variables to one client, in rank order and without keeping them."""

    def __init__(self, world_size: int) -> None:
        self._queues = [queue.Queue[Chunk | None](_RELAY_CHUNKS) for _ in range(world_size)]
        self._closed = threading.Event()

    def put(self, rank: int, chunk: Chunk | None, is_wanted: Callable[[], bool]) -> None:
        """Hand over a rank's next chunk, or None after its last; waits until there is room."""
        while not self._closed.is_set():
            try:
                self._queues[rank].put(chunk, timeout=_POLL_SECONDS)
            except queue.Full:
                if not is_wanted():
                    raise DeadlineError("an upload was given up by its worker") from None
            else:
                return
        raise ClusterError("nobody waits for these variables any longer")

    def chunks(self, is_wanted: Callable[[], bool]) -> Iterator[Chunk]:
        """All chunks of all ranks, rank by rank."""
        for waiting in self._queues:
            while True:
                try:
                    chunk = waiting.get(timeout=_POLL_SECONDS)
                except queue.Empty:
                    if self._closed.is_set():
                        raise ClusterError("the job ended before all variables came") from None
                    if not is_wanted():
                        return
                    continue
                if chunk is None:
                    break
                yield chunk

    def close(self) -> None:
        """Wake everyone who waits."""
        self._closed.set()


def _size(event: RankOutputs) -> int:
    return len(event.arrays) + _EVENT_OVERHEAD
