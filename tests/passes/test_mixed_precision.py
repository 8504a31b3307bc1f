"""float16: casts of parameters, the scale of the loss, and steps that are skipped on overflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import UsageError
from plancompiler.ir import DType, Job
from plancompiler.ops import registry
from plancompiler.ops.registry import op_def
from plancompiler.passes import Config, run_passes
from tests.dense import DenseRun, run_dense
from tests.examples import gpt
from tests.passes.worlds import (
    collectives,
    compiled,
    configured,
    float_dtypes,
    mesh,
    refused,
    tower_job,
)

HALF = {"precision": "float16"}


def lowered(job: Job, **settings: object) -> Job:
    """The job after this pass alone."""
    rewritten, _ = run_passes(configured(job, passes=("mixed_precision",), **HALF, **settings))
    return rewritten


def test_what_scaling_adds_is_in_float32() -> None:
    kinds = "guarded_adam_update", "found_inf"
    assert float_dtypes(lowered(gpt(layers=1)), *kinds) == {DType.FLOAT32}


def test_a_parameter_is_cast_once() -> None:
    job = lowered(gpt(layers=1))
    weights = {op.outputs[0].name for op in job.ops if op.kind == "variable"}
    cast = [op.inputs[0].name for op in job.ops if op.kind == "cast"]
    of_weights = [name for name in cast if name in weights]
    assert len(of_weights) == len(set(of_weights)) == 13  # seven weights and six biases


@pytest.mark.slow
def test_the_check_of_all_gradients_takes_one_reduction() -> None:
    for layout, zero in (({"dp": 2}, 2), ({"dp": 2, "tp": 2}, 0), ({"dp": 2, "tp": 2}, 3)):
        job = gpt(**layout)
        single, half = collectives(compiled(job, zero=zero)), None
        half = collectives(compiled(job, zero=zero, **HALF))
        assert half["all_reduce"] == single["all_reduce"] + 1
        assert half["all_gather"] == single["all_gather"]


# --- the scale ------------------------------------------------------------------------------------


def variables_after(job: Job, steps: int, **settings: object) -> list[dict[str, np.ndarray]]:
    """All variables before the first and after each step."""
    run = DenseRun(run_passes(configured(job, **HALF, **settings))[0])
    variables_after = [{name: array.copy() for name, array in run.variables.items()}]
    for _ in range(steps):
        with np.errstate(all="ignore"):
            run.step()
        variables_after.append({name: array.copy() for name, array in run.variables.items()})
    return variables_after


def test_the_scale_does_not_change_the_gradients() -> None:
    job = tower_job(mesh(1), pc.optim.SGD(1e-2))
    small, large = (variables_after(job, 2, loss_scale=scale)[-1] for scale in (1024, 4096))
    for name, value in small.items():
        if "loss_scale" not in name:
            np.testing.assert_allclose(value, large[name], rtol=1e-6, atol=1e-7)


def test_an_overflow_leaves_every_bit_and_halves_the_scale() -> None:
    job = gpt()
    before, first, second = variables_after(job, 2, loss_scale=1 << 25)
    assert first["loss_scale"] == 1 << 24
    assert second["loss_scale"] == 1 << 23
    for name, value in before.items():
        if name not in ("loss_scale", "loss_scale.skipped_steps"):
            assert value.tobytes() == first[name].tobytes() == second[name].tobytes(), name


def test_the_scale_grows_after_good_steps() -> None:
    job = tower_job(mesh(1), pc.optim.SGD(1e-3))
    states = variables_after(job, 5, loss_scale=64, loss_scale_steps=2)
    assert [float(each["loss_scale"]) for each in states] == [64, 64, 128, 128, 256, 256]
    assert [int(each["loss_scale.good_steps"]) for each in states] == [0, 1, 0, 1, 0, 1]


def half_broken(placement: pc.Placement, optimizer: pc.optim.Optimizer) -> Job:
    """A job in which only the second half of the gradient overflows in the first step, whose shard
    another device has.
    """
    with pc.job("half") as job:
        weight = pc.nn.Parameter((4, 2), init="ones", name="w").place(placement).value
        x = pc.constant([[1.0, 1.0, 30000.0, 30000.0]] * 2, "float32", placement)
        loss = (x @ weight).sum() * 1e-3
        optimizer.minimize(loss)
        pc.output("loss", loss)
        pc.output("w", weight)
    return job


@pytest.mark.parametrize(
    "optimizer",
    [
        pc.optim.SGD(1e-3),
        pc.optim.SGD(1e-3, momentum=0.9, nesterov=True),
        pc.optim.AdamW(1e-3),
        pc.optim.Lion(1e-3),
        pc.optim.LAMB(1e-3),
        pc.optim.Adafactor(1e-3),
        pc.optim.LARS(1e-1),
        pc.optim.NAdam(1e-3),
        pc.optim.RMSprop(1e-3, centered=True, momentum=0.9),
    ],
    ids=lambda each: type(each).__name__,
)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_all_ranks_skip_where_one_overflows(zero: int, optimizer: pc.optim.Optimizer) -> None:
    job = half_broken(mesh(2), optimizer)
    with pc.run(configured(job, zero=zero, loss_scale=2048, **HALF)) as session:
        weights = [session.step()["w"] for _ in range(4)]
        scale = session.variables()["loss_scale"]
    # 2 * 30000 * 2048 / 1000 is above 65504, half of it is not.
    assert weights[0].tobytes() == weights[1].tobytes()
    assert not np.array_equal(weights[1], weights[2])
    assert scale == 1024


@pytest.mark.parametrize(
    "optimizer",
    [
        pc.optim.SGD(1e-3, momentum=0.9, dampening=0.5),
        pc.optim.Adam(1e-3),
        pc.optim.AdamW(1e-3, amsgrad=True),
        pc.optim.NAdam(1e-3),
        pc.optim.RAdam(1e-3, betas=(0.9, 0.99)),
        pc.optim.Adamax(1e-3),
        pc.optim.Adagrad(1e-3, lr_decay=0.5),
        pc.optim.LAMB(1e-3),
        pc.optim.Adafactor(1e-3),
    ],
    ids=lambda each: type(each).__name__,
)
def test_steps_that_were_skipped_do_not_count(optimizer: pc.optim.Optimizer) -> None:
    job = half_broken(mesh(1), optimizer)
    # The gradient is the same in all steps, and in the first too large for the greater scale.
    skipping, plain = (variables_after(job, 7, loss_scale=scale) for scale in (2048, 1024))
    assert [int(each["loss_scale.skipped_steps"]) for each in skipping] == [0, *[1] * 7]
    assert [int(each["loss_scale.skipped_steps"]) for each in plain] == [0] * 8
    for later, expected in zip(skipping[1:], plain, strict=False):
        assert later["w"].tobytes() == expected["w"].tobytes()


def test_a_pipeline_shares_one_scale() -> None:
    job = gpt(dp=2, pp=2)
    with pc.run(configured(job, zero=2, loss_scale=1 << 25, **HALF)) as session:
        before = session.variables()
        session.step()
        after = session.variables()
    assert after.pop("loss_scale") == before.pop("loss_scale") / 2
    assert after.pop("loss_scale.skipped_steps") == before.pop("loss_scale.skipped_steps") + 1 == 1
    assert {name for name in after if not np.array_equal(after[name], before[name])} == set()


def test_a_norm_that_is_reported_is_the_true_one() -> None:
    with pc.job("norm") as job:
        weight = pc.nn.Parameter((4, 4), init="ones", name="w").place(mesh(1))
        loss = pc.square(pc.normal((8, 4), placement=mesh(1), key=1) @ weight.value).mean()
        (grad,) = pc.gradients(loss, [weight.value])
        norm = pc.sqrt(pc.square(grad).sum())
        pc.optim.AdamW(1e-2).apply([weight], [grad * (0.1 / norm)])
        pc.output("norm", norm)
        pc.output("loss", loss)
    single = run_dense(job, 4)
    half = run_dense(lowered(job, loss_scale=256), 4)
    for before, after in zip(single, half, strict=True):
        np.testing.assert_allclose(after["norm"], before["norm"], rtol=1e-2)
        np.testing.assert_allclose(after["loss"], before["loss"], rtol=1e-2)


# --- refusals -------------------------------------------------------------------------------------


def test_loss_scaling_with_float32_is_refused() -> None:
    with pytest.raises(UsageError, match="Expected: precision=float16") as caught:
        Config(loss_scale=1024)
    assert caught.value.report.got == "loss_scale=1024 precision=float32"
    with pytest.raises(UsageError, match="Got: loss_scale_steps=7 precision=float32"):
        Config(loss_scale_steps=7)


def test_an_update_that_cannot_be_skipped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = op_def("sgd_update")
    monkeypatch.setitem(registry._TABLE, "own_update", plain)

    class Own(pc.optim.SGD):
        def kind(self, numbers: Mapping[str, Any]) -> str:
            return "own_update"

    text = refused(tower_job(mesh(1), Own(0.1)), **HALF)
    assert "this one cannot be skipped" in text
    assert "Got: own_update. Expected: one of " in text
    assert " sgd_update, " in text
    assert "What to do: use precision='bfloat16'" in text
