"""Infinities, NaN, signed zeros and narrow whole numbers: one result on every layout, eager and
compiled."""

from __future__ import annotations

import math

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn

MESH = pc.Placement("cpu", [0, 1])
X = np.array([1.0, -2.0, -0.0, 0.0, 3.0, math.inf, -math.inf, math.nan], np.float32)
ONES = np.ones_like(X)

INF = np.float32(math.inf)

FUNCTIONS = {
    "times infinity": (lambda x, one: x * math.inf, lambda x: x * INF),
    "times minus infinity": (lambda x, one: x * -math.inf, lambda x: x * -INF),
    "times nan": (lambda x, one: x * math.nan, lambda x: x * np.float32(math.nan)),
    "times what float32 cannot hold": (lambda x, one: x * 1e39, lambda x: x * INF),
    "by zero": (lambda x, one: x / 0.0, lambda x: x / np.float32(0)),
    "by minus zero": (lambda x, one: x / -0.0, lambda x: x / np.float32(-0.0)),
    "by what float32 cannot hold": (lambda x, one: x / 1e-46, lambda x: x / np.float32(0)),
    "by infinity": (lambda x, one: x / math.inf, lambda x: x / INF),
    "reciprocal": (lambda x, one: pc.reciprocal(x), lambda x: 1 / x),
    "one over": (lambda x, one: 1.0 / x, lambda x: 1 / x),
    "power of -1": (lambda x, one: x**-1, lambda x: 1 / x),
    "rsqrt": (lambda x, one: pc.rsqrt(x), lambda x: 1 / np.sqrt(x)),
    "copysign": (lambda x, one: pc.copysign(one, x), lambda x: np.copysign(ONES, x)),
    "atan2": (lambda x, one: pc.atan2(x, -one), lambda x: np.arctan2(x, -ONES)),
    "atan2 of 1": (lambda x, one: pc.atan2(one, x), lambda x: np.arctan2(ONES, x)),
    "sign of zero": (lambda x, one: 1.0 / (x + x), lambda x: 1 / (x + x)),
}


@pytest.fixture(scope="module", autouse=True)
def no_warnings():
    with np.errstate(all="ignore"):
        yield


def by_layout(functions, arrays, layouts, compiled=True):
    """Per layout the results of all functions, eager and compiled, of arrays in that layout."""

    def rank():
        results = {}
        with np.errstate(all="ignore"):
            for layout in layouts:
                tensors = [pc.tensor(array, MESH, "B").redistribute(sbp=layout) for array in arrays]
                for name, function in functions.items():
                    made = function(*tensors)
                    results[layout, name, "eager"] = (str(made.dtype), made.numpy())
                    if compiled:
                        made = pc.compile(function)(*tensors)
                        results[layout, name, "compiled"] = (str(made.dtype), made.numpy())
        return results

    return spawn(rank, 2)[0]


def same_bits(got, expected):
    """Equal, the signs of zeros and infinities included."""
    np.testing.assert_array_equal(got, expected)
    known = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got)[known], np.signbit(expected)[known])


def test_special_numbers_are_the_same_on_every_layout():
    functions = {name: function for name, (function, _) in FUNCTIONS.items()}
    for key, (_, got) in by_layout(functions, (X, ONES), ("B", "S(0)", "P")).items():
        try:
            same_bits(got, FUNCTIONS[key[1]][1](X))
        except AssertionError as error:
            raise AssertionError(str(key)) from error


NARROW = np.array([[200, 100, 3], [255, 128, 1], [7, 250, 0], [9, 9, 9]], np.uint8)
WHOLE = {
    "sum": (lambda x: x.sum(), np.sum),
    "sum of columns": (lambda x: x.sum(0), lambda x: np.sum(x, 0)),
    "prod": (lambda x: pc.prod(x, 1), lambda x: np.prod(x, 1)),
    "cumsum": (lambda x: pc.cumsum(x, 0), lambda x: np.cumsum(x, 0)),
    "cumprod": (lambda x: pc.cumprod(x, 1), lambda x: np.cumprod(x, 1)),
    "mean": (lambda x: x.mean(), np.mean),
    "mean of rows": (lambda x: pc.mean(x, 1), lambda x: np.mean(x, 1)),
    "trace": (pc.trace, np.trace),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "bool"])
def test_totals_of_whole_numbers_widen_as_in_numpy(dtype):
    array = (NARROW > 100) if dtype == "bool" else NARROW.view("int8").astype(dtype)
    array = NARROW if dtype == "uint8" else array
    functions = {name: function for name, (function, _) in WHOLE.items()}
    # A bool has no parts to add up.
    layouts = ("B", "S(0)", "S(1)") if dtype == "bool" else ("B", "S(0)", "S(1)", "P")
    actual = by_layout(functions, (array,), layouts, compiled=dtype in ("uint8", "bool"))
    for key, (known, got) in actual.items():
        expected = WHOLE[key[1]][1](array)
        wanted, bound = "uint64" if dtype == "uint8" else "int64", 0.0
        if expected.dtype.kind == "f":
            wanted, bound = ("float32", 1e-7) if dtype == "bool" else ("float64", 1e-15)
        assert known == str(got.dtype) == wanted, key
        np.testing.assert_allclose(got, expected, bound, 0, err_msg=str(key))


def test_partial_sums_of_narrow_numbers_wrap_before_they_widen():
    """A sum in int8 of 100 and 100 is -56, on one device or on two."""

    def rank():
        part = pc.eager.DistTensor.from_local(np.array([100, 1], np.int8), MESH, "P")
        return int(part.sum().item()), part.numpy().tolist()

    assert spawn(rank, 2)[0] == (-54, [-56, 2])


def test_three_hundred_ones_are_three_hundred():
    def rank():
        ones = pc.tensor(np.ones(300, np.uint8), MESH, "S(0)")
        return int(ones.sum().item()), int(ones.cast("bool").sum().item())

    assert spawn(rank, 2)[0] == (300, 300)


# --- gradients ------------------------------------------------------------------------------------

NORMS = np.array([[0.0, 0.0], [3.0, 0.0], [0.0, -2.0]])
STEPS = np.array([-1.5, -0.0, 0.0, 0.5, 2.0])
NOTHING = [0.0] * 5


def steps(function):
    return function, (STEPS,), (NOTHING,)


SLOPES = {
    "floor": steps(pc.floor),
    "ceil": steps(pc.ceil),
    "round": steps(pc.round),
    "trunc": steps(pc.trunc),
    "sign": steps(pc.sign),
    "floor_divide": (pc.floor_divide, ([5.0, -5.0], [2.0, 2.0]), ([0.0, 0.0], [0.0, 0.0])),
    "remainder": (pc.remainder, ([5.0, -5.0], [2.0, 2.0]), ([1.0, 1.0], [-2.0, 3.0])),
    "remainder of -inf": (pc.remainder, ([0.5], [-math.inf]), ([1.0], [1.0])),
    "copysign": (pc.copysign, ([2.0, 0.0], [-1.0, 1.0]), ([-1.0, 0.0], [0.0, 0.0])),
    "0 ** 0": (pc.pow, ([0.0, -0.0], [0.0, 0.0]), ([0.0, 0.0], [0.0, 0.0])),
    "0 ** z": (pc.pow, ([0.0, 0.0, 0.0], [1.0, 2.0, -1.0]), ([1.0, 0.0, -INF], [0.0, 0.0, -INF])),
    "x ** 0": (lambda x: x**0, ([0.0, 2.0],), ([0.0, 0.0],)),
    "0.0 ** x": (lambda x: 0.0**x, ([0.0, 1.0, -1.0],), ([0.0, 0.0, -INF],)),
    "maximum": (pc.maximum, ([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]), ([0.0, 0.5, 1.0], [1.0, 0.5, 0.0])),
    "minimum": (pc.minimum, ([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]), ([1.0, 0.5, 0.0], [0.0, 0.5, 1.0])),
    "atan2": (
        pc.atan2,
        ([0.0, 0.0, 1e-200], [0.0, 2.0, 0.0]),
        ([0.0, 0.5, 0.0], [0.0, 0.0, -1e200]),
    ),
    "hypot": (pc.hypot, ([0.0, 3.0], [0.0, 4.0]), ([0.0, 0.6], [0.0, 0.8])),
    "logaddexp": (
        pc.logaddexp,
        ([INF, 1.0, -INF, 0.0], [1.0, INF, 1.0, 0.0]),
        ([1.0, 0.0, 0.0, 0.5], [0.0, 1.0, 1.0, 0.5]),
    ),
    "clip": (lambda x: pc.clip(x, 0.0, 1.0), ([-1.0, 0.0, 1.0, 2.0],), ([0.0, 1.0, 1.0, 0.0],)),
    "hardtanh": (pc.hardtanh, ([-1.0, 0.0, 1.0, 2.0],), ([0.0, 1.0, 0.0, 0.0],)),
    "relu6": (pc.relu6, ([0.0, 1.0, 6.0],), ([0.0, 1.0, 0.0],)),
    "abs": (abs, ([-1.0, 0.0, 2.0],), ([-1.0, 0.0, 1.0],)),
    "norm 0.5": (lambda x: pc.norm(x, 0.5, 1), (NORMS,), ([[0.0, 0.0], [1.0, 0.0], [0.0, -1.0]],)),
    "norm 1": (lambda x: pc.norm(x, 1, 1), (NORMS,), ([[0.0, 0.0], [1.0, 0.0], [0.0, -1.0]],)),
    "norm 2": (lambda x: pc.norm(x, 2, 1), (NORMS,), ([[0.0, 0.0], [1.0, 0.0], [0.0, -1.0]],)),
    "norm 3": (lambda x: pc.norm(x, 3, 1), (NORMS,), ([[0.0, 0.0], [1.0, 0.0], [0.0, -1.0]],)),
    "norm inf": (
        lambda x: pc.norm(x, math.inf, 1),
        (NORMS,),
        ([[0.0, 0.0], [1.0, 0.0], [0.0, -1.0]],),
    ),
    "std": (lambda x: pc.std(x, 1), ([[2.0, 2.0], [1.0, 3.0]],), ([[0.0, 0.0], [-0.5, 0.5]],)),
    "prod": (
        lambda x: pc.prod(x, 1),
        ([[0.0, 2.0, 3.0], [0.0, 0.0, 3.0], [1e200, 1e200, 0.0]],),
        ([[6.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, INF]],),
    ),
    "cumprod": (
        lambda x: pc.cumprod(x, 1),
        ([[0.0, 2.0, 3.0], [1e200, 1e200, 0.0]],),
        ([[9.0, 0.0, 0.0], [INF, INF, INF]],),
    ),
    "square root of a choice": (
        lambda x: pc.sqrt(pc.where(x > 0, x, 0.0)),
        ([-1.0, 0.0, 4.0],),
        ([0.0, 0.0, 0.25],),
    ),
    "square root of relu": (lambda x: x.relu().sqrt(), ([-1.0, 0.0, 4.0],), ([0.0, 0.0, 0.25],)),
    "logarithm of relu6": (lambda x: pc.log(pc.relu6(x)), ([-1.0, 2.0, 9.0],), ([0.0, 0.5, 0.0],)),
    "logarithm of clip": (
        lambda x: pc.log(pc.clip(x, 0.0, 2.0)),
        ([-1.0, 1.0, 9.0],),
        ([0.0, 1.0, 0.0],),
    ),
    "logarithm of maximum": (lambda x: pc.log(pc.maximum(x, 0.0)), ([-1.0, 2.0],), ([0.0, 0.5],)),
    "logarithm of hardsigmoid": (
        lambda x: pc.log(pc.hardsigmoid(x)),
        ([-4.0, 0.0],),
        ([0.0, 1 / 3],),
    ),
    "logarithm of hardswish": (
        lambda x: pc.reciprocal(pc.hardswish(x)),
        ([-4.0, 3.0],),
        ([0.0, -1 / 9],),
    ),
    "logsumexp": (
        lambda x: pc.logsumexp(x, 1),
        ([[-INF, 0.0], [0.0, 0.0]],),
        ([[0.0, 1.0], [0.5, 0.5]],),
    ),
    "cross-entropy of probabilities": (
        lambda x, t: pc.binary_cross_entropy(x, t, "none"),
        ([0.0, 1.0], [0.0, 1.0]),
        ([0.0, 0.0], [100.0, -100.0]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_are_finite_where_slopes_are(compiled):
    def rank():
        results = {}
        with np.errstate(all="ignore"):
            for name, (function, arrays, _) in SLOPES.items():

                def slopes(*tensors, function=function):
                    return pc.eager.grad(function(*tensors).sum(), tensors)

                for layout in ("B", "S(0)"):
                    tensors = [
                        pc.tensor(np.array(array), MESH, layout, requires_grad=True)
                        for array in arrays
                    ]
                    run = pc.compile(slopes) if compiled else slopes
                    results[name, layout] = [grad.numpy() for grad in run(*tensors)]
        return results

    for (name, layout), grads in spawn(rank, 2)[0].items():
        for got, expected in zip(grads, SLOPES[name][2], strict=True):
            np.testing.assert_allclose(got, expected, 1e-12, 1e-300, err_msg=f"{name} {layout}")


CURVES = {
    # At kinks and zeros: the second derivatives of sums of first ones.
    "0 ** 1": (lambda x: pc.pow(x, pc.ones_like(x)), [0.0, 2.0], [0.0, 0.0]),
    "0 ** 2": (lambda x: pc.pow(x, pc.ones_like(x) * 2.0), [0.0, 2.0], [2.0, 2.0]),
    "norm 3": (lambda x: pc.norm(x, 3), [0.0, 0.0], [0.0, 0.0]),
    "norm 2": (lambda x: pc.norm(x, 2), [0.0, 0.0], [0.0, 0.0]),
    "norm 1.5": (lambda x: pc.norm(x, 1.5), [0.0, 4.0], [0.0, 0.0]),
    "std": (pc.std, [2.0, 2.0], [0.0, 0.0]),
    "hypot": (lambda x: pc.hypot(x, x * 2.0), [0.0, 1.0], [0.0, 0.0]),
    "atan2": (lambda x: pc.atan2(x, pc.ones_like(x)), [0.0, 1.0], [0.0, -0.5]),
    "square root of relu": (lambda x: x.relu().sqrt(), [-1.0, 4.0], [0.0, -1 / 32]),
    "maximum": (lambda x: pc.maximum(x * x, x), [1.0, 2.0], [1.0, 2.0]),
    "elu": (pc.elu, [0.0, -1.0], [0.0, math.exp(-1)]),
    "huber": (lambda x: pc.huber_loss(x, pc.zeros_like(x), 1.0, "none"), [1.0, 0.5], [0.0, 1.0]),
    "logaddexp": (lambda x: pc.logaddexp(x, pc.zeros_like(x)), [INF, 0.0], [0.0, 0.25]),
}


def test_second_derivatives_are_finite_at_kinks():
    mesh = pc.Placement("cpu", [0])

    def rank():
        results = {}
        with np.errstate(all="ignore"):
            for name, (function, array, _) in CURVES.items():
                x = pc.tensor(np.array(array), mesh, requires_grad=True)
                (slope,) = pc.eager.grad(function(x).sum(), [x], create_graph=True)
                results[name] = pc.eager.grad(slope.sum(), [x])[0].numpy()
        return results

    for name, got in spawn(rank, 1)[0].items():
        np.testing.assert_allclose(got, CURVES[name][2], 1e-12, 1e-12, err_msg=name)
