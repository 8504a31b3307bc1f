"""Arrays in files, memory-mapped: what data ops read their rows from, and variables their initial
values.

An npz file is a zip archive with an npy file per array. `np.load` does not map those, but an array
that is stored as it is (`np.savez`) lies in the file in one piece, so its rows can be read in
place: only pages with rows that somebody wants are ever read, and all ranks of a host share them. A
compressed array (`np.savez_compressed`) is unpacked whole when its first row is wanted.

A mapped page of a file that was cut short kills the process that touches it, so every reader first
asks whether the file is what it was (`DataFile.check`).
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import EllipsisType
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

import numpy as np

from plancompiler.errors import DataError
from plancompiler.ir.shard import Region, region_index
from plancompiler.ir.whole_file import regular_file
from plancompiler.ops.registry import Array
from plancompiler.plan.arrays import MAX_HEADER, StoredTensor, parse_header

Indices = np.ndarray[Any, np.dtype[np.int64]]
Version = tuple[int, int, int, int]
"""Device, inode, time of change in nanoseconds, and size of a file."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Of a member of a zip archive: its mark, and the lengths of its name and of what follows that."""
_LEAST_READ = 128 << 10
"""Bytes: shorter pieces are copied from a map, whose page faults cost less than a call for each."""
_READ_AT_ONCE = 8 << 20
_MOST_UNPACKED = 1040
"""Bytes that a byte of the deflate format can stand for."""
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class DataFile:
    """A file as it was when it was first looked at. Raises DataError where it cannot be read."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            with regular_file(path) as file:
                self.version = _version_of(os.fstat(file.fileno()))
        except OSError as error:
            raise _unreadable(path, error) from None

    @property
    def size(self) -> int:
        """Bytes."""
        return self.version[-1]

    def check(self) -> None:
        """Raise DataError where the file is not what it was."""
        try:
            now = _version_of(Path(self.path).stat())
        except OSError as error:
            raise _unreadable(self.path, error) from None
        if now != self.version:
            raise self._changed(now)

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """The file, open for reading."""
        try:
            with regular_file(self.path) as file:
                now = _version_of(os.fstat(file.fileno()))
                if now != self.version:
                    raise self._changed(now)
                yield file
        except OSError as error:
            raise _unreadable(self.path, error) from None

    def mapped(self) -> Array:
        """Its bytes, read-only, as uint8."""
        if not self.size:
            return np.empty(0, np.uint8)
        with self.opened() as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)

    def _changed(self, now: Version) -> DataError:
        return DataError(
            "a data file has changed since the job began to read it",
            got=f"{self.path} of {now[-1]} bytes, changed at {now[-2]} ns",
            expected=f"{self.version[-1]} bytes, changed at {self.version[-2]} ns",
            hint="write new data to a new file",
        )


def _version_of(status: os.stat_result) -> Version:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _unreadable(path: str, error: OSError) -> DataError:
    return DataError(
        "a data file cannot be read",
        got=f"{path} ({error.strerror or error})",
        hint="the file must be there under this path on every machine that runs the job",
    )


class StoredArray:
    """One array of an npz file; `stored_array` makes it."""

    def __init__(self, file: DataFile, key: str) -> None:
        self.file = file
        self.key = key
        self._lock = threading.Lock()
        self._rows: Array | None = None
        self._offset = -1
        """Where in the file its data begin; -1 where it is compressed."""
        with self._archive() as (opened, archive):
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            if key not in names:
                raise DataError(
                    f"a data file has no array {key!r}",
                    got=f"{file.path} with {', '.join(names) or 'no arrays'}",
                    expected=f"an array of the name {key!r}",
                )
            member = archive.infolist()[names.index(key)]
            with archive.open(member) as stream:
                read_header = _HEADERS.get(np.lib.format.read_magic(stream))
                if read_header is None:
                    raise ValueError(f"array {key!r} has a header that is not known")
                self.shape, self._by_columns, self.dtype = read_header(stream)
                header = stream.tell()
            # Pickled objects stay refused: reading data must never run code.
            if self.dtype.hasobject:
                raise ValueError(f"array {key!r} holds Python objects")
            if min(self.shape, default=0) < 0:
                raise ValueError(f"array {key!r} has a negative extent")
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"array {key!r} is packed in another way than NumPy's")
            if member.file_size > _MOST_UNPACKED * min(member.compress_size, file.size):
                raise ValueError(f"array {key!r} cannot unpack to {member.file_size} bytes")
            count = 1
            for extent in self.shape:
                count *= extent
            if member.file_size != header + count * self.dtype.itemsize:
                raise ValueError(
                    f"array {key!r} takes {member.file_size - header} bytes where "
                    f"{self.dtype}{list(self.shape)} takes {count * self.dtype.itemsize}"
                )
            if member.compress_type == zipfile.ZIP_STORED:
                self._offset = header + _data_offset(opened, member)
                if self._offset + count * self.dtype.itemsize > file.size:
                    raise ValueError(f"array {key!r} reaches beyond the end of the file")

    @contextmanager
    def _archive(self) -> Iterator[tuple[BinaryIO, zipfile.ZipFile]]:
        path = self.file.path
        try:
            with self.file.opened() as opened:
                if opened.read(6) == b"\x93NUMPY":
                    raise DataError(
                        "a data file holds one array where several are expected",
                        got=path,
                        hint="write arrays with np.savez, under the names that `keys` gives",
                    )
                with zipfile.ZipFile(opened) as archive:
                    yield opened, archive
        # RuntimeError: encrypted, or packed in a way that this Python does not know. SyntaxError
        # and TokenError: NumPy reads the header of an array as Python's literals.
        except (
            ArithmeticError,
            EOFError,
            LookupError,
            RuntimeError,
            SyntaxError,
            TypeError,
            ValueError,
            struct.error,
            tokenize.TokenError,
            zipfile.BadZipFile,
            zlib.error,
        ) as error:
            raise DataError(
                "a data file is no readable npz archive",
                got=f"{path}: {error}",
                expected=f"a whole npz file with array {self.key!r}",
                hint="an archive that was cut short, by a full disk or an unfinished copy, has no "
                "table of contents",
            ) from None

    def rows(self, arrays: Any = np) -> Array:
        """The array, read-only: mapped, or unpacked by the first call. With other `arrays` than
        NumPy's, which stand for them, nothing is read.
        """
        if arrays is not np:
            key = self.file.path, self.key
            stands: Array = arrays.stored(key, self.shape, self.dtype, self._offset < 0)
            return stands
        self.file.check()
        with self._lock:
            if self._rows is None:
                self._rows = self._mapped() if self._offset >= 0 else self._unpacked()
            return self._rows

    def _mapped(self) -> Array:
        # Not through a view: the data need not lie at a multiple of the size of an element.
        return np.ndarray(
            self.shape,
            self.dtype,
            self.file.mapped(),
            self._offset,
            order="F" if self._by_columns else "C",
        )

    def _unpacked(self) -> Array:
        with self._archive() as (_, archive), archive.open(f"{self.key}.npy") as stream:
            array: Array = np.lib.format.read_array(stream, allow_pickle=False)
        array.flags.writeable = False
        return array


def _data_offset(opened: BinaryIO, member: zipfile.ZipInfo) -> int:
    """Where the bytes of a member begin. Its own header may be longer than the table says."""
    opened.seek(member.header_offset)
    mark, name, extra = _LOCAL_HEADER.unpack(opened.read(_LOCAL_HEADER.size))
    if mark != b"PK\x03\x04":
        raise ValueError("the table of contents points at no member")
    return member.header_offset + _LOCAL_HEADER.size + int(name) + int(extra)


_arrays: WeakValueDictionary[tuple[str, str, Version], StoredArray] = WeakValueDictionary()
_arrays_lock = threading.Lock()


def stored_array(path: str, key: str) -> StoredArray:
    """One array of an npz file; ranks that are threads of a process share it.

    Raises DataError where the file or the array is missing, or the file is damaged.
    """
    file = DataFile(path)
    with _arrays_lock:
        stored = _arrays.get((path, key, file.version))
        if stored is None:
            stored = _arrays[path, key, file.version] = StoredArray(file, key)
        return stored


class StoredRows:
    """The rows of one array that shard files hold one after another."""

    def __init__(self, shards: Sequence[StoredArray]) -> None:
        self._shards = tuple(shards)
        self._ends = np.cumsum([shard.shape[0] for shard in shards])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(
        self,
        rows: Indices,
        inner: tuple[slice | EllipsisType, ...],
        out: Array,
        arrays: Any = np,
    ) -> None:
        """Copy the box `inner` of some rows; only shards that hold one of them are opened."""
        if out.size == 0:
            return
        if len(self._shards) == 1:
            _copy_rows(rows, self._shards[0].rows(arrays)[(slice(None), *inner)], out)
            return
        owners = np.searchsorted(self._ends, rows, side="right")
        for number in np.unique(owners).tolist():
            shard = self._shards[number]
            places = np.flatnonzero(owners == number)
            local = rows[places] - (self._ends[number] - shard.shape[0])
            array = shard.rows(arrays)[(slice(None), *inner)]
            if len(local) == len(out):
                _copy_rows(local, array, out)
            else:
                out[places] = array[local]


def _copy_rows(rows: Indices, array: Array, out: Array) -> None:
    """Copy some rows of an array, all of `out`."""
    if rows[-1] - rows[0] == len(rows) - 1 and _rising(rows):
        np.copyto(out, array[rows[0] : rows[-1] + 1])
    else:
        out[:] = array[rows]


def _rising(numbers: Indices) -> bool:
    return bool((numbers[1:] > numbers[:-1]).all())


def mapped_tokens(path: str, dtype: str, least: int) -> tuple[DataFile, Array]:
    """A file of raw numbers, memory-mapped; DataError if it holds fewer than `least`."""
    file = DataFile(path)
    itemsize = np.dtype(dtype).itemsize
    if file.size % itemsize or file.size // itemsize < least:
        raise DataError(
            "a token file is too short for a sequence, or no whole number of tokens",
            got=f"{file.size} bytes in {path}",
            expected=f"at least {least} tokens of {itemsize} bytes",
        )
    return file, file.mapped().view(dtype)


def stored_tensor(path: str, key: str) -> Array:
    """One array of a safetensors file, memory-mapped and read-only.

    Raises DataError where the file or the array is missing, or the file is damaged.
    """
    file = DataFile(path)
    place = _place_in(file, key)
    # The data need not lie at a multiple of the size of an element, so this is no view of bytes.
    return np.ndarray(place.shape, place.dtype.numpy, file.mapped(), place.begin)


def read_box(path: str, key: str, region: Region, out: Array, shape: tuple[int, ...]) -> None:
    """Copy a box of an array of a safetensors file into `out`, a contiguous array of the box's
    shape; floating numbers may have another dtype there. The array is read as one of `shape`, which
    has as many elements.

    Long runs of bytes are read in one piece each: page faults of a map that is read once take
    longer. Raises DataError as `stored_tensor`.
    """
    file = DataFile(path)
    place = _place_in(file, key)
    runs = _runs(shape, region)
    length = out.nbytes // len(runs) if len(runs) else 0
    if place.dtype.numpy != out.dtype or length < _LEAST_READ:
        box = np.ndarray(shape, place.dtype.numpy, file.mapped(), place.begin)
        np.copyto(out, box[region_index(region)], casting="unsafe")
        return
    data = out.reshape(-1).view(np.uint8).data
    with file.opened() as opened:
        descriptor, read = opened.fileno(), os.preadv
        offsets = (place.begin + runs * place.dtype.itemsize).tolist()
        at = 0
        for offset in offsets:
            end = at + length
            count = read(descriptor, [data[at : min(end, at + _READ_AT_ONCE)]], offset)
            while count and at + count < end:  # longer than one read
                at, offset = at + count, offset + count
                count = read(descriptor, [data[at : min(end, at + _READ_AT_ONCE)]], offset)
            if not count:
                raise DataError(
                    "a data file was cut short while it was read",
                    got=f"{path}, which ends {end - at} bytes too early",
                )
            at = end


def _runs(shape: tuple[int, ...], region: Region) -> Indices:
    """Where the pieces of a box begin that lie in one piece, as numbers of elements."""
    strides = np.cumprod((1, *shape[:0:-1]), dtype=np.int64)[::-1]
    partial = [axis for axis, bounds in enumerate(region) if bounds != (0, shape[axis])]
    last = max(partial, default=0)
    first = np.zeros(1, np.int64)
    for axis, (start, stop) in enumerate(region):
        # Along the last axis that is cut, and after it, elements follow one another.
        steps = np.arange(start, stop) if axis < last else np.array([start])
        first = (first[:, None] + steps * strides[axis]).reshape(-1)
    return first


def stored_place(path: str, key: str) -> StoredTensor:
    """Where one array of a safetensors file lies; DataError as for `stored_tensor`."""
    return _place_in(DataFile(path), key)


def _place_in(file: DataFile, key: str) -> StoredTensor:
    tensors = _tensors_of(file.path, file.version)
    place = tensors.get(key)
    if place is None:
        raise DataError(
            f"a file of tensors has no {key!r}",
            got=f"{file.path} with {len(tensors)} others: {', '.join(sorted(tensors)[:8])}",
            expected=f"a tensor of the name {key!r}",
        )
    return place


def tensors_of_file(path: str) -> Mapping[str, StoredTensor]:
    """Where the arrays of a safetensors file lie, by name; DataError as for `stored_tensor`."""
    return _tensors_of(path, DataFile(path).version)


@lru_cache(maxsize=1024)
def _tensors_of(path: str, version: Version) -> Mapping[str, StoredTensor]:
    """Where the arrays of a safetensors file lie. The header is read once for all of them."""
    file = DataFile(path)
    with file.opened() as opened:
        length = int.from_bytes(opened.read(8), "little")
        if file.size < 8 or length > min(file.size - 8, MAX_HEADER):
            raise DataError(
                "a file of tensors is damaged",
                got=f"{path} of {file.size} bytes, {length} of them its header",
                expected="a whole safetensors file",
            )
        return parse_header(opened.read(length), path, 8 + length, file.size, DataError)[0]
