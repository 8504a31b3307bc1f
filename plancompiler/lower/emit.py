"""Lowering, from a rank's task graph to its plan, and its step 5: the plan.

Five functions, each from one frozen type to the next: order → control edges → storage → offsets →
plan. `lower.text` shows what each makes.
"""

from __future__ import annotations

from collections.abc import Mapping

from plancompiler.ir import DType, NdSbp
from plancompiler.ir.task import CONTROL_SLOT, pack_register_id, unpack_id
from plancompiler.lower.control import control_tasks
from plancompiler.lower.offsets import PlacedTasks, place_storage
from plancompiler.lower.order import OrderedTasks, order_tasks
from plancompiler.lower.rank_task_graph import RankTaskGraph
from plancompiler.lower.storage import assign_storage
from plancompiler.plan.index import STREAMS
from plancompiler.plan.plan import Plan, RegisterDesc, Task


def emit_plan(graph: RankTaskGraph) -> Plan:
    """The rank's plan; pure, so that equal graphs give equal plans in every mode."""
    return write_plan(place_tasks(graph))


def place_tasks(graph: RankTaskGraph) -> PlacedTasks:
    """All steps but the last: where everything lies."""
    return place_storage(assign_storage(control_tasks(order_tasks(graph))))


def write_plan(placed: PlacedTasks) -> Plan:
    """The plan of tasks whose edges, storage and offsets are known."""
    ordered = placed.stored.ordered
    graph, parts = ordered.graph, ordered.parts
    waiting: dict[int, set[int]] = {}
    awaited: dict[int, set[int]] = {}
    for before, after in placed.stored.edges:
        waiting.setdefault(before, set()).add(after)
        awaited.setdefault(after, set()).add(before)
    return Plan(
        job=graph.rank_slice.job_name,
        rank=graph.rank,
        world_size=graph.rank_slice.world_size,
        seed=graph.rank_slice.seed,
        tasks=_tasks(ordered, waiting, awaited),
        registers=_registers(placed, waiting),
        remote_registers=graph.remote_registers,
        blocks=placed.blocks,
        communicators=graph.communicators,
        variables=graph.variables,
        outputs=graph.outputs,
        peak_live_bytes=placed.peak_live_bytes,
        schedule=parts.schedule,
        microbatches=parts.microbatches,
        segments=parts.segments,
        slots=parts.slots,
    )


def _control_register(task: int) -> int:
    fields = unpack_id(task)
    return pack_register_id(fields.rank, fields.family, fields.lane, CONTROL_SLOT)


def _registers(placed: PlacedTasks, waiting: Mapping[int, set[int]]) -> tuple[RegisterDesc, ...]:
    ordered, aliases = placed.stored.ordered, placed.stored.aliases
    graph, alias_of, overwrites = ordered.graph, aliases.alias_of, aliases.overwrites
    registers = []
    for group in placed.stored.groups:
        offset, nbytes = placed.offsets[group.root], group.nbytes // group.slots
        for key in group.members:
            register = graph.registers[key]
            registers.append(
                RegisterDesc(
                    id=key,
                    name=register.name,
                    shape=register.shape,
                    dtype=register.dtype,
                    sbp=register.sbp,
                    producer=register.producer,
                    consumers=(*graph.consumers.get(key, ()), *register.remote_consumers),
                    block=group.block,
                    offset=offset,
                    nbytes=nbytes,
                    register_count=group.slots,
                    inplace_of=alias_of.get(key, -1),
                    is_view=key in alias_of and key not in overwrites,
                    sync_id=register.sync_id,
                    per_microbatch=register.per_microbatch,
                )
            )
    for place, after in waiting.items():
        task = ordered.tasks[place]
        registers.append(
            RegisterDesc(
                id=_control_register(task.id),
                name=f"{task.name}:control",
                shape=(),
                dtype=DType.UINT8,
                sbp=NdSbp(()),
                producer=task.id,
                consumers=tuple(ordered.tasks[each].id for each in sorted(after)),
                block=-1,
                per_microbatch=ordered.parts.segments[ordered.segment[place]].kind.per_microbatch,
            )
        )
    registers.sort(key=lambda register: register.id)
    return tuple(registers)


def _tasks(
    ordered: OrderedTasks, waiting: Mapping[int, set[int]], awaited: Mapping[int, set[int]]
) -> tuple[Task, ...]:
    return tuple(
        Task(
            id=task.id,
            kind=task.kind,
            stream=STREAMS[ordered.streams[place]],
            name=task.name,
            inputs=task.inputs,
            outputs=task.outputs,
            spec=task.spec,
            controls_in=tuple(
                _control_register(ordered.tasks[before].id) for before in sorted(awaited[place])
            )
            if place in awaited
            else (),
            controls_out=(_control_register(task.id),) if place in waiting else (),
            source=task.source,
            segment=ordered.segment[place],
        )
        for place, task in enumerate(ordered.tasks)
    )
