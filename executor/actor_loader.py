"""From a plan to its rank's actors: registers as tokens and notices, slots as turns.

Edges between streams and ranks become tokens. Those inside one stream are checked once, against the
stream's order and the slots that their registers have, and dropped.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from plancompiler.errors import ExecutionError
from plancompiler.executor.actor import (
    ARRIVED,
    RETURNED,
    Notice,
    RankActors,
    RemoteKey,
    StreamActor,
    Token,
    Turn,
    shared_id,
)
from plancompiler.ir.pipeline import Slot, in_flight
from plancompiler.ir.task import format_id, unpack_id
from plancompiler.plan.plan import Plan, RegisterDesc, RemoteRegister, Stream, Task


@dataclass
class _StreamBuilder:
    """A stream under construction. Tokens and notices marked `once` count once per step."""

    stream: Stream
    tasks: list[Task] = field(default_factory=list)
    waits: list[list[tuple[int, bool]]] = field(default_factory=list)
    notices: list[list[tuple[Notice, bool]]] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)

    def add_task(self, task: Task) -> int:
        self.tasks.append(task)
        self.waits.append([])
        self.notices.append([])
        return len(self.tasks) - 1

    def add_token(self, position: int, once: bool, token: Token) -> int:
        self.tokens.append(token)
        self.waits[position].append((len(self.tokens) - 1, once))
        return len(self.tokens) - 1

    def turns(self, plan: Plan) -> list[Turn]:
        """The plan's slots in which the stream has tasks."""
        # What is marked `once` belongs to the first run of a step (waits) or to the last (notices).
        waits = {
            first: tuple(
                tuple(token for token, once in each if first or not once) for each in self.waits
            )
            for first in (True, False)
        }
        notices = {
            last: tuple(
                tuple(notice for notice, once in each if last or not once) for each in self.notices
            )
            for last in (True, False)
        }
        # Tasks lie segment by segment, so those of a segment are a range.
        segments = [task.segment for task in self.tasks]
        turns = []
        for slot in plan.slots:
            start = bisect_left(segments, slot.segment)
            stop = bisect_right(segments, slot.segment)
            if start < stop:
                each = plan.segments[slot.segment].kind.per_microbatch
                first = not each or slot.microbatch == 0
                last = not each or slot.microbatch == plan.microbatches - 1
                turns.append(Turn(start, stop, slot.microbatch, each, waits[first], notices[last]))
        return turns


class _Loader:
    """Resolves one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.builders: list[_StreamBuilder] = []
        self.place: dict[int, tuple[int, int]] = {}
        """Task id → stream index and position."""
        self.remote_tokens: dict[RemoteKey, tuple[int, int]] = {}
        self._per_microbatch = [segment.kind.per_microbatch for segment in plan.segments]
        self._alive: dict[tuple[int, int], int] = {}
        index: dict[Stream, int] = {}
        for task in plan.tasks:
            if task.stream not in index:
                index[task.stream] = len(self.builders)
                self.builders.append(_StreamBuilder(task.stream))
            number = index[task.stream]
            self.place[task.id] = number, self.builders[number].add_task(task)

    def task(self, index: int, position: int) -> Task:
        return self.builders[index].tasks[position]

    def once(self, register: RegisterDesc | RemoteRegister, task: Task) -> bool:
        """Whether a task that makes or reads a register runs several times per version of it."""
        return not register.per_microbatch and self._per_microbatch[task.segment]

    def add_register(self, register: RegisterDesc, readers: dict[int, list[int]]) -> None:
        """Tokens of a register of this rank; `readers` are positions by stream index."""
        if register.producer not in self.place:
            raise ExecutionError(
                "a register has no producer on its rank",
                rank=self.plan.rank,
                got=f"{register.name!r} ({format_id(register.id)})",
            )
        home, made_at = self.place[register.producer]
        producer = self.task(home, made_at)
        self._check_versions(register, producer)
        for reader, positions in readers.items():
            first = self.task(reader, min(positions))
            last = self.task(reader, max(positions))
            self._check_versions(register, first)
            self._check_versions(register, last)
            self._check_complete(register, producer, first)
            self._check_slots(register, producer.segment, last.segment)
            if reader == home:
                self._check_stream_order(register, home, made_at, min(positions))
            else:
                self._connect_streams(register, (home, made_at), (reader, positions))
        for task_id in dict.fromkeys(register.consumers):
            if unpack_id(task_id).rank != self.plan.rank:
                self._connect_consumer(register, (home, made_at), task_id)

    def _connect_streams(
        self, register: RegisterDesc, made: tuple[int, int], read: tuple[int, list[int]]
    ) -> None:
        """Tokens and notices of one register between two streams of this rank."""
        home, made_at = made
        reader, positions = read
        first, last = min(positions), max(positions)
        producer, consumer = self.builders[home], self.builders[reader]
        count = register.register_count
        made_once = self.once(register, producer.tasks[made_at])
        taken_once = self.once(register, consumer.tasks[first])
        returned_once = self.once(register, consumer.tasks[last])
        arrival = consumer.add_token(
            first,
            taken_once,
            Token(ARRIVED, register.id, register.name, f"stream {producer.stream}", 0, count),
        )
        credit = producer.add_token(
            made_at,
            made_once,
            Token(RETURNED, register.id, register.name, f"stream {consumer.stream}", count, count),
        )
        task_id = consumer.tasks[last].id
        producer.notices[made_at].append(
            (Notice(reader, arrival, -1, ARRIVED, register.id, task_id), made_once)
        )
        consumer.notices[last].append(
            (Notice(home, credit, -1, RETURNED, register.id, task_id), returned_once)
        )

    def _connect_consumer(
        self, register: RegisterDesc, made: tuple[int, int], task_id: int
    ) -> None:
        """Token and notice of a register for a task of another rank that reads it."""
        home, made_at = made
        other = unpack_id(task_id).rank
        count = register.register_count
        made_once = self.once(register, self.task(home, made_at))
        credit = self.builders[home].add_token(
            made_at,
            made_once,
            Token(RETURNED, register.id, register.name, f"rank {other}", count, count, other),
        )
        known_as = shared_id(register)
        self.builders[home].notices[made_at].append(
            (Notice(-1, -1, other, ARRIVED, known_as, task_id), made_once)
        )
        self.remote_tokens[RemoteKey(RETURNED, known_as, task_id)] = home, credit

    def add_remote(self, remote: RemoteRegister) -> None:
        """Tokens of a register of another rank."""
        producer_rank = unpack_id(remote.producer).rank
        known_as = shared_id(remote)
        for task_id in dict.fromkeys(remote.consumers):
            if task_id in self.place:
                index, position = self.place[task_id]
                task = self.task(index, position)
                self._check_versions(remote, task)
                once = self.once(remote, task)
                # A remote register's slots are not known here; its producer's credits bound it.
                arrival = self.builders[index].add_token(
                    position,
                    once,
                    Token(
                        ARRIVED,
                        remote.id,
                        remote.name,
                        f"rank {producer_rank}",
                        0,
                        sys.maxsize,
                        producer_rank,
                    ),
                )
                self.builders[index].notices[position].append(
                    (Notice(-1, -1, producer_rank, RETURNED, known_as, task_id), once)
                )
                self.remote_tokens[RemoteKey(ARRIVED, known_as, task_id)] = index, arrival

    # --- checks ---------------------------------------------------------------------------------

    def check_slots_list(self) -> None:
        """Every reader runs after its producer of the same micro-batch, versions run in order."""
        plan = self.plan
        segments = [task.segment for task in plan.tasks]
        known = set(range(len(plan.segments)))
        if segments != sorted(segments) or not known.issuperset(segments):
            raise ExecutionError(
                "a plan's tasks do not lie segment by segment",
                rank=plan.rank,
                expected=f"segments 0 to {len(plan.segments) - 1} in turn",
            )
        seen: dict[int, list[int]] = {}
        for slot in plan.slots:
            seen.setdefault(slot.segment, []).append(slot.microbatch)
        complete = all(
            seen.get(number) == list(range(plan.microbatches if each else 1))
            for number, each in enumerate(self._per_microbatch)
        )
        if not complete or len(seen) != len(plan.segments):
            raise ExecutionError(
                "a plan's slots do not run every segment for all its micro-batches in turn",
                rank=plan.rank,
                got=_slots_text(plan.slots),
                expected=f"micro-batches 0 to {plan.microbatches - 1}",
            )
        # What a micro-batch sees, with what runs once per step, must be the plan's own order.
        for microbatch in range(plan.microbatches):
            order = [
                slot.segment
                for slot in plan.slots
                if slot.microbatch == microbatch or not self._per_microbatch[slot.segment]
            ]
            if order != sorted(order):
                raise ExecutionError(
                    "a plan's slots run a segment before one that comes earlier in the plan",
                    rank=plan.rank,
                    got=f"{_slots_text(plan.slots)}, for micro-batch {microbatch}",
                    expected="for every micro-batch the order of the segments",
                )

    def _check_versions(self, register: RegisterDesc | RemoteRegister, task: Task) -> None:
        """Only what runs for every micro-batch may touch a register with a version for each."""
        if register.per_microbatch and not self._per_microbatch[task.segment]:
            raise ExecutionError(
                f"register {register.name!r} has a version per micro-batch, but is used by a task "
                "that runs once per step",
                op=task.name,
                rank=self.plan.rank,
                got=f"segment {self.plan.segments[task.segment]}",
            )

    def _check_complete(self, register: RegisterDesc, producer: Task, reader: Task) -> None:
        """What all micro-batches make together is complete only after the last one."""
        if self.once(register, producer) and self._per_microbatch[reader.segment]:
            raise ExecutionError(
                f"register {register.name!r} is read before all micro-batches have added to it",
                op=reader.name,
                rank=self.plan.rank,
                got=f"segment {self.plan.segments[reader.segment]}",
                expected="a segment that runs once per step",
            )

    def _check_slots(self, register: RegisterDesc, made_in: int, read_in: int) -> None:
        """A register has room for all versions that are alive at once."""
        count = register.register_count
        if not register.per_microbatch:
            if count > 1 and self.plan.microbatches > 1:
                raise ExecutionError(
                    f"register {register.name!r} has one version per step, but several slots",
                    rank=self.plan.rank,
                    got=f"{count} slots",
                    expected="1 slot where a step has several micro-batches",
                )
            return
        key = made_in, read_in
        if key not in self._alive:
            self._alive[key] = in_flight(self.plan.slots, made_in, read_in)
        if count < self._alive[key]:
            raise ExecutionError(
                f"register {register.name!r} has too few slots for the micro-batches in flight",
                rank=self.plan.rank,
                got=f"{count} slots",
                expected=f"{self._alive[key]} from {self.plan.segments[made_in]} to "
                f"{self.plan.segments[read_in]}",
            )

    def _check_stream_order(
        self, register: RegisterDesc, home: int, made_at: int, read_at: int
    ) -> None:
        if read_at <= made_at:
            raise ExecutionError(
                f"register {register.name!r} is read on its own stream before it is made",
                op=self.task(home, read_at).name,
                rank=self.plan.rank,
                got=f"reader at position {read_at} of stream {self.builders[home].stream}",
                expected=f"a position after its producer's, {made_at}",
            )


def load_actors(plan: Plan, first_step: int = 0) -> RankActors:
    """Resolve a plan's registers, streams, slots and ids into dense counters, once.

    Raises ExecutionError for a plan that cannot run: a register without a producer, read on its
    own stream before it is made, or with too few slots for the micro-batches in flight; or slots
    that leave out work or run it in an order that the data forbids.
    """
    loader = _Loader(plan)
    loader.check_slots_list()
    readers = _readers(plan, loader.place)
    for register in plan.registers:
        loader.add_register(register, readers.get(register.id, {}))
    for remote in plan.remote_registers:
        loader.add_remote(remote)
    return RankActors(
        plan.rank,
        tuple(
            StreamActor(one.stream, one.turns(plan), one.tokens, plan.microbatches, first_step)
            for one in loader.builders
        ),
        tuple(tuple(one.tasks) for one in loader.builders),
        loader.remote_tokens,
    )


def _slots_text(slots: Sequence[Slot]) -> str:
    return " ".join(f"{slot.segment}.{slot.microbatch}" for slot in slots)


def _readers(plan: Plan, place: dict[int, tuple[int, int]]) -> dict[int, dict[int, list[int]]]:
    """Register id → stream index → positions of its readers on this rank."""
    readers: dict[int, dict[int, list[int]]] = {}
    known = plan.register_by_id
    remote = plan.remote_register_by_id
    for task in plan.tasks:
        index, position = place[task.id]
        for register in (*task.inputs, *task.controls_in):
            if register in known:
                readers.setdefault(register, {}).setdefault(index, []).append(position)
            elif register not in remote or task.id not in remote[register].consumers:
                raise ExecutionError(
                    "a task reads a register that its plan does not have",
                    op=task.name,
                    rank=plan.rank,
                    got=format_id(register),
                )
    return readers
