"""`local` transport: all ranks are threads of one process and read each other's arrays directly."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from threading import Condition, Lock

from plancompiler.errors import PlanCompilerError, TransportError
from plancompiler.executor.actor import Notice
from plancompiler.executor.comm.base import GroupKey, Publication, Sink, check_groups
from plancompiler.executor.comm.departures import Departures, missed_meeting
from plancompiler.executor.memory import Buffer, Slots, private_buffer, register_slots
from plancompiler.ir.shard import Region
from plancompiler.plan.plan import Block


class Meeting:
    """How often each member of a group has come, shared by its members."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.counts = [0] * len(ranks)
        self.condition = Condition(Lock())

    def missing(self, member: int) -> list[int]:
        """Ranks that have come less often than a member."""
        target = self.counts[member]
        return [rank for rank, count in zip(self.ranks, self.counts, strict=True) if count < target]

    def barrier(
        self, departures: Departures, member: int, label: object, deadline: float | None
    ) -> None:
        """Return when all members have come as often as this one; see `Group.barrier`."""
        counts = self.counts
        with self.condition:
            counts[member] += 1
            if min(counts) >= counts[member]:
                self.condition.notify_all()
                return
            departures.await_members(
                self.condition, self.ranks, partial(self.missing, member), label, deadline
            )

    def wake(self) -> None:
        """Let everyone who waits look again."""
        with self.condition:
            self.condition.notify_all()


class LocalGroup:
    """One member's view of a meeting."""

    def __init__(self, hub: LocalHub, meeting: Meeting, rank: int, deadline: float) -> None:
        self.ranks = meeting.ranks
        self.member = meeting.ranks.index(rank)
        self._hub = hub
        self._meeting = meeting
        self._deadline = deadline

    def missing(self) -> list[int]:
        """See `Group.missing`."""
        return self._meeting.missing(self.member)

    def barrier(self, label: object) -> None:
        """See `Group.barrier`."""
        deadline = None if self._hub.is_watched(self.ranks[self.member]) else self._deadline
        self._meeting.barrier(self._hub, self.member, label, deadline)


class LocalHub(Departures):
    """Where the ranks of one process meet. Make one per run and a transport per rank."""

    def __init__(self) -> None:
        super().__init__()
        self._state = Condition(Lock())
        self._publications: dict[int, Publication] = {}
        self._sinks: dict[int, Sink] = {}
        self._watchers: dict[int, Callable[[int, bytes], None]] = {}
        self._slots: dict[tuple[int, int], Slots] = {}
        self._meetings: dict[GroupKey, Meeting] = {}

    def transport(self, rank: int) -> LocalTransport:
        """The transport of one rank."""
        return LocalTransport(self, rank)

    def abort(self, failed_rank: int, error: PlanCompilerError) -> None:
        """Stop all ranks; the first call counts."""
        with self._state:
            if self.failure is not None:
                return
            self.failure = failed_rank, error
            self._state.notify_all()
            meetings = list(self._meetings.values())
            sinks = list(self._sinks.items())
        for meeting in meetings:
            meeting.wake()
        for rank, sink in sinks:
            if rank != failed_rank:
                sink.peer_failed(self.abort_error())

    def meet(self, publication: Publication, sink: Sink, slots: dict[int, Slots]) -> None:
        """Make a rank known to the others."""
        with self._state:
            if publication.rank in self._publications:
                raise TransportError("a rank was started twice", rank=publication.rank)
            for register, arrays in slots.items():
                self._slots[publication.rank, register] = arrays
            for key, _ in publication.groups:
                self._meetings.setdefault(key, Meeting(key.ranks))
            self._publications[publication.rank] = publication
            self._sinks[publication.rank] = sink
            self._state.notify_all()

    def wait_for_peers(self, publication: Publication, deadline: float) -> None:
        """Return when all peers are known and agree about the groups."""

        def missing() -> list[int]:
            return [peer for peer in publication.peers if peer not in self._publications]

        with self._state:
            end = time.monotonic() + deadline
            while missing() and self.failure is None:
                if not self._state.wait(end - time.monotonic()) and missing():
                    raise missed_meeting(publication.rank, publication.peers, missing(), deadline)
        if self.failure is not None:
            raise self.abort_error()
        for peer in publication.peers:
            check_groups(publication, peer, self._publications[peer].groups)

    def slots(self, rank: int, register: int) -> Slots | None:
        """Arrays of a published register."""
        return self._slots.get((rank, register))

    def meeting(self, key: GroupKey) -> Meeting:
        """The shared counters of a group."""
        return self._meetings[key]

    def deliver(self, notice: Notice) -> None:
        """Hand a notice to its rank."""
        sink = self._sinks.get(notice.rank)
        if sink is not None:
            sink.notice(notice.kind, notice.register, notice.task)

    def watch(self, rank: int, receive: Callable[[int, bytes], None]) -> None:
        """Notes to a rank go here."""
        self._watchers[rank] = receive

    def is_watched(self, rank: int) -> bool:
        """Whether somebody watches over a rank's waits."""
        return rank in self._watchers

    def tell(self, sender: int, rank: int, note: bytes) -> None:
        """Bring a note to a rank's watcher, if it has one."""
        receive = self._watchers.get(rank)
        if receive is not None:
            receive(sender, note)

    def leave(self, rank: int) -> None:
        """A rank has closed: free those who wait for it.

        Its arrays stay known, because a slower peer may still have to read what it sent.
        """
        with self._state:
            self.gone.add(rank)
            self._sinks.pop(rank, None)
            self._watchers.pop(rank, None)
            meetings = [meeting for key, meeting in self._meetings.items() if rank in key.ranks]
        for meeting in meetings:
            meeting.wake()


class LocalTransport:
    """One rank's door to the hub."""

    def __init__(self, hub: LocalHub, rank: int) -> None:
        self.rank = rank
        self._hub = hub
        self._buffers: dict[int, Buffer] = {}
        self._groups: dict[GroupKey, LocalGroup] = {}
        self._deadline = 0.0
        self._connected = False

    def allocate(self, block: Block) -> Buffer:
        """See `Transport.allocate`."""
        self._buffers[block.index] = buffer = private_buffer(block.nbytes)
        return buffer

    def connect(self, publication: Publication, sink: Sink, deadline: float) -> None:
        """See `Transport.connect`."""
        self._deadline = deadline
        slots = {
            register.id: register_slots(register, self._buffers)
            for register in publication.registers
        }
        self._hub.meet(publication, sink, slots)
        self._connected = True
        self._hub.wait_for_peers(publication, deadline)

    def watch(self, receive: Callable[[int, bytes], None]) -> None:
        """See `Transport.watch`."""
        self._hub.watch(self.rank, receive)

    def process_of(self, rank: int) -> None:
        """See `Transport.process_of`."""

    def tell(self, rank: int, note: bytes) -> None:
        """See `Transport.tell`."""
        self._hub.tell(self.rank, rank, note)

    def peer_register(self, rank: int, register: int) -> Slots | None:
        """See `Transport.peer_register`."""
        return self._hub.slots(rank, register)

    def push(self, rank: int, register: int, slot: int, region: Region, flat: bool = False) -> None:
        """See `Transport.push`."""

    def group(self, key: GroupKey) -> LocalGroup:
        """See `Transport.group`."""
        if key not in self._groups:
            meeting = self._hub.meeting(key)
            self._groups[key] = LocalGroup(self._hub, meeting, self.rank, self._deadline)
        return self._groups[key]

    def notify(self, notice: Notice) -> None:
        """See `Transport.notify`."""
        self._hub.deliver(notice)

    def abort(self, failed_rank: int, error: PlanCompilerError) -> None:
        """See `Transport.abort`."""
        self._hub.abort(failed_rank, error)

    def close(self) -> None:
        """See `Transport.close`."""
        if self._connected:
            self._connected = False
            self._hub.leave(self.rank)
        self._buffers.clear()
