"""Calls in threads of their own."""

from __future__ import annotations

import threading

import pytest

from plancompiler.cluster.call_apart import call_apart

WAIT = 60


def test_it_returns_raises_or_is_left() -> None:
    assert call_apart(threading.current_thread) is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        call_apart(lambda: 1 / 0)
    came, never = threading.Event(), threading.Event()
    left = []

    def wait() -> None:
        left.append(threading.current_thread())
        came.set()
        never.wait()

    with pytest.raises(TimeoutError):
        call_apart(wait, 0.01)
    assert came.wait(WAIT)
    never.set()
    left[0].join(WAIT)
    assert not left[0].is_alive()
