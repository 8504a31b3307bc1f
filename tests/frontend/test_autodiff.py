"""Gradients of traced jobs against central differences in float64."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import GradientError
from plancompiler.ops.registry import OpDef, op_def
from tests.dense import DenseRun
from tests.frontend.failing import raised

MESH = pc.Placement("cpu", [0, 1])
OTHER = pc.Placement("cpu", [2])


class Net(pc.nn.Module):
    """A module around a function of its parameters, each [name, shape]."""

    def __init__(self, shapes, function):
        for name, shape in shapes.items():
            setattr(self, name, pc.nn.Parameter(shape, "float64", "normal", (0.1, 0.8)))
        self.function = function

    def forward(self, x):
        named = {name: parameter.value for name, parameter in self.named_parameters()}
        return self.function(x, **named)


def check_gradients(model, x, loss_of):
    """Each parameter's gradient against (loss(w + h) - loss(w - h)) / 2h, element by element."""
    with pc.job("check") as job:
        value = pc.input("x", x.shape, str(x.dtype), MESH)
        loss = loss_of(model(value))
        names = [name for name, _ in model.named_parameters()]
        grads = pc.gradients(loss, [parameter.value for parameter in model.parameters()])
        for name, grad in zip(names, grads, strict=True):
            pc.output(f"grad {name}", grad)
        pc.output("loss", loss)
    run = DenseRun(job)
    outputs = run.step(x=x)
    step = 1e-5
    for name in names:
        variable = run.variables[name]
        expected = np.zeros_like(variable)
        for index in np.ndindex(variable.shape):
            before = variable[index]
            variable[index] = before + step
            above = run.step(x=x)["loss"]
            variable[index] = before - step
            below = run.step(x=x)["loss"]
            variable[index] = before
            expected[index] = (above - below) / (2 * step)
        np.testing.assert_allclose(outputs[f"grad {name}"], expected, rtol=2e-6, atol=1e-8)


X = np.random.default_rng(0).normal(size=(3, 4))
LABELS = np.array([2, 0, -100])


def attention(x, wq, wk, wv):
    q, k, v = (pc.linear(x, w) for w in (wq, wk, wv))
    return pc.causal_attention(q, k, v)


MODELS = {
    "linear": ({"weight": (5, 4), "bias": (5,)}, pc.linear),
    "shared weight": ({"w": (4, 4)}, lambda x, w: ((x @ w).tanh() @ w + w.sum(0)) @ w.T),
    "same value twice": ({"w": (3, 4)}, lambda x, w: x * w * w + w),
    "elementwise": (
        {"w": (4,)},
        lambda x, w: pc.sigmoid(x * w) + (x - w).tanh() / (2.0 + pc.square(w)) + (-w).exp(),
    ),
    "roots": (
        {"w": (4,)},
        lambda x, w: pc.sqrt(w * w + 1.0) + pc.rsqrt(x * x + w * w + 1.0) + pc.log(w * w + 2.0),
    ),
    "powers": ({"w": (4,)}, lambda x, w: (w * w + 1.0) ** 1.5 + pc.pow(w * w + 1.0, x)),
    "choice": (
        {"w": (3, 4)},
        lambda x, w: pc.where(x > 0, w, w * 2.0) + pc.maximum(x, w) + pc.minimum(w, 0.3) + w.gelu(),
    ),
    "shapes": (
        {"w": (2, 6)},
        lambda x, w: (
            pc.concat([w.reshape(3, 4).T, w.transpose().reshape(4, 3)[:, :2]], 1)[1:] * 2.0
        ),
    ),
    "reductions": (
        {"w": (3, 4)},
        lambda x, w: (w * x).max(1) + w.min(1) + w.mean(1) * w.sum() + pc.sum(w, (0, 1)),
    ),
    "softmax": ({"w": (3, 4)}, lambda x, w: (x * w).softmax(0) * (w - x).log_softmax(1)),
    "layer norm": (
        {"w": (3, 4), "g": (4,), "b": (4,)},
        lambda x, w, g, b: pc.layer_norm(x + w, g, b).tanh(),
    ),
    "attention": ({"wq": (4, 4), "wk": (4, 4), "wv": (4, 4)}, attention),
    "layout": (
        {"w": (4, 4)},
        lambda x, w: (
            (x @ w).redistribute(sbp="S(0)").redistribute(OTHER).exp().redistribute(MESH) @ w
        ),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_finite_differences(name):
    shapes, function = MODELS[name]
    # Squares make the gradient that arrives at the model's output uneven.
    check_gradients(Net(shapes, function), X, lambda y: (y * y + y).sum())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_of_cross_entropy(reduction):
    model = Net({"weight": (5, 4)}, pc.linear)
    check_gradients(
        model,
        X,
        lambda y: pc.cross_entropy(y, pc.constant(LABELS, "int64", MESH), reduction),
    )


def test_gradients_of_an_embedding():
    ids = np.array([[0, 2, 2], [1, 0, 2]])
    model = Net({"w": (4, 3)}, lambda x, w: pc.embedding(w, x).tanh())
    check_gradients(model, ids, lambda y: (y * y).mean())


def test_gradients_of_a_transformer_block():
    block = pc.nn.TransformerBlock(4, heads=2, hidden=6, dtype="float64", std=0.5)
    check_gradients(
        block, np.random.default_rng(1).normal(size=(2, 3, 4)), lambda y: (y * y).mean()
    )


def test_gradients_with_dropout_use_the_forward_mask():
    class Dropped(pc.nn.Module):
        def __init__(self):
            self.w = pc.nn.Parameter((3, 4), "float64", "ones")
            self.drop = pc.nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.w.value * x)

    with pc.job("j") as job:
        model = Dropped()
        y = model(pc.input("x", X.shape, "float64", MESH))
        pc.output("y", y)
        pc.output("grad", pc.gradients(y.sum(), [model.w.value])[0])
    outputs = DenseRun(job).step(x=X)
    np.testing.assert_array_equal(outputs["y"], outputs["grad"])
    assert 0 < (outputs["y"] == 0).sum() < 12


def test_what_does_not_influence_the_loss_has_no_gradient():
    with pc.job("j") as job:
        x = pc.input("x", (2,), "float32", MESH)
        w, other = (pc.nn.Parameter((2,), name=name).place(MESH).value for name in ("w", "other"))
        loss = (x * w).sum()
        grads = pc.gradients(loss, [w, other, other.argmax(0).cast("float32"), loss])
        assert grads[1] is None
        assert grads[2] is None
        assert grads[3].shape == ()
        pc.output("g", grads[0] + other)
    assert DenseRun(job).step(x=np.array([3.0, 4.0], np.float32))["g"].tolist() == [3.0, 4.0]


def test_gradients_do_not_flow_through_integers():
    with pc.job("j") as job:
        w = pc.nn.Parameter((2,), init="ones", name="w").place(MESH).value
        counted = (w > 0.5).cast("float32") + w.argmax(0).cast("float32")
        pc.output("g", pc.gradients((counted * w).sum(), [w])[0])
    assert DenseRun(job).step()["g"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.argmax(0)])
def test_a_loss_is_a_floating_scalar(make):
    def body():
        x = pc.input("x", (2,), "float32", MESH)
        pc.gradients(make(x), [x])

    raised(GradientError, body, "floating scalar")


def differentiate_exp():
    x = pc.input("x", (), "float32", MESH)
    pc.gradients(x.exp(), [x])


def test_ops_without_gradient_on_the_way_are_named(monkeypatch):
    plain = op_def("exp")
    blocked = OpDef("exp", plain.infer, plain.rule, plain.kernel)
    monkeypatch.setitem(pc.gradients.__globals__, "op_def", {"exp": blocked}.__getitem__)
    report = raised(GradientError, differentiate_exp, "exp has no gradient")
    assert report.op == "exp_0"
    assert "test_autodiff.py" in report.source


@pytest.mark.parametrize("wrong", [lambda dy: (dy, dy), lambda dy: (dy.reshape(1),)])
def test_gradients_that_do_not_fit_are_refused(monkeypatch, wrong):
    plain = op_def("exp")
    broken = OpDef(
        "exp",
        plain.infer,
        plain.rule,
        plain.kernel,
        lambda attrs, inputs, outputs, grads: wrong(grads[0]),
    )
    monkeypatch.setitem(pc.gradients.__globals__, "op_def", {"exp": broken}.__getitem__)
    raised(GradientError, differentiate_exp, "gradient of exp")
