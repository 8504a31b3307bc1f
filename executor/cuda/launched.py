"""What communicators have asked of a device and has not ended: a thread looks after it.

NCCL's calls return when they are launched. That one never ends, as a device hangs or a process
died, would be seen by nobody: the host would wait where it next reads a value. Here it is found by
its deadline, and ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from plancompiler.errors import DeadlineError, DeviceError, PlanCompilerError
from plancompiler.executor.comm.flight_recorder import DONE, FAILED, CommRecord, now
from plancompiler.executor.cuda.interface import (
    Device,
    DeviceArray,
    DeviceCommunicator,
    DeviceEvent,
)
from plancompiler.executor.threads import await_threads
from plancompiler.limits.time_limits import THREAD_END

_log = logging.getLogger(__name__)

SHORTEST, LONGEST = 0.001, 0.05
"""Seconds between two looks: they become longer while nothing ends."""


@dataclass(eq=False)
class LaunchedGroup:
    """Operations that one group launches as one."""

    records: Sequence[CommRecord]
    communicator: DeviceCommunicator | None
    """None where a member is alone."""
    deadline: float
    """Seconds that they may take."""
    expired: Callable[[PlanCompilerError], None]
    """Called with the error by which they ended."""
    event: DeviceEvent = None
    """Comes when they have ended; None while the host launches them, where NCCL may hold it."""
    held: Sequence[DeviceArray] = ()
    """Arrays that they use and nobody may free."""
    begin: float = 0.0


class LaunchWatch:
    """Notes when launched operations end; stops those that take too long, or have failed."""

    def __init__(self, device: Device, name: str) -> None:
        self._device = device
        self._name = name
        self._changed = threading.Condition()
        self._pending: list[LaunchedGroup] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, launched: LaunchedGroup) -> None:
        """Look after operations until they end."""
        launched.begin = monotonic()
        with self._changed:
            self._pending.append(launched)
            if self._thread is None:
                # A device whose work never ends must not keep the process from ending.
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drop(self, launched: LaunchedGroup) -> None:
        """Look no more after operations that could not be launched."""
        with self._changed:
            self._pending = [each for each in self._pending if each is not launched]
            self._changed.notify_all()

    def drain(self) -> None:
        """Return when all have ended, one way or the other, or when none of them can any more: the
        thread hangs that would end them."""
        with self._changed:
            latest = max((each.begin + each.deadline for each in self._pending), default=0.0)
            self._changed.wait_for(
                lambda: self._closed or not self._pending,
                max(0.0, latest - monotonic()) + THREAD_END,
            )

    def close(self) -> None:
        """Look no more."""
        with self._changed:
            self._closed = True
            self._pending.clear()
            self._changed.notify_all()
        if self._thread is not None:
            await_threads([self._thread])

    def _serve(self) -> None:
        with suppress(Exception):  # where it is broken, each operation finds that
            self._device.use()
        pause = SHORTEST
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._pending)
                if self._closed:
                    return
                pending = list(self._pending)
            ended = [each for each in pending if self._is_over(each)]
            with self._changed:
                self._pending = [each for each in self._pending if each not in ended]
                self._changed.notify_all()
                pause = SHORTEST if ended else min(2 * pause, LONGEST)
                if self._pending and not self._closed:
                    self._changed.wait(pause)

    def _is_over(self, launched: LaunchedGroup) -> bool:
        """Whether operations have ended; those that must not go on are ended."""
        error: PlanCompilerError | None = None
        event = launched.event
        try:
            if event is not None and self._device.has_come(event):
                for record in launched.records:
                    record.state, record.end = DONE, now()
                return True
            if launched.communicator is not None:
                launched.communicator.check()
            if monotonic() - launched.begin > launched.deadline:
                error = _late(launched)
        except PlanCompilerError as raised:
            error = raised
        except Exception as raised:
            error = _broken(launched, raised)
        if error is None:
            return False
        for record in launched.records:
            record.state, record.end, record.error = FAILED, now(), str(error)
        try:
            launched.expired(error)
        except Exception:  # who waits for what comes later needs this thread
            _log.exception("other ranks could not be told of a failure on a device")
        return True


def _late(launched: LaunchedGroup) -> DeadlineError:
    first = launched.records[0]
    what = "was not launched" if launched.event is None else "did not end on the device"
    error = DeadlineError(
        f"{first} {what} within {launched.deadline:g} s",
        got=f"all ranks {list(first.group)} have met for it; this one waits for NCCL",
        hint="a device hangs, or has much to do before: allow more time with a longer deadline; "
        "NCCL_DEBUG=INFO shows what NCCL waits for",
    )
    return error.at(op=first.op, source=first.source)


def _broken(launched: LaunchedGroup, cause: Exception) -> DeviceError:
    first = launched.records[0]
    error = DeviceError(
        f"the device has failed before {first} ended",
        got=f"{type(cause).__name__}: {cause}",
        hint="an earlier kernel may be the cause: CUDA_LAUNCH_BLOCKING=1 shows which",
    )
    error.__cause__ = cause
    return error.at(op=first.op, source=first.source)
