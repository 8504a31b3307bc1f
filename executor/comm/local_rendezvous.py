"""Rendezvous of ranks that are threads of one process: arrays are published as they are."""

from __future__ import annotations

from plancompiler.executor.comm.link import GroupKey, Publication
from plancompiler.executor.comm.local import LocalGroup, LocalLink
from plancompiler.executor.comm.operations import Arrays, Targets
from plancompiler.executor.comm.rendezvous import Published, WorldLink
from plancompiler.limits.time_limits import DEADLINE

COPIED_BYTES = 32 << 10
"""Arrays up to this size are published as copies, so that nobody waits until they have been read.
"""


class LocalWorldLink(WorldLink):
    """One rank's link to the other threads; made in its thread."""

    link: LocalLink

    def __init__(self, link: LocalLink, deadline: float = DEADLINE) -> None:
        super().__init__(link, deadline)
        link.hub.watch_thread(link.rank)
        link.open(Publication(link.rank), self)

    def rendezvous(self, ranks: tuple[int, ...], stream: str = "") -> LocalRendezvous:
        """See `WorldLink.rendezvous`."""
        return LocalRendezvous(self.link, GroupKey(ranks, 0, stream), self.deadline)


class LocalRendezvous(LocalGroup):
    """One member's view of what a group's members publish."""

    _must_release = False

    def __init__(self, link: LocalLink, key: GroupKey, deadline: float) -> None:
        super().__init__(link, key, deadline)
        self._published: tuple[Published, ...] = self._counts.published

    def publish(
        self, call: str, arrays: Arrays, label: object, targets: Targets = None
    ) -> Published:
        """See `Rendezvous.publish`."""
        if sum(array.nbytes for array in arrays) <= COPIED_BYTES:
            arrays = tuple(array.copy() for array in arrays)
        published = self._published[(self._counts.of[self.member] + 1) % 2]
        published[self.member] = call, arrays
        self.barrier(label)
        everyone = list(published)
        self._must_release = any(
            sum(array.nbytes for array in each) > COPIED_BYTES for _, each in everyone
        )
        return everyone

    def release(self, label: object) -> None:
        """See `Rendezvous.release`."""
        if self._must_release:
            self._must_release = False
            self.barrier(label)
