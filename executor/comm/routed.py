"""A transport of two: peers of this host over shared memory, all others over mirrors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from plancompiler.errors import DeadlineError, PlanCompilerError
from plancompiler.executor.actor import Notice
from plancompiler.executor.comm.base import Group, GroupKey, Publication, Sink
from plancompiler.executor.comm.departures import missed_barrier
from plancompiler.executor.comm.host import HostGroup, HostTransport
from plancompiler.executor.comm.mirror import MirrorGroup, MirrorTransport
from plancompiler.executor.memory import Buffer, Slots
from plancompiler.ir.shard import Region
from plancompiler.plan.plan import Block


class RoutedGroup:
    """A group with members here and elsewhere."""

    def __init__(self, near: HostGroup, far: MirrorGroup, deadline: float) -> None:
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


class RoutedTransport:
    """Picks per peer: the ranks in `far` are on other hosts, all others on this one."""

    def __init__(self, near: HostTransport, far: MirrorTransport, ranks: Collection[int]) -> None:
        self.rank = near.rank
        self._near = near
        self._far = far
        self._far_ranks = frozenset(ranks)
        self._groups: dict[GroupKey, Group] = {}
        self._deadline = 0.0

    def allocate(self, block: Block) -> Buffer:
        """See `Transport.allocate`."""
        buffer = self._near.allocate(block)
        self._far.adopt(block, buffer)
        return buffer

    def connect(self, publication: Publication, sink: Sink, deadline: float) -> None:
        """See `Transport.connect`."""
        self._deadline = deadline
        far = tuple(peer for peer in publication.peers if peer in self._far_ranks)
        near = tuple(peer for peer in publication.peers if peer not in self._far_ranks)
        self._near.connect(replace(publication, peers=near), sink, deadline)
        self._far.connect(replace(publication, peers=far), sink, deadline)

    def watch(self, receive: Callable[[int, bytes], None]) -> None:
        """See `Transport.watch`."""
        self._near.watch(receive)
        self._far.watch(receive)

    def process_of(self, rank: int) -> int | None:
        """See `Transport.process_of`."""
        return self._near.process_of(rank)

    def tell(self, rank: int, note: bytes) -> None:
        """See `Transport.tell`."""
        (self._far if rank in self._far_ranks else self._near).tell(rank, note)

    def peer_register(self, rank: int, register: int) -> Slots | None:
        """See `Transport.peer_register`."""
        if rank in self._far_ranks:
            return self._far.peer_register(rank, register)
        return self._near.peer_register(rank, register)

    def push(
        self, rank: int, register: int, slot: int, region: Region, flat: bool = False
    ) -> Callable[[], object] | None:
        """See `Transport.push`."""
        if rank in self._far_ranks:
            return self._far.push(rank, register, slot, region, flat)
        return None

    def group(self, key: GroupKey) -> Group:
        """See `Transport.group`."""
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
        """See `Transport.notify`."""
        (self._far if notice.rank in self._far_ranks else self._near).notify(notice)

    def abort(self, failed_rank: int, error: PlanCompilerError) -> None:
        """See `Transport.abort`."""
        self._near.abort(failed_rank, error)
        self._far.abort(failed_rank, error)

    def close(self) -> None:
        """See `Transport.close`."""
        self._near.close()
        self._far.close()
        self._groups.clear()
