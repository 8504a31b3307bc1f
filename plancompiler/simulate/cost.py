"""What tasks and messages cost in a simulation: seconds, by rank and task."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from plancompiler.ir.pipeline import SegmentKind
from plancompiler.ir.task import TaskKind, rank_of
from plancompiler.plan.plan import Plan, Stream, Task

Cost = Callable[[int, Task], float]
"""(rank, task) → seconds of one action. Of a collective the dearest member counts for all."""

Latency = Callable[[int, int], float]
"""(from rank, to rank) → seconds that a notice takes."""

Wake = Callable[[int, Stream], float]
"""(rank, stream) → seconds until the stream goes on once it is told what it waited for."""

Uses = Callable[[int, Task], Sequence[tuple[Hashable, float]]]
"""(rank, task) → what it shares with others, such as a link or a host's cores, and the part of it
that it uses while nobody else does. Tasks that together would use more than the whole of something
take as many times longer, as long as they do."""

FREE_KINDS = frozenset(
    {
        TaskKind.VARIABLE,
        TaskKind.INPUT,
        TaskKind.OUTPUT,
        TaskKind.BOXING_IDENTITY,
        TaskKind.STEP_END,
    }
)
"""Kinds of tasks that do nothing to speak of."""


def unit_cost(rank: int, task: Task) -> float:
    """One second for every task that does something."""
    return 0.0 if task.kind in FREE_KINDS else 1.0


def no_latency(sender: int, receiver: int) -> float:
    """Notices are there at once."""
    return 0.0


def no_wake(rank: int, stream: Stream) -> float:
    """Streams go on at once."""
    return 0.0


def no_uses(rank: int, task: Task) -> tuple[()]:
    """Nothing is shared."""
    return ()


def slot_cost(plans: Mapping[int, Plan], seconds: Mapping[SegmentKind, float]) -> Cost:
    """A slot of a micro-batch takes what its segment's kind takes, transport and the rest nothing:
    the cost model of papers on pipeline schedules.

    All of a slot's time is that of one compute task: the last one before the slot's last send to
    another rank, or the last of all where it sends nothing. So it begins when what it needs has
    arrived, and what it makes arrives elsewhere when it ends. A segment of forward and backward
    takes the sum of both.
    """
    seconds_of_task: dict[int, float] = {}
    for plan in plans.values():
        for number, segment in enumerate(plan.segments):
            if segment.kind.per_microbatch:
                seconds_of_task[_main_task(plan, number).id] = _seconds_of(segment.kind, seconds)
    return lambda rank, task: seconds_of_task.get(task.id, 0.0)


def _seconds_of(kind: SegmentKind, seconds: Mapping[SegmentKind, float]) -> float:
    if kind is SegmentKind.FORWARD_BACKWARD and kind not in seconds:
        return seconds[SegmentKind.FORWARD] + seconds[SegmentKind.BACKWARD]
    return seconds[kind]


def _main_task(plan: Plan, segment: int) -> Task:
    """The compute task that stands for a whole segment (which ends with a StepEnd task)."""
    tasks = [task for task in plan.tasks if task.segment == segment]
    sent = {
        register.producer
        for register in plan.registers
        if register.per_microbatch
        and any(rank_of(each) != plan.rank for each in register.consumers)
    }
    sends = [position for position, task in enumerate(tasks) if task.id in sent]
    stop = sends[-1] + 1 if sends else len(tasks)
    computes = [task for task in tasks if task.stream is Stream.COMPUTE]
    working = [
        task
        for task in tasks[:stop]
        if task.stream is Stream.COMPUTE
        and task.kind not in (TaskKind.STEP_END, TaskKind.COLLECTIVE_BOXING)
    ]
    return working[-1] if working else computes[-1]
