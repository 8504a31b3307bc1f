"""When the device ran each action of a recorded run: an event before its work, and one after it.

The events of a step are read when the step has run, by the thread that waits for the device anyway,
so that the launching thread is not held up. A device has a clock of its own, of which one only
learns the distance between two events. So an event at the beginning is read on both clocks, and
every step ends with an event from which the times of later steps are counted: distances stay short,
which matters as CUDA gives them in 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from time import monotonic_ns

from plancompiler.executor.cuda.interface import Device, DeviceEvent, DeviceStream
from plancompiler.executor.task import Run
from plancompiler.executor.trace import Recorder
from plancompiler.plan.plan import Task

RUN_AHEAD = 2
"""Steps that may be launched before the first of them has ended: one runs, one waits its turn."""

_UNDER_WAY = RUN_AHEAD + 2
"""Steps whose events are not to be recorded anew, with one to spare."""

_READINGS = 8
"""Of both clocks at the beginning; the one that took least is the most exact."""


@dataclass(frozen=True, slots=True)
class TimedTask:
    """A task's events."""

    device: Device
    task: int
    runs: int
    """How often it runs in a step."""
    stream: DeviceStream
    begins: list[DeviceEvent]
    ends: list[DeviceEvent]

    def begin(self, version: int) -> None:
        """The work of an action is launched next."""
        self.device.record(self.begins[version % len(self.begins)], self.stream)

    def end(self, version: int) -> None:
        """It was launched."""
        self.device.record(self.ends[version % len(self.ends)], self.stream)


class DeviceClock:
    """Reads the events of one rank's actions and hands their times to its recorder.

    Times are nanoseconds of the host's monotonic clock. They are as exact as the first event's
    reading is, some 10 µs, and drift as the two clocks do.
    """

    def __init__(self, device: Device, recorder: Recorder) -> None:
        self._device = device
        self._recorder = recorder
        self._tasks: list[TimedTask] = []
        stream = device.stream("clock")
        readings = []
        for _ in range(_READINGS):
            origin = device.timer()
            before = monotonic_ns()
            device.record(origin, stream)
            device.synchronize(origin)
            after = monotonic_ns()
            readings.append((after - before, origin, (before + after) // 2))
        # The first use of a stream takes its time, and other work of the host may come between.
        _, origin, at = min(readings, key=itemgetter(0))
        self._origin = origin, at
        self._marks = [device.timer() for _ in range(2 * _UNDER_WAY)]
        self._known: dict[int, int] = {}
        """Step -> when it ended, on the host's clock; the latest few."""

    def timed(self, task: Task, runs: int, stream: DeviceStream) -> TimedTask:
        """The events of a task that runs so often in a step."""
        count = runs * _UNDER_WAY
        timer = self._device.timer
        timed = TimedTask(
            self._device,
            task.id,
            runs,
            stream,
            [timer() for _ in range(count)],
            [timer() for _ in range(count)],
        )
        self._tasks.append(timed)
        return timed

    def by_host(self, task: Task, run: Run) -> Run:
        """What the launching thread does itself, recorded as on the CPU."""
        return self._recorder.wrap(task, run)

    def step_launched(self, step: int, stream: DeviceStream) -> None:
        """All of a step was launched, and `stream` ends it."""
        self._device.record(self._marks[step % len(self._marks)], stream)

    def read(self, step: int) -> None:
        """Record the times of a step that has ended. Steps are read one after another."""
        # The step before the last that may be under way with this one: all here came after it.
        base, at = self._base(step - RUN_AHEAD - 1)
        for timed in self._tasks:
            for version in range(step * timed.runs, (step + 1) * timed.runs):
                begin = timed.begins[version % len(timed.begins)]
                end = timed.ends[version % len(timed.ends)]
                # A send may run on when the step has ended.
                self._device.synchronize(end)
                self._recorder.note(
                    timed.task,
                    version,
                    at + round(self._device.elapsed(base, begin)),
                    at + round(self._device.elapsed(base, end)),
                )
        mark = self._marks[step % len(self._marks)]
        self._known[step] = at + round(self._device.elapsed(base, mark))
        self._known.pop(step - len(self._marks) + 1, None)

    def _base(self, step: int) -> tuple[DeviceEvent, int]:
        if step in self._known:
            return self._marks[step % len(self._marks)], self._known[step]
        return self._origin
