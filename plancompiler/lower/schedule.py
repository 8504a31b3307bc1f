"""Streams and control edges: in which order a rank's tasks run, and what must wait besides data.

Plan order is the global order restricted to the rank. Control edges are added where memory is
overwritten: a variable's update waits for all readers of the old value, and a task on another
stream that fills storage which later registers share is held until their last user is done. The
last task of the compute stream, StepEnd, knows that all other streams have finished the step, so
that the next step finds its memory free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from plancompiler.ir import UNKNOWN_SOURCE
from plancompiler.ir.task import FAMILY_BITS, TaskKind, pack_task_id
from plancompiler.lower.rank_task_graph import RankTask, RankTaskGraph
from plancompiler.ops.registry import op_def
from plancompiler.plan.order import StepOrder
from plancompiler.plan.plan import Stream

STEP_END_FAMILY = (1 << FAMILY_BITS) - 1
"""The family number of StepEnd: after all others."""

STREAMS = (Stream.COMPUTE, Stream.COLLECTIVE, Stream.COPY, Stream.DATA)
COMPUTE = STREAMS.index(Stream.COMPUTE)
DATA = STREAMS.index(Stream.DATA)

_STREAM_OF_KIND = {
    TaskKind.INPUT: Stream.DATA,
    TaskKind.COLLECTIVE_BOXING: Stream.COLLECTIVE,
    TaskKind.COPY_COMM_NET: Stream.COPY,
}


def stream_of(task: RankTask) -> Stream:
    """The stream that runs a task: data sources may run ahead, transport beside compute."""
    if task.op_kind and op_def(task.op_kind).source:
        return Stream.DATA
    return _STREAM_OF_KIND.get(task.kind, Stream.COMPUTE)


@dataclass
class Schedule:
    """Tasks in plan order with their streams and predecessors; control edges are added to it."""

    tasks: tuple[RankTask, ...]
    streams: list[int]
    """Index into STREAMS per task."""
    position: dict[int, int]
    """Task id → place in plan order."""
    predecessors: list[list[int]]
    """Earlier tasks that a task waits for (data and control), by place."""
    controls: dict[int, dict[int, None]] = field(default_factory=dict)
    """Place of a task → places of those that wait for it by control."""

    def order(self) -> StepOrder:
        """What certainly happens before what, with the edges added so far."""
        return StepOrder(self.streams, self.predecessors)

    def add_control(self, before: int, after: int) -> None:
        """Let a task wait for an earlier one."""
        self.controls.setdefault(before, {})[after] = None
        self.predecessors[after].append(before)

    def users_of(self, graph: RankTaskGraph, registers: Iterable[int]) -> list[int]:
        """Places of all tasks of this rank that make or read one of the registers, in order."""
        found = set()
        for register in registers:
            description = graph.registers[register]
            found.add(self.position[description.producer])
            found.update(self.position[task] for task in description.consumers)
        return sorted(found)


def schedule_tasks(graph: RankTaskGraph) -> Schedule:
    """Plan order with data edges, and StepEnd at its end."""
    step_end = RankTask(
        id=pack_task_id(graph.rank, STEP_END_FAMILY),
        family=STEP_END_FAMILY,
        kind=TaskKind.STEP_END,
        name="step_end",
        op_kind="",
        inputs=(),
        outputs=(),
        spec=None,
        source=UNKNOWN_SOURCE,
    )
    tasks = (*graph.tasks, step_end)
    position = {task.id: place for place, task in enumerate(tasks)}
    predecessors = [
        list(
            dict.fromkeys(
                position[graph.registers[register].producer]
                for register in task.inputs
                if register in graph.registers
            )
        )
        for task in tasks
    ]
    streams = [STREAMS.index(stream_of(task)) for task in tasks]
    schedule = Schedule(tasks, streams, position, predecessors)
    _hold_late(schedule)
    return schedule


def _hold_late(schedule: Schedule) -> None:
    """Let late tasks on other streams wait for the compute task before them in plan order."""
    computed = -1
    for place, task in enumerate(schedule.tasks):
        if schedule.streams[place] == COMPUTE:
            computed = place
        elif task.late and computed >= 0:
            schedule.add_control(computed, place)


def guard_updates(schedule: Schedule, graph: RankTaskGraph, members: dict[int, list[int]]) -> None:
    """Make updates wait for all readers of the value they overwrite.

    `members` lists the registers on a variable's storage (its views) by the variable's register.
    """
    for place, task in enumerate(schedule.tasks):
        if not task.op_kind:
            continue
        for _, source in op_def(task.op_kind).mutates:
            for reader in schedule.users_of(graph, members[task.inputs[source]]):
                if reader < place and schedule.streams[reader] != schedule.streams[place]:
                    schedule.add_control(reader, place)


def close_step(schedule: Schedule) -> None:
    """Let StepEnd wait for the tails of the streams that it does not know to be done."""
    order = schedule.order()
    last = len(schedule.tasks) - 1
    for stream in range(len(order.counts)):
        if stream in (COMPUTE, DATA) or not order.counts[stream]:
            continue
        if order.clocks[last][stream] < order.counts[stream]:
            tail = max(place for place, on in enumerate(schedule.streams[:last]) if on == stream)
            schedule.add_control(tail, last)
