"""Small parameters are updated together, to the same bits as one by one."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import foreach
from plancompiler.frontend.optim import schedule

MESH = pc.Placement("cpu", [0])
SHAPES = [(3, 5), (7,), (), (2, 2, 2), (0,), (1,), (70, 70)]
"""A scalar and one that is not small are updated alone."""
OPTIMIZERS = {
    "sgd": lambda: pc.optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda: pc.optim.AdamW(lr=schedule.cosine(0.1, warmup=1, total=5)),
    "lion": lambda: pc.optim.Lion(lr=0.01),
}


def trained(name, dtype):
    """All parameters after three steps, and how many kernels a step ran."""
    rng = np.random.default_rng(0)
    parameters = [
        pc.tensor(np.asarray(rng.normal(size=shape), dtype), MESH, requires_grad=True)
        for shape in SHAPES
    ]
    optimizer = OPTIMIZERS[name]()
    for _ in range(3):
        for parameter in parameters:
            gradient = np.asarray(rng.normal(size=parameter.shape), dtype)
            parameter.grad = pc.tensor(gradient, MESH)
        optimizer.step(parameters)
    return [parameter.numpy() for parameter in parameters]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_together_gives_the_same_bits_as_one_by_one(name, dtype, monkeypatch):
    calls = []
    together = foreach._update_together
    monkeypatch.setattr(
        foreach,
        "_update_together",
        lambda plan, rows: calls.append(len(rows)) or together(plan, rows),
    )
    actual = trained(name, dtype)
    assert calls == [5] * 3
    monkeypatch.setattr(foreach, "SMALL", -1)
    expected = trained(name, dtype)
    assert calls == [5] * 3
    for ours, alone in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(ours, alone)


def test_a_change_of_a_parameter_is_noticed_by_the_tape():
    weight, other = (pc.tensor(np.ones(3, "f4"), MESH, requires_grad=True) for _ in range(2))
    loss = (weight * weight * other).sum()
    weight.grad = other.grad = pc.tensor(np.ones(3, "f4"), MESH)
    pc.optim.SGD(lr=0.1).step([weight, other])
    with pytest.raises(pc.PlanCompilerError, match="changed in place"):
        loss.backward()
