"""Large things on the wire: bytes in bounded, compressed chunks, and arrays as bytes.

The first chunk of a transfer announces its sizes, so that the receiver refuses what is too large
before it takes memory. Arrays travel in the safetensors format, which holds data only.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from plancompiler.errors import WireFormatError
from plancompiler.proto.cluster_pb2 import Chunk, Compression

CHUNK_BYTES = 1 << 20
MAX_JOB_BYTES = 256 << 20
"""Bytes of a job, slice or plan that a peer accepts."""
MAX_ARRAYS_BYTES = 1 << 30
"""Bytes of one step's feeds or outputs."""
_COMPRESS_FROM = CHUNK_BYTES
"""Smaller transfers are not worth compressing."""

Array = np.ndarray[Any, np.dtype[Any]]


def to_chunks(data: bytes, *, compress: bool = False) -> list[Chunk]:
    """Bytes as chunks of at most CHUNK_BYTES.

    `compress` is for columns of jobs and plans: zlib at its fastest, where they are large. Arrays
    do not become smaller by it.
    """
    sent, compression = data, Compression.COMPRESSION_NONE
    if compress and len(data) >= _COMPRESS_FROM:
        packed = zlib.compress(data, 1)
        if len(packed) < len(data):
            sent, compression = packed, Compression.COMPRESSION_ZLIB
    view = memoryview(sent)
    chunks = [
        Chunk(data=bytes(view[start : start + CHUNK_BYTES]))
        for start in range(0, max(len(sent), 1), CHUNK_BYTES)
    ]
    chunks[0].compression = compression
    chunks[0].raw_bytes = len(data)
    chunks[0].wire_bytes = len(sent)
    return chunks


class Assembler:
    """Puts the chunks of one transfer after another together, within a limit of bytes each."""

    def __init__(self, what: str, limit: int) -> None:
        self._what = what
        self._limit = limit
        self._parts: list[bytes] = []
        self._missing = -1
        self._first = Chunk()

    def add(self, chunk: Chunk) -> bytes | None:
        """Take a chunk; the whole bytes when it was a transfer's last one."""
        if self._missing < 0:
            if max(chunk.raw_bytes, chunk.wire_bytes) > self._limit:
                raise WireFormatError(
                    f"{self._what} is too large",
                    got=f"{max(chunk.raw_bytes, chunk.wire_bytes)} bytes",
                    expected=f"at most {self._limit} bytes",
                )
            self._first = chunk
            self._missing = chunk.wire_bytes
        self._missing -= len(chunk.data)
        if self._missing < 0 or (not chunk.data and self._missing):
            raise WireFormatError(f"{self._what} does not have the size that it announced")
        self._parts.append(chunk.data)
        if self._missing:
            return None
        data = b"".join(self._parts)
        self._parts = []
        self._missing = -1
        return self._unpack(data)

    def _unpack(self, data: bytes) -> bytes:
        raw_bytes = self._first.raw_bytes
        if self._first.compression == Compression.COMPRESSION_ZLIB:
            unpacker = zlib.decompressobj()
            try:
                data = unpacker.decompress(data, raw_bytes + 1)
            except zlib.error as error:
                raise WireFormatError(f"{self._what} does not decompress: {error}") from error
        if len(data) != raw_bytes:
            raise WireFormatError(f"{self._what} does not have the size that it announced")
        return data

    @property
    def is_empty(self) -> bool:
        """Whether no transfer is half done."""
        return self._missing < 0


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
    found = list(transfers(chunks, what, limit))
    if len(found) != 1:
        raise WireFormatError(f"{what} did not arrive", got=f"{len(found)} transfers", expected=1)
    return found[0]


def arrays_to_bytes(arrays: Mapping[str, Array]) -> bytes:
    """Arrays by name as bytes."""
    plain = {}
    for name, value in arrays.items():
        array = np.asarray(value)
        if not array.flags.c_contiguous or not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="), order="C")
        plain[name] = array
    try:
        return save(plain)
    except (SafetensorError, KeyError, ValueError) as error:
        raise WireFormatError(f"these arrays have no wire form: {error}") from error


def arrays_from_bytes(data: bytes) -> dict[str, Array]:
    """The arrays in bytes; anything else is a WireFormatError."""
    try:
        return load(data)
    except (SafetensorError, KeyError, ValueError, TypeError, OverflowError) as error:
        raise WireFormatError(f"these bytes are not arrays: {error}") from error
