"""What a launcher is: it starts ranks, forwards signals to them, tells how each ended, ends all."""

from __future__ import annotations

import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

TRACEBACK = "Traceback (most recent call last):"
CONSEQUENCE = "AbortedError"
"""In the traceback of a rank that only ended because another one had failed."""
LINE_CHARACTERS = 1 << 16
"""Longer lines are taken in pieces."""
_MAX_HELD = 1 << 20
"""Characters. A rank that says more after a traceback goes on, and has not failed of it."""
_LAST_LINES, _LAST_CHARACTERS = 20, 2000
"""The most lines that are kept, and the most characters of each."""


@dataclass(frozen=True, slots=True)
class Program:
    """What every rank runs."""

    command: tuple[str, ...]
    """In it, `RANK_WORD` stands for the rank."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set for it besides those of the launcher's own process."""
    secret: str | None = None
    """What ranks find in the file that stands for `SECRET_WORD` in the command."""
    handles_signals: bool = True
    """Whether it gets SIGUSR1. Where not, ranks ignore it, whoever sends it to them."""

    def command_of(self, rank: int) -> list[str]:
        """The words that start one rank, but for the secret's file."""
        return [str(rank) if word == RANK_WORD else word for word in self.command]


RANK_WORD, SECRET_WORD = "{rank}", "{secret file}"


class StartedRank(ABC):
    """One rank, wherever it runs: what it says on standard error, and how it ended.

    Lines are passed on as they come. From a traceback on they are held back, so that the rank whose
    failure came first can be shown first, unless it goes on to say much.
    """

    def __init__(self, rank: int, pass_on: Callable[[str], None]) -> None:
        self.rank = rank
        self.held: list[str] = []
        self.ended = threading.Event()
        self.end_seconds = 0.0
        self.was_asked = False
        """Whether it was still running when all had to end."""
        self.code: int | None = None
        """Its exit code; None while it runs, and of a rank of which nobody knows."""
        self.trouble: str | None = None
        """Why it counts as failed though nobody has seen it end: it is stopped, or silent."""
        self._pass_on = pass_on
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._how = ""
        self._held_characters = 0

    def heard(self, line: str) -> None:
        """Take a line of its standard error."""
        self._last.append(line[:_LAST_CHARACTERS].strip())
        if not (self.held or line.startswith((TRACEBACK, "plancompiler.errors."))):
            self._pass_on(line)
            return
        self.held.append(line)
        self._held_characters += len(line)
        if self._held_characters > _MAX_HELD:
            for each in self.held:
                self._pass_on(each)
            self.held, self._held_characters = [], 0

    def has_ended(self, code: int | None, how: str = "") -> None:
        """Note how it ended; only the first time counts."""
        if not self.ended.is_set():
            self.code, self._how = code, how
            self.end_seconds = time.monotonic()
            self.ended.set()

    @property
    def has_failed(self) -> bool:
        """Whether it has ended, and not well."""
        return self.ended.is_set() and self.code != 0

    @property
    def how(self) -> str:
        """How it ended, for people."""
        if self._how or self.code is None:
            return self._how or "still running"
        return exit_text(self.code)

    @property
    def last_words(self) -> str:
        """The last lines that it said."""
        return " ".join(line for line in self._last if line)

    @property
    def is_consequence(self) -> bool:
        """Whether it failed because another rank had."""
        return any(line.startswith("plancompiler.") and CONSEQUENCE in line for line in self.held)

    @abstractmethod
    def send(self, number: int) -> None:
        """Send a signal to it and all that it started."""


class Launcher(Protocol):
    """Starts ranks on one engine."""

    name: str
    host: str
    """The address of this host by which ranks reach it."""

    def start(
        self, program: Program, ranks: int, say: Callable[[str], None], stop: threading.Event
    ) -> Sequence[StartedRank]:
        """Start all ranks; lines of their standard error go to `say`.

        Raises where the engine cannot start so many. Returns none where it is asked to stop before
        all have come.
        """

    def look(self) -> None:
        """Asked twice a second while ranks run: note `trouble` of those that do not run, and the
        end of those that are lost.
        """

    def close(self, error: str | None = None, *, again: bool = False) -> None:
        """Give everything back that belongs to the run; all ranks have ended, or are ended here.

        `error` is why they have ended, which other hosts are told. With `again` they will be
        started once more.
        """


def exit_text(code: int) -> str:
    """An exit code in words; negative ones are signals, as those of `subprocess` are."""
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"
