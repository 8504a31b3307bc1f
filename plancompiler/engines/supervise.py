"""Watching over started ranks: until all have ended, one has failed, or somebody asks to stop."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from plancompiler.engines.launcher import Launcher, Program, StartedRank
from plancompiler.errors import ExecutionError
from plancompiler.executor.process_status import CONTINUE_HINT
from plancompiler.limits import time_limits

GRACE_SECONDS = time_limits.GRACE
"""How long the other ranks may take to see a failure by themselves, and to end after SIGTERM."""
_LOOK_SECONDS = 0.5
"""Between two looks at whether ranks run."""
_WAIT_SECONDS = 0.05


class Signals:
    """What whoever started the launcher asks of it."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.forwarded: deque[int] = deque()
        """Signals that the ranks shall get, and that are not for the launcher itself."""


@contextmanager
def forwarding(signals: Signals, number: int = signal.SIGUSR1) -> Iterator[None]:
    """Within the block this process passes a signal on to its ranks."""

    def forward(received: int, _frame: FrameType | None) -> None:
        signals.forwarded.append(received)

    before = signal.signal(number, forward)
    try:
        yield
    finally:
        signal.signal(number, before)


def end_ranks(started: Sequence[StartedRank], grace: float) -> None:
    """End ranks and what they started, at the same time, so that many take no longer. `grace`
    seconds are between SIGTERM and SIGKILL; for what is left their launcher is closed.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = [each for each in started if not each.ended.is_set()]
        for each in running:
            each.was_asked = True
            each.send(number)
        until = time.monotonic() + grace
        for each in running:
            each.ended.wait(max(0.0, until - time.monotonic()))


class Attempt:
    """One start of a program's ranks, from the first to the last."""

    def __init__(
        self, launcher: Launcher, program: Program, ranks: int, say: Callable[[str], None]
    ) -> None:
        self._launcher = launcher
        self._program = program
        self._ranks = ranks
        self._say = say
        self.started: Sequence[StartedRank] = ()

    def run(self, signals: Signals, *, may_restart: bool = False) -> bool:
        """Start all ranks, and return when none is left; whether they shall be started again."""
        raised: BaseException | None = None
        try:
            self.started = self._launcher.start(self._program, self._ranks, self._say, signals.stop)
            self._wait(signals)
        except BaseException as error:
            raised = error
            raise
        finally:
            again = self.close(raised, may_restart=may_restart and not signals.stop.is_set())
        return again

    def close(self, raised: BaseException | None, *, may_restart: bool) -> bool:
        """End all ranks, after what was raised; whether they shall be started again."""
        again, why = False, None if raised is None else _reason(raised)
        try:
            end_ranks(self.started, GRACE_SECONDS)
            failure = self.error()
            again = may_restart and raised is None and failure is not None
            if raised is None and failure is not None:
                why = _reason(failure)
        finally:
            self._launcher.close(why, again=again)
        return again

    def _wait(self, signals: Signals) -> None:
        """Return when all have ended, when one is lost, some time after one has failed, or when
        asked to stop.
        """
        failed_at = math.inf
        look_at = 0.0
        while not signals.stop.is_set():
            while signals.forwarded:
                number = signals.forwarded.popleft()
                for each in self.started:
                    if not each.ended.is_set():
                        each.send(number)
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + _LOOK_SECONDS
                self._launcher.look()
            troubled = next((each for each in self.started if each.trouble is not None), None)
            if troubled is not None:
                self._say(f"rank {troubled.rank}: {troubled.trouble}\n")
                return
            running = [each for each in self.started if not each.ended.is_set()]
            if not running:
                return
            failed = [each for each in self.started if each.has_failed]
            if failed:
                failed_at = min(failed_at, time.monotonic())
            # Of a rank that is lost nobody will hear more, and it is the first cause in any case.
            if any(each.code is None for each in failed):
                return
            if time.monotonic() - failed_at > GRACE_SECONDS:
                return
            running[0].ended.wait(_WAIT_SECONDS)

    def show_failures(self, interrupted: bool) -> None:
        """Say what was held back, the first cause first.

        Of ranks that ended because the user interrupted nothing is said.
        """
        for each in [*self._failed(), *(each for each in self.started if not each.has_failed)]:
            is_wanted = not interrupted or not (each.was_asked or each.is_consequence)
            if each.held and is_wanted:
                self._say(f"rank {each.rank}:\n")
                for line in each.held:
                    self._say(line)

    def _failed(self) -> list[StartedRank]:
        return sorted(
            (each for each in self.started if each.has_failed),
            # Those that were ended here did not fail by themselves. Of those that are lost (without
            # a code) others may have heard before, and have failed of it.
            key=lambda each: (
                each.was_asked,
                each.is_consequence,
                each.code is not None,
                each.end_seconds,
            ),
        )

    def error(self) -> ExecutionError | None:
        """What the first rank that failed failed with; None where none has."""
        for each in self.started:
            if each.trouble is not None:
                return ExecutionError(
                    "the process of a rank does not run, and all were ended",
                    rank=each.rank,
                    got=each.trouble,
                    expected="all ranks running",
                    hint=CONTINUE_HINT,
                )
        failed = self._failed()
        if not failed:
            return None
        first = failed[0]
        return ExecutionError(
            "a rank failed, and the others were ended",
            rank=first.rank,
            got=first.how,
            expected="exit code 0 of all ranks",
            hint=_hint(first),
        )


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _hint(failed: StartedRank) -> str:
    if failed.held or (failed.code or 0) > 0:
        return "its output above says why"
    if failed.code is None:
        return "look whether its host runs, and whether this one reaches it"
    return "it said nothing: something else ended it, such as a system short of memory"
