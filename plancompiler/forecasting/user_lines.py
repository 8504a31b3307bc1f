"""What each of the user's source lines takes of a step, over all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from plancompiler.costs import Machine
from plancompiler.forecasting.task_time import TaskTimes
from plancompiler.forecasting.traffic import received_of_task
from plancompiler.ir import SourceLine
from plancompiler.plan.memory_report import memory_report
from plancompiler.plan.plan import CollectiveSpec, Plan


@dataclass(slots=True)
class LineFigures:
    """What comes of one line, added up over all ranks."""

    source: str
    """`file:line`; empty for tasks that no line made, such as the end of a step."""
    tasks: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    """By primitive; each counts once for each of its members."""
    received_bytes: float = 0.0
    """Payload that comes from other ranks in a step."""
    memory_bytes: int = 0
    """Variables, and what is alive when the arena of its rank is fullest."""
    seconds: float = 0.0
    """Of its tasks in a step, whether others hide them or not."""

    def json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "source": self.source,
            "tasks": self.tasks,
            "collectives": dict(sorted(self.collectives.items())),
            "received_bytes": self.received_bytes,
            "memory_bytes": self.memory_bytes,
            "seconds": self.seconds,
        }


def figures_by_line(
    plans: Iterable[tuple[Plan, int]], machine: Machine, times: TaskTimes
) -> tuple[LineFigures, ...]:
    """By source line, in the order in which they first come: of plans, each with the number of
    ranks that do alike.
    """
    lines: dict[str, LineFigures] = {}
    for plan, count in plans:
        for task in plan.tasks:
            line = _line(lines, written(task.source))
            each = plan.segments[task.segment].kind.per_microbatch
            runs = count * (plan.microbatches if each else 1)
            line.tasks += count
            if isinstance(task.spec, CollectiveSpec):
                line.collectives[str(task.spec.primitive)] += count
            moved = sum(nbytes for _, nbytes in received_of_task(plan, task, machine))
            line.received_bytes += runs * moved
            line.seconds += runs * times.seconds(plan, task)
        for alive in memory_report(plan).at_peak:
            line = _line(lines, written(plan.tasks[alive.first].source))
            line.memory_bytes += count * alive.nbytes
        for variable in plan.variables:
            register = plan.register_by_id[variable.register]
            line = _line(lines, written(plan.task_by_id[register.producer].source))
            line.memory_bytes += count * register.nbytes
    return tuple(lines.values())


def written(source: SourceLine) -> str:
    """A line as users read it; empty where none is known."""
    return str(source) if source.file else ""


def _line(lines: dict[str, LineFigures], source: str) -> LineFigures:
    return lines.setdefault(source, LineFigures(source))
