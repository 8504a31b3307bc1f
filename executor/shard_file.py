"""One shard file of a checkpoint: a safetensors file, read in parts that are checked.

A file is read with plain reads, never mapped: one that is cut short while it is read is an error
and not a signal. Its arrays have digests, an xxh3 for each MiB of an array's bytes, so that a
reader that needs a part of an array checks that part: what it reads is rounded up to whole MiBs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from plancompiler.errors import CheckpointError
from plancompiler.ir.closing import Closing
from plancompiler.ir.shard import element_count
from plancompiler.plan.arrays import MAX_HEADER, StoredTensor, parse_header

Array = np.ndarray[Any, np.dtype[Any]]

DIGESTED_BYTES = 1 << 20
"""Bytes of an array that have a digest together."""
_HEX = 16
"""Characters of a digest."""
_AT_ONCE = 8 << 20
"""Bytes that are read before they are put in place."""


def digests(data: memoryview) -> str:
    """The digests of an array's bytes, one after another in hexadecimal."""
    return "".join(
        xxhash.xxh3_64_hexdigest(data[at : at + DIGESTED_BYTES])
        for at in range(0, len(data), DIGESTED_BYTES)
    )


def digests_length(nbytes: int) -> int:
    """Characters of the digests of so many bytes."""
    return -(-nbytes // DIGESTED_BYTES) * _HEX


class ShardFile(Closing):
    """An open file. Raises CheckpointError for what is no whole safetensors file of ours, and the
    OSErrors of reading."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._buffer = np.empty(0, np.uint8)
        """For the bytes at hand: fresh memory for each read costs more than their digests."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.tensors, self.metadata = self._header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. Safe to call again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def read_rows(
        self, name: str, first: int, last: int, checked: str | None
    ) -> Iterator[tuple[int, Array]]:
        """Rows `first` to `last` of an array, some at a time: the first row's number, and an array
        of them, which holds until the next. An array without axes is one row.

        `checked` are the array's digests, None not to check.
        """
        tensor = self.tensors[name]
        inner = tensor.shape[1:]
        row = element_count(inner) * tensor.dtype.itemsize
        step = max(1, _AT_ONCE // max(1, row))
        for at in range(first, last, step):
            rows = min(step, last - at)
            data = self._read(name, tensor, at * row, rows * row, checked)
            shape = (rows, *inner) if tensor.shape else ()
            yield at, np.frombuffer(data, tensor.dtype.numpy).reshape(shape)

    def _read(
        self, name: str, tensor: StoredTensor, begin: int, size: int, checked: str | None
    ) -> memoryview:
        """Bytes of an array, checked together with those that share a digest with them."""
        low, high = begin, begin + size
        if checked is not None:
            low -= low % DIGESTED_BYTES
            high = min(tensor.nbytes, -(-high // DIGESTED_BYTES) * DIGESTED_BYTES)
        if len(self._buffer) < high - low:
            self._buffer = np.empty(high - low, np.uint8)
        data = self._buffer[: high - low].data
        self._fill(data, tensor.begin + low)
        if checked is not None:
            start = low // DIGESTED_BYTES * _HEX
            for at in range(0, len(data), DIGESTED_BYTES):
                digest = xxhash.xxh3_64_hexdigest(data[at : at + DIGESTED_BYTES])
                if digest != checked[start : start + _HEX]:
                    raise CheckpointError(
                        f"the bytes of {name!r} in a checkpoint are not those that were written",
                        got=f"{self._path}, {min(DIGESTED_BYTES, len(data) - at)} bytes at "
                        f"{tensor.begin + low + at} with digest {digest}",
                        expected=f"digest {checked[start : start + _HEX]}",
                        hint="restore another checkpoint: this file was damaged or replaced after "
                        "it was written",
                    )
                start += _HEX
        return data[begin - low : begin - low + size]

    def _fill(self, data: memoryview, offset: int) -> None:
        filled = 0
        while filled < len(data):
            count = os.preadv(self._descriptor, [data[filled:]], offset + filled)
            if count == 0:
                raise self._damaged(f"it ends {len(data) - filled} bytes too early")
            filled += count

    def _header(self) -> tuple[dict[str, StoredTensor], dict[str, str]]:
        size = os.fstat(self._descriptor).st_size
        if size < 8:
            raise self._damaged(f"it has {size} bytes")
        head = memoryview(bytearray(8))
        self._fill(head, 0)
        length = int.from_bytes(head, "little")
        if length > min(size - 8, MAX_HEADER):
            raise self._damaged(f"its header takes {length} of {size} bytes")
        text = memoryview(bytearray(length))
        self._fill(text, 8)
        return parse_header(text.tobytes(), str(self._path), 8 + length, size)

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError("a file of a checkpoint is damaged", got=f"{self._path}: {why}")
