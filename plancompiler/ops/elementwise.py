"""Elementwise arithmetic: unary and binary ops, their forms with a Python scalar, and cast.

Binary ops broadcast as NumPy does and need both inputs in one dtype; a Python scalar keeps the
tensor's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plancompiler.errors import AttributeValueError, DTypeError, ExecutionError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ir.sbp import Partial, Reduction
from plancompiler.ops.attributes import Bool, Dtype, Number
from plancompiler.ops.check import (
    FLOATS,
    NUMBERS,
    broadcast_shapes,
    check_float,
    expect_dtype,
    expect_same_dtype,
)
from plancompiler.ops.gradient import masked, nothing, of_one, reduce_to
from plancompiler.ops.kernel import Direct, UfuncCall, with_direct, with_ufunc_call
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    Extra,
    Gradient,
    Infer,
    Kernel,
    KernelContext,
    LinearIf,
    Tensors,
    Types,
    apply,
    apply_source,
    define_op,
    op_def,
)
from plancompiler.ops.rule import Signature

UNARY_RULE = "... -> ..."
BINARY_RULE = "..., ... -> ..."
Dtypes = frozenset[DType]


# --- unary ----------------------------------------------------------------------------------------


def unary_infer(kind: str, dtypes: Dtypes, result: DType | None = None) -> Infer:
    """One input, an output of its shape with dtype `result`, or its own; no attributes."""

    def infer(inputs: Types, attrs: AttrMap) -> Types:
        expect_dtype(kind, inputs[0], dtypes)
        return (TensorType(inputs[0].shape, result or inputs[0].dtype),)

    return infer


def ufunc_kernel(ufunc: Callable[..., Any]) -> Kernel:
    """A kernel that is one NumPy function with `out=`."""

    def direct(context: KernelContext, dtypes: Sequence[np.dtype[Any]]) -> Direct | None:
        if not _resolves(ufunc, dtypes[:-1], dtypes[-1]):
            return None
        if len(dtypes) == 2:
            return lambda x: ufunc(x, order="C")
        return lambda x, y: ufunc(x, y, order="C")

    @with_direct(direct)
    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        ufunc(*inputs, out=outputs[0])

    if isinstance(ufunc, np.ufunc):
        with_ufunc_call(lambda attrs: (ufunc, (None,) * ufunc.nin))(kernel)
    return kernel


def _resolves(
    ufunc: Callable[..., Any], inputs: Sequence[np.dtype[Any] | type], output: np.dtype[Any]
) -> bool:
    """Whether a ufunc makes this dtype of arrays of these, and of plain numbers of these types."""
    if not isinstance(ufunc, np.ufunc) or ufunc.nin != len(inputs) or ufunc.nout != 1:
        return False
    if bool in inputs:  # which NumPy does not count among plain numbers
        return False
    made: np.dtype[Any] = ufunc.resolve_dtypes((*inputs, None))[-1]
    return made == output


def register_unary(
    kind: str,
    kernel: Kernel | np.ufunc,
    gradient: Callable[[Any, Any, Any], Any] | None,
    *,
    dtypes: Dtypes = FLOATS,
    code: str | None = None,
    **facts: Any,
) -> None:
    """Register an op of one input, whose kernel may be a function of NumPy; `gradient(x, y, dy)`
    gives dx, `facts` are those of `OpDef`. Without `code` it is C++'s function of the op's name.
    """
    usual = gradient or (lambda x, y, dy: None)
    define_op(
        kind,
        infer=unary_infer(kind, dtypes),
        rule=UNARY_RULE,
        kernel=ufunc_kernel(kernel) if isinstance(kernel, np.ufunc) else kernel,
        gradient=of_one(lambda attrs, x, y, dy: usual(x, y, dy)),
        inplace=((0, 0),),
        elementwise=True,
        code=code or f"{kind}({{0}})",
        **facts,
    )


def _rsqrt(x: Array, out: Array) -> None:
    np.sqrt(x, out=out)
    np.reciprocal(out, out=out)


register_unary(
    "neg",
    np.negative,
    lambda x, y, dy: -dy,
    dtypes=NUMBERS,
    linear=((0,),),
    precision="following",
    code="-{0}",
    doc="-x; of numbers without a sign, what is left modulo 2 ** bits.",
)
register_unary(
    "abs",
    np.absolute,
    lambda x, y, dy: dy * apply("sign", x),
    dtypes=NUMBERS,
    precision="following",
    code="fabs({0})",
    doc="The absolute value; its gradient at zero is zero.",
)
register_unary(
    "sign",
    np.sign,
    lambda x, y, dy: nothing(dy),
    dtypes=NUMBERS,
    code="({0} > 0 ? T(1) : {0} < 0 ? T(-1) : {0})",
    doc="-1, 0 or 1; its gradient is zero.",
)
register_unary(
    "exp",
    np.exp,
    lambda x, y, dy: dy * y,
    doc="e to the power of x.",
)
register_unary(
    "log",
    np.log,
    lambda x, y, dy: dy / x,
    doc="The natural logarithm.",
)
register_unary(
    "sqrt",
    np.sqrt,
    lambda x, y, dy: dy / y * 0.5,
    doc="The square root.",
)
register_unary(
    "rsqrt",
    ufunc_kernel(_rsqrt),
    lambda x, y, dy: dy * (y * y * y) * -0.5,
    code="(T(1) / sqrt({0}))",
    doc="One over the square root.",
)
register_unary(
    "square",
    np.square,
    lambda x, y, dy: dy * x * 2,
    dtypes=NUMBERS,
    code="({0} * {0})",
    doc="x times x.",
)


def _zeros_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    outputs[0].fill(0)


register_unary(
    "zeros_like",
    _zeros_kernel,
    lambda x, y, dy: nothing(dy),
    dtypes=NUMBERS,
    linear=((0,),),
    precision="following",
    code="T(0)",
    doc="Zeros, whatever x is.",
)


# --- binary ---------------------------------------------------------------------------------------


def binary_infer(kind: str, dtypes: Dtypes, result: DType | None = None) -> Infer:
    """Two inputs of one dtype that broadcast; the output has `result`, or their dtype."""

    def infer(inputs: Types, attrs: AttrMap) -> Types:
        for tensor in inputs:
            expect_dtype(kind, tensor, dtypes)
        dtype = expect_same_dtype(kind, inputs)
        shape = broadcast_shapes(kind, [tensor.shape for tensor in inputs])
        return (TensorType(shape, result or dtype),)

    return infer


BinaryGradient = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""`(x, y, z, dz)` to the gradients of x and y, in the shape of z; None where there is none."""


def _binary_gradient(gradient: BinaryGradient) -> Gradient:
    def gradients(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
        passed = gradient(inputs[0], inputs[1], outputs[0], grads[0])
        return tuple(
            None if grad is None else reduce_to(grad, tensor.shape)
            for grad, tensor in zip(passed, inputs, strict=True)
        )

    return gradients


def keeps(reduction: Reduction, count: int) -> Extra:
    """Partials of this reduction pass through: max(max(a1, a2), max(b1, b2)) for example."""

    def extra(inputs: Types, outputs: Types, attrs: AttrMap, parts: int) -> tuple[Signature, ...]:
        partial = Partial(reduction)
        return (Signature((partial,) * count, (partial,)),)

    return extra


def register_binary(
    kind: str,
    ufunc: Callable[..., Any],
    gradient: BinaryGradient | None,
    *,
    dtypes: Dtypes = NUMBERS,
    kernel: Kernel | None = None,
    **facts: Any,
) -> None:
    """Register an op of two inputs of one dtype that broadcast; `facts` are those of `OpDef`."""
    define_op(
        kind,
        infer=binary_infer(kind, dtypes),
        rule=BINARY_RULE,
        kernel=kernel or ufunc_kernel(ufunc),
        gradient=None if gradient is None else _binary_gradient(gradient),
        inplace=((0, 0), (0, 1)),
        elementwise=True,
        **facts,
    )


def _pow_gradient(x: Any, y: Any, z: Any, dz: Any) -> tuple[Any, Any]:
    one = apply_source(x, "fill", shape=(), dtype=str(x.dtype), value=1.0)
    zero = x.equal(0)
    # By x: y x ** (y - 1), which is 0 times infinity at 0 ** 0, where the power is the constant 1.
    constant = apply("logical_and", zero, y.equal(0))
    varies = apply("logical_not", constant)
    dx = masked(dz * y * apply("where", constant, one, x) ** (y - 1), varies)
    # By y: z log x. A real power has no such derivative where x < 0, and it is 0 times infinity for
    # 0 to a power that is not negative.
    without = apply("logical_or", x < 0, apply("logical_and", zero, y >= 0))
    safe = apply("where", without, one, x)
    return dx, masked(dz * z * safe.log(), apply("logical_not", without))


def _of_extreme(loses: Callable[[Any, Any], Any]) -> BinaryGradient:
    """The gradient of an extreme of two: all of it to the one that is taken, half on ties."""

    def gradient(x: Any, y: Any, z: Any, dz: Any) -> tuple[Any, Any]:
        share = apply("where", x.equal(y), dz * 0.5, dz)
        return tuple(
            masked(share, apply("logical_not", loses(one, other)))
            for one, other in ((x, y), (y, x))
        )

    return gradient


register_binary(
    "add",
    np.add,
    lambda x, y, z, dz: (dz, dz),
    linear=((0, 1),),
    precision="following",
    neutral=0,
    mirrored="add",
    code="({0} + {1})",
    doc="x + y.",
)
register_binary(
    "sub",
    np.subtract,
    lambda x, y, z, dz: (dz, -dz),
    linear=((0, 1),),
    precision="following",
    neutral=0,
    code="({0} - {1})",
    doc="x - y.",
)
register_binary(
    "mul",
    np.multiply,
    lambda x, y, z, dz: (dz * y, dz * x),
    linear=((0,), (1,)),
    precision="following",
    neutral=1,
    mirrored="mul",
    code="({0} * {1})",
    doc="x * y.",
)
register_binary(
    "div",
    np.divide,
    lambda x, y, z, dz: (dz / y, -(dz * z / y)),
    dtypes=FLOATS,
    linear=((0,),),
    neutral=1,
    code="({0} / {1})",
    doc="x / y.",
)


def _check_exponent(y: Array) -> None:
    """Whole numbers have no whole powers with a negative exponent. The host does not wait for a
    device to look: there such a power is whatever the device makes of it.
    """
    if y.__class__ is np.ndarray and y.dtype.kind == "i" and y.size and y.min() < 0:
        raise ExecutionError(
            "a whole number is raised to a negative power",
            hint="convert the base to a floating dtype with cast",
        )


def _pow_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    _check_exponent(inputs[1])
    np.power(inputs[0], inputs[1], out=outputs[0])


def _pow_direct(context: KernelContext, dtypes: Sequence[np.dtype[Any]]) -> Direct | None:
    return None if dtypes[0].kind != "f" else lambda x, y: np.power(x, y, order="C")


with_ufunc_call(lambda attrs: (np.power, (None, None)))(with_direct(_pow_direct)(_pow_kernel))

register_binary(
    "pow",
    np.power,
    _pow_gradient,
    kernel=_pow_kernel,
    neutral=1,
    code="pow({0}, {1})",
    doc="x to the power of y; no gradient flows to y where x < 0, and none at all at 0 ** 0.",
)
register_binary(
    "maximum",
    np.maximum,
    _of_extreme(lambda x, y: x < y),
    extra=keeps(Reduction.MAX, 2),
    precision="following",
    mirrored="maximum",
    code="({0} != {0} || {0} > {1} ? {0} : {1})",
    doc="The greater of two; on ties they share the gradient equally.",
)
register_binary(
    "minimum",
    np.minimum,
    _of_extreme(lambda x, y: x > y),
    extra=keeps(Reduction.MIN, 2),
    precision="following",
    mirrored="minimum",
    code="({0} != {0} || {0} < {1} ? {0} : {1})",
    doc="The lesser of two; on ties they share the gradient equally.",
)


# --- binary with a Python scalar ------------------------------------------------------------------


def check_scalar(kind: str, tensor: TensorType, attrs: AttrMap, name: str = "scalar") -> None:
    """The attribute `name` is a number that the tensor's dtype can hold."""
    scalar = attrs[name]
    if tensor.dtype.is_floating:
        fits = not isinstance(scalar, bool)
    elif tensor.dtype.is_integer:
        fits = isinstance(scalar, int) and not isinstance(scalar, bool)
    else:
        fits = isinstance(scalar, bool)
    if not fits:
        raise DTypeError(
            f"{kind} cannot combine this number with a tensor of {tensor.dtype}",
            got=repr(scalar),
            expected="a number of the tensor's kind, so that its dtype stays",
            hint="convert the tensor with cast first",
        )
    if tensor.dtype.is_floating:
        check_float(kind, scalar)
    if tensor.dtype.is_integer:
        limits = np.iinfo(tensor.dtype.value)
        if not limits.min <= scalar <= limits.max:
            raise AttributeValueError(
                f"{kind} was given a number outside the tensor's dtype",
                got=scalar,
                expected=f"{limits.min} to {limits.max} for {tensor.dtype}",
            )


SCALAR = (Number("scalar"), Bool("swapped", False))
"""The attributes of an op of a tensor and a number."""


def scalar_infer(kind: str, dtypes: Dtypes, result: DType | None = None) -> Infer:
    """One input with attributes `scalar` and, optionally, `swapped`."""

    def infer(inputs: Types, attrs: AttrMap) -> Types:
        expect_dtype(kind, inputs[0], dtypes)
        check_scalar(kind, inputs[0], attrs)
        return (TensorType(inputs[0].shape, result or inputs[0].dtype),)

    return infer


def scalar_kernel(ufunc: np.ufunc) -> Kernel:
    """`ufunc(x, scalar)`, or `ufunc(scalar, x)` where swapped."""

    def direct(context: KernelContext, dtypes: Sequence[np.dtype[Any]]) -> Direct | None:
        scalar = context.attrs["scalar"]
        if context.attrs["swapped"]:
            if not _resolves(ufunc, (type(scalar), dtypes[0]), dtypes[1]):
                return None
            return lambda x: ufunc(scalar, x, order="C")
        if not _resolves(ufunc, (dtypes[0], type(scalar)), dtypes[1]):
            return None
        return lambda x: ufunc(x, scalar, order="C")

    @with_direct(direct)
    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        scalar = context.attrs["scalar"]
        if context.attrs["swapped"]:
            ufunc(scalar, inputs[0], out=outputs[0])
        else:
            ufunc(inputs[0], scalar, out=outputs[0])

    def call(attrs: AttrMap) -> UfuncCall:
        first, second = None, attrs["scalar"]
        return ufunc, (second, first) if attrs["swapped"] else (first, second)

    return with_ufunc_call(call)(kernel)


ScalarGradient = Callable[[Any, Any, Any, Any, bool], Any]
"""`(x, scalar, z, dz, swapped)` to the gradient of x."""


def _register_scalar(
    kind: str,
    kernel: Kernel,
    gradient: ScalarGradient,
    *,
    dtypes: Dtypes = NUMBERS,
    infer: Infer | None = None,
    linear_if: LinearIf | None = None,
    **facts: Any,
) -> None:
    """Register an op of a tensor and a number. With `linear_if` it is linear in the tensor, where
    that holds.
    """
    name, plain = f"{kind}_scalar", op_def(kind)
    define_op(
        name,
        infer=infer or scalar_infer(name, dtypes),
        rule=UNARY_RULE,
        attrs=SCALAR,
        kernel=kernel,
        gradient=of_one(
            lambda attrs, x, z, dz: gradient(x, attrs["scalar"], z, dz, attrs["swapped"])
        ),
        linear=() if linear_if is None else ((0,),),
        linear_if=linear_if,
        inplace=((0, 0),),
        elementwise=True,
        neutral=plain.neutral,
        code=plain.code,
        **facts,
    )


def _as_held(number: Any, dtype: DType) -> float:
    """A number as a tensor of this dtype meets it: it may be infinite or zero only there."""
    if not dtype.is_floating:
        return float(number)
    # The arithmetic of bfloat16 is that of float32, which has its range and more digits.
    with np.errstate(over="ignore", under="ignore"):
        held = np.dtype("float32" if dtype is DType.BFLOAT16 else str(dtype)).type(number)
    return float(held)


def _scales(inputs: Types, attrs: AttrMap) -> bool:
    # Infinity and NaN make NaN of the zeros in a partial sum's parts.
    return math.isfinite(_as_held(attrs["scalar"], inputs[0].dtype))


def _divides(inputs: Types, attrs: AttrMap) -> bool:
    # Only x / s is linear, s / x is not; and zero makes NaN of the zeros in a sum's parts.
    if attrs["swapped"]:
        return False
    held = _as_held(attrs["scalar"], inputs[0].dtype)
    return math.isfinite(held) and held != 0


def _pow_scalar_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_dtype("pow_scalar", inputs[0], NUMBERS)
    check_scalar("pow_scalar", inputs[0], attrs)
    if inputs[0].dtype.is_integer and attrs["scalar"] < 0 and not attrs["swapped"]:
        raise AttributeValueError(
            "a whole number is raised to a negative power",
            got=attrs["scalar"],
            hint="convert the base to a floating dtype with cast",
        )
    return (inputs[0],)


def _pow_scalar_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x,), (out,) = inputs, outputs
    scalar = context.attrs["scalar"]
    if context.attrs["swapped"]:
        _check_exponent(x)
        np.power(scalar, x, out=out)
    elif scalar == 2:
        np.multiply(x, x, out=out)
    elif scalar == 3:
        # The general power is about fifty times slower than two products.
        np.multiply(x * x, x, out=out)
    elif scalar == 0.5:
        np.sqrt(x, out=out)
    elif scalar == -1:
        np.reciprocal(x, out=out)
    else:
        np.power(x, scalar, out=out)


def _pow_scalar_gradient(x: Any, scalar: Any, z: Any, dz: Any, swapped: bool) -> Any:
    if swapped and scalar > 0:
        return dz * z * math.log(scalar)
    if swapped and scalar == 0:
        # 0 to a negative power is infinite, and falls from there.
        return masked(dz * z * -math.inf, x < 0)
    if swapped or scalar == 0:
        return nothing(dz)
    if scalar == 1:
        return dz
    if scalar == 2:
        return dz * x * 2.0
    return dz * x ** (scalar - 1) * scalar


_register_scalar(
    "add",
    scalar_kernel(np.add),
    lambda x, s, z, dz, swapped: dz,
    doc="x + scalar. Not linear: added to a partial, the scalar would count once per device.",
)
_register_scalar(
    "sub",
    scalar_kernel(np.subtract),
    lambda x, s, z, dz, swapped: -dz if swapped else dz,
    doc="x - scalar, or scalar - x where swapped.",
)
_register_scalar(
    "mul",
    scalar_kernel(np.multiply),
    lambda x, s, z, dz, swapped: dz * s,
    linear_if=_scales,
    precision="following",
    doc="x * scalar; linear where the scalar is finite.",
)
_register_scalar(
    "div",
    scalar_kernel(np.divide),
    lambda x, s, z, dz, swapped: -(dz * z / x) if swapped else dz / s,
    dtypes=FLOATS,
    linear_if=_divides,
    doc="x / scalar, or scalar / x where swapped; x / scalar is linear where the scalar is finite "
    "and not zero.",
)
_register_scalar(
    "pow",
    _pow_scalar_kernel,
    _pow_scalar_gradient,
    infer=_pow_scalar_infer,
    doc="x to the power of scalar, or scalar to the power of x where swapped; no gradient flows "
    "where the base is negative and x the exponent.",
)
_register_scalar(
    "maximum",
    scalar_kernel(np.maximum),
    lambda x, s, z, dz, swapped: masked(dz, x >= s),
    extra=keeps(Reduction.MAX, 1),
    doc="The greater of x and scalar; on ties the gradient goes to x.",
)
_register_scalar(
    "minimum",
    scalar_kernel(np.minimum),
    lambda x, s, z, dz, swapped: masked(dz, x <= s),
    extra=keeps(Reduction.MIN, 1),
    doc="The lesser of x and scalar; on ties the gradient goes to x.",
)


# --- cast -----------------------------------------------------------------------------------------


def _casts_linearly(inputs: Types, attrs: AttrMap) -> bool:
    # To an integer or a truth value the parts would be cut off one by one.
    return inputs[0].dtype.is_floating and attrs["dtype"].is_floating


define_op(
    "cast",
    infer="x X -> y dtype",
    rule=UNARY_RULE,
    attrs=(Dtype("dtype"),),
    kernel=lambda context, inputs, outputs: np.copyto(outputs[0], inputs[0], casting="unsafe"),
    gradient=of_one(lambda attrs, x, y, dy: dy.cast(x.dtype) if x.dtype.is_floating else None),
    linear=((0,),),
    linear_if=_casts_linearly,
    inplace=((0, 0),),
    takes_bfloat16=True,
    elementwise=True,
    code="{0}",
    doc="The same values as another dtype; linear between floating dtypes.",
)
