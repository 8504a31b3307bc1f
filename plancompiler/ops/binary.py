"""More functions of two numbers, bitwise and logical ones, and interpolation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from plancompiler.errors import ExecutionError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ir.sbp import Reduction
from plancompiler.ops.check import (
    FLOATS,
    INTEGERS,
    broadcast_shapes,
    expect_dtype,
    expect_same_dtype,
)
from plancompiler.ops.elementwise import (
    UNARY_RULE,
    BinaryGradient,
    keeps,
    register_binary,
    ufunc_kernel,
    unary_infer,
)
from plancompiler.ops.gradient import masked, nothing, over_positive, reduce_to
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    KernelContext,
    Tensors,
    Types,
    apply,
    define_op,
)

_BOOL = frozenset({DType.BOOL})
_BITS = INTEGERS | _BOOL


# --- arithmetic -----------------------------------------------------------------------------------


def _checked(ufunc: Callable[..., Any]) -> Callable[..., Any]:
    """The function, refusing to divide whole numbers by zero, which has no answer."""

    def divide(x: Array, y: Array, out: Array) -> None:
        if y.dtype.kind in "iu" and not y.all():
            raise ExecutionError(
                "a whole number is divided by zero",
                hint="keep zeros out of the divisor, for example with pc.maximum",
            )
        ufunc(x, y, out=out)

    return divide


def _of_known(takes_first: Callable[[Any, Any], Any]) -> BinaryGradient:
    """The gradient of an extreme that leaves NaN aside: all of it to the one that is taken."""

    def gradient(x: Any, y: Any, z: Any, dz: Any) -> tuple[Any, Any]:
        first = apply("logical_or", takes_first(x, y), apply("isnan", y))
        return masked(dz, first), masked(dz, apply("logical_not", first))

    return gradient


def _quotient(x: Any, y: Any, z: Any) -> Any:
    """The whole number q of x = q * y + z."""
    return apply("round", (x - z) / y)


def _atan2_gradient(y: Any, x: Any, z: Any, dz: Any) -> tuple[Any, Any]:
    # x / (x * x + y * y), where squares do not underflow.
    length = apply("hypot", x, y)
    scaled = over_positive(dz, length)
    return scaled * over_positive(x, length), -(scaled * over_positive(y, length))


register_binary(
    "atan2",
    np.arctan2,
    _atan2_gradient,
    dtypes=FLOATS,
    code="atan2({0}, {1})",
    doc="The angle in radians of the point (y, x), from the inputs y and x in this order; its "
    "gradient at the origin is zero.",
)
register_binary(
    "hypot",
    np.hypot,
    lambda x, y, z, dz: (over_positive(dz * x, z), over_positive(dz * y, z)),
    dtypes=FLOATS,
    code="hypot({0}, {1})",
    doc="sqrt(x * x + y * y), without overflow; its gradient at the origin is zero.",
)
register_binary(
    "fmod",
    _checked(np.fmod),
    lambda x, y, z, dz: (dz, -(dz * _quotient(x, y, z))),
    doc="What is left of x / y, with the sign of x.",
)
register_binary(
    "remainder",
    _checked(np.remainder),
    lambda x, y, z, dz: (dz, -(dz * apply("floor_divide", x, y))),
    doc="What is left of x / y, with the sign of y, as Python's %.",
)
register_binary(
    "floor_divide",
    _checked(np.floor_divide),
    lambda x, y, z, dz: (nothing(x), nothing(y)),
    doc="The greatest whole number up to x / y; its gradient is zero.",
)
register_binary(
    "logaddexp",
    np.logaddexp,
    lambda x, y, z, dz: (dz * (x - y).sigmoid(), dz * (y - x).sigmoid()),
    dtypes=FLOATS,
    doc="log(exp(x) + exp(y)), without overflow.",
)
register_binary(
    "copysign",
    np.copysign,
    lambda x, y, z, dz: (dz * apply("sign", x) * apply("sign", z), nothing(y)),
    dtypes=FLOATS,
    code="copysign({0}, {1})",
    doc="The absolute value of x with the sign of y.",
)
register_binary(
    "logaddexp2",
    np.logaddexp2,
    lambda x, y, z, dz: (
        dz * ((x - y) * math.log(2)).sigmoid(),
        dz * ((y - x) * math.log(2)).sigmoid(),
    ),
    dtypes=FLOATS,
    doc="The logarithm to base 2 of 2 ** x + 2 ** y, without overflow.",
)
register_binary(
    "nextafter",
    np.nextafter,
    None,
    dtypes=frozenset({DType.FLOAT32, DType.FLOAT64}),
    code="nextafter({0}, {1})",
    doc="The next number of the dtype after x in the direction of y.",
)
register_binary(
    "heaviside",
    np.heaviside,
    lambda x, y, z, dz: (None, masked(dz, x.equal(0))),
    dtypes=FLOATS,
    doc="0 where x < 0, y where x is 0, and 1 where x > 0.",
)
register_binary(
    "fmax",
    np.fmax,
    _of_known(lambda x, y: x >= y),
    dtypes=FLOATS,
    doc="The greater of two, or the one that is a number.",
)
register_binary(
    "fmin",
    np.fmin,
    _of_known(lambda x, y: x <= y),
    dtypes=FLOATS,
    doc="The lesser of two, or the one that is a number.",
)
register_binary(
    "gcd",
    np.gcd,
    None,
    dtypes=INTEGERS,
    doc="The greatest whole number that divides both.",
)
register_binary(
    "lcm",
    np.lcm,
    None,
    dtypes=INTEGERS,
    doc="The least whole number that both divide.",
)


# --- bitwise --------------------------------------------------------------------------------------

register_binary(
    "bitwise_and", np.bitwise_and, None, dtypes=_BITS, doc="The bits set in both, of x and y."
)
register_binary(
    "bitwise_or", np.bitwise_or, None, dtypes=_BITS, doc="The bits set in either, of x and y."
)
register_binary(
    "bitwise_xor", np.bitwise_xor, None, dtypes=_BITS, doc="The bits set in one only, of x and y."
)
define_op(
    "bitwise_not",
    infer=unary_infer("bitwise_not", _BITS),
    rule=UNARY_RULE,
    kernel=ufunc_kernel(np.invert),
    inplace=((0, 0),),
    elementwise=True,
    doc="All bits flipped.",
)
register_binary(
    "shift_left",
    np.left_shift,
    None,
    dtypes=INTEGERS,
    doc="The bits of x moved y places up; zeros come in.",
)
register_binary(
    "shift_right",
    np.right_shift,
    None,
    dtypes=INTEGERS,
    doc="The bits of x moved y places down; the sign comes in.",
)


# --- logical --------------------------------------------------------------------------------------

register_binary(
    "logical_and",
    np.logical_and,
    None,
    dtypes=_BOOL,
    extra=keeps(Reduction.MIN, 2),
    code="({0} && {1})",
    doc="True where both are.",
)
register_binary(
    "logical_or",
    np.logical_or,
    None,
    dtypes=_BOOL,
    extra=keeps(Reduction.MAX, 2),
    code="({0} || {1})",
    doc="True where either is.",
)
register_binary(
    "logical_xor",
    np.logical_xor,
    None,
    dtypes=_BOOL,
    code="(({0} != 0) != ({1} != 0))",
    doc="True where one only is.",
)


# --- lerp -----------------------------------------------------------------------------------------


def _lerp_infer(inputs: Types, attrs: AttrMap) -> Types:
    for tensor in inputs:
        expect_dtype("lerp", tensor, FLOATS)
    dtype = expect_same_dtype("lerp", inputs)
    return (TensorType(broadcast_shapes("lerp", [one.shape for one in inputs]), dtype),)


def _lerp_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    x, y, weight = inputs
    step = np.multiply(np.subtract(y, x), weight)
    np.add(x, step, out=outputs[0])


def _lerp_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    x, y, weight = inputs
    dz = grads[0]
    return (
        reduce_to(dz * (1.0 - weight), x.shape),
        reduce_to(dz * weight, y.shape),
        reduce_to(dz * (y - x), weight.shape),
    )


define_op(
    "lerp",
    infer=_lerp_infer,
    rule="..., ..., ... -> ...",
    kernel=_lerp_kernel,
    gradient=_lerp_gradient,
    linear=((0, 1),),
    inplace=((0, 0),),
    elementwise=True,
    code="({0} + {2} * ({1} - {0}))",
    doc="x + weight * (y - x); all three broadcast.",
)
