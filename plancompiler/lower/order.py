"""Step 1 of lowering: plan order, streams, and what each task waits for because of data.

Plan order is the global order restricted to the rank, segment by segment. A StepEnd on the compute
stream ends each segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from plancompiler.ir import UNKNOWN_SOURCE
from plancompiler.ir.pipeline import WHOLE_STEP
from plancompiler.ir.task import FAMILY_BITS, TaskKind, pack_task_id
from plancompiler.lower.rank_task_graph import RankTask, RankTaskGraph
from plancompiler.lower.segments import RankSegments, segments_of
from plancompiler.ops.registry import op_def
from plancompiler.plan.index import COMPUTE, STREAMS
from plancompiler.plan.order import StepOrder
from plancompiler.plan.plan import Stream

STEP_END_FAMILY = (1 << FAMILY_BITS) - 1
"""The family number of StepEnd: after all others."""


_STREAM_OF_KIND = {
    TaskKind.INPUT: Stream.DATA,
    TaskKind.COPY_COMM_NET: Stream.COPY,
    TaskKind.SEND_RECV: Stream.COPY,
    TaskKind.COPY_HD: Stream.COPY_HD,
}

_NUMBER = {stream: number for number, stream in enumerate(STREAMS)}

Edges = tuple[tuple[int, int], ...]
"""(place of a task, place of a later one that waits for it)."""


def stream_of(task: RankTask) -> Stream:
    """The stream that runs a task: data sources may run ahead, transport beside compute.

    Of collectives the graph says it, so that all members decide alike.
    """
    if task.stream is not None:
        return task.stream
    if task.op_kind and op_def(task.op_kind).source:
        return Stream.DATA
    return _STREAM_OF_KIND.get(task.kind, Stream.COMPUTE)


@dataclass(frozen=True)
class OrderedTasks:
    """The tasks of a rank in plan order. A task is known by its place in it."""

    graph: RankTaskGraph
    tasks: tuple[RankTask, ...]
    streams: tuple[int, ...]
    """Index into STREAMS per task."""
    place: Mapping[int, int]
    """Task id → place in plan order."""
    maker: Mapping[int, int]
    """Register → place of the task that makes it."""
    predecessors: tuple[tuple[int, ...], ...]
    """Earlier tasks that make what a task reads."""
    parts: RankSegments
    segment: tuple[int, ...]
    """Segment of each task, as numbered in `parts`."""

    def with_edges(self, edges: Edges) -> StepOrder:
        """What certainly happens before what, with control edges besides the data."""
        predecessors = list(self.predecessors)
        for before, after in edges:
            predecessors[after] = (*predecessors[after], before)
        return StepOrder(self.streams, predecessors)

    def users(self, registers: Iterable[int]) -> list[int]:
        """Places of all tasks of this rank that make or read one of the registers, in order."""
        place, consumers = self.place, self.graph.consumers
        places: set[int] = set()
        for register in registers:
            places.add(self.maker[register])
            for task in consumers.get(register, ()):
                places.add(place[task])
        return sorted(places)

    def is_variable(self, register: int) -> bool:
        """Whether a register holds a variable as it was before the step's update."""
        return self.tasks[self.maker[register]].kind is TaskKind.VARIABLE

    def knows_segment_free(self, order: StepOrder, place: int) -> bool:
        """Whether a task, when it starts, knows that all slots before its own have ended.

        The compute stream does; others do where they wait for it within the segment.
        """
        if self.streams[place] == COMPUTE:
            return True
        return order.clocks[place][COMPUTE] > self._computed_before[self.segment[place]]

    def knows_last_version_free(self, order: StepOrder, register: int) -> bool:
        """Whether the task that makes a register anew knows the users of the version that was in
        its slot to be done, on all streams.
        """
        place = self.maker[register]
        if self.graph.registers[register].per_microbatch:
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


def order_tasks(graph: RankTaskGraph) -> OrderedTasks:
    """The graph's tasks in plan order, with a StepEnd at the end of each segment."""
    parts = segments_of(graph)
    by_segment: list[list[RankTask]] = [[] for _ in parts.segments]
    for task in graph.tasks:
        by_segment[parts.number[task.segment]].append(task)
    for number, tasks_of_segment in enumerate(by_segment):
        tasks_of_segment.append(_step_end(graph.rank, number, parts))
    tasks = tuple(task for tasks_of_segment in by_segment for task in tasks_of_segment)
    place = {task.id: place for place, task in enumerate(tasks)}
    makers = {key: place[register.producer] for key, register in graph.registers.items()}
    predecessors = [
        tuple(dict.fromkeys([makers[register] for register in task.inputs if register in makers]))
        for task in tasks
    ]
    return OrderedTasks(
        graph,
        tasks,
        tuple(_NUMBER[stream_of(task)] for task in tasks),
        place,
        makers,
        tuple(predecessors),
        parts,
        tuple(number for number, one in enumerate(by_segment) for _ in one),
    )


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
