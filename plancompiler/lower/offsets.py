"""Step 4 of lowering: offsets, where in the rank's blocks of memory every group of registers lies.

The arena's bytes serve one group after another (`lower.memory`). Variables live from step to step
and lie one after another; so does what a device's rank has in host memory, because copies to and
from the device run beside everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plancompiler.lower.memory import StorageRequest, align, plan_memory
from plancompiler.lower.rank_task_graph import HOST
from plancompiler.lower.storage import ARENA, STAGING, VARIABLES, StorageGroup, StoredTasks
from plancompiler.plan.index import COMPUTE
from plancompiler.plan.plan import Block


@dataclass(frozen=True)
class PlacedTasks:
    """Stored tasks with an offset for each group."""

    stored: StoredTasks
    offsets: Mapping[int, int]
    """Root → bytes from the start of its block."""
    blocks: tuple[Block, ...]
    peak_live_bytes: int


def place_storage(stored: StoredTasks) -> PlacedTasks:
    """An offset for every group, and the blocks that hold them."""
    group_of = {group.root: group for group in stored.groups}
    variables = [group_of[variable.register] for variable in stored.ordered.graph.variables]
    staging = [group for group in stored.groups if group.block == STAGING]
    memory = plan_memory(
        stored.order,
        COMPUTE,
        [_request(stored, group) for group in stored.groups if group.block == ARENA],
    )
    variable_offsets, variable_bytes = place_in_a_row(variables)
    staging_offsets, staging_bytes = place_in_a_row(staging)
    # What other ranks map is host memory; of a device they map nothing.
    mapped = {
        group.block
        for group in stored.groups
        if group.shared and (stored.device == HOST or group.block == STAGING)
    }
    blocks = [
        Block(ARENA, "arena", ARENA in mapped, memory.nbytes, stored.device),
        Block(VARIABLES, "variables", VARIABLES in mapped, variable_bytes, stored.device),
    ]
    if staging_bytes:
        blocks.append(Block(STAGING, "staging", STAGING in mapped, staging_bytes))
    return PlacedTasks(
        stored,
        memory.offsets | variable_offsets | staging_offsets,
        tuple(blocks),
        memory.peak_live_bytes,
    )


def place_in_a_row(groups: list[StorageGroup]) -> tuple[dict[int, int], int]:
    """Offset per group, one after another, and the bytes of all."""
    offsets, size = {}, 0
    for group in groups:
        offsets[group.root] = size
        size += align(group.nbytes)
    return offsets, size


def _request(stored: StoredTasks, group: StorageGroup) -> StorageRequest:
    """By lifetime within a segment; of its own where it crosses ranks, slots or segments."""
    ordered = stored.ordered
    registers = ordered.graph.registers
    producer, users = ordered.maker[group.root], tuple(ordered.users(group.members))
    segment = ordered.segment[producer]
    repeated = ordered.parts.segments[segment].kind.per_microbatch
    # What is collected over micro-batches is kept between the slots of its segment.
    local = registers[group.root].per_microbatch == repeated and (
        len(ordered.parts.segments) == 1 or all(ordered.segment[user] == segment for user in users)
    )
    return StorageRequest(
        key=group.root,
        nbytes=group.nbytes,
        users=users,
        producers=(producer,),
        dedicated=any(registers[member].remote_consumers for member in group.members)
        or group.slots > 1
        or not local
        or not ordered.knows_segment_free(stored.order, producer),
        area=segment,
    )
