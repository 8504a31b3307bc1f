"""Functions of each element: trigonometry, exponentials, rounding, bits, truth values, bounds.

Where a function takes two tensors, one of them may be a plain number, which gets the other's dtype.
Shapes broadcast as in NumPy.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any, overload

from plancompiler.errors import DTypeError, TracingError
from plancompiler.frontend.functions.derived import (
    Tensor,
    arithmetic,
    binary,
    joined,
    plain_number,
    quotient,
    scaled,
    unary,
)
from plancompiler.frontend.out import takes_out
from plancompiler.ir import DType
from plancompiler.ir.indexing import places_of_true
from plancompiler.ir.operators import Scalar, TensorOperators, filled, is_scalar
from plancompiler.ops.registry import apply_one

__all__ = [
    "abs",
    "acos",
    "acosh",
    "add",
    "addcdiv",
    "addcmul",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "bitwise_xor",
    "cast",
    "ceil",
    "clip",
    "clone",
    "copysign",
    "cos",
    "cosh",
    "div",
    "empty_like",
    "equal",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "floor_divide",
    "fmax",
    "fmin",
    "fmod",
    "full_like",
    "gcd",
    "greater",
    "greater_equal",
    "heaviside",
    "hypot",
    "isclose",
    "isfinite",
    "isinf",
    "isnan",
    "lcm",
    "lerp",
    "less",
    "less_equal",
    "log",
    "log1p",
    "log2",
    "log10",
    "logaddexp",
    "logaddexp2",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logit",
    "masked_fill",
    "maximum",
    "minimum",
    "mul",
    "nan_to_num",
    "neg",
    "nextafter",
    "not_equal",
    "ones_like",
    "pow",
    "reciprocal",
    "remainder",
    "round",
    "rsqrt",
    "shift_left",
    "shift_right",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "sub",
    "tan",
    "trunc",
    "where",
    "xlog1py",
    "xlogy",
    "zeros_like",
    "zeta",
]


def _number(value: Any, dtype: DType) -> Scalar:
    number = plain_number(value)
    # A whole number beside a floating tensor is a number like any other.
    return float(number) if dtype.is_floating and not isinstance(number, bool) else number


# --- arithmetic and comparisons ------------------------------------------------------------------

add = scaled("add")
sub = scaled("sub")
mul = arithmetic("mul")
div = quotient("div")
pow = arithmetic("pow")
maximum = arithmetic("maximum")
minimum = arithmetic("minimum")
less = arithmetic("less")
less_equal = arithmetic("less_equal")
greater = arithmetic("greater")
greater_equal = arithmetic("greater_equal")
equal = arithmetic("equal")
not_equal = arithmetic("not_equal")
abs = unary("abs")
exp = unary("exp")
log = unary("log")
sqrt = unary("sqrt")
rsqrt = unary("rsqrt")
square = unary("square")


@takes_out
def neg(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """-x."""
    return -x


@takes_out
def cast(x: Tensor, dtype: DType | str, *, out: Tensor | None = None) -> Tensor:
    """The same values as another dtype."""
    return x.cast(dtype)


@takes_out
def clone(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The same values in memory of their own; gradients flow through it."""
    return x.cast(x.dtype)


@overload
def where(condition: Tensor) -> tuple[Tensor, ...]: ...


@overload
def where(
    condition: Tensor, x: Tensor | Scalar, y: Tensor | Scalar, *, out: Tensor | None = None
) -> Tensor: ...


@takes_out
def where(
    condition: Tensor,
    x: Tensor | Scalar | None = None,
    y: Tensor | Scalar | None = None,
    *,
    out: Tensor | None = None,
) -> Any:
    """x where the condition holds, else y: tensors or numbers. Shapes broadcast. Of two numbers the
    result is float32, int64 or bool.

    Without x and y the places where the condition holds, as `nonzero` gives them.
    """
    if x is None or y is None:
        if x is None and y is None:
            return places_of_true(condition)
        raise TracingError("where needs both x and y, or neither")
    if isinstance(x, TensorOperators) and not isinstance(y, TensorOperators):
        y = _beside(x, y)
    elif isinstance(y, TensorOperators) and not isinstance(x, TensorOperators):
        x = _beside(y, x)
    elif is_scalar(x) and is_scalar(y):
        x, y = _both(condition, x, y)
    if not isinstance(x, TensorOperators) or not isinstance(y, TensorOperators):
        raise TracingError("where chooses among tensors and numbers")
    return joined("where", (condition, x, y), first=1)


def _both(condition: Tensor, x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Two plain numbers as tensors of the dtype that plain numbers have."""
    numbers = plain_number(x), plain_number(y)
    kinds = {bool: DType.BOOL, int: DType.INT64, float: DType.FLOAT32}
    kind = next(each for each in (float, int, bool) if any(type(n) is each for n in numbers))
    one, other = (filled(condition, kind(each), (), kinds[kind]) for each in numbers)
    return one, other


def _beside(x: Tensor, number: Any) -> Tensor:
    """A number as a tensor beside another one; where that cannot hold it, of a wider dtype."""
    try:
        return full_like(x, number, shape=())
    except DTypeError:
        return x.beside("where", plain_number(number))


@takes_out
def full_like(
    x: Tensor,
    value: Scalar,
    shape: Sequence[int] | None = None,
    dtype: DType | str | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """A tensor of one number with the placement of `x`, and its shape and dtype, unless given."""
    kind = x.dtype if dtype is None else DType.parse(dtype)
    if dtype is not None:
        value = bool(value) if kind is DType.BOOL else _number(value, kind)
    return filled(x, value, None if shape is None else tuple(shape), kind)


# --- trigonometric and hyperbolic -----------------------------------------------------------------


sin = unary("sin")
cos = unary("cos")
tan = unary("tan")
asin = unary("asin")
acos = unary("acos")
atan = unary("atan")
atan2 = binary("atan2")
sinh = unary("sinh")
cosh = unary("cosh")
asinh = unary("asinh")
acosh = unary("acosh")
atanh = unary("atanh")
hypot = binary("hypot")


# --- exponentials, logarithms, error function -----------------------------------------------------


exp2 = unary("exp2")
expm1 = unary("expm1")
log2 = unary("log2")
log10 = unary("log10")
log1p = unary("log1p")
logaddexp = binary("logaddexp")
erf = unary("erf")
reciprocal = unary("reciprocal")


# --- rounding, remainders, signs ------------------------------------------------------------------


floor = unary("floor")
ceil = unary("ceil")
_whole = unary("round")


@takes_out
def round(x: Tensor, decimals: int = 0, *, out: Tensor | None = None) -> Tensor:
    """The nearest numbers with so many decimal places; of two that are equally near the even one.
    Below 0 to tens, hundreds and so on.
    """
    if not decimals:
        return _whole(x)
    if not x.dtype.is_floating:
        if decimals > 0:
            return x.cast(x.dtype)
        return round(x.cast(DType.FLOAT64), decimals).cast(x.dtype)
    scale = 10.0 ** builtins.abs(decimals)
    return _whole(x * scale) / scale if decimals > 0 else _whole(x / scale) * scale


trunc = unary("trunc")
sign = unary("sign")
copysign = binary("copysign")
fmod = binary("fmod")
remainder = binary("remainder")
floor_divide = binary("floor_divide")


# --- bits and truth values ------------------------------------------------------------------------


bitwise_and = binary("bitwise_and")
bitwise_or = binary("bitwise_or")
bitwise_xor = binary("bitwise_xor")
bitwise_not = unary("bitwise_not")
shift_left = binary("shift_left")
shift_right = binary("shift_right")
logical_and = binary("logical_and")
logical_or = binary("logical_or")
logical_xor = binary("logical_xor")
logical_not = unary("logical_not")
isnan = unary("isnan")
isinf = unary("isinf")
isfinite = unary("isfinite")


@takes_out
def isclose(
    x: Tensor | Scalar,
    y: Tensor | Scalar,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    equal_nan: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Where |x - y| <= atol + rtol · |y|, as in NumPy: infinities are close to themselves only, and
    NaN to NaN only with `equal_nan`. One of them may be a number.
    """
    if not isinstance(x, TensorOperators):
        if not isinstance(y, TensorOperators):
            raise TracingError("isclose needs a tensor for at least one of x and y")
        x = full_like(y, _number(x, y.dtype), shape=())
    if not isinstance(y, TensorOperators):
        y = full_like(x, _number(y, x.dtype), shape=())
    close: Tensor = apply_one(
        "isclose", x, y, rtol=float(rtol), atol=float(atol), equal_nan=equal_nan
    )
    return close


# --- of two numbers -------------------------------------------------------------------------------


fmax = binary("fmax")
fmin = binary("fmin")
gcd = binary("gcd")
heaviside = binary("heaviside")
lcm = binary("lcm")
logaddexp2 = binary("logaddexp2")
nextafter = binary("nextafter")
xlog1py = binary("xlog1py")
xlogy = binary("xlogy")
zeta = binary("zeta")


# --- bounds and mixtures --------------------------------------------------------------------------


@takes_out
def clip(
    x: Tensor,
    low: Tensor | Scalar | None = None,
    high: Tensor | Scalar | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """x, but not below `low` nor above `high`; at least one of them is given. Bounds that are
    tensors broadcast, and get the gradient where they are the result.
    """
    if isinstance(low, TensorOperators) or isinstance(high, TensorOperators):
        low, high = (_bound(x, each) for each in (low, high))
        raised: Tensor = x if low is None else maximum(x, low)
        bounded: Tensor = raised if high is None else minimum(raised, high)
        return bounded
    bounds = {"low": low, "high": high}
    return apply_one(
        "clip",
        x,
        **{name: _number(each, x.dtype) for name, each in bounds.items() if each is not None},
    )


def _bound(x: Tensor, bound: Any) -> Any:
    """A bound. Without axes, or of whole numbers, it counts in x's dtype, as a number would."""
    if not isinstance(bound, TensorOperators) or not x.dtype.is_floating:
        return bound
    return bound if bound.ndim and bound.dtype.is_floating else bound.cast(x.dtype)


@takes_out
def nan_to_num(
    x: Tensor,
    nan: float | None = 0.0,
    posinf: float | None = None,
    neginf: float | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """x with numbers in place of NaN, infinity and minus infinity (the largest finite ones)."""
    if not x.dtype.is_floating:
        return clone(x)
    attrs = {"nan": 0.0 if nan is None else float(nan)}
    if posinf is not None:
        attrs["posinf"] = float(posinf)
    if neginf is not None:
        attrs["neginf"] = float(neginf)
    return apply_one("nan_to_num", x, **attrs)


@takes_out
def lerp(x: Tensor, y: Tensor, weight: Tensor | float, *, out: Tensor | None = None) -> Tensor:
    """x + weight * (y - x)."""
    number = not isinstance(weight, TensorOperators) and is_scalar(weight)
    share: Any = full_like(x, _number(weight, x.dtype), shape=()) if number else weight
    return apply_one("lerp", x, y, share)


@takes_out
def masked_fill(
    x: Tensor, mask: Tensor, value: Tensor | Scalar, *, out: Tensor | None = None
) -> Tensor:
    """`value` where the mask is True, else x; a tensor as value gets a gradient, too."""
    if isinstance(value, TensorOperators):
        return apply_one("where", mask, value, x)
    return apply_one("where", mask, full_like(x, _number(value, x.dtype), shape=()), x)


@takes_out
def zeros_like(x: Tensor, dtype: DType | str | None = None, *, out: Tensor | None = None) -> Tensor:
    """Zeros with the shape and placement of x, and its dtype, unless given."""
    return full_like(x, 0, dtype=x.dtype if dtype is None else dtype)


@takes_out
def ones_like(x: Tensor, dtype: DType | str | None = None, *, out: Tensor | None = None) -> Tensor:
    """Ones with the shape and placement of x, and its dtype, unless given."""
    return full_like(x, 1, dtype=x.dtype if dtype is None else dtype)


@takes_out
def empty_like(x: Tensor, dtype: DType | str | None = None, *, out: Tensor | None = None) -> Tensor:
    """`zeros_like`: no tensor has unset elements."""
    return zeros_like(x, dtype)


@takes_out
def addcmul(
    x: Tensor, a: Tensor, b: Tensor, value: Scalar = 1, *, out: Tensor | None = None
) -> Tensor:
    """x + value * a * b."""
    return x + (a * b if value == 1 else a * b * value)


@takes_out
def addcdiv(
    x: Tensor, a: Tensor, b: Tensor, value: Scalar = 1, *, out: Tensor | None = None
) -> Tensor:
    """x + value * a / b."""
    return x + (a / b if value == 1 else a / b * value)


@takes_out
def logit(x: Tensor, eps: float | None = None, *, out: Tensor | None = None) -> Tensor:
    """log(x / (1 - x)), of x between `eps` and 1 - `eps`, if that is given."""
    share = x if eps is None else clip(x, eps, 1.0 - eps)
    logarithm: Tensor = log(share / (1.0 - share))
    return logarithm
