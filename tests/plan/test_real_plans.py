"""Plans of traced jobs keep the rules, and edits of them are found."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

import plancompiler as pc
from plancompiler import nn
from plancompiler.errors import MemoryOverlapError, VerifyError
from plancompiler.ir.task import family_of
from plancompiler.lower.compile import compile_plans
from plancompiler.plan.digest import check_cross_rank_facts, cross_rank_facts
from plancompiler.plan.plan import CollectiveSpec, Plan, Task
from plancompiler.plan.verify import verify_plan, verify_plans

RANKS = 4


def trained(layout: str) -> pc.Job:
    """A small network with Adam: data-parallel, tensor-parallel, both, or in two stages."""
    meshes = {
        "dp": pc.Placement("cpu", [0, 1, 2, 3], ("dp",)),
        "dp_tp": pc.Placement("cpu", [[0, 1], [2, 3]], ("dp", "tp")),
        "stages": pc.Placement("cpu", [0, 1], ("dp",)),
    }
    mesh = meshes[layout]
    then = pc.Placement("cpu", [2, 3], ("dp",)) if layout == "stages" else mesh
    rows = ["S(0)"] + ["B"] * (mesh.ndim - 1)
    with pc.job("small", seed=1, config=pc.Config(fuse_bytes=0)) as job:
        x = pc.input("x", (8, 12), "float32", mesh, rows)
        y = pc.input("y", (8,), "int64", then, rows)
        wide = {"weight": ["B", "S(0)"]} if layout == "dp_tp" else {}
        hidden = nn.Linear(12, 32).place(mesh, wide)(x).relu()
        if then is not mesh:
            hidden = hidden.redistribute(then, rows)
        loss = pc.cross_entropy(nn.Linear(32, 5).place(then)(hidden), y)
        pc.optim.Adam(lr=0.01).minimize(loss)
        pc.output("loss", loss)
    return job


@pytest.fixture(scope="module", params=["dp", "dp_tp", "stages"])
def plans(request: pytest.FixtureRequest) -> dict[int, Plan]:
    return compile_plans(trained(request.param), RANKS).plans


def test_compiled_plans_keep_all_rules(plans: dict[int, Plan]) -> None:
    assert sorted(plans) == list(range(RANKS))
    for plan in plans.values():
        verify_plan(plan)
    verify_plans(plans)
    check_cross_rank_facts({rank: cross_rank_facts(plan) for rank, plan in plans.items()})


def test_arenas_meet_their_lower_bound(plans: dict[int, Plan]) -> None:
    for plan in plans.values():
        assert 0 < plan.peak_live_bytes <= plan.arena_bytes <= 1.005 * plan.peak_live_bytes


def test_any_two_registers_alive_together_are_kept_apart(plans: dict[int, Plan]) -> None:
    """Each register in turn is moved onto the bytes of one that is made right before it."""
    plan = plans[0]
    count = 0
    arena = [
        register
        for register in plan.registers
        if register.block >= 0
        and plan.blocks[register.block].purpose == "arena"
        and register.inplace_of == -1
        and register.nbytes > 0
        and not any(other.inplace_of == register.id for other in plan.registers)
    ]
    position = {task.id: place for place, task in enumerate(plan.tasks)}
    arena.sort(key=lambda register: position[register.producer])
    for one, two in itertools.pairwise(arena):
        if two.producer not in one.consumers:
            continue
        moved = replace(two, offset=one.offset)
        registers = tuple(moved if each is two else each for each in plan.registers)
        blocks = tuple(replace(block, nbytes=block.nbytes + two.nbytes) for block in plan.blocks)
        with pytest.raises(MemoryOverlapError) as caught:
            verify_plan(replace(plan, registers=registers, blocks=blocks))
        assert repr(one.name) in str(caught.value) or repr(two.name) in str(caught.value)
        count += 1
    assert count > 0


def test_swapped_collectives_name_both_ranks_and_families(plans: dict[int, Plan]) -> None:
    """On one rank only, in a plan that keeps its own rules."""
    edited, first, second = swapped_collectives(plans[0])
    with pytest.raises(VerifyError) as caught:
        verify_plans({**plans, 0: edited})
    message = str(caught.value)
    assert "in different orders" in message
    assert "ranks 0 and " in message
    for task in (first, second):
        assert f"family {family_of(task.id)} ({task.name!r})" in message


def swapped_collectives(plan: Plan) -> tuple[Plan, Task, Task]:
    """The plan with two neighbours of its busiest communicator in the other order."""
    number, communicator = max(
        enumerate(plan.communicators), key=lambda each: len(each[1].families)
    )
    collectives = [
        (place, task)
        for place, task in enumerate(plan.tasks)
        if isinstance(task.spec, CollectiveSpec) and task.spec.communicator == number
    ]
    for at, ((first, one), (second, two)) in enumerate(itertools.pairwise(collectives)):
        readers = {key for task in plan.tasks[first + 1 : second] for key in task.inputs}
        if readers & {*one.outputs} or {*two.inputs, *two.controls_in} & {
            *one.outputs,
            *one.controls_out,
        }:
            continue
        tasks = list(plan.tasks)
        tasks.insert(second, tasks.pop(first))
        families = list(communicator.families)
        families[at : at + 2] = reversed(families[at : at + 2])
        edited = replace(
            plan,
            tasks=tuple(tasks),
            communicators=(
                *plan.communicators[:number],
                replace(communicator, families=tuple(families)),
                *plan.communicators[number + 1 :],
            ),
        )
        try:
            verify_plan(edited)
        except VerifyError:
            continue  # memory that relied on the order, for one; try the next pair
        return edited, one, two
    raise LookupError("no two collectives of this plan can change places")
