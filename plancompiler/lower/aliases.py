"""Which registers of a rank share their bytes on purpose.

A register aliases another as a *view* (same bytes, both read-only), by *mutation* (an update writes
the variable's next value over the old one) or *in place* (the op may write over an input that
nobody reads any more). Registers on the same bytes are a group, called by its first one, the root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plancompiler.ir.shard import element_count
from plancompiler.ir.task import TaskKind
from plancompiler.lower.order import OrderedTasks
from plancompiler.lower.rank_task_graph import RankRegister, RankTask, RankTaskGraph
from plancompiler.ops.registry import op_def
from plancompiler.plan.index import COMPUTE, COPY, DATA
from plancompiler.plan.order import Clock, StepOrder, covers
from plancompiler.plan.plan import SliceSpec

DATA_SLOTS = 2
"""Slots of a register that a data source fills: it reads one step ahead."""
CROSSING_SLOTS = 2
"""Least slots of a micro-batch's register that other ranks read: one is filled while they read the
other."""


@dataclass(frozen=True, slots=True)
class Aliases:
    """Groups of registers."""

    root: Mapping[int, int]
    """Register → the first on its bytes."""
    members: Mapping[int, tuple[int, ...]]
    """Root → all registers on its bytes, in plan order, the root first."""
    alias_of: Mapping[int, int]
    """Register → the register whose bytes it is on, for all but roots."""
    overwrites: frozenset[int]
    """Registers that are written over what they alias (mutation and in place)."""


_NO_ALIASES = Aliases({}, {}, {}, frozenset())


class _Groups:
    """Groups while they grow, from those that are known."""

    def __init__(self, known: Aliases) -> None:
        self.root = dict(known.root)
        self.members = dict(known.members)
        self.alias_of = dict(known.alias_of)
        self.overwrites = set(known.overwrites)

    def add(self, register: int) -> None:
        """A register with bytes of its own."""
        self.root[register] = register
        self.members[register] = (register,)

    def alias(self, register: int, source: int, *, overwrite: bool) -> None:
        """Let a register live on another's bytes."""
        root = self.root[source]
        self.root[register] = root
        self.members[root] += (register,)
        self.alias_of[register] = source
        if overwrite:
            self.overwrites.add(register)

    def frozen(self) -> Aliases:
        return Aliases(self.root, self.members, self.alias_of, frozenset(self.overwrites))


def nbytes_of(register: RankRegister) -> int:
    """Bytes of one slot."""
    return element_count(register.shape) * register.dtype.itemsize


def slots_of(ordered: OrderedTasks, members: Sequence[int]) -> int:
    """Slots of registers that share their bytes; the first of them is their root.

    As many micro-batches as are under way between the root's segment and the last that reads one.
    Data sources and copies run ahead of that by one, where no other rank needs the slot.
    """
    root = ordered.graph.registers[members[0]]
    producer = ordered.maker[members[0]]
    ahead = ordered.streams[producer] == DATA and not root.remote_consumers
    if not ordered.parts.schedule:
        return DATA_SLOTS if ahead else 1
    if not root.per_microbatch:
        return 1
    last = max(ordered.segment[user] for user in ordered.users(members))
    count = ordered.parts.in_flight(ordered.segment[producer], last)
    if ordered.streams[producer] in (DATA, COPY):
        count += 1
    if root.remote_consumers:
        count = max(count, CROSSING_SLOTS)
    return min(count, ordered.parts.microbatches)


# --- views and updates ----------------------------------------------------------------------------


def aliases_of_views(ordered: OrderedTasks, order: StepOrder) -> Aliases:
    """Groups made by views and by updates of variables."""
    groups = _Groups(_NO_ALIASES)
    overwritten = _overwritten_at(ordered)
    for task in ordered.tasks:
        taken: dict[int, tuple[int, bool]] = {}
        if task.op_kind:
            for target, source in op_def(task.op_kind).mutates:
                taken[task.outputs[target]] = (task.inputs[source], True)
        for target, source in _views(task, ordered.graph):
            root = groups.root[source]
            if _can_view(ordered, order, root, source, target) and (
                root not in overwritten or _last_use(ordered, target) <= overwritten[root]
            ):
                taken.setdefault(target, (source, False))
        for register in task.outputs:
            if register in taken:
                source, overwrite = taken[register]
                groups.alias(register, source, overwrite=overwrite)
            else:
                groups.add(register)
    return groups.frozen()


def _overwritten_at(ordered: OrderedTasks) -> dict[int, int]:
    """Variable's register → place of the update that overwrites it."""
    return {
        task.inputs[source]: place
        for place, task in enumerate(ordered.tasks)
        if task.op_kind
        for _, source in op_def(task.op_kind).mutates
    }


def _last_use(ordered: OrderedTasks, register: int) -> int:
    """Place of the last task that may read a register's bytes, through views of it too.

    A view of a variable must not be read after the update: then it has to be a copy.
    """
    last = 0
    for consumer in ordered.graph.consumers.get(register, ()):
        place = ordered.place[consumer]
        last = max(last, place)
        for target, source in _views(ordered.tasks[place], ordered.graph):
            if source == register:
                last = max(last, _last_use(ordered, target))
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


def _can_view(ordered: OrderedTasks, order: StepOrder, root: int, source: int, target: int) -> bool:
    """Whether a view may stand for a copy.

    Not for a register that another rank reads: its credits would not protect the bytes' first
    owner. Not from a register with slots that are filled ahead: its own readers' credits would be
    all that protects them.
    """
    registers = ordered.graph.registers
    before, after = registers[source], registers[target]
    if after.remote_consumers or nbytes_of(before) != nbytes_of(after):
        return False
    if not ordered.parts.schedule:
        return slots_of(ordered, (source,)) == 1
    same_rate = before.per_microbatch == after.per_microbatch
    return same_rate and ordered.knows_last_version_free(order, root)


# --- in place -------------------------------------------------------------------------------------


def aliases_in_place(ordered: OrderedTasks, views: Aliases, order: StepOrder) -> Aliases:
    """The same groups, and ops that write over inputs that are dead, where their kernels can."""
    groups = _Groups(views)
    done = _GroupUsers(ordered, groups, order)
    registers = ordered.graph.registers
    crossing = {
        groups.root[key] for key, register in registers.items() if register.remote_consumers
    }
    for place, task in enumerate(ordered.tasks):
        if not task.op_kind or ordered.streams[place] != COMPUTE:
            continue
        for target, source in op_def(task.op_kind).inplace:
            register, old = task.outputs[target], task.inputs[source]
            if groups.root[register] != register or len(groups.members[register]) > 1:
                continue
            root = groups.root[old]
            if (
                _can_replace(registers[old], registers[register])
                and root not in crossing
                and _is_rewritable(ordered, order, root)
                and done.before(root, place)
            ):
                del groups.members[register]
                groups.alias(register, old, overwrite=True)
                done.join(root, register)
                break
    return groups.frozen()


class _GroupUsers:
    """What must have finished for a group of registers to be dead, kept as groups grow: a chain of
    ops that each write over their input is one group, and to ask all its members each time would
    take quadratic time.
    """

    def __init__(self, ordered: OrderedTasks, groups: _Groups, order: StepOrder) -> None:
        self._ordered, self._groups, self._order = ordered, groups, order
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
        clock = self._clocks.get(root)
        if clock is None:
            clock = self._clocks[root] = self._clock_of(self._groups.members[root])
        return clock

    def _clock_of(self, registers: Sequence[int]) -> Clock:
        return self._order.clock_of(self._ordered.users(registers))


def _can_replace(old: RankRegister, new: RankRegister) -> bool:
    return (
        old.shape == new.shape
        and old.dtype == new.dtype
        and old.per_microbatch == new.per_microbatch
        and not new.remote_consumers
    )


def _is_rewritable(ordered: OrderedTasks, order: StepOrder, root: int) -> bool:
    """Whether a group's bytes may be written over, once their users on this rank are done."""
    if ordered.is_variable(root):
        return False
    if not ordered.parts.schedule:
        return slots_of(ordered, (root,)) == 1
    return ordered.knows_last_version_free(order, root)
