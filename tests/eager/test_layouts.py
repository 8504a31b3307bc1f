"""Modules and optimizers with state of their own: on any layout of odd sizes as on one rank."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import nn
from plancompiler.eager import spawn

STEPS = 5
ONE = pc.Placement("cpu", [0])
MESHES = {
    "two": pc.Placement("cpu", [0, 1]),
    "three": pc.Placement("cpu", [0, 1, 2]),
    "grid": pc.Placement("cpu", [[0, 1], [2, 3]]),
}
DRAWN = 4
"""Layouts of each mesh that are tried, out of all."""
rng = np.random.default_rng(3)
X, Y = rng.normal(size=(STEPS, 7, 5, 6)), rng.integers(0, 3, (STEPS, 7, 5))


class Net(nn.Module):
    """Statistics of data and of batches around attention: 7 rows of 5 positions of 6 channels."""

    def __init__(self, placement, of_parameters):
        self.data = nn.DataNorm(6, decay=0.9, initial_count=10.0, dtype="float64")
        self.attention = nn.FusedAttention(
            6, 3, dropout=0.1, attention_dropout=0.1, dtype="float64"
        )
        self.batch = nn.BatchNorm1d(6, dtype="float64")
        self.head = nn.Linear(6, 3, dtype="float64")
        self.place(placement)
        layout = {}
        for name, parameter in self.named_parameters():
            layout[name] = [
                entry if entry == "B" or len(parameter.shape) > int(entry[2:-1]) else "B"
                for entry in of_parameters
            ]
        self.place(placement, layout)

    def forward(self, x):
        rows = self.data(x.transpose(0, 2, 1)).transpose(0, 2, 1)
        mixed = self.attention(rows)
        return self.head(self.batch(mixed.transpose(0, 2, 1)).transpose(0, 2, 1))


def train(placement, of_data, of_parameters, accumulate):
    generator = pc.manual_seed(9)
    net = Net(placement, of_parameters)
    update = pc.optim.DistributedFusedLamb(lr=0.05, max_norm=0.5, accumulate=accumulate)
    losses = []
    for step in range(STEPS):
        generator.start_step(step)
        x = pc.tensor(X[step], placement, of_data)
        y = pc.tensor(Y[step], placement, ["S(0)" if each == "S(0)" else "B" for each in of_data])
        loss = pc.cross_entropy(net(x).reshape(35, 3), y.reshape(35))
        update.zero_grad()
        loss.backward()
        update.step(net.parameters())
        losses.append(loss.item())
    state = {name: each.numpy() for name, each in net.state_dict().items()}
    net.eval()
    return losses, state, net(pc.tensor(X[0], placement, of_data)).numpy()


def layouts(mesh, count):
    """Layouts of data and of parameters, drawn from all."""
    ndim = MESHES[mesh].ndim
    every = list(
        itertools.product(
            itertools.product(["B", "S(0)", "S(1)", "S(2)", "P"], repeat=ndim),
            itertools.product(["B", "S(0)", "S(1)"], repeat=ndim),
            (1, 2),
        )
    )
    return random.Random(mesh).sample(every, min(count, len(every)))


@pytest.fixture(scope="module")
def alone():
    return {count: spawn(train, 1, ONE, ["B"], ["B"], count)[0] for count in (1, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_training_is_the_same_on_every_layout(mesh, alone):
    for of_data, of_parameters, accumulate in layouts(mesh, DRAWN):
        losses, state, actual = alone[accumulate]
        assert len(set(losses)) == STEPS
        for rank in spawn(
            train, MESHES[mesh].size, MESHES[mesh], of_data, of_parameters, accumulate
        ):
            said = f"{of_data} {of_parameters} {accumulate}"
            np.testing.assert_allclose(rank[0], losses, 1e-9, err_msg=said)
            assert rank[1].keys() == state.keys()
            for name, value in state.items():
                np.testing.assert_allclose(rank[1][name], value, 1e-7, 1e-9, err_msg=said + name)
            np.testing.assert_allclose(rank[2], actual, 1e-7, 1e-9, err_msg=said)


# --- checkpoints ----------------------------------------------------------------------------------

STATE = {
    "weight": rng.normal(size=(5, 7)).astype(np.float32),
    "flags": np.array([True, False, True]),
    "counts": np.arange(11, dtype=np.int64).reshape(11, 1),
    "half": rng.normal(size=(2, 3, 4)).astype(np.float16),
    "empty": np.zeros((0, 3)),
    "single": np.float64(2.5),
}
WORLDS = {
    1: [(ONE, ["B"])],
    2: [(MESHES["two"], each) for each in (["B"], ["S(0)"], ["S(1)"], ["P"])],
    3: [(MESHES["three"], each) for each in (["S(0)"], ["S(1)"])],
    4: [(MESHES["grid"], each) for each in (["S(0)", "S(1)"], ["B", "S(0)"], ["S(0)", "S(0)"])],
}


def laid(array, entries):
    """What the array can have of these."""
    return [
        "B"
        if (entry[0] == "S" and int(entry[2:-1]) >= array.ndim)
        or (entry == "P" and array.dtype.kind != "f")
        else entry
        for entry in entries
    ]


def saved(folder, placement, entries):
    state = {
        name: pc.tensor(value, placement, laid(np.asarray(value), entries))
        for name, value in STATE.items()
    }
    pc.eager.save(folder, {**state, "deep": {"count": 3}}, step=2)


def loaded(folder, placement, entries):
    state = {
        name: pc.tensor(np.zeros_like(value), placement, laid(np.asarray(value), entries))
        for name, value in STATE.items()
    }
    actual = pc.eager.load(folder, {**state, "deep": {"count": 0}})
    assert actual["deep"] == {"count": 3}
    assert all(actual[name] is state[name] for name in STATE)
    return {name: each.numpy() for name, each in state.items()}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", WORLDS)
def test_a_state_is_read_on_other_numbers_of_ranks(ranks, tmp_path):
    for number, (placement, entries) in enumerate(WORLDS[ranks]):
        folder = tmp_path / str(number)
        spawn(saved, ranks, folder, placement, entries)
        for others, places in WORLDS.items():
            for where, wanted in places:
                for state in spawn(loaded, others, folder, where, wanted):
                    for name, value in state.items():
                        assert value.dtype == STATE[name].dtype
                        np.testing.assert_array_equal(value, STATE[name], err_msg=name)
