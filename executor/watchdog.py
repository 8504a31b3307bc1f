"""The watchdog of a rank: it notices that others keep the rank waiting, and finds out who.

It looks at the rank's streams from time to time. Where one has waited for other ranks for as long
as the deadline, it asks them where they stand (`stream_status`), and they ask on; what comes back
decides. A rank that gets on or uses its processor, however slowly, is waited for. Time in which
this process itself did not run does not count. A peer of this host whose process is stopped by a
signal is named at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import NamedTuple

from plancompiler.errors import DeadlineError, WireFormatError
from plancompiler.executor.comm.patience import LONGEST_LOOK, LOOKS
from plancompiler.executor.comm.peer_failures import stopped_rank
from plancompiler.executor.process_status import StoppedProcesses, process_status
from plancompiler.executor.stream_status import (
    Answer,
    Question,
    RankStatus,
    State,
    StreamStatus,
    awaited,
    judge,
    unpack_note,
)
from plancompiler.limits import time_limits
from plancompiler.limits.time_limits import BUSY_SHARE

SHORTEST_ANSWER, LONGEST_ANSWER = time_limits.SHORTEST_ANSWER, time_limits.LONGEST_ANSWER
"""Seconds that a rank has for its answer: a quarter of the deadline, within these."""


class Sight(NamedTuple):
    """A stream as the watchdog sees it."""

    progress: tuple[int, ...]
    """Changes whenever the stream gets on, or is told to."""
    status: StreamStatus
    """Without the time."""
    cpu_seconds: float | None = None
    """CPU time that its thread has used; None where that is not known."""


class Watchdog:
    """Watches one rank, in a thread of its own, from `start` to `close`.

    `look` gives the rank's streams, always in the same order; `send(rank, note)` brings a note to
    a peer's `note`; `fail` is told who is to blame. All three are called from the thread.
    """

    def __init__(
        self,
        rank: int,
        deadline: float,
        look: Callable[[], Sequence[Sight]],
        send: Callable[[int, bytes], None],
        fail: Callable[[DeadlineError], None],
        process_of: Callable[[int], int | None] = lambda rank: None,
    ) -> None:
        self._rank = rank
        self._deadline = deadline
        self._look = look
        self._send = send
        self._fail = fail
        self._process_of = process_of
        self._stopped = StoppedProcesses()
        self._used: dict[int, float] = {}
        """CPU time of silent ranks at the last look, by rank."""
        self._notes: SimpleQueue[tuple[int, bytes] | None] = SimpleQueue()
        self._pause = min(deadline / LOOKS, LONGEST_LOOK)
        self._answer_seconds = min(max(deadline / 4, SHORTEST_ANSWER), LONGEST_ANSWER)
        self._now = 0.0
        """Seconds that this process ran since the start."""
        self._seen: list[tuple[tuple[int, ...], float, float]] = []
        """By stream: its progress, since when, and the CPU time used until then."""
        self._heard: dict[int, int] = {}
        """By origin: the number of its last question."""
        self._number = 0
        self._asked: float | None = None
        self._again = 0.0
        self._statuses: dict[int, RankStatus] = {}
        self._thread = threading.Thread(
            target=self._watch, name=f"plancompiler-watchdog-{rank}", daemon=True
        )

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def note(self, sender: int, note: bytes) -> None:
        """A peer asks or answers; from any thread."""
        self._notes.put((sender, note))

    def close(self) -> None:
        """Stop watching. Safe to call again, and from the thread itself."""
        self._notes.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    # --- the thread -------------------------------------------------------------------------------

    def _watch(self) -> None:
        before = time.monotonic()
        due = 0.0
        while True:
            try:
                item = self._notes.get(timeout=max(due - self._now, 0.0))
                if item is None:
                    return
            except Empty:
                item = None
            now = time.monotonic()
            # Stopped or starved, it must not take its own pause for that of others.
            self._now += min(now - before, 2 * self._pause)
            before = now
            own = self._own_status()
            if item is not None:
                self._hear(*item, own)
            if self._check(own):
                return
            if self._now >= due:
                due = self._now + self._pause

    def _own_status(self) -> RankStatus:
        """Where the rank stands now."""
        sights = self._look()
        if len(self._seen) != len(sights):
            self._seen = [(each.progress, self._now, each.cpu_seconds or 0.0) for each in sights]
        statuses = []
        for index, (progress, status, used) in enumerate(sights):
            known, since, before = self._seen[index]
            worked = (
                status.state is State.RUNNING
                and used is not None
                and used - before > BUSY_SHARE * (self._now - since)
            )
            if known != progress or worked:
                since = self._now
                self._seen[index] = progress, since, used or 0.0
            statuses.append(replace(status, seconds=self._now - since))
        return tuple(statuses)

    def _hear(self, sender: int, note: bytes, own: RankStatus) -> None:
        try:
            said = unpack_note(note)
        except WireFormatError:
            return  # a rank that says nothing sensible counts as one that does not answer
        if isinstance(said, Answer):
            if said.back:
                back = said.back
                self._send(back[-1], replace(said, back=back[:-1]).packed())
            elif said.origin == self._rank and said.number == self._number:
                self._statuses.setdefault(said.rank, said.status)
            return
        if said.origin == self._rank or self._heard.get(said.origin, 0) >= said.number:
            return
        self._heard[said.origin] = said.number
        answer = Answer(said.origin, said.number, said.path[:-1], self._rank, own)
        self._send(sender, answer.packed())
        onward = replace(said, path=(*said.path, self._rank))
        for rank in awaited(own):
            if rank not in said.path:
                self._send(rank, onward.packed())

    def _check(self, own: RankStatus) -> bool:
        """Ask, or judge what was answered; True where the watch is over."""
        processes = {
            process: rank
            for rank in awaited(own)
            if (process := self._process_of(rank)) is not None
        }
        status = self._stopped.look(processes)
        if status is not None:
            waiting = next(each for each in own if processes[status.pid] in each.ranks)
            error = stopped_rank(f"{waiting.op!r} waits", processes[status.pid], status)
            self._fail(error.at(op=waiting.op, source=waiting.source))
            return True
        late = awaited(own, self._deadline)
        if not late:
            self._asked = None
            self._again = 0.0
            return False
        if self._asked is None:
            if self._now >= self._again:
                self._ask(own)
            return False
        waited = self._now - self._asked
        self._statuses[self._rank] = own
        if waited < self._answer_seconds and not self._all_known():
            return False
        if self._silent_work():
            self._asked = None
            self._again = self._now + self._answer_seconds
            return False
        verdict = judge(self._rank, self._statuses, self._deadline, waited, 2 * self._pause)
        self._asked = None
        if verdict.error is not None:
            self._fail(verdict.error)
            return True
        self._again = self._now + verdict.again
        return False

    def _ask(self, own: RankStatus) -> None:
        self._number += 1
        self._asked = self._now
        self._used = {
            rank: status.cpu_seconds
            for rank in awaited(own)
            if (process := self._process_of(rank)) is not None
            and (status := process_status(process)) is not None
        }
        self._statuses = {self._rank: own}
        question = Question(self._rank, self._number, (self._rank,)).packed()
        for rank in awaited(own):
            self._send(rank, question)

    def _silent_work(self) -> bool:
        """Whether a rank that does not answer uses its processor: something holds its
        interpreter."""
        worked = False
        for rank in awaited(tuple(each for one in self._statuses.values() for each in one)):
            process = None if rank in self._statuses else self._process_of(rank)
            status = None if process is None else process_status(process)
            if status is not None:
                before = self._used.get(rank, status.cpu_seconds)
                worked |= status.cpu_seconds - before > BUSY_SHARE * self._answer_seconds
        return worked

    def _all_known(self) -> bool:
        """Whether all that are waited for, directly or not, have answered."""
        return all(
            rank in self._statuses for status in self._statuses.values() for rank in awaited(status)
        )
