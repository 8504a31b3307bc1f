"""Threads for what would hold up the event loop, a bounded number of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class WorkThreads:
    """Runs functions in at most `limit` threads at a time; the others wait in turn.

    The threads are daemons, unlike those of an executor: some work cannot be interrupted, and a
    process that ends must not wait for it.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._places = asyncio.Semaphore(limit)
        self._running: set[asyncio.Future[Any]] = set()
        self._threads: list[threading.Thread] = []

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The function's result, or what it raises. Cancelling leaves it running, in its place."""
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[R] = loop.create_future()
        self._running.add(done)
        done.add_done_callback(self._left)

        def finish(result: R | None, error: BaseException | None) -> None:
            if error is None:
                done.set_result(result)  # type: ignore[arg-type]  # there is one without an error
            else:
                done.set_exception(error)

        def work() -> None:
            result, failure = None, None
            try:
                result = function(*args, **kwargs)
            except BaseException as error:  # whoever awaits the result is told
                failure = error
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(finish, result, failure)

        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(threading.Thread(target=work, name=self._name, daemon=True))
        self._threads[-1].start()
        return await asyncio.shield(done)

    def _left(self, done: asyncio.Future[Any]) -> None:
        self._running.discard(done)
        self._places.release()
        if not done.cancelled():
            done.exception()  # also where nobody waits for it any longer

    async def finish(self, seconds: float) -> None:
        """Wait for what runs, at most so long."""
        until = time.monotonic() + seconds
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)
        for thread in self._threads:  # those whose result came have only their last lines to run
            thread.join(max(0.0, until - time.monotonic()))
