"""State dicts, and checkpoints that eager and compiled programs share."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import nn
from plancompiler.eager import spawn
from plancompiler.errors import CheckpointError, UsageError

ONE = pc.Placement("cpu", [0])
PAIR = pc.Placement("cpu", [0, 1])
rng = np.random.default_rng(0)
X = rng.normal(size=(8, 6)).astype(np.float32)
Y = rng.integers(0, 3, 8)


def parts(placement, layout):
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 3))
    return net.place(placement, layout), pc.optim.AdamW(lr=0.05)


def losses(net, optimizer, placement, sbp, count):
    x, y = pc.tensor(X, placement, sbp), pc.tensor(Y, placement, sbp)
    found = []
    for _ in range(count):
        loss = pc.cross_entropy(net(x), y)
        optimizer.minimize(loss)
        found.append(loss.item())
    return found


def everything(net, optimizer):
    generator = pc.default_generator().state()
    return {**net.state_dict(), "optimizer": optimizer.state_dict(), "generator": generator}


def test_training_goes_on_on_another_layout(tmp_path):
    folder = tmp_path / "checkpoint"

    def first():
        pc.manual_seed(3)
        net, optimizer = parts(PAIR, {"0.weight": "S(0)", "3.weight": "S(1)"})
        losses(net, optimizer, PAIR, "S(0)", 3)
        pc.eager.save(folder, everything(net, optimizer), step=3)
        return losses(net, optimizer, PAIR, "S(0)", 3)

    def second(placement, sbp, layout):
        pc.manual_seed(99)
        net, optimizer = parts(placement, layout)
        losses(net, optimizer, placement, sbp, 1)  # so that the optimizer has states to fill
        found = pc.eager.load(folder, everything(net, optimizer))
        optimizer.load_state_dict(found["optimizer"])
        pc.default_generator().load_state(found["generator"])
        assert found["optimizer"]["step"] == 3
        return losses(net, optimizer, placement, sbp, 3)

    expected = spawn(first, 2)[0]
    for placement, sbp, layout in (
        (ONE, "B", {}),
        (PAIR, "B", {"0.weight": "S(1)"}),
        (PAIR, "S(0)", {}),
    ):
        for found in spawn(second, placement.size, placement, sbp, layout):
            np.testing.assert_allclose(found, expected, 1e-4)


def test_a_checkpoint_of_a_job_is_read_eagerly_and_back(tmp_path):
    net, optimizer = parts(ONE, {})
    with pc.job("net", seed=5) as job:
        x, y = pc.input("x", X.shape, "float32", ONE), pc.input("y", Y.shape, "int64", ONE)
        net.eval()
        loss = pc.cross_entropy(net(x), y)
        optimizer.minimize(loss)
        pc.output("loss", loss)
    with pc.run(job, cache=False) as session:
        session.step(x=X, y=Y)
        session.save(tmp_path / "job")
        expected = session.step(x=X, y=Y)["loss"]

    def eager():
        pc.manual_seed(77)
        other, adam = parts(PAIR, {"0.weight": "S(0)"})
        other.eval()
        losses(other, adam, PAIR, "S(0)", 1)
        states = {name: each for name, each in adam.state_dict().items() if name != "step"}
        pc.eager.load(tmp_path / "job", {**other.state_dict(), **states})
        adam.load_state_dict({**states, "step": 1})
        pc.eager.save(tmp_path / "eager", {**other.state_dict(), **states}, step=1)
        return losses(other, adam, PAIR, "S(0)", 1)[0]

    np.testing.assert_allclose(spawn(eager, 2), [expected] * 2, 1e-5)
    with pc.run(job, restore=tmp_path / "eager", cache=False) as session:
        np.testing.assert_allclose(session.step(x=X, y=Y)["loss"], expected, 1e-5)


def test_states_move_between_modules_of_other_layouts():
    def rank():
        pc.manual_seed(1)
        left, right = nn.Linear(4, 6).place(PAIR, {"weight": "S(0)"}), nn.Linear(4, 6).place(ONE)
        right.load_state_dict(left.state_dict())
        if pc.eager.current_world().rank == 0:
            return left.weight.value.redistribute(ONE, "B").numpy(), right.weight.value.numpy()
        left.weight.value.redistribute(ONE, "B")
        return None

    moved, taken = spawn(rank, 2)[0]
    np.testing.assert_array_equal(moved, taken)


def test_states_that_do_not_fit(tmp_path):
    net = nn.Linear(4, 6).place(ONE)
    with pytest.raises(UsageError, match="state of another module"):
        net.load_state_dict({"weight": net.weight.value, "scale": net.weight.value})
    with pytest.raises(UsageError, match="does not fit 'weight'"):
        net.load_state_dict({**net.state_dict(), "weight": pc.tensor(np.ones((6, 4)), ONE)})
    with pytest.raises(UsageError, match="not the state of this optimizer"):
        pc.optim.AdamW(lr=0.1).load_state_dict({"step": 1, "nobody.m": net.weight.value})
    with pytest.raises(UsageError, match="tensors and numbers"):
        pc.eager.save(tmp_path, {"name": "text"})
    pc.eager.save(tmp_path, {"kept": pc.tensor([1.0, 2.0], ONE), "number": 0.5})
    with pytest.raises(CheckpointError, match="has no variable"):
        pc.eager.load(tmp_path, {"other": pc.tensor([1.0, 2.0], ONE)})
    with pytest.raises(CheckpointError, match="another shape"):
        pc.eager.load(tmp_path, {"kept": pc.tensor([1.0], ONE)})
    target = pc.tensor([0.0, 0.0], ONE)
    assert pc.eager.load(tmp_path, {"kept": target, "number": 0.0})["number"] == 0.5
    assert target.numpy().tolist() == [1.0, 2.0]
