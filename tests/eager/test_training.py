"""Training with eager tensors gives the losses of the job compiled from the same code."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import nn
from plancompiler.eager import spawn
from tests.dense import DenseRun

STEPS = 5
rng = np.random.default_rng(0)
X = rng.normal(size=(10, 7)).astype(np.float32)
Y = rng.integers(0, 5, 10)

ONE = pc.Placement("cpu", [0])
DATA = pc.Placement("cpu", [0, 1])
GRID = pc.Placement("cpu", [[0, 1], [2, 3]], axes=("dp", "tp"))
LAYOUTS = {
    "one": (ONE, "B", {}),
    "data": (DATA, "S(0)", {}),
    "grid": (
        GRID,
        ["S(0)", "B"],
        {"0.weight": ["B", "S(0)"], "0.bias": ["B", "S(0)"], "3.weight": ["B", "S(1)"]},
    ),
    "zero": (DATA, "S(0)", {"0.weight": "S(0)", "0.bias": "S(0)", "3.weight": "S(0)"}),
}
OPTIMIZERS = {
    "sgd": lambda: pc.optim.SGD(lr=0.1, momentum=0.9),
    "adamw": lambda: pc.optim.AdamW(lr=pc.optim.cosine(0.05, warmup=2, total=9)),
    "lamb": lambda: pc.optim.LAMB(lr=0.05),
    "adafactor": lambda: pc.optim.Adafactor(lr=0.05),
}


def model(placement, layout):
    layers = (nn.Linear(7, 12), nn.ReLU(), nn.Dropout(0.25), nn.Linear(12, 5))
    return nn.Sequential(*layers).place(placement, layout)


def compiled(optimizer, clip_norm):
    with pc.job("mlp", seed=4) as job:
        x, y = pc.input("x", X.shape, "float32", ONE), pc.input("y", Y.shape, "int64", ONE)
        loss = pc.cross_entropy(model(ONE, {})(x), y)
        OPTIMIZERS[optimizer]().minimize(loss, clip_norm=clip_norm)
        pc.output("loss", loss)
    run = DenseRun(job)
    return [run.step(x=X, y=Y)["loss"] for _ in range(STEPS)]


def train(layout, optimizer, clip_norm, together):
    placement, sbp, parameters = LAYOUTS[layout]
    generator = pc.manual_seed(4)
    net, update = model(placement, parameters), OPTIMIZERS[optimizer]()
    x, y = pc.tensor(X, placement, sbp), pc.tensor(Y, placement, sbp)
    losses = []
    for step in range(STEPS):
        generator.start_step(step)
        loss = pc.cross_entropy(net(x), y)
        if together:
            update.minimize(loss, clip_norm=clip_norm)
        else:
            update.zero_grad()
            loss.backward()
            update.step(clip_norm=clip_norm)
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_losses_are_those_of_the_compiled_job_on_every_layout(optimizer, clip_norm):
    expected = compiled(optimizer, clip_norm)
    assert expected[-1] != expected[0]
    for number, (name, (placement, _, _)) in enumerate(LAYOUTS.items()):
        together = number % 2 == 0
        for losses in spawn(train, placement.size, name, optimizer, clip_norm, together):
            np.testing.assert_allclose(losses, expected, 1e-4, err_msg=name)


def test_a_step_reduces_every_gradient_once():
    def rank():
        pc.manual_seed(0)
        net, update = model(DATA, {}), pc.optim.SGD(lr=0.1)
        loss = pc.cross_entropy(net(pc.tensor(X, DATA, "S(0)")), pc.tensor(Y, DATA, "S(0)"))
        with pc.comm_trace() as trace:
            loss.backward()
        assert not {each.op for each in trace.collectives if each.nbytes > 8}
        with pc.comm_trace() as trace:
            update.step()
        lines = {each.source.file for each in trace.collectives}
        return trace.counts(), lines, trace.nbytes()

    for counts, lines, nbytes in spawn(rank, 2):
        assert counts == {"all_reduce": 4}
        assert nbytes == 4 * (7 * 12 + 12 + 12 * 5 + 5)
        assert {file.rpartition("/")[2] for file in lines} == {"test_training.py"}


def test_batch_normalisation_keeps_running_statistics():
    def rank(placement, sbp):
        pc.manual_seed(1)
        net = nn.BatchNorm1d(7).place(placement)
        for _ in range(2):
            y = net(pc.tensor(X, placement, sbp))
        net.eval()
        z = net(pc.tensor(X, placement, sbp))
        return [each.numpy() for each in (y, net.running_mean.value, z)]

    (one,) = spawn(rank, 1, ONE, "B")
    np.testing.assert_allclose(one[1], X.mean(0) * (1 - 0.9**2), 1e-5, 1e-6)
    for of_rank in spawn(rank, 2, DATA, "S(0)"):
        for got, wanted in zip(of_rank, one, strict=True):
            np.testing.assert_allclose(got, wanted, 1e-4, 1e-5)


def test_frozen_parameters_stay():
    pc.manual_seed(2)
    net = model(ONE, {})
    update = pc.optim.SGD(lr=0.5)
    x, y = pc.tensor(X, ONE), pc.tensor(Y, ONE)
    first, last = (next(iter(net.named_parameters()))[1], net.parameters()[-1])
    first.trainable = False
    before = first.value.numpy(), last.value.numpy()
    pc.cross_entropy(net(x), y).backward()
    update.step(net.parameters())
    np.testing.assert_array_equal(first.value.numpy(), before[0])
    assert not np.array_equal(last.value.numpy(), before[1])


def test_gradients_function():
    x = pc.tensor([1.0, 2.0], ONE, requires_grad=True)
    (grad,) = pc.gradients((x * x).sum(), [x])
    assert grad.numpy().tolist() == [2, 4]
    assert x.grad is None
