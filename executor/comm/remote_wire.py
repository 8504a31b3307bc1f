"""What ranks that share no memory say to each other: frames, in order from each rank to each other.

    HELLO      magic, version, byte order, run, from, to, proof         first, gRPC only
    DIRECTORY  size of the whole, then a part of its JSON text          until it is complete
    MET        the receiver's directory is complete here                so both ways are open
    DATA       register, slot, box, then the box's bytes, row by row    at most CHUNK_BYTES of them
    BARRIER    group (by its place in the sender's directory), count
    PUBLISHED                                                           see `message_rendezvous`
    WORK                                                                see `peer_work`
    NOTICE, ABORT, GOODBYE, NOTE                                        as packets of `host_wire`

Numbers of headers are little-endian; data are in the sender's byte order, which HELLO compares.
Each frame but HELLO ends with an xxh3 of itself and of its place in the stream, so that
one that was damaged, repeated or lost on its way is noticed.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from plancompiler.errors import TransportError, VersionError, WireFormatError
from plancompiler.executor.comm import host_wire
from plancompiler.executor.comm.link import Publication
from plancompiler.executor.memory import Array, Slots
from plancompiler.ir.shard import Region, element_count, region_index, region_shape

PROTOCOL_VERSION = 5
CHUNK_BYTES = 1 << 20
"""Bytes of the data in one frame, at most."""
MAX_DIMENSIONS = 32

NOTICE, ABORT, GOODBYE = host_wire.NOTICE, host_wire.ABORT, host_wire.GOODBYE
NOTE = host_wire.NOTE
HELLO, DIRECTORY, DATA, BARRIER, MET, PUBLISHED, WORK = 16, 17, 18, 19, 20, 32, 33
"""Kinds of frames: the first byte."""

_MAGIC = b"plancompiler.net"
_HELLO = struct.Struct("<B3xI16s16sII8s32s")
_DIRECTORY = struct.Struct("<B7xQ")
_DATA = struct.Struct("<BBBxIQ")
_BARRIER = struct.Struct("<BxxxIQ")


class Hello(NamedTuple):
    """Who opens a stream, and to whom."""

    run: bytes
    sender: int
    receiver: int
    proof: bytes


def run_name(token: str) -> bytes:
    """Names a run to those who do not know its token: 16 bytes."""
    return hashlib.sha256(b"run:" + token.encode()).digest()[:16]


def _proof(token: str, sender: int, receiver: int) -> bytes:
    return hmac.digest(token.encode(), f"{sender}>{receiver}".encode(), "sha256")


def pack_hello(token: str, sender: int, receiver: int) -> bytes:
    """The first frame of a stream."""
    proof = _proof(token, sender, receiver)
    order = sys.byteorder.encode()
    return _HELLO.pack(
        HELLO, PROTOCOL_VERSION, _MAGIC, run_name(token), sender, receiver, order, proof
    )


def unpack_hello(frame: bytes) -> Hello:
    """Raises VersionError or TransportError for anything that cannot be talked with."""
    if len(frame) != _HELLO.size or frame[0] != HELLO:
        raise TransportError("a peer's greeting is malformed", got=f"{len(frame)} bytes")
    _, version, magic, run, sender, receiver, order, proof = _HELLO.unpack(frame)
    if magic != _MAGIC:
        raise TransportError("a process that is no worker greeted this rank")
    if version != PROTOCOL_VERSION:
        raise VersionError(
            f"rank {sender} speaks another version of the transport between hosts",
            got=version,
            expected=PROTOCOL_VERSION,
        )
    if order.rstrip(b"\0") != sys.byteorder.encode():
        raise TransportError(
            f"rank {sender} keeps numbers in another byte order",
            rank=sender,
            got=order.rstrip(b"\0").decode(errors="replace"),
            expected=sys.byteorder,
        )
    return Hello(run, sender, receiver, proof)


def is_of_run(hello: Hello, token: str) -> bool:
    """Whether the greeting comes from someone who knows the run's token."""
    return hmac.compare_digest(hello.proof, _proof(token, hello.sender, hello.receiver))


# --- checks ---------------------------------------------------------------------------------------

_CHECK_BYTES = 8
_LARGE = 1 << 17
"""A frame of so many bytes holds data, which are read where they lie; others are copied."""


def with_check(parts: Sequence[bytes | memoryview], place: int) -> bytes:
    """A frame at its place in a stream, with its check behind it."""
    check = xxhash.xxh3_64(seed=place)
    for part in parts:
        check.update(part)
    return b"".join((*parts, check.digest()))


def without_check(frame: bytes | bytearray, place: int) -> bytes:
    """The frame that came at this place; WireFormatError where it is not what was sent there."""
    content = memoryview(frame)[:-_CHECK_BYTES]
    if xxhash.xxh3_64_digest(content, place) != frame[-_CHECK_BYTES:]:
        raise WireFormatError(
            f"frame {place} of a peer's stream was damaged, repeated or lost on its way",
            got=f"{len(frame)} bytes whose xxh3 is another",
        )
    return content if len(frame) > _LARGE else bytes(content)  # type: ignore[return-value]  # as good as bytes


# --- the directory --------------------------------------------------------------------------------


def pack_directory(publication: Publication, peer: int) -> list[bytes]:
    """Frames with what a rank publishes, and what it reads of this peer."""
    text = host_wire.pack_directory(publication, (), peer)
    head = _DIRECTORY.pack(DIRECTORY, len(text))
    return [head + text[start : start + CHUNK_BYTES] for start in range(0, len(text), CHUNK_BYTES)]


class DirectoryReader:
    """Puts a peer's directory together."""

    def __init__(self, own: int) -> None:
        self._own = own
        self._text = bytearray()

    def add(self, frame: bytes) -> host_wire.Directory | None:
        """The directory, once all of it has come."""
        if len(frame) <= _DIRECTORY.size:
            raise WireFormatError("a part of a peer's directory is empty")
        _, size = _DIRECTORY.unpack_from(frame)
        if size > host_wire.MAX_DIRECTORY:
            raise WireFormatError("a peer's directory is too large", got=f"{size} bytes")
        self._text += memoryview(frame)[_DIRECTORY.size :]
        if len(self._text) < size:
            return None
        text, self._text = bytes(self._text), bytearray()
        if len(text) != size:
            raise WireFormatError("a peer's directory is not as large as it says")
        return host_wire.unpack_directory(text, self._own)


# --- data -----------------------------------------------------------------------------------------


def cut_region(region: Region, itemsize: int, limit: int = CHUNK_BYTES) -> Iterator[Region]:
    """Boxes of at most `limit` bytes, or of one element, that make up a region, in row order.

    None of an empty region.
    """
    shape = region_shape(region)
    size = element_count(shape) * itemsize
    if size == 0:
        return
    if size <= max(limit, itemsize):
        yield region
        return
    axis = next(axis for axis, extent in enumerate(shape) if extent > 1)
    rows = max(1, limit // (size // shape[axis]))
    start, stop = region[axis]
    for first in range(start, stop, rows):
        part = (first, min(first + rows, stop))
        yield from cut_region((*region[:axis], part, *region[axis + 1 :]), itemsize, limit)


def pack_data(region: int, slot: int, box: Region, flat: bool) -> bytes:
    """The header of a DATA frame; the bytes of the box follow it."""
    numbers = [number for bounds in box for number in bounds]
    return _DATA.pack(DATA, flat, len(box), slot, region) + struct.pack(
        f"<{len(numbers)}Q", *numbers
    )


class DataHeader(NamedTuple):
    """Where the bytes of a DATA frame belong."""

    region: int
    slot: int
    box: Region
    flat: bool
    offset: int
    """Where in the frame the bytes begin."""


def unpack_data(frame: bytes) -> DataHeader:
    """The header of a DATA frame."""
    if len(frame) < _DATA.size:
        raise WireFormatError("a frame of data has no header")
    _, flat, dimensions, slot, region = _DATA.unpack_from(frame)
    offset = _DATA.size + 16 * dimensions
    if dimensions > MAX_DIMENSIONS or len(frame) < offset:
        raise WireFormatError("a frame of data has no header")
    numbers = struct.unpack_from(f"<{2 * dimensions}Q", frame, _DATA.size)
    box = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    return DataHeader(region, slot, box, bool(flat), offset)


def store_data(frame: bytes, header: DataHeader, slots: Slots) -> None:
    """Write a frame's bytes to their place in a register; WireFormatError where it has none."""
    if header.slot >= len(slots):
        raise WireFormatError("data came for a slot that a register does not have", got=header.slot)
    target: Array = slots[header.slot]
    if header.flat:
        target = target.reshape(-1)
    inside = len(header.box) == target.ndim and all(
        start <= stop <= extent
        for (start, stop), extent in zip(header.box, target.shape, strict=True)
    )
    if not inside:
        raise WireFormatError(
            "data came for a place outside of a register",
            got=str(header.box),
            expected=f"a box of {list(target.shape)}",
        )
    place = target[region_index(header.box)]
    if len(frame) - header.offset != place.nbytes:
        raise WireFormatError(
            "a frame has more or less data than its box",
            got=f"{len(frame) - header.offset} bytes",
            expected=f"{place.nbytes} bytes",
        )
    if place.nbytes:
        data = np.frombuffer(frame, np.uint8, place.nbytes, header.offset)
        np.copyto(place, data.view(target.dtype).reshape(place.shape))


# --- barriers -------------------------------------------------------------------------------------


def pack_barrier(group: int, count: int) -> bytes:
    """A rank has come to a barrier of its group for the count-th time."""
    return _BARRIER.pack(BARRIER, group, count)


def unpack_barrier(frame: bytes) -> tuple[int, int]:
    """Group and count."""
    if len(frame) != _BARRIER.size:
        raise WireFormatError("a barrier has a wrong size", got=f"{len(frame)} bytes")
    _, group, count = _BARRIER.unpack(frame)
    return group, count
