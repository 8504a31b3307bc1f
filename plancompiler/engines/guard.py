"""A process that ends process groups when whoever started them is gone, however that ended.

It runs this file by itself (`Guard` starts it), without the package and with the standard library's
smallest part, so that it costs little. Lines on its standard input say which groups it has:
`+ID` and `-ID`. When the input ends it ends those that are left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

_LOOK_SECONDS = 0.02


class Guard:
    """The guarding process, from the side of who is guarded against."""

    def __init__(self, grace: float) -> None:
        """`grace` seconds are between SIGTERM and SIGKILL."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(grace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """End this process group when this process is gone."""
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        """It has ended by itself; another group may have its number."""
        self._write(f"-{group}\n")

    def close(self) -> None:
        """End the groups that are left, and the guard."""
        with suppress(BrokenPipeError):
            self._process.communicate()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # somebody has killed it
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def _send(groups: set[int], number: int) -> set[int]:
    """Send a signal to groups; those that there are."""
    there = set()
    for group in groups:
        try:
            os.killpg(group, number)
        except OSError:
            continue
        there.add(group)
    return there


def main() -> None:
    """Read until whoever writes is gone, then end what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    groups = _send(groups, signal.SIGTERM)
    groups = _send(groups, signal.SIGCONT)  # a stopped one would not hear it
    until = time.monotonic() + float(sys.argv[1])
    while groups and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)  # nothing tells of the end of groups that are not its children
        groups = _send(groups, 0)
    _send(groups, signal.SIGKILL)


if __name__ == "__main__":
    main()
