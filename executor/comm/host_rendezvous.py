"""Rendezvous of ranks that are processes of one host, in memory that they share.

Every rank shares one block with all others: a page for each of its groups, and a staging area for
each stream. A group's page holds the rank's counter of the group's barriers, the digest by which
peers find the page, and two slots for what is published, used in turn. What does not fit a slot
goes through the staging area, in rounds.
"""

from __future__ import annotations

import time

import numpy as np

from plancompiler.errors import TransportError
from plancompiler.executor.comm.host import HostGroup, HostLink, PeerWait
from plancompiler.executor.comm.link import GroupKey, MemoryRegion, Publication
from plancompiler.executor.comm.operations import Arrays, Targets
from plancompiler.executor.comm.packed_arrays import (
    LINE,
    PackedArrays,
    header_of,
    packed_bytes,
    payload_start,
    read_packed,
    write_arrays,
    write_header,
)
from plancompiler.executor.comm.peer_failures import left_barrier, missed_barrier
from plancompiler.executor.comm.rendezvous import Published, WorldLink, rendezvous_digest
from plancompiler.executor.memory import Buffer
from plancompiler.ir import DType
from plancompiler.limits.time_limits import DEADLINE, START_DEADLINE

SLOT_BYTES = 16 << 10
PAGE_BYTES = 2 * LINE + 2 * SLOT_BYTES
PAGES = 128
"""Groups that a rank can be a member of."""
STAGING_BYTES = 4 << 20
STAGINGS = 2
"""Streams that run beside each other, each with a staging area: compute, and communicator."""
_MAILBOX_BYTES = PAGES * PAGE_BYTES + STAGINGS * STAGING_BYTES
_MAILBOX = "mailbox"
_POLL_SECONDS = 1e-3
_STAGED, _BY_MEMBER = 1, 2
"""Flags of a slot: its arrays are in the staging area; each is read by the member of its position
alone."""


class HostWorldLink(WorldLink):
    """One rank's link to the other processes of a world.

    `start_deadline` (seconds) holds for meeting the others, `deadline` for every later wait: that
    long they may stand still.
    """

    link: HostLink

    def __init__(
        self,
        link: HostLink,
        size: int,
        deadline: float = DEADLINE,
        start_deadline: float = START_DEADLINE,
    ) -> None:
        super().__init__(link, deadline)
        self._own = link.allocate(0, _MAILBOX_BYTES, True, _MAILBOX)
        region = MemoryRegion(0, 0, 0, _MAILBOX_BYTES, 1, DType.UINT8, (_MAILBOX_BYTES,), _MAILBOX)
        peers = tuple(peer for peer in range(size) if peer != link.rank)
        link.connect(Publication(link.rank, (region,), peers=peers), self, start_deadline)
        self._pages = 0

    def mailbox(self, rank: int) -> Buffer:
        """The shared memory of a rank; that of others can only be read."""
        if rank == self.rank:
            return self._own
        slots = self.link.peer_slots(rank, 0)
        if slots is None:
            raise TransportError("a rank shares no memory with this one", rank=rank)
        return slots[0]

    def rendezvous(self, ranks: tuple[int, ...], stream: str = "") -> HostRendezvous:
        """See `WorldLink.rendezvous`."""
        if self._pages == PAGES:
            raise TransportError(
                "a rank is a member of too many groups", got=PAGES + 1, expected=f"at most {PAGES}"
            )
        page, self._pages = self._pages, self._pages + 1
        return HostRendezvous(self, ranks, stream, page)


class HostRendezvous:
    """One member's view of a group's pages."""

    def __init__(
        self, world: HostWorldLink, ranks: tuple[int, ...], stream: str, page: int
    ) -> None:
        self.ranks = ranks
        self.member = ranks.index(world.rank)
        self._count = 0
        self._must_release = False
        self._world = world
        self.deadline = world.deadline
        self._digest = rendezvous_digest(ranks, stream)
        own = _page(world.mailbox(world.rank), page)
        own[LINE : LINE + len(self._digest)] = np.frombuffer(self._digest, np.uint8)
        mailboxes = [world.mailbox(rank) for rank in ranks]
        at = PAGES * PAGE_BYTES + (STAGING_BYTES if stream else 0)
        self._staging = [mailbox[at : at + STAGING_BYTES] for mailbox in mailboxes]
        self._pages = [own]
        """This rank's page; with the first operation, those of all members in their order."""
        self._group: HostGroup | None = None

    def _met(self, label: object) -> HostGroup:
        """The barriers of the group. Finds the pages of the others, who may still make them."""
        if self._group is not None:
            self._group.deadline = self.deadline
            return self._group
        world, (own,) = self._world, self._pages
        pages = []
        for rank in self.ranks:
            page = own
            if rank != world.rank:
                page = self._find_page(rank, label)
            pages.append(page)
        # NumPy's stubs give arrays a buffer of any kind; memoryview's want one of bytes.
        lines = [memoryview(page[:8].view(np.int64)) for page in pages]  # type: ignore[arg-type]
        self._pages = pages
        self._group = HostGroup(
            world.link,
            GroupKey(self.ranks, 0, "eager"),
            lines[self.member],
            [
                (rank, line)
                for rank, line in zip(self.ranks, lines, strict=True)
                if rank != world.rank
            ],
            self.deadline,
        )
        return self._group

    def _page_of(self, rank: int) -> Buffer | None:
        """A peer's page for the group, if the peer has made it."""
        mailbox = self._world.mailbox(rank)
        for page in range(PAGES):
            content = _page(mailbox, page)
            written = content[LINE : LINE + len(self._digest)].tobytes()
            if written == self._digest:
                return content
            if not any(written):
                break
        return None

    def _find_page(self, rank: int, label: object) -> Buffer:
        """The same, when the peer has made it."""
        link = self._world.link
        wait = PeerWait(link, self.deadline)
        while True:
            # Whether it has gone is asked before its pages are: they stay when it goes.
            gone = rank in link.gone
            content = self._page_of(rank)
            if content is not None:
                return content
            if link.failure is not None:
                raise link.abort_error()
            if gone:
                raise left_barrier(label, self.ranks, rank)
            if wait.is_over(label, [rank]):
                missing = [
                    each
                    for each in self.ranks
                    if each != self._world.rank and self._page_of(each) is None
                ]
                raise missed_barrier(label, self.ranks, missing or [rank], self.deadline)
            # Pages lie in shared memory, which wakes nobody; this happens once per group.
            time.sleep(_POLL_SECONDS)

    def publish(
        self, call: str, arrays: Arrays, label: object, targets: Targets = None
    ) -> Published:
        """See `Rendezvous.publish`."""
        if self._world.link.failure is not None:
            raise self._world.link.abort_error()
        group = self._met(label)
        self._count += 1
        at = 2 * LINE + (self._count % 2) * SLOT_BYTES
        own = self._pages[self.member][at : at + SLOT_BYTES]
        by_member = targets is not None and targets == tuple(range(len(self.ranks)))
        is_staged = _write(own, call, arrays, by_member)
        group.barrier(label)
        slots = [read_packed(page[at : at + SLOT_BYTES]) for page in self._pages]
        if not any(one.flags & _STAGED for one in slots):
            return [(one.call, one.arrays(one.payload)) for one in slots]
        if all(one.nbytes <= STAGING_BYTES for one in slots):
            if is_staged:
                write_arrays(self._staging[self.member], arrays)
            group.barrier(label)
            self._must_release = True
            places = [
                staging if one.flags & _STAGED else one.payload
                for one, staging in zip(slots, self._staging, strict=True)
            ]
            return [(one.call, one.arrays(place)) for one, place in zip(slots, places, strict=True)]
        return self._in_rounds(group, slots, arrays, label)

    def _in_rounds(
        self, group: HostGroup, slots: list[PackedArrays], arrays: Arrays, label: object
    ) -> Published:
        """What is larger than the staging area comes through it piece by piece, and is copied."""
        packed = np.empty(slots[self.member].nbytes, np.uint8)
        write_arrays(packed, arrays)
        copies = [np.empty(one.nbytes, np.uint8) for one in slots]
        spans = [
            one.span(self.member) if one.flags & _BY_MEMBER else (0, one.nbytes) for one in slots
        ]
        for start in range(0, max(one.nbytes for one in slots), STAGING_BYTES):
            piece = packed[start : start + STAGING_BYTES]
            self._staging[self.member][: piece.size] = piece
            group.barrier(label)
            for copy, staging, (low, high) in zip(copies, self._staging, spans, strict=True):
                first, last = max(low, start), min(high, start + STAGING_BYTES)
                if first < last:
                    copy[first:last] = staging[first - start : last - start]
            group.barrier(label)
        return [(one.call, one.arrays(copy)) for one, copy in zip(slots, copies, strict=True)]

    def release(self, label: object) -> None:
        """See `Rendezvous.release`."""
        if self._must_release:
            self._must_release = False
            self._met(label).barrier(label)


def _page(mailbox: Buffer, page: int) -> Buffer:
    return mailbox[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]


def _write(slot: Buffer, call: str, arrays: Arrays, by_member: bool) -> bool:
    """Fill a slot: header, and the arrays unless they must be staged; whether they must."""
    text = header_of(call, arrays)
    start = payload_start(text)
    if start > SLOT_BYTES:
        raise TransportError(
            "a collective of too many arrays", got=f"{len(arrays)} arrays", expected="fewer"
        )
    is_staged = start + packed_bytes(arrays) > SLOT_BYTES
    write_header(slot, text, is_staged * _STAGED + by_member * _BY_MEMBER)
    if not is_staged:
        write_arrays(slot[start:], arrays)
    return is_staged
