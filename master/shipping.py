"""Who gets its slice or plan from where: once per host from the master, there from each other.

Pure: it knows no thread, socket or clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plancompiler.cluster.messages import LocalCopy

_REPORTS = 10
"""How often the progress of a job's shipping is worth telling."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a rank is told."""

    rank: int
    digest: bytes
    """Of its slice or plan."""
    share: bool
    """Whether others of its host need the same bytes from it."""
    copy: LocalCopy | None
    """Where another worker of its host has the bytes; None: at the master."""


class Shipping:
    """The slices or plans of one job on their way to its ranks.

    Of the ranks on one host that need the same bytes, the first fetches them from the master; the
    others wait until it has them. `digests` and `hosts` are by rank.
    """

    def __init__(self, digests: Mapping[int, bytes], hosts: Mapping[int, str]) -> None:
        self._digests = digests
        self._missing = set(digests)
        groups: dict[tuple[str, bytes], list[int]] = {}
        for rank in sorted(digests):
            groups.setdefault((hosts[rank], digests[rank]), []).append(rank)
        self._followers = {first: rest for first, *rest in groups.values()}
        """First rank of each group -> the others, until they are told."""

    @property
    def fetched(self) -> int:
        """Ranks that have their bytes."""
        return len(self._digests) - len(self._missing)

    def has(self, rank: int) -> bool:
        """Whether a rank has its bytes."""
        return rank not in self._missing

    def first(self) -> list[Delivery]:
        """What can be told at once."""
        return [
            Delivery(rank, self._digests[rank], bool(followers), None)
            for rank, followers in self._followers.items()
        ]

    def arrived(self, rank: int) -> bool:
        """A rank has its bytes; False where that was known."""
        known = rank not in self._missing
        self._missing.discard(rank)
        return not known

    def after(self, rank: int, copy: LocalCopy | None) -> list[Delivery]:
        """What can be told now that a rank has its bytes, and a copy to offer or none."""
        return [
            Delivery(follower, self._digests[follower], False, copy)
            for follower in self._followers.pop(rank, ())
        ]

    @property
    def is_worth_telling(self) -> bool:
        """Whether another tenth of the ranks, or the last one, has just got its bytes."""
        total = len(self._digests)
        now = self.fetched * _REPORTS // total
        return now > (self.fetched - 1) * _REPORTS // total
