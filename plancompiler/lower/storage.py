"""Storage groups: which registers of a rank share their bytes on purpose.

A register takes over another's storage as a *view* (same bytes, both read-only), by *mutation* (an
update writes the variable's next value over the old one) or *in place* (the op may write over an
input that nobody reads any more). A group is one request to the memory planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from plancompiler.ir.shard import element_count
from plancompiler.ir.task import TaskKind
from plancompiler.lower.rank_task_graph import RankRegister, RankTask, RankTaskGraph
from plancompiler.lower.schedule import COMPUTE, COPY, DATA, Schedule
from plancompiler.ops.registry import op_def
from plancompiler.plan.order import Clock, StepOrder, covers
from plancompiler.plan.plan import SliceSpec

DATA_SLOTS = 2
"""Slots of a register that a data source fills: it reads one step ahead."""
CROSSING_SLOTS = 2
"""Least slots of a micro-batch's register that other ranks read: one is filled while they read the
other."""


@dataclass
class Storage:
    """Groups of registers by their root, the register that first had the bytes."""

    root: dict[int, int] = field(default_factory=dict)
    members: dict[int, list[int]] = field(default_factory=dict)
    taken_from: dict[int, int] = field(default_factory=dict)
    """Register → the register whose bytes it took over."""
    overwrites: set[int] = field(default_factory=set)
    """Registers that were written over what they took (mutation and in place)."""
    variables: set[int] = field(default_factory=set)
    """Roots that are variables."""

    def add(self, register: int) -> None:
        """A register with bytes of its own."""
        self.root[register] = register
        self.members[register] = [register]

    def take_over(self, register: int, source: int, *, overwrite: bool) -> None:
        """Let a register live on another's bytes."""
        root = self.root[source]
        self.root[register] = root
        self.members[root].append(register)
        self.taken_from[register] = source
        if overwrite:
            self.overwrites.add(register)


def nbytes_of(register: RankRegister) -> int:
    """Bytes of one slot."""
    return element_count(register.shape) * register.dtype.itemsize


def slots_of(schedule: Schedule, graph: RankTaskGraph, members: Sequence[int]) -> int:
    """Slots of registers that share their bytes; the first of them is their root.

    As many micro-batches as are under way between the root's segment and the last that reads one.
    Data sources and copies run ahead of that by one, where no other rank needs the slot.
    """
    root = graph.registers[members[0]]
    producer = schedule.position[root.producer]
    ahead = schedule.streams[producer] == DATA and not root.remote_consumers
    if not schedule.parts.schedule:
        return DATA_SLOTS if ahead else 1
    if not root.per_microbatch:
        return 1
    last = max(schedule.segment[user] for user in schedule.users_of(graph, members))
    count = schedule.parts.in_flight(schedule.segment[producer], last)
    if schedule.streams[producer] in (DATA, COPY):
        count += 1
    if root.remote_consumers:
        count = max(count, CROSSING_SLOTS)
    return min(count, schedule.parts.microbatches)


def group_views(schedule: Schedule, graph: RankTaskGraph) -> Storage:
    """Groups made by views and by updates of variables, which do not depend on time."""
    storage = Storage()
    overwritten = _overwritten_at(schedule)
    order = schedule.order()
    for task in schedule.tasks:
        taken: dict[int, tuple[int, bool]] = {}
        if task.op_kind:
            for target, source in op_def(task.op_kind).mutates:
                taken[task.outputs[target]] = (task.inputs[source], True)
        for target, source in _views(task, graph):
            if _can_view(schedule, graph, storage, order, source, target) and (
                storage.root[source] not in overwritten
                or _last_use(schedule, graph, target) <= overwritten[storage.root[source]]
            ):
                taken.setdefault(target, (source, False))
        for register in task.outputs:
            if register in taken:
                source, overwrite = taken[register]
                storage.take_over(register, source, overwrite=overwrite)
            else:
                storage.add(register)
                if task.kind is TaskKind.VARIABLE:
                    storage.variables.add(register)
    return storage


def _overwritten_at(schedule: Schedule) -> dict[int, int]:
    """Variable's register → place of the update that overwrites it."""
    return {
        task.inputs[source]: place
        for place, task in enumerate(schedule.tasks)
        if task.op_kind
        for _, source in op_def(task.op_kind).mutates
    }


def _last_use(schedule: Schedule, graph: RankTaskGraph, register: int) -> int:
    """Place of the last task that may read a register's bytes, through views of it too.

    A view of a variable must not be read after the update: then it has to be a copy.
    """
    last = 0
    for consumer in graph.registers[register].consumers:
        place = schedule.position[consumer]
        last = max(last, place)
        for target, source in _views(schedule.tasks[place], graph):
            if source == register:
                last = max(last, _last_use(schedule, graph, target))
    return last


def _views(task: RankTask, graph: RankTaskGraph) -> list[tuple[int, int]]:
    """(output, input) registers whose bytes are the same by the task's meaning."""
    if task.op_kind:
        return [
            (task.outputs[target], task.inputs[source])
            for target, source in op_def(task.op_kind).view
        ]
    spec = task.spec
    if task.kind is TaskKind.COPY_HD:
        return []  # the same bytes, but in another memory
    if isinstance(spec, SliceSpec) and spec.reduction is None and len(spec.pieces) == 1:
        (piece,) = spec.pieces
        source, target = task.inputs[piece.input], task.outputs[0]
        whole = tuple((0, extent) for extent in graph.registers[source].shape)
        if piece.source == piece.target == whole and graph.registers[target].shape == tuple(
            stop for _, stop in whole
        ):
            return [(target, source)]
    return []


def _can_view(
    schedule: Schedule,
    graph: RankTaskGraph,
    storage: Storage,
    order: StepOrder,
    source: int,
    target: int,
) -> bool:
    """Whether a view may stand for a copy.

    Not for a register that another rank reads: its credits would not protect the bytes' first
    owner. Not from a register with slots that are filled ahead: its own readers' credits would be
    all that protects them.
    """
    before, after = graph.registers[source], graph.registers[target]
    if after.remote_consumers or nbytes_of(before) != nbytes_of(after):
        return False
    if not schedule.parts.schedule:
        return slots_of(schedule, graph, (source,)) == 1
    root = graph.registers[storage.root[source]]
    return before.per_microbatch == after.per_microbatch and schedule.knows_last_version_free(
        order, schedule.position[root.producer], per_microbatch=root.per_microbatch
    )


def group_in_place(
    schedule: Schedule, graph: RankTaskGraph, storage: Storage, order: StepOrder
) -> None:
    """Let ops write over inputs that are dead, where their kernels allow it."""
    done = _Users(schedule, graph, storage, order)
    crossing = {
        storage.root[key] for key, register in graph.registers.items() if register.remote_consumers
    }
    for place, task in enumerate(schedule.tasks):
        if not task.op_kind or schedule.streams[place] != COMPUTE:
            continue
        for target, source in op_def(task.op_kind).inplace:
            register, old = task.outputs[target], task.inputs[source]
            if storage.root[register] != register or len(storage.members[register]) > 1:
                continue
            old_root = storage.root[old]
            if (
                _can_replace(graph.registers[old], graph.registers[register])
                and old_root not in crossing
                and _is_rewritable(schedule, graph, storage, order, old_root)
                and done.before(old_root, place)
            ):
                del storage.members[register]
                storage.take_over(register, old, overwrite=True)
                done.join(old_root, register)
                break


class _Users:
    """What must have finished for a group of registers to be dead, kept as groups grow: a chain of
    ops that each write over their input is one group, and to ask all its members each time would
    take quadratic time.
    """

    def __init__(
        self, schedule: Schedule, graph: RankTaskGraph, storage: Storage, order: StepOrder
    ) -> None:
        self._schedule, self._graph = schedule, graph
        self._storage, self._order = storage, order
        self._clocks: dict[int, Clock] = {}

    def before(self, root: int, place: int) -> bool:
        """Whether all users of a group but the compute task at `place` are done when it starts."""
        order = self._order
        known = [*order.clocks[place]]
        known[COMPUTE] = order.positions[place] + 1
        return covers(tuple(known), self._clock(root))

    def join(self, root: int, register: int) -> None:
        """Count the users of a register that has joined a group."""
        own = self._clock_of((register,))
        self._clocks[root] = tuple(map(max, self._clock(root), own))

    def _clock(self, root: int) -> Clock:
        found = self._clocks.get(root)
        if found is None:
            found = self._clocks[root] = self._clock_of(self._storage.members[root])
        return found

    def _clock_of(self, registers: Sequence[int]) -> Clock:
        return self._order.clock_of(self._schedule.users_of(self._graph, registers))


def _can_replace(old: RankRegister, new: RankRegister) -> bool:
    return (
        old.shape == new.shape
        and old.dtype == new.dtype
        and old.per_microbatch == new.per_microbatch
        and not new.remote_consumers
    )


def _is_rewritable(
    schedule: Schedule, graph: RankTaskGraph, storage: Storage, order: StepOrder, root: int
) -> bool:
    """Whether a group's bytes may be written over, once their users on this rank are done."""
    if root in storage.variables:
        return False
    if not schedule.parts.schedule:
        return slots_of(schedule, graph, (root,)) == 1
    register = graph.registers[root]
    return schedule.knows_last_version_free(
        order, schedule.position[register.producer], per_microbatch=register.per_microbatch
    )


def hold_roots(schedule: Schedule, graph: RankTaskGraph, storage: Storage) -> None:
    """Keep a root's producer from filling the bytes again before the group's last users are done.

    Its own consumers give their credits back early when later registers share the bytes. A producer
    that knows of the step before (through the compute stream) needs nothing; for others a control
    edge to the last user on each stream makes a credit of it. With several micro-batches only
    producers that know have groups.
    """
    if schedule.parts.schedule:
        return
    order = schedule.order()
    for root, members in storage.members.items():
        if len(members) == 1 or root in storage.variables:
            continue
        producer = schedule.position[graph.registers[root].producer]
        users = schedule.users_of(graph, members)
        if covers(order.previous_clock(producer), order.clock_of(users)):
            continue
        last_on_stream = {schedule.streams[user]: user for user in users}
        for user in last_on_stream.values():
            if user != producer:
                schedule.add_control(producer, user)
