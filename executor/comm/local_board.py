"""Boards of ranks that are threads of one process: arrays are shown as they are."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition, Lock

from plancompiler.errors import PlanCompilerError
from plancompiler.executor.comm.base import aborted_by, left_barrier, missed_barrier
from plancompiler.executor.comm.operations import Arrays, Targets

COPIED_BYTES = 32 << 10
"""Arrays up to this size are shown as copies, so that nobody waits until they have been read."""


class _Meeting:
    """What the members of one group share."""

    def __init__(self, size: int) -> None:
        self.condition = Condition(Lock())
        self.counts = [0] * size
        self.shown: tuple[list[tuple[str, Arrays]], ...] = (
            [("", ())] * size,
            [("", ())] * size,
        )
        """By parity of the count: a member shows anew while others still read what was before."""


class LocalBoards:
    """Where the ranks of one process meet. Make one per world, and a maker per rank."""

    def __init__(self, deadline: float = 300.0) -> None:
        self.deadline = deadline
        self.failure: tuple[int, PlanCompilerError] | None = None
        self.left: set[int] = set()
        self.makers: list[LocalBoardMaker] = []
        self._lock = Lock()
        self._meetings: dict[tuple[tuple[int, ...], str], _Meeting] = {}

    def maker(self, rank: int) -> LocalBoardMaker:
        """The boards of one rank."""
        found = LocalBoardMaker(self, rank)
        self.makers.append(found)
        return found

    def meeting(self, ranks: tuple[int, ...], stream: str) -> _Meeting:
        """What the members of a group share."""
        with self._lock:
            return self._meetings.setdefault((ranks, stream), _Meeting(len(ranks)))

    def wake(self) -> None:
        """Let everyone who waits look again."""
        with self._lock:
            meetings = list(self._meetings.values())
        for meeting in meetings:
            with meeting.condition:
                meeting.condition.notify_all()


class LocalBoardMaker:
    """One rank's boards."""

    def __init__(self, boards: LocalBoards, rank: int) -> None:
        self.rank = rank
        self.deadline = boards.deadline
        self.failed: Callable[[PlanCompilerError], None] = lambda error: None
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
        self._boards.left.add(self.rank)
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
        self, call: str, arrays: Arrays, label: str, targets: Targets = None
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

    def leave(self, label: str) -> None:
        """See `Board.leave`."""
        if self._must_leave:
            self._must_leave = False
            self._barrier(label)

    def _barrier(self, label: str) -> None:
        meeting, boards = self._meeting, self._boards
        counts = meeting.counts
        if boards.failure is not None:
            # Others may have given up here: what they showed must not pass for their part.
            failed, error = boards.failure
            raise aborted_by(failed, error.report)
        with meeting.condition:
            counts[self.member] += 1
            target = counts[self.member]
            if min(counts) >= target:
                meeting.condition.notify_all()
                return

            def missing() -> list[int]:
                return [
                    rank for rank, count in zip(self.ranks, counts, strict=True) if count < target
                ]

            came = meeting.condition.wait_for(
                lambda: (
                    min(counts) >= target
                    or boards.failure is not None
                    or not boards.left.isdisjoint(missing())
                ),
                self.deadline,
            )
            absent = missing()
            if not absent:
                return
        if boards.failure is not None:
            failed, error = boards.failure
            raise aborted_by(failed, error.report)
        if not came:
            raise missed_barrier(label, self.ranks, absent, self.deadline)
        raise left_barrier(label, self.ranks, min(boards.left.intersection(absent)))
