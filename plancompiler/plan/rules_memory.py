"""Rules about memory: sizes, registers that take others' bytes over, variables, overlap."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from plancompiler.errors import MemoryOverlapError, VerifyError
from plancompiler.ir.shard import element_count, rank_region, region_shape
from plancompiler.ir.task import TaskKind
from plancompiler.plan.index import PlanIndex, format_ids
from plancompiler.plan.order import Clock, covers
from plancompiler.plan.plan import Plan, RegisterDesc, VariableDesc
from plancompiler.plan.text import format_region, format_shape

ALIGNMENT = 64
"""Bytes that every register's offset is a multiple of."""


def check_sizes(index: PlanIndex) -> None:
    """Registers have the bytes of their shape and lie, aligned, inside their block."""
    blocks = index.plan.blocks
    for register in index.plan.registers:
        if register.is_control:
            continue
        needed = element_count(register.shape) * register.dtype.itemsize
        aligned = -(-needed // ALIGNMENT) * ALIGNMENT
        if min(register.shape, default=0) < 0 or register.nbytes not in (needed, aligned):
            raise index.broken(
                f"register {register.name!r} has other bytes than its shape needs",
                register=register,
                got=f"{register.nbytes} bytes",
                expected=f"{needed} bytes for {register.dtype}{format_shape(register.shape)}",
            )
        if register.register_count < 1:
            raise index.broken(
                f"register {register.name!r} has no slot",
                register=register,
                got=f"{register.register_count} slots",
                expected="1 slot or more",
            )
        block = blocks[register.block]
        end = register.offset + register.nbytes * register.register_count
        if register.offset < 0 or register.offset % ALIGNMENT or end > block.nbytes:
            raise index.broken(
                f"register {register.name!r} does not lie inside its block, aligned",
                register=register,
                got=f"bytes {register.offset} to {end} of block {register.block}",
                expected=f"a multiple of {ALIGNMENT} and at most {block.nbytes} bytes",
            )
    if not 0 <= index.plan.peak_live_bytes <= index.plan.arena_bytes:
        raise index.broken(
            "the lower bound of the arenas is more than the arenas",
            got=f"{index.plan.peak_live_bytes} bytes alive at once",
            expected=f"at most {index.plan.arena_bytes} bytes",
        )


def check_takeovers(index: PlanIndex) -> None:
    """A register that takes over memory has exactly the bytes of an input of its producer."""
    plan = index.plan
    for register in plan.registers:
        if register.inplace_of == -1:
            if register.is_view:
                raise index.broken(
                    f"register {register.name!r} is a view of no register",
                    register=register,
                    got="inplace_of -1",
                    expected="the register whose bytes it shows",
                )
            continue
        old = plan.register_by_id.get(register.inplace_of)
        task = plan.task_by_id[register.producer]
        if old is None or old.id not in task.inputs:
            raise index.broken(
                f"register {register.name!r} takes the memory of a register that its producer "
                "does not read",
                register=register,
                got=index.register_name(register.inplace_of),
                expected=f"one of the inputs {format_ids(task.inputs)}",
            )
        if _extent(register) != _extent(old) or (register.register_count, old.register_count) != (
            1,
            1,
        ):
            raise index.broken(
                f"register {register.name!r} has other bytes than {old.name!r}, whose memory it "
                "takes",
                register=register,
                got=_extent_text(register),
                expected=f"{_extent_text(old)}, one slot",
            )


def _extent(register: RegisterDesc) -> tuple[int, int, int]:
    return register.block, register.offset, register.nbytes


def _extent_text(register: RegisterDesc) -> str:
    start, end = register.offset, register.offset + register.nbytes * register.register_count
    return f"bytes {start} to {end} of block {register.block}"


def check_overwriting(index: PlanIndex) -> None:
    """A value is overwritten only when no task can still read it, in this step or from the last."""
    for root, members in index.groups.items():
        if len(members) > 1:
            _check_versions(index, index.plan.register_by_id[root], members)


def _check_versions(index: PlanIndex, root: RegisterDesc, members: list[RegisterDesc]) -> None:
    """Follow the values that the same bytes hold one after another."""
    order, position = index.order, index.position
    version_of: dict[int, int] = {}
    versions: list[list[RegisterDesc]] = [[]]
    writers: list[tuple[int, RegisterDesc]] = []
    for register in members:
        version = version_of.get(register.inplace_of, 0)
        if register.inplace_of != -1 and not register.is_view:
            if version != len(versions) - 1:
                raise index.broken(
                    f"register {register.name!r} overwrites a value that "
                    f"{versions[version + 1][0].name!r} has overwritten before",
                    register=register,
                    got=index.register_name(register.inplace_of),
                    expected=index.register_name(versions[-1][0].id),
                )
            versions.append([])
            version += 1
            writers.append((position[register.producer], register))
        version_of[register.id] = version
        versions[version].append(register)
    for (writer, register), old in zip(writers, versions, strict=False):
        users = [user for user in _users(index, old) if user != writer]
        if not covers(order.clocks[writer], order.clock_of(users)):
            late = next(user for user in users if not order.happens_before(user, writer))
            raise index.broken(
                f"{index.place_name(writer)} overwrites {old[0].name!r} while "
                f"{index.place_name(late)} may still use it",
                register=register,
                got="no order between the two tasks",
                expected=f"{index.place_name(late)} done before",
            )
    _check_next_step(index, root, versions, writers)


def _check_next_step(
    index: PlanIndex,
    root: RegisterDesc,
    versions: list[list[RegisterDesc]],
    writers: list[tuple[int, RegisterDesc]],
) -> None:
    """The next step's first writer must find the last value's readers done.

    A variable's task writes nothing, but it must find the updates done.
    """
    order = index.order
    first = index.position[root.producer]
    kept = index.plan.task_by_id[root.producer].kind is TaskKind.VARIABLE
    if kept and not writers:
        return
    last_users = _users(index, versions[-1])
    if kept:
        updates = [writer for writer, _ in writers]
        checks = [(first, updates), (updates[0], last_users)]
    else:
        checks = [(first, last_users)]
    for task, users in checks:
        for user in users:
            if not order.previous_step_done(user, task):
                raise index.broken(
                    f"{index.place_name(task)} of the next step may start while "
                    f"{index.place_name(user)} still uses the bytes of {root.name!r}",
                    register=root,
                    got="no order between the two tasks across the step's end",
                    expected=f"{index.place_name(user)} done before",
                )
    # Credits make the producer of a register wait for its readers on other ranks.
    protected = versions[-1][0] if len(writers) == (1 if kept else 0) else None
    for register in versions[-1]:
        if register is not protected and (away := index.remote_consumers(register)):
            raise index.broken(
                f"another rank may still read {register.name!r} when the next step writes there",
                register=register,
                got=f"read by {format_ids(away)}",
                expected="bytes of its own for a register that other ranks read",
            )


def _users(index: PlanIndex, registers: list[RegisterDesc]) -> list[int]:
    """Places of all tasks of this rank that make or read one of the registers."""
    places = [index.position[register.producer] for register in registers]
    for register in registers:
        places += index.local_consumers[register.id]
    return places


def check_variables(index: PlanIndex) -> None:
    """Variables have their task, their shard's box, and memory that is kept between steps."""
    plan = index.plan
    listed = {variable.register for variable in plan.variables}
    names: set[str] = set()
    for variable in plan.variables:
        register = plan.register_by_id.get(variable.register)
        if register is None or variable.name in names:
            raise index.broken(
                f"variable {variable.name!r} "
                + ("is listed twice" if variable.name in names else "has no register"),
                register=register,
                got=index.register_name(variable.register),
                expected="one register of this rank per variable",
            )
        names.add(variable.name)
        if (
            plan.task_by_id[register.producer].kind is not TaskKind.VARIABLE
            or plan.blocks[register.block].purpose != "variables"
        ):
            raise index.broken(
                f"variable {variable.name!r} is not kept from step to step",
                register=register,
                got=f"made by {index.task_name(register.producer)}, in a block for "
                f"{plan.blocks[register.block].purpose}",
                expected="a task of kind Variable, in a block for variables",
            )
        _check_shard(index, variable, register)
    for task in plan.tasks:
        if task.kind is TaskKind.VARIABLE and not listed.issuperset(task.outputs):
            raise index.broken(
                f"{task.name!r} is a variable that the plan does not list",
                task=task,
                got=format_ids(task.outputs),
                expected="an entry in the plan's variables",
            )


def _check_shard(index: PlanIndex, variable: VariableDesc, register: RegisterDesc) -> None:
    rank = index.plan.rank
    if rank not in variable.placement or len(variable.sbp) != variable.placement.ndim:
        raise index.broken(
            f"variable {variable.name!r} does not live on this rank",
            register=register,
            got=f"{variable.placement} {variable.sbp}",
            expected=f"a placement with rank {rank} and one SBP per mesh axis",
        )
    region = rank_region(variable.shape, variable.placement, variable.sbp, rank)
    if (
        variable.region != region
        or register.shape != region_shape(region)
        or register.dtype is not variable.dtype
    ):
        raise index.broken(
            f"variable {variable.name!r} is another box than its layout gives this rank",
            register=register,
            got=f"{register.dtype}{format_shape(register.shape)}, "
            f"box {format_region(variable.region)}",
            expected=f"{variable.dtype}{format_shape(region_shape(region))}, "
            f"box {format_region(region)}",
        )


@dataclass(frozen=True, slots=True)
class _Storage:
    """The bytes of a group of registers."""

    root: RegisterDesc
    start: int
    end: int
    producer: int
    """Place of the task that first writes them."""
    users: list[int]
    needed: Clock | None
    """What must be known for all users to be done; None where that is never known."""


def check_overlap(index: PlanIndex) -> None:
    """Registers on the same bytes are never alive at once, whatever the streams' interleaving.

    Producers are walked in plan order while a map from bytes to their last owner is kept. Order is
    transitive, so comparing each storage with the owners it displaces is enough, and across the
    step's end the last owner of a byte with its first.
    """
    by_block: dict[int, list[_Storage]] = {}
    for root, members in index.groups.items():
        register = index.plan.register_by_id[root]
        if register.nbytes > 0:
            by_block.setdefault(register.block, []).append(_storage(index, register, members))
    for _, storages in sorted(by_block.items()):
        _check_block(index, storages)


def _storage(index: PlanIndex, root: RegisterDesc, members: list[RegisterDesc]) -> _Storage:
    users = _users(index, members)
    never = (
        index.plan.blocks[root.block].purpose == "variables"
        or root.register_count > 1
        or any(len(index.local_consumers[one.id]) < len(one.consumers) for one in members)
    )
    return _Storage(
        root=root,
        start=root.offset,
        end=root.offset + root.nbytes * root.register_count,
        producer=index.position[root.producer],
        users=users,
        needed=None if never else index.order.clock_of(users),
    )


def _check_block(index: PlanIndex, storages: list[_Storage]) -> None:
    order = index.order
    last = _ByteMap()
    first = _ByteMap()
    for storage in storages:
        pieces = last.replace(storage)
        for start, end, owner in pieces:
            if owner is None:
                first.add(start, end, storage)
            elif (
                owner.needed is None
                or storage.needed is None
                or not covers(order.clocks[storage.producer], owner.needed)
            ):
                raise _overlap(index, owner, storage, across=False)
    for start, end, owner in first.pieces():
        for final in last.owners(start, end):
            if final is not owner and not (
                final.needed is not None
                and covers(order.previous_clock(owner.producer), final.needed)
            ):
                raise _overlap(index, final, owner, across=True)


class _ByteMap:
    """Disjoint ranges of bytes with their owners, sorted."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._owners: list[_Storage] = []

    def add(self, start: int, end: int, owner: _Storage) -> None:
        """A range that overlaps none."""
        at = bisect_left(self._starts, start)
        self._starts.insert(at, start)
        self._ends.insert(at, end)
        self._owners.insert(at, owner)

    def replace(self, owner: _Storage) -> list[tuple[int, int, _Storage | None]]:
        """Give the owner its bytes; the ranges it displaces, None where nobody owned them."""
        start, end = owner.start, owner.end
        low, high = bisect_right(self._ends, start), bisect_left(self._starts, end)
        displaced: list[tuple[int, int, _Storage | None]] = []
        kept: list[tuple[int, int, _Storage]] = []
        free = start
        for at in range(low, high):
            old_start, old_end, old = self._starts[at], self._ends[at], self._owners[at]
            if free < old_start:
                displaced.append((free, old_start, None))
            displaced.append((max(start, old_start), min(end, old_end), old))
            free = old_end
            if old_start < start:
                kept.append((old_start, start, old))
            if old_end > end:
                kept.append((end, old_end, old))
        if free < end:
            displaced.append((free, end, None))
        merged = sorted([*kept, (start, end, owner)], key=lambda piece: piece[0])
        self._starts[low:high] = [piece[0] for piece in merged]
        self._ends[low:high] = [piece[1] for piece in merged]
        self._owners[low:high] = [piece[2] for piece in merged]
        return displaced

    def pieces(self) -> list[tuple[int, int, _Storage]]:
        return list(zip(self._starts, self._ends, self._owners, strict=True))

    def owners(self, start: int, end: int) -> list[_Storage]:
        """Owners of any byte of a range."""
        return self._owners[bisect_right(self._ends, start) : bisect_left(self._starts, end)]


def _overlap(index: PlanIndex, old: _Storage, new: _Storage, *, across: bool) -> VerifyError:
    order = index.order
    when = " of the next step" if across else ""
    reason = _never_done(index.plan, old) or _never_done(index.plan, new)
    if reason is None:
        done = order.previous_step_done if across else order.happens_before
        late = next(user for user in old.users if not done(user, new.producer))
        reason = (
            f"{index.place_name(late)} may still use {old.root.name!r} when "
            f"{index.place_name(new.producer)}{when} writes {new.root.name!r}"
        )
    return index.broken(
        f"registers {old.root.name!r} and {new.root.name!r} are alive at once and share memory: "
        f"{reason}",
        register=new.root,
        got=f"{old.root.name!r} at {_extent_text(old.root)}, "
        f"{new.root.name!r} at {_extent_text(new.root)}",
        expected="bytes that do not overlap",
        error=MemoryOverlapError,
    )


def _never_done(plan: Plan, storage: _Storage) -> str | None:
    """Why the end of a storage's use is never known on its rank; None where it is."""
    if storage.needed is not None:
        return None
    if plan.blocks[storage.root.block].purpose == "variables":
        return f"{storage.root.name!r} is kept from step to step"
    if storage.root.register_count > 1:
        return f"{storage.root.name!r} has several slots"
    return f"{storage.root.name!r} is read by other ranks"
