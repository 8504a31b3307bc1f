"""Transfers of large data: bytes in bounded, compressed chunks, and arrays as bytes.

The first chunk of a transfer announces its sizes and the xxh3 of its bytes. The receiver refuses a
size that is too large before it takes memory, and checks the xxh3 at the end. An announcement alone
allocates nothing: memory grows with the bytes that have arrived, to at most `_AHEAD` times as many,
and so does memory for decompressed bytes; `UploadBudget` bounds the memory of all transfers
together. Data for many receivers is a `Parcel`, which is compressed, cut and serialised once. A
transfer that is interrupted resumes after the bytes that have arrived. Arrays travel in the
safetensors format, which holds only data.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import xxhash
import zstandard
from google.protobuf.message import DecodeError
from safetensors import SafetensorError

from plancompiler.errors import LimitError, WireFormatError
from plancompiler.plan import arrays as safetensors_arrays
from plancompiler.proto.cluster_pb2 import Chunk, Compression

CHUNK_BYTES = 1 << 20
MAX_JOB_BYTES = 256 << 20
"""Bytes of a job, slice or plan that a peer accepts."""
MAX_ARRAYS_BYTES = 1 << 30
"""Bytes of one step's feeds or outputs."""
_COMPRESS_FROM = 16 << 10
"""Smaller transfers are not worth compressing."""
MAX_RATIO = 256
"""How many times its wire bytes a transfer may unpack to, beyond `_UNPACK_FREELY`. Jobs and plans
come to 5 to 30 times; what would be packed tighter is sent as it is.
"""
_UNPACK_FREELY = 4 << 20
_AHEAD = 4
"""Room for bytes that come is made for so many times those that are there, so that they are moved
rarely: room that grows with each chunk is moved, and its memory taken anew, with each of them.
"""
_LEVEL = 3
"""Of zstd: a GPT-3 slice of 72 KiB becomes 14 KiB in 0.1 ms."""
_DATA_TAG = 0x0A
"""The first byte of a serialised chunk that has data: field 1, with a length."""

Array = np.ndarray[Any, np.dtype[Any]]


# --- sending --------------------------------------------------------------------------------------


def digest_of(data: bytes) -> bytes:
    """SHA-256."""
    return hashlib.sha256(data).digest()


def _most_unpacked(wire_bytes: int) -> int:
    """What a transfer of so many bytes may unpack to, if it is compressed."""
    return _UNPACK_FREELY + MAX_RATIO * wire_bytes


def to_chunks(data: bytes, *, compress: bool = False, digest: bytes = b"") -> list[Chunk]:
    """Bytes as chunks of at most CHUNK_BYTES.

    `compress` is for columns of jobs and plans: zstd, where they are large. Arrays do not become
    smaller by it. With a digest the receiver checks what it got.
    """
    sent, compression = data, Compression.COMPRESSION_NONE
    if compress and len(data) >= _COMPRESS_FROM:
        packed = zstandard.ZstdCompressor(level=_LEVEL).compress(data)
        if len(packed) < len(data) <= _most_unpacked(len(packed)):
            sent, compression = packed, Compression.COMPRESSION_ZSTD
    view = memoryview(sent)
    chunks = [
        Chunk(data=bytes(view[start : start + CHUNK_BYTES]))
        for start in range(0, max(len(sent), 1), CHUNK_BYTES)
    ]
    chunks[0].compression = compression
    chunks[0].raw_bytes = len(data)
    chunks[0].wire_bytes = len(sent)
    chunks[0].digest = digest
    if not digest:
        chunks[0].checksum = xxhash.xxh3_64_intdigest(sent) or 1
    return chunks


@dataclass(frozen=True, slots=True)
class Parcel:
    """Bytes ready to be sent any number of times, from any offset. `pack` makes it."""

    digest: bytes
    """SHA-256 of the raw bytes; empty where the receiver does not check them."""
    wire_bytes: int
    messages: tuple[bytes, ...]
    """Serialised chunks, each of CHUNK_BYTES apart from the last."""

    def messages_from(self, offset: int) -> Iterator[bytes]:
        """What brings a receiver that has `offset` wire bytes the rest: serialised chunks.

        Raises WireFormatError where there are not so many bytes.
        """
        if offset > self.wire_bytes:
            raise WireFormatError(
                "a transfer cannot go on beyond its end",
                got=f"offset {offset}",
                expected=f"at most {self.wire_bytes}",
            )
        if not offset:
            yield from self.messages
            return
        index, skipped = divmod(offset, CHUNK_BYTES)
        first = Chunk.FromString(self.messages[0])
        if index < len(self.messages):
            first.data = Chunk.FromString(self.messages[index]).data[skipped:]
        else:
            first.data = b""
        yield first.SerializeToString()
        yield from self.messages[index + 1 :]


def parcel_of(messages: Sequence[bytes]) -> Parcel:
    """The parcel of these messages."""
    first = Chunk.FromString(messages[0])
    return Parcel(first.digest, first.wire_bytes, tuple(messages))


def pack(data: bytes, *, compress: bool = False, checked: bool = False) -> Parcel:
    """Bytes as a parcel, once for all its receivers; see `to_chunks`."""
    digest = digest_of(data) if checked else b""
    chunks = to_chunks(data, compress=compress, digest=digest)
    return parcel_of([chunk.SerializeToString() for chunk in chunks])


# --- receiving ------------------------------------------------------------------------------------


class UploadBudget:
    """Bytes of uploads that a receiver holds at the same time, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.lock = threading.Lock()


class Reservation:
    """What one transfer, and what came of it, holds of a budget. Any thread may use it."""

    def __init__(self, budget: UploadBudget) -> None:
        self._budget = budget
        self._held = 0
        self._closed = False

    def take(self, nbytes: int) -> None:
        """Hold more; LimitError where that is too much."""
        budget = self._budget
        with budget.lock:
            if self._closed:  # the transfer was released while it was being decompressed
                return
            if budget.held + nbytes > budget.limit:
                raise LimitError(
                    "the master holds too many bytes of uploads at once",
                    got=f"{budget.held + nbytes} bytes",
                    expected=f"at most {budget.limit} bytes",
                    hint="try again when others are done, or start the master with a larger "
                    "--max-upload-bytes",
                )
            budget.held += nbytes
            self._held += nbytes

    def keep(self, nbytes: int) -> None:
        """Give back all but so much."""
        with self._budget.lock:
            kept = min(nbytes, self._held)
            self._budget.held -= self._held - kept
            self._held = kept

    def close(self) -> None:
        """Give back everything. Safe to call again."""
        self._closed = True
        self.keep(0)


class Assembler:
    """Puts the chunks of one transfer after another together, within a limit of bytes each and,
    with a reservation, within the budget of all.
    """

    def __init__(self, what: str, limit: int, reservation: Reservation | None = None) -> None:
        self._what = what
        self._reservation = reservation
        self._limit = limit
        self._header: Chunk | None = None
        """The first chunk of the transfer at hand, less its data."""
        self._continued = False
        """The next chunk repeats the header."""
        self._arrived = BytesIO()
        """Gives out what was written into it without another copy, once it is full."""
        self._reserved = 0
        """Bytes that it holds when it is full."""
        self._received = 0
        self._hash = hashlib.sha256()
        """Of the raw bytes so far, where they are sent as they are."""
        self._checksum = xxhash.xxh3_64()
        """Of the wire bytes so far."""

    @property
    def received(self) -> int:
        """Wire bytes of the transfer at hand that have arrived."""
        return self._received

    @property
    def is_empty(self) -> bool:
        """Whether no transfer is half done."""
        return self._header is None

    def resume(self) -> None:
        """The transfer at hand broke off and comes again from `received` bytes on."""
        self._continued = self._header is not None

    def add(self, chunk: Chunk) -> bytes | None:
        """Take a chunk; the whole bytes when it was a transfer's last one."""
        data = chunk.data
        if self._header is None or self._continued:
            self._begin(chunk, len(data))
        return self._take(data)

    def add_message(self, message: bytes) -> bytes | None:
        """Take a serialised chunk, without copying its data where it holds nothing else."""
        if self._header is not None and not self._continued:
            data = _only_data(message)
            if data is not None:
                return self._take(data)
        try:
            chunk = Chunk.FromString(message)
        except DecodeError as error:
            raise WireFormatError(f"{self._what} comes in unreadable chunks: {error}") from error
        return self.add(chunk)

    def _begin(self, first: Chunk, size: int) -> None:
        """Read what a transfer announces, before anything of it is kept."""
        header = Chunk(
            compression=first.compression,
            raw_bytes=first.raw_bytes,
            wire_bytes=first.wire_bytes,
            digest=first.digest,
            checksum=first.checksum,
        )
        if self._header is not None:
            if header != self._header:
                raise WireFormatError(f"{self._what} goes on as something else than it began as")
            self._continued = False
            return
        largest = max(header.raw_bytes, header.wire_bytes)
        if largest > self._limit:
            raise WireFormatError(
                f"{self._what} is too large",
                got=f"{largest} bytes",
                expected=f"at most {self._limit} bytes",
            )
        if header.compression not in Compression.values():
            raise WireFormatError(
                f"{self._what} is compressed in a way that this version does not know",
                got=f"compression {header.compression}",
            )
        if header.raw_bytes > _most_unpacked(header.wire_bytes):
            raise WireFormatError(
                f"{self._what} announces that it unpacks to more than it may",
                got=f"{header.raw_bytes} bytes out of {header.wire_bytes}",
                expected=f"at most {_most_unpacked(header.wire_bytes)} bytes",
            )
        if size == 0 and header.wire_bytes:
            raise WireFormatError(f"{self._what} does not have the size that it announced")
        self._header = header
        if header.digest:
            self._hash = hashlib.sha256()
        self._checksum = xxhash.xxh3_64()

    def _reserve(self, announced: int) -> None:
        """For what was received, and for more of what was announced."""
        wanted = min(announced, _AHEAD * self._received)
        if self._reservation is not None:
            self._reservation.take(wanted - self._reserved)
        arrived = BytesIO(bytes(wanted))
        arrived.write(self._arrived.getbuffer()[: self._arrived.tell()])
        self._arrived, self._reserved = arrived, wanted

    def _take(self, data: bytes | memoryview) -> bytes | None:
        header = self._header
        if header is None:
            raise WireFormatError(f"{self._what} has no first chunk")
        self._received += len(data)
        missing = header.wire_bytes - self._received
        if missing < 0 or (not len(data) and missing):
            raise WireFormatError(f"{self._what} does not have the size that it announced")
        if self._received > self._reserved:
            self._reserve(header.wire_bytes)
        self._arrived.write(data)
        if header.checksum:
            self._checksum.update(data)
        if header.digest and header.compression == Compression.COMPRESSION_NONE:
            self._hash.update(data)  # while the next chunk is on its way
        if missing:
            return None
        if header.checksum and header.checksum != (self._checksum.intdigest() or 1):
            raise WireFormatError(
                f"{self._what} was damaged on its way",
                got=f"xxh3 {self._checksum.hexdigest()}",
                expected=f"xxh3 {header.checksum:016x}",
            )
        wire = self._arrived.getvalue()
        self._arrived, self._reserved = BytesIO(), 0
        self._received = 0
        self._header = None
        return self._unpack(wire, header)

    def _unpack(self, wire: bytes, header: Chunk) -> bytes:
        data = wire
        if header.compression == Compression.COMPRESSION_ZSTD:
            if self._reservation is not None:
                self._reservation.take(header.raw_bytes)
            data = self._decompress(wire, header.raw_bytes)
            if header.digest:
                self._hash.update(data)
        if len(data) != header.raw_bytes:
            raise WireFormatError(f"{self._what} does not have the size that it announced")
        if header.digest and self._hash.digest() != header.digest:
            raise WireFormatError(f"{self._what} does not have the digest that it announced")
        return data

    def _decompress(self, wire: bytes, raw_bytes: int) -> bytes:
        """The content of one zstd frame. What the frame says of its size decides what memory is
        taken, so it must be what the transfer announced.
        """
        try:
            frame = zstandard.get_frame_parameters(wire)
            if frame.content_size != raw_bytes:
                raise WireFormatError(
                    f"{self._what} does not unpack to the size that it announced",
                    got=f"{frame.content_size} bytes",
                    expected=f"{raw_bytes} bytes",
                )
            # The window is at most the content, as far as an honest sender goes.
            unpacker = zstandard.ZstdDecompressor(max_window_size=max(raw_bytes, 1 << 20))
            return unpacker.decompress(wire, max_output_size=raw_bytes, allow_extra_data=False)
        except (zstandard.ZstdError, MemoryError) as error:
            raise WireFormatError(f"{self._what} does not decompress: {error}") from error


def _only_data(message: bytes) -> memoryview | None:
    """The data of a serialised chunk that is its only field; None where it is not that.

    Parsing the chunk and asking for its data would copy it twice.
    """
    if len(message) < 2 or message[0] != _DATA_TAG:
        return None
    size = shift = 0
    for at in range(1, min(len(message), 6)):
        size |= (message[at] & 0x7F) << shift
        if message[at] < 0x80:
            return memoryview(message)[at + 1 :] if at + 1 + size == len(message) else None
        shift += 7
    return None


def transfers(chunks: Iterable[Chunk], what: str, limit: int) -> Iterator[bytes]:
    """The transfers in a stream of chunks; an error where the last one is cut off."""
    assembler = Assembler(what, limit)
    for chunk in chunks:
        data = assembler.add(chunk)
        if data is not None:
            yield data
    if not assembler.is_empty:
        raise WireFormatError(f"{what} is cut off")


def from_chunks(chunks: Iterable[Chunk], what: str, limit: int) -> bytes:
    """The bytes of a stream with exactly one transfer."""
    arrived = list(transfers(chunks, what, limit))
    if len(arrived) != 1:
        raise WireFormatError(f"{what} did not arrive", got=f"{len(arrived)} transfers", expected=1)
    return arrived[0]


def arrays_to_bytes(arrays: Mapping[str, Array]) -> bytes:
    """Arrays by name as bytes."""
    plain = {}
    for name, value in arrays.items():
        array = np.asarray(value)
        if not array.flags.c_contiguous or not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="), order="C")
        plain[name] = array
    try:
        return safetensors_arrays.arrays_to_bytes(plain)
    except (SafetensorError, KeyError, ValueError) as error:
        raise WireFormatError(f"these arrays have no wire form: {error}") from error


def arrays_from_bytes(data: bytes) -> dict[str, Array]:
    """The arrays in bytes; anything else is a WireFormatError."""
    try:
        return safetensors_arrays.arrays_from_bytes(data)
    except (SafetensorError, KeyError, ValueError, TypeError, OverflowError) as error:
        raise WireFormatError(f"these bytes are not arrays: {error}") from error
