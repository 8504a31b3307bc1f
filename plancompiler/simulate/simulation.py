"""What came of a simulation: every action with its times, and figures about them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from plancompiler.errors import UsageError
from plancompiler.ir.pipeline import Segment
from plancompiler.plan.plan import Plan, Stream, Task


@dataclass(frozen=True, slots=True)
class Action:
    """One run of one task."""

    rank: int
    task: Task
    segment: Segment
    step: int
    microbatch: int
    """0 where the segment runs once per step."""
    begin: float
    """Seconds since the start of the simulation. Members of a collective begin together."""
    end: float

    @property
    def stream(self) -> Stream:
        return self.task.stream

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Run(NamedTuple):
    """One run of one task, as the simulator notes it."""

    rank: int
    task: Task
    step: int
    microbatch: int
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """All actions of all simulated ranks."""

    plans: Mapping[int, Plan]
    runs: Sequence[Run]
    """In the order in which they were begun."""

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """All of them, in order of their beginning."""
        plans = self.plans
        return tuple(
            Action(
                run.rank,
                run.task,
                plans[run.rank].segments[run.task.segment],
                run.step,
                run.microbatch,
                run.begin,
                run.end,
            )
            for run in sorted(self.runs, key=lambda run: run.begin)
        )

    @property
    def makespan(self) -> float:
        """Seconds from the start to the end of the last action."""
        return max(map(attrgetter("end"), self.runs), default=0.0)

    @property
    def last_step(self) -> int:
        """The number of the last step that was simulated."""
        return max((run.step for run in self.runs), default=0)

    def busy(self) -> dict[tuple[int, Stream], float]:
        """(rank, stream) → seconds in which a task ran there, for every stream of every rank."""
        busy = {
            (rank, task.stream): 0.0 for rank, plan in self.plans.items() for task in plan.tasks
        }
        for run in self.runs:
            busy[run.rank, run.task.stream] += run.end - run.begin
        return busy

    def bubble_fraction(self, step: int = 0, ranks: Collection[int] | None = None) -> float:
        """The share of the micro-batch part of a step in which compute streams idle: 0 to 1.

        Counted are actions on compute streams, in segments that run once per micro-batch, that take
        time. The *span* lasts from the first beginning of one to the last end of one, over all
        ranks. The fraction is 1 - busy / (span * n), where n is the number of ranks that have any,
        and busy their seconds added up. With `ranks`, n and busy are those of these ranks; the span
        stays that of all. A UsageError where nothing is counted.
        """
        counted = [
            run
            for run in self.runs
            if run.step == step
            and run.end > run.begin
            and run.task.stream is Stream.COMPUTE
            and self.plans[run.rank].segments[run.task.segment].kind.per_microbatch
        ]
        chosen = [run for run in counted if ranks is None or run.rank in ranks]
        if not chosen:
            raise UsageError(
                "a bubble is measured where compute tasks of micro-batches take time",
                got=f"none in step {step}" + (f" on ranks {sorted(ranks)}" if ranks else ""),
            )
        span = max(run.end for run in counted) - min(run.begin for run in counted)
        busy = sum(run.end - run.begin for run in chosen)
        return 1.0 - busy / (span * len({run.rank for run in chosen}))


def chrome_trace(simulation: Simulation) -> str:
    """The actions as JSON in the Trace Event Format, which Chrome and Perfetto read: a process per
    rank, a thread per stream, times in microseconds. What takes no time is left out.
    """
    threads = {stream: number for number, stream in enumerate(Stream, start=1)}
    events: list[dict[str, object]] = []
    for rank, plan in sorted(simulation.plans.items()):
        events.append(_name("process_name", rank, 0, f"{plan.job} rank {rank}"))
        used = {task.stream for task in plan.tasks}
        events += [
            _name("thread_name", rank, thread, str(stream))
            for stream, thread in threads.items()
            if stream in used
        ]
    events += [
        {
            "ph": "X",
            "name": action.task.name,
            "cat": str(action.task.kind),
            "pid": action.rank,
            "tid": threads[action.stream],
            "ts": action.begin * 1e6,
            "dur": action.seconds * 1e6,
            "args": {
                "segment": str(action.segment),
                "step": action.step,
                "microbatch": action.microbatch,
            },
        }
        for action in simulation.actions
        if action.seconds > 0
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _name(what: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
