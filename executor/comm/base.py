"""What a transport is: shared memory, messages and barriers between ranks.

A transport serves one rank for the life of one `Runtime`. The runtime first lets it allocate the
plan's blocks, then calls `connect` with what other ranks may read; afterwards registers of peers,
groups and messages can be used from any stream.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from plancompiler.errors import PlanCompilerError, TransportError
from plancompiler.executor.actor import Notice, shared_id
from plancompiler.executor.memory import Buffer, Slots
from plancompiler.ir.shard import Region
from plancompiler.ir.task import TaskKind, unpack_id
from plancompiler.plan.plan import Block, CollectiveSpec, CopySpec, Plan, RegisterDesc


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


class Read(NamedTuple):
    """A task of this rank copies part of a peer's register, each time that it arrives."""

    rank: int
    register: int
    """Its id on the peer."""
    shared: int
    """The id by which notices name it."""
    task: int
    region: Region


@dataclass(frozen=True, slots=True)
class Publication:
    """What a rank lets its peers see."""

    rank: int
    registers: tuple[RegisterDesc, ...]
    """Registers that peers read."""
    groups: tuple[GroupDesc, ...]
    peers: tuple[int, ...]
    """All ranks that this one exchanges anything with, ascending; not itself."""
    reads: tuple[Read, ...] = ()
    """What this rank copies from its peers, outside of collectives."""
    first_step: int = 0
    microbatches: int = 1

    def first_version(self, register: RegisterDesc) -> int:
        """Number of the version of an own register that is made first."""
        return self.first_step * (self.microbatches if register.per_microbatch else 1)


class Sink(Protocol):
    """Where a transport hands over what comes from other ranks. Called from any thread."""

    def notice(self, kind: int, register: int, task: int) -> None:
        """A register arrived or came back."""

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
        gone, or, of a transport that is not watched, DeadlineError.
        """

    def missing(self) -> list[int]:
        """Members that have not come as often as this rank; from any thread."""


class Transport(Protocol):
    """One rank's connection to the others."""

    rank: int

    def allocate(self, block: Block) -> Buffer:
        """Memory for a block; peers can read it if `block.shared`."""

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

    def tell(self, rank: int, note: bytes) -> None:
        """Bring a note to the watcher of a peer, without waiting; it may get lost."""

    def peer_register(self, rank: int, register: int) -> Slots | None:
        """Arrays over a register of a peer (or of this rank), None where it is not published."""

    def push(
        self, rank: int, register: int, slot: int, region: Region, flat: bool = False
    ) -> Callable[[], object] | None:
        """What brings part of an own published register to a peer before the next barrier with it.

        `region` is part of the register's slot, or if `flat` of that slot as one dimension. The
        slot must stay as it is until a barrier after that one. None where the peer reads this
        rank's memory anyway.
        """

    def group(self, key: GroupKey) -> Group:
        """The group of this key, always the same object; it was in the publication."""

    def notify(self, notice: Notice) -> None:
        """Send a notice to `notice.rank`."""

    def abort(self, failed_rank: int, error: PlanCompilerError) -> None:
        """Wake every wait on this rank with an error and tell all peers. The first call counts."""

    def close(self) -> None:
        """Say goodbye and let go of everything. May be called again."""


def publication_of(plan: Plan, first_step: int = 0) -> Publication:
    """What a plan's rank has to publish: group members, and registers that peers read."""
    published: dict[int, RegisterDesc] = {}
    peers: set[int] = {unpack_id(remote.producer).rank for remote in plan.remote_registers}
    shared_blocks = {block.index for block in plan.blocks if block.shared}
    lines: dict[GroupKey, list[str]] = {}
    families: dict[GroupKey, dict[int, list[int]]] = {}
    for register in plan.registers:
        readers = {unpack_id(task).rank for task in register.consumers} - {plan.rank}
        peers |= readers
        if readers and not register.is_control:
            published[register.id] = register
    keys = communicator_keys(plan)
    reads: list[Read] = []
    for task in plan.tasks:
        if isinstance(task.spec, CopySpec):
            remote = plan.remote_register_by_id.get(task.inputs[0])
            if remote is not None:
                rank = unpack_id(remote.producer).rank
                reads.append(Read(rank, remote.id, shared_id(remote), task.id, task.spec.region))
        if task.kind is TaskKind.COLLECTIVE_BOXING and isinstance(task.spec, CollectiveSpec):
            spec = task.spec
            ranks, occurrence = keys[spec.communicator]
            peers |= set(ranks)
            for source in task.inputs:
                published[source] = plan.register_by_id[source]
            outputs = [plan.register_by_id[target] for target in task.outputs]
            for output in outputs:
                if output.block in shared_blocks:
                    published[output.id] = output
            key = GroupKey(ranks, occurrence, str(task.stream))
            family = unpack_id(task.id).family
            families.setdefault(key, {}).setdefault(task.segment, []).append(family)
            lines.setdefault(key, []).append(
                f"{family} {spec.primitive} {spec.reduction} "
                f"{spec.src_axis} {spec.dst_axis} {[str(output.dtype) for output in outputs]}"
            )
    if plan.microbatches > 1:
        for key, by_segment in families.items():
            lines[key] += (
                f"{slot.microbatch} {by_segment[slot.segment]}"
                for slot in plan.slots
                if slot.segment in by_segment
            )
    groups = tuple(
        GroupDesc(key, hashlib.sha256("\n".join(text).encode()).hexdigest())
        for key, text in lines.items()
    )
    return Publication(
        plan.rank,
        tuple(published.values()),
        groups,
        tuple(sorted(peers - {plan.rank})),
        tuple(reads),
        first_step,
        plan.microbatches,
    )


def communicator_keys(plan: Plan) -> list[tuple[tuple[int, ...], int]]:
    """Ranks and occurrence of each communicator of a plan."""
    seen: Counter[tuple[int, ...]] = Counter()
    found = []
    for communicator in plan.communicators:
        found.append((communicator.ranks, seen[communicator.ranks]))
        seen[communicator.ranks] += 1
    return found


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
