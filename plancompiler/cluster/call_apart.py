"""Calls in a thread of their own, which Ctrl-C does not reach."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NoReturn, TypeVar

Value = TypeVar("Value")


def call_apart(function: Callable[[], Value], seconds: float | None = None) -> Value:
    """What a function returns, or raises, in a thread of its own; TimeoutError where it takes more
    than so many seconds: it goes on then, and nobody hears of it.

    Python raises KeyboardInterrupt wherever the main thread is. A library that is left in the
    middle may print a traceback, or keep a lock for good; the wait here can be left at any time.
    """
    answers: SimpleQueue[Callable[[], Value]] = SimpleQueue()

    def run() -> None:
        try:
            value = function()
        except BaseException as error:
            raised = error
            answers.put(lambda: _raise(raised))
        else:
            answers.put(lambda: value)

    thread = threading.Thread(target=run, name="apart", daemon=True)
    thread.start()
    try:
        answer = answers.get(timeout=seconds)
    except Empty:
        raise TimeoutError from None
    thread.join()
    return answer()


def _raise(error: BaseException) -> NoReturn:
    raise error
