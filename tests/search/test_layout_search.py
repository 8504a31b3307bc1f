"""The best layouts: against all others where they can be counted, against random ones elsewhere."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import UsageError
from plancompiler.ir.task import Primitive
from plancompiler.lower.compile import MODES, build_graph, compile_plans
from plancompiler.passes import run_passes
from plancompiler.search.layout_search import LayoutSearch, objective_seconds, search_layouts
from plancompiler.search.tied_ops import tie_ops
from tests.search.open_jobs import (
    AUTO,
    all_layouts,
    count_of,
    mlp,
    random_layouts,
    small,
    transformer,
    whole_problem,
)

pytest.importorskip("highspy")


def searched(job: pc.Job, memory_bytes: float | None = None) -> LayoutSearch:
    return search_layouts(run_passes(job)[0], memory_bytes)


@pytest.mark.parametrize("hierarchy", [(2,), (3,), (2, 2)], ids=str)
def test_small_jobs_get_the_best_of_all_layouts(hierarchy):
    compared = 0
    for seed in range(30):
        problem = whole_problem(small(seed, hierarchy))
        if count_of(problem) > 2000:
            continue
        least = min(objective_seconds(problem, each) for each in all_layouts(problem))
        result = searched(small(seed, hierarchy))
        assert result.objective_seconds == pytest.approx(least, rel=1e-6)
        assert result.bound_seconds <= least * (1 + 1e-9)
        compared += 1
    assert compared >= 5


@pytest.mark.parametrize(
    ("build", "hierarchy", "layers"),
    [(mlp, (2, 2), ()), (mlp, (3,), ()), (transformer, (2, 2), (1,)), (transformer, (4,), (2,))],
)
def test_no_legal_layouts_cost_less_than_the_bound(build, hierarchy, layers):
    job = build(hierarchy, *layers)
    result, problem, draw = searched(job), whole_problem(job), random.Random(7)
    assert result.gap <= 0.01
    assert objective_seconds(problem, result.signatures) == pytest.approx(result.objective_seconds)
    for _ in range(100):
        cost = objective_seconds(problem, random_layouts(problem, draw))
        assert cost >= result.bound_seconds


def losses(job: pc.Job, **feeds: np.ndarray) -> list[float]:
    with pc.run(job) as session:
        return [float(session.step(**feeds)["loss"]) for _ in range(3)]


@pytest.mark.parametrize("hierarchy", [(2,), (2, 2)], ids=str)
def test_searched_layouts_compute_what_one_rank_does(hierarchy):
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.normal(size=(16, 64)).astype(np.float32),
        "y": rng.integers(0, 8, 16),
    }
    alone = losses(mlp((1,), pc.Config()), **feeds)
    np.testing.assert_allclose(losses(mlp(hierarchy), **feeds), alone, rtol=1e-5)
    tokens = {"tokens": rng.integers(0, 64, (8, 16))}
    alone = losses(transformer((1,), 1, pc.Config()), **tokens)
    np.testing.assert_allclose(losses(transformer(hierarchy, 1), **tokens), alone, rtol=1e-5)


@pytest.mark.processes
def test_all_modes_make_one_plan_of_searched_layouts():
    job = mlp((2, 2))
    assert len({compile_plans(job, 4, mode).digest for mode in MODES}) == 1


def test_a_config_that_is_given_later_opens_what_nobody_has_placed():
    late = mlp((2, 2), pc.Config())
    with pc.run(late, config=AUTO) as session:
        shares = session.step(x=np.ones((16, 64), np.float32), y=np.zeros(16, np.int64))
    assert np.isfinite(shares["loss"])


def test_what_the_user_places_stays():
    mesh = pc.Placement("cpu", [0, 1])
    with pc.job("pinned", config=AUTO) as job:
        x = pc.input("x", (4096, 4096), "float32", mesh, "B")
        weight = pc.nn.Parameter((4096, 4096)).place(mesh, "S(1)").value
        pc.output("out", (x @ weight).redistribute(sbp="S(0)").sum())
    layouts = {placed.op.kind: placed.signature for placed in build_graph(job, 2).ops}
    assert str(layouts["input"].outputs[0]) == "[B]"
    assert str(layouts["variable"].outputs[0]) == "[S(1)]"
    assert str(layouts["redistribute"].outputs[0]) == "[S(0)]"


def test_ops_of_other_rules_are_not_tied():
    """Padding with zeros is linear, padding with ones is not: they may not share a signature."""
    mesh = pc.Placement("cpu", [0, 1])
    with pc.job("pads", config=AUTO) as job:
        x = pc.input("x", (4, 4), "float32", mesh)
        for value in (0.0, 1.0):
            pc.output(f"out{value}", pc.pad(x, (1, 1), (1, 1), value=value).sum())
    classes = {
        number
        for op, number in zip(job.ops, tie_ops(job, 0).class_of, strict=True)
        if op.kind == "pad"
    }
    assert len(classes) == 2


def test_a_demand_may_be_partial():
    mesh = pc.Placement("cpu", [0, 1])
    with pc.job("partial", config=AUTO) as job:
        x = pc.input("x", (4, 4), "float32", mesh)
        pc.output("out", x.redistribute(sbp="P").sum())
    with pc.run(job) as session:
        assert session.step(x=np.ones((4, 4), np.float32))["out"] == 16.0


def test_a_transformer_block_is_cut_as_people_cut_it():
    """Two reductions forward and two backward per block, or as much in halves."""

    def weights(layers: int) -> dict[Primitive, int]:
        config = replace(AUTO, machine="a100-sxm")
        job = transformer((4,), layers, config, dim=4096)
        counts: dict[Primitive, int] = {}
        for family in build_graph(job, 4).families:
            if family.transfer is not None and not family.name.startswith("variable"):
                kind = family.transfer.primitive
                counts[kind] = counts.get(kind, 0) + 1
        return counts

    more, less = weights(3), weights(2)
    per_block = {kind: more[kind] - less.get(kind, 0) for kind in more}
    whole = per_block.get(Primitive.ALL_REDUCE, 0)
    halves = sum(
        per_block.get(kind, 0) for kind in (Primitive.ALL_GATHER, Primitive.REDUCE_SCATTER)
    )
    assert whole + halves / 2 == 4, per_block


def test_memory_is_kept_to_by_splitting_what_is_held():
    free = searched(mlp((4,)))
    held = _held(free)
    tight = searched(mlp((4,)), held / 2)
    assert _held(tight) <= held / 2
    assert tight.objective_seconds >= tight.bound_seconds
    with pytest.raises(UsageError, match="no layouts fit"):
        searched(mlp((4,)), 1000.0)


def _held(result: LayoutSearch) -> float:
    problem = whole_problem(result.job)
    places = zip(problem.candidates, problem.kept, result.signatures, strict=True)
    return sum(
        float(each.held_bytes[each.signatures.index(signature)])
        for each, kept, signature in places
        if kept
    )
