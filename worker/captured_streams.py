"""Standard output and standard error of a worker's process, read along.

Whatever writes to file descriptors 1 and 2 is heard, be it Python, a kernel in C or a program that
was started: both lead into pipes, from which everything goes on to where they led before.
"""

from __future__ import annotations

import fcntl
import os
import select
import sys
import termios
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper

_LONGEST_LINE = 64 << 10
"""Bytes after which a line without an end counts as one."""
_NAMES = {1: "stdout", 2: "stderr"}


class _Stream:
    """One of the two."""

    def __init__(self, descriptor: int) -> None:
        self.name = _NAMES[descriptor]
        self.descriptor = descriptor
        self.original = os.dup(descriptor)
        self.source, target = os.pipe()
        os.dup2(target, descriptor)
        os.close(target)
        self._begun = b""
        """A line without its end."""

    @property
    def waiting(self) -> int:
        """Bytes that were written and not yet read."""
        count = array("i", [0])
        fcntl.ioctl(self.source, termios.FIONREAD, count)
        return count[0]

    def pass_on(self, data: bytes) -> list[str]:
        """Write out what was read; the lines that have ended."""
        view = memoryview(data)
        with suppress(OSError):  # nobody reads it there any longer
            while view:
                view = view[os.write(self.original, view) :]
        *lines, begun = (self._begun + data).split(b"\n")
        if len(begun) > _LONGEST_LINE:
            lines.append(begun)
            begun = b""
        self._begun = begun
        return [_text(line) for line in lines]

    def rest(self) -> str:
        """What was written last, without an end."""
        begun, self._begun = self._begun, b""
        return _text(begun)

    def restore(self) -> None:
        """Lead to where it led before."""
        os.dup2(self.original, self.descriptor)


def _text(line: bytes) -> str:
    """A bar that is drawn over and over is what it was last."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


class CapturedStreams:
    """Reads both streams in a thread, and at once when somebody wants what was written so far."""

    def __init__(self, add: Callable[[str, str], None]) -> None:
        self._add = add
        self._lock = threading.Lock()
        self._wake, self._woken = os.pipe()
        _flush()
        self._streams = [_Stream(1), _Stream(2)]
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(line_buffering=True)  # a line is heard when it is printed
        self._thread = threading.Thread(target=self._read, name="plancompiler-output", daemon=True)
        self._thread.start()

    @property
    def pipes(self) -> list[tuple[int, int]]:
        """Of each stream the pipe's end and where it led before."""
        return [(stream.source, stream.original) for stream in self._streams]

    @property
    def stderr(self) -> int:
        """Where standard error led before."""
        return self._streams[1].original

    def take_lines(self) -> None:
        """Take in the lines that have ended; the end of the last one may be on its way."""
        with self._lock:
            self._take()

    def drain(self) -> None:
        """Take in everything that was written before, also a line that has no end."""
        _flush()
        with self._lock:
            self._take()
            for stream in self._streams:
                rest = stream.rest()
                if rest:
                    self._add(stream.name, rest)

    def _read(self) -> None:
        sources = [stream.source for stream in self._streams]
        while True:
            ready, _, _ = select.select([self._wake, *sources], [], [])
            if self._wake in ready:
                return
            with self._lock:
                self._take()

    def _take(self) -> None:
        for stream in self._streams:
            left = stream.waiting  # not what comes meanwhile, which may have no end
            while left:
                try:
                    data = os.read(stream.source, left)
                except BlockingIOError:  # the process beside this one has read it
                    break
                left -= len(data)
                for line in stream.pass_on(data):
                    self._add(stream.name, line)

    def close(self) -> None:
        """Let both streams lead to where they led before, with nothing lost."""
        _flush()
        for stream in self._streams:
            stream.restore()
        os.close(self._woken)
        self._thread.join()
        self.drain()
        os.close(self._wake)
        for stream in self._streams:
            os.close(stream.source)
            os.close(stream.original)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()


@contextmanager
def captured_streams(add: Callable[[str, str], None]) -> Iterator[CapturedStreams]:
    """Within the block, `add` is told each line of standard output and standard error."""
    streams = CapturedStreams(add)
    try:
        yield streams
    finally:
        streams.close()
