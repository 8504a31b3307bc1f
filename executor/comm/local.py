"""`local` link: all ranks are threads of one process and read each other's arrays directly."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from threading import Condition, Lock

from plancompiler.errors import PlanCompilerError, TransportError
from plancompiler.executor.actor import Notice
from plancompiler.executor.comm.link import GroupKey, Link, Publication, Sink, check_groups
from plancompiler.executor.comm.patience import Progress
from plancompiler.executor.comm.peer_failures import PeerFailures, peers_not_ready
from plancompiler.executor.memory import Array, Buffer, Slots, private_buffer

Published = list[tuple[str, tuple[Array, ...]]]


class Counts:
    """How often each member of a group has come, shared by its members."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.of = [0] * len(ranks)
        self.condition = Condition(Lock())
        self.published: tuple[Published, Published] = (
            [("", ())] * len(ranks),
            [("", ())] * len(ranks),
        )
        """What the members of a rendezvous publish, by parity of the count: a member publishes anew
        while others still read what was before."""

    def missing(self, member: int) -> list[int]:
        """Ranks that have come less often than a member."""
        target = self.of[member]
        return [rank for rank, count in zip(self.ranks, self.of, strict=True) if count < target]

    def wake(self) -> None:
        """Let everyone who waits look again."""
        with self.condition:
            self.condition.notify_all()


class LocalGroup:
    """One member's view of a group."""

    def __init__(self, link: LocalLink, key: GroupKey, deadline: float) -> None:
        self.ranks = key.ranks
        self.member = key.ranks.index(link.rank)
        self.deadline = deadline
        """Seconds that a wait may take."""
        self._hub = link.hub
        self._counts = link.hub.counts(key)

    def missing(self) -> list[int]:
        """See `Group.missing`."""
        return self._counts.missing(self.member)

    def barrier(self, label: object) -> None:
        """See `Group.barrier`."""
        hub, counts, member = self._hub, self._counts, self.member
        if hub.failure is not None:
            # Others may have given up here: their part must not pass for done.
            raise hub.abort_error()
        of = counts.of
        with counts.condition:
            of[member] += 1
            if min(of) >= of[member]:
                counts.condition.notify_all()
                return
            deadline = None if self.ranks[member] in hub.watchers else self.deadline
            missing = partial(counts.missing, member)
            hub.await_members(counts.condition, self.ranks, missing, label, deadline)


class LocalHub(PeerFailures):
    """Where the ranks of one process meet. Make one per run and a link per rank."""

    def __init__(self) -> None:
        super().__init__()
        self._state = Condition(Lock())
        self.publications: dict[int, Publication] = {}
        self.sinks: dict[int, Sink] = {}
        self.watchers: dict[int, Callable[[int, bytes], None]] = {}
        self.slots: dict[tuple[int, int], Slots] = {}
        self._counts: dict[GroupKey, Counts] = {}
        self._clocks: dict[int, int] = {}
        """Rank -> clock of the CPU time that its thread uses."""

    def link(self, rank: int) -> LocalLink:
        """The link of one rank."""
        return LocalLink(self, rank)

    def abort(self, failed_rank: int, error: PlanCompilerError) -> None:
        """Stop all ranks; the first call counts."""
        with self._state:
            if self.failure is not None:
                return
            self.failure = failed_rank, error
            self._state.notify_all()
            groups = list(self._counts.values())
            sinks = list(self.sinks.items())
        for counts in groups:
            counts.wake()
        for rank, sink in sinks:
            if rank != failed_rank:
                sink.peer_failed(self.abort_error())

    def meet(self, publication: Publication, sink: Sink, slots: dict[int, Slots]) -> None:
        """Make a rank known to the others."""
        with self._state:
            if publication.rank in self.publications:
                raise TransportError("a rank was started twice", rank=publication.rank)
            for region, arrays in slots.items():
                self.slots[publication.rank, region] = arrays
            self.publications[publication.rank] = publication
            self.sinks[publication.rank] = sink
            self._state.notify_all()

    def wait_for_peers(self, publication: Publication, deadline: float) -> None:
        """Return when all peers are known and agree about the groups."""

        def missing() -> list[int]:
            return [peer for peer in publication.peers if peer not in self.publications]

        with self._state:
            end = time.monotonic() + deadline
            while missing() and self.failure is None:
                if not self._state.wait(end - time.monotonic()) and missing():
                    raise peers_not_ready(publication.rank, publication.peers, missing(), deadline)
        if self.failure is not None:
            raise self.abort_error()
        for peer in publication.peers:
            check_groups(publication, peer, self.publications[peer].groups)

    def counts(self, key: GroupKey) -> Counts:
        """What the members of a group share."""
        with self._state:
            return self._counts.setdefault(key, Counts(key.ranks))

    def watch_thread(self, rank: int) -> None:
        """Let others see whether the calling thread, which is a rank, works."""
        self._clocks[rank] = time.pthread_getcpuclockid(threading.get_ident())

    def work_of(self, rank: int) -> Progress | None:
        """See `PeerFailures.work_of`."""
        clock = self._clocks.get(rank)
        if clock is None:
            return None
        try:
            return Progress(time.clock_gettime(clock))
        except OSError:  # the thread has ended
            return None

    def leave(self, rank: int) -> None:
        """A rank has closed: free those who wait for it.

        Its arrays stay known, because a slower peer may still have to read what it sent.
        """
        with self._state:
            self.gone.add(rank)
            self.sinks.pop(rank, None)
            self.watchers.pop(rank, None)
            groups = [counts for key, counts in self._counts.items() if rank in key.ranks]
        for counts in groups:
            counts.wake()


class LocalLink(Link):
    """One rank's link to the others by way of the hub."""

    def __init__(self, hub: LocalHub, rank: int) -> None:
        self.rank = rank
        self.hub = hub
        self._buffers: dict[int, Buffer] = {}
        self._groups: dict[GroupKey, LocalGroup] = {}
        self._deadline = 0.0
        self._connected = False

    def near(self, ranks: Collection[int]) -> tuple[int, ...]:
        """See `Link.near`."""
        return tuple(sorted(ranks))

    def allocate(self, block: int, nbytes: int, shared: bool, purpose: str = "") -> Buffer:
        """See `Link.allocate`."""
        self._buffers[block] = buffer = private_buffer(nbytes)
        return buffer

    def connect(self, publication: Publication, sink: Sink, deadline: float) -> None:
        """See `Link.connect`."""
        self._deadline = deadline
        self.open(publication, sink)
        self.hub.wait_for_peers(publication, deadline)

    def open(self, publication: Publication, sink: Sink) -> None:
        """Make this rank known to the others, who need not be there yet."""
        slots = {
            region.key: region.slots(self._buffers.get(region.block))
            for region in publication.regions
        }
        self.hub.meet(publication, sink, slots)
        self._connected = True

    def watch(self, receive: Callable[[int, bytes], None]) -> None:
        """See `Link.watch`."""
        self.hub.watchers[self.rank] = receive

    def tell(self, rank: int, note: bytes) -> None:
        """See `Link.tell`."""
        receive = self.hub.watchers.get(rank)
        if receive is not None:
            receive(self.rank, note)

    def record(self, rank: int, name: str) -> str | None:
        """See `Link.record`."""
        return self.hub.publications[rank].records.get(name)

    def peer_slots(self, rank: int, region: int) -> Slots | None:
        """See `Link.peer_slots`."""
        return self.hub.slots.get((rank, region))

    def free(self, rank: int, region: int) -> None:
        """See `Link.free`."""
        if rank == self.rank:
            for each in self.hub.publications[rank].regions:
                if each.key == region:
                    del self._buffers[each.block], self.hub.slots[rank, region]

    def group(self, key: GroupKey) -> LocalGroup:
        """See `Link.group`."""
        if key not in self._groups:
            self._groups[key] = LocalGroup(self, key, self._deadline)
        return self._groups[key]

    def notify(self, notice: Notice) -> None:
        """See `Link.notify`."""
        sink = self.hub.sinks.get(notice.rank)
        if sink is not None:
            sink.notice(notice.kind, notice.register, notice.task)

    def abort(self, failed_rank: int, error: PlanCompilerError) -> None:
        """See `Link.abort`."""
        self.hub.abort(failed_rank, error)

    def close(self) -> None:
        """See `Link.close`."""
        if self._connected:
            self._connected = False
            self.hub.leave(self.rank)
        self._buffers.clear()
