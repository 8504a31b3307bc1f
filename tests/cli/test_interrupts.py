"""Ctrl-C and SIGTERM while the main thread takes and gives back locks."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest

from plancompiler.cli import interrupts
from plancompiler.cli.interrupts import end, interrupt
from plancompiler.cli.signals import stop_on_signals

WAIT = 60
ALARM_NOW = functools.partial(signal.raise_signal, signal.SIGALRM)
"""Calls no Python code, so that a handler runs in the function that calls it."""


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within the block, SIGALRM is handled so."""
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("handler", "raised"), [(interrupt, KeyboardInterrupt), (end, SystemExit)])
def test_what_was_taken_is_given_back(handler: Any, raised: type[BaseException]) -> None:
    """The signal comes when the lock is taken and its `with` has not begun."""
    given_back = []
    lock = SimpleNamespace(acquire=None, release=None, __enter__=ALARM_NOW)
    lock.__exit__ = lambda *_: given_back.append(True)
    condition = threading.Condition(cast("threading.Lock", lock))
    with handled(handler), pytest.raises(raised), condition:
        threading.Event().wait(WAIT)
    assert given_back


@pytest.mark.parametrize("waits", [False, True])
def test_no_moment_leaves_a_lock(waits: bool) -> None:
    seeded = random.Random(5)
    condition = threading.Condition(threading.Lock())
    with handled(interrupt):
        for _ in range(500):
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # it comes at any moment
                signal.setitimer(signal.ITIMER_REAL, seeded.uniform(1e-5, 1e-4))
                while True:
                    with condition:
                        if waits:
                            condition.wait(1e-6)
            assert condition.acquire(blocking=False)
            condition.release()


def test_who_waits_for_a_stop_may_hold_its_lock() -> None:
    """A handler runs in the thread that it interrupts, here while that thread holds the lock."""
    with stop_on_signals() as stop:
        with stop.event._cond:  # type: ignore[attr-defined]
            signal.raise_signal(signal.SIGTERM)
        assert stop.event.wait(WAIT)
        assert stop.exit_code == 128 + signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            signal.raise_signal(signal.SIGTERM)


class Closed:
    """Something whose end is interrupted, several times."""

    def __init__(self) -> None:
        self.is_closed = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes some time after the signals."""
        for _ in range(3):
            signal.raise_signal(signal.SIGALRM)
            threading.Event().wait(0.02)
        self.is_closed = True


@pytest.mark.parametrize(("handler", "raised"), [(interrupt, KeyboardInterrupt), (end, SystemExit)])
def test_what_is_being_closed_is_closed_before(handler: Any, raised: type[BaseException]) -> None:
    closed = Closed()
    with handled(handler), pytest.raises(raised):  # noqa: PT012  # it comes after the first line
        with closed:
            pass
        assert closed.is_closed
        threading.Event().wait(WAIT)
    assert interrupts._ending.since is None


def test_the_program_ends_by_one_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals that come soon after it do nothing, and later ones end the process."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(interrupts, "_ending", interrupts._Ending(is_program=True))
    with handled(interrupt):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGALRM)
        signal.raise_signal(signal.SIGALRM)
        with Closed():
            pass
        assert not codes
        monkeypatch.setattr(interrupts, "_PATIENCE", 0.0)
        signal.raise_signal(signal.SIGALRM)
    assert codes == [128 + signal.SIGALRM]
