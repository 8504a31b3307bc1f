"""Programs beside the one that a session steps: they read its variables, and change nothing."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import nn
from plancompiler.errors import FeedError, JobError, NonFiniteError, UsageError

PAIR = pc.Placement("cpu", [0, 1])
ALONE = pc.Placement("cpu", [1])
RNG = np.random.default_rng(2)
X, Y = RNG.normal(size=(6, 4)).astype(np.float32), RNG.normal(size=(6, 3)).astype(np.float32)
HELD = RNG.normal(size=(5, 4)).astype(np.float32)


def model(mesh, sbp):
    return nn.Sequential(nn.Linear(4, 3)).place(mesh, {"0.weight": sbp})


def train(sbp="S(0)"):
    with pc.job("train") as job:
        x = pc.input("x", X.shape, "float32", PAIR, "S(0)")
        y = pc.input("y", Y.shape, "float32", PAIR, "S(0)")
        loss = pc.mse_loss(model(PAIR, sbp)(x), y)
        pc.optim.Adam(lr=0.1).minimize(loss)
        pc.output("loss", loss)
    return job


def predict(mesh=ALONE, sbp="B"):
    with pc.job("predict") as job:
        x = pc.input("x", HELD.shape, "float32", mesh)
        pc.output("y", model(mesh, sbp)(x))
        pc.output("greatest", x.max())
    return job


def expected(session):
    values = session.variables()
    return HELD @ values["0.weight"].T + values["0.bias"]


PROGRAMS = {
    "one rank": predict,
    "split otherwise": lambda: predict(PAIR, "S(1)"),
    "as in training": lambda: predict(PAIR, "S(0)"),
}


def trained(steps, **named):
    """Losses of steps with an evaluation by every program after each."""
    programs = {name: make() for name, make in PROGRAMS.items()}
    losses = []
    with pc.run(train(), programs=programs, **named) as session:
        for _ in range(steps):
            for name in programs:
                made = session.evaluate(name, x=HELD)
                np.testing.assert_allclose(made["y"], expected(session), rtol=1e-5, atol=1e-6)
                assert made["greatest"] == pytest.approx(HELD.max())
            losses.append(session.step(x=X, y=Y)["loss"])
    return losses


def test_programs_read_the_variables_as_they_are_and_training_does_not_see_them():
    with pc.run(train()) as session:
        alone = [session.step(x=X, y=Y)["loss"] for _ in range(3)]
    assert trained(3) == alone
    assert alone[2] < alone[0]


@pytest.mark.processes
def test_programs_of_a_session_with_processes():
    assert len(trained(2, backend="processes")) == 2


def test_a_restored_session_evaluates_what_was_saved(tmp_path):
    with pc.run(train()) as session:
        session.step(x=X, y=Y)
        session.save(tmp_path)
        wanted = expected(session)
    with pc.run(train("B"), restore=tmp_path, programs={"p": predict()}) as session:
        np.testing.assert_allclose(session.evaluate("p", x=HELD)["y"], wanted, rtol=1e-5, atol=1e-6)


def test_an_evaluation_that_fails_leaves_the_session_open():
    with pc.run(train(), programs={"p": predict()}) as session:
        session.step(x=X, y=Y)
        with pytest.raises(UsageError, match=r"no such program.*'p'"):
            session.evaluate("q", x=HELD)
        with pytest.raises(FeedError):
            session.evaluate("p", x=HELD[:2])
        with pytest.raises(NonFiniteError):
            session.evaluate("p", x=HELD * np.float32(np.inf))
        session.step(x=X, y=Y)
        made = session.evaluate("p", x=HELD)["y"]
        np.testing.assert_allclose(made, expected(session), rtol=1e-5, atol=1e-6)
    with pytest.raises(UsageError, match="the session is closed"):
        session.evaluate("p", x=HELD)


def test_programs_that_do_not_fit_are_refused_at_the_start():
    with pc.job("wide") as wide:
        x = pc.input("x", (5, 4), "float32", ALONE)
        pc.output("y", nn.Sequential(nn.Linear(4, 2)).place(ALONE)(x))
    with pc.job("other") as other:
        x = pc.input("x", (5, 4), "float32", ALONE)
        pc.output("y", nn.Linear(4, 3).place(ALONE)(x))
    for program, words in (
        (wide, r"does not have so.*float32\[2, 4\].*Expected.*float32\[3, 4\]"),
        (other, "does not have so.*one of"),
        (train(), "changes a variable"),
    ):
        with pytest.raises(JobError, match=words):
            pc.run(train(), programs={"p": program})


def test_norms_without_factors():
    with pc.job("norms") as job:
        x = pc.input("x", X.shape, "float32", PAIR, "S(0)")
        pc.output("layer", pc.layer_norm(x, None, None))
        pc.output("shifted", pc.layer_norm(x, beta=pc.ones((4,), "float32", PAIR)))
        pc.output("rms", pc.rms_norm(x))
    with pc.run(job) as session:
        made = session.step(x=X)
    unit = (X - X.mean(1, keepdims=True)) / np.sqrt(X.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(made["layer"], unit, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(made["shifted"], unit + 1, rtol=1e-5, atol=1e-6)
    eager = pc.layer_norm(pc.tensor(X, pc.Placement("cpu", [0])), None, None).numpy()
    np.testing.assert_array_equal(eager, made["layer"])
    roots = np.sqrt((X**2).mean(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(made["rms"], X / roots, rtol=1e-5)
