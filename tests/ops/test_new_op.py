"""A new op is one definition: from it alone it runs everywhere, and is listed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import plancompiler as pc
from plancompiler.cli.ops import ops_command
from plancompiler.eager import spawn
from plancompiler.errors import AttributeValueError
from plancompiler.ir import DType, TensorType
from plancompiler.ops import apply, infer_types, registry
from plancompiler.passes import run_passes
from tests.executor.cuda.devices import spawn_on
from tests.ops.dense import gradients_of
from tests.passes.worlds import configured

DEFINITION = '''
"""Shifted squares."""

import numpy as np

from plancompiler.ops.attributes import Float
from plancompiler.ops.check import FLOATS, expect_dtype
from plancompiler.ops.registry import define_op


def infer(inputs, attrs):
    expect_dtype("shifted_square", inputs[0], FLOATS)
    return inputs


def kernel(context, inputs, outputs):
    np.add(inputs[0], context.attrs["shift"], out=outputs[0])
    np.square(outputs[0], out=outputs[0])


define_op(
    "shifted_square",
    infer=infer,
    rule="... -> ...",
    attrs=(Float("shift", 1.0),),
    kernel=kernel,
    gradient=lambda attrs, inputs, outputs, grads: (
        (inputs[0] + attrs["shift"]) * grads[0] * 2.0,
    ),
    inplace=((0, 0),),
    elementwise=True,
    precision="following",
    doc="(x + shift)², per element.",
)
'''
X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
ROOT = Path(__file__).resolve().parents[2]
MESH = pc.Placement("cpu", [0, 1], axes=("dp",))


@pytest.fixture(scope="module", autouse=True)
def definition(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file: Path = tmp_path_factory.mktemp("ops") / "shifted.py"
    file.write_text(DEFINITION)
    spec = importlib.util.spec_from_file_location("shifted", file)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    yield
    del registry._TABLE["shifted_square"]


def check_training(mesh: pc.Placement) -> None:
    x = pc.tensor(X, mesh, "S(0)")
    x.requires_grad = True
    y = apply("shifted_square", x, shift=0.5)
    y.sum().backward()
    np.testing.assert_allclose(y.numpy(), (X + 0.5) ** 2, rtol=1e-6)
    assert x.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), 2 * (X + 0.5), rtol=1e-6)


def test_it_runs_eagerly_and_traced_with_its_gradient() -> None:
    def program() -> None:
        check_training(MESH)
        traced = pc.compile(lambda x: apply("shifted_square", x, shift=0.5))
        values = traced(pc.tensor(X, MESH, "S(0)")).numpy()
        np.testing.assert_allclose(values, (X + 0.5) ** 2, rtol=1e-6)

    spawn(program, 2)


def test_it_runs_on_simulated_devices() -> None:
    mesh = pc.Placement("cuda", [0, 1], axes=("dp",))
    spawn_on("simulated", lambda: check_training(mesh), 2)


@pytest.mark.parametrize("fuse", [False, True])
def test_it_is_compiled_and_fused(fuse: bool) -> None:
    with pc.job("new") as job:
        x = pc.input("x", X.shape, "float32", MESH, ["S(0)"])
        pc.output("y", (apply("shifted_square", x) * 2.0).tanh())
    passes = ("fuse_elementwise",) if fuse else ()
    rewritten = configured(job, passes=passes)
    kinds = [op.kind for op in run_passes(rewritten)[0].ops]
    assert ("fused_elementwise" in kinds) == fuse
    with pc.run(rewritten, cache=False) as session:
        y = session.step(x=X)["y"]
    np.testing.assert_allclose(y, np.tanh(2 * (X + 1) ** 2), rtol=1e-6)


def test_its_attributes_are_checked_and_have_defaults() -> None:
    (grad,) = gradients_of("shifted_square", [X], {}, [np.ones_like(X)])
    np.testing.assert_allclose(grad, 2 * (X + 1), rtol=1e-6)
    with pytest.raises(AttributeValueError, match="wrong value") as refused:
        infer_types("shifted_square", (TensorType((2,), DType.FLOAT32),), {"shift": "far"})
    assert "a number" in str(refused.value)


def test_it_is_listed() -> None:
    rows = json.loads(CliRunner().invoke(ops_command, ["--json"]).stdout)["ops"]
    assert rows[-1]["kind"] == "shifted_square"
    assert rows[-1]["attributes"] == ["shift: Float = 1.0"]
    page = CliRunner().invoke(ops_command, ["--markdown"]).stdout
    assert "## shifted_square\n\n(x + shift)², per element." in page
    # All before it is the committed page.
    assert page.startswith((ROOT / "docs/ops.md").read_text().rstrip("\n"))
