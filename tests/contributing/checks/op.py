"""The op `gaussian` works wherever ops do."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

import plancompiler as pc
from plancompiler.cli.program import cli
from plancompiler.ops.registry import op_table
from tests.executor.cuda.devices import spawn_on
from tests.ops import samples_elementwise, test_gradient, test_sharding
from tests.ops.sample import Maker

X = np.linspace(-2, 2, 10).reshape(5, 2)
BELL, SLOPE = np.exp(-X * X), -2 * X * np.exp(-X * X)


def rank(device: str) -> list[np.ndarray]:
    """Eager with its gradient, and compiled."""
    x = pc.tensor(X, pc.Placement(device, [0, 1]), "S(0)", requires_grad=True)
    y = pc.gaussian(x)
    y.sum().backward()
    compiled = pc.compile(pc.gaussian)
    return [y.numpy(), x.grad.numpy(), compiled(x.detach()).numpy()]


def expect(results: list[list[np.ndarray]]) -> None:
    for values in results:
        for value, expected in zip(values, (BELL, SLOPE, BELL), strict=True):
            np.testing.assert_allclose(value, expected, 1e-12)


def test_eager_and_compiled() -> None:
    expect(pc.eager.spawn(lambda: rank("cpu"), 2))


def test_on_simulated_devices() -> None:
    expect(spawn_on("simulated", lambda: rank("cuda"), 2))


def test_in_a_job() -> None:
    with pc.job("bell") as job:
        x = pc.input("x", X.shape, "float64", pc.Placement("cpu", [0, 1]), "S(0)")
        pc.output("y", pc.gaussian(x))
    with pc.run(job) as session:
        np.testing.assert_allclose(session.step(x=X)["y"], BELL, 1e-12)


def test_every_signature_and_gradient_of_its_samples() -> None:
    calls = [
        each for each in samples_elementwise.samples(Maker("float64")) if each.kind == "gaussian"
    ]
    assert calls
    rng = np.random.default_rng(0)
    for call in calls:
        assert test_sharding.prove(call, rng)
        test_gradient.compare(call, [np.ones_like(call.inputs[0])])


@pytest.mark.parametrize("kind", ["gaussian", "gaussian_grad"])
def test_in_the_op_table(kind: str) -> None:
    listed = json.loads(CliRunner().invoke(cli, ["ops", "--json"]).stdout)["ops"]
    (row,) = (each for each in listed if each["kind"] == kind)
    assert row["gradient"]
    assert op_table()[kind].formula is not None
