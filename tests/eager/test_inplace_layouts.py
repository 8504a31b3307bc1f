"""Changes in place whose values come in another layout than the tensor that takes them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn

LEFT = np.arange(1.0, 21.0).reshape(5, 4)
RIGHT = LEFT[::-1] * 0.5
LAYOUTS = ("S(0)", "S(1)", "B", "P")

CHANGES = {
    "+=": (lambda x, y: x.__iadd__(y), LEFT + RIGHT),
    "+= number": (lambda x, y: x.__iadd__(2.0), LEFT + 2.0),
    "*=": (lambda x, y: x.__imul__(y), LEFT * RIGHT),
    "-= row": (lambda x, y: x.__isub__(y[0]), LEFT - RIGHT[0]),
    "relu_": (lambda x, y: (x.__isub__(y), x.relu_()), np.maximum(LEFT - RIGHT, 0.0)),
    "matmul_": (lambda x, y: x.copy_(y @ (y.T @ x)), RIGHT @ (RIGHT.T @ LEFT)),
    "out": (lambda x, y: pc.maximum(x, y, out=x), np.maximum(LEFT, RIGHT)),
    "out of a sum": (
        lambda x, y: pc.cumsum(y, 0, out=x),
        np.cumsum(RIGHT, 0),
    ),
    "several outs": (
        lambda x, y: pc.sort(y, 0, out=(x, None)),
        np.sort(RIGHT, 0),
    ),
    "into": (lambda x, y: pc.eager.into(x, pc.mul, y, y), RIGHT * RIGHT),
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("wrap", [lambda function: function, pc.compile], ids=["eager", "compiled"])
def test_a_tensor_keeps_its_layout_whatever_the_value_comes_in(ranks, wrap):
    mesh = pc.Placement("cpu", list(range(ranks)))
    compiled = wrap is pc.compile
    pairs = [("S(0)", "B"), ("B", "S(1)"), ("P", "S(0)")] if compiled else product(LAYOUTS, LAYOUTS)
    pairs = list(pairs)

    def rank():
        for name, (change, expected) in CHANGES.items():
            run = wrap(change)
            for left, right in pairs:
                x, y = pc.tensor(LEFT, mesh, left), pc.tensor(RIGHT, mesh, right)
                before = x
                run(x, y)
                assert x is before
                assert str(x.sbp) == f"[{left}]", (name, left, right)
                np.testing.assert_allclose(x.numpy(), expected, err_msg=f"{name} {left} {right}")
                np.testing.assert_array_equal(y.numpy(), RIGHT)
            if compiled:
                run.close()

    spawn(rank, ranks)


@pytest.mark.parametrize("wrap", [lambda function: function, pc.compile], ids=["eager", "compiled"])
def test_gradients_go_through_the_change_of_layout(wrap):
    mesh = pc.Placement("cpu", [0, 1])

    def function(w, y):
        x = w * 2.0
        x += y  # split otherwise
        z = pc.tensor(np.ones((5, 4)), mesh, "P")
        pc.mul(x, y, out=z)
        (z * x).sum().backward()

    def rank():
        w = pc.tensor(LEFT, mesh, "B", requires_grad=True)
        y = pc.tensor(RIGHT, mesh, "S(1)", requires_grad=True)
        wrap(function)(w, y)
        return w.grad.numpy(), y.grad.numpy()

    x = LEFT * 2.0 + RIGHT  # the loss is the sum of x * x * y
    for of_w, of_y in spawn(rank, 2):
        np.testing.assert_allclose(of_w, 4.0 * x * RIGHT)
        np.testing.assert_allclose(of_y, 2.0 * x * RIGHT + x * x)
