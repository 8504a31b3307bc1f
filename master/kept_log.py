"""What the ranks of one job printed, as far as the master keeps it.

Each rank has its share of the bytes, so that one that prints without end takes nothing of what the
others said. Where a rank says more, its oldest lines go; readers are told how many they miss. It
belongs to the thread of the master's event loop.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from plancompiler.cluster.messages import LogLines, RankLine
from plancompiler.master.changes import Changes

JOB_BYTES = 4 << 20
"""Of one job's lines; more where it has so many ranks that their least shares come to more."""
_LEAST_SHARE = 16 << 10
_LINE_BYTES = 256
"""What a line takes beside its text."""
_BATCH_BYTES = 256 << 10
"""Of lines that a reader takes at once."""


@dataclass(slots=True)
class _RankLog:
    """The lines of one rank, with their numbers among all that it printed."""

    lines: deque[tuple[int, int, RankLine]] = field(default_factory=deque)
    """Number among those of the rank, number among those of the job, line."""
    held: int = 0
    next_number: int = 0

    def after(self, number: int) -> list[tuple[int, int, RankLine]]:
        """The lines from a number on, the last one first: without a look at those before."""
        return list(takewhile(lambda entry: entry[0] >= number, reversed(self.lines)))


class KeptLog:
    """The lines of all ranks."""

    def __init__(self, world_size: int, limit: int = JOB_BYTES) -> None:
        self._share = max(limit // world_size, _LEAST_SHARE)
        self._ranks: dict[int, _RankLog] = {}
        self._arrived = 0
        self._changes = Changes()
        self._is_closed = False

    @property
    def held_bytes(self) -> int:
        """Of all lines."""
        return sum(each.held for each in self._ranks.values())

    @property
    def latest_errors(self) -> list[RankLine]:
        """The last line that each rank wrote to standard error, as far as it is kept."""
        lines = []
        for _, log in sorted(self._ranks.items()):
            last = next((line for *_, line in reversed(log.lines) if line.stream == "stderr"), None)
            if last is not None:
                lines.append(last)
        return lines

    def next_number(self, rank: int) -> int:
        """How many lines a rank has printed so far."""
        return self._ranks[rank].next_number if rank in self._ranks else 0

    def first_number(self, rank: int) -> int:
        """The number of the first line of a rank that is kept."""
        log = self._ranks.get(rank)
        return log.lines[0][0] if log is not None and log.lines else self.next_number(rank)

    def restore(self, rank: int, first: int, message: LogLines) -> None:
        """Lines of a rank that an earlier master kept, the first of them with this number."""
        self._ranks.setdefault(rank, _RankLog()).next_number = first
        self.add(rank, message)

    def add(self, rank: int, message: LogLines) -> None:
        """Lines of a rank."""
        log = self._ranks.setdefault(rank, _RankLog())
        log.next_number += message.dropped
        for line in message.lines:
            kept = RankLine(rank, line.time, line.stream, line.text)
            log.lines.append((log.next_number, self._arrived, kept))
            log.held += _size(kept)
            log.next_number += 1
            self._arrived += 1
        while log.held > self._share:
            log.held -= _size(log.lines.popleft()[-1])
        self._changes.tell()

    def forget(self) -> list[tuple[int, int]]:
        """Keep no line, only how many there were: these, by rank."""
        for log in self._ranks.values():
            log.lines.clear()
            log.held = 0
        return [(rank, log.next_number) for rank, log in self._ranks.items()]

    def close(self) -> None:
        """The job's ranks have let go of it: no more lines are waited for."""
        self._is_closed = True
        self._changes.tell()

    async def read(self, rank: int | None, follow: bool) -> AsyncIterator[list[RankLine]]:
        """The lines of a rank, or of all, in batches: those that there are now or, to follow them,
        until all ranks have let go of the job.
        """
        told: dict[int, int] = {}
        while True:
            is_closed = self._is_closed
            for batch in _batches(self._unread(rank, told)):
                yield batch
            if not follow or is_closed:
                return
            if self._is_read(rank, told) and not self._is_closed:
                await self._changes.wait()

    def _is_read(self, rank: int | None, told: dict[int, int]) -> bool:
        return all(
            told.get(each, 0) >= log.next_number
            for each, log in self._ranks.items()
            if rank in (None, each)
        )

    def _unread(self, rank: int | None, told: dict[int, int]) -> list[RankLine]:
        """What a reader has not been told, which it is now, with a line wherever some are gone."""
        unread: list[list[tuple[int, RankLine]]] = []
        for each, log in sorted(self._ranks.items()):
            if rank not in (None, each):
                continue
            next_number = told.get(each, 0)
            told[each] = log.next_number
            shown: list[tuple[int, RankLine]] = []
            for number, order, line in reversed(log.after(next_number)):
                if number > next_number:
                    shown.append((order, _gap(each, line.time, number - next_number)))
                shown.append((order, line))
                next_number = number + 1
            if log.next_number > next_number:  # all that came since is gone
                shown.append((self._arrived, _gap(each, 0.0, log.next_number - next_number)))
            unread.append(shown)
        return [line for _, line in heapq.merge(*unread, key=lambda entry: entry[0])]


def _gap(rank: int, time: float, dropped: int) -> RankLine:
    return RankLine(rank, time, "", "", dropped)


def _batches(lines: list[RankLine]) -> Iterator[list[RankLine]]:
    batch: list[RankLine] = []
    size = 0
    for line in lines:
        batch.append(line)
        size += _size(line)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _size(line: RankLine) -> int:
    return len(line.text) + _LINE_BYTES
