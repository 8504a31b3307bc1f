"""Recorded timelines of ranks, as Chrome trace events and as shares of time. Nothing here does I/O.

Times are nanoseconds of the host's monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from plancompiler.ir import UNKNOWN_SOURCE
from plancompiler.ir.shard import element_count, region_shape
from plancompiler.ir.task import TaskKind
from plancompiler.plan.plan import CollectiveSpec, ComputeSpec, CopySpec, Plan, Stream, Task

Times = np.ndarray[Any, np.dtype[np.int64]]
Spans = np.ndarray[Any, np.dtype[np.int64]]
"""Rows of (begin, end)."""

LABELS = "process_labels"
"""The metadata event whose label is the digest of a rank's plan."""

COMMUNICATION = frozenset(
    map(
        str,
        (
            TaskKind.COLLECTIVE_BOXING,
            TaskKind.COPY_COMM_NET,
            TaskKind.COPY_HD,
            TaskKind.SEND_RECV,
        ),
    )
)
"""Kinds of tasks that move data between ranks or devices."""


@dataclass(frozen=True, slots=True)
class TaskLabel:
    """What a timeline says about a task."""

    id: int
    name: str
    kind: str
    op: str
    """Kind of the op, or primitive of a collective; empty for other tasks."""
    stream: str
    source: str
    """The user's line; empty where it is not known."""
    runs: int
    """How often it runs in a step: once, or for each micro-batch."""
    input_bytes: int
    """Read by one action; of another rank's register the part that is read."""
    output_bytes: int


@dataclass(frozen=True, slots=True)
class RegisterLabel:
    """What a timeline says about a register with several slots."""

    name: str
    slots: int
    producer: int
    """Task id."""
    consumers: tuple[int, ...]
    """Task ids, of other ranks too."""


@dataclass(frozen=True)
class Timeline:
    """What one rank did and when. A row is a step, a column an action of a step: the tasks in plan
    order, each with its runs. A time of 0 means that it did not happen.
    """

    job: str
    rank: int
    first_step: int
    tasks: tuple[TaskLabel, ...]
    """In plan order."""
    registers: tuple[RegisterLabel, ...]
    begins: Times
    """[steps, actions of a step]"""
    ends: Times
    """[steps, actions of a step]"""
    cut_short: bool = False
    """Whether the run went on beyond what was recorded."""
    plan: str = ""
    """The digest of the rank's plan; empty where none ran as a whole."""

    @cached_property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """(position of the task, micro-batch) of each column."""
        return tuple(
            (position, run) for position, task in enumerate(self.tasks) for run in range(task.runs)
        )

    @cached_property
    def first_column(self) -> tuple[int, ...]:
        """The column of each task's first run."""
        return tuple(accumulate((task.runs for task in self.tasks), initial=0))

    def spans(self, chosen: Callable[[TaskLabel], bool]) -> Spans:
        """When actions of the chosen tasks ran, those that ended, by begin."""
        columns = [column for column, (at, _) in enumerate(self.columns) if chosen(self.tasks[at])]
        begins, ends = self.begins[:, columns], self.ends[:, columns]
        done = ends > 0
        spans = np.stack([begins[done], ends[done]], axis=1)
        return spans[np.argsort(spans[:, 0], kind="stable")]


def task_labels(plan: Plan) -> tuple[TaskLabel, ...]:
    """Labels of a plan's tasks, in plan order."""
    return tuple(
        TaskLabel(
            task.id,
            task.name,
            str(task.kind),
            _op(task),
            str(task.stream),
            "" if task.source == UNKNOWN_SOURCE else str(task.source),
            plan.microbatches if plan.segments[task.segment].kind.per_microbatch else 1,
            _input_bytes(plan, task),
            sum(plan.register_by_id[register].nbytes for register in task.outputs),
        )
        for task in plan.tasks
    )


def register_labels(plan: Plan) -> tuple[RegisterLabel, ...]:
    """Labels of a plan's registers with several slots."""
    return tuple(
        RegisterLabel(register.name, register.register_count, register.producer, register.consumers)
        for register in plan.registers
        if register.register_count > 1 and not register.is_control
    )


def _op(task: Task) -> str:
    if isinstance(task.spec, ComputeSpec):
        return task.spec.kind
    return str(task.spec.primitive) if isinstance(task.spec, CollectiveSpec) else ""


def _input_bytes(plan: Plan, task: Task) -> int:
    if isinstance(task.spec, CopySpec):
        remote = plan.remote_register_by_id[task.inputs[0]]
        return element_count(region_shape(task.spec.region)) * remote.dtype.itemsize
    return sum(plan.register_by_id[register].nbytes for register in task.inputs)


# --- Chrome trace events ------------------------------------------------------------------------


def chrome_events(
    timelines: Sequence[Timeline], origin: int | None = None
) -> Iterator[dict[str, Any]]:
    """Events of the Trace Event Format, which Perfetto and Chrome read: a process per rank, a
    thread per stream, a complete event per action, a counter per register with several slots.

    Times are microseconds since `origin`, by default the first action of all ranks. An action that
    did not end, because it failed or the run stopped, lasts until the last recorded moment.
    """
    recorded = [each for each in timelines if each.begins.any()]
    if origin is None:
        origin = min((int(each.begins[each.begins > 0].min()) for each in recorded), default=0)
    last = max((int(max(each.begins.max(), each.ends.max())) for each in recorded), default=0)
    for timeline in timelines:
        yield from _names(timeline)
    for timeline in recorded:
        yield from _actions(timeline, origin, last)
    where = {
        task.id: (timeline, position)
        for timeline in timelines
        for position, task in enumerate(timeline.tasks)
    }
    for timeline in recorded:
        for register in timeline.registers:
            yield from _free_slots(timeline, register, where, origin)


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    def name(what: str, value: object, thread: int = 0) -> dict[str, Any]:
        key = "labels" if what == LABELS else "name"
        key = "sort_index" if what.endswith("sort_index") else key
        return {
            "ph": "M",
            "name": what,
            "pid": timeline.rank,
            "tid": thread,
            "args": {key: value},
        }

    yield name("process_name", f"{timeline.job} rank {timeline.rank}")
    yield name("process_sort_index", timeline.rank)
    if timeline.plan:
        yield name(LABELS, timeline.plan)
    for stream, thread in _threads(timeline).items():
        yield name("thread_name", stream, thread)
        yield name("thread_sort_index", thread, thread)


_THREADS = {str(stream): thread for thread, stream in enumerate(Stream, start=1)}


def _threads(timeline: Timeline) -> dict[str, int]:
    """A number for each stream: the plan's have their own, a device's further ones follow."""
    used = {task.stream for task in timeline.tasks}
    threads = {stream: thread for stream, thread in _THREADS.items() if stream in used}
    further = sorted(used - threads.keys())
    return threads | {name: thread for thread, name in enumerate(further, len(_THREADS) + 1)}


def _actions(timeline: Timeline, origin: int, last: int) -> Iterator[dict[str, Any]]:
    rows, columns = np.nonzero(timeline.begins)
    order = np.argsort(timeline.begins[rows, columns], kind="stable")
    threads = _threads(timeline)
    for row, column in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
        position, microbatch = timeline.columns[column]
        task = timeline.tasks[position]
        begin, end = int(timeline.begins[row, column]), int(timeline.ends[row, column])
        args = {
            "kind": task.kind,
            "op": task.op,
            "step": timeline.first_step + row,
            "microbatch": microbatch,
            "input_bytes": task.input_bytes,
            "output_bytes": task.output_bytes,
            "source": task.source,
        }
        if not end:
            args["unfinished"] = True
        yield {
            "ph": "X",
            "name": task.name,
            "cat": task.kind,
            "pid": timeline.rank,
            "tid": threads[task.stream],
            "ts": (begin - origin) / 1e3,
            "dur": ((end or last) - begin) / 1e3,
            "args": args,
        }


def _free_slots(
    timeline: Timeline,
    register: RegisterLabel,
    where: Mapping[int, tuple[Timeline, int]],
    origin: int,
) -> Iterator[dict[str, Any]]:
    """Counts down when the producer starts a version, up when its last reader has ended."""
    changes = []
    producer = where[register.producer][1]
    for run in range(timeline.tasks[producer].runs):
        begins = timeline.begins[:, timeline.first_column[producer] + run]
        for row in np.flatnonzero(begins).tolist():
            changes.append((int(begins[row]), -1))
            ends = [_end(*where[task], row, run) for task in register.consumers if task in where]
            if ends and all(ends):
                changes.append((max(ends), 1))
    free = register.slots
    for time, change in sorted(changes):
        free += change
        yield {
            "ph": "C",
            "name": f"free slots of {register.name}",
            "pid": timeline.rank,
            "tid": 0,
            "ts": (time - origin) / 1e3,
            "args": {"free": free},
        }


def _end(timeline: Timeline, position: int, row: int, run: int) -> int:
    column = timeline.first_column[position] + min(run, timeline.tasks[position].runs - 1)
    return int(timeline.ends[row, column]) if row < len(timeline.ends) else 0


# --- shares of time -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankShare:
    """Where the time of a rank went, from its first action to its last, as parts of `seconds`.

    kernels + communication - both + waiting = 1.
    """

    rank: int
    seconds: float
    kernels: float
    """A task that computes runs, or one that moves data within the rank."""
    communication: float
    """A task that moves data between ranks runs, waiting for them to join in included."""
    both: float
    """Both at once: communication under computation."""
    waiting: float
    """No task runs: the rank waits for another, or for whoever asks it for steps."""


@dataclass(frozen=True, slots=True)
class TaskShare:
    """The time of the tasks of one name, over all ranks."""

    name: str
    kind: str
    op: str
    source: str
    actions: int
    seconds: float
    share: float
    """Of the time of all ranks."""


def rank_shares(timelines: Iterable[Timeline]) -> tuple[RankShare, ...]:
    """Where each rank's time went; ranks without any action are left out."""
    shares = []
    for timeline in timelines:
        moving = merged(timeline.spans(lambda task: task.kind in COMMUNICATION))
        working = merged(timeline.spans(lambda task: task.kind not in COMMUNICATION))
        every = np.concatenate([moving, working])
        total = int(every[:, 1].max() - every[:, 0].min()) if len(every) else 0
        if not total:
            continue
        kernels, communication = length(working), length(moving)
        both = common(working, moving)
        parts = (kernels, communication, both, total - kernels - communication + both)
        shares.append(RankShare(timeline.rank, total / 1e9, *(part / total for part in parts)))
    return tuple(shares)


def task_shares(timelines: Sequence[Timeline]) -> tuple[TaskShare, ...]:
    """Time by task name over all ranks, the longest first."""
    total = sum(share.seconds for share in rank_shares(timelines))
    sums: dict[tuple[str, str, str, str], list[int]] = {}
    for timeline in timelines:
        done = timeline.ends > 0
        times = np.where(done, timeline.ends - timeline.begins, 0).sum(axis=0).tolist()
        for (position, _), count, spent in zip(
            timeline.columns, done.sum(axis=0).tolist(), times, strict=True
        ):
            task = timeline.tasks[position]
            entry = sums.setdefault((task.name, task.kind, task.op, task.source), [0, 0])
            entry[0] += count
            entry[1] += spent
    shares = [
        TaskShare(*key, actions, spent / 1e9, spent / 1e9 / total if total else 0.0)
        for key, (actions, spent) in sums.items()
        if actions
    ]
    return tuple(sorted(shares, key=lambda each: -each.seconds))


def merged(spans: Spans) -> Spans:
    """The union of spans that are sorted by begin, as spans apart from each other."""
    if not len(spans):
        return spans
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.flatnonzero(np.concatenate([[True], spans[1:, 0] > reach[:-1]]))
    last = np.concatenate([first[1:] - 1, [len(spans) - 1]])
    return np.stack([spans[first, 0], reach[last]], axis=1)


def length(spans: Spans) -> int:
    """Nanoseconds that spans cover which are apart from each other."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def common(left: Spans, right: Spans) -> int:
    """Nanoseconds that both cover; each sorted, its spans apart from each other."""
    together = np.concatenate([left, right])
    union = merged(together[np.argsort(together[:, 0], kind="stable")])
    return length(left) + length(right) - length(union)
