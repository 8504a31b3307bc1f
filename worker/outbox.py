"""What a worker tells its master, kept until a master with a journal has it for good."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from plancompiler.cluster.chunks import CHUNK_BYTES
from plancompiler.cluster.messages import (
    Heartbeat,
    LogLines,
    Outputs,
    Register,
    WorkerMessage,
)

KEPT_BYTES = 256 << 20
"""Outputs that wait for a master which is away; who reports more has to wait as well."""
KEPT_LINES = 64
"""Batches of printed lines that wait; of more the oldest ones go."""


class Outbox:
    """Messages for the master, numbered from 1, in streams one after another.

    A stream begins with a registration and goes on once the master has answered that, with what it
    does not have yet. Any thread may put messages in.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._kept: deque[WorkerMessage] = deque()
        """Messages that the master may not have, in order."""
        self._first = 1
        """The number of the first of them."""
        self._sent = 0
        """The number of the last one that went out in the stream at hand."""
        self._beat: Heartbeat | None = None
        self._lines: deque[LogLines] = deque()
        """What was printed. It goes out before messages that were put in later, once at most."""
        self._bytes = 0
        self._stream = 0
        """Counts the streams."""
        self._is_open = False
        """The master has answered the registration."""
        self._is_durable = False
        self._ended = False

    def put(self, message: WorkerMessage, *, hurry: bool = True) -> None:
        """Tell the master; of heartbeats only the latest counts. Waits while the master is away and
        very many outputs wait for it. Without `hurry` it goes out together with what comes next.
        """
        with self._changed:
            if isinstance(message, Heartbeat):
                self._beat = message
            elif isinstance(message, LogLines):
                self._add_lines(message)
            else:
                size = _size(message)
                self._changed.wait_for(
                    lambda: (
                        self._ended
                        or not size
                        or self._bytes + size <= KEPT_BYTES
                        or not self._kept
                    )
                )
                self._kept.append(message)
                self._bytes += size
            if hurry:
                self._changed.notify_all()

    def _add_lines(self, lines: LogLines) -> None:
        self._lines.append(lines)
        if len(self._lines) > KEPT_LINES:
            gone = self._lines.popleft()
            first = self._lines[0]
            if first.job_id == gone.job_id:
                count = first.dropped + gone.dropped + len(gone.lines)
                self._lines[0] = replace(first, dropped=count)

    def end(self) -> None:
        """End the stream after what was put in before, and take nothing for later ones."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def opened(self, received: int, is_durable: bool) -> None:
        """The master has answered the registration, and has so many messages."""
        with self._changed:
            self._is_open, self._is_durable = True, is_durable
            self._drop(received)
            self._sent = self._first - 1
            self._changed.notify_all()

    def closed(self) -> None:
        """The connection is lost."""
        with self._changed:
            self._stream += 1
            self._is_open = False
            self._changed.notify_all()

    def acknowledged(self, received: int) -> None:
        """The master has so many messages for good."""
        with self._changed:
            self._drop(received)
            self._changed.notify_all()

    def _drop(self, through: int) -> None:
        while self._kept and self._first <= through:
            self._bytes -= _size(self._kept.popleft())
            self._first += 1

    def messages(self, register: Register) -> Iterator[list[tuple[int, WorkerMessage]]]:
        """The stream of a connection: each time the messages that there are, with their numbers; 0
        is of those that have none.
        """
        with self._changed:
            stream = self._stream
        yield [(0, register)]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stream != stream or self._is_ready())
                if self._stream != stream:
                    return
                ready = self._take_ready()
            if not ready:  # it has ended
                return
            yield ready

    def _take_ready(self) -> list[tuple[int, WorkerMessage]]:
        """What goes out next in the stream at hand; of large outputs no more than of one step."""
        ready: list[tuple[int, WorkerMessage]] = []
        if self._beat is not None:
            ready.append((0, self._beat))
            self._beat = None
        if self._is_open:
            ready += ((0, lines) for lines in self._lines)
            self._lines.clear()
            nbytes = 0
            for message in itertools.islice(self._kept, self._sent + 1 - self._first, None):
                if nbytes >= CHUNK_BYTES:
                    break
                self._sent += 1
                ready.append((self._sent, message))
                nbytes += _size(message)
            if not self._is_durable:
                self._drop(self._sent)
                self._changed.notify_all()
        return ready

    def _is_ready(self) -> bool:
        """Whether there is something to do for the stream at hand."""
        if not self._is_open:
            return self._ended
        more = self._sent + 1 - self._first < len(self._kept)
        return bool(more or self._lines or self._beat is not None or self._ended)


def _size(message: WorkerMessage) -> int:
    return len(message.arrays) if isinstance(message, Outputs) else 0
