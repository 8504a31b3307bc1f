"""The steps that the ranks of a job report, counted: pure. Each comes once, in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from plancompiler.errors import ErrorReport, WireFormatError


@dataclass(slots=True)
class StepCounts:
    """How far each rank that reports outputs has come."""

    _next: dict[int, int] = field(default_factory=dict)
    """Rank -> the step that it must report next."""
    _counted: dict[int, int] = field(default_factory=dict)
    """Rank -> how many steps it has reported of the run at hand."""

    def came(self, rank: int, step: int, asked: int, waiting: Iterable[int]) -> ErrorReport | None:
        """A rank reports a step of a run of `asked` steps; `waiting` are the steps, in order, that
        only others have reported. An error where it is not the next one."""
        expected = self._next.get(rank, next(iter(waiting), step))
        counted = self._counted.get(rank, 0) + 1
        if step != expected or counted > asked:
            return _miscounted(rank, f"step {step}", asked, expected)
        self._next[rank], self._counted[rank] = step + 1, counted
        return None

    @property
    def under_way(self) -> int | None:
        """The step after the latest one that any rank has reported; None before the first one."""
        return max(self._next.values(), default=None)

    def ended(self, rank: int, asked: int) -> ErrorReport | None:
        """A rank says that the run is done. An error where it has not reported all of it."""
        counted = self._counted.pop(rank, 0)
        if counted == asked:
            return None
        return _miscounted(rank, f"{counted} steps", asked, self._next.get(rank))


def _miscounted(rank: int, got: str, asked: int, expected: int | None) -> ErrorReport:
    next_step = "" if expected is None else f", of which step {expected} comes next"
    return WireFormatError(
        "outputs of steps were lost or repeated on their way to the master",
        rank=rank,
        got=got,
        expected=f"{asked} steps, each once and in order{next_step}",
    ).report
