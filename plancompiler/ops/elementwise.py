"""Elementwise arithmetic: unary and binary ops, their forms with a Python scalar, where and cast.

Binary ops broadcast as NumPy does and need both inputs in one dtype; a Python scalar keeps the
tensor's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plancompiler.errors import AttributeValueError, DTypeError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ir.sbp import PARTIAL_SUM, Partial, Reduction
from plancompiler.ops.check import (
    ANY,
    FLOATS,
    NUMBERS,
    SIGNED,
    bool_attr,
    broadcast_shapes,
    check_float,
    dtype_attr,
    expect_dtype,
    expect_inputs,
    expect_same_dtype,
    only_attrs,
)
from plancompiler.ops.gradient import masked, reduce_to
from plancompiler.ops.kernel import Direct, copy_unless_shared, with_direct
from plancompiler.ops.registry import (
    Array,
    AttrMap,
    Extra,
    Gradient,
    Infer,
    Kernel,
    KernelContext,
    OpDef,
    Types,
    apply,
    apply_source,
    register,
)
from plancompiler.ops.rule import Signature

UNARY_RULE = "... -> ..."
BINARY_RULE = "..., ... -> ..."
Dtypes = frozenset[DType]


# --- unary ----------------------------------------------------------------------------------------


def unary_infer(kind: str, dtypes: Dtypes, result: DType | None = None) -> Infer:
    """One input, an output of its shape with dtype `result`, or its own; no attributes."""

    def infer(inputs: Types, attrs: AttrMap) -> Types:
        expect_inputs(kind, inputs, 1)
        only_attrs(kind, attrs)
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
    def kernel(context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        ufunc(*inputs, out=outputs[0])

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
    kernel: Kernel,
    gradient: Callable[[Any, Any, Any], Any] | None,
    *,
    dtypes: Dtypes = FLOATS,
    linear: tuple[tuple[int, ...], ...] = (),
    extra: Extra | None = None,
    doc: str,
) -> None:
    """Register an op of one input; `gradient(x, y, dy)` gives dx."""

    def gradients(
        attrs: AttrMap, inputs: Sequence[Any], outputs: Sequence[Any], grads: Sequence[Any]
    ) -> Sequence[Any]:
        return (None if gradient is None else gradient(inputs[0], outputs[0], grads[0]),)

    register(
        OpDef(
            kind,
            infer=unary_infer(kind, dtypes),
            rule=UNARY_RULE,
            kernel=kernel,
            gradient=gradients,
            linear=linear,
            extra=extra,
            inplace=((0, 0),),
            doc=doc,
        )
    )


def _rsqrt(x: Array, out: Array) -> None:
    np.sqrt(x, out=out)
    np.reciprocal(out, out=out)


register_unary(
    "neg",
    ufunc_kernel(np.negative),
    lambda x, y, dy: -dy,
    dtypes=SIGNED,
    linear=((0,),),
    doc="-x",
)
register_unary(
    "abs",
    ufunc_kernel(np.absolute),
    lambda x, y, dy: dy * apply("sign", x),
    dtypes=NUMBERS,
    doc="The absolute value; its gradient at zero is zero.",
)
register_unary(
    "sign", ufunc_kernel(np.sign), None, dtypes=NUMBERS, doc="-1, 0 or 1; without a gradient."
)
register_unary("exp", ufunc_kernel(np.exp), lambda x, y, dy: dy * y, doc="e to the power of x.")
register_unary("log", ufunc_kernel(np.log), lambda x, y, dy: dy / x, doc="The natural logarithm.")
register_unary("sqrt", ufunc_kernel(np.sqrt), lambda x, y, dy: dy / y * 0.5, doc="The square root.")
register_unary(
    "rsqrt",
    ufunc_kernel(_rsqrt),
    lambda x, y, dy: dy * (y * y * y) * -0.5,
    doc="One over the square root.",
)
register_unary(
    "square",
    ufunc_kernel(np.square),
    lambda x, y, dy: dy * x * 2,
    dtypes=NUMBERS,
    doc="x times x.",
)


# --- binary ---------------------------------------------------------------------------------------


def binary_infer(kind: str, dtypes: Dtypes, result: DType | None = None) -> Infer:
    """Two inputs of one dtype that broadcast; the output has `result`, or their dtype."""

    def infer(inputs: Types, attrs: AttrMap) -> Types:
        expect_inputs(kind, inputs, 2)
        only_attrs(kind, attrs)
        for tensor in inputs:
            expect_dtype(kind, tensor, dtypes)
        dtype = expect_same_dtype(kind, inputs)
        shape = broadcast_shapes(kind, [tensor.shape for tensor in inputs])
        return (TensorType(shape, result or dtype),)

    return infer


BinaryGradient = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""`(x, y, z, dz)` to the gradients of x and y, in the shape of z; None where there is none."""


def _binary_gradient(gradient: BinaryGradient) -> Gradient:
    def gradients(
        attrs: AttrMap, inputs: Sequence[Any], outputs: Sequence[Any], grads: Sequence[Any]
    ) -> Sequence[Any]:
        found = gradient(inputs[0], inputs[1], outputs[0], grads[0])
        return tuple(
            None if grad is None else reduce_to(grad, tensor.shape)
            for grad, tensor in zip(found, inputs, strict=True)
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
    linear: tuple[tuple[int, ...], ...] = (),
    extra: Extra | None = None,
    doc: str,
) -> None:
    """Register an op of two inputs of one dtype that broadcast."""
    register(
        OpDef(
            kind,
            infer=binary_infer(kind, dtypes),
            rule=BINARY_RULE,
            kernel=ufunc_kernel(ufunc),
            gradient=None if gradient is None else _binary_gradient(gradient),
            linear=linear,
            extra=extra,
            inplace=((0, 0), (0, 1)),
            doc=doc,
        )
    )


def _pow_gradient(x: Any, y: Any, z: Any, dz: Any) -> tuple[Any, Any]:
    # Where x <= 0 a real power has no derivative by its exponent: log(1) = 0 stands in there.
    positive = x > 0
    one = apply_source(x, "fill", shape=(), dtype=str(x.dtype), value=1.0)
    safe = apply("where", positive, x, one)
    return dz * y * x ** (y - 1), masked(dz * z * safe.log(), positive)


def _first_wins(takes_first: Callable[[Any, Any], Any]) -> BinaryGradient:
    def gradient(x: Any, y: Any, z: Any, dz: Any) -> tuple[Any, Any]:
        mask = takes_first(x, y)
        return masked(dz, mask), masked(dz, apply("logical_not", mask))

    return gradient


register_binary(
    "add",
    np.add,
    lambda x, y, z, dz: (dz, dz),
    linear=((0, 1),),
    doc="x + y.",
)
register_binary(
    "sub",
    np.subtract,
    lambda x, y, z, dz: (dz, -dz),
    linear=((0, 1),),
    doc="x - y.",
)
register_binary(
    "mul",
    np.multiply,
    lambda x, y, z, dz: (dz * y, dz * x),
    linear=((0,), (1,)),
    doc="x * y.",
)
register_binary(
    "div",
    np.divide,
    lambda x, y, z, dz: (dz / y, -(dz * z / y)),
    dtypes=FLOATS,
    linear=((0,),),
    doc="x / y.",
)
register_binary(
    "pow",
    np.power,
    _pow_gradient,
    dtypes=FLOATS,
    doc="x to the power of y; no gradient flows to y where x <= 0.",
)
register_binary(
    "maximum",
    np.maximum,
    _first_wins(lambda x, y: x >= y),
    extra=keeps(Reduction.MAX, 2),
    doc="The greater of two; on ties the gradient goes to the first.",
)
register_binary(
    "minimum",
    np.minimum,
    _first_wins(lambda x, y: x <= y),
    extra=keeps(Reduction.MIN, 2),
    doc="The lesser of two; on ties the gradient goes to the first.",
)


# --- binary with a Python scalar ------------------------------------------------------------------


def check_scalar(kind: str, tensor: TensorType, attrs: AttrMap, name: str = "scalar") -> None:
    """The attribute `name` is a number that the tensor's dtype can hold."""
    scalar = attrs.get(name)
    if not isinstance(scalar, (bool, int, float)):
        raise AttributeValueError(
            f"{kind} needs a plain number as its attribute {name!r}", got=repr(scalar)
        )
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


def scalar_infer(kind: str, dtypes: Dtypes, result: DType | None = None) -> Infer:
    """One input with attributes `scalar` and, optionally, `swapped`."""

    def infer(inputs: Types, attrs: AttrMap) -> Types:
        expect_inputs(kind, inputs, 1)
        only_attrs(kind, attrs, "scalar", "swapped")
        expect_dtype(kind, inputs[0], dtypes)
        check_scalar(kind, inputs[0], attrs)
        bool_attr(attrs, "swapped", False)
        return (TensorType(inputs[0].shape, result or inputs[0].dtype),)

    return infer


def scalar_kernel(ufunc: Callable[..., Any]) -> Kernel:
    """`ufunc(x, scalar)`, or `ufunc(scalar, x)` where swapped."""

    def direct(context: KernelContext, dtypes: Sequence[np.dtype[Any]]) -> Direct | None:
        scalar = context.attrs["scalar"]
        if context.attrs.get("swapped", False):
            if not _resolves(ufunc, (type(scalar), dtypes[0]), dtypes[1]):
                return None
            return lambda x: ufunc(scalar, x, order="C")
        if not _resolves(ufunc, (dtypes[0], type(scalar)), dtypes[1]):
            return None
        return lambda x: ufunc(x, scalar, order="C")

    @with_direct(direct)
    def kernel(context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        scalar = context.attrs["scalar"]
        if context.attrs.get("swapped", False):
            ufunc(scalar, inputs[0], out=outputs[0])
        else:
            ufunc(inputs[0], scalar, out=outputs[0])

    return kernel


ScalarGradient = Callable[[Any, Any, Any, Any, bool], Any]
"""`(x, scalar, z, dz, swapped)` to the gradient of x."""


def _register_scalar(
    kind: str,
    kernel: Kernel,
    gradient: ScalarGradient,
    *,
    dtypes: Dtypes = NUMBERS,
    linear: tuple[tuple[int, ...], ...] = (),
    extra: Extra | None = None,
    doc: str,
) -> None:
    name = f"{kind}_scalar"

    def gradients(
        attrs: AttrMap, inputs: Sequence[Any], outputs: Sequence[Any], grads: Sequence[Any]
    ) -> Sequence[Any]:
        swapped = bool(attrs.get("swapped", False))
        return (gradient(inputs[0], attrs["scalar"], outputs[0], grads[0], swapped),)

    register(
        OpDef(
            name,
            infer=scalar_infer(name, dtypes),
            rule=UNARY_RULE,
            kernel=kernel,
            gradient=gradients,
            linear=linear,
            extra=extra,
            inplace=((0, 0),),
            doc=doc,
        )
    )


def _div_extra(inputs: Types, outputs: Types, attrs: AttrMap, parts: int) -> tuple[Signature, ...]:
    # Only x / s is linear; s / x is not.
    if attrs.get("swapped", False):
        return ()
    return (Signature((PARTIAL_SUM,), (PARTIAL_SUM,)),)


def _pow_scalar_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    (x,), (out,) = inputs, outputs
    scalar = context.attrs["scalar"]
    if context.attrs.get("swapped", False):
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
    if swapped:
        return dz * z * (math.log(scalar) if scalar > 0 else 0.0)
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
    linear=((0,),),
    doc="x * scalar.",
)
_register_scalar(
    "div",
    scalar_kernel(np.divide),
    lambda x, s, z, dz, swapped: -(dz * z / x) if swapped else dz / s,
    dtypes=FLOATS,
    extra=_div_extra,
    doc="x / scalar, or scalar / x where swapped.",
)
_register_scalar(
    "pow",
    _pow_scalar_kernel,
    _pow_scalar_gradient,
    dtypes=FLOATS,
    doc="x to the power of scalar, or scalar to the power of x where swapped.",
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


def _cast_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_inputs("cast", inputs, 1)
    only_attrs("cast", attrs, "dtype")
    expect_dtype("cast", inputs[0], ANY)
    return (TensorType(inputs[0].shape, dtype_attr(attrs)),)


def _cast_kernel(context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    np.copyto(outputs[0], inputs[0], casting="unsafe")


def _cast_gradient(
    attrs: AttrMap, inputs: Sequence[Any], outputs: Sequence[Any], grads: Sequence[Any]
) -> Sequence[Any]:
    return (grads[0].cast(inputs[0].dtype) if inputs[0].dtype.is_floating else None,)


def _cast_extra(inputs: Types, outputs: Types, attrs: AttrMap, parts: int) -> tuple[Signature, ...]:
    # To an integer or a truth value the parts would be cut off one by one.
    if inputs[0].dtype.is_floating and outputs[0].dtype.is_floating:
        return (Signature((PARTIAL_SUM,), (PARTIAL_SUM,)),)
    return ()


register(
    OpDef(
        "cast",
        infer=_cast_infer,
        rule=UNARY_RULE,
        kernel=_cast_kernel,
        gradient=_cast_gradient,
        extra=_cast_extra,
        inplace=((0, 0),),
        takes_bfloat16=True,
        doc="The same values as another dtype; linear between floating dtypes.",
    )
)


# --- where ----------------------------------------------------------------------------------------


def _where_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_inputs("where", inputs, 3)
    only_attrs("where", attrs)
    expect_dtype("where", inputs[0], frozenset({DType.BOOL}), "condition")
    dtype = expect_same_dtype("where", inputs[1:])
    return (TensorType(broadcast_shapes("where", [one.shape for one in inputs]), dtype),)


def _where_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    condition, x, y = inputs
    copy_unless_shared(y, outputs[0])
    np.copyto(outputs[0], x, where=condition)


def _where_gradient(
    attrs: AttrMap, inputs: Sequence[Any], outputs: Sequence[Any], grads: Sequence[Any]
) -> Sequence[Any]:
    condition, x, y = inputs
    grad = grads[0]
    return (
        None,
        reduce_to(masked(grad, condition), x.shape),
        reduce_to(masked(grad, apply("logical_not", condition)), y.shape),
    )


register(
    OpDef(
        "where",
        infer=_where_infer,
        rule="..., ..., ... -> ...",
        kernel=_where_kernel,
        gradient=_where_gradient,
        linear=((1, 2),),
        inplace=((0, 2),),
        doc="x where the condition holds, else y; all three broadcast.",
    )
)
