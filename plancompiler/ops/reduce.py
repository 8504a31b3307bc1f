"""Reductions along axes: sum, max, min and argmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plancompiler.errors import ShapeError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ir.sbp import Partial, Reduction
from plancompiler.ops.attributes import Axes, Axis, Bool
from plancompiler.ops.check import (
    ANY,
    NUMBERS,
    expect_dtype,
)
from plancompiler.ops.gradient import accumulated, expand_to, masked, of_one
from plancompiler.ops.kernel import Direct, in_float32, with_direct
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    Extra,
    Infer,
    KernelContext,
    Types,
    define_op,
)
from plancompiler.ops.rule import Signature, operand_line


def reduced_shape(shape: tuple[int, ...], axes: Sequence[int], keepdims: bool) -> tuple[int, ...]:
    """The shape after a reduction over `axes`."""
    if keepdims:
        return tuple(1 if axis in axes else extent for axis, extent in enumerate(shape))
    return tuple(extent for axis, extent in enumerate(shape) if axis not in axes)


def total_dtype(dtype: DType) -> DType:
    """The dtype of sums and products: that of floating numbers stays; of whole numbers and bool it
    is int64, and uint64 for those without a sign.
    """
    if dtype.is_floating:
        return dtype
    return DType.UINT64 if dtype.is_integer and not dtype.is_signed else DType.INT64


def keeps_dtype(inputs: Types, attrs: AttrMap) -> bool:
    """Whether totals have the dtype of what they are made of. In a wider one the parts of what
    wraps around add up to another number than the whole.
    """
    return inputs[0].dtype is total_dtype(inputs[0].dtype)


def _same(dtype: DType) -> DType:
    return dtype


REDUCED = (Axes(), Bool("keepdims", False))
"""The attributes of reductions."""


def reduction_infer(
    kind: str,
    empty: bool,
    dtypes: frozenset[DType] = NUMBERS,
    result: Callable[[DType], DType] = _same,
) -> Infer:
    """One input reduced over the attribute `axes`; with `keepdims` they stay, with extent 1.

    `empty` says whether a reduction over no elements has a value, `result` gives the output's dtype
    for the input's.
    """

    def infer(inputs: Types, attrs: AttrMap) -> Types:
        expect_dtype(kind, inputs[0], dtypes)
        shape = inputs[0].shape
        axes = attrs["axes"]
        if not empty and any(shape[axis] == 0 for axis in axes):
            raise ShapeError(f"{kind} over an empty axis has no value", got=shape)
        reduced = reduced_shape(shape, axes, attrs["keepdims"])
        return (TensorType(reduced, result(inputs[0].dtype)),)

    return infer


def _line(ndim: int, axes: Sequence[int], keepdims: bool, whole: Sequence[int]) -> str:
    kept = [
        "1" if axis in axes else f"a{axis}" for axis in range(ndim) if keepdims or axis not in axes
    ]
    return f"{operand_line(ndim, whole)} -> {' '.join(kept) or '...'}"


def reduction_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    """Every axis can be split; a split reduced axis leaves a partial."""
    ndim = len(inputs[0].shape)
    return _line(ndim, attrs["axes"], attrs["keepdims"], ())


def whole_reduction_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    """The reduced axes stay whole."""
    ndim = len(inputs[0].shape)
    axes = attrs["axes"]
    return _line(ndim, axes, attrs["keepdims"], axes)


def kept_axes(tensor: Any, attrs: AttrMap, source: Any) -> Any:
    """An output (or its gradient) with the reduced axes back as axes of extent 1."""
    if attrs["keepdims"]:
        return tensor
    return tensor.reshape(reduced_shape(source.shape, attrs["axes"], True))


# --- sum ------------------------------------------------------------------------------------------


def _sum_direct(context: KernelContext, dtypes: Sequence[np.dtype[Any]]) -> Direct | None:
    if len(context.output_shapes[0]) > 1:
        return None  # NumPy would keep the order of its input
    axes = context.attrs["axes"]
    keepdims = context.attrs["keepdims"]
    dtype = dtypes[-1]
    add: Callable[..., Array] = np.add.reduce
    return lambda x: add(x, axis=axes, dtype=dtype, keepdims=keepdims)


@with_direct(_sum_direct)
def _sum_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x,), (out,) = inputs, outputs
    axes = context.attrs["axes"]
    keepdims = context.attrs["keepdims"]
    np.add.reduce(x, axis=axes, dtype=out.dtype, out=out, keepdims=keepdims)


define_op(
    "sum",
    infer=reduction_infer("sum", empty=True, dtypes=ANY, result=total_dtype),
    rule=reduction_rule,
    inputs=1,
    attrs=REDUCED,
    kernel=in_float32(_sum_kernel),
    gradient=of_one(lambda attrs, x, y, dy: expand_to(kept_axes(dy, attrs, x), x.shape)),
    linear=((0,),),
    linear_if=keeps_dtype,
    flops=1,
    doc="The sum over axes, in the dtype of the input; of whole numbers "
    "and bool in int64, of those without a sign in uint64.",
)


# --- max and min ----------------------------------------------------------------------------------


def _lowest(dtype: np.dtype[Any]) -> float | int:
    return -np.inf if dtype.kind == "f" else int(np.iinfo(dtype).min)


def _highest(dtype: np.dtype[Any]) -> float | int:
    return np.inf if dtype.kind == "f" else int(np.iinfo(dtype).max)


def _extreme_gradient(attrs: AttrMap, x: Any, y: Any, dy: Any) -> Any:
    mask = x.equal(kept_axes(y, attrs, x))
    ties = mask.cast(x.dtype).sum(attrs["axes"], keepdims=True)
    share = kept_axes(dy, attrs, x) / ties
    return masked(expand_to(share, x.shape), mask)


def keeps_partial(reduction: Reduction) -> Extra:
    """A partial of the op's own reduction passes through, unless in a wider dtype."""

    def extra(inputs: Types, outputs: Types, attrs: AttrMap, parts: int) -> tuple[Signature, ...]:
        if inputs[0].dtype is not outputs[0].dtype:
            return ()
        return (Signature((Partial(reduction),), (Partial(reduction),)),)

    return extra


def _register_extreme(
    kind: str,
    ufunc: np.ufunc,
    reduction: Reduction,
    identity: Callable[[np.dtype[Any]], float | int],
) -> None:
    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        (x,), (out,) = inputs, outputs
        axes = context.attrs["axes"]
        keepdims = context.attrs["keepdims"]
        if x.size:
            ufunc.reduce(x, axis=axes, out=out, keepdims=keepdims)
        else:
            # The shard of a split reduced axis may be empty.
            out.fill(identity(out.dtype))

    define_op(
        kind,
        infer=reduction_infer(kind, empty=False),
        rule=reduction_rule,
        inputs=1,
        attrs=REDUCED,
        kernel=kernel,
        gradient=accumulated(of_one(_extreme_gradient)),
        reduction=reduction,
        extra=keeps_partial(reduction),
        flops=1,
        doc=f"The {kind} over axes; equal elements share the gradient equally.",
    )


_register_extreme("max", np.maximum, Reduction.MAX, _lowest)
_register_extreme("min", np.minimum, Reduction.MIN, _highest)


# --- argmax and argmin ----------------------------------------------------------------------------


def _arg_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    ndim = len(inputs[0].shape)
    axes = (attrs["axis"],)
    return _line(ndim, axes, attrs["keepdims"], axes)


def _register_arg(kind: str, find: Callable[..., Any], what: str) -> None:
    def infer(inputs: Types, attrs: AttrMap) -> Types:
        expect_dtype(kind, inputs[0], NUMBERS)
        shape = inputs[0].shape
        axis = attrs["axis"]
        if shape[axis] == 0:
            raise ShapeError(f"{kind} over an empty axis has no value", got=shape)
        reduced = reduced_shape(shape, (axis,), attrs["keepdims"])
        return (TensorType(reduced, DType.INT64),)

    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        (x,), (out,) = inputs, outputs
        axis = context.attrs["axis"]
        index = find(x, axis=axis, keepdims=context.attrs["keepdims"])
        np.copyto(out, index)

    define_op(
        kind,
        infer=infer,
        rule=_arg_rule,
        inputs=1,
        attrs=(
            Axis(),
            Bool("keepdims", False),
        ),
        kernel=kernel,
        flops=1,
        doc=f"The first index of the {what} element along an axis, which stays whole.",
    )


_register_arg("argmax", np.argmax, "greatest")
_register_arg("argmin", np.argmin, "least")
