"""Files on their way over a stream, in parts of bounded size, each file with its checksum."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import xxhash

from plancompiler.cluster.chunks import CHUNK_BYTES
from plancompiler.errors import WireFormatError
from plancompiler.ir.whole_file import naming_output, whole_file
from plancompiler.proto.cluster_pb2 import FilePart

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,254}")
"""What a file may be called: nothing that leads elsewhere or is hidden."""


def parts_of_file(name: str, file: BinaryIO, size: int) -> Iterator[FilePart]:
    """A file that is open at its beginning and has so many bytes."""
    checksum = xxhash.xxh3_64()
    sent = 0
    while True:
        data = file.read(min(CHUNK_BYTES, size - sent))
        if not data and sent < size:
            raise WireFormatError("a file became shorter while it was read", got=name)
        sent += len(data)
        checksum.update(data)
        part = FilePart(data=data)
        if sent == len(data):
            part.name, part.size = name, size
        if sent == size:
            part.checksum = checksum.intdigest() or 1
        yield part
        if sent == size:
            return


class FileReceiver:
    """Writes the files that come into a folder, each whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.paths: list[Path] = []
        """Those that have come."""
        self._stack = ExitStack()
        self._write: Callable[[bytes], int] | None = None
        self._path = folder
        self._left = 0
        self._checksum = xxhash.xxh3_64()

    def add(self, part: FilePart) -> None:
        """Take a part; a WireFormatError where it is not what was announced."""
        with naming_output("a file that was fetched", self._path):
            if self._write is None:
                self._begin(part)
            elif part.name:
                raise WireFormatError("a file began before the one before it had ended")
            self._take(part)

    def _begin(self, part: FilePart) -> None:
        if not _NAME.fullmatch(part.name):
            raise WireFormatError("a file comes under a name that it may not have", got=part.name)
        self._path = self._folder / part.name
        self._left = part.size
        self._checksum = xxhash.xxh3_64()
        self._write = self._stack.enter_context(whole_file(self._path)).write

    def _take(self, part: FilePart) -> None:
        self._left -= len(part.data)
        has_more = self._left > 0
        if self._left < 0 or (has_more and not part.data) or has_more == bool(part.checksum):
            raise WireFormatError("a file does not have the size that it announced", got=self._path)
        assert self._write is not None
        self._write(part.data)
        self._checksum.update(part.data)
        if has_more:
            return
        if part.checksum != (self._checksum.intdigest() or 1):
            raise WireFormatError("a file was damaged on its way", got=self._path)
        self._write = None
        self._stack.close()
        self.paths.append(self._path)

    @property
    def is_complete(self) -> bool:
        """Whether no file is half done."""
        return self._write is None

    def abandon(self, error: BaseException) -> None:
        """Leave nothing of a file that is half done."""
        self._stack.__exit__(type(error), error, error.__traceback__)
