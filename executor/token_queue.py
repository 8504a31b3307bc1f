"""Tokens on their way to the thread of a stream.

Python releases a lock without letting go of the interpreter, so that a thread which waits for one,
as in `queue.SimpleQueue`, is woken only to find that it must wait once more. Whoever writes to an
eventfd lets go of the interpreter before the kernel wakes the reader.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

_MOST = 256
"""Of a process that may run very many ranks as threads: each is an open file."""
_free = [None] * _MOST
"""One for each that may still be made; a list, because threads may take and give at any time."""


class WakingQueue:
    """A queue of tokens that any thread may put and one thread gets, like a `SimpleQueue`.

    What it opens is closed with its last reference, and not before: a stream of another rank may
    put a token at any time, and by then the number could be that of another file.
    """

    def __init__(self, file: int) -> None:
        """`file` is an eventfd, which is closed here."""
        self._file = file
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLIN)
        self._tokens: deque[int] = deque()
        self._waits = False
        """Whether the reader is to be woken. Who takes that back must wake it."""

    def put(self, token: int) -> None:
        """Add a token, and wake the reader if it waits for one."""
        self._tokens.append(token)
        if self._waits:
            self._waits = False
            os.eventfd_write(self._file, 1)

    def get(self, block: bool = True, timeout: float | None = None) -> int:
        """The next token; Empty where there is none, or none comes in so many seconds."""
        while True:
            try:
                return self._tokens.popleft()
            except IndexError:
                if not block:
                    raise Empty from None
            self._waits = True
            # A token that came before this was said has woken nobody. To be woken once more often
            # than there is a token does no harm.
            if self._tokens:
                continue
            if not self._poll.poll(None if timeout is None else 1000 * timeout):
                raise Empty
            os.eventfd_read(self._file)

    def get_nowait(self) -> int:
        """The next token; Empty where there is none."""
        return self.get(block=False)

    def __del__(
        self,
        close: Callable[[int], None] = os.close,
        give: Callable[[None], None] = _free.append,
    ) -> None:  # names of modules may be gone when the interpreter ends
        close(self._file)
        give(None)


TokenQueue = SimpleQueue[int] | WakingQueue


def token_queues(count: int) -> tuple[TokenQueue, ...]:
    """Queues for the streams of a rank."""
    # A stream that is alone gets its tokens from other processes, which take longer.
    return tuple(_token_queue() if count > 1 else SimpleQueue() for _ in range(count))


def _token_queue() -> TokenQueue:
    try:
        _free.pop()
    except IndexError:
        return SimpleQueue()
    try:
        return WakingQueue(os.eventfd(0))
    except (AttributeError, OSError):  # another system; too many open files
        _free.append(None)
        return SimpleQueue()
