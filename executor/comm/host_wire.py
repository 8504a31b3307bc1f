"""What ranks of one host say to each other: packets, the handshake, and memory as descriptors.

Sockets are Unix sockets in the abstract namespace, of kind SOCK_SEQPACKET: one message is one
packet, and every packet has a bounded size. Shared memory is anonymous (memfd), sealed against
resizing and passed as file descriptors, so that nothing has a name that could be left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import mmap
import os
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plancompiler.errors import (
    ErrorReport,
    PlanCompilerError,
    TransportError,
    VersionError,
    WireFormatError,
)
from plancompiler.executor.comm.link import GroupDesc, GroupKey, MemoryRegion, Publication, Read
from plancompiler.executor.memory import Buffer, Slots
from plancompiler.ir import DType

PROTOCOL_VERSION = 3
MAX_PACKET = 8192
"""Bytes of the largest packet."""
MAX_DIRECTORY = 256 << 20
"""Bytes of the largest directory."""
MAX_SHARED_BLOCKS = 128
"""Shared blocks of one rank; the kernel passes at most 253 descriptors at once."""

NOTICE, ABORT, GOODBYE, NOTE = 1, 2, 3, 4
"""Kinds of packets after the handshake."""
_NOTICE = struct.Struct("<BBxxxxxxQQ")
_ABORT = struct.Struct("<BxxxI")
_HELLO = struct.Struct("<16sIII32s")
_MAGIC = b"plancompiler.hst"
_CREDENTIALS = struct.Struct("iII")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def socket_name(token: str, rank: int) -> bytes:
    """Abstract address of a rank. Names are public, so it holds only a digest of the token."""
    digest = hashlib.sha256(b"name:" + token.encode()).hexdigest()[:32]
    return f"\0plancompiler-{digest}-{rank}".encode()


def process_of(connection: socket.socket) -> int:
    """The process at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[0])


def check_same_user(connection: socket.socket) -> None:
    """Refuse a process of another user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.getuid():
        raise TransportError(
            "a process of another user answered", got=f"uid {uid}", expected=f"uid {os.getuid()}"
        )


# --- packets --------------------------------------------------------------------------------------


def pack_notice(kind: int, register: int, task: int) -> bytes:
    """A register arrived or came back."""
    return _NOTICE.pack(NOTICE, kind, register, task)


def unpack_notice(packet: bytes) -> tuple[int, int, int]:
    """Kind, register and task of a notice."""
    if len(packet) != _NOTICE.size:
        raise WireFormatError("a notice has a wrong size", got=f"{len(packet)} bytes")
    _, kind, register, task = _NOTICE.unpack(packet)
    return kind, register, task


def pack_abort(failed_rank: int, error: PlanCompilerError) -> bytes:
    """A failure, its texts cut so that it fits a packet."""
    fields = {
        name: value[:800] if isinstance(value, str) else value
        for name, value in asdict(error.report).items()
    }
    text = json.dumps(fields).encode()
    if len(text) > MAX_PACKET - _ABORT.size:
        text = json.dumps({"code": error.code, "what": error.report.what[:400]}).encode()
    return _ABORT.pack(ABORT, failed_rank) + text


def unpack_abort(packet: bytes) -> tuple[int, ErrorReport]:
    """The failed rank and its error."""
    try:
        _, failed_rank = _ABORT.unpack_from(packet)
        fields = json.loads(packet[_ABORT.size :])
        report = ErrorReport(**fields)
        texts = (report.code, report.what)
        optional = (report.op, report.source, report.got, report.expected, report.hint)
        if not all(isinstance(text, str) for text in texts) or not all(
            text is None or isinstance(text, str) for text in optional
        ):
            raise TypeError("a field is not text")
        if report.rank is not None and not isinstance(report.rank, int):
            raise TypeError("the rank is not a number")
    except (struct.error, ValueError, TypeError, RecursionError) as error:
        raise WireFormatError("an abort message does not parse", got=str(error)) from None
    return failed_rank, report


# --- shared memory --------------------------------------------------------------------------------


def available_bytes() -> int:
    """What this host can still give. The kernel itself would hand out pages to the very last."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return sys.maxsize


class SharedMemory:
    """Anonymous memory that peers can map. `descriptor` stays open until `close_descriptor`."""

    def __init__(self, label: object, nbytes: int) -> None:
        self.nbytes = nbytes
        size = max(nbytes, 1)
        available = available_bytes()
        if size > available:
            raise TransportError(
                "shared memory could not be had",
                got=f"{nbytes} bytes",
                expected=f"at most {available} bytes, which are free",
            )
        self.descriptor = -1
        try:
            self.descriptor = os.memfd_create(
                f"plancompiler-{label}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            )
            # Take the memory now: a full host must give an error here, not a bus error in a kernel.
            os.posix_fallocate(self.descriptor, 0, size)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.map = mmap.mmap(self.descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            self.close_descriptor()
            raise TransportError(
                "shared memory could not be had", got=f"{nbytes} bytes: {error.strerror}"
            ) from error

    def buffer(self) -> Buffer:
        """The bytes as an array."""
        return np.frombuffer(self.map, np.uint8, self.nbytes)

    def close_descriptor(self) -> None:
        """Close the descriptor; the mapping stays as long as an array uses it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def map_peer(descriptor: int) -> mmap.mmap:
    """A peer's shared memory, for reading. It must be sealed, so that it cannot shrink under us."""
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK == 0:
            raise TransportError("a peer's memory is not sealed")
        return mmap.mmap(
            descriptor,
            os.fstat(descriptor).st_size,
            mmap.MAP_SHARED | mmap.MAP_POPULATE,
            mmap.PROT_READ,
        )
    except (OSError, ValueError) as error:
        raise TransportError("a peer's memory cannot be mapped", got=str(error)) from error


# --- the directory --------------------------------------------------------------------------------


def pack_directory(publication: Publication, blocks: Sequence[int], reader: int = -1) -> bytes:
    """Text form of what a rank publishes, with what it reads of one peer; `blocks` are the indices
    of its shared blocks.
    """
    return json.dumps(
        {
            "blocks": blocks,
            "groups": [(*key, digest) for key, digest in publication.groups],
            "regions": [
                (
                    region.key,
                    region.block,
                    region.offset,
                    region.stride,
                    region.count,
                    region.dtype.value,
                    region.shape,
                )
                for region in publication.regions
            ],
            "reads": [read[1:] for read in publication.reads if read.rank == reader],
            "records": dict(publication.records),
        },
        separators=(",", ":"),
    ).encode()


@dataclass(frozen=True, slots=True)
class Directory:
    """What a peer publishes."""

    blocks: tuple[int, ...]
    groups: tuple[GroupDesc, ...]
    regions: dict[int, MemoryRegion]
    reads: tuple[Read, ...]
    """What it reads of the rank that the directory was made for."""
    records: dict[str, str]


def unpack_directory(text: bytes, own: int = -1) -> Directory:
    """The inverse of `pack_directory` for rank `own`, with every field checked."""
    try:
        fields = json.loads(text)
        groups = tuple(
            GroupDesc(
                GroupKey(_whole_numbers(ranks), _whole_number(occurrence), str(stream)), str(digest)
            )
            for ranks, occurrence, stream, digest in fields["groups"]
        )
        regions = {}
        for number, block, offset, stride, count, dtype, shape in fields["regions"]:
            if type(block) is not int or count == 0:
                raise ValueError("a region is malformed")
            key = _whole_number(number)
            regions[key] = MemoryRegion(
                key,
                block,
                _whole_number(offset),
                _whole_number(stride),
                _whole_number(count),
                DType.parse(str(dtype)),
                _whole_numbers(shape),
            )
        records = {str(name): str(text) for name, text in dict(fields["records"]).items()}
        reads = tuple(
            Read(
                own,
                _whole_number(region),
                _whole_number(announced),
                _whole_number(reader),
                tuple((_whole_number(start), _whole_number(stop)) for start, stop in box),
            )
            for region, announced, reader, box in fields["reads"]
        )
        return Directory(_whole_numbers(fields["blocks"]), groups, regions, reads, records)
    except (
        ValueError,
        TypeError,
        KeyError,
        RecursionError,
        AttributeError,
        PlanCompilerError,
    ) as error:
        raise WireFormatError("a peer's directory does not parse", got=str(error)) from None


def _whole_number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"not a whole number: {value!r:.40}")
    return value


def _whole_numbers(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(_whole_number, values))


class PeerMemory:
    """A peer's directory and the memory it points into."""

    def __init__(self, rank: int, descriptors: Sequence[int]) -> None:
        """Map what the peer sent: directory, counters, then its shared blocks."""
        if len(descriptors) < 2:
            raise WireFormatError("a peer sent too little memory", rank=rank)
        if os.fstat(descriptors[0]).st_size > MAX_DIRECTORY:
            raise WireFormatError("a peer's directory is too large", rank=rank)
        directory = unpack_directory(bytes(map_peer(descriptors[0])))
        if len(directory.blocks) != len(descriptors) - 2:
            raise WireFormatError("a peer's directory does not fit its memory", rank=rank)
        self.rank = rank
        self.groups = directory.groups
        self.counters = memoryview(map_peer(descriptors[1])).cast("Q")
        self.records = directory.records
        self._regions = directory.regions
        self._buffers: dict[int, Buffer] = {
            block: np.frombuffer(map_peer(descriptor), np.uint8)
            for block, descriptor in zip(directory.blocks, descriptors[2:], strict=True)
        }

    def slots(self, key: int) -> Slots | None:
        """Arrays over a published region."""
        region = self._regions.get(key)
        if region is None:
            return None
        try:
            return region.slots(self._buffers.get(region.block))
        except TransportError as error:
            raise WireFormatError(
                "a peer's register lies outside its memory", rank=self.rank, got=error.report.got
            ) from None

    def free(self, key: int) -> None:
        """Unmap the block of a region, if there is one."""
        region = self._regions.pop(key, None)
        if region is not None:
            del self._buffers[region.block]


# --- the handshake --------------------------------------------------------------------------------


def _proof(token: str) -> bytes:
    return hashlib.sha256(b"proof:" + token.encode()).digest()


def send_hello(
    connection: socket.socket, token: str, rank: int, descriptors: Sequence[int]
) -> None:
    """Introduce this rank and pass its memory."""
    hello = _HELLO.pack(_MAGIC, PROTOCOL_VERSION, rank, len(descriptors), _proof(token))
    socket.send_fds(connection, [hello], list(descriptors))


def receive_hello(connection: socket.socket, token: str) -> tuple[int, list[int]]:
    """The peer's rank and the descriptors of its memory, which the caller must close.

    Raises VersionError, or TransportError for anything that is not a peer of this run.
    """
    packet, descriptors, flags, _ = socket.recv_fds(
        connection, MAX_PACKET, MAX_SHARED_BLOCKS + 2, socket.MSG_CMSG_CLOEXEC
    )
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(packet) != _HELLO.size:
            raise TransportError("a peer's greeting is malformed", got=f"{len(packet)} bytes")
        magic, version, rank, count, proof = _HELLO.unpack(packet)
        if magic != _MAGIC or not hmac.compare_digest(proof, _proof(token)):
            raise TransportError("a process that is not part of the run greeted this rank")
        if version != PROTOCOL_VERSION:
            raise VersionError(
                f"rank {rank} speaks another version of the host transport",
                got=version,
                expected=PROTOCOL_VERSION,
            )
        if count != len(descriptors):
            raise TransportError(
                "memory of a peer got lost on the way", got=len(descriptors), expected=count
            )
    except PlanCompilerError:
        close_descriptors(descriptors)
        raise
    return rank, descriptors


def close_descriptors(descriptors: Iterable[int]) -> None:
    """Close file descriptors, whatever state they are in."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
