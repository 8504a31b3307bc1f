"""What a member publishes, as bytes: a header with its call, dtypes and shapes, then the arrays.

Each array begins at the start of a line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np

from plancompiler.executor.comm.operations import Arrays
from plancompiler.executor.memory import Array, Buffer
from plancompiler.ir import DType
from plancompiler.ir.shard import element_count

LINE = 64


@dataclass(frozen=True, slots=True)
class PackedArrays:
    """What a member published, as its header says."""

    call: str
    flags: int
    shapes: tuple[tuple[np.dtype[np.generic], tuple[int, ...]], ...]
    payload: Buffer
    """What follows the header."""

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take."""
        return sum(_padded(element_count(shape) * dtype.itemsize) for dtype, shape in self.shapes)

    def span(self, place: int) -> tuple[int, int]:
        """The bytes of one array."""
        ends = np.cumsum([_padded(element_count(s) * d.itemsize) for d, s in self.shapes]).tolist()
        return (ends[place - 1] if place else 0), ends[place]

    def arrays(self, data: Buffer) -> Arrays:
        """The arrays that lie in these bytes."""
        arrays, start = [], 0
        for dtype, shape in self.shapes:
            used = element_count(shape) * dtype.itemsize
            arrays.append(data[start : start + used].view(dtype).reshape(shape))
            start += _padded(used)
        return tuple(arrays)


def packed_bytes(arrays: Arrays) -> int:
    """What `PackedArrays.nbytes` will be of these."""
    return sum(_padded(array.nbytes) for array in arrays)


def header_of(call: str, arrays: Arrays) -> bytes:
    """The header's text."""
    kinds = ";".join([" ".join([_name(array.dtype), *map(str, array.shape)]) for array in arrays])
    return f"{call}\n{kinds}".encode()


def payload_start(text: bytes) -> int:
    """Where the arrays begin behind this header."""
    return _padded(len(text) + 8)


def write_header(target: Buffer, text: bytes, flags: int = 0) -> None:
    """Begin bytes with a header."""
    target[:8].view(np.int32)[:] = len(text), flags
    target[8 : 8 + len(text)] = np.frombuffer(text, np.uint8)


def write_arrays(target: Buffer, arrays: Iterable[Array]) -> None:
    """Copy arrays one after another, each from the start of a line."""
    start = 0
    for array in arrays:
        place: Array = target[start : start + array.nbytes].view(array.dtype)
        np.copyto(place.reshape(array.shape), array)
        start += _padded(array.nbytes)


def read_packed(data: Buffer) -> PackedArrays:
    """The inverse of `write_header`, whatever the bytes are: ValueError or DTypeError where they
    have no header.
    """
    length, flags = data[:8].view(np.int32).tolist()
    text = data[8 : 8 + length].tobytes()
    call, _, kinds = text.decode().partition("\n")
    if len(text) != length or "-" in kinds:
        raise ValueError("a header that ends too early, or a negative extent")
    shapes = []
    for kind in kinds.split(";") if kinds else ():
        name, *extents = kind.split(" ")
        shapes.append((DType.parse(name).numpy, tuple(map(int, extents))))
    return PackedArrays(call, flags, tuple(shapes), data[_padded(length + 8) :])


def _padded(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


@cache
def _name(dtype: np.dtype[np.generic]) -> str:
    """A dtype's name; NumPy puts it together anew each time."""
    return dtype.name
