"""Step 3 of lowering: storage, what is to lie in memory: groups of registers with their slots.

Storage adds the last control edges: a task on another stream that fills bytes which later registers
alias is held until their last user is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from plancompiler.lower.aliases import Aliases, aliases_in_place, nbytes_of, slots_of
from plancompiler.lower.control import ControlledTasks
from plancompiler.lower.order import Edges, OrderedTasks
from plancompiler.lower.rank_task_graph import HOST, RankTaskGraph
from plancompiler.plan.order import StepOrder, covers
from plancompiler.plan.plan import exchanged

ARENA, VARIABLES, STAGING = range(3)
"""Block indices; every plan has the first two, and a device's plan with registers in host memory
the third. A block that another rank reads is shared as a whole: two arenas, one private and one
shared, could not lend each other their free bytes."""


class StorageGroup(NamedTuple):
    """Registers on the same bytes."""

    root: int
    members: tuple[int, ...]
    """All of them, the root first."""
    slots: int
    nbytes: int
    """All slots together."""
    block: int
    shared: bool
    """Whether other ranks read the bytes: by CopyCommNet, or as members of a collective."""


@dataclass(frozen=True)
class StoredTasks:
    """Tasks in plan order with all their control edges and the storage of what they make."""

    ordered: OrderedTasks
    edges: Edges
    """All of them."""
    holds: Edges
    """Those that storage adds."""
    order: StepOrder
    """What happens before what, with all edges."""
    aliases: Aliases
    groups: tuple[StorageGroup, ...]
    device: str
    """Device type of the rank: where its ops run."""


def assign_storage(controlled: ControlledTasks) -> StoredTasks:
    """The groups of the rank's registers, and what waits because of them."""
    ordered = controlled.ordered
    aliases = aliases_in_place(ordered, controlled.views, controlled.within)
    holds = hold_edges(ordered, aliases, controlled.order)
    edges = controlled.edges + holds
    registers = ordered.graph.registers
    device = _device_of(ordered.graph)
    shared = shared_registers(ordered.graph)
    groups = []
    for root, members in aliases.members.items():
        register = registers[root]
        slots = slots_of(ordered, members)
        block = ARENA
        if ordered.is_variable(root):
            block = VARIABLES
        elif device != HOST and register.device == HOST:
            block = STAGING
        groups.append(
            StorageGroup(
                root,
                members,
                slots,
                nbytes_of(register) * slots,
                block,
                not shared.isdisjoint(members),
            )
        )
    return StoredTasks(
        ordered,
        edges,
        holds,
        ordered.with_edges(edges) if holds else controlled.order,
        aliases,
        tuple(groups),
        device,
    )


def hold_edges(ordered: OrderedTasks, aliases: Aliases, order: StepOrder) -> Edges:
    """Keep a root's producer from filling the bytes again before the group's last users are done.

    Its own consumers give their credits back early when later registers alias the bytes. A producer
    that knows of the step before (through the compute stream) needs nothing; for others a control
    edge to the last user on each stream makes a credit of it. With several micro-batches only
    producers that know have groups.
    """
    edges: list[tuple[int, int]] = []
    if ordered.parts.schedule:
        return ()
    for root, members in aliases.members.items():
        if len(members) == 1 or ordered.is_variable(root):
            continue
        producer, users = ordered.maker[root], ordered.users(members)
        if covers(order.previous_clock(producer), order.clock_of(users)):
            continue
        last_on_stream = {ordered.streams[user]: user for user in users}
        edges += [(producer, user) for user in last_on_stream.values() if user != producer]
    return tuple(edges)


def shared_registers(graph: RankTaskGraph) -> frozenset[int]:
    """Registers that other ranks read, directly or in a collective."""
    return frozenset(
        register
        for task in graph.tasks
        for register in exchanged(task.spec, task.inputs, task.outputs)
    ).union(key for key, register in graph.registers.items() if register.remote_consumers)


def _device_of(graph: RankTaskGraph) -> str:
    return next(
        (
            placed.op.placement.device_type
            for placed in graph.rank_slice.ops
            if graph.rank in placed.op.placement
        ),
        HOST,
    )
