"""How long a rank waits for others: as long as they work, and a deadline longer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from plancompiler.executor.process_status import process_status, waits_for_disk
from plancompiler.limits import time_limits
from plancompiler.limits.time_limits import BUSY_SHARE

LOOKS = 16
"""How often is looked within a deadline."""
LONGEST_LOOK = time_limits.LONGEST_LOOK
"""Seconds between looks, at most."""


class Progress(NamedTuple):
    """What a rank has done so far, as far as others see it."""

    cpu_seconds: float
    moved: int = 0
    """Grows with what it sends and receives."""
    waits_for_disk: bool = False
    at: float = math.inf
    """When that was so; by default now."""


def work_of_process(pid: int) -> Progress | None:
    """What a process of this host has done so far; None where there is none."""
    status = process_status(pid)
    return None if status is None else Progress(status.cpu_seconds, 0, waits_for_disk(pid))


class Patience:
    """One wait for ranks that may be slow. Made when the wait begins.

    It is over when none of the ranks that are missing has worked for `deadline` seconds. `work_of`
    says what a rank has done so far; None where that cannot be seen, and then the wait is over
    after `unseen` seconds, by default as many. What was seen before the deadline does not end the
    wait: a rank may have begun to work since. Time in which this process itself stood still does
    not count.
    """

    def __init__(
        self,
        deadline: float,
        work_of: Callable[[int], Progress | None],
        clock: Callable[[], float] = time.monotonic,
        unseen: float | None = None,
    ) -> None:
        self.pause = min(deadline / LOOKS, LONGEST_LOOK)
        """Seconds between looks."""
        self.deadline = deadline
        """After so many seconds it is over, once it is."""
        self._seen_deadline = deadline
        self._unseen_deadline = deadline if unseen is None else max(unseen, deadline)
        self._work_of = work_of
        self._clock = clock
        self._looked = clock()
        self._idle = 0.0
        self._late_since: float | None = None
        self._known: dict[int, tuple[Progress, float]] = {}
        """By rank: its work, and when that was so, at the last look."""

    def is_over(self, missing: Iterable[int]) -> bool:
        """Look at the ranks that are missing."""
        now = self._clock()
        passed = now - self._looked
        if passed < self.pause / 2:  # too short a time to tell work from waiting
            return False
        self._looked = now
        works = {rank: self._work_of(rank) for rank in missing}
        busy = [
            self._has_worked(rank, work, now) for rank, work in works.items() if work is not None
        ]
        self._idle = 0.0 if any(busy) else self._idle + min(passed, 2 * self.pause)
        if self._idle < self._seen_deadline:
            self._late_since = None
            return False
        late_since = self._late_since = now if self._late_since is None else self._late_since
        self.deadline = self._seen_deadline
        if all(work is not None and work.at >= late_since for work in works.values()):
            return True
        self.deadline = self._unseen_deadline
        return self._idle >= self._unseen_deadline

    def _has_worked(self, rank: int, work: Progress, now: float) -> bool:
        at = min(work.at, now)
        before, since = self._known.get(rank, (work, at))
        self._known[rank] = work, at
        used = work.cpu_seconds - before.cpu_seconds
        return (
            work.waits_for_disk
            or work.moved != before.moved
            or (at > since and used >= BUSY_SHARE * (at - since))
        )
