"""Threads that do what they are given, and the end of threads: it is waited for, and a note names
who is left behind.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from time import monotonic
from typing import TypeVar

from plancompiler.limits import time_limits

_log = logging.getLogger(__name__)

T = TypeVar("T")
THREAD_SECONDS = time_limits.THREAD_END


class WorkThread:
    """Does what it is given, one thing after another.

    A daemon: a task that never ends must not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Do this next."""
        self._queue.put(work)

    def close(self, seconds: float | None = None) -> None:
        """End when all is done, and wait for that; no longer than it may take."""
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # the last one's error holds the frames of its step


def settle(future: Future[T], call: Callable[[], T]) -> None:
    """Give a future what a call returns or raises."""
    try:
        result = call()
    except BaseException as error:  # whoever asks the future is told
        future.set_exception(error)
    else:
        future.set_result(result)


def await_threads(threads: Iterable[threading.Thread], seconds: float | None = None) -> None:
    """Return when threads that were asked to end have ended, in all after so many seconds at most
    (default: THREAD_SECONDS).

    One that then still hangs, in foreign code most likely, is left behind, and a note says where
    it is. The calling thread is not waited for.
    """
    seconds = THREAD_SECONDS if seconds is None else seconds
    until = monotonic() + seconds
    for thread in threads:
        if thread is threading.current_thread():
            continue
        thread.join(max(0.0, until - monotonic()))
        if thread.is_alive():
            _log.warning(
                "the thread %s did not end within %g s and is left behind, %s",
                thread.name,
                seconds,
                _place(thread),
            )


def _place(thread: threading.Thread) -> str:
    """The line of Python that a thread is in."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001  # documented for debuggers
    return "starting" if frame is None else f"at {frame.f_code.co_filename}:{frame.f_lineno}"
