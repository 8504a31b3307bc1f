"""The end of threads: it is waited for, and a note names who is left behind."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable
from time import monotonic

from plancompiler.limits import time_limits

_log = logging.getLogger(__name__)


THREAD_SECONDS = time_limits.THREAD_END


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
