"""A stream at work: drives its actor, launches tasks in order, and carries notices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty
from typing import Protocol

import numpy as np

from plancompiler.executor.actor import ARRIVED, AT_LIMIT, Notice, StreamActor
from plancompiler.executor.comm.link import Group
from plancompiler.executor.stream_status import State, StreamStatus
from plancompiler.executor.task import Run
from plancompiler.executor.token_queue import TokenQueue
from plancompiler.executor.watchdog import Sight
from plancompiler.ir import UNKNOWN_SOURCE
from plancompiler.ir.task import TaskKind, format_id, unpack_id
from plancompiler.plan.plan import CollectiveSpec, Stream, Task

WAKE = -1
"""Put into a stream's queue to make it look whether the run is over."""
RUN = -2
"""Put into an idle stream's queue to make it go on to its new limit, and report once."""
SIGNAL_CHECK = 0.5
"""Seconds after which who waits looks for Ctrl-C: a signal that comes just before a thread blocks
does not wake it."""
READ_AHEAD = 1
"""Steps past its limit that a stream of data may read while it waits to be told to go on."""


class StreamOwner(Protocol):
    """Who a stream reports to. Called from the stream's thread."""

    def stream_failed(self, error: BaseException, task: Task | None, step_position: str) -> None:
        """The stream stopped for good, at `task` and `step_position` (see `StreamActor`)."""

    def stream_reached_limit(self) -> None:
        """The stream has done all steps it may."""


class StreamRunner:
    """Runs one stream, in a thread of its own (`start`) or in the caller's (`run_here`).

    A stream of data in its own thread goes on past the limit while slots are free: it reads what
    the next step needs while others still compute, however few steps are asked for at a time. What
    is read follows from the step's number alone, so nothing is lost if that step never comes. A
    failure there is kept until the step is asked for. `notify` tells another rank.
    """

    def __init__(
        self,
        actor: StreamActor,
        tasks: Sequence[Task],
        runs: Sequence[Run | None],
        queues: Sequence[TokenQueue],
        index: int,
        notify: Callable[[Notice], None],
        owner: StreamOwner,
        reads_ahead: bool = True,
    ) -> None:
        self.actor = actor
        self._tasks = tuple(tasks)
        self._runs = list(runs)
        self._queues = tuple(queues)
        self._queue = queues[index]
        self._notify = notify
        self._owner = owner
        self._closing = False
        self._blocked = False
        """Whether the head task lacks tokens."""
        self._thread: threading.Thread | None = None
        self._clocked = 0
        self._clock: int | None = None
        """Reads the CPU time of the thread `_clocked`, which runs the stream."""
        self._reads_ahead = reads_ahead and actor.stream is Stream.DATA
        self._told = False
        """Whether it was told to go on while it read ahead."""
        self._kept: BaseException | None = None
        """What reading ahead failed with."""

    def start(self, name: str) -> None:
        """Run in a thread from now on, as far as the limit allows."""
        # A daemon: a task that never ends must not keep the process from ending.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """The limit was raised; the stream reports to its owner when it gets there or fails."""
        self._queue.put(RUN)

    def close(self, seconds: float) -> None:
        """End the thread, if there is one, and wait for it; no longer than it may take."""
        self._closing = True
        self._queue.put(WAKE)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)
        self._kept = None  # its traceback holds this stream

    def run_here(self) -> None:
        """Run up to the limit in the caller's thread; raises what a task raises."""
        self._keep_clock()
        with np.errstate(all="ignore"):
            self._advance()

    def exchange(self, position: int, run: Run | None) -> None:
        """Let a task do its work by another callable, between runs."""
        self._runs[position] = run

    def current_task(self) -> Task:
        """The head task."""
        return self._tasks[self.actor.position]

    def _keep_clock(self) -> None:
        """Let others read the CPU time of this thread; the clock's number stays good when the
        thread has ended.
        """
        thread = threading.get_ident()
        if thread != self._clocked:
            self._clocked, self._clock = thread, time.pthread_getcpuclockid(thread)

    def _serve(self) -> None:
        self._keep_clock()
        # Overflow and NaN are for outputs to report, not for warnings in the middle of a step.
        try:
            with np.errstate(all="ignore"):
                while self._next_run():
                    if self._kept is not None:
                        raise self._kept
                    self._advance()
                    self._owner.stream_reached_limit()
                    if self._reads_ahead:
                        self._read_ahead()
        except BaseException as error:
            self._owner.stream_failed(error, self.current_task(), self.actor.step_position)

    def _next_run(self) -> bool:
        """Wait to be told to go on; False to end. Takes what arrives from ranks that are ahead."""
        if self._told:
            self._told = False
            return not self._closing
        while not self._closing:
            token = self._queue.get()
            if token == RUN:
                return True
            if token >= 0:
                self.actor.deliver(token)
        return False

    def _read_ahead(self) -> None:
        """Run tasks past the limit until there is no room, or the stream is told to go on."""
        actor = self.actor
        while not (self._told or self._closing):
            # Whoever feeds an input does so for the steps that are asked for.
            if self._tasks[actor.position].kind is TaskKind.INPUT:
                return
            position = actor.begin(READ_AHEAD)
            if position >= 0:
                try:
                    run = self._runs[position]
                    if run is not None:
                        run(actor.version)
                except Exception as error:
                    self._kept = error
                    return
                for notice in actor.finish():
                    self._carry(notice)
            elif position == AT_LIMIT:
                return
            self._hear(wait=position < 0)

    def _hear(self, *, wait: bool) -> None:
        """Take what has come, or wait for something; there is no hurry, so no deadline."""
        try:
            token = self._queue.get(wait)
        except Empty:
            return
        if token == RUN:
            self._told = True
        elif token >= 0:
            self.actor.deliver(token)

    def _advance(self) -> None:
        """Run tasks until the limit is reached."""
        actor, runs, queue = self.actor, self._runs, self._queue
        if actor.alone:
            self._advance_alone()
            return
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

    def _advance_alone(self) -> None:
        """The same for a stream that neither waits nor is waited for."""
        actor, runs = self.actor, self._runs
        while (step := actor.step) < actor.limit:
            version = actor.version
            for position in range(actor.position, len(runs)):  # it may have read ahead
                run = runs[position]
                if run is not None:
                    actor.position = position
                    if step >= actor.limit:
                        return
                    run(version)
            actor.next_turn()

    def _carry(self, notice: Notice) -> None:
        if notice.stream >= 0:
            self._queues[notice.stream].put(notice.token)
        else:
            self._notify(notice)

    def _wait(self) -> int:
        """The next token. If it never comes, the rank's watchdog or its user ends the run."""
        self._blocked = True
        try:
            while True:
                try:
                    return self._queue.get(timeout=SIGNAL_CHECK)
                except Empty:
                    continue
        finally:
            self._blocked = False

    def sight(self, groups: Mapping[int, Group]) -> Sight:
        """Where the stream stands; from any thread. `groups` are those of collective tasks."""
        actor = self.actor
        task = self._tasks[actor.position]
        state, waits, ranks = self._state(task, groups)
        return Sight(
            (actor.limit, actor.step, actor.microbatch, actor.position),
            StreamStatus(
                str(actor.stream),
                state,
                0.0,
                task.name,
                None if task.source == UNKNOWN_SOURCE else str(task.source),
                unpack_id(task.id).family,
                actor.step_position,
                waits,
                tuple(sorted(ranks)),
            ),
            self._cpu_seconds(),
        )

    def _cpu_seconds(self) -> float | None:
        """What the thread that runs the stream has used of its processor."""
        if self._clock is None:
            return None
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # the thread has ended
            return None

    def _state(self, task: Task, groups: Mapping[int, Group]) -> tuple[State, str, set[int]]:
        actor = self.actor
        if actor.step >= actor.limit:
            return State.IDLE, "", set()
        if not self._blocked:
            group = groups.get(task.id)
            missing = [] if group is None else group.missing()
            if not missing:
                return State.RUNNING, "", set()
            spec = task.spec
            where = (
                str(spec.primitive) if isinstance(spec, CollectiveSpec) else f"ring of {task.name}"
            )
            return State.WAITING, f"to come to the {where}", set(missing)
        tokens = actor.waiting_for()
        ranks = {token.rank for token in tokens if token.rank >= 0}
        waits = ", ".join(
            f"register {token.name!r} ({format_id(token.register)}) to "
            f"{'arrive' if token.kind == ARRIVED else 'come back'}"
            for token in tokens
            if token.rank >= 0 or not ranks
        )
        return State.WAITING if ranks else State.LOCAL, waits, ranks
