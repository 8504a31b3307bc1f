"""`with pc.profile() as p:` measures a rank's eager ops, collectives and compiled functions.

The block has plans and prepared ops of its own, which read the clock around calls and kernels; ops
outside are those that they were and pay nothing. A compiled function that is called inside is
compiled once more, with a recorder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import Any

import numpy as np

from plancompiler.eager.agreement import gathered
from plancompiler.eager.dispatch import RunMode
from plancompiler.eager.op_plan import OpPlan
from plancompiler.eager.spec import Specs, TensorSpec
from plancompiler.eager.tensor import DistTensor
from plancompiler.eager.world import World, current_world
from plancompiler.errors import UsageError
from plancompiler.executor.comm.flight_recorder import CommRecord
from plancompiler.executor.timeline import COMMUNICATION, Timeline, chrome_events
from plancompiler.executor.trace import EVENTS, Recording
from plancompiler.ir.shard import element_count
from plancompiler.ir.source import user_line
from plancompiler.ir.whole_file import named_file, naming_output

OP, KERNEL, COLLECTIVE, TASK = "op", "kernel", "collective", "task"
_THREADS = {OP: 1001, KERNEL: 1002, COLLECTIVE: 1003}
"""Numbers of a trace's threads, apart from those of the streams of compiled functions."""
_WIDTH = 56
"""Letters of a table's first column."""


@dataclass(eq=False, slots=True)
class ProfileRow:
    """What the runs of one kind and shape took on this rank."""

    what: str
    """`op` for calls, `kernel`, `collective`, or `task` for those of compiled functions."""
    name: str
    """The kind of the op or kernel (` backward` marks the gradient of an op), the collective, or
    the compiled function and its task."""
    shapes: str
    """This rank's parts of operands and results; of a collective its bytes and group."""
    source: str = ""
    """The user's line that led to a collective, or to a task."""
    calls: int = 0
    seconds: float = 0.0
    """From begin to end; of an op what it does inside, and of a collective waiting, included."""
    kernel_seconds: float = 0.0
    """Of that, in kernels; 0 for collectives and other tasks that move data between ranks."""
    nbytes: int = 0
    """Read and written by kernels; given to a collective by this rank."""
    waited: dict[int, float] = field(default_factory=dict)
    """Seconds that a collective waited here for each rank that came later than this one; empty
    before `Profile.compare_ranks`."""


Event = tuple[ProfileRow, int, int]
"""A row, and begin and end of one of its runs in nanoseconds of the monotonic clock."""


class Profile:
    """What ran in a block: `rows`, a table (`print(p)`), a trace (`p.write_trace(file)`)."""

    def __init__(self, world: World) -> None:
        self.rank = world.rank
        self.seconds = 0.0
        """From the beginning of the block to its end."""
        self.cut_short = False
        """Whether more ran than is kept; the rows hold the first part then."""
        self._world = world
        self._events: list[Event] = []
        self._records: list[CommRecord] = []
        self._known: dict[tuple[str, ...], ProfileRow] = {}
        self._run_bytes: dict[ProfileRow, int] = {}
        self._recordings: list[tuple[Recording, Callable[[], None]]] = []
        self._timelines: tuple[Timeline, ...] = ()
        self._epoch = time_ns() - monotonic_ns()
        self._begin = monotonic_ns()

    @property
    def rows(self) -> tuple[ProfileRow, ...]:
        """One for each kind and shape, the longest first."""
        rows = (row for row in self._known.values() if row.calls)
        return tuple(sorted(rows, key=lambda row: -row.seconds))

    # --- while the block runs -------------------------------------------------------------------

    def timed(self, function: Callable[..., Any], row: ProfileRow) -> Callable[..., Any]:
        """A function whose runs are noted in a row."""
        events, clock = self._events, monotonic_ns

        def run(*args: Any) -> Any:
            begin = clock()
            result = function(*args)
            if len(events) < EVENTS:
                events.append((row, begin, clock()))
            return result

        return run

    def row(self, what: str, name: str, shapes: str, source: str = "") -> ProfileRow:
        """The one row of these."""
        key = what, name, shapes, source
        row = self._known.get(key)
        if row is None:
            row = self._known[key] = ProfileRow(*key)
        return row

    def kernel_row(self, kind: str, specs: Specs) -> ProfileRow:
        """The row of a kernel on parts of these tensors."""
        row = self.row(KERNEL, kind, _shown(specs))
        self._run_bytes[row] = sum(
            element_count(spec.local_shape) * spec.numpy_dtype.itemsize for spec in specs
        )
        return row

    def recording(self, close: Callable[[], None]) -> Path:
        """A folder where the run of a compiled function records itself; `close` ends the run."""
        recording = Recording()
        self._recordings.append((recording, close))
        return recording.folder

    def observe(self, record: CommRecord) -> None:
        """Note a collective that begins."""
        if len(self._records) < EVENTS:
            self._records.append(record)

    def finish(self) -> None:
        """Add everything up, at the end of the block."""
        self.seconds = (monotonic_ns() - self._begin) / 1e9
        timelines: list[Timeline] = []
        for recording, close in self._recordings:
            timelines += recording.timelines()
            close()
            recording.close()
        self._timelines = tuple(timelines)
        self.cut_short = (
            len(self._events) >= EVENTS
            or len(self._records) >= EVENTS
            or any(each.cut_short for each in timelines)
        )
        for row, begin, end in self._events:
            row.calls += 1
            row.seconds += (end - begin) / 1e9
        for call, (row, begin, end) in _calls_of_kernels(self._events):
            nbytes, seconds = self._run_bytes[row], (end - begin) / 1e9
            for each in (row, call):
                if each is not None:
                    each.nbytes += nbytes
                    each.kernel_seconds += seconds
        self._records = [record for record in self._records if record.end]
        for record in self._records:
            row = self._row_of(record)
            row.calls += 1
            row.nbytes += record.nbytes
            row.seconds += record.end - record.begin
        for timeline in timelines:
            self._add_timeline(timeline)

    def _row_of(self, record: CommRecord) -> ProfileRow:
        shapes = f"{record.nbytes} bytes among {', '.join(map(str, record.group))}"
        return self.row(COLLECTIVE, record.call, shapes, str(record.source))

    def _add_timeline(self, timeline: Timeline) -> None:
        ended = timeline.ends > 0
        times = np.where(ended, timeline.ends - timeline.begins, 0).sum(axis=0) / 1e9
        for (position, _), count, spent in zip(
            timeline.columns, ended.sum(axis=0).tolist(), times.tolist(), strict=True
        ):
            task = timeline.tasks[position]
            name = f"{timeline.job}: {task.op or task.kind}"
            nbytes = task.input_bytes + task.output_bytes
            row = self.row(TASK, name, f"{nbytes} bytes", task.source)
            row.calls += count
            row.seconds += spent
            row.nbytes += nbytes * count
            if task.kind not in COMMUNICATION:
                row.kernel_seconds += spent

    # --- what it shows --------------------------------------------------------------------------

    def compare_ranks(self) -> None:
        """Find out for whom this rank's collectives waited: a collective over the world.

        Every rank of the world calls it after its block. A rank that begins a collective before
        another member waits for the last one of them; clocks of different hosts count as equal.
        """
        if self._world.size == 1:
            return
        own = [
            [list(record.group), record.stream, record.sequence, record.begin]
            for record in self._records
        ]
        group = self._world.comm.context(tuple(range(self._world.size)))
        rows = gathered(group, np.frombuffer(json.dumps(own).encode(), np.uint8))
        last: dict[tuple[object, ...], tuple[float, int]] = {}
        for rank, row in enumerate(rows):
            for members, stream, sequence, begin in json.loads(row.tobytes()):
                key = tuple(members), stream, sequence
                last[key] = max(last.get(key, (0.0, 0)), (begin, rank))
        for record in self._records:
            begin, rank = last[record.group, record.stream, record.sequence]
            if rank != self.rank:
                waited = self._row_of(record).waited
                seconds = min(begin, record.end) - record.begin
                waited[rank] = waited.get(rank, 0.0) + seconds

    def table(self, rows: int = 20) -> str:
        """The longest rows of each kind as text."""
        lines = [f"rank {self.rank}: {self.seconds * 1e3:.3f} ms"]
        if self.cut_short:
            lines.append(f"only the first {EVENTS} runs are kept")
        for what in (OP, KERNEL, COLLECTIVE, TASK):
            chosen = [row for row in self.rows if row.what == what]
            if not chosen:
                continue
            lines += ["", f"{what + 's':<{_WIDTH}}    calls         ms  kernels ms       MiB"]
            lines += [_line(row) for row in chosen[:rows]]
            if len(chosen) > rows:
                rest = sum(row.seconds for row in chosen[rows:])
                lines.append(f"and {len(chosen) - rows} more, together {rest * 1e3:.3f} ms")
        return "\n".join(lines)

    __str__ = table

    def write_trace(self, path: Path | str) -> None:
        """Write what this rank did as a file of the Trace Event Format, which Perfetto reads.

        Times are those of the host since 1970, so that files of several ranks fit together.
        OutputError where the file cannot be written.
        """
        target = Path(path)
        with naming_output("the profile", target), named_file(target) as file:
            file.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
            separator = "\n"
            for event in self._trace_events():
                file.write((separator + json.dumps(event)).encode())
                separator = ",\n"
            file.write(b"\n]}\n")

    def _trace_events(self) -> Iterator[Mapping[str, Any]]:
        yield {
            "ph": "M",
            "name": "process_name",
            "pid": self.rank,
            "args": {"name": f"rank {self.rank}"},
        }
        for what, thread in _THREADS.items():
            names = {"name": f"{what}s"}
            yield {
                "ph": "M",
                "name": "thread_name",
                "pid": self.rank,
                "tid": thread,
                "args": names,
            }
        runs = [
            (row, (begin + self._epoch) / 1e3, (end - begin) / 1e3)
            for row, begin, end in self._events
        ]
        runs += [
            (self._row_of(record), record.begin * 1e6, (record.end - record.begin) * 1e6)
            for record in self._records
        ]
        for row, begin, length in runs:
            yield {
                "ph": "X",
                "name": row.name,
                "cat": row.what,
                "pid": self.rank,
                "tid": _THREADS[row.what],
                "ts": begin,
                "dur": length,
                "args": {"shapes": row.shapes, "source": row.source},
            }
        yield from chrome_events(self._timelines, -self._epoch)


def _calls_of_kernels(events: Sequence[Event]) -> Iterator[tuple[ProfileRow | None, Event]]:
    """Each run of a kernel, with the call that it ran in: the innermost that surrounds it."""
    open_calls: list[Event] = []
    for event in sorted(events, key=lambda event: (event[1], -event[2])):
        while open_calls and open_calls[-1][2] <= event[1]:
            open_calls.pop()
        if event[0].what == OP:
            open_calls.append(event)
        else:
            yield (open_calls[-1][0] if open_calls else None), event


def _line(row: ProfileRow) -> str:
    label = " ".join(filter(None, (row.name, row.shapes, row.source)))
    if len(label) > _WIDTH:
        label = label[: _WIDTH - 1] + "…"
    waited = ", ".join(
        f"{seconds * 1e3:.3f} ms for rank {rank}" for rank, seconds in sorted(row.waited.items())
    )
    return (
        f"{label:<{_WIDTH}} {row.calls:>8} {row.seconds * 1e3:>10.3f} "
        f"{row.kernel_seconds * 1e3:>11.3f} {row.nbytes / 2**20:>9.3f}"
        + (f"  waited {waited}" if waited else "")
    )


def _shown(specs: Specs) -> str:
    return ", ".join(f"{spec.dtype}{list(spec.local_shape)}" for spec in specs)


class ProfiledPlan(OpPlan):
    """An op whose calls, gradients and kernel are noted."""

    def __init__(
        self,
        world: World,
        kind: str,
        attrs: Mapping[str, Any],
        inputs: Specs,
        used: Specs,
        outputs: Specs,
    ) -> None:
        super().__init__(world, kind, attrs, inputs, used, outputs)
        assert isinstance(world.mode, ProfileMode)
        profile = world.mode.profile
        row = profile.kernel_row(kind, (*used, *outputs))
        self.kernel = profile.timed(self.kernel, row)
        if self.direct is not None:
            self.direct = profile.timed(self.direct, row)
        self.local = self._local()
        shapes = _shown((*inputs, *outputs))
        self.call_row = profile.row(OP, kind, shapes)
        # Over the methods of this one plan: what calls them need not know of profiles.
        self.call = profile.timed(self.call, self.call_row)  # type: ignore[method-assign]
        self.update = profile.timed(self.update, self.call_row)  # type: ignore[method-assign]
        backward = profile.row(OP, f"{kind} backward", shapes)
        self.backward = profile.timed(self.backward, backward)  # type: ignore[method-assign]


class ProfileMode(RunMode):
    """Ops and changes of layout are noted."""

    plan_class = ProfiledPlan
    records = True

    def __init__(self, world: World, profile: Profile) -> None:
        super().__init__(world)
        self.profile = profile

    def prepared(self, plan: OpPlan) -> Callable[..., DistTensor] | None:
        """See `Mode.prepared`."""
        run = super().prepared(plan)
        if run is None or not isinstance(plan, ProfiledPlan):
            return None
        return self.profile.timed(run, plan.call_row)

    def record(self, close: Callable[[], None]) -> Path:
        """See `Mode.record`."""
        return self.profile.recording(close)

    def redistribution(
        self, source: TensorSpec, target: TensorSpec, key: object
    ) -> Callable[[DistTensor], DistTensor]:
        """See `Mode.redistribution`."""
        run = super().redistribution(source, target, key)
        row = self.profile.row(
            OP, "redistribute", f"{_shown((source,))} {source.sbp} to {target.sbp}"
        )
        timed = self.profile.timed(run, row)
        if key in source.runs:
            source.runs[key] = timed
        return timed


@contextmanager
def profile() -> Iterator[Profile]:
    """Measure what this rank runs inside; see `Profile` for what there is afterwards.

    Each rank measures itself, and any of them may; `compare_ranks` then says who waited for whom.
    Compiled functions are compiled once more for the block. On devices the time of a kernel is that
    of its launch. UsageError inside another such block, inside `detect_anomaly` and inside a
    compiled function.
    """
    world = current_world()
    if world.mode.traces or world.mode.records or world.anomaly:
        raise UsageError(
            "a profile is taken around compiled functions, and by itself",
            source=user_line(),
            hint="put `with pc.profile() as p:` around the call, and no other such block or "
            "detect_anomaly around it",
        )
    made = Profile(world)
    observers = world.comm.observers if world.size > 1 else []
    observers.append(made.observe)
    try:
        with world.using(ProfileMode(world, made)):
            yield made
    finally:
        observers.remove(made.observe)
        made.finish()
