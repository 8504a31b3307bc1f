"""Rules about ids, references, producers, consumers and plan order."""

from __future__ import annotations

from collections.abc import Iterator

from plancompiler.ir.task import CROSSING, SLOT_BITS, format_id, rank_of
from plancompiler.plan.index import PlanIndex, format_ids
from plancompiler.plan.plan import RegisterDesc, RemoteRegister, Task


def check_ids(index: PlanIndex) -> None:
    """Ids occur once and are of the right rank; blocks are numbered from 0."""
    plan = index.plan
    for what, entries in (("task", plan.tasks), ("register", plan.registers)):
        seen: dict[int, str] = {}
        for entry in entries:
            if rank_of(entry.id) != plan.rank:
                raise index.broken(
                    f"{what} {entry.name!r} has an id of another rank",
                    got=format_id(entry.id),
                    expected=f"an id of rank {plan.rank}",
                )
            if entry.id in seen:
                raise index.broken(
                    f"{what}s {seen[entry.id]!r} and {entry.name!r} have one id",
                    got=format_id(entry.id),
                    expected="an id each",
                )
            seen[entry.id] = entry.name
    if len(plan.remote_register_by_id) != len(plan.remote_registers):
        raise index.broken(
            "a remote register is listed twice",
            got=format_ids(remote.id for remote in plan.remote_registers),
            expected="ids that differ",
        )
    for remote in plan.remote_registers:
        if rank_of(remote.id) == plan.rank:
            raise index.broken(
                f"remote register {remote.name!r} has an id of this rank",
                got=format_id(remote.id),
                expected="an id of another rank",
            )
    for place, block in enumerate(plan.blocks):
        if block.index != place or block.nbytes < 0:
            raise index.broken(
                "a memory block is not well-formed",
                got=f"block {block.index} of {block.nbytes} bytes at place {place}",
                expected=f"block {place} of 0 bytes or more",
            )


def check_references(index: PlanIndex) -> None:
    """Everything that is named exists on this rank."""
    plan = index.plan
    registers, remotes = plan.register_by_id, plan.remote_register_by_id
    for task in plan.tasks:
        known = remotes if task.kind in CROSSING else registers
        for key in task.inputs:
            if key not in known:
                raise index.broken(
                    f"{task.name!r} reads a register that it cannot read",
                    task,
                    got=index.register_name(key),
                    expected="a register of this rank, or to copy a remote register",
                )
        for key in (*task.outputs, *task.controls_in, *task.controls_out):
            if key not in registers:
                raise index.broken(
                    f"{task.name!r} names a register that the plan does not have",
                    task,
                    got=index.register_name(key),
                    expected="a register of this rank",
                )
    for register in plan.registers:
        if register.producer not in index.position:
            raise index.broken(
                f"register {register.name!r} has no producer on its rank",
                got=index.task_name(register.producer),
                expected=f"a task of rank {plan.rank}",
            )
        for task_id in register.consumers:
            if rank_of(task_id) == plan.rank and task_id not in index.position:
                raise index.broken(
                    f"register {register.name!r} lists a consumer that does not exist",
                    register,
                    got=index.task_name(task_id),
                    expected=f"tasks of rank {plan.rank}",
                )
        if not -1 <= register.block < len(plan.blocks):
            raise index.broken(
                f"register {register.name!r} lies in a block that does not exist",
                register,
                got=f"block {register.block}",
                expected=f"one of {len(plan.blocks)} blocks",
            )


def check_producers(index: PlanIndex) -> None:
    """Every register is made by one task, the one that it names."""
    maker: dict[int, Task] = {}
    for task in index.plan.tasks:
        for key in (*task.outputs, *task.controls_out) if task.controls_out else task.outputs:
            other = maker.setdefault(key, task)
            if other is not task:
                raise index.broken(
                    f"{other.name!r} and {task.name!r} both make {index.register_name(key)}",
                    task,
                    got="two producers",
                    expected="one producer",
                )
    for register in index.plan.registers:
        made_by = maker.get(register.id)
        if made_by is None or made_by.id != register.producer:
            raise index.broken(
                f"register {register.name!r} is not made by the task that it names",
                register,
                got="no task" if made_by is None else index.task_name(made_by.id),
                expected=index.task_name(register.producer),
            )
    for task in index.plan.tasks:
        if len(set(task.outputs)) + len(set(task.controls_out)) != len(task.outputs) + len(
            task.controls_out
        ):
            raise index.broken(
                f"{task.name!r} makes a register twice",
                task,
                got=format_ids((*task.outputs, *task.controls_out)),
                expected="registers that differ",
            )


def check_plan_order(index: PlanIndex) -> None:
    """Producers come before their consumers."""
    registers, position = index.plan.register_by_id, index.position
    for place, task in enumerate(index.plan.tasks):
        for key in (*task.inputs, *task.controls_in) if task.controls_in else task.inputs:
            register = registers.get(key)
            if register is not None and position[register.producer] >= place:
                raise index.broken(
                    f"{task.name!r} reads {index.register_name(key)} before "
                    f"{index.task_name(register.producer)} makes it",
                    task,
                    got=f"reader at {place} of plan order, "
                    f"producer at {position[register.producer]}",
                    expected="the producer first",
                )


def check_consumers(index: PlanIndex) -> None:
    """A register lists the tasks that read it, in plan order, then those of other ranks by id."""
    rank = index.plan.rank
    readers: dict[int, list[int]] = {}
    for task in index.plan.tasks:
        for key in dict.fromkeys((*task.inputs, *task.controls_in)):
            readers.setdefault(key, []).append(task.id)
    for register in index.plan.registers:
        here = readers.get(register.id, [])
        if list(register.consumers) == here:
            continue
        away = sorted(task for task in set(register.consumers) if rank_of(task) != rank)
        if list(register.consumers) != [*here, *away]:
            raise _wrong_consumers(index, register, [*here, *away])
    for remote in index.plan.remote_registers:
        here = sorted(readers.get(remote.id, []))
        listed = [task for task in remote.consumers if rank_of(task) == rank]
        if listed != here or not here or list(remote.consumers) != sorted(set(remote.consumers)):
            raise _wrong_consumers(index, remote, here)


def _wrong_consumers(
    index: PlanIndex, register: RegisterDesc | RemoteRegister, expected: list[int]
) -> Exception:
    return index.broken(
        f"register {register.name!r} does not list the tasks that read it",
        register,
        got=", ".join(map(index.task_name, register.consumers)) or "no consumers",
        expected=", ".join(map(index.task_name, expected)) or "no consumers",
    )


def check_controls(index: PlanIndex) -> None:
    """Control registers have no memory and carry control only; others have a block and data."""
    registers = index.plan.register_by_id
    for task in index.plan.tasks:
        for control, keys in (
            (False, task.inputs),
            (False, task.outputs),
            (True, task.controls_in),
            (True, task.controls_out),
        ):
            for key in keys:
                register = registers.get(key)
                if register is not None and register.is_control is not control:
                    raise index.broken(
                        f"{task.name!r} uses {index.register_name(key)} as "
                        f"{'control' if control else 'data'}",
                        task,
                        got=f"block {register.block}",
                        expected="block -1 for control, a memory block for data",
                    )


def check_sync_ids(index: PlanIndex) -> None:
    """Registers that cross ranks, and only those, have the greatest candidate as sync id."""
    for register, readers in _crossing(index):
        # A candidate is a register id of its consumer, so it is the task's id but for the slot.
        greatest = max(readers) >> SLOT_BITS if readers else None
        actual = register.sync_id >> SLOT_BITS if register.sync_id != -1 else None
        if greatest != actual:
            raise index.broken(
                f"register {register.name!r} has a sync id that is not its consumers' greatest "
                "candidate",
                register,
                got="none" if register.sync_id == -1 else format_id(register.sync_id),
                expected=f"a register id of {format_id(max(readers))}" if readers else "none",
            )


def _crossing(index: PlanIndex) -> Iterator[tuple[RegisterDesc | RemoteRegister, list[int]]]:
    for register in index.plan.registers:
        yield register, index.remote_consumers(register)
    for remote in index.plan.remote_registers:
        yield remote, [task for task in remote.consumers if rank_of(task) != rank_of(remote.id)]
