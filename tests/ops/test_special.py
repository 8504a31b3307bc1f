"""Special functions against Python's own and by identities that tie them to each other."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.ops.sharding import run_dense


def of(kind, *inputs, **attrs):
    return run_dense(kind, [np.asarray(each, np.float64) for each in inputs], attrs)[0]


WIDE = np.linspace(-5.9, 25.3, 700)
POSITIVE = np.concatenate([np.logspace(-6, 0, 200), np.linspace(1, 80, 500)])


@pytest.mark.parametrize(("kind", "exact"), [("erfc", math.erfc), ("lgamma", math.lgamma)])
def test_values_are_those_of_python(kind, exact):
    np.testing.assert_allclose(of(kind, WIDE), [exact(each) for each in WIDE], 1e-12, 1e-13)


def test_scaled_and_logarithmic_forms_go_where_the_plain_ones_vanish():
    far = np.array([30.0, 1e3, 1e8])
    np.testing.assert_allclose(of("erfcx", far), 1 / (far * math.sqrt(math.pi)), 1e-3)
    np.testing.assert_allclose(of("log_ndtr", -far[1:]), -(far[1:] ** 2) / 2, 1e-4)
    assert of("erfc", [40.0]) == 0


def test_inverses_lead_back():
    x = np.linspace(-5, 5, 101)
    np.testing.assert_allclose(of("ndtri", of("ndtr", x)), x, 1e-9)
    x = np.linspace(-3, 3, 101)
    np.testing.assert_allclose(of("erfinv", of("erf", x)), x, 1e-9, 1e-15)
    assert of("ndtri", [0.0]) == -np.inf
    np.testing.assert_allclose(of("ndtri", [1e-300]), -37.0471, 1e-5)


def test_gamma_and_its_derivatives_recur():
    x = WIDE + 1e-3
    np.testing.assert_allclose(of("digamma", x + 1), of("digamma", x) + 1 / x, 1e-9)
    for order in (1, 2, 3):
        step = (-1) ** order * math.factorial(order) / x ** (order + 1)
        here, there = (of("polygamma", each, order=order) for each in (x, x + 1))
        np.testing.assert_allclose(there, here + step, 1e-7, 1e-9 * abs(step).max())
    np.testing.assert_allclose(
        of("zeta", [2.0, 4.0], [1.0, 1.0]), [math.pi**2 / 6, math.pi**4 / 90]
    )


def test_bessel_functions_fulfil_their_wronskians():
    x = POSITIVE
    j0, j1, y0, y1 = (of(f"bessel_{each}", x) for each in ("j0", "j1", "y0", "y1"))
    np.testing.assert_allclose((j1 * y0 - j0 * y1) * x * math.pi / 2, 1, 1e-10)
    i0, i1 = (of(each, x) for each in ("i0e", "i1e"))
    k0, k1 = (of(f"scaled_modified_bessel_{each}", x) for each in ("k0", "k1"))
    np.testing.assert_allclose((i0 * k1 + i1 * k0) * x, 1, 1e-12)
    small = x[x < 30]
    np.testing.assert_allclose(of("i0", small), np.exp(small) * of("i0e", small), 1e-12)
    decayed = np.exp(-small) * of("scaled_modified_bessel_k1", small)
    np.testing.assert_allclose(of("modified_bessel_k1", small), decayed, 1e-12)
    np.testing.assert_allclose(of("bessel_j0", [2.404825557695773]), 0, atol=1e-14)


def test_special_numbers_stay_so():
    assert np.isnan(of("erfc", [np.nan])).all()
    assert np.isnan(of("lgamma", [np.nan])).all()
    np.testing.assert_array_equal(of("lgamma", [0.0, -3.0, np.inf]), np.inf)
    np.testing.assert_array_equal(of("bessel_y0", [0.0]), -np.inf)
    assert np.isnan(of("bessel_y1", [-1.0])).all()
    np.testing.assert_array_equal(of("xlogy", [0.0, 0.0], [0.0, -1.0]), 0)
    np.testing.assert_array_equal(of("entr", [0.0, -1.0]), [0, -np.inf])
