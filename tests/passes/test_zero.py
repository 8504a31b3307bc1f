"""ZeRO: the same losses with training state in shards, and the counted effects of each stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.executor.local_run import LocalWorld
from plancompiler.ir import DType, Job
from plancompiler.ir.task import Primitive
from plancompiler.lower.compile import MODES, compile_plans
from plancompiler.ops import registry
from plancompiler.ops.registry import AttrMap, Types, op_def
from plancompiler.passes import run_passes
from tests.dense import run_dense
from tests.examples import gpt
from tests.passes.worlds import (
    STEPS,
    Tower,
    arena,
    collectives,
    compiled,
    configured,
    losses,
    mesh,
    record_of,
    tower_job,
    variable_bytes,
)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}])
def test_losses_are_those_of_one_rank(
    layout: dict[str, int], zero: int, one_rank: tuple[float, ...]
) -> None:
    np.testing.assert_allclose(losses(gpt(**layout), STEPS, zero=zero), one_rank, rtol=1e-4)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_parameters_that_have_one_gradient(zero: int) -> None:
    """Biases of branches that are added, as in GPT-NeoX."""

    def job(ranks: int) -> Job:
        on = pc.Placement("cpu", list(range(ranks)), ("dp",))
        with pc.job("branches", seed=1, config=pc.Config(zero=zero)) as built:
            x = pc.input("x", (8, 4), "float32", on, ["S(0)"])
            left, right = pc.nn.Linear(4, 6).place(on), pc.nn.Linear(4, 6).place(on)
            loss = ((left(x) + right(x)) * x.sum(1, keepdims=True)).mean()
            pc.optim.AdamW(0.1).minimize(loss)
            pc.output("loss", loss)
        return built

    rows = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    trained = []
    for ranks in (1, 2):
        with pc.run(job(ranks), ranks=ranks, cache=False) as session:
            trained.append([session.step(x=rows)["loss"] for _ in range(4)])
    np.testing.assert_allclose(trained[1], trained[0], rtol=1e-5)


def test_losses_do_not_depend_on_fusing(one_rank: tuple[float, ...]) -> None:
    actual = losses(gpt(dp=2), 5, zero=3, fuse_bytes=1 << 14)
    np.testing.assert_allclose(actual, one_rank[:5], rtol=1e-4)


def test_gathers_whose_op_is_gone_stand_before_their_own(one_rank: tuple[float, ...]) -> None:
    rewritten, _ = run_passes(configured(gpt(dp=2), zero=3))
    ops = tuple(
        replace(op, attrs=(("late", "gone"),)) if op.attr("late") is not None else op
        for op in rewritten.ops
    )
    job = configured(replace(rewritten, ops=ops), passes=())
    graph = compiled(job, passes=()).graph
    late = {placed.family for placed in graph.ops if placed.op.attr("late") == "gone"}
    boxed = {f.number + 1 for f in graph.families if f.transfer is not None and f.transfer.late}
    assert late
    assert late == boxed
    np.testing.assert_allclose(losses(job, 5, passes=()), one_rank[:5], rtol=1e-4)


@pytest.mark.parametrize("zero", [1, 3])
def test_the_pass_keeps_what_a_job_computes(zero: int) -> None:
    job = gpt(dp=2, tp=2)
    rewritten, _ = run_passes(configured(job, zero=zero))
    before, after = ([step["loss"] for step in run_dense(one, 2)] for one in (job, rewritten))
    assert after == before


@pytest.mark.processes
def test_all_modes_give_the_same_plans() -> None:
    job = configured(gpt(dp=2, tp=2), zero=3)
    assert len({compile_plans(job, 4, mode).digest for mode in MODES}) == 1


def test_collectives_of_each_stage() -> None:
    layers = 4
    job = tower_job(mesh(2), pc.optim.AdamW(1e-2), layers)
    parameters = 2 * layers
    results = {zero: collectives(compiled(job, zero=zero)) for zero in range(4)}
    # One more all-reduce is that of the loss that is reported.
    assert results[0]["all_reduce"] == parameters + 1
    assert results[0]["all_gather"] == results[0]["reduce_scatter"] == 0
    assert results[1]["all_reduce"] == parameters + 1
    assert results[1]["all_gather"] == parameters
    assert results[1]["reduce_scatter"] == 0
    assert results[2]["all_reduce"] == results[3]["all_reduce"] == 1
    assert results[2]["all_gather"] == parameters
    assert results[2]["reduce_scatter"] == results[3]["reduce_scatter"] == parameters
    # Backward needs the weights again, but no biases, and no input gradient of the first layer;
    # the last two layers are still there.
    assert results[3]["all_gather"] == parameters + layers - 3


CASTS = {
    "cast": lambda w: w.cast("bfloat16"),
    "cast and transposed": lambda w: w.cast("bfloat16").transpose(),
    "transposed and cast": lambda w: w.transpose().cast("bfloat16"),
    "cast in pieces": lambda w: w.reshape((4, 4, 16)).cast("bfloat16").reshape((16, 16)),
}


def cast_job(name: str) -> Job:
    """Regression by layers whose weights the program itself casts."""

    class Layer(pc.nn.Module):
        def __init__(self) -> None:
            self.weight = pc.nn.Parameter((16, 16), "float32", "normal", (0, 0.1))

        def forward(self, x: pc.Value) -> pc.Value:
            return (x.cast("bfloat16") @ CASTS[name](self.weight.value)).cast("float32").tanh()

    placement = mesh(2)
    with pc.job("casts") as job:
        layers = pc.nn.ModuleList(Layer() for _ in range(3)).place(placement)
        x = pc.normal((8, 16), placement=placement).redistribute(sbp="S(0)")
        target = x
        for layer in layers:
            x = layer(x)
        loss = pc.square(x - target).mean()
        pc.optim.AdamW(1e-2).minimize(loss)
        pc.output("loss", loss)
    return job


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gradients_of_cast_weights_are_reduced_to_shards(name: str, zero: int) -> None:
    """In the narrow dtype: the cast back to float32 works on the shard."""
    job = cast_job(name)
    result = compiled(job, zero=zero)
    counted = collectives(result)
    assert counted["reduce_scatter"] == (0 if zero == 1 else 3)
    assert counted["all_reduce"] == (4 if zero == 1 else 1)  # one is that of the loss
    reduced = [
        family.outputs[0].dtype
        for family in result.graph.families
        if family.transfer is not None and family.transfer.primitive is Primitive.REDUCE_SCATTER
    ]
    assert set(reduced) <= {DType.BFLOAT16}
    expected = losses(job, STEPS)
    assert losses(job, STEPS, zero=zero) == expected
    assert expected[-1] < expected[0]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_variables_fall_to_one_nth(zero: int) -> None:
    job = tower_job(mesh(4), pc.optim.AdamW(1e-2))
    whole = variable_bytes(compiled(job))
    split = compiled(job, zero=zero)
    assert [variable_bytes(split, rank) * 4 for rank in range(4)] == [whole] * 4


@pytest.mark.parametrize("devices", [2, 4])
def test_memory_of_stage_three_follows_its_formula(devices: int) -> None:
    layers, dim, prefetch = 10, 64, 1
    job = tower_job(mesh(devices), pc.optim.AdamW(1e-2), layers, dim, batch=devices)
    layer = (dim * dim + dim) * 4
    parameters = layers * layer
    activations = layers * 4 * dim * 4
    # Parameter, two moments and the gradient's shard; the layers of the window, each gathered, and
    # each with a gradient that is not reduced yet.
    formula = 4 * parameters // devices + (prefetch + 1) * 2 * layer + activations
    plain, split = compiled(job), compiled(job, zero=3)
    measured = variable_bytes(split) + arena(split)
    before = variable_bytes(plain) + arena(plain)
    print(f"{devices} devices: {before} bytes without, {measured} with zero=3, formula {formula}")
    assert 0.85 * formula <= measured <= 1.02 * formula
    assert before >= 4 * parameters


def test_a_longer_prefetch_window_holds_more_layers() -> None:
    job = tower_job(mesh(4), pc.optim.SGD(1e-2), 10, 64, batch=4)
    held = [arena(compiled(job, zero=3, prefetch=window)) for window in (0, 1, 2)]
    weight = 64 * 64 * 4
    for less, more in pairwise(held):
        assert less + weight <= more


def test_gathers_start_a_layer_ahead_and_no_earlier() -> None:
    graph = compiled(tower_job(mesh(2), pc.optim.SGD(1e-2), 5), zero=3).graph
    order = {placed.op.name: placed.family for placed in graph.ops}
    first_products = [order[f"matmul_{layer}"] for layer in range(5)]
    weights = {f"variable_{2 * layer}": layer for layer in range(5)}
    started: dict[int, int] = {}
    for family in graph.families:
        name = family.name.partition(":")[0]
        if family.name.endswith("all_gather") and name in weights:
            started.setdefault(weights[name], family.number)
            assert family.transfer is not None
            assert family.transfer.late
    for layer in range(2, 5):
        assert first_products[layer - 2] < started[layer] < first_products[layer - 1]


def test_splits_nest_inside_those_of_tensor_parallelism() -> None:
    job = configured(gpt(dp=2, tp=2), zero=2)
    rewritten, records = run_passes(job)
    layouts = {op.attr("name"): str(op.sbp) for op in rewritten.ops if op.kind == "variable"}
    assert layouts["blocks.0.mlp.fc1.weight"] == "[S(1), S(0)]"
    assert layouts["blocks.0.mlp.fc2.weight.adam_v"] == "[S(0), S(1)]"
    assert layouts["norm.weight"] == "[S(0), B]"
    notes = next(record.notes for record in records if record.name == "zero")
    assert "blocks.0.mlp.fc1.bias: no axis of float32[128] is left to split ([B, S(0)])" in notes


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_layers_may_be_read_after_the_update(zero: int, prefetch: int) -> None:
    place = mesh(2)
    with pc.job("evaluated") as job:
        model = Tower(3, 8).place(place)
        rows = [pc.normal((4, 8), placement=place).redistribute(sbp="S(0)") for _ in range(2)]
        loss = pc.square(model(rows[0])).mean()
        pc.optim.SGD(1e-1).minimize(loss)
        pc.output("loss", loss)
        pc.output("evaluated", pc.square(model(rows[1])).mean())
    compilation = compiled(job, zero=zero, prefetch=prefetch)
    with LocalWorld(compilation.plans) as world:
        for actual, dense in zip(world.run(4), run_dense(job, 4), strict=True):
            for name, value in dense.items():
                np.testing.assert_allclose(actual[name], value, rtol=1e-5, err_msg=name)


def test_an_axis_with_equal_pieces_is_preferred() -> None:
    with pc.job("shapes") as job:
        place = mesh(2)
        weights = {
            name: pc.nn.Parameter(shape, name=name, init="ones").place(place)
            for name, shape in {"even": (9, 4), "longest": (3, 5), "one": (1, 1)}.items()
        }
        total = sum((each.value.sum() for each in weights.values()), start=0.0)
        pc.optim.SGD(0.1).minimize(total)
        pc.output("loss", total)
    rewritten, records = run_passes(configured(job, zero=1))
    layouts = {op.attr("name"): str(op.sbp) for op in rewritten.ops if op.kind == "variable"}
    assert layouts == {"even": "[S(1)]", "longest": "[S(1)]", "one": "[B]"}
    notes = next(record.notes for record in records if record.name == "zero")
    assert notes == ("one: no axis of float32[1, 1] is left to split ([B])",)
    dense = [step["loss"] for step in run_dense(job, 3)]
    np.testing.assert_allclose(losses(job, 3, zero=3), dense, rtol=1e-5)


def shared_job() -> Job:
    """A weight used in two layers, clipping by the global norm, two optimizers, two degrees of data
    parallelism.
    """
    wide, narrow = mesh(2), mesh(2, axes=("data",), first=2)
    with pc.job("shared") as job:
        front, back = Tower(2, 8).place(wide), Tower(2, 8).place(narrow)
        x = pc.normal((8, 8), placement=wide).redistribute(sbp="S(0)")
        middle = front(front(x)).redistribute(placement=narrow)
        loss = pc.square(back(middle)).mean()
        parameters = front.parameters()
        grads = pc.gradients(loss, [parameter.value for parameter in parameters])
        norm = pc.sqrt(sum((pc.square(grad).sum() for grad in grads), start=1e-6))
        pc.optim.AdamW(1e-2).apply(parameters, [grad * (0.1 / norm) for grad in grads])
        pc.optim.SGD(1e-1, momentum=0.9).minimize(loss, back.parameters())
        pc.output("loss", loss)
        pc.output("norm", norm)
    return job


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("axes", [("dp",), ("dp", "data")])
def test_shared_weights_clipping_and_two_optimizers(zero: int, axes: tuple[str, ...]) -> None:
    job = shared_job()
    dense = [step["loss"] for step in run_dense(job, 6)]
    np.testing.assert_allclose(losses(job, 6, zero=zero, dp_axes=axes), dense, rtol=1e-5)
    record = record_of(job, "zero", zero=zero, dp_axes=axes)
    assert f"{4 * len(axes)} parameters" in record.summary
    assert len(record.notes) == (4 if axes == ("dp",) else 0)


@pytest.mark.parametrize(
    "optimizer",
    [pc.optim.SGD(1e-2, momentum=0.9), pc.optim.Lion(1e-3), pc.optim.LAMB(1e-3)],
    ids=lambda each: type(each).__name__,
)
def test_every_optimizer_updates_shards(optimizer: pc.optim.Optimizer) -> None:
    job = tower_job(mesh(2), optimizer, 2)
    dense = [step["loss"] for step in run_dense(job, 4)]
    np.testing.assert_allclose(losses(job, 4, zero=3), dense, rtol=1e-5)
    assert variable_bytes(compiled(job, zero=3)) * 2 == variable_bytes(compiled(job))


def test_factored_moments_stay_whole() -> None:
    job = tower_job(mesh(2), pc.optim.Adafactor(1e-3), 2)
    dense = [step["loss"] for step in run_dense(job, 4)]
    np.testing.assert_allclose(losses(job, 4, zero=3), dense, rtol=1e-5)
    assert "4 parameters and 0 states" in record_of(job, "zero", zero=3).summary


def test_a_checkpoint_can_be_read_in_another_layout(tmp_path: Path) -> None:
    job = gpt(dp=2)
    with pc.run(configured(job, zero=3)) as session:
        assert len(list(session.run(3))) == 3
        session.save(tmp_path / "saved")
        ahead = session.step()["loss"]
    with pc.run(gpt(), restore=tmp_path / "saved") as session:
        np.testing.assert_allclose(session.step()["loss"], ahead, rtol=1e-5)


def whole_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    matrix = "[a] [b]" if len(inputs[0].shape) == 2 else "..."
    return f"{matrix}, {matrix}, ... -> {matrix}"


@pytest.fixture
def whole_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update like SGD's that may only work on whole matrices, for one test."""
    definition = replace(
        op_def("sgd_update"),
        kind="whole_update",
        rule=whole_rule,
        infer=lambda inputs, _: inputs[:1],
    )
    monkeypatch.setitem(registry._TABLE, definition.kind, definition)


class WholeSGD(pc.optim.SGD):
    """SGD whose update cannot be split for matrices."""

    def kind(self, numbers: Mapping[str, Any]) -> str:
        return "whole_update"


@pytest.mark.usefixtures("whole_update")
def test_an_update_that_needs_the_whole_parameter_is_left_alone() -> None:
    job = tower_job(mesh(2), WholeSGD(1e-2), 2)
    record = record_of(job, "zero", zero=2)
    assert record.notes == (
        "layers.0.weight: whole_update cannot work on [S(0)]",
        "layers.1.weight: whole_update cannot work on [S(0)]",
    )
    dense = [step["loss"] for step in run_dense(job, 3)]
    np.testing.assert_allclose(losses(job, 3, zero=2), dense, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("layout", [{}, {"tp": 2}])
def test_on_one_device_there_is_nothing_to_split(
    zero: int, layout: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    job = gpt(dp=1, layers=1, **layout)
    with caplog.at_level("WARNING", "plancompiler"):
        assert losses(job, 2, zero=zero) == losses(job, 2, zero=0)
    (warning,) = caplog.records
    assert f"zero {zero} splits nothing: one device along dp" in warning.getMessage()
    assert record_of(job, "zero", zero=zero).summary in warning.getMessage()
