"""What a link is: shared memory, messages and barriers between ranks, whatever they run.

A link serves one rank for the life of one run or world. It first allocates the memory that others
may read, then connects to those others with what this rank publishes; afterwards regions of peers,
groups and messages can be used from any thread. There is one file per kind of wire: threads
(`local`), shared memory (`host`), and frames (`messages`), which gRPC (`remote`) or MPI (`mpi`)
carry; `routed` is of two kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from plancompiler.errors import PlanCompilerError, TransportError
from plancompiler.executor.actor import Notice
from plancompiler.executor.memory import Buffer, Slots, slot_arrays
from plancompiler.ir import DType
from plancompiler.ir.shard import Region, element_count


class GroupKey(NamedTuple):
    """Which ranks meet, and on which stream: the same on all of them.

    Collectives of one communicator on one stream run in one order on all members, so that a counter
    per group is enough to keep them in step.
    """

    ranks: tuple[int, ...]
    occurrence: int
    """Tells apart communicators of the same ranks."""
    stream: str


class GroupDesc(NamedTuple):
    """A group and a digest of the collectives that it runs in a step, in the order of the slots."""

    key: GroupKey
    digest: str


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Memory that peers may read: slots of one shape in a block that was allocated from the link.

    Where peers cannot read it, they have it pushed.
    """

    key: int
    """What the rank and its peers call it."""
    block: int
    offset: int
    stride: int
    """Bytes from slot to slot."""
    count: int
    dtype: DType
    shape: tuple[int, ...]
    name: str = ""
    """For people."""
    announced: int = 0
    """The key by which notices name it."""
    first_version: int = 0
    """The number of the version that is made first; version n is in slot n modulo `count`."""

    @property
    def used(self) -> int:
        """Bytes of a slot's elements."""
        return element_count(self.shape) * self.dtype.itemsize

    def slots(self, buffer: Buffer | None) -> Slots:
        """Arrays of the slots within their block; those without elements need none."""
        if not self.used:
            return (np.empty(self.shape, self.dtype.numpy),) * self.count
        end = self.offset + self.stride * self.count
        if buffer is None or end > buffer.nbytes or self.stride < self.used:
            raise TransportError(
                f"memory {self.name!r} of a rank lies outside of its block",
                got=f"bytes {self.offset} to {end} of block {self.block}",
            )
        return slot_arrays(buffer, self.offset, self.stride, self.count, self.shape, self.dtype)


class Read(NamedTuple):
    """Somebody on this rank copies part of a peer's region, each time that it is announced."""

    rank: int
    region: int
    announced: int
    """The key by which notices name it."""
    reader: int
    box: Region


@dataclass(frozen=True, slots=True)
class Publication:
    """What a rank lets its peers see."""

    rank: int
    regions: tuple[MemoryRegion, ...] = ()
    """Memory that peers read."""
    groups: tuple[GroupDesc, ...] = ()
    peers: tuple[int, ...] = ()
    """All ranks that this one exchanges anything with, ascending; not itself."""
    reads: tuple[Read, ...] = ()
    """What this rank copies from its peers, outside of collectives."""
    records: Mapping[str, str] = field(default_factory=dict)
    """What else peers may ask for, by name."""


class Sink(Protocol):
    """Where a link hands over what comes from other ranks. Called from any thread."""

    def notice(self, kind: int, key: int, reader: int) -> None:
        """A version of a region arrived or came back."""

    def peer_failed(self, error: PlanCompilerError) -> None:
        """A peer reported a failure, or was lost."""


class Group(Protocol):
    """Ranks that run collectives together. Used by one stream."""

    ranks: tuple[int, ...]
    member: int
    """This rank's position in `ranks`."""

    def barrier(self, label: object) -> None:
        """Return when all members have called it as often as this rank.

        `label` says what for in errors. Raises AbortedError, TransportError where a member is
        gone, or, of a link that is not watched, DeadlineError.
        """

    def missing(self) -> list[int]:
        """Members that have not come as often as this rank; from any thread."""


class Link(Protocol):
    """One rank's connection to the others."""

    rank: int

    def near(self, ranks: Collection[int]) -> tuple[int, ...]:
        """Those of these ranks, this one among them, that see each other's memory; ascending. Known
        before they meet.
        """
        return (self.rank,)

    def allocate(self, block: int, nbytes: int, shared: bool, purpose: str = "") -> Buffer:
        """Memory for a block of this number; peers can read it if it is shared."""

    def connect(self, publication: Publication, sink: Sink, deadline: float) -> None:
        """Meet all peers and learn what they publish.

        `deadline` (seconds) holds for this and, until `watch`, for every later wait.
        """

    def watch(self, receive: Callable[[int, bytes], None]) -> None:
        """From now on somebody watches over this rank's waits, and ends them with `abort`.

        Barriers have no deadline of their own any more. `receive(rank, note)` gets what watchers
        of peers `tell`, from any thread.
        """

    def process_of(self, rank: int) -> int | None:
        """The process of a peer that is another one of this host, once met; else None."""
        return None

    def tell(self, rank: int, note: bytes) -> None:
        """Bring a note to the watcher of a peer, without waiting; it may get lost."""

    def record(self, rank: int, name: str) -> str | None:
        """A record that a peer has published."""

    def peer_slots(self, rank: int, region: int) -> Slots | None:
        """Arrays over a region of a peer (or of this rank), None where it is not published."""

    def free(self, rank: int, region: int) -> None:
        """Give back the block of a region that a peer, or this rank, may have published: nobody
        reads it any more.
        """

    def push(
        self, rank: int, region: int, slot: int, box: Region, flat: bool = False
    ) -> Callable[[], object] | None:
        """What brings part of an own published region to a peer before the next barrier with it.

        `box` is part of the region's slot, or if `flat` of that slot as one dimension. The slot
        must stay as it is until a barrier after that one. None where the peer reads this rank's
        memory anyway.
        """
        return None

    def group(self, key: GroupKey) -> Group:
        """The group of this key, always the same object; it was in the publication."""

    def notify(self, notice: Notice) -> None:
        """Send a notice to `notice.rank`."""

    def abort(self, failed_rank: int, error: PlanCompilerError) -> None:
        """Wake every wait on this rank with an error and tell all peers. The first call counts."""

    def close(self) -> None:
        """Say goodbye and let go of everything. May be called again."""


def check_groups(own: Publication, peer: int, groups: Iterable[GroupDesc]) -> None:
    """Two ranks must agree about the groups that they share."""
    theirs = dict(groups)
    for key, digest in own.groups:
        if peer in key.ranks and theirs.get(key) != digest:
            raise TransportError(
                f"ranks {own.rank} and {peer} disagree about the collectives they run together",
                got=f"communicator {list(key.ranks)} on stream {key.stream}",
                hint="compile all ranks' plans from one job",
            )
