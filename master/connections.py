"""How many connections a master has: a limit that callers hear of, and one behind it.

gRPC tells a server nothing of connections that come and go, but closes new ones, without a word,
beyond a number that it was given. So whoever signs in beyond the limit is told so, and some places
behind it are for those who are about to hear that. The kernel knows how many connections there are;
it is asked only where as many callers as the limit may have signed in since it was asked last.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

from plancompiler.errors import LimitError

MAX_CONNECTIONS = 4096
"""Of clients."""
PER_RANK = 4
"""Connections of a worker beside those: its own, its fetches', its heartbeat process's, and one
that it opens while another is about to end.
"""
SPARE = 64
"""Behind the limit, for those who have not heard yet that they are too many."""
_OTHER_DESCRIPTORS = 256
"""Which the process may need for anything else."""
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_OPEN_STATES = ("01", "08")
"""Established, or closed by the other side only."""


def raise_descriptor_limit() -> None:
    """Let this process open as many descriptors as it may allow itself: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Connections:
    """At most `limit` connections, fewer where the process may not open as many descriptors, and
    in addition as many as the workers of so many ranks have. Whoever comes first has a place.
    """

    def __init__(self, limit: int, ranks: int) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        of_workers = PER_RANK * ranks
        if descriptors != resource.RLIM_INFINITY:
            limit = min(limit, max(1, descriptors - _OTHER_DESCRIPTORS - SPARE - of_workers))
        self.limit = limit + of_workers
        self.port = 0
        """Where the master listens."""
        self._most = 0
        """There are no more than so many that have signed in."""

    @property
    def server_options(self) -> list[tuple[str, int]]:
        """With which gRPC closes those that come beyond the limit and its spare places."""
        return [("grpc.max_allowed_incoming_connections", self.limit + SPARE)]

    def admit(self) -> None:
        """A caller signs in; LimitError where there are too many."""
        self._most += 1
        if self._most <= self.limit:
            return
        self._most = _open_connections(self.port)
        if self._most > self.limit:
            raise LimitError(
                "the master has too many open connections",
                got=self._most,
                expected=f"at most {self.limit}, those of workers included",
                hint="close some, or start the master with a larger --max-connections (and a "
                "larger `ulimit -n`, if that is less)",
            )


def _open_connections(port: int) -> int:
    """Connections to a port that this machine's kernel knows; 0 where it does not tell."""
    local, count = f":{port:04X}", 0
    for table in _TABLES:
        with suppress(OSError):
            rows = (line.split(None, 4) for line in table.read_text().splitlines()[1:])
            count += sum(row[1].endswith(local) and row[3] in _OPEN_STATES for row in rows)
    return count
