"""Every public function against NumPy, through the dense reference."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import ExecutionError, ShapeError
from tests.dense import run_dense
from tests.frontend.failing import raised

MESH = pc.Placement("cpu", [0, 1])
RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(3, 4))
Y = RANDOM.normal(size=(3, 4))


def computed(function, *arrays):
    with pc.job("j") as job:
        values = [
            pc.input(f"x{n}", array.shape, str(array.dtype), MESH) for n, array in enumerate(arrays)
        ]
        pc.output("y", function(*values), finite=False)
    return run_dense(job, 1, {f"x{n}": array for n, array in enumerate(arrays)})[0]["y"]


def softmax(x, axis=-1):
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


UNARY = {
    "neg": np.negative,
    "abs": np.abs,
    "exp": np.exp,
    "square": np.square,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "sum": np.sum,
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "argmax": np.argmax,
    "softmax": softmax,
    "log_softmax": lambda x: np.log(softmax(x)),
    "transpose": np.transpose,
}


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_tensor(name):
    np.testing.assert_allclose(computed(getattr(pc, name), X), UNARY[name](X), rtol=1e-12)


@pytest.mark.parametrize("name", ["log", "sqrt", "rsqrt"])
def test_functions_of_positive_numbers(name):
    expected = {"log": np.log, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x)}[name]
    positive = np.abs(X) + 0.5
    np.testing.assert_allclose(
        computed(getattr(pc, name), positive), expected(positive), rtol=1e-12
    )


BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
}


@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_tensors_or_a_number(name):
    function, expected = getattr(pc, name), BINARY[name]
    number = float(X[1, 1])
    np.testing.assert_allclose(computed(function, X, Y), expected(X, Y), rtol=1e-12)
    np.testing.assert_allclose(computed(function, X, Y[0]), expected(X, Y[0]), rtol=1e-12)
    for scalar in (number, np.float64(number)):
        right = computed(lambda x, scalar=scalar: function(x, scalar), X)
        left = computed(lambda x, scalar=scalar: function(scalar, x), X)
        np.testing.assert_allclose(right, expected(X, number), rtol=1e-12)
        np.testing.assert_allclose(left, expected(number, X), rtol=1e-12)


def test_powers():
    base = np.abs(X) + 0.5
    np.testing.assert_allclose(computed(pc.pow, base, Y), base**Y, rtol=1e-12)
    np.testing.assert_allclose(computed(lambda y: pc.pow(2.0, y), Y), 2.0**Y, rtol=1e-12)
    np.testing.assert_allclose(computed(lambda x: x**3, X), X**3, rtol=1e-12)
    np.testing.assert_allclose(computed(lambda x: 1 - 2 / x, X), 1 - 2 / X, rtol=1e-12)


def test_where_takes_numbers_for_one_side():
    np.testing.assert_array_equal(
        computed(lambda x: pc.where(x > 0, x, 7.0), X), np.where(X > 0, X, 7)
    )
    np.testing.assert_array_equal(
        computed(lambda x: pc.where(x > 0, 7.0, x), X), np.where(X > 0, 7, X)
    )


def test_shapes():
    np.testing.assert_array_equal(computed(lambda x: pc.reshape(x, (2, -1)), X), X.reshape(2, 6))
    np.testing.assert_array_equal(computed(lambda x: pc.transpose(x, (1, 0)), X), X.T)
    np.testing.assert_array_equal(
        computed(lambda x, y: pc.concat([x, y], axis=-1), X, Y), np.concatenate([X, Y], -1)
    )
    np.testing.assert_array_equal(computed(lambda x: pc.slice(x, (1, 0), (3, 2)), X), X[1:3, 0:2])
    np.testing.assert_array_equal(computed(lambda x: pc.cast(x, "int64"), X), X.astype(np.int64))
    np.testing.assert_array_equal(computed(lambda x: pc.full_like(x, 2.0), X), np.full((3, 4), 2.0))
    np.testing.assert_array_equal(computed(lambda x: pc.redistribute(x, sbp="S(1)"), X), X)


def test_matmul_and_linear():
    a, b = RANDOM.normal(size=(2, 3, 4)), RANDOM.normal(size=(2, 5, 4))
    np.testing.assert_allclose(
        computed(lambda a, b: pc.matmul(a, b, transpose_b=True), a, b), a @ b.swapaxes(1, 2)
    )
    np.testing.assert_allclose(
        computed(lambda a, b: pc.matmul(a, b, transpose_a=True), X, Y), X.T @ Y
    )
    np.testing.assert_allclose(
        computed(pc.linear, a, b[0], b[0, :, 0]), a @ b[0].T + b[0, :, 0], rtol=1e-12
    )


LOGITS = RANDOM.normal(size=(2, 3, 5))
LABELS = np.array([[0, 4, 2], [1, -100, -100]])
LOSSES = -np.log(softmax(LOGITS))[np.arange(2)[:, None], np.arange(3), np.maximum(LABELS, 0)]


def test_cross_entropy_leaves_out_ignored_positions():
    expected = np.where(LABELS == -100, 0, LOSSES)
    for reduction, value in (
        ("none", expected),
        ("sum", expected.sum()),
        ("mean", expected.sum() / 4),
    ):
        actual = computed(
            lambda x, y, reduction=reduction: pc.cross_entropy(x, y, reduction), LOGITS, LABELS
        )
        np.testing.assert_allclose(actual, value, rtol=1e-12)


def test_cross_entropy_of_nothing_is_zero():
    assert computed(pc.cross_entropy, LOGITS, np.full((2, 3), -100)) == 0.0


def test_cross_entropy_where_every_position_counts():
    labels = np.maximum(LABELS, 0)
    actual = computed(lambda x, y: pc.cross_entropy(x, y, ignore_index=None), LOGITS, labels)
    np.testing.assert_allclose(actual, LOSSES.mean(), rtol=1e-12)
    other = computed(lambda x, y: pc.cross_entropy(x, y, ignore_index=0), LOGITS, labels)
    np.testing.assert_allclose(other, LOSSES[labels > 0].mean(), rtol=1e-12)


def test_cross_entropy_refuses_other_labels():
    with pytest.raises(ExecutionError, match="no class"):
        computed(pc.cross_entropy, LOGITS, np.full((2, 3), 5))


def test_layer_norm():
    gamma, beta = RANDOM.normal(size=(2, 4))
    normal = (X - X.mean(1, keepdims=True)) / np.sqrt(X.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(
        computed(pc.layer_norm, X, gamma, beta), normal * gamma + beta, rtol=1e-10
    )


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_causal_attention_sees_nothing_later(dtype):
    q, k, v = RANDOM.normal(size=(3, 2, 5, 4)).astype(dtype)
    scores = (q.astype(float) @ k.astype(float).swapaxes(-1, -2)) / 2
    weights = softmax(np.where(np.tri(5, dtype=bool), scores, -np.inf))
    actual = computed(pc.causal_attention, q, k, v)
    tolerance = {"float16": 5e-3, "float32": 1e-5, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(actual, weights @ v.astype(float), rtol=tolerance, atol=tolerance)
    v[:, -1] = 1000
    changed = computed(pc.causal_attention, q, k, v)
    np.testing.assert_array_equal(changed[:, :-1], actual[:, :-1])


def test_causal_attention_needs_one_length():
    def body():
        x = pc.input("x", (2, 5, 4), "float32", MESH)
        pc.causal_attention(x[:, 1:], x, x)

    raised(ShapeError, body, "one length")


def test_accuracy_and_embedding():
    assert computed(pc.accuracy, np.eye(4), np.array([0, 1, 0, 3], np.uint8)) == 0.75
    ids = np.array([[2, 0], [1, 1]])
    np.testing.assert_array_equal(computed(pc.embedding, X, ids), X[ids])


def test_every_dropout_of_a_job_has_its_own_mask():
    with pc.job("j") as job:
        x = pc.input("x", (1000,), "float32", MESH)
        pc.output("a", pc.dropout(x, 0.25))
        pc.output("b", pc.dropout(x, 0.25))
        pc.output("as a", pc.dropout(x, 0.25, key=0))
    first, second = run_dense(job, 2, {"x": np.ones(1000, np.float32)})
    assert set(np.unique(first["a"])) == {np.float32(0), np.float32(1 / 0.75)}
    assert 200 < (first["a"] == 0).sum() < 300
    np.testing.assert_array_equal(first["a"], first["as a"])
    assert (first["a"] != first["b"]).any()
    assert (first["a"] != second["a"]).any()
