"""Whole plans: pipelines of open jobs, their files, what fits, and what is wrong with a demand."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import plancompiler as pc
from examples import mlp as digits
from plancompiler.costs import machine_of
from plancompiler.errors import PlanCompilerError, ShapeError, UsageError
from plancompiler.forecasting.plan_search import search_plans
from plancompiler.frontend.open_layouts import with_config
from plancompiler.ir import Job, NdSbp, Phase
from plancompiler.passes import config_of, run_passes
from plancompiler.search.layout_file import with_layout_file, with_layouts
from plancompiler.search.layout_search import search_layouts
from plancompiler.search.pipeline_cut import chunk_of_ops, with_stages
from plancompiler.search.plan_estimates import PlanEstimate, plan_estimates
from tests.search.open_jobs import AUTO, mesh_of, mlp

pytest.importorskip("highspy")


def language_model(hierarchy: tuple[int, ...], layers: int, config: pc.Config = AUTO) -> Job:
    """A training job of transformer blocks; labels are an input of their own."""
    mesh = mesh_of(hierarchy)
    with pc.job("model", seed=5, config=config) as job:
        tokens = pc.input("tokens", (8, 16), "int64", mesh)
        labels = pc.input("labels", (8, 16), "int64", mesh)
        net = pc.nn.Sequential(
            pc.nn.Embedding(64, 16),
            *(pc.nn.TransformerBlock(16, 2) for _ in range(layers)),
            pc.nn.Linear(16, 64),
        )
        loss = pc.cross_entropy(net.place(mesh)(tokens), labels, ignore_index=None)
        pc.optim.AdamW(1e-3).minimize(loss)
        pc.output("loss", loss)
    return job


def losses(job: Job, **feeds: np.ndarray) -> list[float]:
    with pc.run(job) as session:
        return [float(session.step(**feeds)["loss"]) for _ in range(2)]


@pytest.mark.parametrize(
    ("stages", "chunks", "shape", "settings"),
    [
        (2, 2, (1,), {"microbatches": 1}),
        pytest.param(
            *(2, 2, (2,), {"microbatches": 4, "schedule": "1f1b", "layout": "auto"}),
            marks=pytest.mark.slow,
        ),
        (2, 4, (1,), {"microbatches": 2, "schedule": "interleaved"}),
        (2, 2, (2, 1), {"microbatches": 2, "schedule": "1f1b", "recompute": "auto"}),
    ],
    ids=str,
)
def test_a_cut_job_computes_what_one_rank_does(stages, chunks, shape, settings):
    draw = np.random.default_rng(0)
    feeds = {name: draw.integers(0, 64, (8, 16)) for name in ("tokens", "labels")}
    size = stages * int(np.prod(shape))
    job = with_stages(language_model((size,), 3), stages, shape, chunks)
    job = replace(job, config=pc.Config(**settings))
    alone = losses(language_model((1,), 3, pc.Config()), **feeds)
    np.testing.assert_allclose(losses(job, **feeds), alone, rtol=1e-5)


def test_stages_have_even_work_and_calls_stay_whole():
    job = language_model((4,), 8)
    of = chunk_of_ops(job, 4)
    regions: dict[str, set[int]] = {}
    for op in job.ops:
        if op.origin.phase is Phase.FORWARD and op.origin.region and op.name in of:
            regions.setdefault(op.origin.region, set()).add(of[op.name])
    assert all(len(chunks) == 1 for chunks in regions.values())
    per_stage = [sum(chunks == {stage} for chunks in regions.values()) for stage in range(4)]
    assert per_stage == [2, 2, 2, 2]


def test_a_parameter_that_two_stages_read_is_moved():
    """As that of an embedding which is also the output layer."""
    mesh = mesh_of((2,))
    with pc.job("tied", seed=1, config=pc.Config()) as job:
        tokens, labels = (pc.input(name, (4, 8), "int64", mesh) for name in ("tokens", "labels"))
        table = pc.nn.Embedding(16, 8).place(mesh)
        x = pc.nn.Linear(8, 8).place(mesh)(pc.relu(pc.nn.Linear(8, 8).place(mesh)(table(tokens))))
        logits = x @ table.weight.value.transpose(1, 0)
        loss = pc.cross_entropy(logits, labels, ignore_index=None)
        pc.optim.SGD(0.1).minimize(loss)
        pc.output("loss", loss)
    opened = replace(job, ops=tuple(replace(op, sbp=None) for op in job.ops))
    cut = replace(with_stages(opened, 2, (1,)), config=pc.Config(microbatches=2, schedule="1f1b"))
    draw = np.random.default_rng(0)
    feeds = {name: draw.integers(0, 16, (4, 8)) for name in ("tokens", "labels")}
    np.testing.assert_allclose(losses(cut, **feeds), losses(job, **feeds), rtol=1e-5)


def test_plans_with_a_pipeline_are_forecast_and_written(tmp_path: Path):
    job = language_model((2,), 2, replace(AUTO, machine="h100-sxm"))
    plans = search_plans(job, None, 10)
    seconds = [plan.forecast.step_seconds for plan in plans]
    assert seconds == sorted(seconds)
    assert {plan.stages for plan in plans} == {1, 2}
    limit = machine_of("h100-sxm").device.memory_bytes
    assert all(plan.forecast.worst.memory.total <= limit for plan in plans)
    plan = next(plan for plan in plans if plan.stages == 2)
    assert plan.fits
    path = tmp_path / "layout.toml"
    path.write_text(plan.file_text())
    again = pc.forecast(with_layout_file(job, path))
    assert again.step_seconds == plan.forecast.step_seconds
    assert again.worst.memory == plan.forecast.worst.memory
    assert again.bubble_fraction == plan.forecast.bubble_fraction


def test_what_is_said_to_fit_fits():
    """Also where the search's own count of memory is less than what the plan takes."""
    job = with_layouts(mlp((2,)), {"x": NdSbp.of("B")})
    (free,) = search_plans(job, None, 1)
    limit = 0.8 * free.forecast.worst.memory.total
    (plan,) = search_plans(job, limit, 1)
    assert plan.forecast.worst.memory.total <= limit


def digits_in_microbatches() -> Job:
    """Of whose plans on eight devices the one that needs least by its estimate needs more than
    another does.
    """
    job = digits.build("auto", ranks=8)
    return with_config(job, pc.Config(layout="auto", machine="h100-sxm", microbatches=4))


@pytest.mark.slow
def test_where_estimates_are_too_low_what_needs_little_is_tried():
    (plan,) = search_plans(digits_in_microbatches(), 350_000, 1)
    assert plan.forecast.worst.memory.total <= 350_000


@pytest.mark.slow
def test_the_least_memory_that_is_named_is_that_of_the_best_of_all_plans():
    job = digits_in_microbatches()
    with pytest.raises(UsageError, match="needs least") as raised:
        search_plans(job, 1024, 1)
    known = []
    for estimate in plan_estimates(job):
        with contextlib.suppress(PlanCompilerError):  # what zero cannot split
            known.append(pc.forecast(estimate.job(job)).worst.memory.total)
    assert f"takes {min(known)}," in str(raised.value)


@pytest.mark.slow
def test_layouts_that_split_sequences_bring_the_pass_that_does():
    """What follows from parameters alone would not be what was searched for, and takes longer."""
    mesh = mesh_of((8,))
    with pc.job("model", config=replace(AUTO, machine="h100-sxm")) as job:
        x = pc.input("x", (32, 2048, 4096), "float32", mesh)
        net = pc.nn.Sequential(*(pc.nn.TransformerBlock(4096, 32) for _ in range(2)))
        loss = net.place(mesh)(x).sum()
        pc.optim.SGD(0.1).minimize(loss)
        pc.output("loss", loss)
    plans = [each for each in plan_estimates(job) if each.stages == 1]
    plan = next(each for each in plans if each.shape == (1, 8) and each.settings["zero"] == 0)
    assert plan.settings["sequence_parallel"]
    without = replace(plan, settings={**plan.settings, "sequence_parallel": False})
    seconds = [pc.forecast(each.job(job)).step_seconds for each in (plan, without)]
    assert seconds[0] < seconds[1]


@functools.cache
def wide_model() -> tuple[Job, list[PlanEstimate]]:
    """Transformer blocks that are large enough for estimates, on eight devices."""
    mesh = mesh_of((8,))
    with pc.job("model", config=replace(AUTO, machine="h100-sxm")) as job:
        tokens, labels = (pc.input(name, (48, 1024), "int64", mesh) for name in ("in", "labels"))
        net = pc.nn.Sequential(
            pc.nn.Embedding(2048, 2048),
            *(pc.nn.TransformerBlock(2048, 16) for _ in range(4)),
            pc.nn.Linear(2048, 2048),
        )
        loss = pc.cross_entropy(net.place(mesh)(tokens), labels, ignore_index=None)
        pc.optim.AdamW(1e-3).minimize(loss)
        pc.output("loss", loss)
    return job, plan_estimates(job)


@pytest.mark.slow
def test_estimates_are_near_forecasts():
    job, plans = wide_model()
    for shape, zero in [((8, 1), 3), ((1, 8), 0), ((2, 4), 3)]:
        plan = next(
            each
            for each in plans
            if (each.stages, each.shape, each.settings["zero"]) == (1, shape, zero)
            and each.settings["recompute"] == "none"
        )
        known = pc.forecast(plan.job(job))
        assert plan.memory_bytes == pytest.approx(known.worst.memory.total, rel=0.15)
        assert plan.seconds == pytest.approx(known.step_seconds, rel=0.15)


@pytest.mark.slow
def test_layouts_split_no_rows_that_micro_batches_do_not_have():
    """Three rows on four devices would leave one without work, and others with more of it."""
    _, plans = wide_model()
    few = [each for each in plans if 48 // each.shape[0] // each.settings["microbatches"] == 3]
    assert {each.shape[1] for each in few} > {4, 8}
    for plan in few:
        if plan.shape[1] > 1:
            layouts = plan.inner.layouts()
            assert not any(
                str(layouts[value.name][1]) == "S(0)"
                for op in plan.inner.job.ops
                if op.origin.phase is Phase.FORWARD
                for value in op.outputs
                if value.shape[:2] == (48, 1024)
            )


@pytest.mark.slow
def test_estimates_of_small_plans_count_what_each_message_starts_with():
    """Without it those with a pipeline, ZeRO or micro-batches were said to take half as long."""
    job = language_model((4,), 4, replace(AUTO, machine="h100-sxm"))
    plans = plan_estimates(job)
    for stages, shape, count, zero in [
        (1, (4, 1), 1, 2),
        (1, (2, 2), 4, 2),
        (2, (2, 1), 2, 1),
        (4, (1, 1), 2, 0),
    ]:
        plan = next(
            each
            for each in plans
            if (each.stages, each.chunks, each.shape) == (stages, stages, shape)
            and (each.settings["microbatches"], each.settings["zero"]) == (count, zero)
            and each.settings["recompute"] == "none"
        )
        known = pc.forecast(plan.job(job))
        assert plan.seconds == pytest.approx(known.step_seconds, rel=0.2), plan.settings


def test_plans_that_cannot_be_compiled_are_not_estimated():
    """ZeRO without anything to split, and micro-batches of what has no batch."""
    mesh = mesh_of((4,))
    with pc.job("inference", config=AUTO) as inference:
        net = pc.nn.Linear(32, 32).place(mesh)
        pc.output("out", net(pc.input("x", (16, 32), "float32", mesh)))
    assert {each.settings["zero"] for each in plan_estimates(inference)} == {0}
    with pc.job("masked", config=AUTO) as masked:
        mask = pc.input("mask", (32,), "float32", mesh)
        loss = (
            pc.nn.Linear(32, 32).place(mesh)(pc.input("x", (16, 32), "float32", mesh)) * mask
        ).sum()
        pc.optim.SGD(0.1).minimize(loss)
        pc.output("loss", loss)
    plans = plan_estimates(masked)
    assert {each.settings["microbatches"] for each in plans} == {1}
    assert {each.settings["zero"] for each in plans} == {0, 1, 2, 3}


@pytest.mark.slow
def test_a_search_with_little_time_says_what_it_leaves_out():
    said: list[str] = []
    job = language_model((2,), 2, replace(AUTO, machine="h100-sxm", microbatches=2))
    plans = search_plans(job, None, 10, said.append, seconds=0.0)
    assert len(plans) == 1
    (left_out,) = said
    assert left_out.startswith("not forecast: ")


def test_a_limit_that_nothing_fits_names_the_tensor_in_the_way():
    with pytest.raises(UsageError, match="no plan that was tried fits") as raised:
        search_plans(mlp((2,)), 2000.0, 10)
    assert "the one that needs least takes" in str(raised.value)
    assert ".py:" in str(raised.value)


def test_a_limit_for_one_mesh_says_how_little_any_layouts_hold():
    with pytest.raises(UsageError, match="no layouts fit") as raised:
        search_layouts(run_passes(mlp((4,)))[0], 1000.0)
    assert "at least" in str(raised.value)
    assert ".py:" in str(raised.value)


def test_settings_that_the_user_changes_stay():
    job = replace(mlp((2,)), config=replace(AUTO, microbatches=2))
    for plan in search_plans(job, None, 4):
        assert config_of(plan.forecast.job).microbatches == 2


def test_what_is_placed_stays_in_all_plans():
    mesh = pc.Placement("cpu", [0, 1])
    with pc.job("pinned", config=AUTO) as job:
        x = pc.input("x", (64, 64), "float32", mesh)
        weight = pc.nn.Parameter((64, 64)).place(mesh, "S(1)").value
        pc.output("out", (x @ weight).sum())
    plans = search_plans(job, None, 10)
    assert [plan.mesh for plan in plans] == [(2,)]
    (variable,) = (op for op in plans[0].forecast.job.ops if op.kind == "variable")
    assert str(variable.sbp) == "[S(1)]"


def test_axes_of_one_device_are_searched_too():
    job = mlp((1, 2))
    assert min(plan.forecast.step_seconds for plan in search_plans(job, None, 3)) > 0


def test_demands_that_contradict_each_other_are_both_named():
    job = mlp((2,))
    names = [str(op.attr("name")) for op in job.ops if op.kind == "variable"]
    weight, state = names[0], next(name for name in names if name.endswith("adam_m"))
    pinned = with_layouts(job, {weight: NdSbp.of("S(0)")})
    ops = tuple(
        replace(op, sbp=NdSbp.of("S(1)")) if op.attr("name") == state else op for op in pinned.ops
    )
    with pytest.raises(ShapeError) as raised:
        search_layouts(replace(pinned, ops=ops))
    text = str(raised.value)
    assert "different layouts are demanded" in text
    assert weight in text
    assert state in text
    assert text.count("open_jobs.py:") >= 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"microbatches": 3}, "does not divide"), ({"zero": 7}, "zero")],
    ids=str,
)
def test_settings_that_do_not_fit_are_named(settings, message):
    with pytest.raises(PlanCompilerError, match=message):
        search_plans(replace(mlp((2,)), config=replace(AUTO, **settings)), None, 3)
