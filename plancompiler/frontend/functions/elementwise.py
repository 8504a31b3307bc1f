"""Functions of each element: trigonometry, exponentials, rounding, bits, truth values, bounds.

Where a function takes two tensors, one of them may be a plain number, which gets the other's dtype.
Shapes broadcast as in NumPy.
"""

from __future__ import annotations

from typing import Any

from plancompiler.errors import TracingError
from plancompiler.frontend.functional import Tensor, full_like, unary
from plancompiler.frontend.out import takes_out
from plancompiler.ir import DType
from plancompiler.ir.operators import Scalar, TensorOperators, is_scalar
from plancompiler.ops.registry import apply


def _binary(kind: str, left: Any, right: Any) -> Any:
    if isinstance(left, TensorOperators) and is_scalar(right):
        right = left.beside(kind, _plain(right))
    elif isinstance(right, TensorOperators) and is_scalar(left):
        left = right.beside(kind, _plain(left))
    if not isinstance(left, TensorOperators) or not isinstance(right, TensorOperators):
        raise TracingError(
            f"{kind} takes two tensors, or a tensor and a number",
            got=f"{type(left).__name__} and {type(right).__name__}",
            hint="bring arrays into a job through pc.input or pc.constant",
        )
    return left._binary(kind, right)  # noqa: SLF001  # the operators' own way, and the quickest


def _plain(value: Any) -> Scalar:
    number: Scalar = value.item() if hasattr(value, "item") else value
    return number


def _number(value: Any, dtype: DType) -> Scalar:
    number = _plain(value)
    # A whole number beside a floating tensor is a number like any other.
    return float(number) if dtype.is_floating and not isinstance(number, bool) else number


# --- trigonometric and hyperbolic -----------------------------------------------------------------


@takes_out
def sin(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Sine of an angle in radians."""
    return unary("sin", x)


@takes_out
def cos(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Cosine of an angle in radians."""
    return unary("cos", x)


@takes_out
def tan(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Tangent of an angle in radians."""
    return unary("tan", x)


@takes_out
def asin(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Angle in radians whose sine is x."""
    return unary("asin", x)


@takes_out
def acos(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Angle in radians whose cosine is x."""
    return unary("acos", x)


@takes_out
def atan(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Angle in radians whose tangent is x."""
    return unary("atan", x)


@takes_out
def atan2(y: Any, x: Any, *, out: Any = None) -> Any:
    """Angle in radians of the point (x, y), from -pi to pi."""
    return _binary("atan2", y, x)


@takes_out
def sinh(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Hyperbolic sine."""
    return unary("sinh", x)


@takes_out
def cosh(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Hyperbolic cosine."""
    return unary("cosh", x)


@takes_out
def asinh(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Inverse hyperbolic sine."""
    return unary("asinh", x)


@takes_out
def acosh(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Inverse hyperbolic cosine, for x >= 1."""
    return unary("acosh", x)


@takes_out
def atanh(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Inverse hyperbolic tangent, for -1 < x < 1."""
    return unary("atanh", x)


@takes_out
def hypot(x: Any, y: Any, *, out: Any = None) -> Any:
    """sqrt(x * x + y * y), without overflow."""
    return _binary("hypot", x, y)


# --- exponentials, logarithms, error function -----------------------------------------------------


@takes_out
def exp2(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """2 to the power of x."""
    return unary("exp2", x)


@takes_out
def expm1(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """exp(x) - 1, exact near zero."""
    return unary("expm1", x)


@takes_out
def log2(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Logarithm to base 2."""
    return unary("log2", x)


@takes_out
def log10(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Logarithm to base 10."""
    return unary("log10", x)


@takes_out
def log1p(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """log(1 + x), exact near zero."""
    return unary("log1p", x)


@takes_out
def logaddexp(x: Any, y: Any, *, out: Any = None) -> Any:
    """log(exp(x) + exp(y)), without overflow."""
    return _binary("logaddexp", x, y)


@takes_out
def erf(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Error function (W. J. Cody, 1969)."""
    return unary("erf", x)


@takes_out
def reciprocal(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """1 / x."""
    return unary("reciprocal", x)


# --- rounding, remainders, signs ------------------------------------------------------------------


@takes_out
def floor(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Greatest whole number up to x; its gradient is zero."""
    return unary("floor", x)


@takes_out
def ceil(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Least whole number from x on; its gradient is zero."""
    return unary("ceil", x)


@takes_out
def round(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Nearest whole number, of two the even one; its gradient is zero."""
    return unary("round", x)


@takes_out
def trunc(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x without its fraction; its gradient is zero."""
    return unary("trunc", x)


@takes_out
def sign(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """-1, 0 or 1."""
    return unary("sign", x)


@takes_out
def copysign(x: Any, y: Any, *, out: Any = None) -> Any:
    """Absolute value of x with the sign of y."""
    return _binary("copysign", x, y)


@takes_out
def fmod(x: Any, y: Any, *, out: Any = None) -> Any:
    """What is left of x / y, with the sign of x. Whole numbers over zero fail the run."""
    return _binary("fmod", x, y)


@takes_out
def remainder(x: Any, y: Any, *, out: Any = None) -> Any:
    """What is left of x / y, with the sign of y. Whole numbers over zero fail the run."""
    return _binary("remainder", x, y)


@takes_out
def floor_divide(x: Any, y: Any, *, out: Any = None) -> Any:
    """Greatest whole number up to x / y. Whole numbers over zero fail the run."""
    return _binary("floor_divide", x, y)


# --- bits and truth values ------------------------------------------------------------------------


@takes_out
def bitwise_and(x: Any, y: Any, *, out: Any = None) -> Any:
    """Bits set in both, of whole numbers or bool."""
    return _binary("bitwise_and", x, y)


@takes_out
def bitwise_or(x: Any, y: Any, *, out: Any = None) -> Any:
    """Bits set in either, of whole numbers or bool."""
    return _binary("bitwise_or", x, y)


@takes_out
def bitwise_xor(x: Any, y: Any, *, out: Any = None) -> Any:
    """Bits set in one only, of whole numbers or bool."""
    return _binary("bitwise_xor", x, y)


@takes_out
def bitwise_not(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """All bits flipped, of whole numbers or bool."""
    return unary("bitwise_not", x)


@takes_out
def shift_left(x: Any, y: Any, *, out: Any = None) -> Any:
    """Bits of x moved y places up."""
    return _binary("shift_left", x, y)


@takes_out
def shift_right(x: Any, y: Any, *, out: Any = None) -> Any:
    """Bits of x moved y places down; the sign stays."""
    return _binary("shift_right", x, y)


@takes_out
def logical_and(x: Any, y: Any, *, out: Any = None) -> Any:
    """True where both are, of bool."""
    return _binary("logical_and", x, y)


@takes_out
def logical_or(x: Any, y: Any, *, out: Any = None) -> Any:
    """True where either is, of bool."""
    return _binary("logical_or", x, y)


@takes_out
def logical_xor(x: Any, y: Any, *, out: Any = None) -> Any:
    """True where one only is, of bool."""
    return _binary("logical_xor", x, y)


@takes_out
def logical_not(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """True where x is False, of bool."""
    return unary("logical_not", x)


@takes_out
def isnan(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """True where x is not a number."""
    return unary("isnan", x)


@takes_out
def isinf(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """True where x is infinite."""
    return unary("isinf", x)


@takes_out
def isfinite(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """True where x is a finite number."""
    return unary("isfinite", x)


# --- bounds and mixtures --------------------------------------------------------------------------


@takes_out
def clip(
    x: Tensor, low: Scalar | None = None, high: Scalar | None = None, *, out: Tensor | None = None
) -> Tensor:
    """x, but not below `low` nor above `high`; at least one of them is given."""
    bounds = {"low": low, "high": high}
    found: Tensor = apply(
        "clip",
        x,
        **{name: _number(each, x.dtype) for name, each in bounds.items() if each is not None},
    )
    return found


@takes_out
def nan_to_num(
    x: Tensor,
    nan: float = 0.0,
    posinf: float | None = None,
    neginf: float | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """x with numbers in place of NaN, infinity and minus infinity (the largest finite ones)."""
    attrs = {"nan": float(nan)}
    if posinf is not None:
        attrs["posinf"] = float(posinf)
    if neginf is not None:
        attrs["neginf"] = float(neginf)
    found: Tensor = apply("nan_to_num", x, **attrs)
    return found


@takes_out
def lerp(x: Tensor, y: Tensor, weight: Tensor | float, *, out: Tensor | None = None) -> Tensor:
    """x + weight * (y - x)."""
    number = not isinstance(weight, TensorOperators) and is_scalar(weight)
    share: Any = full_like(x, _number(weight, x.dtype), shape=()) if number else weight
    found: Tensor = apply("lerp", x, y, share)
    return found


@takes_out
def masked_fill(x: Tensor, mask: Tensor, value: Scalar, *, out: Tensor | None = None) -> Tensor:
    """`value` where the mask is True, else x."""
    found: Tensor = apply("where", mask, full_like(x, _number(value, x.dtype), shape=()), x)
    return found


@takes_out
def zeros_like(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Zeros with the shape, dtype and placement of x."""
    return full_like(x, _number(0, x.dtype) if x.dtype is not DType.BOOL else False)


@takes_out
def ones_like(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Ones with the shape, dtype and placement of x."""
    return full_like(x, _number(1, x.dtype) if x.dtype is not DType.BOOL else True)
