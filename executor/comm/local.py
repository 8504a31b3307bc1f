"""`local` transport: all ranks are threads of one process and read each other's arrays directly."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Condition, Lock

from plancompiler.errors import DeadlineError, PlanCompilerError, TransportError
from plancompiler.executor.actor import Notice
from plancompiler.executor.comm.base import (
    GroupKey,
    Publication,
    Sink,
    aborted_by,
    check_groups,
    left_barrier,
    missed_barrier,
)
from plancompiler.executor.memory import Buffer, Slots, private_buffer, slot_arrays
from plancompiler.ir.shard import Region
from plancompiler.plan.plan import Block


class _Meeting:
    """The counters of one group, shared by its members."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.counts = [0] * len(ranks)
        self.condition = Condition(Lock())


class LocalGroup:
    """One member's view of a meeting."""

    def __init__(self, hub: LocalHub, meeting: _Meeting, rank: int, deadline: float) -> None:
        self.ranks = meeting.ranks
        self.member = meeting.ranks.index(rank)
        self._hub = hub
        self._meeting = meeting
        self._deadline = deadline

    def missing(self) -> list[int]:
        """See `Group.missing`."""
        counts = self._meeting.counts
        target = counts[self.member]
        return [rank for rank, count in zip(self.ranks, counts, strict=True) if count < target]

    def barrier(self, label: str) -> None:
        """See `Group.barrier`."""
        meeting, hub = self._meeting, self._hub
        counts = meeting.counts
        with meeting.condition:
            counts[self.member] += 1
            target = counts[self.member]
            if min(counts) >= target:
                meeting.condition.notify_all()
                return

            came = meeting.condition.wait_for(
                lambda: (
                    min(counts) >= target
                    or hub.failure is not None
                    or not hub.left.isdisjoint(self.missing())
                ),
                None if hub.is_watched(self.ranks[self.member]) else self._deadline,
            )
            absent = self.missing()
            if not absent:
                return
        if hub.failure is not None:
            raise hub.abort_error()
        if not came:
            raise missed_barrier(label, self.ranks, absent, self._deadline)
        raise left_barrier(label, self.ranks, min(hub.left.intersection(absent)))


class LocalHub:
    """Where the ranks of one process meet. Make one per run and a transport per rank."""

    def __init__(self) -> None:
        self.failure: tuple[int, PlanCompilerError] | None = None
        """The first failure, with its rank."""
        self.left: set[int] = set()
        """Ranks that have closed."""
        self._state = Condition(Lock())
        self._publications: dict[int, Publication] = {}
        self._sinks: dict[int, Sink] = {}
        self._watchers: dict[int, Callable[[int, bytes], None]] = {}
        self._slots: dict[tuple[int, int], Slots] = {}
        self._meetings: dict[GroupKey, _Meeting] = {}

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
            with meeting.condition:
                meeting.condition.notify_all()
        for rank, sink in sinks:
            if rank != failed_rank:
                sink.peer_failed(self.abort_error())

    def abort_error(self) -> PlanCompilerError:
        """A fresh AbortedError that names the first failure."""
        if self.failure is None:
            raise TransportError("no rank has failed")
        rank, error = self.failure
        return aborted_by(rank, error.report)

    def meet(self, publication: Publication, sink: Sink, slots: dict[int, Slots]) -> None:
        """Make a rank known to the others."""
        with self._state:
            if publication.rank in self._publications:
                raise TransportError("a rank was started twice", rank=publication.rank)
            for register, arrays in slots.items():
                self._slots[publication.rank, register] = arrays
            for key, _ in publication.groups:
                self._meetings.setdefault(key, _Meeting(key.ranks))
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
                    raise DeadlineError(
                        f"not all peers were ready within {deadline:g} s",
                        rank=publication.rank,
                        got=f"missing ranks {missing()}",
                        expected=f"ranks {list(publication.peers)}",
                    )
        if self.failure is not None:
            raise self.abort_error()
        for peer in publication.peers:
            check_groups(publication, peer, self._publications[peer].groups)

    def slots(self, rank: int, register: int) -> Slots | None:
        """Arrays of a published register."""
        return self._slots.get((rank, register))

    def meeting(self, key: GroupKey) -> _Meeting:
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
            self.left.add(rank)
            self._sinks.pop(rank, None)
            self._watchers.pop(rank, None)
            meetings = [meeting for key, meeting in self._meetings.items() if rank in key.ranks]
        for meeting in meetings:
            with meeting.condition:
                meeting.condition.notify_all()


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
            register.id: slot_arrays(
                self._buffers[register.block] if register.block >= 0 else private_buffer(0),
                register.offset,
                register.nbytes,
                register.register_count,
                register.shape,
                register.dtype,
            )
            for register in publication.registers
        }
        self._hub.meet(publication, sink, slots)
        self._connected = True
        self._hub.wait_for_peers(publication, deadline)

    def watch(self, receive: Callable[[int, bytes], None]) -> None:
        """See `Transport.watch`."""
        self._hub.watch(self.rank, receive)

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
