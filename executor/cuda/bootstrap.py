"""How device ranks make their communicators, over the link that connects them anyway.

Each rank publishes *bootstrap records*: for a group whose first member it is, NCCL's name for it,
and for a channel on which it receives, which boxes it reads. Communicators are then made in one
order by all ranks, so that nobody waits in a circle.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, replace
from typing import Any

from plancompiler.errors import DeadlineError, TransportError
from plancompiler.executor.comm.link import GroupDesc, GroupKey, Link, Publication
from plancompiler.executor.comm.publication import communicator_keys, publication_of
from plancompiler.executor.cuda.interface import Device, DeviceCommunicator
from plancompiler.executor.cuda.order import Channel, LaunchOrder
from plancompiler.executor.threads import await_threads
from plancompiler.ir.shard import Region
from plancompiler.ir.task import FAMILY_BITS, TaskKind, unpack_id
from plancompiler.plan.plan import CopySpec, Plan


@dataclass(frozen=True)
class Bootstrap:
    """The groups of a device's rank."""

    groups: tuple[tuple[object, GroupKey], ...]
    """What makes the communicator (index in the plan, or channel) and its group, in the order in
    which all ranks make theirs."""
    publication: Publication


def bootstrap_of(plan: Plan, order: LaunchOrder, first_step: int, device: Device) -> Bootstrap:
    """Groups and publication of a device's rank.

    Of its registers only those in host memory are published; the digests of what its communicators
    run are, as on the CPU.
    """
    host = publication_of(order.plan, first_step)
    in_host_memory = {block.index for block in plan.blocks if block.device == "cpu"}
    groups: list[tuple[tuple[object, ...], object, GroupKey]] = []
    for index, (ranks, occurrence) in enumerate(communicator_keys(plan)):
        if len(ranks) > 1:
            key = GroupKey(ranks, occurrence, "nccl")
            place = plan.communicators[index].families[0], ranks, occurrence
            groups.append((place, index, key))
    for channel in order.channels:
        key = GroupKey((channel.source, channel.target), channel.family + 1, "channel")
        # Channels after all communicators: what they are numbered by is no family of a collective.
        groups.append(((1 << FAMILY_BITS, *channel), channel, key))
    groups.sort(key=lambda group: group[0])
    records = {}
    for _, what, key in groups:
        if key.ranks[0] == plan.rank:
            records[str(key)] = device.unique_id().hex()
        elif isinstance(what, Channel):
            records[str(key)] = _boxes_record(plan, order, what)
    peers = {rank for _, _, key in groups for rank in key.ranks} | set(host.peers)
    digests = {(*key.ranks, key.occurrence): digest for key, digest in host.groups}
    return Bootstrap(
        tuple((what, key) for _, what, key in groups),
        replace(
            host,
            regions=tuple(each for each in host.regions if each.block in in_host_memory),
            groups=tuple(
                GroupDesc(key, digests.get((*key.ranks, key.occurrence), ""))
                for _, _, key in groups
            ),
            peers=tuple(sorted(peers - {plan.rank})),
            records=records,
        ),
    )


def make_communicators(
    bootstrap: Bootstrap, link: Link, device: Device, deadline: float
) -> tuple[dict[object, DeviceCommunicator], dict[int, Region]]:
    """Communicators by what they are for, and the boxes that others receive, by their tasks."""
    communicators: dict[object, DeviceCommunicator] = {}
    boxes: dict[int, Region] = {}
    for what, key in bootstrap.groups:
        first = key.ranks[0]
        if first == link.rank:
            name = bootstrap.publication.records[str(key)]
            if isinstance(what, Channel):
                boxes.update(_read_boxes(_record(link, what.target, key), what))
        else:
            name = _record(link, first, key)
        label = f"{key.stream} of ranks {list(key.ranks)}"
        member = key.ranks.index(link.rank)
        communicators[what] = join(
            device, bytes.fromhex(name), len(key.ranks), member, label, deadline
        )
    return communicators, boxes


def _record(link: Link, rank: int, key: GroupKey) -> str:
    record = link.record(rank, str(key))
    if record is None:
        raise TransportError(
            f"rank {rank} has no bootstrap record for {key.stream} of ranks {list(key.ranks)}",
            rank=link.rank,
            hint="compile all ranks' plans from one job",
        )
    return record


def _boxes_record(plan: Plan, order: LaunchOrder, channel: Channel) -> str:
    """What this rank receives on a channel: boxes by task id."""
    return json.dumps(
        {
            str(task.id): task.spec.region
            for task in plan.tasks
            if task.kind is TaskKind.SEND_RECV
            and order.receives.get(task.id) == channel
            and isinstance(task.spec, CopySpec)
        },
        separators=(",", ":"),
    )


def _read_boxes(record: str, channel: Channel) -> dict[int, Region]:
    try:
        fields: dict[str, Any] = json.loads(record)
        return {
            int(task): tuple((int(start), int(stop)) for start, stop in box)
            for task, box in fields.items()
            if unpack_id(int(task)).rank == channel.target
        }
    except (ValueError, TypeError, AttributeError):
        raise TransportError(
            "a rank said something unintelligible about what it receives", rank=channel.target
        ) from None


def join(
    device: Device, name: bytes, members: int, member: int, label: str, deadline: float
) -> DeviceCommunicator:
    """Join a communicator within the deadline: NCCL itself waits for the others without end."""
    made: list[DeviceCommunicator] = []
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            device.use()
            made.append(device.communicator(name, members, member))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=wait, name="plancompiler-nccl", daemon=True)
    thread.start()
    await_threads([thread], deadline)
    if failed:
        raise failed[0]
    if not made:
        raise DeadlineError(
            f"{label} was not made within {deadline:g} s",
            hint="NCCL_DEBUG=INFO shows what NCCL waits for",
        )
    return made[0]
