"""A link of two: peers of this host over shared memory, all others over messages."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from plancompiler.errors import DeadlineError, PlanCompilerError
from plancompiler.executor.actor import Notice
from plancompiler.executor.comm.host import HostGroup, HostLink
from plancompiler.executor.comm.link import Group, GroupKey, Publication, Sink
from plancompiler.executor.comm.messages import MessageGroup, MessageLink
from plancompiler.executor.comm.peer_failures import missed_barrier
from plancompiler.executor.memory import Buffer, Slots
from plancompiler.ir.shard import Region


class RoutedGroup:
    """A group with members here and elsewhere."""

    def __init__(self, near: HostGroup, far: MessageGroup, deadline: float) -> None:
        self.ranks = near.ranks
        self.member = near.member
        self._near = near
        self._far = far
        self._deadline = deadline

    def missing(self) -> list[int]:
        """See `Group.missing`."""
        return [*self._near.missing(), *self._far.missing()]

    def barrier(self, label: object) -> None:
        """See `Group.barrier`."""
        self._far.announce()
        try:
            self._near.barrier(label)
            self._far.wait(label)
        except DeadlineError:
            raise missed_barrier(label, self.ranks, self.missing(), self._deadline) from None


class RoutedLink:
    """Picks per peer: the ranks in `far` are on other hosts, all others on this one."""

    def __init__(self, near: HostLink, far: MessageLink, ranks: Collection[int]) -> None:
        self.rank = near.rank
        self._near = near
        self._far = far
        self._far_ranks = frozenset(ranks)
        self._groups: dict[GroupKey, Group] = {}
        self._deadline = 0.0

    def near(self, ranks: Collection[int]) -> tuple[int, ...]:
        """See `Link.near`."""
        return self._near.near({*ranks} - self._far_ranks)

    def allocate(self, block: int, nbytes: int, shared: bool, purpose: str = "") -> Buffer:
        """See `Link.allocate`."""
        buffer = self._near.allocate(block, nbytes, shared, purpose)
        self._far.adopt(block, buffer)
        return buffer

    def connect(self, publication: Publication, sink: Sink, deadline: float) -> None:
        """See `Link.connect`."""
        self._deadline = deadline
        far = tuple(peer for peer in publication.peers if peer in self._far_ranks)
        near = tuple(peer for peer in publication.peers if peer not in self._far_ranks)
        self._near.connect(replace(publication, peers=near), sink, deadline)
        self._far.connect(replace(publication, peers=far), sink, deadline)

    def watch(self, receive: Callable[[int, bytes], None]) -> None:
        """See `Link.watch`."""
        self._near.watch(receive)
        self._far.watch(receive)

    def process_of(self, rank: int) -> int | None:
        """See `Link.process_of`."""
        return self._near.process_of(rank)

    def tell(self, rank: int, note: bytes) -> None:
        """See `Link.tell`."""
        self._to(rank).tell(rank, note)

    def record(self, rank: int, name: str) -> str | None:
        """See `Link.record`."""
        return self._to(rank).record(rank, name)

    def peer_slots(self, rank: int, region: int) -> Slots | None:
        """See `Link.peer_slots`."""
        return self._to(rank).peer_slots(rank, region)

    def free(self, rank: int, region: int) -> None:
        """See `Link.free`."""
        self._to(rank).free(rank, region)
        if rank == self.rank:
            self._far.free(rank, region)

    def push(
        self, rank: int, region: int, slot: int, box: Region, flat: bool = False
    ) -> Callable[[], object] | None:
        """See `Link.push`."""
        return self._to(rank).push(rank, region, slot, box, flat)

    def _to(self, rank: int) -> HostLink | MessageLink:
        return self._far if rank in self._far_ranks else self._near

    def group(self, key: GroupKey) -> Group:
        """See `Link.group`."""
        if key not in self._groups:
            self._groups[key] = self._make_group(key)
        return self._groups[key]

    def _make_group(self, key: GroupKey) -> Group:
        others = set(key.ranks) - {self.rank}
        if not others & self._far_ranks:
            return self._near.group(key)
        if others <= self._far_ranks:
            return self._far.group(key)
        return RoutedGroup(self._near.group(key), self._far.group(key), self._deadline)

    def notify(self, notice: Notice) -> None:
        """See `Link.notify`."""
        self._to(notice.rank).notify(notice)

    def abort(self, failed_rank: int, error: PlanCompilerError) -> None:
        """See `Link.abort`."""
        self._near.abort(failed_rank, error)
        self._far.abort(failed_rank, error)

    def close(self) -> None:
        """See `Link.close`."""
        self._near.close()
        self._far.close()
        self._groups.clear()
