"""A model trained eagerly, through `pc.compile` and through `pc.run` has equal losses."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import nn
from plancompiler.eager import spawn

STEPS = 4
DATA = pc.Placement("cpu", [0, 1], axes=("dp",))
GRID = pc.Placement("cpu", [[0, 1], [2, 3]], axes=("dp", "tp"))
ROWS = {"data": "S(0)", "grid": ["S(0)", "B"]}
MESHES = {"data": DATA, "grid": GRID}
BY_OUTPUT, BY_INPUT = ["B", "S(0)"], ["B", "S(1)"]
SPLIT = {
    **{f"attention.{name}.{part}": BY_OUTPUT for name in ("query", "key", "value")
       for part in ("weight", "bias")},
    "attention.projection.weight": BY_INPUT,
    "mlp.fc1.weight": BY_OUTPUT,
    "mlp.fc1.bias": BY_OUTPUT,
    "mlp.fc2.weight": BY_INPUT,
}  # fmt: skip


class Gpt(nn.Module):
    """Two blocks on bytes, tensor-parallel where the mesh has an axis for it."""

    def __init__(self, mesh):
        self.token = nn.Embedding(32, 16)
        self.position = nn.Parameter((8, 16), "float32", "normal", (0, 0.02))
        self.blocks = nn.ModuleList(nn.TransformerBlock(16, 2, dropout=0.1) for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32, bias=False)
        self.place(mesh)
        if mesh.ndim == 2:
            for block in self.blocks:
                block.place(mesh, SPLIT)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.value
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(mesh):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (4, 9))
    model = Gpt(mesh)
    return (
        tokens[:, :-1],
        tokens[:, 1:],
        lambda x, y: pc.cross_entropy(model(x), y),
        pc.optim.AdamW(lr=0.01),
    )


def mlp(mesh):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(12, 7)).astype(np.float32), rng.integers(0, 5, 12)
    layers = (nn.Linear(7, 12), nn.ReLU(), nn.Dropout(0.25), nn.Linear(12, 5))
    split = {} if mesh.ndim == 1 else {"0.weight": BY_OUTPUT, "0.bias": BY_OUTPUT}
    model = nn.Sequential(*layers).place(mesh, split)
    optimizer = pc.optim.SGD(lr=0.1, momentum=0.9)
    return x, y, lambda x, y: pc.cross_entropy(model(x), y), optimizer


MODELS = {"gpt": gpt, "mlp": mlp}


def run(model, layout):
    mesh, sbp = MESHES[layout], ROWS[layout]
    x, y, loss_of, optimizer = MODELS[model](mesh)
    with pc.job(model, seed=4) as job:
        a = pc.input("x", x.shape, str(x.dtype), mesh, sbp)
        b = pc.input("y", y.shape, str(y.dtype), mesh, sbp)
        loss = loss_of(a, b)
        optimizer.minimize(loss)
        pc.output("loss", loss)
    with pc.run(job, cache=False) as session:
        return [session.step(x=x, y=y)["loss"] for _ in range(STEPS)]


def train(model, layout, wrap):
    mesh, sbp = MESHES[layout], ROWS[layout]
    generator = pc.manual_seed(4)
    x, y, loss_of, optimizer = MODELS[model](mesh)
    x, y = pc.tensor(x, mesh, sbp), pc.tensor(y, mesh, sbp)

    def function(x, y):
        loss = loss_of(x, y)
        optimizer.minimize(loss)
        return loss

    losses = []
    function = wrap(function)
    for step in range(STEPS):
        generator.start_step(step)
        losses.append(function(x, y).item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("layout", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_losses_are_equal(model, layout):
    expected = run(model, layout)
    assert expected[-1] < expected[0]
    for wrap in (lambda function: function, pc.compile):
        for losses in spawn(train, MESHES[layout].size, model, layout, wrap):
            np.testing.assert_allclose(losses, expected, 1e-5)
