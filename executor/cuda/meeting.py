"""How device ranks meet: communicators made over the transport that connects the ranks anyway.

Each rank publishes a *card*, a small shared register. For each group in turn its members write
their cards, meet at a barrier, read each other's, and meet again. The first member's card says
NCCL's name for the group; on a channel the receiver's says which boxes it reads. Groups are taken
in one order by all ranks, so that nobody waits in a circle.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from plancompiler.errors import DeadlineError, TransportError
from plancompiler.executor.comm.base import (
    GroupDesc,
    GroupKey,
    Publication,
    Transport,
    communicator_keys,
    publication_of,
)
from plancompiler.executor.cuda.interface import Communicator, Device
from plancompiler.executor.cuda.order import Channel, LaunchOrder
from plancompiler.executor.threads import await_threads
from plancompiler.ir import BROADCAST, DType, NdSbp
from plancompiler.ir.shard import Region
from plancompiler.ir.task import FAMILY_BITS, TaskKind, pack_register_id, unpack_id
from plancompiler.plan.plan import Block, CopySpec, Plan, RegisterDesc

CARD_BYTES = 64 << 10
"""Room for what a rank says about one group."""
CARD_FAMILY = (1 << FAMILY_BITS) - 2
"""Family number of cards' registers: before that of the ends of segments."""
_LENGTH = np.dtype("<u8")


@dataclass(frozen=True)
class Meetings:
    """The groups of a device's rank."""

    groups: tuple[tuple[object, GroupKey], ...]
    """What makes the communicator (index in the plan, or channel) and its group, in the order in
    which all ranks make theirs."""
    publication: Publication


def card_register(rank: int, block: int) -> RegisterDesc:
    """The register by which a rank's peers read its card."""
    key = pack_register_id(rank, CARD_FAMILY)
    return RegisterDesc(
        id=key,
        name=f"card of rank {rank}",
        shape=(CARD_BYTES,),
        dtype=DType.UINT8,
        sbp=NdSbp((BROADCAST,)),
        producer=key,
        consumers=(),
        block=block,
        nbytes=CARD_BYTES,
    )


def meetings_of(plan: Plan, order: LaunchOrder, first_step: int) -> Meetings:
    """Groups and publication of a device's rank.

    Of its registers only those in host memory are published; the digests of what its communicators
    run are, as on the CPU.
    """
    host = publication_of(order.plan, first_step)
    in_host_memory = {block.index for block in plan.blocks if block.device == "cpu"}
    keys = communicator_keys(plan)
    groups: list[tuple[tuple[object, ...], object, GroupKey]] = []
    for index, communicator in enumerate(plan.communicators):
        ranks, occurrence = keys[index]
        if len(ranks) > 1:
            key = GroupKey(ranks, occurrence, "nccl")
            groups.append(((communicator.families[0], ranks, occurrence), index, key))
    for channel in order.channels:
        key = GroupKey((channel.source, channel.target), channel.family + 1, "channel")
        # Channels after all communicators: what they are numbered by is no family of a collective.
        groups.append(((1 << FAMILY_BITS, *channel), channel, key))
    groups.sort(key=lambda group: group[0])
    peers = {rank for _, _, key in groups for rank in key.ranks} | set(host.peers)
    digests = {(*key.ranks, key.occurrence): digest for key, digest in host.groups}
    return Meetings(
        tuple((what, key) for _, what, key in groups),
        replace(
            host,
            registers=(
                *(each for each in host.registers if each.block in in_host_memory),
                card_register(plan.rank, len(plan.blocks)),
            ),
            groups=tuple(
                GroupDesc(key, digests.get((*key.ranks, key.occurrence), ""))
                for _, _, key in groups
            ),
            peers=tuple(sorted(peers - {plan.rank})),
        ),
    )


class Cards:
    """One rank's card, and how it reads the others'."""

    def __init__(self, plan: Plan, transport: Transport) -> None:
        self._rank = plan.rank
        self._transport = transport
        self._block = Block(len(plan.blocks), "card", True, CARD_BYTES)
        self._own = transport.allocate(self._block)

    def exchange(self, key: GroupKey, text: bytes) -> dict[int, bytes]:
        """What each other member of a group said."""
        header = _LENGTH.itemsize
        if len(text) > CARD_BYTES - header:
            raise TransportError(
                "a rank has more to say about a group than its card has room for",
                rank=self._rank,
                got=f"{len(text)} bytes",
                expected=f"at most {CARD_BYTES - header} bytes",
            )
        self._own[:header] = np.frombuffer(np.array(len(text), _LENGTH).tobytes(), np.uint8)
        self._own[header : header + len(text)] = np.frombuffer(text, np.uint8)
        others = [rank for rank in key.ranks if rank != self._rank]
        group = self._transport.group(key)
        register = pack_register_id(self._rank, CARD_FAMILY)
        for rank in others:
            push = self._transport.push(rank, register, 0, ((0, CARD_BYTES),))
            if push is not None:
                push()
        label = f"meeting of {key.stream} {list(key.ranks)}"
        group.barrier(label)
        found = {rank: self._read(rank) for rank in others}
        group.barrier(label)
        return found

    def _read(self, rank: int) -> bytes:
        slots = self._transport.peer_register(rank, pack_register_id(rank, CARD_FAMILY))
        if slots is None:
            raise TransportError(
                f"rank {rank} has no card: it is not on a device",
                rank=self._rank,
                hint="compile all ranks' plans from one job",
            )
        card = slots[0].tobytes()
        length = int(np.frombuffer(card, _LENGTH, 1)[0])
        return card[_LENGTH.itemsize :][: min(length, CARD_BYTES)]


def meet(
    meetings: Meetings,
    cards: Cards,
    order: LaunchOrder,
    plan: Plan,
    device: Device,
    deadline: float,
) -> tuple[dict[object, Communicator], dict[int, Region]]:
    """Communicators by what they are for, and the boxes that others receive, by their tasks."""
    communicators: dict[object, Communicator] = {}
    boxes: dict[int, Region] = {}
    for what, key in meetings.groups:
        member = key.ranks.index(plan.rank)
        name = device.unique_id() if member == 0 else b""
        if member == 0 or not isinstance(what, Channel):
            heard = cards.exchange(key, name)
        else:
            heard = cards.exchange(key, _say_boxes(plan, order, what))
        if isinstance(what, Channel) and member == 0:
            boxes.update(_hear_boxes(heard[what.target], what))
        label = f"{key.stream} of ranks {list(key.ranks)}"
        communicators[what] = join(
            device, name or heard[key.ranks[0]], len(key.ranks), member, label, deadline
        )
    return communicators, boxes


def _say_boxes(plan: Plan, order: LaunchOrder, channel: Channel) -> bytes:
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
    ).encode()


def _hear_boxes(text: bytes, channel: Channel) -> dict[int, Region]:
    try:
        fields: dict[str, Any] = json.loads(text)
        return {
            int(task): tuple((int(start), int(stop)) for start, stop in region)
            for task, region in fields.items()
            if unpack_id(int(task)).rank == channel.target
        }
    except (ValueError, TypeError, AttributeError):
        raise TransportError(
            "a rank said something unintelligible about what it receives", rank=channel.target
        ) from None


def join(
    device: Device, name: bytes, members: int, member: int, label: str, deadline: float
) -> Communicator:
    """Join a communicator within the deadline: NCCL itself waits for the others without end."""
    found: list[Communicator] = []
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            device.use()
            found.append(device.communicator(name, members, member))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=wait, name="plancompiler-nccl", daemon=True)
    thread.start()
    await_threads([thread], deadline)
    if failed:
        raise failed[0]
    if not found:
        raise DeadlineError(
            f"{label} was not made within {deadline:g} s",
            hint="NCCL_DEBUG=INFO shows what NCCL waits for",
        )
    return found[0]
