"""Engines that are a command, such as `mpiexec`, which runs as long as its ranks do."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from plancompiler.engines.guard import Guard
from plancompiler.engines.hosted import engine_environment
from plancompiler.engines.launcher import exit_text
from plancompiler.engines.line_reader import LAST_WORDS_SECONDS, LineReader
from plancompiler.limits import time_limits

_LINES = 20
"""How many of its last lines are shown where it fails."""


class EngineCommand:
    """One run of such a command, with what it says."""

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        """Its lines go to `say` as they come."""
        self._name = os.path.basename(command[0])  # noqa: PTH119  # a name, maybe not a path
        self._last: deque[str] = deque(maxlen=_LINES)
        self._say = say
        self._guard = Guard(time_limits.GRACE)
        self._process = subprocess.Popen(
            command,
            env=engine_environment(os.environ) | dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._guard.add(self._process.pid)
        self._reader = LineReader(self._process.stdout, self._read, f"lines of {self._name}")

    def _read(self, line: str) -> None:
        self._last.append(line.strip())
        self._say(line)

    def ended(self) -> str | None:
        """How it has ended and what it said last; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        self._reader.join(LAST_WORDS_SECONDS)
        words = " ".join(line for line in self._last if line)
        return f"{self._name}: {exit_text(code)}" + (f"; it said: {words}" if words else "")

    def end(self) -> None:
        """Wait for its end, which it has no more reason to delay, and make sure of it. One whose
        ranks are on a lost host may wait for them for long, whatever it is told.
        """
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
            if number == signal.SIGKILL:
                self._guard.remove(self._process.pid)  # all of its group are dead
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
                break
        self._guard.close()  # kills what is left
        self._process.wait()
        self._reader.finish()


_END_SECONDS = 0.7
"""Twice this, after the silence of a lost agent, must fit into what ending a run may take."""
