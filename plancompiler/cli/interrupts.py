"""Exceptions of signals, raised where they leave no lock taken, no call and no end half done."""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
from types import FrameType, FunctionType

from plancompiler.limits import time_limits

_AGAIN_SECONDS = 0.001
_LOOK_SECONDS = 0.01
_METHODS = {
    method.__code__
    for method in vars(threading.Condition).values()
    if isinstance(method, FunctionType)
}
_WAIT = threading.Condition.wait.__code__
_WAIT_FOR = threading.Condition.wait_for.__code__
_GRPC = os.path.join("grpc", "_channel.py")  # noqa: PTH118  # pathlib takes long to load
_BLOCKING = "_blocking"
"""The function of gRPC that waits for the answer of a call, elsewhere than in a condition."""
_CLOSING = frozenset({"__exit__", "close"})
"""The names of functions that end what was started."""
_PATIENCE = time_limits.PATIENCE


class _Ending:
    """How the process ends by signals."""

    def __init__(self, is_program: bool = False) -> None:
        self.is_program = is_program
        """Whether it is the program, which does nothing more but end after the first exception."""
        self.since: float | None = None
        """When it was told to end, if it has not done so yet."""


_ending = _Ending()


def raise_once() -> None:
    """This process is the program: from now on it ends by the first exception of a signal, and
    signals after it do not cut short what that one stops.
    """
    _ending.is_program = True


def interrupt(number: int, frame: FrameType | None) -> None:
    """A handler of signals: raise KeyboardInterrupt, now, or once that does no harm."""
    if _is_time(number, frame):
        raise KeyboardInterrupt


def end(number: int, frame: FrameType | None) -> None:
    """A handler of signals: exit like `interrupt`, with the code that shells give to the signal."""
    if _is_time(number, frame):
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


def is_in_call(frame: FrameType | None) -> bool:
    """Whether gRPC is between two steps of a call here, other than to wait for the next one.

    What it has noted may not have begun then, or what has begun may not be noted. Its thread waits
    for the former until the channel is closed, and fails by that, with a traceback.
    """
    if frame is None or frame.f_code in (_WAIT, _WAIT_FOR) or frame.f_code.co_name == _BLOCKING:
        return False
    while frame is not None:
        if frame.f_code.co_filename.endswith(_GRPC):
            return True
        frame = frame.f_back
    return False


def is_closing(frame: FrameType | None) -> bool:
    """Whether something is being closed here: an exception would leave the rest of it as it is,
    such as ranks that still run, and threads for which Python waits for ever at its end.
    """
    while frame is not None:
        if frame.f_code.co_name in _CLOSING:
            return True
        frame = frame.f_back
    return False


def _is_time(number: int, frame: FrameType | None) -> bool:
    """Whether to raise now. Else the signal comes once more, unless the process ends already."""
    now = time.monotonic()
    if _ending.since is not None:
        # A launcher passes on what the terminal has sent already, and users press twice.
        if now - _ending.since > _PATIENCE:
            os.write(2, b"plancompiler: ended at once; what it had started ends by itself.\n")
            os._exit(128 + number)
        return False
    # Not by a `threading.Thread`: to start one takes a lock that the main thread may hold here.
    if has_lock_at_risk(frame) or is_in_call(frame):
        _thread.start_new_thread(_send_again, (number,))
        return False
    if is_closing(frame):
        _ending.since = now
        _thread.start_new_thread(_send_when_closed, (number,))
        return False
    if _ending.is_program:
        _ending.since = now
    return True


def _send_again(number: int) -> None:
    time.sleep(_AGAIN_SECONDS)  # nothing tells when the main thread has gone on
    os.kill(os.getpid(), number)


def _send_when_closed(number: int) -> None:
    main = threading.main_thread().ident
    while is_closing(sys._current_frames().get(main or 0)):  # noqa: SLF001  # the only way
        time.sleep(_LOOK_SECONDS)  # nothing tells of the end of a function
    _ending.since = None
    os.kill(os.getpid(), number)
