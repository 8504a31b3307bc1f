"""Functions of each element: trigonometry, exponentials, rounding, bits, truth values, bounds.

Where a function takes two tensors, one of them may be a plain number, which gets the other's dtype.
Shapes broadcast as in NumPy.
"""

from __future__ import annotations

from typing import Any

from plancompiler.errors import TracingError
from plancompiler.frontend.functional import Tensor, full_like
from plancompiler.ir import DType
from plancompiler.ir.operators import Scalar, TensorOperators, is_scalar
from plancompiler.ops.registry import apply


def _unary(kind: str, x: Tensor) -> Tensor:
    found: Tensor = apply(kind, x)
    return found


def _binary(kind: str, left: Any, right: Any) -> Any:
    if isinstance(left, TensorOperators) and is_scalar(right):
        right = full_like(left, _number(right, left.dtype), shape=())
    elif isinstance(right, TensorOperators) and is_scalar(left):
        left = full_like(right, _number(left, right.dtype), shape=())
    if not isinstance(left, TensorOperators) or not isinstance(right, TensorOperators):
        raise TracingError(
            f"{kind} takes two tensors, or a tensor and a number",
            got=f"{type(left).__name__} and {type(right).__name__}",
            hint="bring arrays into a job through pc.input or pc.constant",
        )
    return apply(kind, left, right)


def _number(value: Any, dtype: DType) -> Scalar:
    number: Scalar = value.item() if hasattr(value, "item") else value
    # A whole number beside a floating tensor is a number like any other.
    return float(number) if dtype.is_floating and not isinstance(number, bool) else number


# --- trigonometric and hyperbolic -----------------------------------------------------------------


def sin(x: Tensor) -> Tensor:
    """Sine of an angle in radians."""
    return _unary("sin", x)


def cos(x: Tensor) -> Tensor:
    """Cosine of an angle in radians."""
    return _unary("cos", x)


def tan(x: Tensor) -> Tensor:
    """Tangent of an angle in radians."""
    return _unary("tan", x)


def asin(x: Tensor) -> Tensor:
    """Angle in radians whose sine is x."""
    return _unary("asin", x)


def acos(x: Tensor) -> Tensor:
    """Angle in radians whose cosine is x."""
    return _unary("acos", x)


def atan(x: Tensor) -> Tensor:
    """Angle in radians whose tangent is x."""
    return _unary("atan", x)


def atan2(y: Any, x: Any) -> Any:
    """Angle in radians of the point (x, y), from -pi to pi."""
    return _binary("atan2", y, x)


def sinh(x: Tensor) -> Tensor:
    """Hyperbolic sine."""
    return _unary("sinh", x)


def cosh(x: Tensor) -> Tensor:
    """Hyperbolic cosine."""
    return _unary("cosh", x)


def asinh(x: Tensor) -> Tensor:
    """Inverse hyperbolic sine."""
    return _unary("asinh", x)


def acosh(x: Tensor) -> Tensor:
    """Inverse hyperbolic cosine, for x >= 1."""
    return _unary("acosh", x)


def atanh(x: Tensor) -> Tensor:
    """Inverse hyperbolic tangent, for -1 < x < 1."""
    return _unary("atanh", x)


def hypot(x: Any, y: Any) -> Any:
    """sqrt(x * x + y * y), without overflow."""
    return _binary("hypot", x, y)


# --- exponentials, logarithms, error function -----------------------------------------------------


def exp2(x: Tensor) -> Tensor:
    """2 to the power of x."""
    return _unary("exp2", x)


def expm1(x: Tensor) -> Tensor:
    """exp(x) - 1, exact near zero."""
    return _unary("expm1", x)


def log2(x: Tensor) -> Tensor:
    """Logarithm to base 2."""
    return _unary("log2", x)


def log10(x: Tensor) -> Tensor:
    """Logarithm to base 10."""
    return _unary("log10", x)


def log1p(x: Tensor) -> Tensor:
    """log(1 + x), exact near zero."""
    return _unary("log1p", x)


def logaddexp(x: Any, y: Any) -> Any:
    """log(exp(x) + exp(y)), without overflow."""
    return _binary("logaddexp", x, y)


def erf(x: Tensor) -> Tensor:
    """Error function (W. J. Cody, 1969)."""
    return _unary("erf", x)


def reciprocal(x: Tensor) -> Tensor:
    """1 / x."""
    return _unary("reciprocal", x)


# --- rounding, remainders, signs ------------------------------------------------------------------


def floor(x: Tensor) -> Tensor:
    """Greatest whole number up to x; its gradient is zero."""
    return _unary("floor", x)


def ceil(x: Tensor) -> Tensor:
    """Least whole number from x on; its gradient is zero."""
    return _unary("ceil", x)


def round(x: Tensor) -> Tensor:
    """Nearest whole number, of two the even one; its gradient is zero."""
    return _unary("round", x)


def trunc(x: Tensor) -> Tensor:
    """x without its fraction; its gradient is zero."""
    return _unary("trunc", x)


def sign(x: Tensor) -> Tensor:
    """-1, 0 or 1."""
    return _unary("sign", x)


def copysign(x: Any, y: Any) -> Any:
    """Absolute value of x with the sign of y."""
    return _binary("copysign", x, y)


def fmod(x: Any, y: Any) -> Any:
    """What is left of x / y, with the sign of x. Whole numbers over zero fail the run."""
    return _binary("fmod", x, y)


def remainder(x: Any, y: Any) -> Any:
    """What is left of x / y, with the sign of y. Whole numbers over zero fail the run."""
    return _binary("remainder", x, y)


def floor_divide(x: Any, y: Any) -> Any:
    """Greatest whole number up to x / y. Whole numbers over zero fail the run."""
    return _binary("floor_divide", x, y)


# --- bits and truth values ------------------------------------------------------------------------


def bitwise_and(x: Any, y: Any) -> Any:
    """Bits set in both, of whole numbers or bool."""
    return _binary("bitwise_and", x, y)


def bitwise_or(x: Any, y: Any) -> Any:
    """Bits set in either, of whole numbers or bool."""
    return _binary("bitwise_or", x, y)


def bitwise_xor(x: Any, y: Any) -> Any:
    """Bits set in one only, of whole numbers or bool."""
    return _binary("bitwise_xor", x, y)


def bitwise_not(x: Tensor) -> Tensor:
    """All bits flipped, of whole numbers or bool."""
    return _unary("bitwise_not", x)


def shift_left(x: Any, y: Any) -> Any:
    """Bits of x moved y places up."""
    return _binary("shift_left", x, y)


def shift_right(x: Any, y: Any) -> Any:
    """Bits of x moved y places down; the sign stays."""
    return _binary("shift_right", x, y)


def logical_and(x: Any, y: Any) -> Any:
    """True where both are, of bool."""
    return _binary("logical_and", x, y)


def logical_or(x: Any, y: Any) -> Any:
    """True where either is, of bool."""
    return _binary("logical_or", x, y)


def logical_xor(x: Any, y: Any) -> Any:
    """True where one only is, of bool."""
    return _binary("logical_xor", x, y)


def logical_not(x: Tensor) -> Tensor:
    """True where x is False, of bool."""
    return _unary("logical_not", x)


def isnan(x: Tensor) -> Tensor:
    """True where x is not a number."""
    return _unary("isnan", x)


def isinf(x: Tensor) -> Tensor:
    """True where x is infinite."""
    return _unary("isinf", x)


def isfinite(x: Tensor) -> Tensor:
    """True where x is a finite number."""
    return _unary("isfinite", x)


# --- bounds and mixtures --------------------------------------------------------------------------


def clip(x: Tensor, low: Scalar | None = None, high: Scalar | None = None) -> Tensor:
    """x, but not below `low` nor above `high`; at least one of them is given."""
    bounds = {"low": low, "high": high}
    found: Tensor = apply(
        "clip",
        x,
        **{name: _number(each, x.dtype) for name, each in bounds.items() if each is not None},
    )
    return found


def nan_to_num(
    x: Tensor, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    """x with numbers in place of NaN, infinity and minus infinity (the largest finite ones)."""
    attrs = {"nan": float(nan)}
    if posinf is not None:
        attrs["posinf"] = float(posinf)
    if neginf is not None:
        attrs["neginf"] = float(neginf)
    found: Tensor = apply("nan_to_num", x, **attrs)
    return found


def lerp(x: Tensor, y: Tensor, weight: Tensor | float) -> Tensor:
    """x + weight * (y - x)."""
    share = full_like(x, float(weight), shape=()) if isinstance(weight, (int, float)) else weight
    found: Tensor = apply("lerp", x, y, share)
    return found


def masked_fill(x: Tensor, mask: Tensor, value: Scalar) -> Tensor:
    """`value` where the mask is True, else x."""
    found: Tensor = apply("where", mask, full_like(x, _number(value, x.dtype), shape=()), x)
    return found


def zeros_like(x: Tensor) -> Tensor:
    """Zeros with the shape, dtype and placement of x."""
    return full_like(x, _number(0, x.dtype) if x.dtype is not DType.BOOL else False)


def ones_like(x: Tensor) -> Tensor:
    """Ones with the shape, dtype and placement of x."""
    return full_like(x, _number(1, x.dtype) if x.dtype is not DType.BOOL else True)
