"""Where the members of a group publish arrays for each other; communicators stand on it.

One rank's rendezvous are all made on its link to the ranks of its world. Each kind of link has its
own: threads read what others publish as it is, processes of one host in shared memory, all others
as frames.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from plancompiler.errors import PlanCompilerError, TransportError
from plancompiler.executor.comm.link import Link
from plancompiler.executor.comm.operations import Arrays, Targets

Published = list[tuple[str, Arrays]]
"""What each member called, and the arrays that it published."""


class Rendezvous(Protocol):
    """One member's view of where a group meets."""

    ranks: tuple[int, ...]
    member: int
    """This rank's position in `ranks`."""
    deadline: float
    """Seconds that a wait for other members may take."""

    def publish(
        self, call: str, arrays: Arrays, label: object, targets: Targets = None
    ) -> Published:
        """Publish arrays for all members; returns what each has published, when all have.

        `targets` names the member that reads each array, where it is one; others may see an empty
        one in its place. What is returned may be read until `release`. `label` says what for in
        errors. Raises DeadlineError where a member does not come in time, AbortedError where one
        has failed.
        """

    def release(self, label: object) -> None:
        """Return when nobody reads this rank's arrays any more."""


class WorldLink(ABC):
    """One rank's link to all other ranks of a world. See `Sink` for what comes of it."""

    def __init__(
        self, link: Link, deadline: float, far: Callable[[str], Link] | None = None
    ) -> None:
        self.link = link
        self.rank = link.rank
        self.deadline = deadline
        """Seconds that a wait for other members may take, on rendezvous made from now on."""
        self.failed: Callable[[PlanCompilerError], None] = lambda error: None
        """To be called, from any thread, when a rank of the world has failed."""
        self.far = far
        """Makes this rank's link of a run, by its secret, to ranks of other hosts; None where the
        world is on one host."""

    @abstractmethod
    def rendezvous(self, ranks: tuple[int, ...], stream: str = "") -> Rendezvous:
        """A rendezvous of these ranks, this one among them, for a stream. All members ask for it;
        does not wait for them.
        """

    def notice(self, kind: int, key: int, reader: int) -> None:
        """See `Sink.notice`."""
        raise TransportError("nothing is announced in a world", rank=self.rank)

    def peer_failed(self, error: PlanCompilerError) -> None:
        """See `Sink.peer_failed`."""
        self.failed(error)

    def abort(self, error: PlanCompilerError) -> None:
        """Fail every wait of every rank, now and later."""
        self.link.abort(self.rank, error)
        self.failed(error)

    def close(self) -> None:
        """Let go of everything; who still waits for this rank fails."""
        self.link.close()


def rendezvous_digest(ranks: tuple[int, ...], stream: str) -> bytes:
    """16 bytes by which the members of a group know its rendezvous on a stream."""
    name = f"{','.join(map(str, ranks))} {stream}"
    return hashlib.blake2b(name.encode(), digest_size=16).digest()
