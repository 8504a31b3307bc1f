"""What the rank of a plan publishes on its link: registers that peers read, and its groups."""

from __future__ import annotations

import hashlib
from collections import Counter

from plancompiler.executor.actor import shared_id
from plancompiler.executor.comm.link import (
    GroupDesc,
    GroupKey,
    Link,
    MemoryRegion,
    Publication,
    Read,
)
from plancompiler.executor.memory import Buffer
from plancompiler.ir.task import unpack_id
from plancompiler.plan.plan import (
    Block,
    CollectiveSpec,
    ComputeSpec,
    CopySpec,
    Plan,
    RegisterDesc,
    Task,
    communicator_of,
    exchanged,
)


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
        used = communicator_of(task.spec)
        if used is not None:
            ranks, occurrence = keys[used]
            peers |= set(ranks)
            for number in exchanged(task.spec, task.inputs, task.outputs):
                register = plan.register_by_id[number]
                if number in task.inputs or register.block in shared_blocks:
                    published[number] = register
            key = GroupKey(ranks, occurrence, str(task.stream))
            family = unpack_id(task.id).family
            families.setdefault(key, {}).setdefault(task.segment, []).append(family)
            lines.setdefault(key, []).append(f"{family} {_terms(plan, task)}")
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
        tuple(region_of(plan, register, first_step) for register in published.values()),
        groups,
        tuple(sorted(peers - {plan.rank})),
        tuple(reads),
    )


def _terms(plan: Plan, task: Task) -> str:
    """What members must agree on to run a task together."""
    spec = task.spec
    outputs = [plan.register_by_id[target] for target in task.outputs]
    if isinstance(spec, CollectiveSpec):
        return (
            f"{spec.primitive} {spec.reduction} "
            f"{spec.src_axis} {spec.dst_axis} {[str(output.dtype) for output in outputs]}"
        )
    assert isinstance(spec, ComputeSpec)
    lanes = outputs[-spec.lanes :]
    return f"{spec.kind} {[f'{lane.dtype}{list(lane.shape)}' for lane in lanes]}"


def region_of(plan: Plan, register: RegisterDesc, first_step: int) -> MemoryRegion:
    """A register as memory that peers may read."""
    return MemoryRegion(
        register.id,
        register.block,
        register.offset,
        register.nbytes,
        register.register_count,
        register.dtype,
        register.shape,
        register.name,
        shared_id(register),
        first_step * (plan.microbatches if register.per_microbatch else 1),
    )


def allocated(link: Link, block: Block) -> Buffer:
    """The memory of a plan's block."""
    return link.allocate(block.index, block.nbytes, block.shared, block.purpose)


def communicator_keys(plan: Plan) -> list[tuple[tuple[int, ...], int]]:
    """Ranks and occurrence of each communicator of a plan."""
    seen: Counter[tuple[int, ...]] = Counter()
    keys = []
    for communicator in plan.communicators:
        keys.append((communicator.ranks, seen[communicator.ranks]))
        seen[communicator.ranks] += 1
    return keys
