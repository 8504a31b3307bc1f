"""A stream at work: drives its actor, launches tasks in order, and carries notices."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np

from plancompiler.errors import DeadlineError
from plancompiler.executor.actor import ARRIVED, AT_LIMIT, Notice, StreamActor
from plancompiler.executor.task import Run
from plancompiler.ir.task import format_id
from plancompiler.plan.plan import Task

WAKE = -1
"""Put into a stream's queue to make it look whether the run is over."""
RUN = -2
"""Put into an idle stream's queue to make it go on to its new limit, and report once."""


class Notifier(Protocol):
    """Who carries notices to other ranks: a transport."""

    def notify(self, notice: Notice) -> None:
        """Send a notice to `notice.rank`."""


class Owner(Protocol):
    """Who a stream reports to. Called from the stream's thread."""

    def stream_failed(self, error: BaseException, task: Task | None, moment: str) -> None:
        """The stream stopped for good; `task` is where, `moment` when (see `StreamActor`)."""

    def stream_reached_limit(self) -> None:
        """The stream has done all steps it may."""

    def progress(self) -> tuple[int, ...]:
        """Where the rank stands; changes whenever any of its streams acts."""


class StreamRunner:
    """Runs one stream, in a thread of its own (`start`) or in the caller's (`run_here`)."""

    def __init__(
        self,
        actor: StreamActor,
        tasks: Sequence[Task],
        runs: Sequence[Run | None],
        queues: Sequence[SimpleQueue[int]],
        index: int,
        transport: Notifier,
        owner: Owner,
        deadline: float,
    ) -> None:
        self.actor = actor
        self._tasks = tuple(tasks)
        self._runs = tuple(runs)
        self._queues = tuple(queues)
        self._queue = queues[index]
        self._transport = transport
        self._owner = owner
        self._deadline = deadline
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self, name: str) -> None:
        """Run in a thread from now on, as far as the limit allows."""
        self._thread = threading.Thread(target=self._serve, name=name)
        self._thread.start()

    def go_on(self) -> None:
        """The limit was raised; the stream reports to its owner when it gets there or fails."""
        self._queue.put(RUN)

    def close(self) -> None:
        """End the thread, if there is one, and wait for it."""
        self._closing = True
        self._queue.put(WAKE)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def run_here(self) -> None:
        """Run up to the limit in the caller's thread; raises what a task raises."""
        with np.errstate(all="ignore"):
            self._advance()

    def current_task(self) -> Task:
        """The head task."""
        return self._tasks[self.actor.position]

    def _serve(self) -> None:
        # Overflow and NaN are for outputs to report, not for warnings in the middle of a step.
        try:
            with np.errstate(all="ignore"):
                while self._next_run():
                    self._advance()
                    self._owner.stream_reached_limit()
        except BaseException as error:
            self._owner.stream_failed(error, self.current_task(), self.actor.moment)

    def _next_run(self) -> bool:
        """Wait to be told to go on; False to end. Takes what arrives from ranks that are ahead."""
        while not self._closing:
            token = self._queue.get()
            if token == RUN:
                return True
            if token >= 0:
                self.actor.deliver(token)
        return False

    def _advance(self) -> None:
        """Run tasks until the limit is reached."""
        actor, runs, queue = self.actor, self._runs, self._queue
        begin, finish, deliver = actor.begin, actor.finish, actor.deliver
        while True:
            position = begin()
            while position >= 0:
                run = runs[position]
                if run is not None:
                    run(actor.version)
                for notice in finish():
                    self._carry(notice)
                position = begin()
            if position == AT_LIMIT:
                return
            try:
                token = queue.get_nowait()
            except Empty:
                token = self._wait()
            if token >= 0:
                deliver(token)

    def _carry(self, notice: Notice) -> None:
        if notice.stream >= 0:
            self._queues[notice.stream].put(notice.token)
        else:
            self._transport.notify(notice)

    def _wait(self) -> int:
        """The next token. The deadline counts from what any stream of the rank did last."""
        progress = self._owner.progress()
        while True:
            try:
                return self._queue.get(timeout=self._deadline)
            except Empty:
                now = self._owner.progress()
                if now == progress:
                    raise self._stalled() from None
                progress = now

    def _stalled(self) -> DeadlineError:
        waiting = "; ".join(
            f"register {token.name!r} ({format_id(token.register)}) to "
            f"{'arrive' if token.kind == ARRIVED else 'come back'} from {token.peer}"
            for token in self.actor.waiting_for()
        )
        return DeadlineError(
            f"nothing happened for {self._deadline:g} s",
            got=f"stream {self.actor.stream}, {self.actor.moment}, waits for {waiting}",
            hint="look at what the other side was doing, or allow more time with a longer deadline",
        )
