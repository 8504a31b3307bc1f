"""Which job's turn is next: pure.

Jobs are taken by priority and, within one, in the order in which they came. A job that is too large
for the free slots is the head of the queue: smaller ones behind it may pass it, so that slots do
not lie idle, but only for a time; after that slots are kept free until the head fits (the rule is a
bounded form of backfilling as batch schedulers have it).
"""

from __future__ import annotations

from collections.abc import Iterator

from plancompiler.limits.time_limits import PASSING
from plancompiler.master.records import JobRecord


class JobQueue:
    """The jobs that wait."""

    def __init__(self) -> None:
        self._jobs: list[JobRecord] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[JobRecord]:
        return iter(self._jobs)

    @property
    def head(self) -> JobRecord | None:
        """The job that is to be the next, if it fits."""
        return self._jobs[0] if self._jobs else None

    def add(self, job: JobRecord) -> None:
        """Behind all that came before with the same or a higher priority."""
        place = len(self._jobs)
        while place and self._jobs[place - 1].request.priority < job.request.priority:
            place -= 1
        self._jobs.insert(place, job)

    def remove(self, job: JobRecord) -> None:
        """It will not have its turn."""
        self._jobs.remove(job)

    def take(self, free: int, now: float) -> JobRecord | None:
        """The job that takes its slots now, out of so many free ones; None where none may."""
        head = self._jobs[0]
        if head.world_size <= free:
            return self._jobs.pop(0)
        if head.blocked is None:
            head.blocked = now
        if not free or now - head.blocked >= PASSING:
            return None
        for place, job in enumerate(self._jobs):
            if job.world_size <= free:
                return self._jobs.pop(place)
        return None
