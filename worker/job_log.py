"""What a worker prints while it works for a job, on its way to the master.

Lines wait here until they are sent, so many bytes of them at most: where a job prints more than may
be sent, its oldest lines go and are counted. What is sent per second is bounded too, by less for a
job of more ranks, because one master hears them all.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections import deque

from plancompiler.cluster.messages import LogLine, LogLines
from plancompiler.errors import AbortedError, ClusterError, PlanCompilerError, WireFormatError
from plancompiler.worker.captured_streams import CapturedStreams

HELD_BYTES = 256 << 10
"""Of lines that wait to be sent."""
JOB_RATE = 2 << 20
"""Bytes per second that all ranks of a job may send together,"""
_LEAST_RATE = 2 << 10
"""and what each of very many may send nevertheless."""
LINE_CHARACTERS = 8 << 10
"""What is longer is cut."""
_MESSAGE_BYTES = 64 << 10
_LINE_BYTES = 64
"""What a line takes beside its text."""


_OF_CONNECTIONS = (AbortedError, ClusterError, WireFormatError)
"""Errors whose causes are never somebody's code."""


class JobLog:
    """The lines of the job at hand. Any thread may use it."""

    def __init__(self) -> None:
        self.streams: CapturedStreams | None = None
        """What hears all that this process prints; None where nothing does."""
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, LogLine]] = deque()
        """With the job of each."""
        self._held = 0
        self._dropped = 0
        self._job_id = self._rank = 0
        self._rate = float(JOB_RATE)
        self._allowance = float(HELD_BYTES)
        self._counted = time.monotonic()
        self._has_lines = threading.Event()
        self._is_closed = False

    def begin(self, job_id: int, rank: int = 0, world_size: int = 1) -> None:
        """From now on lines belong to this rank of a job of so many; job 0: to none, and they are
        not kept.
        """
        if self.streams is not None:
            self.streams.drain()
        with self._lock:
            self._job_id, self._rank = job_id, rank
            self._rate = max(JOB_RATE / world_size, _LEAST_RATE)

    def name_place(self, record: logging.LogRecord) -> bool:
        """A filter that lets every record pass, and writes job and rank on it."""
        if self._job_id:
            record.job, record.rank = self._job_id, self._rank
        return True

    def add(self, stream: str, text: str) -> None:
        """A line that was printed to `stdout` or `stderr`."""
        with self._lock:
            if not self._job_id:
                return
            if len(text) > LINE_CHARACTERS:
                text = f"{text[:LINE_CHARACTERS]} … ({len(text)} characters)"
            self._waiting.append((self._job_id, LogLine(time.time(), stream, text)))
            self._held += _bytes_of(text)
            while self._held > HELD_BYTES:
                _, oldest = self._waiting.popleft()
                self._held -= _bytes_of(oldest.text)
                self._dropped += 1
            self._has_lines.set()

    def add_error(self, error: BaseException) -> None:
        """The traceback of an error that somebody's code raised; the product's own errors say all
        themselves.
        """
        cause: BaseException | None = error
        while isinstance(cause, PlanCompilerError):
            cause = cause.__cause__
        if cause is None or isinstance(error, _OF_CONNECTIONS):
            return
        text = "".join(traceback.format_exception(error))
        if self.streams is not None:  # the worker's own terminal has it too
            sys.stderr.write(text)
            return
        for line in text.splitlines():
            self.add("stderr", line)

    def wait(self) -> bool:
        """Return when there are lines; False once nobody wants them any longer."""
        self._has_lines.wait()
        return not self._is_closed

    def close(self) -> None:
        """Nobody wants more lines."""
        self._is_closed = True
        self._has_lines.set()

    def take(self, *, work_has_ended: bool = False) -> list[LogLines]:
        """The lines that may be sent by now, those that were printed first come first. A line
        without an end is one only when the work that printed it has ended.
        """
        if self.streams is not None:
            if work_has_ended:
                self.streams.drain()
            else:
                self.streams.take_lines()
        with self._lock:
            now = time.monotonic()
            # So that what waits can be sent at once after a silence.
            most = max(self._rate, HELD_BYTES)
            self._allowance = min(most, self._allowance + self._rate * (now - self._counted))
            self._counted = now
            taken: list[LogLines] = []
            while self._waiting and self._allowance > 0:
                taken.append(self._batch())
            if not self._waiting:
                self._has_lines.clear()
            return taken

    def _batch(self) -> LogLines:
        """As many lines of one job as fit into a message."""
        job_id, size, lines = self._waiting[0][0], 0, []
        while self._waiting and self._waiting[0][0] == job_id and size < _MESSAGE_BYTES:
            _, line = self._waiting.popleft()
            size += _bytes_of(line.text)
            lines.append(line)
        self._held -= size
        self._allowance -= size
        dropped, self._dropped = self._dropped, 0
        return LogLines(job_id, tuple(lines), dropped)


def _bytes_of(text: str) -> int:
    return len(text) + _LINE_BYTES
