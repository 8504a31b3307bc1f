"""Gradient functions against central differences in float64, on every sample that has one."""

from __future__ import annotations

import numpy as np
import pytest

from plancompiler.errors import GradientError
from plancompiler.ops import op_table
from tests.ops.dense import SEED, STEP, DenseTensor, gradients_of
from tests.ops.samples import samples
from tests.ops.sharding import run_dense

STEP_SIZE = 1e-6
POOLING = {f"max_pool{ndim}d_{what}" for ndim in (1, 2, 3) for what in ("grad", "pick")}
"""Kinds that compare two of their inputs, which so cannot be moved; see the test of their own."""


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    return [
        sample
        for sample in samples(tmp_path_factory.mktemp("data"))
        if sample.inputs and sample.differentiable and op_table()[sample.kind].gradient is not None
    ]


def differences(sample, position, weights):
    """d sum(weight * output) / d input over all outputs with a weight, element by element."""
    inputs = [array.copy() for array in sample.inputs]
    differences = np.empty_like(inputs[position])
    for index in np.ndindex(*differences.shape):
        values = []
        before = inputs[position][index]
        for moved in (before + STEP_SIZE, before - STEP_SIZE):
            inputs[position][index] = moved
            made = run_dense(sample.kind, inputs, sample.attrs, seed=SEED, step=STEP)
            pairs = zip(weights, made, strict=True)
            values.append(sum(float(np.sum(w * y)) for w, y in pairs if w is not None))
        inputs[position][index] = before
        differences[index] = (values[0] - values[1]) / (2 * STEP_SIZE)
    return differences


def compare(sample, weights):
    """The op's gradient function against differences."""
    grads = gradients_of(sample.kind, sample.inputs, sample.attrs, weights)
    for position, (array, grad) in enumerate(zip(sample.inputs, grads, strict=True)):
        label = f"{sample}: input {position}"
        if array.dtype.kind != "f":
            assert grad is None, f"{label} cannot have a gradient"
            continue
        expected = differences(sample, position, weights)
        if grad is None:
            np.testing.assert_array_equal(expected, 0, label)
            continue
        assert grad.shape == array.shape, label
        assert grad.dtype == array.dtype, label
        np.testing.assert_allclose(grad, expected, 1e-6, 1e-7, err_msg=label)


@pytest.mark.slow
def test_gradients_match_finite_differences(calls):
    rng = np.random.default_rng(3)
    checked = set()
    for sample in calls:
        outputs = run_dense(sample.kind, sample.inputs, sample.attrs, seed=SEED, step=STEP)
        if not outputs:
            continue
        floats = [slot for slot, output in enumerate(outputs) if output.dtype.kind == "f"]
        # The first output alone is the usual case; the others' gradients come by second derivatives
        for slots in dict.fromkeys(((0,), tuple(floats))):
            weights = [
                rng.normal(size=output.shape) if slot in slots else None
                for slot, output in enumerate(outputs)
            ]
            compare(sample, weights)
        checked.add(sample.kind)
    # Gradients exist for these, but not along a float64 path that differences could walk.
    assert {
        kind
        for kind, definition in op_table().items()
        if definition.gradient is not None and kind not in checked
    } == {"logical_not", "stop_gradient", *POOLING}


def test_ties_of_max_share_the_gradient():
    x = np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
    (grad,) = gradients_of("max", [x], {"axes": (1,)}, [np.array([6.0, 6.0])])
    np.testing.assert_array_equal(grad, [[0, 3, 3], [2, 2, 2]])


@pytest.mark.parametrize("kind", ["maximum", "minimum"])
def test_ties_of_maximum_share_the_gradient(kind):
    x = np.array([2.0])
    first, second = gradients_of(kind, [x, x.copy()], {}, [np.array([1.0])])
    assert (first.item(), second.item()) == (0.5, 0.5)


def test_gradient_of_a_linear_layer_contracts_all_leading_axes_at_once():
    """One product, not one per batch entry and a sum."""
    kinds = []

    class Recorded(DenseTensor):
        __slots__ = ()

        def _apply(self, kind, inputs, attrs):
            kinds.append(kind)
            return tuple(Recorded(one.array) for one in super()._apply(kind, inputs, attrs))

    rng = np.random.default_rng(0)
    a, b, dc = (Recorded(rng.normal(size=shape)) for shape in ((2, 5, 3), (3, 4), (2, 5, 4)))
    _, db = op_table()["matmul"].gradients({}, (a, b), (), (dc,))
    assert kinds == ["matmul", "contract_leading"]
    np.testing.assert_allclose(db.array, np.einsum("bij,bik->jk", a.array, dc.array))


def test_indices_have_no_gradient():
    with pytest.raises(GradientError, match="side result"):
        gradients_of("cummax", [np.ones(3)], {"axis": 0}, [None, np.ones(3)])


def test_gradients_of_pooling_and_of_its_winners_are_each_other():
    """Both are linear, one the transpose of the other; ties go to the first."""
    rng = np.random.default_rng(1)
    x = rng.integers(0, 4, (3, 5, 6)).astype(float)
    attrs = {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 1, 0, 0)}
    (y,) = run_dense("max_pool2d", [x], attrs)
    values, dy = rng.normal(size=x.shape), rng.normal(size=y.shape)
    (picked,) = run_dense("max_pool2d_pick", [x, y, values], attrs)
    (dx,) = run_dense("max_pool2d_grad", [x, y, dy], attrs)
    np.testing.assert_array_equal(run_dense("max_pool2d_pick", [x, y, x], attrs)[0], y)
    np.testing.assert_allclose(np.sum(picked * dy), np.sum(values * dx))
    for kind, given, other in (("grad", dy, picked), ("pick", values, dx)):
        pull = values if kind == "grad" else dy
        grads = gradients_of(f"max_pool2d_{kind}", [x, y, given], attrs, [pull])
        assert grads[:2] == [None, None]
        np.testing.assert_array_equal(grads[2], other)


def test_gradients_keep_float32():
    x, y = np.ones((2, 3), np.float32), np.full(3, 2, np.float32)
    for kind in ("add", "mul", "div", "pow", "maximum"):
        for grad in gradients_of(kind, [x, y], {}, [np.ones((2, 3), np.float32)]):
            assert grad.dtype == np.float32, kind
