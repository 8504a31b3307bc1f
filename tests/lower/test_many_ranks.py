"""Thousands of ranks: a few are compiled, and nothing about them grows with the others."""

from __future__ import annotations

from typing import Any

import pytest

import plancompiler as pc
from plancompiler.errors import IdOverflowError
from plancompiler.ir.task import RANK_BITS, rank_of
from plancompiler.lower.compile import Compilation, build_graph, compile_plans
from plancompiler.passes import stages
from tests.cache.work import count_work
from tests.examples import gpt, mlp

MOST = 1 << RANK_BITS
PIECES = {"microbatches": 8, "schedule": "1f1b"}
UNEVEN = {"layers": 6, "vocabulary": 257, "split_vocabulary": True, "spare": 1}

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "zero": {"zero": 1},
    "micro-batches": PIECES,
    "uneven": UNEVEN,
    "uneven, micro-batches": {**UNEVEN, **PIECES},
    "uneven, zero, micro-batches": {**UNEVEN, **PIECES, "zero": 1},
}


def some_of(ranks: int, spare: int = 0, **settings: Any) -> Compilation:
    """First, middle and last rank of a job on 4 stages, tp 4, with 16 sequences a replica and
    micro-batch, and `spare` more that do not divide.
    """
    dp = ranks // 16
    batch = (16 * dp + spare) * settings.get("microbatches", 1)
    job = gpt(**{"layers": 4, "pp": 4, "tp": 4, "batch": batch, "dp": dp, **settings})
    return compile_plans(job, ranks, "rank_per_iter", only_ranks=(0, ranks // 2, ranks - 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_neither_tasks_nor_slices_grow_with_ranks(name: str) -> None:
    few, many = (some_of(ranks, **VARIANTS[name]) for ranks in (1024, 16384))
    assert len(few.graph.families) == len(many.graph.families)
    assert [len(plan.tasks) for plan in few.plans.values()] == [
        len(plan.tasks) for plan in many.plans.values()
    ]
    assert [len(plan.registers) for plan in few.plans.values()] == [
        len(plan.registers) for plan in many.plans.values()
    ]
    # Larger extents and ranks take more digits; nothing else differs.
    assert many.graph_bytes - few.graph_bytes <= 64
    for one, other in zip(few.slices.values(), many.slices.values(), strict=True):
        assert len(other) - len(one) <= 32


def test_layers_that_do_not_divide_cost_as_much_as_they_are_more() -> None:
    even, uneven = (some_of(1024, layers=layers) for layers in (8, 6))
    per_stage = [len(plan.tasks) for plan in uneven.plans.values()]
    most = [len(plan.tasks) for plan in even.plans.values()]
    assert all(one <= other for one, other in zip(per_stage, most, strict=True))
    assert len(uneven.graph.families) < len(even.graph.families)


def test_a_hundred_thousand_ranks() -> None:
    # Stages of 25,024 devices: more than an id has lanes.
    ranks = 100_096
    few, many = some_of(1024), some_of(ranks)
    for rank, plan in many.plans.items():
        assert {rank_of(task.id) for task in plan.tasks} == {rank}
    assert [len(plan.tasks) for plan in many.plans.values()] == [
        len(plan.tasks) for plan in few.plans.values()
    ]


def test_the_highest_rank_of_an_id_has_a_plan() -> None:
    with pc.job("high") as job:
        x = pc.input("x", (2,), "float32", pc.Placement("cpu", [MOST - 1]))
        pc.output("y", x * 2.0)
    plan = compile_plans(job, MOST, only_ranks=[MOST - 1]).plans[MOST - 1]
    assert {rank_of(task.id) for task in plan.tasks} == {MOST - 1}


def test_ranks_beyond_an_id_are_refused_where_they_are_placed() -> None:
    with pytest.raises(IdOverflowError, match=rf"the rank does not fit.*Got: {MOST}"):
        pc.Placement("cpu", [0, MOST])


@pytest.mark.parametrize("only", [None, [0]])
def test_a_world_beyond_an_id_is_refused_before_anything_is_built(
    only: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = mlp(layout="dp", ranks=2)
    work = count_work(monkeypatch)
    with pytest.raises(IdOverflowError, match=r"the rank does not fit.*Got: 1999999"):
        compile_plans(job, 2_000_000, only_ranks=only)
    with pytest.raises(IdOverflowError, match="the rank does not fit"):
        build_graph(job, 2_000_000)
    assert not work


def test_ops_of_a_stage_share_one_set_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Seen(stages._Chunks):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(stages, "_Chunks", Seen)
    job = gpt(dp=32, pp=2, batch=64, microbatches=2)
    build_graph(job, 64)
    (chunks,) = made
    assert len(chunks.flow.ranks) > 100
    assert len({id(ranks) for ranks in chunks.flow.ranks.values()}) == 2
