"""Optimizers against their formulas written out in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import AttributeValueError, GradientError, JobError, UsageError
from tests.dense import DenseRun

optim = pc.optim
MESH = pc.Placement("cpu", [0, 1])
LATER = pc.Placement("cpu", [2, 3])


@pytest.mark.parametrize("lr", ["fast", None, True, 1j, math.nan, math.inf])
@pytest.mark.parametrize(
    "make", [optim.SGD, optim.Adam, optim.AdamW, optim.Lion, optim.LAMB, optim.Adafactor]
)
def test_a_learning_rate_is_a_number(make, lr):
    with pytest.raises(UsageError, match="learning rate must be a finite number"):
        make(lr)


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        (optim.SGD, "momentum", ("x", None)),
        (optim.SGD, "weight_decay", ("x", None)),
        (optim.Adam, "betas", (0.9, (0.9,), ("a", "b"), None, "ab")),
        (optim.Adam, "eps", ("x", None)),
        (optim.Lion, "betas", (0.9, (0.9, None))),
        (optim.LAMB, "betas", (0.9, (0.9, 0.9, 0.9))),
        (optim.LAMB, "eps", ("x",)),
        (optim.Adafactor, "eps", (1e-30, ("a", 1))),
        (optim.Adafactor, "clip", (None,)),
        (optim.Adafactor, "decay_power", ("x",)),
        (optim.constant, "warmup", ("x", 1.5)),
        (optim.linear, "total", ("x", 2.5, None)),
        (optim.cosine, "warmup", ("x", 1.5, True)),
        (optim.cosine, "final", (None,)),
    ],
)
def test_arguments_of_another_type(make, name, values):
    given = {"warmup": 1, "total": 9} if make in (optim.linear, optim.cosine) else {}
    for value in values:
        with pytest.raises(UsageError, match=f"{name} must be"):
            make(0.1, **{**given, name: value})


def test_numbers_of_numpy_are_numbers():
    assert optim.SGD(np.float32(0.5)).schedule == optim.constant(0.5)
    assert optim.constant(0.5, np.int64(3)) == optim.constant(0.5, 3)
    assert optim.Adam(0.1, betas=[0.5, 0]).betas == (0.5, 0.0)


@pytest.mark.parametrize("limit", ["x", None, True, 0, -1.0, math.nan])
def test_a_norm_to_clip_to_is_a_positive_number(limit):
    x = np.ones(2)
    with pytest.raises(UsageError, match="norm"):
        pc.clip_by_global_norm([x], limit)


def trained(optimizer, steps):
    """Values of w over steps that minimise sum(w * w * c) / 2, whose gradient is w * c."""
    c = np.array([1.0, 3.0])
    with pc.job("j") as job:
        w = pc.nn.Parameter((2,), "float64", "ones", name="w").place(MESH, "S(0)").value
        loss = (w * w * pc.constant(c, "float64", MESH)).sum() * 0.5
        (grad,) = optimizer.minimize(loss)
        pc.output("loss", loss)
        pc.output("grad", grad)
    run = DenseRun(job)
    values = []
    for _ in range(steps):
        before = run.variables["w"].copy()
        np.testing.assert_allclose(run.step()["grad"], before * c)
        values.append(run.variables["w"].copy())
    return job, c, values


def test_sgd():
    _, c, actual = trained(optim.SGD(0.1, weight_decay=0.5), 3)
    w = np.ones(2)
    for value in actual:
        w = w - 0.1 * (w * c + 0.5 * w)
        np.testing.assert_allclose(value, w, rtol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum(nesterov):
    job, c, actual = trained(optim.SGD(0.1, 0.9, nesterov, weight_decay=0.5), 4)
    assert sorted(job.variables) == ["w", "w.momentum"]
    w, m = np.ones(2), np.zeros(2)
    for value in actual:
        g = w * c + 0.5 * w
        m = 0.9 * m + g
        w = w - 0.1 * (g + 0.9 * m if nesterov else m)
        np.testing.assert_allclose(value, w, rtol=1e-6)


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam(decoupled):
    make = optim.AdamW if decoupled else optim.Adam
    job, c, actual = trained(make(0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.5), 4)
    assert sorted(job.variables) == ["w", "w.adam_m", "w.adam_v"]
    w, m, v = np.ones(2), np.zeros(2), np.zeros(2)
    for step, value in enumerate(actual, 1):
        g = w * c + (0 if decoupled else 0.5 * w)
        m = 0.8 * m + 0.2 * g
        v = 0.9 * v + 0.1 * g * g
        update = m / (1 - 0.8**step) / (np.sqrt(v / (1 - 0.9**step)) + 1e-6)
        w = w - 0.1 * (update + (0.5 * w if decoupled else 0))
        np.testing.assert_allclose(value, w, rtol=1e-5)


def rates(schedule, steps):
    """What a parameter with gradient one loses in each step."""
    with pc.job("j") as job:
        w = pc.nn.Parameter((), "float64", name="w").place(MESH).value
        optim.SGD(schedule).minimize(w + 0.0)
        pc.output("w", w)
    run = DenseRun(job)
    values = [run.step()["w"] for _ in range(steps + 1)]
    return -np.diff(values)


def test_schedules():
    np.testing.assert_allclose(rates(0.5, 3), 0.5)
    np.testing.assert_allclose(rates(optim.constant(0.4, warmup=2), 4), [0.2, 0.4, 0.4, 0.4], 1e-6)
    np.testing.assert_allclose(
        rates(optim.linear(1.0, warmup=2, total=6, final=0.2), 8),
        [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2],
        rtol=1e-6,
    )
    half = [0.2 + 0.8 * (1 + math.cos(math.pi * progress / 4)) / 2 for progress in range(5)]
    np.testing.assert_allclose(
        rates(optim.cosine(1.0, warmup=0, total=4, final=0.2), 6), [*half, 0.2], rtol=1e-6
    )


def test_state_and_updates_lie_as_the_parameter_does():
    with pc.job("j") as job:
        x = pc.input("x", (4, 6), "float32", MESH, "S(0)")
        first = pc.nn.Linear(6, 6).place(MESH, {"weight": "S(0)"})
        second = pc.nn.Linear(6, 2).place(LATER)
        loss = second(first(x).redistribute(LATER)).mean()
        optim.AdamW(optim.cosine(0.1, 1, 10)).minimize(loss)
        pc.output("loss", loss)
    by_name = {op.attr("name"): op for op in job.ops if op.kind == "variable"}
    for name, sbp, placement in (
        ("weight", "[S(0)]", MESH),
        ("bias", "[B]", MESH),
        ("linear_1.weight", "[B]", LATER),
    ):
        for suffix in ("", ".adam_m", ".adam_v"):
            op = by_name[name + suffix]
            assert (str(op.sbp), op.placement) == (sbp, placement)
            assert op.attr("trainable") is (suffix == "")
    updates = [op for op in job.ops if op.kind == "adam_update"]
    assert [str(op.sbp) for op in updates] == ["[S(0)]", "[B]", "[B]", "[B]"]
    rates = [op for op in job.ops if op.kind == "learning_rate"]
    assert [op.placement for op in rates] == [MESH, LATER]


def job_with(body):
    with pc.job("j") as job:
        w, other = (
            pc.nn.Parameter((2,), name=name, init="ones").place(MESH) for name in ("w", "other")
        )
        loss = (w.value * other.value).sum()
        body(w, other, loss)
        pc.output("loss", loss)
    return job


def test_parameters_can_be_chosen():
    job = job_with(lambda w, other, loss: optim.SGD(0.1).minimize(loss, [w, w]))
    assert [op.inputs[0].name for op in job.ops if op.kind == "sgd_update"] == ["variable_0"]
    job = job_with(lambda w, other, loss: optim.SGD(0.1).minimize(loss, [other.value]))
    assert [op.inputs[0].name for op in job.ops if op.kind == "sgd_update"] == ["variable_1"]


def test_frozen_parameters_are_left_alone():
    with pc.job("j") as job:
        x = pc.input("x", (2, 4), "float32", MESH)
        frozen, head = pc.nn.Linear(4, 4).freeze(), pc.nn.Linear(4, 4)
        loss = head(frozen(x)).mean()
        everything = [*frozen.parameters(), *head.parameters()]
        optim.SGD(0.1).minimize(loss, everything)
        pc.output("loss", loss)
    assert sum(op.kind == "sgd_update" for op in job.ops) == 2


def test_a_parameter_without_influence_is_named():
    def body(w, other, loss):
        optim.SGD(0.1).minimize((w.value * 2.0).sum())

    with pytest.raises(GradientError, match="'other' does not influence the loss") as caught:
        job_with(body)
    assert "freeze" in caught.value.report.hint
    assert "test_optim.py" in caught.value.report.source


@pytest.mark.parametrize(
    ("error", "body"),
    [
        (GradientError, lambda w, other, loss: optim.SGD(0.1).minimize(w.value)),
        (UsageError, lambda w, other, loss: optim.SGD(0.1).minimize(loss, [])),
        (UsageError, lambda w, other, loss: optim.SGD(0.1).minimize(loss, [loss])),
        (UsageError, lambda w, other, loss: optim.SGD(0.1, nesterov=True)),
        (AttributeValueError, lambda w, other, loss: optim.cosine(0.1, 5, 5)),
        (AttributeValueError, lambda w, other, loss: optim.SGD(-0.1).minimize(loss)),
        (AttributeValueError, lambda w, other, loss: optim.Adam(0.1, (1.0, 0.9)).minimize(loss)),
        (
            JobError,
            lambda w, other, loss: [optim.Adam(0.1).minimize(loss, [w]) for _ in range(2)],
        ),
        (
            JobError,
            lambda w, other, loss: [optim.SGD(0.1).minimize(loss, [w]) for _ in range(2)],
        ),
    ],
)
def test_wrong_use(error, body):
    with pytest.raises(error):
        job_with(body)
