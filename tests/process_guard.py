"""Which tests start processes: where these are left out, one that starts any without the mark
`processes` is stopped, and told to bear it.
"""

from __future__ import annotations

import multiprocessing.util
import sys
from typing import Any

import pytest

MARK = "processes"
STARTS = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"}
)
"""Python's audit events of what starts or becomes another process."""


class ProcessGuard:
    """Knows the test that runs, and sees processes start."""

    def __init__(self) -> None:
        self.test: pytest.Item | None = None

    def install(self) -> None:
        """See all processes that this one starts; this cannot be undone."""
        sys.addaudithook(self.audit)
        spawn = multiprocessing.util.spawnv_passfds  # without an audit event

        def seen(*arguments: Any) -> int:
            self.started("multiprocessing")
            return spawn(*arguments)

        multiprocessing.util.spawnv_passfds = seen

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Python's hook: an exception keeps what is announced from happening."""
        if event in STARTS:
            self.started(event)

    def started(self, how: str) -> None:
        """A process is about to start."""
        if self.test is not None and self.test.get_closest_marker(MARK) is None:
            raise AssertionError(
                f"{self.test.nodeid} starts a process ({how}) and does not have the mark "
                f"{MARK!r}: write @pytest.mark.{MARK} above it"
            )
