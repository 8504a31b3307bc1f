"""Happens-before on one rank: what has certainly finished when a task starts.

A stream runs its tasks in plan order, step after step. Within a step a task starts after the task
before it on its stream and after its predecessors (the producers of its inputs and control inputs).
Vector clocks (Fidge 1988, Mattern 1989) follow: per stream, how many of its tasks have finished.

Across the step's end a task knows what its stream and its predecessors' streams did in the step
before, and, where credits are given, what the readers of its registers did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import ge

from plancompiler.errors import VerifyError

Clock = tuple[int, ...]
"""Per stream, a number of tasks: that many of the stream's first tasks have finished."""


class StepOrder:
    """The order that every execution of a rank's steps keeps.

    Tasks are named by their position in plan order. Time and memory are linear in tasks × streams
    plus edges.
    """

    __slots__ = (
        "_predecessors",
        "_previous",
        "_readers",
        "clocks",
        "counts",
        "end_clocks",
        "positions",
        "streams",
    )

    streams: Sequence[int]
    """Stream of each task."""
    positions: list[int]
    """Position of each task on its stream."""
    counts: Clock
    """Number of tasks of each stream."""
    clocks: list[Clock]
    """What is known, within the step, when each task starts."""
    end_clocks: list[Clock]
    """Per stream, what is known when its last task has finished."""

    def __init__(
        self,
        streams: Sequence[int],
        predecessors: Sequence[Sequence[int]],
        readers: Sequence[Sequence[int]] = (),
    ) -> None:
        """Order tasks with these streams (small numbers from 0) and predecessors (earlier tasks).

        `readers`, where given, lists per task those that must have finished a step before the task
        acts in the next: the readers of its registers of one slot. Without it no credits count, so
        that the result holds for any register counts. Raises VerifyError where a predecessor is not
        earlier in plan order.
        """
        width = max(streams, default=-1) + 1
        positions: list[int] = []
        clocks: list[Clock] = []
        ends: list[Clock] = [(0,) * width] * width
        counts = [0] * width
        for task, (stream, before) in enumerate(zip(streams, predecessors, strict=True)):
            clock = ends[stream]
            for other in before:
                if not 0 <= other < task:
                    raise VerifyError(
                        "a task's predecessor is not earlier in plan order",
                        got=f"task {task} after task {other}",
                    )
                # Clocks are transitive: who knows that `other` is done knows all that it knew.
                source = streams[other]
                position = positions[other]
                if clock[source] <= position:
                    merged = [*map(max, clock, clocks[other])]
                    merged[source] = position + 1
                    clock = tuple(merged)
            position = counts[stream]
            positions.append(position)
            clocks.append(clock)
            counts[stream] = position + 1
            ends[stream] = (*clock[:stream], position + 1, *clock[stream + 1 :])
        self.streams = streams
        self.positions = positions
        self.clocks = clocks
        self.counts = tuple(counts)
        self.end_clocks = ends
        self._predecessors = predecessors
        self._readers = readers
        self._previous: list[Clock] | None = None

    def happens_before(self, first: int, second: int) -> bool:
        """Whether `first` has finished before `second` of the same step starts."""
        return self.clocks[second][self.streams[first]] > self.positions[first]

    def previous_step_done(self, first: int, second: int) -> bool:
        """Whether `first` of a step has finished before `second` of the next step starts."""
        return self.previous_clock(second)[self.streams[first]] > self.positions[first]

    def previous_clock(self, task: int) -> Clock:
        """What a task knows, when it starts, of the step before its own."""
        if self._previous is None:
            self._previous = self._previous_clocks()
        return self._previous[task]

    def _previous_clocks(self) -> list[Clock]:
        """Per task, what streams, predecessors and credits tell of the step before."""
        previous: list[Clock] = []
        latest = list(self.end_clocks)
        streams, positions = self.streams, self.positions
        readers = self._readers or ((),) * len(positions)
        for stream, before, after in zip(streams, self._predecessors, readers, strict=True):
            clock = latest[stream]
            for other in before:
                if previous[other] != clock:
                    clock = tuple(map(max, clock, previous[other]))
            for reader in after:
                source = streams[reader]
                if clock[source] <= positions[reader]:
                    merged = [*map(max, clock, self.clocks[reader])]
                    merged[source] = positions[reader] + 1
                    clock = tuple(merged)
            previous.append(clock)
            latest[stream] = clock
        return previous

    def clock_of(self, tasks: Iterable[int]) -> Clock:
        """The least clock that says that all of `tasks` have finished."""
        clock = [0] * len(self.counts)
        streams, positions = self.streams, self.positions
        for task in tasks:
            stream = streams[task]
            if clock[stream] <= positions[task]:
                clock[stream] = positions[task] + 1
        return tuple(clock)


def covers(clock: Clock, needed: Clock) -> bool:
    """Whether `clock` knows at least what `needed` says."""
    return all(map(ge, clock, needed))
