"""Records when each action of a run began and ended, and writes it as a trace file.

Each rank has a `Recorder`, which wraps the callables of its tasks where they are bound, so that a
run without one pays nothing. Two clock readings of every action go to fixed cells of a file mapped
into memory: they are there for the reader even if the rank's process is killed. A `Recording` owns
the folder of those files and the trace file made of them.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import Any

import numpy as np
from safetensors import SafetensorError

from plancompiler.errors import ExecutionError, UsageError, WireFormatError
from plancompiler.executor.temporary_folder import TemporaryFolder
from plancompiler.executor.timeline import (
    RegisterLabel,
    TaskLabel,
    Timeline,
    chrome_events,
    register_labels,
    task_labels,
)
from plancompiler.ir import Job
from plancompiler.ir.closing import Closing
from plancompiler.ir.pipeline import MOST
from plancompiler.ir.strict_json import JsonObject, parse_json
from plancompiler.ir.whole_file import (
    check_writable,
    named_file,
    naming_output,
    replace_file,
    write_whole,
)
from plancompiler.plan.arrays import arrays_from_bytes, arrays_to_bytes
from plancompiler.plan.digest import plan_digest
from plancompiler.plan.plan import Plan, Task

EVENTS = 1_000_000
"""The most actions that a run records, over all its ranks."""

_HEAD = 2
"""Cells before the first action; the first says whether the recording was cut short."""
_CELL = 8
"""Bytes of a cell."""
_REGISTERS_PER_TASK = 256
"""More registers with several slots no task makes."""
_LATEST = 1 << 61
"""Nanoseconds; a clock that starts in 1970 shows them in 2043."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")

_log = logging.getLogger(__name__)

Run = Callable[[int], None]


class Recorder:
    """Records the actions of one rank's plan into files of `folder`, from `first_step` on.

    Every action of a step has two cells, begin and end, and a step follows another. Streams write
    to different cells, so they need no lock. `streams` are the names of tasks' streams, by task id,
    where they are not the plan's. Raises ExecutionError where the files cannot be made.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        first_step: int,
        streams: Mapping[int, str] | None = None,
    ) -> None:
        labels = task_labels(plan)
        if streams is not None:
            labels = tuple(replace(label, stream=streams[label.id]) for label in labels)
        firsts = accumulate((label.runs for label in labels), initial=0)
        self._actions = {
            label.id: (first, label.runs) for label, first in zip(labels, firsts, strict=False)
        }
        """Task id -> its first action in a step, and how many it has."""
        actions = max(1, sum(label.runs for label in labels))
        steps = max(1, EVENTS // (actions * plan.world_size))
        self._step_cells = 2 * actions
        self._size = _HEAD + self._step_cells * steps
        self._first_step = first_step
        header = _header(
            plan.job, plan.rank, first_step, labels, register_labels(plan), plan_digest(plan)
        )
        try:
            self._map = _mapped(folder / f"rank_{plan.rank}.times", self._size * _CELL)
            write_whole(folder / f"rank_{plan.rank}.json", (json.dumps(header).encode(),))
        except OSError as error:
            raise ExecutionError(
                "a rank cannot record its timeline",
                rank=plan.rank,
                got=f"{folder}: {error.strerror or error}",
                hint="recordings lie in the temporary folder (TMPDIR) until the run ends; they "
                "need room there",
            ) from error
        self._cells = memoryview(self._map).cast("q")

    def wrap(self, task: Task, run: Run | None) -> Run:
        """A task's callable, recorded. A task without work leaves a moment."""
        cells, clock, size, stride = self._cells, monotonic_ns, self._size, self._step_cells
        first, runs = self._actions[task.id]
        start = _HEAD + 2 * first - self._first_step * stride

        work = run if run is not None else _no_work

        def record(version: int) -> None:
            step, microbatch = divmod(version, runs)
            cell = start + step * stride + 2 * microbatch
            if cell < size:
                cells[cell] = clock()
                work(version)
                cells[cell + 1] = clock()
            else:
                cells[0] = 1
                work(version)

        return record

    def note(self, task: int, version: int, begin: int, end: int) -> None:
        """Record that a task's action ran at these times, which somebody else read."""
        first, runs = self._actions[task]
        step, microbatch = divmod(version, runs)
        cell = _HEAD + 2 * (first + microbatch) + (step - self._first_step) * self._step_cells
        if cell < self._size:
            self._cells[cell : cell + 2] = memoryview(array("q", (begin, end)))
        else:
            self._cells[0] = 1

    def close(self) -> None:
        """Let go of the file, once no task runs any more."""
        self._cells.release()
        self._map.close()


def _header(
    job: str,
    rank: int,
    first_step: int,
    tasks: tuple[TaskLabel, ...],
    registers: tuple[RegisterLabel, ...],
    plan: str,
) -> dict[str, Any]:
    return {
        "job": job,
        "rank": rank,
        "first_step": first_step,
        "tasks": list(map(asdict, tasks)),
        "registers": list(map(asdict, registers)),
        "plan": plan,
    }


def _no_work(version: int) -> None:
    """What a task without work does."""


def _mapped(path: Path, nbytes: int) -> mmap.mmap:
    with replace_file(path) as file:
        # Blocks are taken now: a full disk is an error here, and would be a signal later.
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return mmap.mmap(file.fileno(), nbytes)


class Recording(Closing):
    """What a session records: a temporary folder, and the trace file that is written at the end.

    `trace` None only records, for `timelines`. The file says what `about` has of the run. Raises
    UsageError where the file cannot be written, OutputError where there is no place to record.
    """

    def __init__(self, trace: Path | None = None, about: Mapping[str, str] | None = None) -> None:
        self._path = trace
        self._about = about
        check_writable(trace, "the trace file")
        with naming_output("a recording", "the temporary folder"):
            self._folder = TemporaryFolder("plancompiler-trace-")
        self._open = True

    @property
    def folder(self) -> Path:
        """Where the ranks' recorders put their files."""
        return self._folder.path

    def timelines(self) -> tuple[Timeline, ...]:
        """What was recorded so far, by rank."""
        if not self._open:
            raise UsageError("the recording is closed", hint="read the timelines before it ends")
        timelines = [_read(path) for path in self.folder.glob("rank_*.json")]
        return tuple(sorted(timelines, key=lambda timeline: timeline.rank))

    def close(self) -> None:
        """Write the trace and remove the folder; after the ranks have stopped. Safe to call again.

        Raises OutputError, with the folder removed, where the trace cannot be written any more.
        """
        if not self._open:
            return
        try:
            if self._path is not None:
                write_trace(self._path, self.timelines(), self._about)
        finally:
            self._open = False
            self._folder.close()


def about_run(job: Job, backend: str) -> dict[str, str]:
    """What a trace file says of the run itself, so that a calibration can learn from it: the text
    of the job, and how its ranks shared a host, as `threads` or as `processes`.
    """
    return {"job": str(job), "backend": backend}


def write_trace(
    path: Path, timelines: Iterable[Timeline], about: Mapping[str, str] | None = None
) -> None:
    """Write timelines as one JSON object in the Trace Event Format, an event per line, and `about`
    the run as its metadata.

    What is not in them, as a run took too many actions, is logged as a warning. Raises OutputError
    where the file cannot be written.
    """
    timelines = tuple(timelines)
    cut_short = [len(timeline.begins) for timeline in timelines if timeline.cut_short]
    if cut_short:
        _log.warning(
            "the trace holds the first %d steps only, which is as many as fit into %d actions",
            min(cut_short),
            EVENTS,
        )
    with naming_output("the timeline", path), named_file(path) as file:
        metadata = f'"otherData": {json.dumps(dict(about))}, ' if about else ""
        file.write(f'{{"displayTimeUnit": "ms", {metadata}"traceEvents": ['.encode())
        separator = "\n"
        for event in chrome_events(timelines):
            file.write((separator + json.dumps(event)).encode())
            separator = ",\n"
        file.write(b"\n]}\n")


def _read(path: Path) -> Timeline:
    header = JsonObject(parse_json(path.read_bytes(), "a recording"), f"the recording {path}")
    tasks, registers = _labels(header)
    cells = np.fromfile(path.with_suffix(".times"), np.int64)
    actions = sum(task.runs for task in tasks)
    if len(cells) < _HEAD or (len(cells) - _HEAD) % (2 * max(1, actions)):
        raise WireFormatError(
            "the times of a recording do not fit its tasks",
            got=f"{path}: {len(cells)} cells",
            expected=f"{_HEAD}, and a multiple of {2 * max(1, actions)}",
        )
    times = cells[_HEAD:].reshape(-1, max(1, actions), 2)[:, :actions]
    used = np.flatnonzero(times.any(axis=(1, 2)))
    times = times[: used[-1] + 1 if len(used) else 0]
    return Timeline(
        header.text("job"),
        header.number("rank"),
        header.number("first_step"),
        tasks,
        registers,
        times[..., 0],
        times[..., 1],
        bool(cells[0]),
        header.text("plan"),
    )


def _labels(header: JsonObject) -> tuple[tuple[TaskLabel, ...], tuple[RegisterLabel, ...]]:
    """What a header says of tasks and registers. Whatever is made of them takes time and memory in
    proportion to the recorded actions.
    """
    tasks = tuple(
        TaskLabel(
            each.number("id"),
            each.text("name"),
            each.text("kind"),
            each.text("op"),
            each.text("stream"),
            each.text("source"),
            each.number("runs", 1, MOST),
            each.number("input_bytes"),
            each.number("output_bytes"),
        )
        for each in header.objects("tasks")
    )
    if len({task.id for task in tasks}) != len(tasks):
        raise WireFormatError(f"{header.where} lists a task twice")
    free = {task.id: _REGISTERS_PER_TASK for task in tasks}
    registers = []
    for each in header.objects("registers"):
        producer = each.number("producer")
        free[producer] = free.get(producer, 0) - 1
        if free[producer] < 0:
            raise each.refused("producer", producer, "a task with so many registers")
        consumers = dict.fromkeys(each.numbers("consumers"))
        registers.append(
            RegisterLabel(each.text("name"), each.number("slots", 1), producer, tuple(consumers))
        )
    return tasks, tuple(registers)


# --- timelines that go to another host ------------------------------------------------------------


def recorded_bytes(folder: Path, rank: int) -> bytes:
    """What a rank has recorded in a folder so far, for `timelines_from_bytes`."""
    timeline = _read(folder / f"rank_{rank}.json")
    header = _header(
        timeline.job,
        timeline.rank,
        timeline.first_step,
        timeline.tasks,
        timeline.registers,
        timeline.plan,
    ) | {
        "cut_short": timeline.cut_short,
        "clock": _clock(),
        # What the clock's readings lack to nanoseconds since 1970.
        "epoch": time_ns() - monotonic_ns(),
    }
    arrays: dict[str, np.ndarray[Any, np.dtype[Any]]] = {
        "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
        "begins": np.ascontiguousarray(timeline.begins),
        "ends": np.ascontiguousarray(timeline.ends),
    }
    return arrays_to_bytes(arrays)


def timelines_from_bytes(recorded: Iterable[bytes]) -> tuple[Timeline, ...]:
    """The timelines of several ranks, by rank. Their times are nanoseconds since 1970: ranks that
    read one clock stay as exact to each other as it is, others as their hosts' times of day are.

    Raises WireFormatError for what is no timeline.
    """
    epochs: dict[str, int] = {}
    timelines = [_timeline_from_bytes(data, epochs) for data in recorded]
    return tuple(sorted(timelines, key=lambda timeline: timeline.rank))


def _timeline_from_bytes(data: bytes, epochs: dict[str, int]) -> Timeline:
    """The timeline in bytes, moved by the epoch of its clock: the first that was told of it."""
    what = "a rank's timeline"
    try:
        arrays = arrays_from_bytes(data)
        text, begins, ends = arrays["header"], arrays["begins"], arrays["ends"]
    except (KeyError, TypeError, ValueError, OverflowError, SafetensorError) as error:
        raise WireFormatError("this is no timeline of a rank", got=repr(error)) from error
    header = JsonObject(parse_json(text.tobytes(), what), what)
    tasks, registers = _labels(header)
    actions = sum(task.runs for task in tasks)
    shape = (len(begins) if begins.ndim else 0, actions)
    if (
        not begins.dtype == ends.dtype == np.int64
        or not begins.shape == ends.shape == shape
        or actions > max(EVENTS, begins.size)
    ):
        raise WireFormatError(
            "a timeline has times of other actions than it lists",
            got=f"{begins.dtype}{list(begins.shape)} and {ends.dtype}{list(ends.shape)}",
            expected=f"int64{list(shape)}",
        )
    if max(begins.max(initial=0), ends.max(initial=0)) > _LATEST:
        raise WireFormatError("a timeline has a time that no clock shows")
    epoch = epochs.setdefault(header.text("clock"), header.number("epoch", -_LATEST, _LATEST))
    return Timeline(
        header.text("job"),
        header.number("rank"),
        header.number("first_step"),
        tasks,
        registers,
        np.where(begins > 0, begins + epoch, 0),
        np.where(ends > 0, ends + epoch, 0),
        header.flag("cut_short"),
        header.text("plan"),
    )


def _clock() -> str:
    """A name that two processes share if they read the same clock."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return f"{os.uname().nodename} {os.getpid()}"
