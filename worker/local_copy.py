"""Bytes that workers of one host give each other, in anonymous memory.

It is found by its owner's process and the descriptor under which that has it open.
The memory has no name and ends with its owner, so nothing can be left behind. Whoever reads it
trusts only the digest: the owner may be gone and its number another process's by now.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from plancompiler.cluster.chunks import digest_of
from plancompiler.cluster.messages import LocalCopy

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class OfferedCopy:
    """A sealed copy of bytes for other processes of this user, until it is closed."""

    def __init__(self, data: bytes) -> None:
        """Raises OSError where there is no memory for it or the system has no such memory."""
        if sys.platform != "linux":
            raise OSError("anonymous memory with descriptors needs Linux")
        self._descriptor = os.memfd_create("plancompiler", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            self.close()
            raise

    @property
    def place(self) -> LocalCopy:
        """Where others find it."""
        return LocalCopy(os.getpid(), self._descriptor)

    def close(self) -> None:
        """Give the memory back. Safe to call again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_copy(copy: LocalCopy, digest: bytes, limit: int) -> bytes | None:
    """The bytes of that digest at a place; None where they are not there."""
    path = Path(f"/proc/{copy.process}/fd/{copy.descriptor}")
    try:
        # Looked at before it is opened: to open something else than a file can do something.
        if not _is_small_file(path.stat(), limit):
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not _is_small_file(status, limit):
                return None
            data = file.read(status.st_size)
    except OSError:
        return None
    return data if digest_of(data) == digest else None


def _is_small_file(status: os.stat_result, limit: int) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_size <= limit
