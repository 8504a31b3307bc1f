"""Simulations of hand-written plans, whose times are known, and of compiled ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest

from plancompiler.errors import DeadlockError, UsageError
from plancompiler.ir import Job, Reduction
from plancompiler.ir.task import Primitive, TaskKind, family_of, rank_of
from plancompiler.lower.compile import compile_plans
from plancompiler.plan.plan import CollectiveSpec, Plan, RegisterDesc, Stream, Task
from plancompiler.simulate import (
    Action,
    Simulation,
    chrome_trace,
    no_latency,
    simulate,
    unit_cost,
)
from tests.examples import gpt, mlp
from tests.executor.plans import Sketch, chain, data_parallel, pipeline

ADD = [((5, 3), "float32")]


def times(simulation: Simulation, name: str, rank: int = 0) -> list[tuple[float, float]]:
    """(begin, end) of a task's actions."""
    return [
        (action.begin, action.end)
        for action in simulation.actions
        if action.task.name == name and action.rank == rank
    ]


def compute_cost(rank: int, task: Task) -> float:
    return 1.0 if task.kind is TaskKind.COMPUTE else 0.0


# --- times that are known -------------------------------------------------------------------------


def test_tasks_of_a_stream_run_one_after_another() -> None:
    simulation = simulate(chain(), unit_cost, steps=2)
    assert times(simulation, "compute_2") == [(0, 1), (2, 3)]
    assert times(simulation, "compute_3") == [(1, 2), (3, 4)]
    assert simulation.makespan == 4
    assert simulation.busy() == {(0, Stream.COMPUTE): 4, (0, Stream.DATA): 0}


def test_stages_overlap_over_steps_as_far_as_registers_allow() -> None:
    """With one slot the sender waits for the copy; with two it goes on, but what is copied has one
    slot in either case."""

    def cost(rank: int, task: Task) -> float:
        return {TaskKind.COMPUTE: 3.0, TaskKind.COPY_COMM_NET: 2.0}.get(task.kind, 0.0)

    one = simulate(pipeline(2, count=1), cost, steps=3)
    assert times(one, "compute_1") == [(0, 3), (5, 8), (10, 13)]
    assert times(one, "copycommnet_3", 1) == [(3, 5), (8, 10), (13, 15)]
    assert times(one, "compute_4", 1) == [(5, 8), (10, 13), (15, 18)]
    two = simulate(pipeline(2, count=2), cost, steps=3)
    assert times(two, "compute_1") == [(0, 3), (3, 6), (6, 9)]
    assert times(two, "copycommnet_3", 1) == times(one, "copycommnet_3", 1)
    three = simulate(pipeline(2, count=2), cost, steps=4)
    assert times(three, "compute_1")[3] == (10, 13)


def test_tasks_that_share_something_slow_each_other_down_while_both_are_at_work() -> None:
    def cost(rank: int, task: Task) -> float:
        return {TaskKind.COMPUTE: 3.0, TaskKind.COPY_COMM_NET: 2.0}.get(task.kind, 0.0)

    def uses(rank: int, task: Task) -> tuple[tuple[str, float], ...]:
        return (("cores", 0.75),) if task.kind is TaskKind.COMPUTE else ()

    shared = simulate(pipeline(2, count=2), cost, steps=2, uses=uses)
    # From 5 on both take 1.5 times as long, until the second one of rank 0, of which a second was
    # left, has ended.
    assert times(shared, "compute_1") == [(0, 3), (3, 6.5)]
    assert times(shared, "compute_4", 1) == [(5, 8.5), (10.5, 13.5)]
    assert times(shared, "copycommnet_3", 1) == [(3, 5), (8.5, 10.5)]


def test_a_collective_waits_for_its_slowest_link() -> None:
    """All members go on as slowly as the one whose link others use too."""

    def cost(rank: int, task: Task) -> float:
        return 1.0 if task.kind is TaskKind.COLLECTIVE_BOXING else 0.0

    def uses(rank: int, task: Task) -> tuple[tuple[object, float], ...]:
        return ((rank, 1.0 + rank),)

    simulation = simulate(data_parallel(3, rows=6), cost, uses=uses)
    assert simulation.makespan == pytest.approx(3.0)


def test_latency_is_between_ranks_only() -> None:
    simulation = simulate(
        pipeline(2), compute_cost, latency=lambda sender, receiver: 10.0 * sender + receiver + 0.5
    )
    assert times(simulation, "compute_1") == [(0, 1)]
    assert times(simulation, "copycommnet_3", 1) == [(2.5, 2.5)]
    assert times(simulation, "compute_4", 1) == [(2.5, 3.5)]


def test_a_stream_that_waited_goes_on_a_little_later() -> None:
    simulation = simulate(pipeline(2), compute_cost, wake=lambda rank, stream: 0.5)
    assert times(simulation, "compute_1") == [(0.5, 1.5)]
    assert times(simulation, "copycommnet_3", 1) == [(2, 2)]
    assert times(simulation, "compute_4", 1) == [(2.5, 3.5)]


def test_a_collective_waits_for_all_and_ends_for_all() -> None:
    def cost(rank: int, task: Task) -> float:
        if task.kind is TaskKind.COLLECTIVE_BOXING:
            return 5.0 - rank
        return 1.0 + rank if task.name == "compute_2" else 0.0

    simulation = simulate(data_parallel(3, rows=6), cost)
    for rank in range(3):
        assert times(simulation, "compute_2", rank) == [(0, 1 + rank)]
        assert times(simulation, "collectiveboxing_3", rank) == [(3, 8)]
    assert simulation.busy()[0, Stream.COLLECTIVE] == 5


# --- what cannot run ------------------------------------------------------------------------------


def swapped_collectives() -> dict[int, Plan]:
    """Two ranks with two collectives, in different orders."""
    sketch = Sketch(2)
    x = {rank: sketch.input(rank, 0, "x", (4,)) for rank in range(2)}
    shapes = {0: (4,), 1: (4,)}
    for family in (1, 2):
        sketch.collective([0, 1], family, Primitive.ALL_REDUCE, x, shapes, reduction=Reduction.SUM)
    plans = sketch.build()
    tasks = plans[1].tasks
    assert [isinstance(task.spec, CollectiveSpec) for task in tasks] == [False, True, True]
    return {0: plans[0], 1: replace(plans[1], tasks=(tasks[0], tasks[2], tasks[1]))}


def test_a_stall_names_who_waits_for_whom() -> None:
    with pytest.raises(DeadlockError) as caught:
        simulate(swapped_collectives(), unit_cost)
    text = str(caught.value)
    assert "rank 0, stream collective, step 0: task 'collectiveboxing_1' waits for rank 1" in text
    assert "rank 1, stream collective, step 0: task 'collectiveboxing_2' waits for rank 0" in text


def test_a_stall_names_registers_that_do_not_arrive() -> None:
    """Without its producer's end nothing arrives: a copy whose source waits for that copy."""
    sketch = Sketch(2)
    x = sketch.input(0, 0, "x", (5, 3))
    (a,) = sketch.compute(0, 2, "add", [x, x], ADD)
    copied = sketch.copy(1, 3, a)
    (b,) = sketch.compute(1, 4, "add", [copied, copied], ADD)
    back = sketch.copy(0, 5, b)
    (c,) = sketch.compute(0, 6, "add", [back, back], ADD)
    sketch.output(0, 7, "c", c)
    plans = sketch.build()
    assert simulate(plans, unit_cost).makespan == 5
    order = [0, 3, 1, 2, 4]  # the reader of what comes back before the producer of what is sent
    tasks = tuple(plans[0].tasks[position] for position in order)
    with pytest.raises(DeadlockError) as caught:
        simulate({**plans, 0: replace(plans[0], tasks=tasks)}, unit_cost)
    text = str(caught.value)
    assert "rank 0, stream compute, step 0: task 'compute_6' waits for register" in text
    assert "to arrive from stream copy" in text
    assert "rank 1, stream copy, step 0: task 'copycommnet_3' waits for register" in text
    assert "to arrive from rank 0" in text


def test_wrong_calls_are_refused() -> None:
    plans = pipeline(2)
    with pytest.raises(UsageError, match="plans of all ranks"):
        simulate({1: plans[1]}, unit_cost)
    with pytest.raises(UsageError, match="plans of all ranks"):
        simulate({}, unit_cost)
    with pytest.raises(UsageError, match="steps"):
        simulate(plans, unit_cost, steps=-1)
    for seconds in (-1.0, float("nan")):
        with pytest.raises(UsageError, match="less than no time"):
            simulate(plans, lambda rank, task, seconds=seconds: seconds)
    with pytest.raises(UsageError, match="bubble"):
        simulate(plans, unit_cost).bubble_fraction()


# --- compiled plans -------------------------------------------------------------------------------

JOBS = {
    "mlp dp=2 tp=2": (mlp, {"layout": "dp_tp"}),
    "gpt dp=2 zero=3": (gpt, {"dp": 2, "zero": 3}),
    "gpt tp=2 pp=2": (gpt, {"tp": 2, "pp": 2}),
    "gpt microbatches=4": (gpt, {"microbatches": 4}),
    "gpt gpipe": (gpt, {"tp": 2, "pp": 2, "microbatches": 4}),
    "gpt 1f1b": (gpt, {"dp": 2, "pp": 2, "microbatches": 4, "schedule": "1f1b"}),
    "gpt interleaved": (
        gpt,
        {"layers": 4, "pp": 2, "chunks": 2, "microbatches": 4, "schedule": "interleaved"},
    ),
    "gpt zero_bubble": (gpt, {"dp": 2, "pp": 2, "microbatches": 4, "schedule": "zero_bubble"}),
}
STEPS = 2


def compiled(job: Job) -> Mapping[int, Plan]:
    return compile_plans(job, job.world_size).plans


def uneven_cost(rank: int, task: Task) -> float:
    """Whole seconds that differ by rank and task."""
    return float((task.id * 2654435761 >> 7) % 5 + rank)


@pytest.fixture(scope="module", params=JOBS, ids=str)
def simulation(request: pytest.FixtureRequest) -> Simulation:
    make, arguments = JOBS[request.param]
    return simulate(compiled(make(**arguments)), uneven_cost, steps=STEPS)


def by_task(simulation: Simulation) -> dict[int, list[Action]]:
    by_task: dict[int, list[Action]] = {}
    for action in simulation.actions:
        by_task.setdefault(action.task.id, []).append(action)
    return by_task


@pytest.mark.slow
def test_every_task_runs_once_a_slot(simulation: Simulation) -> None:
    actual = by_task(simulation)
    for plan in simulation.plans.values():
        for task in plan.tasks:
            assert [(action.step, action.microbatch) for action in actual.pop(task.id)] == [
                (step, slot.microbatch)
                for step in range(STEPS)
                for slot in plan.slots
                if slot.segment == task.segment
            ]
    assert not actual


def test_streams_run_one_task_at_a_time_in_plan_order(simulation: Simulation) -> None:
    lines: dict[tuple[int, Stream], list[Action]] = {}
    for action in simulation.actions:
        lines.setdefault((action.rank, action.stream), []).append(action)
    for (rank, stream), actions in lines.items():
        plan = simulation.plans[rank]
        tasks = [task for task in plan.tasks if task.stream is stream]
        order = [task.id for slot in plan.slots for task in tasks if task.segment == slot.segment]
        assert [action.task.id for action in actions] == order * STEPS
        for earlier, later in pairwise(actions):
            assert earlier.end <= later.begin


def versions(register: RegisterDesc, actions: list[Action]) -> list[list[Action]]:
    """The actions of one task on each version of a register, in order."""
    versions: dict[tuple[int, int], list[Action]] = {}
    for action in actions:
        key = action.step, action.microbatch if register.per_microbatch else 0
        versions.setdefault(key, []).append(action)
    return [versions[key] for key in sorted(versions)]


def test_tasks_begin_after_what_they_read_and_slots_are_free(simulation: Simulation) -> None:
    actions = by_task(simulation)
    crossing = 0
    for plan in simulation.plans.values():
        for register in plan.registers:
            made = versions(register, actions[register.producer])
            for reader in set(register.consumers):
                crossing += rank_of(reader) != plan.rank
                read = versions(register, actions[reader])
                assert len(read) == len(made)
                for version, (making, reading) in enumerate(zip(made, read, strict=True)):
                    assert reading[0].begin >= making[-1].end
                    overwritten = version + register.register_count
                    if overwritten < len(made):
                        assert made[overwritten][0].begin >= reading[-1].end
    if any(plan.remote_registers for plan in simulation.plans.values()):
        assert crossing > 0


def test_collectives_begin_and_end_together(simulation: Simulation) -> None:
    spans: dict[tuple[int, tuple[int, ...], int, int], set[tuple[float, float]]] = {}
    for action in simulation.actions:
        if isinstance(action.task.spec, CollectiveSpec):
            plan = simulation.plans[action.rank]
            members = plan.communicators[action.task.spec.communicator].ranks
            key = family_of(action.task.id), members, action.step, action.microbatch
            spans.setdefault(key, set()).add((action.begin, action.end))
    assert len(spans) > 0 or not any(plan.communicators for plan in simulation.plans.values())
    assert all(len(moments) == 1 for moments in spans.values())


def test_streams_are_busy_for_what_their_tasks_cost(simulation: Simulation) -> None:
    for (rank, stream), seconds in simulation.busy().items():
        plan = simulation.plans[rank]
        tasks = [task for task in plan.tasks if task.stream is stream]
        if not any(isinstance(task.spec, CollectiveSpec) for task in tasks):
            runs = Counter(slot.segment for slot in plan.slots)
            each = sum(runs[task.segment] * uneven_cost(rank, task) for task in tasks)
            assert seconds == STEPS * each
        assert seconds <= simulation.makespan


def test_a_simulation_repeats_itself(simulation: Simulation) -> None:
    again = simulate(simulation.plans, uneven_cost, steps=STEPS, latency=no_latency)
    assert again.actions == simulation.actions


def test_the_trace_has_all_actions_that_take_time(simulation: Simulation) -> None:
    events = json.loads(chrome_trace(simulation))["traceEvents"]
    actions = [event for event in events if event["ph"] == "X"]
    timed = [action for action in simulation.actions if action.seconds > 0]
    assert len(actions) == len(timed)
    for event, action in zip(actions, timed, strict=True):
        assert (event["name"], event["pid"]) == (action.task.name, action.rank)
        assert (event["ts"], event["dur"]) == (action.begin * 1e6, action.seconds * 1e6)
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(names) == len(simulation.plans)
