"""Ctrl-C and SIGTERM for commands that serve until they are told to stop."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from plancompiler.cli.interrupts import end, interrupt


class StopRequest:
    """Set by the first signal; its exit code is the one that shells give to that signal."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.exit_code = 0

    def ask(self, exit_code: int) -> None:
        """Ask to stop; the first reason counts. Handlers of signals may call it."""
        if not self.exit_code:
            self.exit_code = exit_code
            # To set it takes its lock, and a handler runs in a thread that may hold that one: it
            # is the thread that waits for the event.
            _thread.start_new_thread(self.event.set, ())


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Within the block, the first SIGINT or SIGTERM asks for a graceful stop and a second one
    interrupts, or exits. Python lets only the main thread handle signals; elsewhere nothing does.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if request.exit_code:
            (interrupt if number == signal.SIGINT else end)(number, frame)
        request.ask(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_after_saving(tell: Callable[[int], None] = lambda _: None) -> Iterator[StopRequest]:
    """Within the block, the first SIGTERM or SIGUSR1 asks to save and stop, and is what `tell`
    gets; then SIGTERM exits.
    """
    request = StopRequest()

    def stop(number: int, frame: FrameType | None) -> None:
        if not request.exit_code:
            request.ask(128 + number)
            tell(number)
        elif number == signal.SIGTERM:
            end(number, frame)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
