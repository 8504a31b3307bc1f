"""How long a rank waits for others: as long as they work, and a deadline longer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from plancompiler.limits import time_limits
from plancompiler.limits.time_limits import BUSY_SHARE

LOOKS = 16
"""How often is looked within a deadline."""
LONGEST_LOOK = time_limits.LONGEST_LOOK
"""Seconds between looks, at most."""


class Patience:
    """One wait for ranks that may be slow. Made when the wait begins.

    It is over when none of the ranks that are missing has used its processor for `deadline`
    seconds. `cpu_seconds` says how much a rank has used so far; None where that cannot be seen, and
    then it counts as none. Time in which this process itself stood still does not count.
    """

    def __init__(
        self,
        deadline: float,
        cpu_seconds: Callable[[int], float | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pause = min(deadline / LOOKS, LONGEST_LOOK)
        """Seconds between looks."""
        self._deadline = deadline
        self._cpu_seconds = cpu_seconds
        self._clock = clock
        self._looked = clock()
        self._idle = 0.0
        self._used: dict[int, float | None] = {}

    def is_over(self, missing: Iterable[int]) -> bool:
        """Look at the ranks that are missing."""
        now = self._clock()
        passed = now - self._looked
        if passed < self.pause / 2:  # too short a time to tell work from waiting
            return self._idle >= self._deadline
        self._looked = now
        busy = False
        for rank in missing:
            used = self._cpu_seconds(rank)
            before = self._used.get(rank)
            self._used[rank] = used
            if used is not None and before is not None:
                busy |= used - before >= BUSY_SHARE * passed
        self._idle = 0.0 if busy else self._idle + min(passed, 2 * self.pause)
        return self._idle >= self._deadline
