"""Plans with one thing changed: what a broken compiler or a damaged file could give the verifiers.

`mutant` changes one rank's plan, or every rank's in the same way: the order of tasks, their streams
and segments, slots, control edges, registers and communicators. Whatever is changed, a plan still
says the same of what each op computes. So a mutant that the verifiers accept must run to its end
with the losses of the plans that it was made from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random

from plancompiler.errors import PlanCompilerError
from plancompiler.executor.local_run import LocalWorld
from plancompiler.ir.pipeline import Slot
from plancompiler.ir.task import rank_of
from plancompiler.plan.plan import Plan, RegisterDesc, Stream, Task
from plancompiler.plan.verify import verify_plan, verify_plans

Mutation = Callable[[Plan, Random], Plan]


@dataclass(frozen=True)
class Mutant:
    """Plans of all ranks, of which those of `ranks` were changed."""

    kind: str
    ranks: tuple[int, ...]
    plans: dict[int, Plan]


def accepted(plans: Mapping[int, Plan]) -> bool:
    """Whether the verifiers let these plans run. What they raise but their own errors is raised."""
    try:
        for plan in plans.values():
            verify_plan(plan)
        verify_plans(plans)
    except PlanCompilerError:
        return False
    return True


def losses(plans: Mapping[int, Plan], steps: int = 3, deadline: float = 10.0) -> list[float]:
    """The output `loss` of the first steps. A run that waits for longer than the deadline fails."""
    with LocalWorld(plans, deadline=deadline) as world:
        return [float(world.step({})["loss"]) for _ in range(steps)]


def mutant(plans: Mapping[int, Plan], rng: Random, kind: str | None = None) -> Mutant:
    """Plans after one mutation, of `kind` or of any; it may have left them as they were."""
    kind = rng.choice(sorted(MUTATIONS)) if kind is None else kind
    # A group whose members are everywhere listed in another order is another program: it adds and
    # gathers in that order.
    everywhere = kind != "communicators" and rng.random() < 0.25
    ranks = sorted(plans) if everywhere else [rng.choice(sorted(plans))]
    seed = rng.random()
    changed = {rank: MUTATIONS[kind](plans[rank], Random(seed)) for rank in ranks}
    return Mutant(kind, tuple(ranks), {**plans, **changed})


def _with_order(plan: Plan, tasks: list[Task], rng: Random) -> Plan:
    """The plan in another order; mostly with consumers listed in it, so that only the order itself
    can be wrong."""
    registers = plan.registers
    if rng.random() < 0.8:
        position = {task.id: place for place, task in enumerate(tasks)}
        registers = tuple(
            replace(
                register,
                consumers=(
                    *sorted(
                        (task for task in register.consumers if task in position),
                        key=position.__getitem__,
                    ),
                    *(task for task in register.consumers if rank_of(task) != plan.rank),
                ),
            )
            for register in plan.registers
        )
    return replace(plan, tasks=tuple(tasks), registers=registers)


def _two_tasks_exchanged(plan: Plan, rng: Random) -> Plan:
    tasks = list(plan.tasks)
    one, two = rng.sample(range(len(tasks)), 2)
    tasks[one], tasks[two] = tasks[two], tasks[one]
    return _with_order(plan, tasks, rng)


def _neighbours_exchanged(plan: Plan, rng: Random) -> Plan:
    tasks = list(plan.tasks)
    one = rng.randrange(len(tasks) - 1)
    tasks[one : one + 2] = tasks[one + 1], tasks[one]
    return _with_order(plan, tasks, rng)


def _task_moved(plan: Plan, rng: Random) -> Plan:
    tasks = list(plan.tasks)
    task = tasks.pop(rng.randrange(len(tasks)))
    tasks.insert(rng.randrange(len(tasks) + 1), task)
    return _with_order(plan, tasks, rng)


def _tasks_shuffled(plan: Plan, rng: Random) -> Plan:
    tasks = list(plan.tasks)
    start, stop = sorted(rng.sample(range(len(tasks) + 1), 2))
    some = tasks[start:stop]
    rng.shuffle(some)
    tasks[start:stop] = some
    return _with_order(plan, tasks, rng)


def _task_lost(plan: Plan, rng: Random) -> Plan:
    # What only overwrites, such as an update, is missed by no other task: another program.
    overwriting = {
        one.producer for one in plan.registers if one.inplace_of != -1 and not one.is_view
    }
    lost = rng.choice([task for task in plan.tasks if task.id not in overwriting])
    tasks = [task for task in plan.tasks if task is not lost]
    if rng.random() < 0.5:
        return _with_order(plan, tasks, rng)
    # With all that it made and read, as if it had never been there.
    made = {*lost.outputs, *lost.controls_out}
    return replace(
        plan,
        tasks=tuple(
            replace(task, controls_in=tuple(key for key in task.controls_in if key not in made))
            for task in tasks
        ),
        registers=tuple(
            replace(
                register, consumers=tuple(task for task in register.consumers if task != lost.id)
            )
            for register in plan.registers
            if register.id not in made
        ),
    )


def _task_on_another_stream(plan: Plan, rng: Random) -> Plan:
    return _task_changed(plan, rng, lambda _: {"stream": rng.choice(list(Stream))})


def _task_in_another_segment(plan: Plan, rng: Random) -> Plan:
    return _task_changed(plan, rng, lambda _: {"segment": rng.randrange(len(plan.segments))})


def _task_changed(plan: Plan, rng: Random, change: Callable[[Task], Mapping[str, object]]) -> Plan:
    tasks = list(plan.tasks)
    place = rng.randrange(len(tasks))
    tasks[place] = replace(tasks[place], **change(tasks[place]))
    return replace(plan, tasks=tuple(tasks))


def _register_changed(
    plan: Plan, rng: Random, change: Callable[[RegisterDesc], Mapping[str, object]]
) -> Plan:
    registers = list(plan.registers)
    place = rng.randrange(len(registers))
    registers[place] = replace(registers[place], **change(registers[place]))
    return replace(plan, registers=tuple(registers))


def _slots_of_a_register(plan: Plan, rng: Random) -> Plan:
    def change(register: RegisterDesc) -> Mapping[str, object]:
        count = register.register_count
        return {"register_count": rng.choice([-1, 0, 0, 1, count - 1, count + 1, 1000])}

    return _register_changed(plan, rng, change)


def _slots_of_control_registers(plan: Plan, rng: Random) -> Plan:
    controls = [place for place, one in enumerate(plan.registers) if one.is_control]
    if not controls:
        return plan
    registers = list(plan.registers)
    place = rng.choice(controls)
    count = registers[place].register_count
    registers[place] = replace(
        registers[place], register_count=rng.choice([-1, 0, count - 1, count + 1])
    )
    return replace(plan, registers=tuple(registers))


def _place_of_a_register(plan: Plan, rng: Random) -> Plan:
    other = rng.choice(plan.registers)
    offsets = [other.offset, other.offset + 64, max(0, other.offset - 64), 0]
    return _register_changed(
        plan,
        rng,
        lambda register: {
            "offset": rng.choice(offsets),
            "block": rng.choice([register.block, other.block]),
        },
    )


def _fields_of_a_register(plan: Plan, rng: Random) -> Plan:
    other = rng.choice(plan.registers)

    def change(register: RegisterDesc) -> Mapping[str, object]:
        return rng.choice(
            [
                {"per_microbatch": not register.per_microbatch},
                {"is_view": not register.is_view},
                {"inplace_of": rng.choice([-1, other.id])},
                {"sync_id": rng.choice([-1, other.id, other.sync_id])},
                {"consumers": tuple(rng.sample(register.consumers, len(register.consumers)))},
                {"consumers": register.consumers[:-1]},
                {"consumers": other.consumers},
                {"producer": other.producer},
                {"nbytes": other.nbytes},
                {"block": rng.randrange(-1, len(plan.blocks))},
            ]
        )

    return _register_changed(plan, rng, change)


def _size_of_a_block(plan: Plan, rng: Random) -> Plan:
    blocks = list(plan.blocks)
    place = rng.randrange(len(blocks))
    block = blocks[place]
    blocks[place] = replace(
        block, nbytes=max(0, block.nbytes + rng.choice([-64, 64, 4096, -block.nbytes]))
    )
    return replace(plan, blocks=tuple(blocks))


def _control_edge_lost(plan: Plan, rng: Random) -> Plan:
    """One task no longer waits for another; both sides know."""
    waiting = [(task.id, key) for task in plan.tasks for key in task.controls_in]
    if not waiting:
        return plan
    reader, lost = rng.choice(waiting)
    kept = tuple(task for task in plan.register_by_id[lost].consumers if task != reader)
    made = {lost} if not kept else set()
    return replace(
        plan,
        tasks=tuple(
            replace(
                task,
                controls_in=tuple(
                    key for key in task.controls_in if (task.id, key) != (reader, lost)
                ),
                controls_out=tuple(key for key in task.controls_out if key not in made),
            )
            for task in plan.tasks
        ),
        registers=tuple(
            replace(register, consumers=kept) if register.id == lost else register
            for register in plan.registers
            if register.id not in made
        ),
    )


def _slots_of_the_step(plan: Plan, rng: Random) -> Plan:
    slots = list(plan.slots)
    place = rng.randrange(len(slots))
    match rng.randrange(6):
        case 0:
            other = rng.randrange(len(slots))
            slots[place], slots[other] = slots[other], slots[place]
        case 1:
            del slots[place]
        case 2:
            slots.insert(rng.randrange(len(slots) + 1), slots[place])
        case 3:
            slots.insert(rng.randrange(len(slots)), slots.pop(place))
        case 4:
            slots[place] = Slot(slots[place].segment, rng.randrange(-1, plan.microbatches + 1))
        case _:
            slots[place] = Slot(rng.randrange(-1, len(plan.segments) + 1), slots[place].microbatch)
    return replace(plan, slots=tuple(slots))


def _communicators(plan: Plan, rng: Random) -> Plan:
    if not plan.communicators:
        return plan
    communicators = list(plan.communicators)
    place = rng.randrange(len(communicators))
    one = communicators[place]
    families = list(one.families)
    ranks = list(one.ranks)
    match rng.randrange(5):
        case 0:
            rng.shuffle(families)
        case 1:
            del families[rng.randrange(len(families))]
        case 2:
            rng.shuffle(ranks)
        case 3:
            del ranks[rng.randrange(len(ranks))]
        case _:
            rng.shuffle(communicators)
            return replace(plan, communicators=tuple(communicators))
    communicators[place] = replace(one, families=tuple(families), ranks=tuple(ranks))
    return replace(plan, communicators=tuple(communicators))


def _remote_registers(plan: Plan, rng: Random) -> Plan:
    remotes = list(plan.remote_registers)
    if not remotes:
        return plan
    place = rng.randrange(len(remotes))
    one, other = remotes[place], rng.choice(remotes)
    match rng.randrange(5):
        case 0:
            del remotes[place]
        case 1:
            remotes[place] = replace(one, per_microbatch=not one.per_microbatch)
        case 2:
            remotes[place] = replace(one, consumers=one.consumers[:-1])
        case 3:
            remotes[place] = replace(one, sync_id=other.sync_id)
        case _:
            remotes[place] = replace(one, producer=other.producer)
    return replace(plan, remote_registers=tuple(remotes))


MUTATIONS: dict[str, Mutation] = {
    "two tasks exchanged": _two_tasks_exchanged,
    "neighbours exchanged": _neighbours_exchanged,
    "a task moved": _task_moved,
    "tasks shuffled": _tasks_shuffled,
    "a task lost": _task_lost,
    "a task on another stream": _task_on_another_stream,
    "a task in another segment": _task_in_another_segment,
    "slots of a register": _slots_of_a_register,
    "slots of a control register": _slots_of_control_registers,
    "place of a register": _place_of_a_register,
    "fields of a register": _fields_of_a_register,
    "size of a block": _size_of_a_block,
    "a control edge lost": _control_edge_lost,
    "slots of the step": _slots_of_the_step,
    "communicators": _communicators,
    "remote registers": _remote_registers,
}
