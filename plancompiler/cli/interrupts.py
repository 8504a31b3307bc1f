"""Exceptions of signals, raised where they leave no lock behind."""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
from types import FrameType, FunctionType

_AGAIN_SECONDS = 0.001
_METHODS = {
    method.__code__
    for method in vars(threading.Condition).values()
    if isinstance(method, FunctionType)
}
_WAIT = threading.Condition.wait.__code__
_WAIT_FOR = threading.Condition.wait_for.__code__


def interrupt(number: int, frame: FrameType | None) -> None:
    """A handler of signals: raise KeyboardInterrupt. See `has_lock_at_risk`."""
    if not _comes_again(number, frame):
        raise KeyboardInterrupt


def end(number: int, frame: FrameType | None) -> None:
    """A handler of signals: exit, with the code that shells give to the signal."""
    if not _comes_again(number, frame):
        sys.exit(128 + number)


def has_lock_at_risk(frame: FrameType | None) -> bool:
    """Whether an exception here could leave a lock taken for good.

    Python runs handlers between any two instructions of the main thread. `threading.Condition`
    takes and gives back its lock in functions written in Python: an exception that is raised in
    one of them, once the lock is taken, comes too early for the `with` that would give it back.
    Other threads then wait for ever, such as those of gRPC, whose calls have such conditions.
    """
    if frame is None or frame.f_code is _WAIT_FOR:
        return False
    if frame.f_code is _WAIT:
        # While it waits the lock is given back, and from `gotit` on taken again in any case.
        return "gotit" not in frame.f_locals
    return frame.f_code in _METHODS


def _comes_again(number: int, frame: FrameType | None) -> bool:
    """Where a lock is at risk, send the signal once more, in a moment; whether that is so."""
    if not has_lock_at_risk(frame):
        return False
    # Not by a `threading.Thread`: to start one takes a lock that the main thread may hold here.
    _thread.start_new_thread(_send_again, (number,))
    return True


def _send_again(number: int) -> None:
    time.sleep(_AGAIN_SECONDS)
    os.kill(os.getpid(), number)
