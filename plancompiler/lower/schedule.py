"""Streams and control edges: in which order a rank's tasks run, and what must wait besides data.

Plan order is the global order restricted to the rank. Control edges are added where memory is
overwritten: a variable's update waits for all readers of the old value, and a task on another
stream that fills storage which later registers share is held until their last user is done. The
last task of each segment on the compute stream, its StepEnd, knows that all other streams have
finished the segment, so that whatever runs next finds the segment's memory free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from plancompiler.ir import UNKNOWN_SOURCE
from plancompiler.ir.pipeline import WHOLE_STEP
from plancompiler.ir.task import FAMILY_BITS, TaskKind, pack_task_id
from plancompiler.lower.rank_task_graph import RankTask, RankTaskGraph
from plancompiler.lower.segments import RankSegments, segments_of
from plancompiler.ops.registry import op_def
from plancompiler.plan.order import StepOrder
from plancompiler.plan.plan import Stream

STEP_END_FAMILY = (1 << FAMILY_BITS) - 1
"""The family number of StepEnd: after all others."""

STREAMS = (Stream.COMPUTE, Stream.COLLECTIVE, Stream.COPY, Stream.DATA, Stream.COPY_HD)
COMPUTE = STREAMS.index(Stream.COMPUTE)
COPY = STREAMS.index(Stream.COPY)
DATA = STREAMS.index(Stream.DATA)

_STREAM_OF_KIND = {
    TaskKind.INPUT: Stream.DATA,
    TaskKind.COLLECTIVE_BOXING: Stream.COLLECTIVE,
    TaskKind.COPY_COMM_NET: Stream.COPY,
    TaskKind.SEND_RECV: Stream.COPY,
    TaskKind.COPY_HD: Stream.COPY_HD,
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
    parts: RankSegments
    segment: list[int]
    """Segment of each task, as numbered in `parts`; plan order is segment by segment."""
    controls: dict[int, dict[int, None]] = field(default_factory=dict)
    """Place of a task → places of those that wait for it by control."""
    _order: StepOrder | None = None
    """With all edges; None where some were added since."""

    def order(self) -> StepOrder:
        """What certainly happens before what, with the edges added so far."""
        if self._order is None:
            self._order = StepOrder(self.streams, self.predecessors)
        return self._order

    def knows_segment_free(self, order: StepOrder, place: int) -> bool:
        """Whether a task, when it starts, knows that all slots before its own have ended.

        The compute stream does; others do where they wait for it within the segment.
        """
        if self.streams[place] == COMPUTE:
            return True
        return order.clocks[place][COMPUTE] > self._computed_before[self.segment[place]]

    def knows_last_version_free(
        self, order: StepOrder, place: int, *, per_microbatch: bool
    ) -> bool:
        """Whether a task, when it makes a register anew, knows the users of the version that was
        in its slot to be done, on all streams.
        """
        if per_microbatch:
            return self.knows_segment_free(order, place)
        return self.streams[place] == COMPUTE or order.clocks[place][COMPUTE] > 0

    @cached_property
    def _computed_before(self) -> list[int]:
        """Per segment, the compute tasks in earlier segments."""
        counts = [0] * (len(self.parts.segments) + 1)
        for stream, segment in zip(self.streams, self.segment, strict=True):
            if stream == COMPUTE:
                counts[segment + 1] += 1
        return list(accumulate(counts))

    def add_control(self, before: int, after: int) -> None:
        """Let a task wait for an earlier one."""
        self.controls.setdefault(before, {})[after] = None
        self.predecessors[after].append(before)
        self._order = None

    def users_of(self, graph: RankTaskGraph, registers: Iterable[int]) -> list[int]:
        """Places of all tasks of this rank that make or read one of the registers, in order."""
        found = set()
        for register in registers:
            description = graph.registers[register]
            found.add(self.position[description.producer])
            found.update(self.position[task] for task in description.consumers)
        return sorted(found)


def schedule_tasks(graph: RankTaskGraph) -> Schedule:
    """Plan order with data edges, and a StepEnd at the end of each segment."""
    parts = segments_of(graph)
    by_segment: list[list[RankTask]] = [[] for _ in parts.segments]
    for task in graph.tasks:
        by_segment[parts.number[task.segment]].append(task)
    for number, tasks_of_segment in enumerate(by_segment):
        tasks_of_segment.append(_step_end(graph.rank, number, parts))
    tasks = tuple(task for tasks_of_segment in by_segment for task in tasks_of_segment)
    segment = [number for number, one in enumerate(by_segment) for _ in one]
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
    schedule = Schedule(tasks, streams, position, predecessors, parts, segment)
    _hold_late(schedule)
    return schedule


def _step_end(rank: int, number: int, parts: RankSegments) -> RankTask:
    """The end of a segment; lanes tell those of one rank apart."""
    named = parts.segments[number]
    return RankTask(
        id=pack_task_id(rank, STEP_END_FAMILY, number),
        family=STEP_END_FAMILY,
        kind=TaskKind.STEP_END,
        name="step_end" if named == WHOLE_STEP else f"{named} end",
        op_kind="",
        inputs=(),
        outputs=(),
        spec=None,
        source=UNKNOWN_SOURCE,
    )


def _hold_late(schedule: Schedule) -> None:
    """Let late tasks on other streams wait for the compute task before them in plan order."""
    computed, segment = -1, 0
    for place, task in enumerate(schedule.tasks):
        if schedule.segment[place] != segment:
            computed, segment = -1, schedule.segment[place]
        if schedule.streams[place] == COMPUTE:
            computed = place
        elif task.late and computed >= 0:
            schedule.add_control(computed, place)


def guard_updates(schedule: Schedule, graph: RankTaskGraph, members: dict[int, list[int]]) -> None:
    """Make updates wait for all readers of the value they overwrite.

    `members` lists the registers on a variable's storage (its views) by the variable's register.
    Readers in earlier segments are done: the compute stream has seen those segments end.
    """
    for place, task in enumerate(schedule.tasks):
        if not task.op_kind:
            continue
        for _, source in op_def(task.op_kind).mutates:
            for reader in schedule.users_of(graph, members[task.inputs[source]]):
                if (
                    reader < place
                    and schedule.segment[reader] == schedule.segment[place]
                    and schedule.streams[reader] != schedule.streams[place]
                ):
                    schedule.add_control(reader, place)


def close_segments(schedule: Schedule) -> None:
    """Let each StepEnd wait for the tails of the streams that it does not know to be done."""
    order = schedule.order()
    tails: dict[int, int] = {}
    for place, task in enumerate(schedule.tasks):
        stream = schedule.streams[place]
        if task.kind is TaskKind.STEP_END:
            for other, tail in sorted(tails.items()):
                if order.clocks[place][other] <= order.positions[tail]:
                    schedule.add_control(tail, place)
            tails.clear()
        elif stream not in (COMPUTE, DATA):
            tails[stream] = place
