"""`CommContextManager`: communicators by their ranks, made when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from plancompiler.errors import AttributeValueError, PlanCompilerError
from plancompiler.executor.comm.context import Board, CommContext, CommRecord


class BoardMaker(Protocol):
    """One rank's way to make boards with others."""

    rank: int

    def board(self, ranks: tuple[int, ...]) -> Board:
        """A board of these ranks, this one among them. All members ask for it."""

    def abort(self, error: PlanCompilerError) -> None:
        """Fail every wait of every rank, now and later."""

    def close(self) -> None:
        """Let go of everything; who still waits for this rank fails."""


class CommContextManager:
    """Communicators of one rank. A group is named by its ranks in order, and made once."""

    def __init__(self, maker: BoardMaker) -> None:
        self.rank = maker.rank
        self.observers: list[Callable[[CommRecord], None]] = []
        """Called with each collective before it runs."""
        self._maker = maker
        self._contexts: dict[tuple[int, ...], CommContext] = {}

    def context(self, ranks: Sequence[int]) -> CommContext:
        """The communicator of these distinct ranks. AttributeValueError unless this rank is one."""
        key = tuple(ranks)
        found = self._contexts.get(key)
        if found is None:
            if self.rank not in key or len(set(key)) != len(key):
                raise AttributeValueError(
                    "a communicator has distinct ranks, this one among them",
                    rank=self.rank,
                    got=str(list(key)),
                )
            found = self._contexts[key] = CommContext(
                self._maker.board(key), self._observe, self._pair
            )
        return found

    def abort(self, error: PlanCompilerError) -> None:
        """Fail every wait of every rank with this cause."""
        self._maker.abort(error)

    def close(self) -> None:
        """Let go of everything."""
        self._contexts.clear()
        self._maker.close()

    def _pair(self, peer: int) -> CommContext:
        first, second = sorted((self.rank, peer))
        return self.context((first, second))

    def _observe(self, record: CommRecord) -> None:
        for observer in self.observers:
            observer(record)
