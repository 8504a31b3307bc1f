"""Who has the places of a master's connections: clients, workers, and whoever operates it.

A caller takes a place when it has proved to know its secret, and for each connection over which it
calls; a call decides which kind of place its connection needs, so that nobody has a place by saying
so. gRPC tells a server nothing of connections that come and go, but the kernel knows which ones
there are; it is asked only where no place seems to be free. Beyond all places gRPC closes new
connections without a word, so some are left for those who are about to hear that they are too many.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from enum import Enum
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from urllib.parse import unquote

from plancompiler.errors import LimitError

MAX_CONNECTIONS = 4096
"""Of clients."""
PER_RANK = 4
"""Of a worker: its own connection, its fetches', its heartbeat process's, and one that it opens
while another is about to end.
"""
RESERVE = 16
"""Of those who operate the master while clients have all of theirs, and as many of workers that try
to register and cannot.
"""
SPARE = 64
"""Behind all places, for those who have not heard yet that they are too many."""
_OTHER_DESCRIPTORS = 256
"""Which the process may need for anything else."""
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_OPEN_STATES = ("01", "08")
"""Established, or closed by the other side only."""
_WORD = 4
"""Bytes of an address whose order the kernel's tables turn around."""


class Place(Enum):
    """Whose connection it is."""

    CLIENT = "clients"
    OPERATOR = "those who operate it"
    """Of somebody who may operate the master: enough to ask for its status and to cancel jobs."""
    WORKER = "workers"


_HINTS = {
    Place.CLIENT: "close some, or start the master with a larger --max-connections (and a larger "
    "`ulimit -n`, if that is less)",
    Place.WORKER: "start no more workers than the master has --ranks",
}


def raise_descriptor_limit() -> None:
    """Let this process open as many descriptors as it may allow itself: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Connections:
    """At most `limit` connections of clients, fewer where the process may not open as many
    descriptors, and beside these those of operators and of the workers of so many ranks.
    """

    def __init__(self, limit: int, ranks: int) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        kept = {Place.OPERATOR: RESERVE, Place.WORKER: PER_RANK * ranks + RESERVE}
        if descriptors != resource.RLIM_INFINITY:
            others = _OTHER_DESCRIPTORS + SPARE + sum(kept.values())
            limit = min(limit, max(1, descriptors - others))
        self.limits = {Place.CLIENT: limit, **kept}
        self.port = 0
        """Where the master listens."""
        self._places: dict[str, Place] = {}
        """By gRPC's name of the other end; some may have gone."""
        self._taken: Counter[Place] = Counter()
        self._look: asyncio.Task[None] | None = None

    @property
    def server_options(self) -> list[tuple[str, int]]:
        """With which gRPC closes those that come beyond all places and the spare ones."""
        return [("grpc.max_allowed_incoming_connections", sum(self.limits.values()) + SPARE)]

    async def admit(self, peer: str, places: Collection[Place]) -> None:
        """The connection from `peer` has one of these places from now on, the first one that is
        free; LimitError where none is.
        """
        if self._places.get(peer) in places or self._take(peer, places):
            return
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._forget_closed())
        await asyncio.shield(self._look)  # others may wait for it, too
        if not self._take(peer, places):
            place = next(iter(places))
            raise LimitError(
                f"the master has too many open connections of {place.value}",
                got=self._taken[place] + 1,
                expected=f"at most {self.limits[place]}",
                hint=_HINTS[place],
            )

    def _take(self, peer: str, places: Iterable[Place]) -> bool:
        for place in places:
            if self._taken[place] < self.limits[place]:
                self._leave(peer)
                self._places[peer] = place
                self._taken[place] += 1
                return True
        return False

    def _leave(self, peer: str) -> None:
        place = self._places.pop(peer, None)
        if place is not None:
            self._taken[place] -= 1

    async def _forget_closed(self) -> None:
        # The tables of a busy machine are long, and others are to be answered meanwhile.
        for peer in await asyncio.to_thread(_closed, tuple(self._places), self.port):
            self._leave(peer)


def _closed(peers: Iterable[str], port: int) -> list[str]:
    """Those of the peers that have no connection to this port any longer; all of them where the
    kernel does not tell.
    """
    connected = set(_connected(port))
    return [peer for peer in peers if _end(peer) not in connected]


def _end(peer: str) -> tuple[bytes, int]:
    """The address and port in gRPC's name of the other end of a connection."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    address = ip_address(host.strip("[]").partition("%")[0])
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or address
    return address.packed, int(port)


def _connected(port: int) -> Iterator[tuple[bytes, int]]:
    """The other ends of connections to a port, as this machine's kernel has them."""
    local = f":{port:04X}"
    for table in _TABLES:
        with suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                _, own, other, state, _ = line.split(None, 4)
                if own.endswith(local) and state in _OPEN_STATES:
                    host, _, end = other.partition(":")
                    yield _packed(bytes.fromhex(host)), int(end, 16)


def _packed(host: bytes) -> bytes:
    """An address in network order, of one that the kernel has printed as words of this machine."""
    words = (host[start : start + _WORD] for start in range(0, len(host), _WORD))
    packed = b"".join(word if sys.byteorder == "big" else word[::-1] for word in words)
    mapped = IPv6Address(packed).ipv4_mapped if len(packed) > _WORD else None
    return packed if mapped is None else mapped.packed
