"""`PlanIndex`: a plan looked at from all sides, and errors that show the place in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TypeVar

from plancompiler.errors import VerifyError
from plancompiler.ir.task import format_id, rank_of
from plancompiler.plan.order import StepOrder
from plancompiler.plan.plan import Plan, RegisterDesc, RemoteRegister, Stream, Task

Spec = TypeVar("Spec")
STREAMS = (
    Stream.COMPUTE,
    Stream.COLLECTIVE,
    Stream.GRADIENT,
    Stream.DATA,
    Stream.COPY,
    Stream.PARAMETER,
    Stream.COPY_HD,
)
"""Clocks are as wide as the last stream in use: rare ones come last."""
COMPUTE = STREAMS.index(Stream.COMPUTE)
COPY = STREAMS.index(Stream.COPY)
DATA = STREAMS.index(Stream.DATA)
_SHOWN = 4
"""Neighbours listed per kind in an error."""


class PlanIndex:
    """Lookups that the rules share. `rule` names the rule under check, for its errors."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rule = ""

    @cached_property
    def position(self) -> dict[int, int]:
        """Task id → place in plan order."""
        return {task.id: place for place, task in enumerate(self.plan.tasks)}

    @cached_property
    def streams(self) -> list[int]:
        """Index into STREAMS per task."""
        number = {stream: index for index, stream in enumerate(STREAMS)}
        return [number[task.stream] for task in self.plan.tasks]

    @cached_property
    def local_consumers(self) -> dict[int, list[int]]:
        """Register id → places of its consumers on this rank."""
        position = self.position
        return {
            register.id: [position[task] for task in register.consumers if task in position]
            for register in self.plan.registers
        }

    def remote_consumers(self, register: RegisterDesc) -> list[int]:
        """Task ids of other ranks that read a register."""
        rank = self.plan.rank
        return [task for task in register.consumers if rank_of(task) != rank]

    @cached_property
    def _edges(self) -> tuple[list[list[int]], list[list[int]]]:
        """Per task, the places of those that it reads from, and of the readers of what it makes in
        one slot (whose credits hold its next run back)."""
        registers, position = self.plan.register_by_id, self.position
        predecessors = []
        readers = []
        for task in self.plan.tasks:
            reads = [*task.inputs, *task.controls_in] if task.controls_in else task.inputs
            predecessors.append(
                [position[registers[read].producer] for read in reads if read in registers]
            )
            made = [*task.outputs, *task.controls_out] if task.controls_out else task.outputs
            readers.append(
                [
                    consumer
                    for register in made
                    if registers[register].register_count == 1
                    for consumer in self.local_consumers[register]
                ]
            )
        return predecessors, readers

    @cached_property
    def order(self) -> StepOrder:
        """Happens-before in plan order, with the credits of all registers of one slot.

        Of several micro-batches it is the order of any one of them: streams run what they do for
        one micro-batch in plan order, what is done once per step before or after it. Across the
        step's end it says what a task's first run in a step knows of the whole step before.
        """
        return StepOrder(self.streams, *self._edges)

    @cached_property
    def segment_starts(self) -> list[int]:
        """Place of the first task of each segment, and the number of tasks at the end."""
        counts = [0] * (len(self.plan.segments) + 1)
        for task in self.plan.tasks:
            counts[task.segment + 1] += 1
        return list(accumulate(counts))

    @cached_property
    def segment_orders(self) -> list[StepOrder]:
        """Happens-before within one run of each segment; what StepOrder calls the step before is
        the segment's run before. Tasks are named by their place less the segment's start."""
        if len(self.plan.segments) == 1:
            return [self.order]
        predecessors, readers = self._edges
        orders = []
        for start, end in pairwise(self.segment_starts):

            def inside(
                edges: list[list[int]], start: int = start, end: int = end
            ) -> list[list[int]]:
                return [
                    [place - start for place in places if start <= place < end]
                    for places in edges[start:end]
                ]

            orders.append(StepOrder(self.streams[start:end], inside(predecessors), inside(readers)))
        return orders

    @cached_property
    def _tails(self) -> list[dict[int, int]]:
        last: dict[int, int] = {}
        tails = []
        for start, end in pairwise(self.segment_starts):
            last = last | {self.streams[place]: place for place in range(start, end)}
            tails.append(last)
        return tails

    def tails(self, segment: int) -> dict[int, int]:
        """Stream → place of its last task in this segment and those before it in plan order."""
        return self._tails[segment]

    def users(self, registers: Iterable[RegisterDesc]) -> list[int]:
        """Places of all tasks of this rank that make or read one of the registers."""
        places = []
        for register in registers:
            places.append(self.position[register.producer])
            places += self.local_consumers[register.id]
        return places

    def home_segment(self, registers: Sequence[RegisterDesc]) -> int | None:
        """The segment that registers on the same bytes never leave on this rank.

        None where segments carry them to others, or from one run of a segment to the next.
        """
        tasks = self.plan.tasks
        segment = 0
        if len(self.plan.segments) > 1:
            segments = {tasks[place].segment for place in self.users(registers)}
            if len(segments) > 1:
                return None
            (segment,) = segments
        repeated = self.plan.segments[segment].kind.per_microbatch
        return segment if registers[0].per_microbatch is repeated else None

    def is_repeated(self, task: Task) -> bool:
        """Whether a task runs once per micro-batch."""
        return self.plan.segments[task.segment].kind.per_microbatch

    @cached_property
    def groups(self) -> dict[int, list[RegisterDesc]]:
        """Registers that live on the same bytes, in plan order, by the first of them."""
        registers = self.plan.register_by_id
        root: dict[int, int] = {}
        groups: dict[int, list[RegisterDesc]] = {}
        for task in self.plan.tasks:
            for key in task.outputs:
                register = registers[key]
                first = root[key] = root.get(register.inplace_of, key)
                groups.setdefault(first, []).append(register)
        return groups

    def tasks_with(self, kind: type[Spec]) -> Iterator[tuple[Task, Spec]]:
        """Tasks whose spec is of a kind, with it."""
        for task in self.plan.tasks:
            if isinstance(task.spec, kind):
                yield task, task.spec

    def register_name(self, register: int) -> str:
        """`%name` with its id."""
        desc: RegisterDesc | RemoteRegister | None = self.plan.register_by_id.get(
            register
        ) or self.plan.remote_register_by_id.get(register)
        return f"%{desc.name} ({format_id(register)})" if desc else format_id(register)

    def task_name(self, task: int) -> str:
        """The task's name with its id and rank."""
        desc = self.plan.task_by_id.get(task)
        if desc is None:
            return f"{format_id(task)} on rank {rank_of(task)}"
        return f"{desc.name!r} ({format_id(task)})"

    def place_name(self, place: int) -> str:
        """Name of the task at a place in plan order."""
        return self.task_name(self.plan.tasks[place].id)

    def broken(
        self,
        what: str,
        where: Task | RegisterDesc | RemoteRegister | None = None,
        *,
        got: object,
        expected: object,
        error: type[VerifyError] = VerifyError,
    ) -> VerifyError:
        """The error for a broken rule at a task or register, with what lies around it."""
        task = where
        if not isinstance(task, Task | None):
            task = self.plan.task_by_id.get(task.producer)
        around = "" if task is None else f" (around it: {self.neighbours(task)})"
        return error(
            f"the plan breaks the rule {self.rule!r}: {what}{around}",
            op=None if task is None else task.name,
            source=task.source if task is not None and task.source.file else None,
            rank=self.plan.rank,
            got=got,
            expected=expected,
        )

    def neighbours(self, task: Task) -> str:
        """The tasks before and after on the stream, and those that a task reads from and feeds."""
        stream = [other for other in self.plan.tasks if other.stream is task.stream]
        at = next(place for place, other in enumerate(stream) if other is task)
        before = repr(stream[at - 1].name) if at else "nothing"
        after = repr(stream[at + 1].name) if at + 1 < len(stream) else "nothing"
        parts = [f"on stream {task.stream} after {before} and before {after}"]
        reads = [
            f"%{read.name} of {self.task_name(read.producer)}"
            for key in (*task.inputs, *task.controls_in)
            if (
                read := self.plan.register_by_id.get(key)
                or self.plan.remote_register_by_id.get(key)
            )
        ]
        feeds = [
            f"{self.task_name(consumer)} with %{read.name}"
            for key in (*task.outputs, *task.controls_out)
            if (read := self.plan.register_by_id.get(key))
            for consumer in read.consumers
        ]
        for word, names in (("reads", reads), ("feeds", feeds)):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                parts.append(f"{word} {', '.join(names[:_SHOWN])}{more}")
        return "; ".join(parts)


def format_ids(ids: Iterable[int]) -> str:
    """Ids for an error."""
    return ", ".join(map(format_id, ids)) or "none"
