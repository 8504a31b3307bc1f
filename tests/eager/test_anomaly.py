"""Anomaly detection: the op that made the first value that is not finite, its line and its rank."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.errors import NonFiniteError, UsageError
from plancompiler.executor.checkpoint import read_index

ALONE = pc.Placement("cpu", [0])
PAIR = pc.Placement("cpu", [0, 1])
WARNS = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""Where the same is done outside of the block: NumPy warns there."""


def here(ahead=0):
    """The number of the line that asks, and of some lines ahead."""
    return inspect.currentframe().f_back.f_lineno + ahead


def names(caught, op, line, rank=0):
    report = caught.value.report
    assert report.op == op
    assert report.source.endswith(f"test_anomaly.py:{line}"), report.source
    assert report.rank == rank
    return report


# --- eager ----------------------------------------------------------------------------------------


@WARNS
def test_the_first_op_is_named_and_not_what_follows():
    x = pc.tensor(np.array([4.0, 0.0, 1.0]), ALONE)
    y = x + 1.0  # made ready before, and used again after the block
    with pc.detect_anomaly():
        y = x + 1.0
        line = here(2)
        with pytest.raises(NonFiniteError, match="log made the first") as caught:
            (pc.log(x) * y).sum()
    report = names(caught, "log", line)
    assert report.got == "inf in output 0: 1 of this rank's 3 elements"
    assert pc.log(x).numpy()[1] == -np.inf
    assert (x + 1.0).numpy().tolist() == [5.0, 1.0, 2.0]


def test_the_gradient_is_named_with_the_forward_line():
    x = pc.tensor(np.array([4.0, 0.0]), ALONE, requires_grad=True)
    with pc.detect_anomaly():
        line = here(1)
        y = pc.sqrt(x * 1.0)
        loss = (y * 2.0).sum()
        with pytest.raises(NonFiniteError, match="the gradient of sqrt made") as caught:
            loss.backward()
    names(caught, "sqrt", line)


def test_what_was_not_finite_before_is_nobodys_doing():
    x = pc.tensor(np.array([[1.0, 2.0], [3.0, 4.0]]), ALONE, requires_grad=True)
    infinite = pc.tensor(np.full((2, 2), -np.inf), ALONE)
    with pc.detect_anomaly():
        masked = pc.where(x > 1.0, x, infinite)
        pc.softmax(masked, 1).sum().backward()
        (infinite * 2.0).numpy()
        pc.full((2,), -np.inf, "float64", ALONE)
        line = here(2)
        with pytest.raises(NonFiniteError, match="nan in output 0") as caught:
            infinite - infinite  # nan, of what was infinite only
    names(caught, "sub", line)


def test_updates_and_changes_in_place_are_checked():
    w = pc.tensor(np.ones(1), ALONE, requires_grad=True)
    with pc.detect_anomaly():
        (w * 1e308).sum().backward()
        optimizer = pc.optim.SGD(lr=10.0)
        with pytest.raises(NonFiniteError) as caught:
            optimizer.step([w])
        assert caught.value.report.op == "sgd_update"
        x = pc.tensor(np.zeros(2), ALONE)
        with pytest.raises(NonFiniteError, match="div made the first"):
            x /= pc.tensor(np.zeros(2), ALONE)


@WARNS
def test_the_rank_is_named_and_reductions_are_checked():
    def rank():
        number = pc.eager.current_world().rank
        x = pc.tensor(np.array([1.0, 0.0]), PAIR, "S(0)")
        with pc.detect_anomaly():
            if number == 1:
                with pytest.raises(NonFiniteError) as caught:
                    pc.log(x)
                assert caught.value.report.rank == 1
            else:
                pc.log(x)
            big = pc.tensor(np.array([1e308, 1e308]), PAIR, "S(0)")
            with pytest.raises(NonFiniteError, match="the reduction of a partial value") as caught:
                big.sum().numpy()
            assert caught.value.report.op == "redistribute"
            assert caught.value.report.rank == number
        return big.sum().item()

    assert spawn(rank, 2) == [np.inf] * 2


@WARNS
def test_compiled_functions_are_checked_too():
    @pc.compile
    def step(x):
        y = pc.log(x)  # this line
        return (y * 2.0).sum()

    line = here(-3)
    x = pc.tensor(np.array([4.0, 0.0]), ALONE)
    assert step(x).item() == -np.inf
    with pytest.raises(NonFiniteError, match="log made the first") as caught, pc.detect_anomaly():
        step(x)
    names(caught, "log_0", line)
    assert step(x).item() == -np.inf

    @pc.compile
    def looks():
        with pc.detect_anomaly():
            pass

    with pytest.raises(UsageError, match="around a compiled function"):
        looks()


# --- jobs -----------------------------------------------------------------------------------------


def build():
    """A step whose loss is nan when an input is negative, and whose gradient is infinite at 0."""
    with pc.job("roots") as job:
        x = pc.input("x", (4,), "float32", PAIR, "S(0)")
        w = pc.nn.Parameter((4,), init="ones", name="w").place(PAIR, "S(0)").value
        root = pc.sqrt(x * w)
        loss = (root * 2.0).sum()
        pc.optim.SGD(lr=0.1).minimize(loss)
        pc.output("loss", loss)
    return job


ROOT_LINE = next(
    number
    for number, text in enumerate(
        inspect.getsource(build).splitlines(), build.__code__.co_firstlineno
    )
    if "root =" in text
)
GOOD = np.array([1.0, 4.0, 9.0, 16.0], np.float32)
NEGATIVE = np.array([1.0, 4.0, 9.0, -16.0], np.float32)
AT_ZERO = np.array([0.0, 4.0, 9.0, 16.0], np.float32)


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_session_names_the_op_its_line_and_the_rank(backend):
    with pc.run(build(), backend=backend, anomaly=True) as session:
        assert session.step(x=GOOD)["loss"] == 20.0
        with pytest.raises(NonFiniteError, match="sqrt made the first") as caught:
            session.step(x=NEGATIVE)
    names(caught, "sqrt_0", ROOT_LINE, rank=1)


def test_a_gradient_is_named_with_its_forward_line():
    with (
        pytest.raises(NonFiniteError, match="made the first") as caught,
        pc.run(build(), anomaly=True) as session,
    ):
        session.step(x=AT_ZERO)
    report = caught.value.report
    assert report.source.endswith(f"test_anomaly.py:{ROOT_LINE}")
    assert report.rank == 0
    assert report.op != "sqrt_0"


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["threads", "processes"])
@pytest.mark.parametrize("anomaly", [False, True])
def test_state_can_be_saved_after_a_step_that_is_not_finite(anomaly, backend, tmp_path):
    with pc.run(build(), backend=backend, anomaly=anomaly) as session:
        session.step(x=GOOD)
        before = session.variables()["w"]
        with pytest.raises(NonFiniteError) as first:
            session.step(x=NEGATIVE)
        assert np.isfinite(before).all()
        after = session.variables()["w"]
        if anomaly:
            np.testing.assert_array_equal(after, before)
        else:  # every rank has done the whole step
            assert (after != before).all()
        session.save(tmp_path / "saved")
        assert read_index(tmp_path / "saved")["step"] == (1 if anomaly else 2)
        with pytest.raises(NonFiniteError) as again:
            session.step(x=GOOD)
        assert str(again.value) == str(first.value)
        saved = session.variables()["w"]
    with pc.run(build(), restore=tmp_path / "saved") as session:
        np.testing.assert_array_equal(session.variables()["w"], saved)


def test_nothing_is_checked_where_nobody_asks(monkeypatch):
    monkeypatch.setattr("plancompiler.executor.task.checked", None)  # would fail if it were called
    with pc.run(build()) as session:
        session.step(x=GOOD)
