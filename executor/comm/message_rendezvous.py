"""Rendezvous of ranks that share no memory: what is published goes to the others as frames.

A frame says of which rendezvous it is, the how-manieth time that its sender publishes there, and
which part of how many bytes. An array that one member reads goes to that one alone.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from plancompiler.errors import WireFormatError
from plancompiler.executor.comm import remote_wire as wire
from plancompiler.executor.comm.link import Link, Publication
from plancompiler.executor.comm.messages import MessageLink
from plancompiler.executor.comm.operations import ALL, Arrays, Targets
from plancompiler.executor.comm.rendezvous import Published, WorldLink, rendezvous_digest
from plancompiler.ir import DType
from plancompiler.ir.shard import element_count
from plancompiler.limits.time_limits import DEADLINE

MAX_MESSAGE = 1 << 40
"""Bytes that one member may publish at once."""

_PART = struct.Struct("<B7x16sQQQ")
_HEAD = struct.Struct("<Q")
_ALIGN = 8
"""Arrays begin at multiples of this."""

_Key = tuple[int, bytes, int]
"""Sender, rendezvous, and the how-manieth time that it publishes there."""


class _Part(NamedTuple):
    """A frame of a rendezvous, taken apart."""

    name: bytes
    number: int
    offset: int
    total: int


class _Message:
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
        self._messages: dict[_Key, _Message] = {}
        link.receivers[wire.PUBLISHED] = self._receive
        peers = tuple(peer for peer in range(size) if peer != link.rank)
        link.join(Publication(link.rank, peers=peers), self, start_deadline)

    def rendezvous(self, ranks: tuple[int, ...], stream: str = "") -> MessageRendezvous:
        """See `WorldLink.rendezvous`."""
        return MessageRendezvous(self, ranks, stream)

    def send(self, peer: int, name: bytes, number: int, data: bytes) -> None:
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
            message = self._messages.setdefault(key, _Message(part.total))
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
        """See `Rendezvous.leave`: what others read are copies."""


def _pack(call: str, arrays: Arrays, targets: Targets, reader: int) -> bytes:
    """What a member publishes for one reader; arrays for others are sent without elements."""
    shown = [
        array if targets is None or targets[place] in (ALL, reader) else None
        for place, array in enumerate(arrays)
    ]
    kinds = [
        [array.dtype.name, [0] if part is None else list(array.shape)]
        for array, part in zip(arrays, shown, strict=True)
    ]
    text = json.dumps([call, kinds]).encode()
    text += b" " * (-len(text) % _ALIGN)
    parts = [_HEAD.pack(len(text)), text]
    for part in shown:
        if part is not None:
            parts += (part.tobytes(), bytes(-part.nbytes % _ALIGN))
    return b"".join(parts)


def _read(data: bytearray, rank: int) -> tuple[str, Arrays]:
    try:
        (length,) = _HEAD.unpack_from(data)
        start = _HEAD.size + length
        call, kinds = json.loads(bytes(data[_HEAD.size : start]))
        found = []
        for name, shape in kinds:
            if any(type(extent) is not int for extent in shape):
                raise TypeError("a shape is no list of whole numbers")
            dtype = DType.parse(name).numpy
            nbytes = element_count(tuple(shape)) * dtype.itemsize
            array = np.frombuffer(data, np.uint8, nbytes, start).view(dtype)
            found.append(array.reshape(tuple(shape)))
            start += nbytes + -nbytes % _ALIGN
        if start != len(data) or not isinstance(call, str):
            raise ValueError("it has another size than it says")
    except (struct.error, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireFormatError(
            "what a member publishes does not parse", rank=rank, got=str(error)
        ) from None
    return call, tuple(found)
