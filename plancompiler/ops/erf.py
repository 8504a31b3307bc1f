"""The error function on arrays, and its complement.

W. J. Cody: Rational Chebyshev Approximations for the Error Function, Mathematics of Computation 23
(1969): one quotient of polynomials for erf near zero, another for erfc from 0.46875 to 4. Beyond 4
the second is still good enough here: erfc is below 2e-8 there, and it is subtracted from 1.

float32 needs less: one quotient in x squared, fitted to erf(x) / x on [-3.95, 3.95] by repeated
weighted least squares, with a relative error below 2.1e-8; beyond, erf is 1 in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from plancompiler.ops.registry import Array

_NEAR = 0.46875
_FAR = 6.0
"""From here on erf is 1 in float64."""

_NEAR_TOP = (
    1.85777706184603153e-1,
    3.16112374387056560e00,
    1.13864154151050156e02,
    3.77485237685302021e02,
    3.20937758913846947e03,
)
_NEAR_BOTTOM = (
    2.36012909523441209e01,
    2.44024637934444173e02,
    1.28261652607737228e03,
    2.84423683343917062e03,
)
_MIDDLE_TOP = (
    2.15311535474403846e-8,
    5.64188496988670089e-1,
    8.88314979438837594e0,
    6.61191906371416295e01,
    2.98635138197400131e02,
    8.81952221241769090e02,
    1.71204761263407058e03,
    2.05107837782607147e03,
    1.23033935479799725e03,
)
_MIDDLE_BOTTOM = (
    1.57449261107098347e01,
    1.17693950891312499e02,
    5.37181101862009858e02,
    1.62138957456669019e03,
    3.29079923573345963e03,
    4.36261909014324716e03,
    3.43936767414372164e03,
    1.23033935480374942e03,
)

_NARROW_FAR = 3.95
_NARROW_TOP = (
    2.025901444e-06,
    2.846880026e-04,
    3.808184230e-03,
    5.287552027e-02,
    1.915508707e-01,
    1.128379144e00,
)
_NARROW_BOTTOM = (
    3.783174539e-05,
    1.170730712e-03,
    1.505513709e-02,
    1.145598544e-01,
    5.030902149e-01,
    1.0,
)


def _polynomial(variable: Array, coefficients: tuple[float, ...], out: Array) -> None:
    """By Horner's scheme, the highest coefficient first."""
    np.multiply(variable, coefficients[0], out=out)
    _continue(variable, coefficients[1:], out)


def _monic(variable: Array, coefficients: tuple[float, ...], out: Array) -> None:
    """Like `_polynomial`, with a 1 before the coefficients."""
    np.add(variable, coefficients[0], out=out)
    np.multiply(out, variable, out=out)
    _continue(variable, coefficients[1:], out)


def _continue(variable: Array, coefficients: tuple[float, ...], out: Array) -> None:
    for coefficient in coefficients[:-1]:
        np.add(out, coefficient, out=out)
        np.multiply(out, variable, out=out)
    np.add(out, coefficients[-1], out=out)


WORK = ("erf size", "erf top", "erf bottom", "erf near")
"""Names of the work buffers that `erf` needs."""


def erf(x: Array, out: Array, work: Sequence[Array]) -> None:
    """erf(x) into `out`, which may be `x`; `work` has a buffer of the same kind per name in WORK.

    The error is within 5 units in the last place of float64, 7 of float32.
    """
    if x.dtype == np.float32:
        _narrow_erf(x, out, *work[:3])
        return
    size, top, bottom, near_top = work
    np.absolute(x, out=size)
    near = size <= _NEAR
    # NaN passes through: minimum and all that follows keep it.
    np.minimum(size, _FAR, out=size)
    _polynomial(size, _MIDDLE_TOP, top)
    _monic(size, _MIDDLE_BOTTOM, bottom)
    np.divide(top, bottom, out=top)
    np.multiply(size, size, out=size)
    np.negative(size, out=bottom)
    np.exp(bottom, out=bottom)
    np.multiply(top, bottom, out=top)
    np.subtract(1, top, out=top)
    np.copysign(top, x, out=top)
    if near.any():
        _monic(size, _NEAR_BOTTOM, bottom)
        _polynomial(size, _NEAR_TOP, near_top)
        np.divide(near_top, bottom, out=bottom)
        np.multiply(bottom, x, out=bottom)
        np.copyto(top, bottom, where=near)
    np.copyto(out, top)


def _narrow_erf(x: Array, out: Array, square: Array, top: Array, bottom: Array) -> None:
    np.clip(x, -_NARROW_FAR, _NARROW_FAR, out=out)
    np.multiply(out, out, out=square)
    _polynomial(square, _NARROW_TOP, top)
    _polynomial(square, _NARROW_BOTTOM, bottom)
    np.divide(top, bottom, out=top)
    np.multiply(top, out, out=out)
    np.clip(out, -1, 1, out=out)


_FAR_TOP = (
    1.63153871373020978e-2,
    3.05326634961232344e-1,
    3.60344899949804439e-1,
    1.25781726111229246e-1,
    1.60837851487422766e-2,
    6.58749161529837803e-4,
)
_FAR_BOTTOM = (
    2.56852019228982242e00,
    1.87295284992346725e00,
    5.27905102951428412e-1,
    6.05183413124413191e-2,
    2.33520497626869185e-3,
)


def _scaled(size: Array) -> Array:
    """exp(x * x) erfc(x) of float64 numbers that are not negative, by Cody's three quotients."""
    work = [size * 0, size * 0]

    def quotient(variable: Array, top: tuple[float, ...], bottom: tuple[float, ...]) -> Array:
        _polynomial(variable, top, work[0])
        _monic(variable, bottom, work[1])
        value: Array = work[0] / work[1]
        return value

    near = np.minimum(size, _NEAR)
    square = near * near
    of_near = np.exp(square) * (1 - near * quotient(square, _NEAR_TOP, _NEAR_BOTTOM))
    of_middle = quotient(np.minimum(size, 4.0), _MIDDLE_TOP, _MIDDLE_BOTTOM)
    far = np.maximum(size, 4.0)
    inverse = 1 / (far * far)
    of_far = (1 / math.sqrt(math.pi) - inverse * quotient(inverse, _FAR_TOP, _FAR_BOTTOM)) / far
    value: Array = np.where(size > 4, of_far, np.where(size > _NEAR, of_middle, of_near))
    return value


def erfcx(x: Array) -> Array:
    """exp(x * x) erfc(x) of float64 numbers."""
    size = abs(x)
    value = _scaled(size)
    return np.where(x < 0, 2 * np.exp(size * size) - value, value)


def erfc(x: Array) -> Array:
    """1 - erf(x) of float64 numbers, exact where that is small."""
    size = np.minimum(abs(x), 30.0)
    # The square of a rounded number is exact, so that the exponent of a large one is (Cody).
    coarse = np.floor(size * 16) / 16
    decay = np.exp(-coarse * coarse) * np.exp(-(size - coarse) * (size + coarse))
    value = decay * _scaled(size)
    return np.where(x < 0, 2 - value, np.where(x != x, x, value))
