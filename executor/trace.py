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
import tempfile
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from time import monotonic_ns, time_ns
from types import TracebackType
from typing import Any, Self, TextIO

import numpy as np
from safetensors import SafetensorError

from plancompiler.errors import ExecutionError, UsageError, WireFormatError
from plancompiler.executor.timeline import (
    RegisterLabel,
    TaskLabel,
    Timeline,
    Times,
    chrome_events,
    register_labels,
    task_labels,
)
from plancompiler.plan.arrays import arrays_from_bytes, arrays_to_bytes
from plancompiler.plan.plan import Plan, Task

EVENTS = 1_000_000
"""The most actions that a run records, over all its ranks."""

_HEAD = 2
"""Cells before the first action; the first says whether the recording was cut short."""
_CELL = 8
"""Bytes of a cell."""

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
        header = {
            "job": plan.job,
            "rank": plan.rank,
            "first_step": first_step,
            "tasks": [asdict(label) for label in labels],
            "registers": [asdict(label) for label in register_labels(plan)],
        }
        try:
            self._map = _mapped(folder / f"rank_{plan.rank}.times", self._size * _CELL)
            unfinished = folder / f"rank_{plan.rank}.labels"
            unfinished.write_text(json.dumps(header))
            unfinished.replace(unfinished.with_suffix(".json"))
        except OSError as error:
            raise ExecutionError(
                "a rank cannot record its timeline", rank=plan.rank, got=str(error)
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


def _no_work(version: int) -> None:
    """What a task without work does."""


def _mapped(path: Path, nbytes: int) -> mmap.mmap:
    with path.open("w+b") as file:
        # Blocks are taken now: a full disk is an error here, and would be a signal later.
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return mmap.mmap(file.fileno(), nbytes)


class Recording:
    """What a session records: a temporary folder, and the trace file that is written at the end.

    `trace` None only records, for `timelines`. Raises UsageError where the file cannot be written;
    what was in it before is gone from then on.
    """

    def __init__(self, trace: Path | None = None) -> None:
        self._path = trace
        self._file = None if trace is None else open_trace(trace)
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="plancompiler-trace-")
        except BaseException:
            if self._file is not None:
                self._file.close()
            raise
        self._open = True

    @property
    def folder(self) -> Path:
        """Where the ranks' recorders put their files."""
        return Path(self._folder.name)

    def timelines(self) -> tuple[Timeline, ...]:
        """What was recorded so far, by rank."""
        if not self._open:
            raise UsageError("the recording is closed", hint="read the timelines before it ends")
        found = [_read(path) for path in self.folder.glob("rank_*.json")]
        return tuple(sorted(found, key=lambda timeline: timeline.rank))

    def close(self) -> None:
        """Write the trace and remove the folder; after the ranks have stopped. Safe to call again.

        A trace that cannot be written any more is logged as an error: it must not hide how the run
        ended.
        """
        if not self._open:
            return
        try:
            if self._file is not None:
                with self._file as file:
                    write_trace(file, self.timelines())
        except OSError as error:
            _log.error("the trace could not be written to %s: %s", self._path, error)
        finally:
            self._open = False
            self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_trace(path: Path) -> TextIO:
    """A file for `write_trace`; what was in it before is gone. UsageError where it cannot be."""
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            "the trace file cannot be written",
            got=f"{str(path)!r}: {error.strerror}",
            expected="a file in a folder that exists and is writable",
        ) from None


def write_trace(file: TextIO, timelines: Iterable[Timeline]) -> None:
    """Write timelines as one JSON object in the Trace Event Format, an event per line.

    What is not in them, as a run took too many actions, is logged as a warning.
    """
    timelines = tuple(timelines)
    cut_short = [len(timeline.begins) for timeline in timelines if timeline.cut_short]
    if cut_short:
        _log.warning(
            "the trace holds the first %d steps only, which is as many as fit into %d actions",
            min(cut_short),
            EVENTS,
        )
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    separator = "\n"
    for event in chrome_events(timelines):
        file.write(separator + json.dumps(event))
        separator = ",\n"
    file.write("\n]}\n")


def _read(path: Path) -> Timeline:
    header = json.loads(path.read_text())
    cells = np.fromfile(path.with_suffix(".times"), np.int64)
    actions = sum(task["runs"] for task in header["tasks"])
    times = cells[_HEAD:].reshape(-1, max(1, actions), 2)[:, :actions]
    used = np.flatnonzero(times.any(axis=(1, 2)))
    times = times[: used[-1] + 1 if len(used) else 0]
    return _timeline(header, times[..., 0], times[..., 1], bool(cells[0]))


def _timeline(header: Mapping[str, Any], begins: Times, ends: Times, cut_short: bool) -> Timeline:
    return Timeline(
        header["job"],
        header["rank"],
        header["first_step"],
        tuple(TaskLabel(**label) for label in header["tasks"]),
        tuple(
            RegisterLabel(**{**label, "consumers": tuple(label["consumers"])})
            for label in header["registers"]
        ),
        begins,
        ends,
        cut_short,
    )


# --- timelines that go to another host ------------------------------------------------------------


def recorded_bytes(folder: Path, rank: int) -> bytes:
    """What a rank has recorded in a folder so far, for `timelines_from_bytes`."""
    timeline = _read(folder / f"rank_{rank}.json")
    header = {
        "job": timeline.job,
        "rank": timeline.rank,
        "first_step": timeline.first_step,
        "tasks": [asdict(label) for label in timeline.tasks],
        "registers": [asdict(label) for label in timeline.registers],
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
    found: list[Timeline] = []
    epochs: dict[str, int] = {}
    for data in recorded:
        try:
            arrays = arrays_from_bytes(data)
            header = json.loads(arrays["header"].tobytes())
            epoch = epochs.setdefault(str(header["clock"]), int(header["epoch"]))
            begins, ends = (
                np.where(arrays[name] > 0, arrays[name] + epoch, 0) for name in ("begins", "ends")
            )
            timeline = _timeline(header, begins, ends, bool(header["cut_short"]))
        except (KeyError, TypeError, ValueError, SafetensorError) as error:
            raise WireFormatError("this is no timeline of a rank", got=repr(error)) from error
        if not begins.shape == ends.shape == (len(begins), len(timeline.columns)):
            raise WireFormatError("a timeline has times of other actions", rank=timeline.rank)
        found.append(timeline)
    return tuple(sorted(found, key=lambda timeline: timeline.rank))


def _clock() -> str:
    """A name that two processes share if they read the same clock."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return f"{os.uname().nodename} {os.getpid()}"
