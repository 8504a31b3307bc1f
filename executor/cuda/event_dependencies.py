"""Which events make a rank's CUDA streams keep the plan's order: pure bookkeeping.

On the CPU a register *has arrived* when it was made, and a credit *has come back* when it was read.
On a device both are known when the work is only launched; what then holds the reader, or the next
writer, is an event on the other stream. So for each register slot two things are remembered:

    made      the mark of the task that filled it
    read      per stream, the mark of the last task that reads it

A task waits for the marks of what it reads, and of the readers of what it overwrites; control
registers count like others. A mark on its own stream needs nothing. A mark is a place in a stream's
order, with all that the stream knew of the others there (a vector clock: Fidge 1988, Mattern 1989),
so that a wait which an earlier one implies is left out.

That is exactly what the plan's happens-before consists of (`plan.order`): streams, data, control,
credits. So what the memory planner proved holds on the device as it does on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = Any
"""Whatever stands for an event; it is only passed through."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in a stream's order that others may wait for."""

    stream: int
    place: int
    """Counts the marks of the stream from 1."""
    event: Event
    clock: tuple[int, ...]
    """Per stream, the place up to which it was known to be done."""


@dataclass(frozen=True, slots=True)
class DependentTask:
    """A task as far as its events go."""

    stream: Hashable
    reads: tuple[int, ...]
    """Registers, control registers among them."""
    writes: tuple[int, ...]
    told_elsewhere: bool = False
    """Whether the host or another rank wants to know when it is done."""


@dataclass(slots=True)
class _Slots:
    """One register's slots."""

    made: list[Mark | None]
    read: list[dict[int, Mark]]


@dataclass(slots=True)
class _Bound:
    """A task with its registers resolved."""

    stream: int
    reads: list[_Slots]
    writes: list[_Slots]
    marked: bool
    events: list[Event]
    turn: int = 0


@dataclass(slots=True)
class EventDependencies:
    """The state of one rank: what was marked last, and what each stream knows.

    The launcher calls `before`, launches, and calls `after`, task by task in plan order. `counts`
    are the slots of each register, `make_event` makes an event.
    """

    make_event: Callable[[], Event]
    counts: dict[int, int]
    streams: dict[Hashable, int] = field(default_factory=dict)
    """Stream → number."""
    waits: int = 0
    """Waits asked for so far."""
    _bound: list[_Bound] = field(default_factory=list)
    _known: list[list[int]] = field(default_factory=list)
    _places: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls, tasks: Sequence[DependentTask], counts: dict[int, int], make_event: Callable[[], Event]
    ) -> EventDependencies:
        """EventDependencies for these tasks; they are named by their position from now on."""
        self = cls(make_event, counts)
        for task in tasks:
            self.streams.setdefault(task.stream, len(self.streams))
        width = len(self.streams)
        self._known = [[0] * width for _ in range(width)]
        self._places = [0] * width
        users: dict[int, set[int]] = {}
        for task in tasks:
            for register in (*task.reads, *task.writes):
                users.setdefault(register, set()).add(self.streams[task.stream])
        slots = {
            register: _Slots([None] * count, [{} for _ in range(count)])
            for register, count in counts.items()
        }
        for task in tasks:
            registers = (*task.reads, *task.writes)
            marked = task.told_elsewhere or any(len(users[each]) > 1 for each in registers)
            # As many events as versions can be under way, so that none is recorded anew too soon.
            depth = max((counts[each] for each in registers), default=1)
            self._bound.append(
                _Bound(
                    self.streams[task.stream],
                    [slots[each] for each in dict.fromkeys(task.reads)],
                    [slots[each] for each in task.writes],
                    marked,
                    [make_event() for _ in range(depth)] if marked else [],
                )
            )
        return self

    def concerns(self, task: int) -> bool:
        """Whether a task has anything to wait for or to mark."""
        return self._bound[task].marked

    def before(self, task: int, version: int) -> list[Event]:
        """Events that the task's stream must wait for before this run of the task."""
        bound = self._bound[task]
        stream = bound.stream
        known = self._known[stream]
        events: list[Event] = []
        for slots in bound.reads:
            mark = slots.made[version % len(slots.made)]
            if mark is not None and known[mark.stream] < mark.place and mark.stream != stream:
                events.append(self._learn(known, mark))
        for slots in bound.writes:
            readers = slots.read[version % len(slots.read)]
            events += (
                self._learn(known, mark)
                for mark in readers.values()
                if known[mark.stream] < mark.place and mark.stream != stream
            )
        self.waits += len(events)
        return events

    def after(self, task: int, version: int) -> Event | None:
        """The event to record now that this run of the task is launched, if any."""
        bound = self._bound[task]
        if not bound.marked:
            return None
        stream = bound.stream
        self._places[stream] = place = self._places[stream] + 1
        event = bound.events[bound.turn]
        bound.turn = (bound.turn + 1) % len(bound.events)
        known = self._known[stream]
        known[stream] = place
        mark = Mark(stream, place, event, tuple(known))
        for slots in bound.reads:
            slots.read[version % len(slots.read)][stream] = mark
        for slots in bound.writes:
            at = version % len(slots.made)
            slots.made[at] = mark
            slots.read[at].clear()
        return event

    @staticmethod
    def _learn(known: list[int], mark: Mark) -> Event:
        for stream, place in enumerate(mark.clock):
            known[stream] = max(known[stream], place)
        return mark.event
