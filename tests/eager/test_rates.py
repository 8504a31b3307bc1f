"""Learning rates that change between steps, and which parameters an optimizer moves."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import nn
from plancompiler.errors import AttributeValueError, UsageError
from tests.dense import DenseRun

ONE = pc.Placement("cpu", [0])
PAIR = pc.Placement("cpu", [0, 1])


def moved(optimizer, compiled):
    """A function that makes a step, and says how far it moved a weight whose gradient is 1."""
    net = nn.Linear(1, 1).place(ONE)
    x = pc.tensor(np.ones((1, 1), np.float32), ONE)

    def step(x):
        optimizer.minimize(net(x).sum(), net.parameters())
        return x * 1

    run = pc.compile(step) if compiled else step

    def measured():
        before = net.weight.value.numpy().copy()
        run(x)
        return round((before - net.weight.value.numpy()).item(), 5)

    return measured, run


@pytest.mark.parametrize("compiled", [False, True])
def test_rates_can_be_set_between_steps(compiled):
    sgd = pc.optim.SGD(0.5)
    step, run = moved(sgd, compiled)
    assert (sgd.lr, step()) == (0.5, 0.5)
    sgd.lr = 0.25
    assert (sgd.lr, step()) == (0.25, 0.25)
    sgd.lr = 0.0
    assert step() == 0.0
    sgd.lr = lambda step: step / 8
    assert (sgd.lr, step()) == (0.375, 0.375)
    assert (sgd.lr, step()) == (0.5, 0.5)
    sgd.lr = pc.optim.linear(1.0, 0, 10)
    assert (sgd.lr, step()) == (0.5, 0.5)
    if compiled:
        assert len(run.programs()) == 1


def test_two_optimizers_in_one_compiled_function_have_their_own_rates():
    first, second = pc.optim.SGD(0.5), pc.optim.SGD(lambda step: 0.25 * step)
    left, right = (nn.Parameter((1,)).place(ONE) for _ in range(2))

    @pc.compile
    def step(x):
        first.minimize((left.value * x).sum(), [left])
        second.minimize((right.value * x).sum(), [right])

    x = pc.tensor(np.ones(1, np.float32), ONE)
    for _ in range(3):
        step(x)
        first.lr = first.lr / 2
    assert (left.value.item(), right.value.item()) == (-0.875, -0.75)
    assert len(step.programs()) == 1


def test_two_optimizers_in_one_compiled_function_count_their_own_steps():
    def trained(compiled):
        weights = [nn.Parameter((1,), dtype="float64", init="ones").place(ONE) for _ in range(2)]
        optimizers = [pc.optim.Adam(each, 0.5) for each in ([weights[0]], [weights[1]])]

        def step(x):
            for each, optimizer in zip(weights, optimizers, strict=True):
                optimizer.minimize((each.value * each.value * x).sum())

        run = pc.compile(step) if compiled else step
        for number in range(1, 5):
            x = pc.tensor(np.full(1, number), ONE, dtype="float64")
            optimizers[0].minimize((weights[0].value * x).sum())
            run(x)
        return [each.value.item() for each in weights]

    np.testing.assert_allclose(trained(True), trained(False), rtol=1e-12)


def test_wrong_rates_and_attributes_are_refused():
    sgd = pc.optim.SGD(0.5)
    for name in ("rate", "momentum", "weight_decay", "learning_rate", "schedule", "parameters"):
        with pytest.raises(UsageError, match=f"no attribute '{name}' that can be set") as caught:
            setattr(sgd, name, 0.1)
        assert "lr, the learning rate" in str(caught.value)
    for value in ("fast", float("nan"), [0.1], None):
        with pytest.raises(UsageError, match="must be a finite number"):
            sgd.lr = value
    with pytest.raises(AttributeValueError, match="must not be negative"):
        sgd.lr = -0.1
    with pytest.raises(UsageError, match="takes a list of parameters"):
        pc.optim.Adam([0.1])
    step, _ = moved(sgd, False)
    sgd.lr = lambda step: "soon"
    with pytest.raises(UsageError, match="no rate for step 0"):
        step()
    sgd.lr = 0.5
    assert step() == 0.5


def test_an_optimizer_moves_what_it_is_given(caplog):
    maker, judge = nn.Linear(2, 2).place(ONE), nn.Linear(2, 1).place(ONE)
    x = pc.tensor(np.ones((4, 2), np.float32), ONE)

    def loss():
        return judge(maker(x)).mean()

    def weights():
        return [net.weight.value.numpy().tolist() for net in (maker, judge)]

    loss().backward()
    kept = judge.weight.value.grad.numpy().tolist()
    with caplog.at_level(logging.WARNING, "plancompiler.optim"):
        before = weights()
        pc.optim.SGD(0.1).minimize(loss(), parameters=maker.parameters())
        given = pc.optim.SGD(0.1, parameters=maker.parameters())
        given.minimize(loss())
        given.zero_grad()
        after = weights()
        assert after[0] != before[0]
        assert after[1] == before[1]
        # Another optimizer's gradients are as they were.
        assert judge.weight.value.grad.numpy().tolist() == kept
        with pytest.raises(UsageError, match="no parameter has a gradient"):
            given.step()
        assert not caplog.records
        everything = pc.optim.SGD(0.1)
        everything.minimize(loss())
        everything.minimize(loss())
        assert weights()[1] != after[1]
    assert len(caplog.records) == 1
    assert "4 parameters of 2 models (Linear)" in caplog.text


def test_an_optimizer_of_a_job_moves_what_it_is_given(caplog):
    def job(**more):
        with pc.job("two") as made:
            maker, judge = nn.Linear(2, 2).place(ONE), nn.Linear(2, 1).place(ONE)
            x = pc.input("x", (4, 2), "float32", ONE)
            given = {name: maker.parameters() for name in more}
            pc.optim.SGD(0.1, **given).minimize(judge(maker(x)).mean())
            pc.output("x", x)
        return sum(op.kind == "sgd_update" for op in made.ops)

    assert job(parameters=True) == 2
    assert not caplog.records
    assert job() == 4
    assert "4 parameters of 2 models" in caplog.text


def job_of_two(first, second):
    """A job that moves one number per optimizer, by the rate of the step."""
    with pc.job("rates") as job:
        for name, rate in (("a", first), ("b", second)):
            weight = nn.Parameter((1,), name=name).place(PAIR)
            pc.optim.SGD(rate).minimize(weight.value.sum(), [weight])
        pc.output("done", weight.value.sum())
    return job


def values(session):
    return [values.item() for _, values in sorted(session.variables().items())]


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_rates_of_sessions(backend, tmp_path):
    job = job_of_two(0.5, lambda step: 0.25 * step)
    with pc.run(job, backend=backend) as session:
        digest = session.digest
        assert session.lr == (0.5, 0.0)
        list(session.run(2))
        assert (session.lr, values(session)) == ((0.5, 0.5), [-1.0, -0.25])
        session.lr = 0.125
        session.step()
        assert (session.lr, values(session)) == ((0.125, 0.125), [-1.125, -0.375])
        session.lr = (pc.optim.linear(1.0, 0, 4), lambda step: step)
        list(session.run(1))
        assert values(session) == [-1.375, -3.375]
        session.save(tmp_path)
    with pc.run(job, backend=backend, restore=tmp_path) as session:
        assert session.lr == (0.5, 1.0)
        session.step()
        assert values(session) == [-1.875, -4.375]
        with pytest.raises(UsageError, match="or for each of them"):
            session.lr = (0.1, 0.1, 0.1)
    with pc.run(job_of_two(lambda step: 1.0, lambda step: 2.0)) as session:
        list(session.run(3))
        assert values(session) == [-3.0, -6.0]
        assert session.digest != digest


def test_jobs_of_numbers_stay_as_they_are():
    """One optimizer whose rate the job computes has no attribute that says which it is."""
    with pc.job("one") as job:
        weight = nn.Parameter((1,)).place(ONE)
        pc.optim.SGD(0.5).minimize(weight.value.sum())
        pc.output("w", weight.value.sum())
    (op,) = [op for op in job.ops if op.kind == "learning_rate"]
    assert dict(op.attrs).keys() == {"schedule", "base", "warmup", "total", "final"}
    with pc.job("none") as job:
        pc.output("x", pc.full((), 1.0, "float32", ONE))
    with pc.run(job) as session, pytest.raises(UsageError, match="no optimizer"):
        session.lr = 0.5


def test_a_function_that_nobody_calls_is_named():
    job = job_of_two(0.5, lambda step: 0.25)
    with pytest.raises(UsageError, match="nobody has fed its value"):
        DenseRun(job).step()
