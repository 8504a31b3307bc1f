"""A thread that passes on the lines which a process writes into a pipe."""

from __future__ import annotations

import fcntl
import struct
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import IO

from plancompiler.engines.launcher import LINE_CHARACTERS

LAST_WORDS_SECONDS = 0.5
"""How long to read what an ended process has said where what it started can still write."""


class LineReader(threading.Thread):
    """Reads until nobody can write any more; it is a daemon, because that may never be."""

    def __init__(self, stream: IO[str] | None, take: Callable[[str], None], name: str) -> None:
        assert stream is not None
        super().__init__(name=name, daemon=True)
        self._stream = stream
        self._take = take
        self._is_passing = False
        self.start()

    def run(self) -> None:
        """The thread."""
        with self._stream:
            for line in iter(partial(self._stream.readline, LINE_CHARACTERS), ""):
                self._is_passing = True
                self._take(line)
                self._is_passing = False

    def finish(self) -> None:
        """Return when all that was written has been passed on; the process has ended. What it has
        started in a session of its own may hold the pipe open for ever: nobody waits for what that
        one still says.
        """
        self.join(LAST_WORDS_SECONDS)
        while self.is_alive() and (self._is_passing or self._unread()):
            self.join(LAST_WORDS_SECONDS)

    def _unread(self) -> int:
        """Bytes in the pipe."""
        with suppress(OSError, ValueError):  # it has just been closed
            (count,) = struct.unpack("i", fcntl.ioctl(self._stream, termios.FIONREAD, bytes(4)))
            return int(count)
        return 0
