"""Step 2 of lowering: control edges, where a task must wait besides for its data.

Transport that is asked for late waits for the compute task before it. A variable's update waits for
all readers of the old value, through views of it too. The StepEnd of each segment waits for what it
does not know to be done on other streams, so that whatever runs next finds the segment's memory
free. Edges that follow from storage alone come with the next step.
"""

from __future__ import annotations

from dataclasses import dataclass

from plancompiler.ir.task import TaskKind
from plancompiler.lower.aliases import Aliases, aliases_of_views
from plancompiler.lower.order import Edges, OrderedTasks
from plancompiler.ops.registry import op_def
from plancompiler.plan.index import COMPUTE, DATA
from plancompiler.plan.order import StepOrder


@dataclass(frozen=True)
class ControlledTasks:
    """Tasks in plan order with their control edges."""

    ordered: OrderedTasks
    views: Aliases
    """Registers that are views of others, and variables with their updates."""
    edges: Edges
    within: StepOrder
    """What happens before what, without the edges to the ends of segments."""
    order: StepOrder
    """The same with them."""


def control_tasks(ordered: OrderedTasks) -> ControlledTasks:
    """The tasks with all control edges that do not follow from who writes over whose bytes."""
    edges = late_edges(ordered)
    order = ordered.with_edges(edges)
    views = aliases_of_views(ordered, order)
    updates = update_edges(ordered, views)
    within = ordered.with_edges(edges + updates) if updates else order
    ends = end_edges(ordered, within)
    edges = (*edges, *updates, *ends)
    return ControlledTasks(
        ordered, views, edges, within, ordered.with_edges(edges) if ends else within
    )


def late_edges(ordered: OrderedTasks) -> Edges:
    """From the compute task before a late task on another stream, in its segment, to that task."""
    edges = []
    computed, segment = -1, 0
    for place, task in enumerate(ordered.tasks):
        if ordered.segment[place] != segment:
            computed, segment = -1, ordered.segment[place]
        if ordered.streams[place] == COMPUTE:
            computed = place
        elif task.late and computed >= 0:
            edges.append((computed, place))
    return tuple(edges)


def update_edges(ordered: OrderedTasks, views: Aliases) -> Edges:
    """From all readers of a value, on other streams, to the update that writes over it.

    Readers in earlier segments are done: the compute stream has seen those segments end.
    """
    return tuple(
        (reader, place)
        for place, task in enumerate(ordered.tasks)
        if task.op_kind
        for _, source in op_def(task.op_kind).mutates
        for reader in ordered.users(views.members[task.inputs[source]])
        if reader < place
        and ordered.segment[reader] == ordered.segment[place]
        and ordered.streams[reader] != ordered.streams[place]
    )


def end_edges(ordered: OrderedTasks, order: StepOrder) -> Edges:
    """From the tails of streams that a StepEnd does not know to be done to that StepEnd."""
    edges = []
    tails: dict[int, int] = {}
    for place, task in enumerate(ordered.tasks):
        stream = ordered.streams[place]
        if task.kind is TaskKind.STEP_END:
            for other, tail in sorted(tails.items()):
                if order.clocks[place][other] <= order.positions[tail]:
                    edges.append((tail, place))
            tails.clear()
        elif stream not in (COMPUTE, DATA):
            tails[stream] = place
    return tuple(edges)
