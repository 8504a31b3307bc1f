"""Boards of ranks that are processes of one host, over the memory of the host transport.

Every rank shares one block with all others: a page for each of its groups, and a staging area. A
group's page holds the rank's counter of the group's barriers, the digest by which peers find the
page, and two slots for what is shown, used in turn. What does not fit a slot goes through the
staging area, in rounds.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

import numpy as np

from plancompiler.errors import DeadlineError, PlanCompilerError, TransportError
from plancompiler.executor.comm.base import GroupKey, Publication
from plancompiler.executor.comm.context import Arrays
from plancompiler.executor.comm.host import HostGroup, HostTransport
from plancompiler.executor.memory import Array, Buffer
from plancompiler.ir import BROADCAST, DType, NdSbp
from plancompiler.ir.shard import element_count
from plancompiler.ir.task import pack_register_id
from plancompiler.plan.plan import Block, RegisterDesc

LINE = 64
SLOT_BYTES = 16 << 10
PAGE_BYTES = 2 * LINE + 2 * SLOT_BYTES
PAGES = 128
"""Groups that a rank can be a member of."""
STAGING_BYTES = 4 << 20
_MAILBOX_BYTES = PAGES * PAGE_BYTES + STAGING_BYTES
_POLL_SECONDS = 1e-3


class _Silent:
    """Nothing is announced between ranks but failures, which every wait sees by itself."""

    def notice(self, kind: int, register: int, task: int) -> None:
        """See `Sink.notice`."""

    def peer_failed(self, error: PlanCompilerError) -> None:
        """See `Sink.peer_failed`."""


class HostBoardMaker:
    """One rank's boards: connects to all other ranks of the world.

    `token` is the world's secret, the same on all ranks. `deadline` (seconds) holds for meeting the
    others and for every later wait.
    """

    def __init__(self, token: str, rank: int, size: int, deadline: float = 300.0) -> None:
        self.rank = rank
        self.deadline = deadline
        self.transport = HostTransport(token, rank)
        block = Block(0, "mailbox", True, _MAILBOX_BYTES)
        self._own: Buffer = self.transport.allocate(block)
        mailbox = RegisterDesc(
            pack_register_id(rank, 0, 0, 0),
            "mailbox",
            (_MAILBOX_BYTES,),
            DType.UINT8,
            NdSbp((BROADCAST,)),
            producer=0,
            consumers=(),
            block=0,
            nbytes=_MAILBOX_BYTES,
        )
        peers = tuple(peer for peer in range(size) if peer != rank)
        self.transport.connect(Publication(rank, (mailbox,), (), peers), _Silent(), deadline)
        self._pages = 0

    def mailbox(self, rank: int) -> Buffer:
        """The shared memory of a rank; that of others can only be read."""
        if rank == self.rank:
            return self._own
        slots = self.transport.peer_register(rank, pack_register_id(rank, 0, 0, 0))
        if slots is None:
            raise TransportError("a rank shares no memory with this one", rank=rank)
        return slots[0]

    def board(self, ranks: tuple[int, ...]) -> HostBoard:
        """See `BoardMaker.board`."""
        if self._pages == PAGES:
            raise TransportError(
                "a rank is a member of too many groups", got=PAGES + 1, expected=f"at most {PAGES}"
            )
        page, self._pages = self._pages, self._pages + 1
        return HostBoard(self, ranks, page)

    def abort(self, error: PlanCompilerError) -> None:
        """See `BoardMaker.abort`."""
        self.transport.abort(self.rank, error)

    def close(self) -> None:
        """See `BoardMaker.close`."""
        self.transport.close()


@dataclass(frozen=True, slots=True)
class _Shown:
    """What a member's slot says."""

    call: str
    staged: bool
    shapes: tuple[tuple[np.dtype[np.generic], tuple[int, ...]], ...]
    payload: Buffer
    """What follows the header in the slot."""

    @property
    def nbytes(self) -> int:
        return sum(_padded(element_count(shape) * dtype.itemsize) for dtype, shape in self.shapes)

    def arrays(self, data: Buffer) -> Arrays:
        """The arrays that lie in these bytes."""
        found, start = [], 0
        for dtype, shape in self.shapes:
            used = element_count(shape) * dtype.itemsize
            found.append(data[start : start + used].view(dtype).reshape(shape))
            start += _padded(used)
        return tuple(found)


class HostBoard:
    """One member's view of a group's pages."""

    def __init__(self, maker: HostBoardMaker, ranks: tuple[int, ...], page: int) -> None:
        self.ranks = ranks
        self.member = ranks.index(maker.rank)
        self._count = 0
        self._must_leave = False
        digest = hashlib.blake2b(",".join(map(str, ranks)).encode(), digest_size=16).digest()
        own = _page(maker.mailbox(maker.rank), page)
        own[LINE : LINE + len(digest)] = np.frombuffer(digest, np.uint8)
        end = time.monotonic() + maker.deadline
        mailboxes = [maker.mailbox(rank) for rank in ranks]
        self._pages = [
            own if rank == maker.rank else _find_page(maker, mailbox, digest, rank, end)
            for rank, mailbox in zip(ranks, mailboxes, strict=True)
        ]
        self._staging = [mailbox[PAGES * PAGE_BYTES :] for mailbox in mailboxes]
        # NumPy's stubs give arrays a buffer of any kind; memoryview's want one of bytes.
        lines = [memoryview(page[:8].view(np.int64)) for page in self._pages]  # type: ignore[arg-type]
        self._group = HostGroup(
            maker.transport,
            GroupKey(ranks, 0, "eager"),
            lines[self.member],
            [(rank, line) for rank, line in zip(ranks, lines, strict=True) if rank != maker.rank],
            maker.deadline,
        )

    def show(self, call: str, arrays: Arrays, label: str) -> list[tuple[str, Arrays]]:
        """See `Board.show`."""
        self._count += 1
        at = 2 * LINE + (self._count % 2) * SLOT_BYTES
        own = self._pages[self.member][at : at + SLOT_BYTES]
        room = _write(own, call, arrays)
        self._group.barrier(label)
        shown = [_read(page[at : at + SLOT_BYTES]) for page in self._pages]
        if not any(one.staged for one in shown):
            return [(one.call, one.arrays(one.payload)) for one in shown]
        if all(one.nbytes <= STAGING_BYTES for one in shown):
            if not room:
                _pack(self._staging[self.member], arrays)
            self._group.barrier(label)
            self._must_leave = True
            places = [
                staging if one.staged else one.payload
                for one, staging in zip(shown, self._staging, strict=True)
            ]
            return [(one.call, one.arrays(place)) for one, place in zip(shown, places, strict=True)]
        return self._in_rounds(shown, arrays, label)

    def _in_rounds(
        self, shown: list[_Shown], arrays: Arrays, label: str
    ) -> list[tuple[str, Arrays]]:
        """What is larger than the staging area comes through it piece by piece, and is copied."""
        packed = np.empty(shown[self.member].nbytes, np.uint8)
        _pack(packed, arrays)
        copies = [np.empty(one.nbytes, np.uint8) for one in shown]
        for start in range(0, max(one.nbytes for one in shown), STAGING_BYTES):
            piece = packed[start : start + STAGING_BYTES]
            self._staging[self.member][: piece.size] = piece
            self._group.barrier(label)
            for copy, staging in zip(copies, self._staging, strict=True):
                target = copy[start : start + STAGING_BYTES]
                target[:] = staging[: target.size]
            self._group.barrier(label)
        return [(one.call, one.arrays(copy)) for one, copy in zip(shown, copies, strict=True)]

    def leave(self, label: str) -> None:
        """See `Board.leave`."""
        if self._must_leave:
            self._must_leave = False
            self._group.barrier(label)


def _page(mailbox: Buffer, page: int) -> Buffer:
    return mailbox[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]


def _find_page(
    maker: HostBoardMaker, mailbox: Buffer, digest: bytes, rank: int, end: float
) -> Buffer:
    """The peer's page for the group, when the peer has made it."""
    while True:
        for page in range(PAGES):
            found = _page(mailbox, page)
            written = found[LINE : LINE + len(digest)].tobytes()
            if written == digest:
                return found
            if not any(written):
                break
        transport = maker.transport
        if transport.failure is not None:
            raise transport.abort_error()
        if rank in transport.gone:
            raise TransportError("a rank has ended and joins no group any more", rank=rank)
        if time.monotonic() > end:
            raise DeadlineError(
                f"rank {rank} did not join a group within {maker.deadline:g} s",
                hint="make the same groups on all their members",
            )
        # Pages lie in shared memory, which wakes nobody; this happens once per group.
        time.sleep(_POLL_SECONDS)


def _padded(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


def _write(slot: Buffer, call: str, arrays: Arrays) -> bool:
    """Fill a slot: header, and the arrays if they fit; whether they did."""
    total = sum(_padded(array.nbytes) for array in arrays)
    kinds = ";".join(" ".join([array.dtype.name, *map(str, array.shape)]) for array in arrays)
    text = f"{call}\n{kinds}".encode()
    start = _padded(len(text) + 8)
    if start > SLOT_BYTES:
        raise TransportError(
            "a collective of too many arrays", got=f"{len(arrays)} arrays", expected="fewer"
        )
    room = start + total <= SLOT_BYTES
    slot[:8].view(np.int32)[:] = len(text), 0 if room else 1
    slot[8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
    if room:
        _pack(slot[start:], arrays)
    return room


def _read(slot: Buffer) -> _Shown:
    length, staged = slot[:8].view(np.int32).tolist()
    call, _, kinds = slot[8 : 8 + length].tobytes().decode().partition("\n")
    shapes = []
    for kind in kinds.split(";") if kinds else ():
        name, *extents = kind.split(" ")
        shapes.append((DType.parse(name).numpy, tuple(map(int, extents))))
    return _Shown(call, bool(staged), tuple(shapes), slot[_padded(length + 8) :])


def _pack(target: Buffer, arrays: Arrays) -> None:
    """Copy arrays one after another, each from the start of a line."""
    start = 0
    for array in arrays:
        place: Array = target[start : start + array.nbytes].view(array.dtype)
        np.copyto(place.reshape(array.shape), array)
        start += _padded(array.nbytes)
