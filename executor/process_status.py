"""What the kernel says of a process of this host (/proc): its state, CPU time and variables."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from plancompiler.limits import time_limits

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
"""Of CPU time, in a second."""
STOPPED = "T"
"""The state of a process that a signal has stopped (not `t`, which a debugger looks at)."""
_ENDED = ("Z", "X", "x")
CONTINUE_HINT = "find out who stopped it (Ctrl-Z, SIGSTOP, a debugger), or continue it with SIGCONT"
_LONGEST_LOOK = time_limits.LONGEST_LOOK
"""Seconds that may count between two looks."""


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A process at one moment."""

    pid: int
    name: str
    state: str
    """One letter, as in `ps`: R runs, S and D wait, T is stopped by a signal."""
    parent: int
    started: int
    """Clock ticks since the host started; with the process id it names a process for good."""
    cpu_seconds: float
    """CPU time of all its threads."""

    @property
    def is_stopped(self) -> bool:
        return self.state == STOPPED

    @property
    def stopped_text(self) -> str:
        """What is said of it when it is stopped."""
        return f"process {self.pid} ({self.name}) is in state T, stopped by a signal"


def process_status(pid: int) -> ProcessStatus | None:
    """The status of a process; None where there is none, or it has ended."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name is in brackets and may hold anything, brackets and spaces included.
    head, _, rest = text.rpartition(")")
    fields = rest.split()
    if len(fields) < 20 or fields[0] in _ENDED:
        return None
    return ProcessStatus(
        pid,
        head.partition("(")[2],
        fields[0],
        int(fields[1]),
        int(fields[19]),
        (int(fields[11]) + int(fields[12])) / _TICKS,
    )


def waits_for_disk(pid: int) -> bool:
    """Whether a thread of a process waits in the kernel for what no signal interrupts: mostly a
    disk, as in the middle of a write or an fsync.
    """
    try:
        for task in (_PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has ended meanwhile
                if (task / "stat").read_bytes().rpartition(b") ")[2].startswith(b"D"):
                    return True
    except OSError:
        return False
    return False


class StoppedProcesses:
    """Notices processes that a signal has stopped and nobody continues.

    Time in which this process itself stood still does not count.
    """

    def __init__(self, seconds: float = time_limits.STOPPED) -> None:
        self._seconds = seconds
        self._looked = time.monotonic()
        self._stopped: dict[int, float] = {}
        """Process -> for how many seconds it was seen stopped."""

    def look(self, pids: Iterable[int]) -> ProcessStatus | None:
        """The first of these processes that has been stopped for too long, if there is one."""
        now = time.monotonic()
        passed = min(now - self._looked, _LONGEST_LOOK)
        self._looked = now
        for pid in pids:
            status = process_status(pid)
            if status is None or not status.is_stopped:
                self._stopped.pop(pid, None)
                continue
            self._stopped[pid] = self._stopped.get(pid, -passed) + passed
            if self._stopped[pid] >= self._seconds:
                return status
        return None


def end_stopped_at_exit(pid: int) -> None:
    """End a stopped process when this one ends. Stopped, it would neither hear that the run is over
    nor heed its launcher. Only at the end: launchers end everyone when one ends, whoever still has
    something to say.
    """
    atexit.register(_end_stopped, pid)


def _end_stopped(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)


def process_space() -> str:
    """What processes have in common that see each other under their process ids."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def process_environment(pid: int) -> Mapping[str, str] | None:
    """The variables with which a process of this user was started; None where they are hidden."""
    try:
        data = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    pairs = (each.partition("=") for each in data.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs if name}


def process_arguments(pid: int) -> list[str]:
    """The words with which a process was started; none where they are hidden, or it has ended."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def own_processes() -> list[int]:
    """The ids of all processes of this user."""
    own = os.getuid()
    ids = []
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            try:
                if entry.stat().st_uid == own:
                    ids.append(int(entry.name))
            except OSError:
                continue  # it has ended
    return ids
