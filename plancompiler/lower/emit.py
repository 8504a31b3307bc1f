"""`emit_plan`: from a rank's task graph to its plan, with streams, control edges and memory."""

from __future__ import annotations

from collections.abc import Container

from plancompiler.ir import DType, NdSbp
from plancompiler.ir.task import CONTROL_SLOT, TaskKind, pack_register_id, unpack_id
from plancompiler.lower.memory import MemoryPlan, StorageRequest, align, plan_memory
from plancompiler.lower.rank_task_graph import HOST, RankTaskGraph
from plancompiler.lower.schedule import (
    COMPUTE,
    STREAMS,
    Schedule,
    close_segments,
    guard_updates,
    schedule_tasks,
)
from plancompiler.lower.storage import (
    Storage,
    group_in_place,
    group_views,
    hold_roots,
    nbytes_of,
    slots_of,
)
from plancompiler.plan.plan import (
    Block,
    Communicator,
    OutputDesc,
    Plan,
    RegisterDesc,
    Task,
    VariableDesc,
)

ARENA, VARIABLES, STAGING = range(3)
"""Block indices; every plan has the first two, and a device's plan with registers in host memory
the third. A block that another rank reads is shared as a whole: two arenas, one private and one
shared, could not lend each other their free bytes."""


def emit_plan(graph: RankTaskGraph) -> Plan:
    """The rank's plan; pure, so that equal graphs give equal plans in every mode."""
    schedule = schedule_tasks(graph)
    storage = group_views(schedule, graph)
    guard_updates(schedule, graph, storage.members)
    group_in_place(schedule, graph, storage, schedule.order())
    close_segments(schedule)
    hold_roots(schedule, graph, storage)
    shared = _shared_roots(graph, storage)
    counts = {root: slots_of(schedule, graph, members) for root, members in storage.members.items()}
    device = _device_of(graph)
    in_host_memory = _place_in_host_memory(graph, storage, counts, device)
    host_bytes = sum(
        align(nbytes_of(graph.registers[root]) * counts[root]) for root in in_host_memory
    )
    memory = _place_arena(schedule, graph, storage, counts, in_host_memory)
    variable_offsets, variable_bytes = _place_variables(graph)
    registers = _register_descs(
        schedule, graph, storage, counts, memory, variable_offsets, in_host_memory
    )
    parts = schedule.parts
    return Plan(
        job=graph.rank_slice.job_name,
        rank=graph.rank,
        world_size=graph.rank_slice.world_size,
        seed=graph.rank_slice.seed,
        tasks=_tasks(schedule),
        registers=registers,
        remote_registers=graph.remote_registers,
        blocks=_blocks(
            device, memory.nbytes, variable_bytes, host_bytes, shared, storage, in_host_memory
        ),
        communicators=tuple(
            Communicator(ranks, families) for ranks, families in graph.communicators
        ),
        variables=tuple(
            VariableDesc(
                name=variable.name,
                register=variable.register,
                shape=variable.shape,
                dtype=variable.dtype,
                placement=variable.placement,
                sbp=variable.sbp,
                region=variable.region,
                attrs=variable.op.op.attrs,
            )
            for variable in graph.variables
        ),
        outputs=tuple(OutputDesc(name, task, register) for name, task, register in graph.outputs),
        peak_live_bytes=memory.peak_live_bytes,
        schedule=parts.schedule,
        microbatches=parts.microbatches,
        segments=parts.segments,
        slots=parts.slots,
    )


def _device_of(graph: RankTaskGraph) -> str:
    """Device type of the rank: where its ops run."""
    return next(
        (
            placed.op.placement.device_type
            for placed in graph.rank_slice.ops
            if graph.rank in placed.op.placement
        ),
        HOST,
    )


def _place_in_host_memory(
    graph: RankTaskGraph, storage: Storage, counts: dict[int, int], device: str
) -> dict[int, int]:
    """Offsets of what a device's rank has in host memory: what it copies to and from other ranks.

    These share no bytes, because copies to and from the device run beside everything else.
    """
    offsets: dict[int, int] = {}
    if device == HOST:
        return offsets
    size = 0
    for root in storage.members:
        register = graph.registers[root]
        if register.device == HOST:
            offsets[root] = size
            size += align(nbytes_of(register) * counts[root])
    return offsets


def _blocks(
    device: str,
    arena_bytes: int,
    variable_bytes: int,
    host_bytes: int,
    shared: frozenset[int],
    storage: Storage,
    in_host_memory: Container[int],
) -> tuple[Block, ...]:
    """The rank's memory. What other ranks map is host memory; of a device they map nothing."""
    mapped = device == HOST
    blocks = [
        Block(ARENA, "arena", mapped and bool(shared - storage.variables), arena_bytes, device),
        Block(
            VARIABLES,
            "variables",
            mapped and bool(shared & storage.variables),
            variable_bytes,
            device,
        ),
    ]
    if host_bytes:
        crossing = any(root in in_host_memory for root in shared)
        blocks.append(Block(STAGING, "staging", crossing, host_bytes))
    return tuple(blocks)


def _shared_roots(graph: RankTaskGraph, storage: Storage) -> frozenset[int]:
    """Groups whose bytes other ranks read: by CopyCommNet, or as members of a collective."""
    collective = {
        register
        for task in graph.tasks
        if task.kind is TaskKind.COLLECTIVE_BOXING
        for register in (*task.inputs, *task.outputs)
    }
    return frozenset(
        root
        for root, members in storage.members.items()
        if any(
            member in collective or graph.registers[member].remote_consumers for member in members
        )
    )


def _place_arena(
    schedule: Schedule,
    graph: RankTaskGraph,
    storage: Storage,
    counts: dict[int, int],
    in_host_memory: Container[int],
) -> MemoryPlan:
    """Offsets of all but variables: by lifetime within a segment, of their own where they cross."""
    order = schedule.order()
    requests = []
    for root, members in storage.members.items():
        if root in storage.variables or root in in_host_memory:
            continue
        register = graph.registers[root]
        producer = schedule.position[register.producer]
        users = tuple(schedule.users_of(graph, members))
        crossing = any(graph.registers[member].remote_consumers for member in members)
        segment = schedule.segment[producer]
        repeated = schedule.parts.segments[segment].kind.per_microbatch
        # What is collected over micro-batches is kept between the slots of its segment.
        local = {schedule.segment[user] for user in users} == {segment} and (
            register.per_microbatch == repeated
        )
        requests.append(
            StorageRequest(
                key=root,
                nbytes=nbytes_of(register) * counts[root],
                users=users,
                producers=(producer,),
                dedicated=crossing
                or counts[root] > 1
                or not local
                or not schedule.knows_segment_free(order, producer),
                area=segment,
            )
        )
    return plan_memory(order, COMPUTE, requests)


def _place_variables(graph: RankTaskGraph) -> tuple[dict[int, int], int]:
    """Offset per variable, one after another, and the bytes of all."""
    offsets, size = {}, 0
    for variable in graph.variables:
        offsets[variable.register] = size
        size += align(nbytes_of(graph.registers[variable.register]))
    return offsets, size


def _control_register(task: int) -> int:
    fields = unpack_id(task)
    return pack_register_id(fields.rank, fields.family, fields.lane, CONTROL_SLOT)


def _register_descs(
    schedule: Schedule,
    graph: RankTaskGraph,
    storage: Storage,
    counts: dict[int, int],
    memory: MemoryPlan,
    variable_offsets: dict[int, int],
    in_host_memory: dict[int, int],
) -> tuple[RegisterDesc, ...]:
    found = []
    for key, register in graph.registers.items():
        root = storage.root[key]
        if root in variable_offsets:
            block, offset = VARIABLES, variable_offsets[root]
        elif root in in_host_memory:
            block, offset = STAGING, in_host_memory[root]
        else:
            block, offset = ARENA, memory.offsets[root]
        found.append(
            RegisterDesc(
                id=key,
                name=register.name,
                shape=register.shape,
                dtype=register.dtype,
                sbp=register.sbp,
                producer=register.producer,
                consumers=(*register.consumers, *register.remote_consumers),
                block=block,
                offset=offset,
                nbytes=nbytes_of(register),
                register_count=counts[root],
                inplace_of=storage.taken_from.get(key, -1),
                is_view=key in storage.taken_from and key not in storage.overwrites,
                sync_id=register.sync_id,
                per_microbatch=register.per_microbatch,
            )
        )
    for before, waiting in schedule.controls.items():
        task = schedule.tasks[before]
        found.append(
            RegisterDesc(
                id=_control_register(task.id),
                name=f"{task.name}:control",
                shape=(),
                dtype=DType.UINT8,
                sbp=NdSbp(()),
                producer=task.id,
                consumers=tuple(schedule.tasks[after].id for after in sorted(waiting)),
                block=-1,
                per_microbatch=schedule.parts.segments[
                    schedule.segment[before]
                ].kind.per_microbatch,
            )
        )
    found.sort(key=lambda register: register.id)
    return tuple(found)


def _tasks(schedule: Schedule) -> tuple[Task, ...]:
    waits: dict[int, list[int]] = {}
    for before, waiting in schedule.controls.items():
        for after in waiting:
            waits.setdefault(after, []).append(before)
    return tuple(
        Task(
            id=task.id,
            kind=task.kind,
            stream=STREAMS[schedule.streams[place]],
            name=task.name,
            inputs=task.inputs,
            outputs=task.outputs,
            spec=task.spec,
            controls_in=tuple(
                _control_register(schedule.tasks[before].id)
                for before in sorted(waits.get(place, ()))
            ),
            controls_out=(_control_register(task.id),) if place in schedule.controls else (),
            source=task.source,
            segment=schedule.segment[place],
        )
        for place, task in enumerate(schedule.tasks)
    )
