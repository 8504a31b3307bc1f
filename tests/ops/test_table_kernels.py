"""Kernels of the wider op table against formulas of their own, and where they are delicate."""

from __future__ import annotations

import math

import numpy as np
import pytest

from plancompiler.ops import axis_signatures, infer_types, order
from tests.ops.dense import gradients_of
from tests.ops.sharding import run_dense, type_of


def one(name, *inputs, **attrs):
    return run_dense(name, [np.asarray(array) for array in inputs], attrs)[0]


# --- elementwise ----------------------------------------------------------------------------------


def test_erf_is_accurate_to_a_few_units_in_the_last_place():
    x = np.concatenate([np.linspace(-7, 7, 5001), np.geomspace(1e-300, 1, 500), [0.0, -0.0]])
    expected = np.array([math.erf(value) for value in x])
    assert (np.abs(one("erf", x) - expected) <= 5 * np.spacing(np.abs(expected))).all()
    narrow = x.astype(np.float32)
    expected = np.array([math.erf(value) for value in narrow.tolist()], np.float32)
    assert (np.abs(one("erf", narrow) - expected) <= 7 * np.spacing(np.abs(expected))).all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_erf_bears_infinity_and_nan(dtype):
    x = np.array([np.inf, -np.inf, np.nan, 9, -9], dtype)
    np.testing.assert_array_equal(one("erf", x), [1, -1, np.nan, 1, -1])


FORMULAS = {
    "softplus": lambda x: math.log1p(math.exp(x)),
    "logsigmoid": lambda x: -math.log1p(math.exp(-x)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "mish": lambda x: x * math.tanh(math.log1p(math.exp(x))),
    "elu": lambda x: x if x > 0 else math.expm1(x),
    "selu": lambda x: 1.0507009873554805 * (x if x > 0 else 1.6732632423543772 * math.expm1(x)),
    "leaky_relu": lambda x: x if x > 0 else 0.01 * x,
    "hardsigmoid": lambda x: min(max(x + 3, 0), 6) / 6,
    "hardswish": lambda x: x * min(max(x + 3, 0), 6) / 6,
    "softsign": lambda x: x / (1 + abs(x)),
    "gelu_exact": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_activations_are_their_formulas(kind):
    x = np.linspace(-6, 6, 49)
    np.testing.assert_allclose(one(kind, x), [FORMULAS[kind](v) for v in x], 1e-12, 1e-14)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("softplus", [0, 1000]),
        ("logsigmoid", [-1000, 0]),
        ("silu", [0, 1000]),
        ("mish", [0, 1000]),
        ("elu", [-1, 1000]),
        ("gelu_exact", [0, 1000]),
    ],
)
def test_activations_and_their_gradients_bear_large_numbers(kind, expected):
    x = np.array([-1000.0, 1000.0])
    np.testing.assert_array_equal(one(kind, x), expected)
    slopes = one(f"{kind}_grad", x, np.ones(2))
    assert sorted(np.round(slopes, 12).tolist()) == [0, 1]


def test_logaddexp_and_logsumexp_bear_large_numbers():
    assert one("logaddexp", [1000.0], [1000.0]) == pytest.approx(1000 + math.log(2))
    x = np.array([[1000.0, 1000.0], [-np.inf, -np.inf], [np.inf, 0.0]])
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        actual = one("logsumexp", x, axes=(1,))
    np.testing.assert_allclose(actual, [1000 + math.log(2), -np.inf, np.inf])


def test_remainders_have_the_sign_they_promise():
    x, y = np.array([7, -7, 7, -7]), np.array([3, 3, -3, -3])
    np.testing.assert_array_equal(one("remainder", x, y), [1, 2, -2, -1])
    np.testing.assert_array_equal(one("fmod", x, y), [1, -1, 1, -1])
    np.testing.assert_array_equal(one("floor_divide", x, y), [2, -3, -3, 2])


def test_rounding_takes_the_even_of_two():
    np.testing.assert_array_equal(one("round", [0.5, 1.5, -2.5, 2.6]), [0, 2, -2, 3])


# --- reductions, scans, orders --------------------------------------------------------------------


def test_products_with_zeros_have_their_gradient():
    x = np.array([[2.0, 3.0, 4.0], [2.0, 0.0, 4.0], [0.0, 3.0, 0.0]])
    (grad,) = gradients_of("prod", [x], {"axes": (1,)}, [np.ones(3)])
    np.testing.assert_array_equal(grad, [[12, 8, 6], [0, 8, 0], [0, 0, 0]])


def test_what_has_no_slope_at_zero_has_a_gradient_of_zeros():
    (grad,) = gradients_of("std", [np.ones((2, 3))], {"axes": (1,)}, [np.ones(2)])
    np.testing.assert_array_equal(grad, np.zeros((2, 3)))
    for grad in gradients_of("hypot", [np.zeros(2), np.zeros(2)], {}, [np.ones(2)]):
        np.testing.assert_array_equal(grad, [0, 0])


def test_running_extremes_name_their_latest_index():
    values, indices = run_dense("cummax", [np.array([1, 3, 2, 3, 0])], {"axis": 0})
    np.testing.assert_array_equal(values, [1, 3, 3, 3, 3])
    np.testing.assert_array_equal(indices, [0, 1, 1, 3, 3])


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_equal_elements_keep_their_order(dtype):
    x = np.array([2, 1, 2, 1], dtype)
    np.testing.assert_array_equal(one("argsort", x, axis=0), [1, 3, 0, 2])
    np.testing.assert_array_equal(one("argsort", x, axis=0, descending=True), [0, 2, 1, 3])
    _, indices = run_dense("topk", [x], {"axis": 0, "k": 3})
    np.testing.assert_array_equal(indices, [0, 2, 1])


def test_rows_with_and_without_equal_elements_are_ordered_alike():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 40))
    x[1, 7] = x[1, 30]
    x[2, [3, 9]] = np.nan
    x[4] = rng.integers(0, 4, 40)
    for descending in (False, True):
        values, indices = run_dense("sort", [x], {"axis": 1, "descending": descending})
        for row, (ordered, places) in enumerate(zip(values, indices, strict=True)):
            # Sorting pairs of a key and the index is stable by itself.
            keys = np.where(np.isnan(x[row]), np.inf, x[row]) * (-1 if descending else 1)
            assert places.tolist() == sorted(range(40), key=lambda i, keys=keys: (keys[i], i))
            np.testing.assert_array_equal(ordered, x[row][places])


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("high", [3, 1000])
def test_topk_of_long_rows_is_the_start_of_the_order(monkeypatch, largest, high):
    monkeypatch.setattr(order, "_PARTITION_FROM", 8)
    rng = np.random.default_rng(high)
    x = rng.integers(0, high, (4, 3, 50))
    attrs = {"axis": 1, "k": 2, "largest": largest}
    for case in (x, x.transpose(0, 2, 1).astype(np.float64)):
        values, indices = run_dense("topk", [case], attrs)
        expected = one("argsort", case, axis=1, descending=largest)[:, :2]
        np.testing.assert_array_equal(indices, expected)
        np.testing.assert_array_equal(values, np.take_along_axis(case, expected, 1))


def test_topk_counts_nan_as_the_greatest(monkeypatch):
    monkeypatch.setattr(order, "_PARTITION_FROM", 8)
    x = np.arange(20.0)
    x[[3, 5]] = np.nan
    _, indices = run_dense("topk", [x], {"axis": 0, "k": 2})
    np.testing.assert_array_equal(indices, [3, 5])


# --- moves and indexing ---------------------------------------------------------------------------


def test_of_equal_indices_the_last_update_wins_and_gets_the_gradient():
    x, indices, updates = np.zeros(3), np.array([1, 1, 2]), np.array([5.0, 6.0, 7.0])
    attrs = {"axis": 0, "mode": "set"}
    np.testing.assert_array_equal(one("put_along_axis", x, indices, updates, **attrs), [0, 6, 7])
    dx, none, dupdates = gradients_of(
        "put_along_axis", [x, indices, updates], attrs, [np.array([1.0, 2.0, 3.0])]
    )
    assert none is None
    np.testing.assert_array_equal(dx, [1, 0, 0])
    np.testing.assert_array_equal(dupdates, [0, 2, 3])


def test_moves_are_those_of_numpy():
    x = np.arange(24.0).reshape(2, 3, 4)
    np.testing.assert_array_equal(one("flip", x, axes=(0, 2)), np.flip(x, (0, 2)))
    rolled = one("roll", x, shifts=(-5, 2), axes=(2, 1))
    np.testing.assert_array_equal(rolled, np.roll(x, (-5, 2), (2, 1)))
    np.testing.assert_array_equal(one("tile", x, repeats=(2, 1, 3)), np.tile(x, (2, 1, 3)))
    padded = one("pad", x, low=(0, 1, 2), high=(1, 0, 0), value=-1.0)
    wanted = np.pad(x, ((0, 1), (1, 0), (2, 0)), constant_values=-1.0)
    np.testing.assert_array_equal(padded, wanted)
    taken = one("strided_slice", x, starts=(1, 0, 1), stops=(2, 3, 4), steps=(1, 2, 2))
    np.testing.assert_array_equal(taken, x[1:2, 0:3:2, 1:4:2])


@pytest.mark.parametrize("offset", [-3, -1, 0, 2, 5])
def test_diagonals_and_triangles_are_those_of_numpy(offset):
    x = np.arange(24.0).reshape(2, 3, 4) + 1
    actual = one("diagonal", x, offset=offset)
    np.testing.assert_array_equal(actual, np.diagonal(x, offset, 1, 2))
    np.testing.assert_array_equal(one("tril", x, diagonal=offset), np.tril(x, offset))
    np.testing.assert_array_equal(one("triu", x, diagonal=offset), np.triu(x, offset))
    eye = one("eye", rows=3, columns=4, offset=offset, dtype="float64")
    np.testing.assert_array_equal(eye, np.eye(3, 4, offset))


def test_linspace_meets_both_ends():
    actual = one("linspace", start=0.1, stop=0.7, count=11, dtype="float64")
    assert (actual[0], actual[-1]) == (0.1, 0.7)
    np.testing.assert_allclose(actual, np.linspace(0.1, 0.7, 11), 1e-15)


# --- einsum ---------------------------------------------------------------------------------------


def signatures(equation, *shapes):
    inputs = tuple(type_of(np.zeros(shape)) for shape in shapes)
    attrs = {"equation": equation}
    outputs = infer_types("einsum", inputs, attrs)
    return {
        str(each) for each in axis_signatures("einsum", inputs, outputs, tuple(attrs.items()), 2)
    }


def test_the_equation_is_the_sharding_rule():
    assert signatures("bij,bjk->bik", (2, 3, 4), (2, 4, 5)) == {
        "B, B -> B",
        "S(0), S(0) -> S(0)",
        "S(1), B -> S(1)",
        "S(2), S(1) -> P",
        "B, S(2) -> S(2)",
        "P, B -> P",
        "B, P -> P",
    }


def test_einsum_of_many_operands_is_that_of_numpy():
    rng = np.random.default_rng(0)
    for equation, shapes in (
        ("ab,bc,cd,de->ae", ((2, 3), (3, 4), (4, 5), (5, 2))),
        ("abc,bd,ce,df->aef", ((2, 3, 4), (3, 2), (4, 3), (2, 5))),
        ("ab,ab,ab->b", ((3, 4),) * 3),
        ("ab,cd->", ((3, 4), (2, 5))),
    ):
        arrays = [rng.normal(size=shape) for shape in shapes]
        actual = one("einsum", *arrays, equation=equation)
        np.testing.assert_allclose(actual, np.einsum(equation, *arrays), 1e-10, 1e-12)


# --- random tensors -------------------------------------------------------------------------------


def drawn(kind, shape=(200, 300), dtype="float64", key=1, step=0, seed=0, **attrs):
    attrs = {"shape": shape, "dtype": dtype, "key": key, **attrs}
    return run_dense(kind, [], attrs, seed=seed, step=step)[0]


def test_random_tensors_have_their_moments():
    flat = drawn("uniform", low=-1.0, high=3.0)
    assert -1 <= flat.min() < -0.99
    assert 2.99 < flat.max() < 3
    assert flat.mean() == pytest.approx(1, abs=0.02)
    bell = drawn("normal", mean=2.0, std=0.5)
    assert (bell.mean(), bell.std()) == pytest.approx((2, 0.5), abs=0.01)
    assert drawn("bernoulli", dtype="bool", p=0.3).mean() == pytest.approx(0.3, abs=0.01)
    decays = drawn("exponential", rate=2.0)
    assert decays.min() >= 0
    assert (decays.mean(), decays.std()) == pytest.approx((0.5, 0.5), abs=0.01)
    trials = drawn("geometric", dtype="int64", p=0.25)
    assert trials.min() == 1
    assert trials.mean() == pytest.approx(4, abs=0.05)
    quarters = np.quantile(drawn("cauchy", median=1.0, scale=3.0), (0.25, 0.5, 0.75))
    assert quarters == pytest.approx((-2, 1, 4), abs=0.1)
    logs = np.log(drawn("log_normal", mean=2.0, std=0.5))
    assert (logs.mean(), logs.std()) == pytest.approx((2, 0.5), abs=0.01)
    numbers = drawn("randint", dtype="int8", low=-3, high=4)
    counts = np.bincount(numbers.reshape(-1).astype(np.int64) + 3)
    assert counts / numbers.size == pytest.approx(np.full(7, 1 / 7), abs=0.01)


def test_randint_reaches_the_ends_of_its_dtype():
    actual = drawn("randint", dtype="int64", low=-(2**63), high=2**63)
    assert actual.min() < -(2**62)
    assert actual.max() > 2**62
    assert set(drawn("randint", dtype="uint8", low=254, high=256).reshape(-1)) == {254, 255}


def test_a_permutation_has_every_number_once():
    actual = drawn("permutation", (50,), "int64")
    assert sorted(actual.tolist()) == list(range(50))
    assert actual.tolist() != list(range(50))


@pytest.mark.parametrize("change", [{"key": 2}, {"seed": 1}, {"step": 1}])
def test_random_tensors_differ_by_key_seed_and_step(change):
    for kind, attrs in (
        ("uniform", {"low": 0.0, "high": 1.0}),
        ("normal", {"mean": 0.0, "std": 1.0}),
        ("randint", {"dtype": "int64", "low": 0, "high": 1000}),
        ("permutation", {"dtype": "int64"}),
    ):
        before = drawn(kind, (20,), **attrs)
        np.testing.assert_array_equal(before, drawn(kind, (20,), **attrs))
        assert (before != drawn(kind, (20,), **attrs, **change)).any()
