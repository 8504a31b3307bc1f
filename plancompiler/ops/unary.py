"""More functions of one number: trigonometric, exponential, rounding, error function, predicates.

Each is the NumPy function of its name; `elementwise` has the most frequent ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from plancompiler.errors import AttributeValueError
from plancompiler.ir.dtype import DType
from plancompiler.ops.attributes import Bool, Float, Number
from plancompiler.ops.check import (
    FLOATS,
    NUMBERS,
    expect_dtype,
)
from plancompiler.ops.elementwise import (
    UNARY_RULE,
    check_scalar,
    register_unary,
    ufunc_kernel,
    unary_infer,
)
from plancompiler.ops.erf import WORK, erf
from plancompiler.ops.gradient import masked, nothing, of_one
from plancompiler.ops.kernel import blocks, copy_unless_shared, in_float32, scratch
from plancompiler.ops.registry import (
    Arrays,
    AttrMap,
    KernelContext,
    Types,
    apply,
    define_op,
)
from plancompiler.ops.shape import keeps_extremes

# --- trigonometric and hyperbolic -----------------------------------------------------------------

register_unary(
    "sin",
    np.sin,
    lambda x, y, dy: dy * apply("cos", x),
    doc="The sine, of radians.",
)
register_unary(
    "cos",
    np.cos,
    lambda x, y, dy: -(dy * apply("sin", x)),
    doc="The cosine, of radians.",
)
register_unary(
    "tan",
    np.tan,
    lambda x, y, dy: dy * (y * y + 1.0),
    doc="The tangent, of radians.",
)
register_unary(
    "asin",
    np.arcsin,
    lambda x, y, dy: dy * apply("rsqrt", 1.0 - x * x),
    doc="The angle in radians whose sine is x.",
)
register_unary(
    "acos",
    np.arccos,
    lambda x, y, dy: -(dy * apply("rsqrt", 1.0 - x * x)),
    doc="The angle in radians whose cosine is x.",
)
register_unary(
    "atan",
    np.arctan,
    lambda x, y, dy: dy / (x * x + 1.0),
    doc="The angle in radians whose tangent is x.",
)
register_unary(
    "sinh",
    np.sinh,
    lambda x, y, dy: dy * apply("cosh", x),
    doc="The hyperbolic sine.",
)
register_unary(
    "cosh",
    np.cosh,
    lambda x, y, dy: dy * apply("sinh", x),
    doc="The hyperbolic cosine.",
)
register_unary(
    "asinh",
    np.arcsinh,
    lambda x, y, dy: dy * apply("rsqrt", x * x + 1.0),
    doc="The inverse hyperbolic sine.",
)
register_unary(
    "acosh",
    np.arccosh,
    lambda x, y, dy: dy * apply("rsqrt", x * x - 1.0),
    doc="The inverse hyperbolic cosine, for x >= 1.",
)
register_unary(
    "atanh",
    np.arctanh,
    lambda x, y, dy: dy / (1.0 - x * x),
    doc="The inverse hyperbolic tangent, for -1 < x < 1.",
)


# --- exponentials, logarithms, reciprocal ---------------------------------------------------------

register_unary(
    "exp2",
    np.exp2,
    lambda x, y, dy: dy * y * math.log(2),
    doc="2 to the power of x.",
)
register_unary(
    "expm1",
    np.expm1,
    lambda x, y, dy: dy * (y + 1.0),
    doc="exp(x) - 1, exact near zero.",
)
register_unary(
    "log2",
    np.log2,
    lambda x, y, dy: dy / x * (1 / math.log(2)),
    doc="The logarithm to base 2.",
)
register_unary(
    "log10",
    np.log10,
    lambda x, y, dy: dy / x * (1 / math.log(10)),
    doc="The logarithm to base 10.",
)
register_unary(
    "log1p",
    np.log1p,
    lambda x, y, dy: dy / (x + 1.0),
    doc="log(1 + x), exact near zero.",
)
register_unary(
    "reciprocal",
    np.reciprocal,
    lambda x, y, dy: -(dy * y * y),
    code="(T(1) / {0})",
    doc="1 / x.",
)


# --- rounding -------------------------------------------------------------------------------------

register_unary(
    "floor",
    np.floor,
    lambda x, y, dy: nothing(dy),
    extra=keeps_extremes,
    doc="The greatest whole number up to x; its gradient is zero.",
)
register_unary(
    "ceil",
    np.ceil,
    lambda x, y, dy: nothing(dy),
    extra=keeps_extremes,
    doc="The least whole number from x on; its gradient is zero.",
)
register_unary(
    "round",
    np.rint,
    lambda x, y, dy: nothing(dy),
    extra=keeps_extremes,
    code="rint({0})",
    doc="The nearest whole number, of two the even one; its gradient is zero.",
)
register_unary(
    "trunc",
    np.trunc,
    lambda x, y, dy: nothing(dy),
    extra=keeps_extremes,
    doc="x without its fraction; its gradient is zero.",
)


# --- error function -------------------------------------------------------------------------------


def _erf_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    for x, y in blocks(*inputs, *outputs):
        erf(x, y, [scratch(context, name, x.shape, x.dtype) for name in WORK])


register_unary(
    "erf",
    in_float32(_erf_kernel),
    lambda x, y, dy: dy * (-(x * x)).exp() * (2 / math.sqrt(math.pi)),
    portable=False,
    doc="The error function (rational approximations of W. J. Cody, 1969).",
)


# --- predicates -----------------------------------------------------------------------------------


def _equals(number: float) -> Callable[..., Any]:
    return lambda x, out: np.equal(x, number, out=out)


def _register_predicate(kind: str, ufunc: Callable[..., Any], doc: str, code: str) -> None:
    define_op(
        kind,
        infer=unary_infer(kind, FLOATS, DType.BOOL),
        rule=UNARY_RULE,
        kernel=ufunc_kernel(ufunc),
        elementwise=True,
        code=code,
        doc=doc,
    )


_register_predicate("isnan", np.isnan, "True where x is not a number.", "({0} != {0})")
_register_predicate("isinf", np.isinf, "True where x is infinite.", "(fabs({0}) == INFINITY)")
_register_predicate(
    "isfinite", np.isfinite, "True where x is a finite number.", "(fabs({0}) < INFINITY)"
)
_register_predicate(
    "signbit", np.signbit, "True where x has a minus sign, also -0.0.", "(signbit({0}) != 0)"
)
_register_predicate("isposinf", _equals(np.inf), "True where x is infinity.", "({0} == INFINITY)")
_register_predicate(
    "isneginf", _equals(-np.inf), "True where x is minus infinity.", "({0} == -INFINITY)"
)


# --- clip -----------------------------------------------------------------------------------------


def _clip_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_dtype("clip", inputs[0], NUMBERS)
    given = [name for name in ("low", "high") if attrs[name] is not None]
    for name in given:
        check_scalar("clip", inputs[0], attrs, name)
    if not given or (len(given) == 2 and not attrs["low"] <= attrs["high"]):
        raise AttributeValueError(
            "clip needs bounds in order",
            got=", ".join(f"{name}={attrs[name]!r}" for name in given) or "no bound",
            expected="low, high or both, with low <= high",
        )
    return inputs


def _clip_gradient(attrs: AttrMap, x: Any, y: Any, dy: Any) -> Any:
    if attrs["edges"]:
        return masked(dy, x.equal(y))
    if "low" in attrs:
        dy = masked(dy, x > attrs["low"])
    if "high" in attrs:
        dy = masked(dy, x < attrs["high"])
    return dy


define_op(
    "clip",
    infer=_clip_infer,
    rule=UNARY_RULE,
    inputs=1,
    attrs=(
        Number("low", None),
        Number("high", None),
        Bool("edges", True),
    ),
    kernel=lambda context, inputs, outputs: np.clip(
        inputs[0], context.attrs["low"], context.attrs["high"], out=outputs[0]
    ),
    gradient=of_one(_clip_gradient),
    extra=keeps_extremes,
    inplace=((0, 0),),
    elementwise=True,
    doc="x, but not below `low` nor above `high` (numbers; one may be absent). Elements that "
    "stay as they are pass the gradient on, those at a bound unless `edges` is False.",
)


# --- nan_to_num -----------------------------------------------------------------------------------


def _replacements(attrs: AttrMap, dtype: np.dtype[Any]) -> tuple[float, float, float]:
    """What stands for NaN, infinity and minus infinity."""
    largest, (high, low) = DType.parse(dtype).range[1], (attrs["posinf"], attrs["neginf"])
    return attrs["nan"], largest if high is None else high, -largest if low is None else low


def _nan_to_num_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    nan, positive, negative = _replacements(context.attrs, inputs[0].dtype)
    for x, y in blocks(*inputs, *outputs):
        copy_unless_shared(x, y)
        mask = scratch(context, "mask", x.shape, np.dtype(np.bool_))
        np.isfinite(y, out=mask)
        if mask.all():
            continue
        # Infinities first: what replaces NaN may be one.
        np.equal(y, np.inf, out=mask)
        other = y == -np.inf
        unknown = np.isnan(y)
        np.copyto(y, positive, where=mask)
        np.copyto(y, negative, where=other)
        np.copyto(y, nan, where=unknown)


define_op(
    "nan_to_num",
    infer="x F -> y F",
    rule=UNARY_RULE,
    attrs=(
        Float("nan", 0.0),
        Float("posinf", None),
        Float("neginf", None),
    ),
    kernel=_nan_to_num_kernel,
    gradient=of_one(lambda attrs, x, y, dy: masked(dy, apply("isfinite", x))),
    inplace=((0, 0),),
    takes_bfloat16=True,
    elementwise=True,
    portable=False,
    doc="x with `nan`, `posinf` and `neginf` (by default 0 and the largest finite numbers) in "
    "place of what is not finite; no gradient flows there.",
)
