"""Special functions of mathematical physics and statistics.

They are computed in float64 by functions of NumPy alone, so that they run on any arrays, and are
rounded once. Section numbers are those of M. Abramowitz and I. A. Stegun: Handbook of Mathematical
Functions (1964).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plancompiler.ops.attributes import Int
from plancompiler.ops.check import FLOATS
from plancompiler.ops.elementwise import UNARY_RULE, register_binary
from plancompiler.ops.erf import erfc, erfcx
from plancompiler.ops.gradient import masked, of_one
from plancompiler.ops.pointwise import register_pointwise
from plancompiler.ops.registry import (
    Array,
    Arrays,
    Kernel,
    KernelContext,
    apply,
    define_op,
)

Evaluated = Callable[..., Array]
"""Float64 arrays to one."""


def _in_double(evaluate: Evaluated) -> Kernel:
    """The kernel of a function that is computed in float64."""

    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        with np.errstate(all="ignore"):
            # An axis more, as NumPy makes numbers, not arrays, of arrays without any.
            wide = [each.astype(np.float64)[None] for each in inputs]
            np.copyto(outputs[0], evaluate(*wide)[0], casting="unsafe")

    return kernel


def _of_two(evaluate: Evaluated) -> Callable[..., Any]:
    """A function of two numbers that is computed in float64, as NumPy's functions are called."""

    def function(x: Array, y: Array, out: Array) -> None:
        with np.errstate(all="ignore"):
            wide = evaluate(x.astype(np.float64), y.astype(np.float64))
            np.copyto(out, wide, casting="unsafe")

    return function


def _register(
    kind: str,
    evaluate: Evaluated,
    gradient: Callable[[Any, Any, Any], Any],
    doc: str,
    code: str | None = None,
) -> None:
    """Register a function of one number; `code` is its expression in CUDA, where there is one.

    `gradient(x, y, dy)` gives dx.
    """
    define_op(
        kind,
        infer="x F -> y F",
        rule=UNARY_RULE,
        kernel=_in_double(evaluate),
        gradient=of_one(lambda attrs, x, y, dy: gradient(x, y, dy)),
        inplace=((0, 0),),
        elementwise=True,
        code=code,
        doc=doc,
    )


def _series(variable: Array, coefficients: Sequence[float]) -> Array:
    """A polynomial by Horner's scheme, the constant first."""
    total = variable * 0 + coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        total = total * variable + coefficient
    return total


# --- the gamma function and its derivatives -------------------------------------------------------

_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
"""Numbers of Bernoulli B2, B4, … (23.1.3)."""
_SHIFTS = 10
"""By which arguments grow before an asymptotic series is exact in float64."""


def _lgamma(x: Array) -> Array:
    """Stirling's series (6.1.40) of an argument that recurrence (6.1.15) and reflection (6.1.17)
    have brought above 10.
    """
    reflected = x < 0.5
    z = np.where(reflected, 1 - x, x)
    product = z * 0 + 1
    for _ in range(_SHIFTS):
        small = z < _SHIFTS
        product = np.where(small, product * z, product)
        z = np.where(small, z + 1, z)
    inverse = 1 / z
    rest = inverse * _series(
        inverse * inverse,
        [b / (2 * k * (2 * k - 1)) for k, b in enumerate(_BERNOULLI, 1)],
    )
    value = (z - 0.5) * np.log(z) - z + 0.5 * math.log(2 * math.pi) + rest - np.log(product)
    value = np.where(np.isinf(z), math.inf, value)
    mirrored = math.log(math.pi) - np.log(abs(np.sin(math.pi * (x - np.rint(x))))) - value
    value = np.where(reflected, mirrored, value)
    # Exact at the zeros, where logarithms cancel.
    return np.where((x == 1) | (x == 2), 0.0, np.where(np.isinf(x), math.inf, value))


def _digamma(x: Array) -> Array:
    """The asymptotic series 6.3.18, by 6.3.5 and 6.3.7."""
    reflected = x < 0.5
    z = np.where(reflected, 1 - x, x)
    shifted = z * 0
    for _ in range(_SHIFTS):
        small = z < _SHIFTS
        shifted = np.where(small, shifted + 1 / z, shifted)
        z = np.where(small, z + 1, z)
    square = 1 / (z * z)
    rest = square * _series(square, [b / (2 * k) for k, b in enumerate(_BERNOULLI, 1)])
    value = np.log(z) - 0.5 / z - rest - shifted
    angle = math.pi * (x - np.rint(x))
    value = np.where(reflected, value - math.pi / np.tan(angle), value)
    pole = (x <= 0) & (x == np.rint(x))
    return np.where(pole, np.where(x == 0, -np.copysign(math.inf, x), math.nan), value)


def _zeta(s: Array, q: Array) -> Array:
    """Euler and Maclaurin's formula (23.2.3 and 3.6.28) for the sum of 1 / (q + k) ** s, with the
    first terms as they are. For q < 0 whole numbers have a pole, others no value here.
    """
    total = (s + q) * 0
    z = q + total
    for _ in range(_SHIFTS):
        small = z < _SHIFTS
        total = np.where(small, total + z**-s, total)
        z = np.where(small, z + 1, z)
    total = total + z ** (1 - s) / (s - 1) + 0.5 * z**-s
    factor, power = s, z ** (-s - 1)
    for k, bernoulli in enumerate(_BERNOULLI, 1):
        total = total + bernoulli / math.factorial(2 * k) * factor * power
        factor = factor * (s + (2 * k - 1)) * (s + 2 * k)
        power = power / (z * z)
    total = np.where(q <= 0, np.where(q == np.rint(q), math.inf, math.nan), total)
    return np.where(s == 1, math.inf, np.where(s < 1, math.nan, total))


def _cotangent_derivative(order: int) -> list[float]:
    """The coefficients of d^order cot(x) / dx^order as a polynomial in cot(x)."""
    polynomial = np.polynomial.Polynomial([0.0, 1.0])
    for _ in range(order):
        polynomial = -(polynomial.deriv() * np.polynomial.Polynomial([1.0, 0.0, 1.0]))
    return [float(each) for each in polynomial.coef]


def _polygamma_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    """6.4.10, and 6.4.7 for x < 0.5."""
    order = context.attrs["order"]
    with np.errstate(all="ignore"):
        x = inputs[0].astype(np.float64)
        if order == 0:
            value = _digamma(x)
        else:
            sign = (-1.0) ** (order + 1)
            reflected = x < 0.5
            z = np.where(reflected, 1 - x, x)
            value = sign * math.factorial(order) * _zeta(z * 0 + (order + 1), z)
            cotangent = 1 / np.tan(math.pi * (x - np.rint(x)))
            bend = _series(cotangent, _cotangent_derivative(order)) * math.pi ** (order + 1)
            value = np.where(reflected, -sign * value - bend, value)
            pole = (x <= 0) & (x == np.rint(x))
            at_pole = math.inf if order % 2 else math.nan
            value = np.where(pole, at_pole, value)
        np.copyto(outputs[0], value, casting="unsafe")


_register(
    "lgamma",
    _lgamma,
    lambda x, y, dy: dy * apply("digamma", x),
    "log(|gamma(x)|); infinite at 0 and at negative whole numbers.",
    "lgamma({0})",
)
_register(
    "digamma",
    _digamma,
    lambda x, y, dy: dy * apply("polygamma", x, order=1),
    "The derivative of lgamma.",
)
define_op(
    "polygamma",
    infer="x F -> y F",
    rule=UNARY_RULE,
    attrs=(Int("order", least=0),),
    kernel=_polygamma_kernel,
    gradient=of_one(lambda attrs, x, y, dy: dy * apply("polygamma", x, order=attrs["order"] + 1)),
    inplace=((0, 0),),
    elementwise=True,
    doc="The derivative of digamma of order `order`.",
)
register_binary(
    "zeta",
    _of_two(_zeta),
    None,
    dtypes=FLOATS,
    doc="The sum of 1 / (q + k) ** s over k = 0, 1, … (A. Hurwitz), for s > 1 and q > 0.",
)


# --- the error function's relatives ---------------------------------------------------------------


def _erfinv(y: Array) -> Array:
    """Winitzki's approximation (2008), made exact by Halley's iteration on the smaller of erf and
    erfc.
    """
    size = abs(y)
    rest = 1 - size
    shape = 0.147
    logarithm = np.log(rest * (1 + size))
    middle = 2 / (math.pi * shape) + logarithm / 2
    x = np.sqrt(np.sqrt(middle * middle - logarithm / shape) - middle)
    for _ in range(3):
        # erfc(x) - rest, over its slope.
        step = (erfc(x) - rest) / (-2 / math.sqrt(math.pi) * np.exp(-x * x))
        x = x - step / (1 + x * step)
    near = size < 1e-3
    small = size * math.sqrt(math.pi) / 2
    x = np.where(near, small + small**3 / 3 + small**5 * (7 / 30), x)
    x = np.where(size == 1, math.inf, np.where(size > 1, math.nan, x))
    return np.copysign(x, y)


def _ndtri(p: Array) -> Array:
    """-sqrt(2) erfcinv(2 p), by Newton's iteration on the logarithm where p is small."""
    tail = np.minimum(p, 1 - p)
    x = -math.sqrt(2) * _erfinv(1 - 2 * np.maximum(tail, 1e-3))
    far = np.sqrt(-2 * np.log(tail))
    x = np.where(tail < 1e-3, -(far - np.log(far * math.sqrt(2 * math.pi)) / far), x)
    wanted = np.log(tail)
    for _ in range(6):
        reached = _log_ndtr(x)
        slope = np.exp(-0.5 * x * x - 0.5 * math.log(2 * math.pi) - reached)
        x = np.where(tail < 1e-3, x - (reached - wanted) / slope, x)
    x = np.where(tail == 0, -math.inf, np.where(tail < 0, math.nan, x))
    return np.where(p > 0.5, -x, x)


def _log_ndtr(x: Array) -> Array:
    z = x * -math.sqrt(0.5)
    left = np.log(0.5 * erfcx(np.maximum(z, 0))) - z * z
    return np.where(z > 0, left, np.log1p(-0.5 * erfc(-np.minimum(z, 0))))


_ROOT_PI = math.sqrt(math.pi)
_register(
    "erfc",
    erfc,
    lambda x, y, dy: dy * (-(x * x)).exp() * (-2 / _ROOT_PI),
    "1 - erf(x), exact where erf is nearly 1.",
    "erfc({0})",
)
_register(
    "erfcx",
    erfcx,
    lambda x, y, dy: dy * (x * y * 2.0 - 2 / _ROOT_PI),
    "exp(x * x) erfc(x).",
    "erfcx({0})",
)
_register(
    "erfinv",
    _erfinv,
    lambda x, y, dy: dy * (y * y).exp() * (_ROOT_PI / 2),
    "The number whose erf is x.",
    "erfinv({0})",
)
_register(
    "ndtri",
    _ndtri,
    lambda x, y, dy: dy * (y * y * 0.5).exp() * math.sqrt(2 * math.pi),
    "The number below which a share x of the standard normal distribution lies.",
    "normcdfinv({0})",
)
_register(
    "log_ndtr",
    _log_ndtr,
    lambda x, y, dy: dy * (x * x * -0.5 - y).exp() * (1 / math.sqrt(2 * math.pi)),
    "log(ndtr(x)), exact where ndtr is nearly 0.",
)
_register(
    "ndtr",
    lambda x: 0.5 * erfc(x * -math.sqrt(0.5)),
    lambda x, y, dy: dy * (x * x * -0.5).exp() * (1 / math.sqrt(2 * math.pi)),
    "The share of the standard normal distribution that lies below x.",
    "normcdf({0})",
)


# --- Bessel functions -----------------------------------------------------------------------------

_POINTS = 64
"""Points of the trapezoidal rule, which is exact to float64 for integrands with a period, up to
arguments of 30 (L. N. Trefethen and J. A. C. Weideman, 2014)."""
_FAR = 30.0
"""From here on the asymptotic series are exact to float64."""


def _by_points(function: Callable[[float], Array]) -> Array:
    """The mean of a function of angles over half a period."""
    total = 0.5 * (function(0.0) + function(math.pi))
    for point in range(1, _POINTS):
        total = total + function(math.pi * point / _POINTS)
    return total / _POINTS


def _hankel(order: int, x: Array, sign: float) -> tuple[Array, Array]:
    """The even and the odd terms of the asymptotic series 9.2.5 (`sign` -1) and 9.7.1 (1)."""
    even, odd, term = x * 0 + 1, x * 0, x * 0 + 1
    for k in range(1, 26):
        term = term * (4 * order * order - (2 * k - 1) ** 2) / (k * 8 * x)
        if k % 2:
            odd = odd + term * sign ** (k // 2)
        else:
            even = even + term * sign ** (k // 2)
    return even, odd


def _scaled_i(order: int) -> Evaluated:
    """exp(-|x|) I(x): 9.6.19, far out 9.7.1."""

    def evaluate(x: Array) -> Array:
        size = abs(x)
        near, far = np.minimum(size, _FAR), np.maximum(size, _FAR)
        value = _by_points(
            lambda angle: np.exp(near * (math.cos(angle) - 1)) * math.cos(order * angle)
        )
        even, odd = _hankel(order, far, 1.0)
        value = np.where(size > _FAR, (even - odd) / np.sqrt(2 * math.pi * far), value)
        value = np.where(np.isinf(size), 0.0, value)
        return value * np.sign(x) if order else value

    return evaluate


def _times_exp(scaled: Evaluated, sign: float) -> Evaluated:
    """The function without its scale exp(sign |x|), which is put in two parts: one may overflow."""

    def evaluate(x: Array) -> Array:
        half = np.exp(sign * abs(x) / 2)
        return scaled(x) * half * half

    return evaluate


def _j(order: int) -> Evaluated:
    """9.1.21, far out 9.2.5."""

    def evaluate(x: Array) -> Array:
        size = abs(x)
        near, far = np.minimum(size, _FAR), np.maximum(size, _FAR)
        value = _by_points(lambda angle: np.cos(order * angle - near * math.sin(angle)))
        even, odd = _hankel(order, far, -1.0)
        angle = far - (order / 2 + 0.25) * math.pi
        wave = np.sqrt(2 / (math.pi * far)) * (even * np.cos(angle) - odd * np.sin(angle))
        value = np.where(size > _FAR, wave, value)
        value = np.where(np.isinf(size), 0.0, value)
        return value * np.where(x < 0, -1.0, 1.0) if order else value

    return evaluate


def _y(order: int) -> Evaluated:
    """Neumann's series 9.1.88 of the functions J, which recur downwards (J. C. P. Miller); far out
    9.2.6.
    """

    def evaluate(x: Array) -> Array:
        near, far = np.minimum(x, _FAR), np.maximum(x, _FAR)
        above, at = x * 0, x * 0 + 1e-290
        zeroth, total, slope, norm = x * 0, x * 0, x * 0, x * 0
        first = x * 0
        last = 80
        for k in range(last, -1, -1):
            # at is J_k, above J_(k + 1), both times one number; below is J_(k - 1).
            below = 2 * k / near * at - above
            big = abs(below) > 1e200
            scale = np.where(big, 1e-200, 1.0)
            if k and k % 2 == 0:
                half = k // 2
                total = total + (-1) ** half * at / half
                slope = slope + (-1) ** half * (below - above) / (2 * half)
                norm = norm + 2 * at
            if k == 1:
                first = at
            if k == 0:
                zeroth, norm = at, norm + at
            total, slope, norm, first = (each * scale for each in (total, slope, norm, first))
            zeroth = zeroth * scale
            above, at = at * scale, below * scale
        zeroth, first, total, slope = (each / norm for each in (zeroth, first, total, slope))
        logarithm = np.log(near / 2) + np.euler_gamma
        if order == 0:
            value = 2 / math.pi * (logarithm * zeroth - 2 * total)
        else:
            value = -2 / math.pi * (zeroth / near - logarithm * first - 2 * slope)
        even, odd = _hankel(order, far, -1.0)
        angle = far - (order / 2 + 0.25) * math.pi
        wave = np.sqrt(2 / (math.pi * far)) * (even * np.sin(angle) + odd * np.cos(angle))
        value = np.where(x > _FAR, wave, value)
        value = np.where(x == 0, -math.inf, np.where(x < 0, math.nan, value))
        return np.where(np.isinf(x) & (x > 0), 0.0, value)

    return evaluate


def _scaled_k(order: int) -> Evaluated:
    """exp(x) K(x): the trapezoidal rule on 9.6.24; 9.6.13 and 9.6.11 up to 1, far out 9.7.2."""

    def evaluate(x: Array) -> Array:
        size, far = np.minimum(np.maximum(x, 1.0), _FAR), np.maximum(x, _FAR)
        step = 1 / 12
        value = 0.5 * step * (size * 0 + 1)
        for point in range(1, 80):
            bend = math.cosh(point * step)
            decay = np.exp(-size * (bend - 1))
            value = value + step * (bend if order else 1.0) * decay
        near = np.minimum(x, 1.0)
        quarter = near * near / 4
        logarithm = np.log(near / 2)
        small = near * 0
        harmonic, term = -np.euler_gamma, near * 0 + 1
        for k in range(16):
            if order == 0:
                small = small + term * (harmonic - logarithm)
            else:
                both = 2 * harmonic + 1 / (k + 1)
                small = small + near / 2 * term * (logarithm - both / 2) / (k + 1)
            harmonic += 1 / (k + 1)
            term = term * quarter / ((k + 1) * (k + 1))
        if order:
            small = small + 1 / near
        value = np.where(x < 1, small * np.exp(near), value)
        even, odd = _hankel(order, far, 1.0)
        value = np.where(x > _FAR, (even + odd) * np.sqrt(math.pi / (2 * far)), value)
        return np.where(x == 0, math.inf, np.where(x < 0, math.nan, value))

    return evaluate


_register(
    "i0e",
    _scaled_i(0),
    lambda x, y, dy: dy * (apply("i1e", x) - apply("sign", x) * y),
    "exp(-|x|) times i0.",
)
_register(
    "i1e",
    _scaled_i(1),
    lambda x, y, dy: dy * (apply("i0e", x) - y * apply("sign", x) - _over_or(y, x, 0.5)),
    "exp(-|x|) times i1.",
)
_register(
    "i0",
    _times_exp(_scaled_i(0), 1.0),
    lambda x, y, dy: dy * apply("i1", x),
    "The modified Bessel function of the first kind of order 0.",
    "cyl_bessel_i0({0})",
)
_register(
    "i1",
    _times_exp(_scaled_i(1), 1.0),
    lambda x, y, dy: dy * (apply("i0", x) - _over_or(y, x, 0.5)),
    "The modified Bessel function of the first kind of order 1.",
    "cyl_bessel_i1({0})",
)


def _over_or(y: Any, x: Any, limit: float) -> Any:
    """y / x, and its limit where x is zero."""
    zero = x.equal(0)
    safe = x + zero.cast(x.dtype)
    return apply("where", zero, apply("zeros_like", x) + limit, y / safe)


_register(
    "bessel_j0",
    _j(0),
    lambda x, y, dy: -(dy * apply("bessel_j1", x)),
    "The Bessel function of the first kind of order 0.",
    "j0({0})",
)
_register(
    "bessel_j1",
    _j(1),
    lambda x, y, dy: dy * (apply("bessel_j0", x) - _over_or(y, x, 0.5)),
    "The Bessel function of the first kind of order 1.",
    "j1({0})",
)
_register(
    "bessel_y0",
    _y(0),
    lambda x, y, dy: -(dy * apply("bessel_y1", x)),
    "The Bessel function of the second kind of order 0, for x > 0.",
    "y0({0})",
)
_register(
    "bessel_y1",
    _y(1),
    lambda x, y, dy: dy * (apply("bessel_y0", x) - y / x),
    "The Bessel function of the second kind of order 1, for x > 0.",
    "y1({0})",
)
_register(
    "scaled_modified_bessel_k0",
    _scaled_k(0),
    lambda x, y, dy: dy * (y - apply("scaled_modified_bessel_k1", x)),
    "exp(x) times the modified Bessel function of the second kind of order 0, for x > 0.",
)
_register(
    "scaled_modified_bessel_k1",
    _scaled_k(1),
    lambda x, y, dy: dy * (y - apply("scaled_modified_bessel_k0", x) - y / x),
    "exp(x) times the modified Bessel function of the second kind of order 1, for x > 0.",
)
_register(
    "modified_bessel_k0",
    _times_exp(_scaled_k(0), -1.0),
    lambda x, y, dy: -(dy * apply("modified_bessel_k1", x)),
    "The modified Bessel function of the second kind of order 0, for x > 0.",
)
_register(
    "modified_bessel_k1",
    _times_exp(_scaled_k(1), -1.0),
    lambda x, y, dy: -(dy * (apply("modified_bessel_k0", x) + y / x)),
    "The modified Bessel function of the second kind of order 1, for x > 0.",
)


# --- by formula -----------------------------------------------------------------------------------


def _sinc_slope(x: Any) -> Any:
    angle = x * math.pi
    zero = x.equal(0)
    safe = angle + zero.cast(x.dtype)
    slope = (apply("cos", safe) - apply("sin", safe) / safe) / safe * math.pi
    return apply("where", zero, apply("zeros_like", x), slope)


def _sinc(x: Any) -> Any:
    angle = x * math.pi
    return _over_or(apply("sin", angle), angle, 1.0)


register_pointwise(
    "sinc",
    _sinc,
    "sin(pi x) / (pi x), and 1 at zero.",
    slope=_sinc_slope,
)
register_pointwise(
    "spherical_bessel_j0",
    lambda x: _over_or(apply("sin", x), x, 1.0),
    "sin(x) / x, and 1 at zero.",
    slope=lambda x: _sinc_slope(x * (1 / math.pi)) * (1 / math.pi),
)
register_pointwise(
    "deg2rad",
    lambda x: x * (math.pi / 180),
    "Degrees as radians.",
    slope=lambda x: apply("zeros_like", x) + math.pi / 180,
)
register_pointwise(
    "rad2deg",
    lambda x: x * (180 / math.pi),
    "Radians as degrees.",
    slope=lambda x: apply("zeros_like", x) + 180 / math.pi,
)


def _entr(x: Any) -> Any:
    positive = x > 0
    one = apply("zeros_like", x) + 1.0
    product = -(x * apply("where", positive, x, one).log())
    outside = apply("where", x < 0, one * -math.inf, apply("zeros_like", x))
    return apply(
        "where", apply("logical_or", positive, apply("isnan", x)), product + x * 0.0, outside
    )


register_pointwise(
    "entr",
    _entr,
    "-x log(x), zero at zero and minus infinity below.",
    slope=lambda x: -x.log() - 1.0,
)


# --- of two numbers -------------------------------------------------------------------------------


def _xlogy(log: Callable[[Array], Array]) -> Evaluated:
    return lambda x, y: np.where((x == 0) & ~np.isnan(y), 0.0, x * log(y))


def _of_product(log: str, shift: float) -> Callable[[Any, Any, Any, Any], tuple[Any, Any]]:
    def gradient(x: Any, y: Any, z: Any, dz: Any) -> tuple[Any, Any]:
        nothing_there = apply("logical_and", x.equal(0), y <= -shift)
        return masked(dz * apply(log, y), apply("logical_not", nothing_there)), dz * x / (y + shift)

    return gradient


register_binary(
    "xlogy",
    _of_two(_xlogy(np.log)),
    _of_product("log", 0.0),
    dtypes=FLOATS,
    doc="x log(y), and zero where x is.",
)
register_binary(
    "xlog1py",
    _of_two(_xlogy(np.log1p)),
    _of_product("log1p", 1.0),
    dtypes=FLOATS,
    doc="x log(1 + y), and zero where x is.",
)
