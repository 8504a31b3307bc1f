"""Rendezvous of ranks that share no memory: what is published goes to the others as frames.

A frame says of which rendezvous it is, the how-manieth time that its sender publishes there, and
which part of how many bytes. An array that one member reads goes to that one alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from plancompiler.errors import DTypeError, WireFormatError
from plancompiler.executor.comm import remote_wire as wire
from plancompiler.executor.comm.link import Link, Publication
from plancompiler.executor.comm.messages import MessageLink
from plancompiler.executor.comm.operations import ALL, Arrays, Targets
from plancompiler.executor.comm.packed_arrays import (
    header_of,
    packed_bytes,
    payload_start,
    read_packed,
    write_arrays,
    write_header,
)
from plancompiler.executor.comm.rendezvous import Published, WorldLink, rendezvous_digest
from plancompiler.limits.time_limits import DEADLINE

MAX_MESSAGE = 1 << 40
"""Bytes that one member may publish at once."""

_PART = struct.Struct("<B7x16sQQQ")

_Key = tuple[int, bytes, int]
"""Sender, rendezvous, and the how-manieth time that it publishes there."""


class _Part(NamedTuple):
    """A frame of a rendezvous, taken apart."""

    name: bytes
    number: int
    offset: int
    total: int


class _Incoming:
    """What a member publishes, as far as it has come."""

    def __init__(self, total: int) -> None:
        self.data = bytearray()
        self.total = total

    @property
    def complete(self) -> bool:
        return len(self.data) == self.total


class MessageWorldLink(WorldLink):
    """One rank's link by frames to all other ranks of a world, which need not be there yet.

    `deadline` (seconds) is how long those that are waited for may stand still, `start_deadline` how
    long they may take to be there at all.
    """

    link: MessageLink

    def __init__(
        self,
        link: MessageLink,
        size: int,
        deadline: float = DEADLINE,
        start_deadline: float = 0.0,
        far: Callable[[str], Link] | None = None,
    ) -> None:
        super().__init__(link, deadline, far)
        self._messages: dict[_Key, _Incoming] = {}
        link.receivers[wire.PUBLISHED] = self._receive
        peers = tuple(peer for peer in range(size) if peer != link.rank)
        link.join(Publication(link.rank, peers=peers), self, start_deadline)

    def rendezvous(self, ranks: tuple[int, ...], stream: str = "") -> MessageRendezvous:
        """See `WorldLink.rendezvous`."""
        return MessageRendezvous(self, ranks, stream)

    def send(self, peer: int, name: bytes, number: int, data: bytearray) -> None:
        """Give a peer what is published for it."""
        for offset in range(0, len(data), wire.CHUNK_BYTES):
            head = _PART.pack(wire.PUBLISHED, name, number, offset, len(data))
            self.link.send(peer, head + data[offset : offset + wire.CHUNK_BYTES])

    def take(
        self, group: MessageRendezvous, name: bytes, number: int, label: object
    ) -> dict[int, bytearray]:
        """What all peers in a group have published, by rank; waits for it."""
        link, messages = self.link, self._messages
        keys = {rank: (rank, name, number) for rank in group.ranks if rank != self.rank}
        with link.changed:

            def missing() -> list[int]:
                return [
                    rank
                    for rank, key in keys.items()
                    if key not in messages or not messages[key].complete
                ]

            try:
                link.await_members(link.changed, group.ranks, missing, label, group.deadline)
            finally:
                if link.work is not None:
                    link.work.wait(())
            if link.failure is not None:
                raise link.abort_error()
            return {rank: messages.pop(key).data for rank, key in keys.items()}

    def _receive(self, rank: int, frame: bytes) -> None:
        """A part of what a peer publishes came."""
        part = _unpack(frame)
        link = self.link
        if link.work is not None:
            link.work.move()
        with link.changed:
            key = (rank, part.name, part.number)
            message = self._messages.setdefault(key, _Incoming(part.total))
            if part.total != message.total or part.offset != len(message.data):
                raise WireFormatError(f"rank {rank} sent parts out of their order", rank=rank)
            message.data += memoryview(frame)[_PART.size :]
            if len(message.data) > message.total:
                raise WireFormatError(f"rank {rank} sent more than it said", rank=rank)
            if message.complete:
                link.changed.notify_all()


def _unpack(frame: bytes) -> _Part:
    if len(frame) < _PART.size:
        raise WireFormatError("a frame of a rendezvous has no header")
    _, name, number, offset, total = _PART.unpack_from(frame)
    if total > MAX_MESSAGE:
        raise WireFormatError("what a member publishes is too large", got=f"{total} bytes")
    return _Part(name, number, offset, total)


class MessageRendezvous:
    """One member's view of a group without shared memory."""

    def __init__(self, world: MessageWorldLink, ranks: tuple[int, ...], stream: str) -> None:
        self.ranks = ranks
        self.member = ranks.index(world.rank)
        self.deadline = world.deadline
        self._world = world
        self._count = 0
        self._name = rendezvous_digest(ranks, stream)

    def publish(
        self, call: str, arrays: Arrays, label: object, targets: Targets = None
    ) -> Published:
        """See `Rendezvous.publish`."""
        self._count += 1
        for place, rank in enumerate(self.ranks):
            if place != self.member:
                data = _pack(call, arrays, targets, place)
                self._world.send(rank, self._name, self._count, data)
        came = self._world.take(self, self._name, self._count, label)
        return [
            (call, arrays) if rank == self._world.rank else _read(came[rank], rank)
            for rank in self.ranks
        ]

    def release(self, label: object) -> None:
        """See `Rendezvous.release`: what others read are copies."""


def _pack(call: str, arrays: Arrays, targets: Targets, reader: int) -> bytearray:
    """What a member publishes for one reader; in place of arrays for others come empty ones."""
    published = tuple(
        array if targets is None or targets[place] in (ALL, reader) else np.empty(0, array.dtype)
        for place, array in enumerate(arrays)
    )
    text = header_of(call, published)
    start = payload_start(text)
    data = bytearray(start + packed_bytes(published))
    target = np.frombuffer(data, np.uint8)
    write_header(target, text)
    write_arrays(target[start:], published)
    return data


def _read(data: bytearray, rank: int) -> tuple[str, Arrays]:
    try:
        packed = read_packed(np.frombuffer(data, np.uint8))
        if packed.nbytes != packed.payload.size:
            raise ValueError("it has another size than it says")
        return packed.call, packed.arrays(packed.payload)
    except (ValueError, OverflowError, DTypeError) as error:
        raise WireFormatError(
            "what a member publishes does not parse", rank=rank, got=str(error)
        ) from None
