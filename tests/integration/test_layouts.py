"""Every layout trains to the losses of the dense run, and every value arrives where it is sent."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.executor.local_run import LocalWorld
from plancompiler.lower.compile import compile_plans
from tests.dense import run_dense
from tests.examples import gpt, mlp

STEPS = 20


def local_losses(job: pc.Job, steps: int = STEPS) -> list[float]:
    """Losses of the job on threads, a thread per rank."""
    plans = compile_plans(job, job.world_size, "rank_per_iter").plans
    with LocalWorld(plans) as world:
        return [float(outputs["loss"]) for outputs in world.run(steps)]


@pytest.fixture(scope="module")
def mlp_losses() -> list[float]:
    return [float(each["loss"]) for each in run_dense(mlp(ranks=1), STEPS)]


@pytest.fixture(scope="module")
def gpt_losses() -> list[float]:
    return [float(each["loss"]) for each in run_dense(gpt(), STEPS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("dp", 1), ("dp", 2), ("dp", 3), ("dp", 4), ("tp", 2), ("tp", 3), ("tp", 4), ("dp_tp", 4)],
)
def test_mlp(layout: str, ranks: int, mlp_losses: list[float]) -> None:
    losses = local_losses(mlp(layout=layout, ranks=ranks))
    np.testing.assert_allclose(losses, mlp_losses, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2},
        {"tp": 2},
        {"tp": 4},
        {"pp": 2},
        {"dp": 2, "tp": 2},
        {"tp": 2, "pp": 2},
        {"dp": 3},
        {"dp": 2, "tp": 2, "pp": 2},
    ],
)
def test_gpt(layout: dict[str, int], gpt_losses: list[float]) -> None:
    losses = local_losses(gpt(**layout))
    np.testing.assert_allclose(losses, gpt_losses, rtol=1e-4)


@pytest.mark.slow
def test_dropout_does_not_depend_on_the_layout() -> None:
    dense = [float(each["loss"]) for each in run_dense(gpt(dropout=0.2), 8)]
    losses = local_losses(gpt(dropout=0.2, dp=2, tp=2), 8)
    np.testing.assert_allclose(losses, dense, rtol=1e-4)
    assert abs(dense[-1] - run_dense(gpt(), 8)[-1]["loss"]) > 1e-3


def test_an_input_demanded_partial_keeps_its_value() -> None:
    mesh = pc.Placement("cpu", [[0, 1], [2, 3]])
    with pc.job("partial") as job:
        x = pc.input("x", (3,), "float32", mesh, ["P", "P(max)"])
        pc.output("y", x * 2.0)
    with LocalWorld(compile_plans(job, 4).plans) as world:
        value = np.array([1.0, -2.0, 3.0], np.float32)
        np.testing.assert_array_equal(world.step({"x": value})["y"], value * 2)


def test_a_variable_cannot_be_partial() -> None:
    mesh = pc.Placement("cpu", [0, 1])
    with (
        pytest.raises(pc.UsageError, match=r"a variable cannot be partial.*test_layouts\.py"),
        pc.job("partial"),
    ):
        pc.nn.Linear(2, 2).place(mesh, {"weight": ["P"]})(pc.input("x", (1, 2), "float32", mesh))
