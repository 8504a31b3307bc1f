"""Boards of ranks that are threads of one process: arrays are shown as they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from threading import Lock

from plancompiler.errors import PlanCompilerError
from plancompiler.executor.comm.departures import Departures
from plancompiler.executor.comm.local import Meeting
from plancompiler.executor.comm.mirror import MirrorTransport
from plancompiler.executor.comm.operations import Arrays, Targets
from plancompiler.executor.comm.patience import Work
from plancompiler.limits.time_limits import DEADLINE

COPIED_BYTES = 32 << 10
"""Arrays up to this size are shown as copies, so that nobody waits until they have been read."""


class _Meeting(Meeting):
    """What the members of one group share."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__(ranks)
        self.shown: tuple[list[tuple[str, Arrays]], ...] = (
            [("", ())] * len(ranks),
            [("", ())] * len(ranks),
        )
        """By parity of the count: a member shows anew while others still read what was before."""


class LocalBoards(Departures):
    """Where the ranks of one process meet. Make one per world, and a maker per rank."""

    def __init__(self, deadline: float = DEADLINE) -> None:
        super().__init__()
        self.deadline = deadline
        self.makers: list[LocalBoardMaker] = []
        self._lock = Lock()
        self._clocks: dict[int, int] = {}
        """Rank -> clock of the CPU time that its thread uses."""
        self._meetings: dict[tuple[tuple[int, ...], str], _Meeting] = {}

    def maker(self, rank: int) -> LocalBoardMaker:
        """The boards of one rank; called in its thread."""
        found = LocalBoardMaker(self, rank)
        self.makers.append(found)
        self._clocks[rank] = time.pthread_getcpuclockid(threading.get_ident())
        return found

    def work_of(self, rank: int) -> Work | None:
        """See `Departures.work_of`."""
        clock = self._clocks.get(rank)
        if clock is None:
            return None
        try:
            return Work(time.clock_gettime(clock))
        except OSError:  # the thread has ended
            return None

    def meeting(self, ranks: tuple[int, ...], stream: str) -> _Meeting:
        """What the members of a group share."""
        with self._lock:
            return self._meetings.setdefault((ranks, stream), _Meeting(ranks))

    def wake(self) -> None:
        """Let everyone who waits look again."""
        with self._lock:
            meetings = list(self._meetings.values())
        for meeting in meetings:
            meeting.wake()


class LocalBoardMaker:
    """One rank's boards."""

    def __init__(self, boards: LocalBoards, rank: int) -> None:
        self.rank = rank
        self.deadline = boards.deadline
        self.failed: Callable[[PlanCompilerError], None] = lambda error: None
        self.far: Callable[[str], MirrorTransport] | None = None
        self._boards = boards

    def board(self, ranks: tuple[int, ...], stream: str = "") -> LocalBoard:
        """See `BoardMaker.board`."""
        return LocalBoard(self._boards, ranks, self.rank, stream, self.deadline)

    def abort(self, error: PlanCompilerError) -> None:
        """See `BoardMaker.abort`; the first call counts."""
        boards = self._boards
        if boards.failure is None:
            boards.failure = self.rank, error
        boards.wake()
        for maker in boards.makers:
            maker.failed(error)

    def close(self) -> None:
        """See `BoardMaker.close`."""
        self._boards.gone.add(self.rank)
        self._boards.wake()


class LocalBoard:
    """One member's view of a meeting."""

    def __init__(
        self, boards: LocalBoards, ranks: tuple[int, ...], rank: int, stream: str, deadline: float
    ) -> None:
        self.ranks = ranks
        self.member = ranks.index(rank)
        self.deadline = deadline
        self._boards = boards
        self._meeting = boards.meeting(ranks, stream)
        self._must_leave = False

    def show(
        self, call: str, arrays: Arrays, label: object, targets: Targets = None
    ) -> list[tuple[str, Arrays]]:
        """See `Board.show`."""
        meeting = self._meeting
        if sum(array.nbytes for array in arrays) <= COPIED_BYTES:
            arrays = tuple(array.copy() for array in arrays)
        parity = (meeting.counts[self.member] + 1) % 2
        meeting.shown[parity][self.member] = call, arrays
        self._barrier(label)
        found = list(meeting.shown[parity])
        self._must_leave = any(
            sum(array.nbytes for array in shown) > COPIED_BYTES for _, shown in found
        )
        return found

    def leave(self, label: object) -> None:
        """See `Board.leave`."""
        if self._must_leave:
            self._must_leave = False
            self._barrier(label)

    def _barrier(self, label: object) -> None:
        if self._boards.failure is not None:
            # Others may have given up here: what they showed must not pass for their part.
            raise self._boards.abort_error()
        self._meeting.barrier(self._boards, self.member, label, self.deadline)
