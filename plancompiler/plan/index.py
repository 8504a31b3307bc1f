"""`PlanIndex`: a plan looked at from all sides, and errors that show the place in it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from plancompiler.errors import VerifyError
from plancompiler.ir.task import format_id, rank_of
from plancompiler.plan.order import StepOrder
from plancompiler.plan.plan import Plan, RegisterDesc, RemoteRegister, Stream, Task

STREAMS = tuple(Stream)
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
    def order(self) -> StepOrder:
        """Happens-before, with the credits of all registers of one slot."""
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
        return StepOrder(self.streams, predecessors, readers)

    @cached_property
    def groups(self) -> dict[int, list[RegisterDesc]]:
        """Registers that live on the same bytes, in plan order, by the first of them."""
        registers = self.plan.register_by_id
        root: dict[int, int] = {}
        found: dict[int, list[RegisterDesc]] = {}
        for task in self.plan.tasks:
            for key in task.outputs:
                register = registers[key]
                first = root[key] = root.get(register.inplace_of, key)
                found.setdefault(first, []).append(register)
        return found

    def register_name(self, register: int) -> str:
        """`%name` with its id."""
        found: RegisterDesc | RemoteRegister | None = self.plan.register_by_id.get(
            register
        ) or self.plan.remote_register_by_id.get(register)
        return f"%{found.name} ({format_id(register)})" if found else format_id(register)

    def task_name(self, task: int) -> str:
        """The task's name with its id and rank."""
        found = self.plan.task_by_id.get(task)
        if found is None:
            return f"{format_id(task)} on rank {rank_of(task)}"
        return f"{found.name!r} ({format_id(task)})"

    def place_name(self, place: int) -> str:
        """Name of the task at a place in plan order."""
        return self.task_name(self.plan.tasks[place].id)

    def broken(
        self,
        what: str,
        *,
        task: Task | None = None,
        register: RegisterDesc | RemoteRegister | None = None,
        got: object,
        expected: object,
        error: type[VerifyError] = VerifyError,
    ) -> VerifyError:
        """The error for a broken rule at a task or register, with what lies around it."""
        if task is None and register is not None:
            task = self.plan.task_by_id.get(register.producer)
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
            f"%{found.name} of {self.task_name(found.producer)}"
            for key in (*task.inputs, *task.controls_in)
            if (
                found := self.plan.register_by_id.get(key)
                or self.plan.remote_register_by_id.get(key)
            )
        ]
        feeds = [
            f"{self.task_name(consumer)} with %{found.name}"
            for key in (*task.outputs, *task.controls_out)
            if (found := self.plan.register_by_id.get(key))
            for consumer in found.consumers
        ]
        for word, names in (("reads", reads), ("feeds", feeds)):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                parts.append(f"{word} {', '.join(names[:_SHOWN])}{more}")
        return "; ".join(parts)


def format_ids(ids: Iterable[int]) -> str:
    """Ids for an error."""
    return ", ".join(map(format_id, ids)) or "none"
