"""The functions of `plancompiler.frontend.functions` against NumPy, and on real ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.errors import (
    AttributeValueError,
    DTypeError,
    ShapeError,
    TracingError,
    UsageError,
)
from plancompiler.executor.local_run import LocalWorld
from plancompiler.frontend import functions
from plancompiler.lower.compile import compile_plans
from tests.dense import run_dense

MESH = pc.Placement("cpu", [0, 1])
RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(3, 4))
Y = RANDOM.normal(size=(3, 4))
UNIT = RANDOM.uniform(0.1, 0.9, size=(3, 4))
WHOLE = RANDOM.integers(1, 50, (3, 4))
OTHER = RANDOM.integers(1, 5, (3, 4))
TRUTH = X > 0


def traced(function, *arrays, placement=MESH, sbp=None):
    with pc.job("j", seed=4) as job:
        values = [
            pc.input(f"x{n}", array.shape, str(array.dtype), placement, sbp)
            for n, array in enumerate(arrays)
        ]
        actual = function(*values)
        for n, value in enumerate(actual if isinstance(actual, tuple) else (actual,)):
            pc.output(f"y{n}", value, finite=False)
    return job, {f"x{n}": array for n, array in enumerate(arrays)}


def computed(function, *arrays):
    job, feeds = traced(function, *arrays)
    computed = list(run_dense(job, 1, feeds)[0].values())
    return computed[0] if len(computed) == 1 else computed


ON_NUMBERS = ("sin", "cos", "tan", "sinh", "cosh", "exp2", "expm1", "reciprocal", "sign")
ON_NUMBERS += ("floor", "ceil", "trunc", "isnan", "isinf", "isfinite", "nan_to_num", "flip")
ON_NUMBERS += ("zeros_like", "ones_like", "prod", "count_nonzero", "var", "std", "tril", "triu")
ON_UNIT = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh"}
ON_UNIT |= {"atanh": "arctanh", "log2": "log2", "log10": "log10", "log1p": "log1p"}


@pytest.mark.parametrize("name", ON_NUMBERS)
def test_functions_of_one_tensor(name):
    np.testing.assert_allclose(computed(getattr(pc, name), X), getattr(np, name)(X), 1e-12)


@pytest.mark.parametrize("name", ON_UNIT)
def test_functions_of_small_numbers(name):
    np.testing.assert_allclose(
        computed(getattr(pc, name), UNIT), getattr(np, ON_UNIT[name])(UNIT), 1e-12
    )


@pytest.mark.parametrize(
    ("name", "numpy", "x", "y"),
    [
        ("atan2", np.arctan2, X, Y),
        ("hypot", np.hypot, X, Y),
        ("logaddexp", np.logaddexp, X, Y),
        ("copysign", np.copysign, X, Y),
        ("fmod", np.fmod, X, UNIT),
        ("remainder", np.remainder, WHOLE, OTHER),
        ("floor_divide", np.floor_divide, WHOLE, OTHER),
        ("bitwise_and", np.bitwise_and, WHOLE, OTHER),
        ("bitwise_or", np.bitwise_or, WHOLE, OTHER),
        ("bitwise_xor", np.bitwise_xor, WHOLE, OTHER),
        ("shift_left", np.left_shift, WHOLE, OTHER),
        ("shift_right", np.right_shift, WHOLE, OTHER),
        ("logical_and", np.logical_and, TRUTH, WHOLE > 25),
        ("logical_or", np.logical_or, TRUTH, WHOLE > 25),
        ("logical_xor", np.logical_xor, TRUTH, WHOLE > 25),
    ],
)
def test_functions_of_two_tensors_or_a_number(name, numpy, x, y):
    function = getattr(pc, name)
    np.testing.assert_allclose(computed(function, x, y), numpy(x, y), 1e-12)
    number = y.flat[0].item()
    np.testing.assert_allclose(
        computed(lambda a: function(a, number), x), numpy(x, y.flat[0]), 1e-12
    )
    number = x.flat[0].item()
    np.testing.assert_allclose(
        computed(lambda b: function(number, b), y), numpy(x.flat[0], y), 1e-12
    )


@pytest.mark.parametrize(
    ("function", "arrays", "expected"),
    [
        (lambda x: pc.acosh(x + 2.0), [UNIT], np.arccosh(UNIT + 2)),
        (pc.erf, [X], np.vectorize(math.erf)(X)),
        (pc.round, [X * 5], np.rint(X * 5)),
        (pc.bitwise_not, [WHOLE], ~WHOLE),
        (pc.logical_not, [TRUTH], ~TRUTH),
        (lambda x: pc.clip(x, -0.5, 0.5), [X], X.clip(-0.5, 0.5)),
        (lambda x: pc.clip(x, high=0), [X], X.clip(None, 0)),
        (pc.relu6, [X * 9], (X * 9).clip(0, 6)),
        (pc.hardtanh, [X], X.clip(-1, 1)),
        (lambda x, y: pc.lerp(x, y, 0.25), [X, Y], X + 0.25 * (Y - X)),
        (lambda x, m: pc.masked_fill(x, m, 7), [X, TRUTH], np.where(TRUTH, 7, X)),
        (lambda x: pc.all(x, 0), [TRUTH], TRUTH.all(0)),
        (pc.any, [TRUTH], TRUTH.any()),
        (lambda x: pc.logsumexp(x, -1), [X], np.log(np.exp(X).sum(-1))),
        (lambda x: pc.var(x, 1, correction=1), [X], X.var(1, ddof=1)),
        (pc.norm, [X], np.linalg.norm(X)),
        (lambda x: pc.norm(x, 1, 0), [X], np.linalg.norm(X, 1, 0)),
        (lambda x: pc.norm(x, 3, -1, True), [X], np.linalg.norm(X, 3, -1, True)),
        (lambda x: pc.norm(x, math.inf), [X], np.abs(X).max()),
        (pc.argmin, [X], X.argmin()),
        (lambda x: pc.argmax(x, keepdims=True), [X], X.argmax(keepdims=True)),
        (pc.cumsum, [X], X.cumsum()),
        (lambda x: pc.roll(x, 2), [X], np.roll(X, 2)),
        (lambda x: pc.cumsum(x, 0), [X], X.cumsum(0)),
        (lambda x: pc.cumsum(x, -1, reverse=True), [X], X[:, ::-1].cumsum(1)[:, ::-1]),
        (pc.cumprod, [X], X.cumprod()),
        (lambda x: pc.cummax(x)[0], [X], np.maximum.accumulate(X, -1)),
        (lambda x: pc.cummin(x, 0)[0], [X], np.minimum.accumulate(X, 0)),
        (lambda x: pc.sort(x, 0)[0], [X], np.sort(X, 0)),
        (lambda x: pc.argsort(x, descending=True), [X], np.argsort(-X)),
        (lambda x: pc.topk(x, 2, largest=False)[1], [X], np.argsort(X)[:, :2]),
        (lambda x: pc.permute(x, (-1, 0)), [X], X.T),
        (lambda x: pc.squeeze(pc.unsqueeze(x, (0, -1))), [X], X),
        (lambda x: pc.squeeze(pc.unsqueeze(x, 1), 1), [X], X),
        (pc.flatten, [X], X.reshape(-1)),
        (lambda x: pc.flatten(pc.unsqueeze(x, 0), 0, 1), [X], X),
        (lambda x: pc.expand(x, (2, -1, 4)), [X], np.broadcast_to(X, (2, 3, 4))),
        (lambda x, y: pc.stack([x, y], -1), [X, Y], np.stack([X, Y], -1)),
        (lambda x: pc.concat(pc.split(x, (1, 0, 3), 1)[::-1], 1), [X], np.roll(X, -1, 1)),
        (lambda x: pc.split(x, 3, -1)[1], [X], X[:, 3:]),
        (lambda x: pc.chunk(x, 3, 1)[0], [X], X[:, :2]),
        (lambda x: pc.unbind(x, 1)[2], [X], X[:, 2]),
        (lambda x: pc.strided_slice(x, (0, 1), (3, 4), (2, 2)), [X], X[::2, 1::2]),
        (lambda x: pc.roll(x, 1, -1), [X], np.roll(X, 1, -1)),
        (lambda x: pc.tile(x, (2,)), [X], np.tile(X, 2)),
        (lambda x: pc.tile(x, (2, 1, 1)), [X], np.tile(X, (2, 1, 1))),
        (lambda x: pc.repeat_interleave(x, 2, 0), [X], X.repeat(2, 0)),
        (lambda x: pc.pad(x, (1, 0), (0, 2)), [X], np.pad(X, ((1, 0), (0, 2)))),
        (lambda x: pc.pad(x, (1,), (0,), 1), [TRUTH[0]], np.concatenate([[True], TRUTH[0]])),
        (lambda x: pc.diagonal(x, 1), [X], np.diagonal(X, 1)),
        (lambda x: pc.diag(pc.diag(x, -1)), [X], np.diag(np.diag(X, -1))),
        (pc.trace, [X], np.trace(X)),
        (lambda x, i: pc.gather(x, 1, i), [X, OTHER - 1], np.take_along_axis(X, OTHER - 1, 1)),
        (lambda x, i: pc.index_select(x, i, 1), [X, OTHER[0] - 1], X[:, OTHER[0] - 1]),
        (lambda i: pc.one_hot(i, 5), [OTHER], np.eye(5)[OTHER]),
        (lambda i: pc.bincount(i, 5), [OTHER], np.bincount(OTHER.reshape(-1), minlength=5)),
        (lambda x, y: pc.einsum("ij,kj", x, y), [X, Y], X @ Y.T),
        (lambda x, y: pc.einsum("...i,...i->...", x, y), [X, Y], (X * Y).sum(-1)),
        (pc.bmm, [X[None], Y.T[None]], (X @ Y.T)[None]),
        (pc.dot, [X[0], Y[0]], X[0] @ Y[0]),
        (pc.inner, [X, Y], np.inner(X, Y)),
        (pc.outer, [X[0], Y[1]], np.outer(X[0], Y[1])),
        (pc.tensordot, [X, Y], np.tensordot(X, Y)),
        (
            lambda x, y: pc.tensordot(x, y, ((0,), (-2,))),
            [X, Y],
            np.tensordot(X, Y, ((0,), (0,))),
        ),
    ],
)
def test_functions_against_numpy(function, arrays, expected):
    actual = computed(function, *arrays)
    assert np.shape(actual) == np.shape(expected)
    np.testing.assert_allclose(actual, expected, 1e-12)


def test_scatter_and_its_kin():
    indices = np.array([[0, 2], [1, 1], [3, 0]])
    updates = np.ones((3, 2))
    expected = X.copy()
    np.put_along_axis(expected, indices, 1.0, 1)
    np.testing.assert_array_equal(
        computed(lambda x, i, u: pc.scatter(x, 1, i, u), X, indices, updates), expected
    )
    expected = X.copy()
    np.add.at(expected, (np.arange(3)[:, None], indices), 1.0)
    np.testing.assert_allclose(
        computed(lambda x, i, u: pc.scatter_add(x, 1, i, u), X, indices, updates), expected
    )
    np.testing.assert_allclose(
        computed(lambda x, i, u: pc.index_add(x, i, u, 0), X, np.array([2, 2]), X[:2]),
        X + np.stack([0 * X[0], 0 * X[0], X[0] + X[1]]),
    )


def test_a_norm_that_is_zero_has_a_gradient_of_zeros():
    def slope(x):
        (grad,) = pc.gradients(pc.norm(x, axis=1).sum(), [x])
        return pc.norm(x, axis=1), grad

    x = np.array([[0.0, 0.0], [3.0, 4.0]])
    actual, grad = computed(slope, x)
    np.testing.assert_array_equal(actual, [0, 5])
    np.testing.assert_allclose(grad, [[0, 0], [0.6, 0.8]])


def test_sequences_and_the_identity():
    cases = [
        (lambda: pc.arange(2, 9, 3, placement=MESH), np.arange(2, 9, 3)),
        (lambda: pc.arange(5, 0, -2, placement=MESH), np.arange(5, 0, -2)),
        (lambda: pc.arange(5, 0, placement=MESH), np.arange(5, 0)),
        (
            lambda: pc.arange(0, 1, 0.3, dtype="float64", placement=MESH),
            np.arange(0, 1, 0.3),
        ),
        (lambda: pc.linspace(0, 1, 5, placement=MESH), np.linspace(0, 1, 5)),
        (lambda: pc.eye(3, placement=MESH), np.eye(3)),
        (lambda: pc.eye(3, 4, 1, placement=MESH, sbp="S(1)"), np.eye(3, 4, 1)),
    ]
    for function, expected in cases:
        np.testing.assert_allclose(computed(function), expected, 1e-12)


def drawn(placement, sbp):
    at = {"placement": placement, "sbp": sbp}
    return (
        pc.uniform((5, 3), -1, 1, **at),
        pc.normal((5, 3), 2.0, 0.5, **at),
        pc.bernoulli((5, 3), 0.3, **at),
        pc.randint((5, 3), 0, 100, **at),
        pc.permutation(5, **at),
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_values_do_not_depend_on_the_layout(ranks):
    expected_job, _ = traced(lambda: drawn(pc.Placement("cpu", [0]), None))
    expected = run_dense(expected_job, 3)
    job, _ = traced(lambda: drawn(pc.Placement("cpu", range(ranks)), "S(0)"))
    plans = compile_plans(job, ranks, "rank_per_iter").plans
    with LocalWorld(plans) as world:
        for actual, wanted in zip(world.run(3), expected, strict=True):
            for name in wanted:
                np.testing.assert_array_equal(actual[name], wanted[name])
    assert (expected[0]["y0"] != expected[1]["y0"]).all()


ROWS = np.linspace(-3, 4, 12).reshape(4, 3)
CUBE = np.random.default_rng(4).normal(size=(3, 3, 3))
EDGES = np.array([-1.0, 0.5, 2.0])
SPELLINGS = {
    "decimals": (lambda x, cube: pc.round(x, 1), lambda: np.round(ROWS, 1)),
    "tens": (lambda x, cube: pc.round(x * 100, decimals=-1), lambda: np.round(ROWS * 100, -1)),
    "Python's round": (lambda x, cube: round(x, 2), lambda: np.round(ROWS, 2)),
    "tens of whole numbers": (
        lambda x, cube: pc.round((x * 100).cast("int64"), -2),
        lambda: np.round((ROWS * 100).astype(np.int64), -2),
    ),
    "places of a mask": (lambda x, cube: pc.where(x > 0)[1], lambda: np.where(ROWS > 0)[1]),
    "numbers by a mask": (
        lambda x, cube: pc.where(x > 0, 1.5, 0),
        lambda: np.where(ROWS > 0, 1.5, 0),
    ),
    "whole numbers by a mask": (
        lambda x, cube: pc.where(x > 0, 2, 7),
        lambda: np.where(ROWS > 0, 2, 7),
    ),
    "a number's place": (
        lambda x, cube: pc.searchsorted(pc.sort(x[:, 0])[0], 0.3),
        lambda: np.searchsorted(ROWS[:, 0], 0.3),
    ),
    "a diagonal": (lambda x, cube: pc.einsum("iij->ij", cube), lambda: np.einsum("iij->ij", CUBE)),
    "three equal letters": (lambda x, cube: pc.einsum("iii", cube), lambda: np.einsum("iii", CUBE)),
    "a diagonal times": (
        lambda x, cube: pc.einsum("iji,kj->k", cube, x),
        lambda: np.einsum("iji,kj->k", CUBE, ROWS),
    ),
    "a stretched axis": (
        lambda x, cube: pc.einsum("ij,ij->i", x, x[:1]),
        lambda: np.einsum("ij,ij->i", ROWS, ROWS[:1]),
    ),
    "leading axes that broadcast": (
        lambda x, cube: pc.einsum("...ij,...j->...i", cube, x[0]),
        lambda: np.einsum("...ij,...j->...i", CUBE, ROWS[0]),
    ),
    "a stretched product": (
        lambda x, cube: pc.tensordot(x[:, :1], x, 1),
        lambda: np.tensordot(ROWS[:, :1].repeat(4, 1), ROWS, 1),
    ),
    "diagonals in front": (
        lambda x, cube: pc.diag_embed(x, 1, 0, -1),
        lambda: np.moveaxis([np.diag(row, 1) for row in ROWS], (1, 2), (0, 2)),
    ),
    "a tolerance for each matrix": (
        lambda x, cube: pc.linalg.matrix_rank(cube, cube[:, 0, 0] * 0 + 1.5),
        lambda: (np.linalg.svd(CUBE, compute_uv=False) > 1.5).sum(-1),
    ),
    "the greater of two": (lambda x, cube: pc.max(x, -x), lambda: abs(ROWS)),
    "the lesser of two": (lambda x, cube: x.min(-x), lambda: -abs(ROWS)),
    "the order of a number": (
        lambda x, cube: pc.sort(x[0, 0], 0).values + pc.topk(x[0, 0], 1, 0).values,
        lambda: np.float64(2 * ROWS[0, 0]),
    ),
    "the place in a number": (
        lambda x, cube: pc.cummax(x[0, 0], -1).indices + pc.kthvalue(x[0, 0], 1, 0).indices,
        lambda: np.int64(0),
    ),
    "all rows twice": (lambda x, cube: pc.tile(x, 2), lambda: np.tile(ROWS, 2)),
}


@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B", "P"])
def test_calls_of_numpy_and_pytorch_that_need_no_other_spelling(sbp):
    pair = pc.Placement("cpu", [0, 1])

    def program():
        x, cube = pc.tensor(ROWS, pair, sbp), pc.tensor(CUBE, pair, sbp)
        return {name: ours(x, cube).numpy() for name, (ours, _) in SPELLINGS.items()}

    for made in spawn(program, 2):
        for name, (_, theirs) in SPELLINGS.items():
            np.testing.assert_allclose(made[name], theirs(), 1e-10, 1e-12, err_msg=name)


def test_defaults_of_what_is_filled():
    one = pc.Placement("cpu", [0])
    made = [pc.zeros((2, 3), placement=one), pc.ones(2, placement=one)]
    made += [pc.full((), value, placement=one) for value in (1.5, 2, True)]
    assert [str(each.dtype) for each in made] == [*["float32"] * 3, "int64", "bool"]
    with pytest.raises(UsageError, match=r"a placement is needed here\. Where: op 'zeros'"):
        pc.zeros((2, 3))
    with pytest.raises(UsageError, match="extents of a tensor are one argument here"):
        pc.zeros(2, 3, placement=one)
    labels = pc.tensor(np.array([2, 0]), one)
    assert pc.nn.functional.one_hot(labels).tolist() == [[0, 0, 1], [1, 0, 0]]


def many(x, w):
    """A job that uses ops of every family, with a gradient."""
    hidden = pc.silu(pc.einsum("bi,oi->bo", x, w))
    moved = pc.roll(pc.flip(pc.pad(hidden, (0, 1), (1, 0), 0.5), 0), 2, 1)
    top, places = pc.topk(moved, 2, axis=1)
    chosen = pc.take_along_axis(moved, places, 1)
    scattered = pc.put_along_axis(moved, places, top * 2.0, 1)
    loss = (
        pc.logsumexp(pc.tril(scattered), 1).sum()
        + pc.norm(chosen)
        + pc.var(pc.cumsum(moved, 0), (0, 1))
        + pc.prod(pc.strided_slice(moved, (0, 0), (5, 5), (2, 3)), 1).mean()
        + pc.norm(moved, math.inf)
        + pc.where(pc.any(moved > 0.4, 0), pc.std(moved, 0), 0.1).sum()
    )
    (dw,) = pc.gradients(loss, [w])
    return loss, dw, places, pc.all(pc.isfinite(moved))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "sbp"),
    [
        (pc.Placement("cpu", [0, 1]), "S(0)"),
        (pc.Placement("cpu", [0, 1, 2]), "S(1)"),
        (pc.Placement("cpu", [[0, 1], [2, 3]]), ["S(0)", "S(1)"]),
        (pc.Placement("cpu", [0, 1]), "B"),
    ],
)
@pytest.mark.parametrize("inside", [None, "P"])
def test_functions_on_ranks_give_the_dense_result(placement, sbp, inside):
    def moved(x, w):
        if inside is not None:
            x = x.redistribute(sbp=[inside] * placement.ndim)
        return many(x, w)

    x, w = RANDOM.normal(size=(4, 3)), RANDOM.normal(size=(4, 3))
    job, feeds = traced(moved, x, w, placement=placement, sbp=sbp)
    (expected,) = run_dense(job, 1, feeds)
    with pc.run(job, backend="threads") as session:
        outputs = session.step(**feeds)
    for name, wanted in expected.items():
        np.testing.assert_allclose(outputs[name], wanted, 1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda x: pc.hypot(x, "one"), TracingError),
        (lambda x: pc.hypot(1.0, 2.0), TracingError),
        (lambda x: pc.bitwise_and(x, 1), DTypeError),
        (pc.clip, AttributeValueError),
        (lambda x: pc.topk(x, 9), AttributeValueError),
        (lambda x: pc.squeeze(x, 0), AttributeValueError),
        (lambda x: pc.flatten(x, 1, 0), AttributeValueError),
        (lambda x: pc.expand(x, (-1, 3, 4)), AttributeValueError),
        (lambda x: pc.stack([]), UsageError),
        (lambda x: pc.split(x, (1, 1)), AttributeValueError),
        (lambda x: pc.split(x, 0), AttributeValueError),
        (lambda x: pc.chunk(x, 0), AttributeValueError),
        (lambda x: pc.einsum("ij,jk->ik", x, x), ShapeError),
        (lambda x: pc.einsum("...i,...ij->j", x, x), ShapeError),
        (lambda x: pc.einsum("ii->i", x), ShapeError),
        (lambda x: pc.einsum("ij->i"), ShapeError),
        (lambda x: pc.bmm(x, x), ShapeError),
        (lambda x: pc.tensordot(x, x, ((0,), (0, 1))), AttributeValueError),
        (lambda x: pc.arange(0, 5, 0, placement=MESH), AttributeValueError),
        (lambda x: pc.randint((2,), 3, 3, placement=MESH), AttributeValueError),
    ],
)
def test_wrong_calls_say_so(function, error):
    with pytest.raises(error):
        traced(function, X)


def test_every_function_is_public():
    for name in functions.__all__:
        assert getattr(pc, name) is getattr(functions, name)
        assert name in pc.__all__


# --- results with names ---------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda function: function, pc.compile], ids=["eager", "compiled"])
def test_results_of_several_tensors_have_names(wrap):
    x = pc.tensor(np.array([[3.0, 1.0], [1.0, 2.0]]), pc.Placement("cpu", [0]))
    for function in (
        *(pc.sort, pc.cummax, pc.cummin, pc.mode, pc.max_with_index, pc.min_with_index),
        *(lambda x: x.topk(1), lambda x: pc.kthvalue(x, 2)),
    ):
        made, expected = wrap(function)(x), function(x)
        np.testing.assert_array_equal(made.values.numpy(), expected[0].numpy())
        np.testing.assert_array_equal(made.indices.numpy(), expected[1].numpy())
        scaled = wrap(lambda pair: pair._replace(values=pair.values * 2.0))
        for factor in (1.0, 3.0):  # the second one is not compiled anew with the first one's value
            pair = expected._replace(values=expected.values * factor)
            doubled = scaled(pair).values
            np.testing.assert_array_equal(doubled.numpy(), 2.0 * pair.values.numpy())
    solved = wrap(pc.linalg.eigh)(x)
    product = solved.eigenvectors * solved.eigenvalues @ solved.eigenvectors.T
    np.testing.assert_allclose(product.numpy(), x.numpy())
    assert wrap(pc.linalg.qr)(x)._fields == ("Q", "R")
    assert wrap(pc.linalg.svd)(x)._fields == ("U", "S", "Vh")
    assert wrap(pc.linalg.slogdet)(x)._fields == ("sign", "logabsdet")


@pytest.mark.parametrize("function", [pc.cartesian_prod, pc.block_diag])
def test_tensors_are_given_one_by_one_or_in_a_list(function):
    x, y = (pc.tensor(np.arange(n), pc.Placement("cpu", [0])) for n in (2, 3))
    np.testing.assert_array_equal(function(x, y).numpy(), function([x, y]).numpy())


# --- norms over nothing and over one element ------------------------------------------------------


@pytest.mark.parametrize("sbp", ["B", "S(0)"])
@pytest.mark.parametrize(
    ("function", "shape", "scales"),
    [
        (pc.layer_norm, (3, 0), 0),
        (pc.layer_norm, (0, 2), 2),
        (lambda x, gamma, beta: pc.rms_norm(x, gamma) + beta, (3, 0), 0),
        (lambda x, gamma, beta: pc.group_norm(x, 2, gamma, beta), (3, 4, 0), 4),
        (pc.instance_norm, (3, 4, 0, 2), 4),
    ],
)
def test_a_norm_of_no_elements_has_none(function, shape, scales, sbp):
    def rank():
        pair = pc.Placement("cpu", [0, 1])
        x = pc.tensor(np.ones(shape), pair, sbp, requires_grad=True)
        gamma, beta = (pc.tensor(np.ones(scales), pair, requires_grad=True) for _ in range(2))
        y = function(x, gamma, beta)
        y.sum().backward()
        return [each.numpy() for each in (y, x.grad, gamma.grad, beta.grad)]

    for y, dx, dgamma, dbeta in spawn(rank, 2):
        assert y.shape == dx.shape == shape
        assert y.dtype == np.float64
        np.testing.assert_array_equal(dgamma, np.zeros(scales))
        np.testing.assert_array_equal(dbeta, np.zeros(scales))


def test_a_norm_over_one_element_has_a_gradient_of_exactly_zero():
    alone = pc.Placement("cpu", [0])
    x = pc.tensor(np.array([[-4.3228], [8.4784]], np.float32), alone, requires_grad=True)
    gamma, beta = (
        pc.tensor(np.array([number], np.float32), alone, requires_grad=True)
        for number in (-8.4784, -1.7658)
    )
    (pc.layer_norm(x, gamma, beta) * 0.8666).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.zeros((2, 1)))
    np.testing.assert_array_equal(gamma.grad.numpy(), [0.0])
