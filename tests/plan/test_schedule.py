"""Steps of several micro-batches on all ranks: rates, orders of collectives, and no standstill."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plancompiler.errors import DeadlockError, DigestMismatchError, VerifyError
from plancompiler.ir import Reduction
from plancompiler.ir.pipeline import Pipeline, Segment, SegmentKind, Slot
from plancompiler.ir.task import Primitive, TaskKind
from plancompiler.plan.digest import check_cross_rank_facts, cross_rank_facts
from plancompiler.plan.plan import CollectiveSpec, Communicator, Plan, Stream
from plancompiler.plan.rules_ranks import PlansIndex
from plancompiler.plan.rules_schedule import (
    Gang,
    Link,
    PartRun,
    StepModel,
    step_model,
    strong_components,
)
from plancompiler.plan.verify import verify_plan, verify_plans
from tests.plan.builder import (
    PlanBuilder,
    edit_register,
    edit_remote,
    edit_task,
    task_named,
)
from tests.plan.pipelines import first_stage, last_stage, stage_plans

Plans = dict[int, Plan]


class Broken(NamedTuple):
    """An edit that breaks a rule, and what the error must say."""

    rule: str
    edit: Callable[[Plans], Plans]
    words: tuple[str, ...]
    error: type[VerifyError] = VerifyError


def on(rank: int, edit: Callable[[Plan], Plan]) -> Callable[[Plans], Plans]:
    """An edit of one rank's plan."""
    return lambda plans: {**plans, rank: edit(plans[rank])}


def mixed(first: str, last: str, microbatches: int = 3) -> Plans:
    """Stages with slots of different schedules."""
    plans = {0: first_stage(first, microbatches), 1: last_stage(last, microbatches)}
    return {rank: replace(plan, schedule="mixed") for rank, plan in plans.items()}


def one_by_one(plan: Plan) -> Plan:
    """The plan with each micro-batch's backward right after its forward."""
    work = [Slot(segment, m) for m in range(plan.microbatches) for segment in (1, 2)]
    return replace(plan, slots=(Slot(0, 0), *work, Slot(3, 0)))


def reduced_in_backward(plan: Plan) -> Plan:
    """The plan with its collective and its end's control once per micro-batch, in backward."""
    backward = task_named(plan, "accumulate").segment
    last = len(plan.segments) - 1
    tasks = [task for task in plan.tasks if task.segment < last]
    end = next(task for task in tasks if task.name.endswith("end") and task.segment == backward)
    moved = [replace(task, segment=backward) for task in plan.tasks if task.name == "all_reduce"]
    tasks[tasks.index(end) : tasks.index(end)] = moved
    tasks += [task for task in plan.tasks if task.segment == last and task.name != "all_reduce"]
    return replace(plan, tasks=tuple(tasks))


def collected_too_early(plans: Plans) -> Plans:
    """%d is complete after the last micro-batch, and read for each of them."""
    plans = on(1, lambda p: edit_register(p, "d", per_microbatch=False, register_count=1))(plans)
    return on(0, lambda p: edit_remote(p, per_microbatch=False))(plans)


def narrow(plans: Plans) -> Plans:
    """One slot for whatever crosses."""
    plans = on(0, lambda p: edit_register(p, "t", register_count=1))(plans)
    return on(1, lambda p: edit_register(p, "d", register_count=1))(plans)


CASES = [
    Broken(
        "plans are of one job",
        on(1, lambda p: replace(p, schedule="gpipe")),
        ("1f1b of 3 micro-batches", "gpipe of 3 micro-batches"),
    ),
    Broken(
        "plans are of one job",
        lambda plans: {0: plans[0], 1: last_stage("1f1b", 4)},
        ("of 3 micro-batches", "of 4 micro-batches"),
    ),
    Broken(
        "every receive has its send",
        on(0, lambda p: edit_remote(p, per_microbatch=False)),
        ("ranks 1 and 0 disagree about 'd'", "as rank 1 has it", "once per micro-batch"),
    ),
    Broken(
        "members run collectives in one order",
        lambda plans: {0: plans[0], 1: reduced_in_backward(plans[1])},
        (
            "ranks 0 and 1",
            "over the micro-batches",
            "number 1 of the step rank 1 runs family 40 for micro-batch 1",
            "none, as rank 0 does",
        ),
    ),
    Broken(
        "readers on other ranks run as often",
        collected_too_early,
        ("'d from rank 1'", "'d' of rank 1", "after the last micro-batch", "'backward 0'"),
    ),
    Broken(
        "the step runs to its end",
        lambda _: on(0, one_by_one)(mixed("gpipe", "gpipe")),
        (
            "slots of 2 groups of ranks",
            (
                "rank 0 before backward 0 of micro-batch 0 waits for the data of register %d "
                "from rank 1"
            ),
            (
                "rank 1 before forward 1 of micro-batch 1 waits for the data of register %t "
                "from rank 0"
            ),
        ),
        DeadlockError,
    ),
    Broken(
        "the step runs to its end",
        lambda _: narrow(mixed("gpipe", "1f1b")),
        (
            "slots of 2 groups of ranks",
            (
                "rank 0 before forward 0 of micro-batch 2 waits for a free slot of register %t "
                "from rank 1"
            ),
            (
                "rank 1 before forward and backward 1 of micro-batch 1 waits for a free slot of "
                "register %d from rank 0"
            ),
        ),
        DeadlockError,
    ),
]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
def test_plans_of_both_stages_keep_all_rules(schedule: str, microbatches: int) -> None:
    plans = stage_plans(schedule, microbatches)
    verify_plans(plans)
    check_cross_rank_facts({rank: cross_rank_facts(plan) for rank, plan in plans.items()})
    for rank, plan in plans.items():
        verify_plans({rank: plan})


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{at}-{case.rule.replace(' ', '_')}" for at, case in enumerate(CASES)]
)
def test_a_broken_rule_is_found_and_named(case: Broken) -> None:
    with pytest.raises(case.error) as caught:
        verify_plans(case.edit(stage_plans("1f1b")))
    message = str(caught.value)
    assert repr(case.rule) in message
    for word in case.words:
        assert word in message


def test_facts_hold_the_micro_batches_of_what_is_shared() -> None:
    plans = stage_plans("1f1b")
    broken = {
        "'d'": on(1, lambda p: edit_register(p, "d", per_microbatch=False)),
        "'[dt]'": on(1, lambda p: replace(p, microbatches=4)),
        "'communicator of ranks 0, 1": on(1, reduced_in_backward),
    }
    for name, edit in broken.items():
        facts = {rank: cross_rank_facts(plan) for rank, plan in edit(plans).items()}
        with pytest.raises(DigestMismatchError, match=f"disagree about .*{name}"):
            check_cross_rank_facts(facts)


def test_stages_are_gangs_and_meet_in_the_epilogue() -> None:
    model = step_model(PlansIndex(stage_plans("1f1b")))
    assert [gang.ranks for gang in model.gangs] == [(0,), (1,)]
    assert model.gangs[0].runs[-1] == model.gangs[1].runs[-1]
    assert {link.name for link in model.links} == {"t", "d"}
    assert model.gangs[0].names[:3] == (
        "prologue",
        "forward 0 of micro-batch 0",
        "forward 0 of micro-batch 1",
    )


def replicas() -> Plans:
    """Two ranks that do the same and reduce for every micro-batch."""
    plans = {}
    for rank in (0, 1):
        build = PlanBuilder(
            rank,
            communicators=(Communicator((0, 1), (2,)),),
            schedule="1f1b",
            microbatches=4,
            segments=(Segment(SegmentKind.FORWARD_BACKWARD, 0),),
            slots=tuple(Slot(0, m) for m in range(4)),
        )
        a = build.register(1, "a", (4,))
        build.compute(1, "make", (), (a,))
        r = build.register(2, "r", (4,))
        spec = CollectiveSpec(Primitive.ALL_REDUCE, 0, Reduction.SUM)
        kind, stream = TaskKind.COLLECTIVE_BOXING, Stream.COLLECTIVE
        build.task(2, kind, "all_reduce", (a,), (r,), spec, stream=stream)
        build.end()
        plans[rank] = build.build()
        verify_plan(plans[rank])
    return plans


def test_members_of_a_collective_in_a_segment_are_one_gang() -> None:
    plans = replicas()
    verify_plans(plans)
    (gang,) = step_model(PlansIndex(plans)).gangs
    assert gang.ranks == (0, 1)
    assert gang.runs == tuple(PartRun(0, m) for m in range(4))
    alone = {
        rank: replace(plan, communicators=(Communicator((rank,), (2,)),))
        for rank, plan in plans.items()
    }
    assert [gang.ranks for gang in step_model(PlansIndex(alone)).gangs] == [(0,), (1,)]


def test_what_runs_once_does_not_exchange_data_with_micro_batches() -> None:
    """The epilogue would send to forward and backward of the other rank, and receive from it."""
    plans = stage_plans("1f1b")
    late = edit_task(edit_task(plans[0], "relu", segment=3), "d from rank 1", segment=3)
    tasks = sorted(late.tasks, key=lambda task: task.segment)
    with pytest.raises(DeadlockError, match="two segments wait for each other") as caught:
        step_model(PlansIndex({**plans, 0: replace(late, tasks=tuple(tasks))}))
    assert "data of 'epilogue' of rank 0 come to 'forward and backward 1' of rank 1" in str(
        caught.value
    )


def staged(pipeline: Pipeline, slots: int, *, merged: bool) -> StepModel:
    """A pipeline's model: a gang per stage, activations and gradients with so many slots.

    Where merged, the last chunk's forward and backward are one part if they always follow.
    """
    parts: dict[object, int] = {}
    gangs = []
    last = pipeline.chunks - 1
    forward, backward = (
        Segment(kind, last) for kind in (SegmentKind.FORWARD, SegmentKind.BACKWARD)
    )
    for stage in range(pipeline.stages):
        slots_of_stage = [
            (pipeline.segments[slot.segment], slot.microbatch) for slot in pipeline.slots(stage)
        ]
        both = merged and all(
            after == (backward, slot[1])
            for slot, after in pairwise(slots_of_stage)
            if slot[0] == forward
        )
        runs = []
        for segment, microbatch in slots_of_stage:
            key = (stage, segment) if segment.kind is SegmentKind.PROLOGUE else segment
            if both and segment == backward:
                parts[backward] = parts[forward]
                continue
            runs.append(PartRun(parts.setdefault(key, len(parts)), microbatch))
        gangs.append(Gang((stage,), tuple(runs)))
    links = []
    for chunk in range(pipeline.chunks - 1):
        for kind, source, target in (
            (SegmentKind.FORWARD, chunk, chunk + 1),
            (SegmentKind.BACKWARD, chunk + 1, chunk),
        ):
            ends = (parts[Segment(kind, source)], parts[Segment(kind, target)])
            links.append(Link(f"{kind} {source}", *ends, slots))
    return StepModel(tuple(gangs), tuple(links))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize("merged", [False, True])
def test_every_schedule_comes_through_with_two_slots(schedule: str, merged: bool) -> None:
    for stages in range(1, 6):
        for each in (1, 2, 3) if schedule == "interleaved" else (1,):
            for rounds in (1, 2, 3):
                pipeline = Pipeline(schedule, 2 * stages * rounds, stages, stages * each)
                run = staged(pipeline, 2, merged=merged).run()
                assert not run.circle(), pipeline
                assert len(run.order) == len(set(run.order))


def test_interleaved_stages_need_room_between_them() -> None:
    circle = staged(Pipeline("interleaved", 6, 3, 6), 1, merged=True).run().circle()
    assert circle
    assert any(wait.credit for wait in circle)


@st.composite
def models(draw: st.DrawFn) -> StepModel:
    """Gangs with some parts of their own and some shared, in any order that keeps micro-batches."""
    count = draw(st.integers(1, 4))
    microbatches = draw(st.integers(1, 3))
    parts = draw(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=5))
    members = [
        draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=2 if shared else 1))
        for shared, _ in parts
    ]
    gangs = []
    for gang in range(count):
        left = {
            part: microbatches if parts[part][1] else 1
            for part in range(len(parts))
            if gang in members[part]
        }
        done = dict.fromkeys(left, 0)
        runs = []
        while left:
            part = draw(st.sampled_from(sorted(left)))
            runs.append(PartRun(part, done[part]))
            done[part] += 1
            if done[part] == left[part]:
                del left[part]
        gangs.append(Gang((gang,), tuple(runs)))
    links = []
    for number in range(draw(st.integers(0, 4))):
        source, target = (draw(st.integers(0, len(parts) - 1)) for _ in range(2))
        rate = parts[source][1] and parts[target][1] and draw(st.booleans())
        if source != target:
            slots = draw(st.integers(1, 2))
            links.append(Link(f"r{number}", source, target, slots, per_microbatch=rate))
    return StepModel(tuple(gangs), tuple(links))


def waits(model: StepModel) -> nx.DiGraph:
    """The unrolled graph of one step: an edge from each run to those that wait for it."""
    graph = nx.DiGraph()
    total: dict[int, int] = {}
    for gang in model.gangs:
        graph.add_nodes_from(gang.runs)
        graph.add_edges_from(zip(gang.runs, gang.runs[1:], strict=False))
        for run in gang.runs:
            total[run.part] = max(total.get(run.part, 0), run.microbatch + 1)
    for link in model.links:
        for m in range(total[link.target]):
            made = m if link.per_microbatch else total[link.source] - 1
            graph.add_edge(PartRun(link.source, made), PartRun(link.target, m))
        for m in range(total[link.source] - link.slots) if link.per_microbatch else ():
            graph.add_edge(PartRun(link.target, m), PartRun(link.source, m + link.slots))
    return graph


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(models())
def test_a_step_ends_if_and_only_if_the_unrolled_graph_has_no_circle(model: StepModel) -> None:
    graph, run = waits(model), model.run()
    circle = run.circle()
    assert bool(circle) is not nx.is_directed_acyclic_graph(graph)
    place = {each: at for at, each in enumerate(run.order)}
    assert len(place) == len(run.order)
    if not circle:
        assert set(place) == set(graph)
    for before, after in graph.edges:
        assert after not in place or place[before] < place[after]
    for wait, following in zip(circle, [*circle[1:], *circle[:1]], strict=True):
        assert wait.other == following.gang
        blocked = model.gangs[wait.gang].runs[wait.run]
        assert blocked not in place
        if wait.link is not None:
            assert blocked.part == (wait.link.source if wait.credit else wait.link.target)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 12), st.integers(0, 1 << 30))
def test_components_are_those_of_networkx(count: int, seed: int) -> None:
    chance = random.Random(seed)
    edges = [
        [chance.randrange(count) for _ in range(chance.choice([0, 1, 1, 2]))] for _ in range(count)
    ]
    graph = nx.DiGraph([(one, two) for one, after in enumerate(edges) for two in after])
    graph.add_nodes_from(range(count))
    results: dict[int, set[int]] = {}
    for vertex, component in enumerate(strong_components(edges)):
        results.setdefault(component, set()).add(vertex)
    expected = list(nx.strongly_connected_components(graph))
    assert sorted(map(sorted, results.values())) == sorted(map(sorted, expected))
