"""Reductions along axes: sum, max, min and argmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plancompiler.errors import ShapeError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ir.sbp import Partial, Reduction
from plancompiler.ir.shard import element_count
from plancompiler.ops.check import (
    NUMBERS,
    axes_attr,
    axis_attr,
    bool_attr,
    expect_dtype,
    expect_inputs,
    only_attrs,
)
from plancompiler.ops.gradient import expand_to, masked
from plancompiler.ops.kernel import in_float32
from plancompiler.ops.registry import (
    Array,
    AttrMap,
    Extra,
    Infer,
    KernelContext,
    OpDef,
    Types,
    register,
)
from plancompiler.ops.rule import Signature, operand_line


def _reduced_shape(shape: tuple[int, ...], axes: Sequence[int], keepdims: bool) -> tuple[int, ...]:
    if keepdims:
        return tuple(1 if axis in axes else extent for axis, extent in enumerate(shape))
    return tuple(extent for axis, extent in enumerate(shape) if axis not in axes)


def _infer_of(kind: str, empty: bool) -> Infer:
    """`empty` says whether a reduction over no elements has a value."""

    def infer(inputs: Types, attrs: AttrMap) -> Types:
        expect_inputs(kind, inputs, 1)
        only_attrs(kind, attrs, "axes", "keepdims")
        expect_dtype(kind, inputs[0], NUMBERS)
        shape = inputs[0].shape
        axes = axes_attr(attrs, len(shape))
        if not empty and any(shape[axis] == 0 for axis in axes):
            raise ShapeError(f"{kind} over an empty axis has no value", got=shape)
        reduced = _reduced_shape(shape, axes, bool_attr(attrs, "keepdims", False))
        return (TensorType(reduced, inputs[0].dtype),)

    return infer


def _rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    ndim = len(inputs[0].shape)
    axes = axes_attr(attrs, ndim)
    keepdims = bool_attr(attrs, "keepdims", False)
    kept = [
        "1" if axis in axes else f"a{axis}" for axis in range(ndim) if keepdims or axis not in axes
    ]
    return f"{operand_line(ndim)} -> {' '.join(kept) or '...'}"


def _input_flops(inputs: Types, outputs: Types, attrs: AttrMap) -> int:
    return element_count(inputs[0].shape)


def _kept_axes(tensor: Any, attrs: AttrMap, source: Any) -> Any:
    """An output (or its gradient) with the reduced axes back as axes of extent 1."""
    if bool_attr(attrs, "keepdims", False):
        return tensor
    return tensor.reshape(_reduced_shape(source.shape, axes_attr(attrs, source.ndim), True))


# --- sum ------------------------------------------------------------------------------------------


def _sum_kernel(context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    (x,), (out,) = inputs, outputs
    axes = axes_attr(context.attrs, x.ndim)
    keepdims = bool_attr(context.attrs, "keepdims", False)
    np.add.reduce(x, axis=axes, dtype=out.dtype, out=out, keepdims=keepdims)


def _sum_gradient(
    attrs: AttrMap, inputs: Sequence[Any], outputs: Sequence[Any], grads: Sequence[Any]
) -> Sequence[Any]:
    return (expand_to(_kept_axes(grads[0], attrs, inputs[0]), inputs[0].shape),)


register(
    OpDef(
        "sum",
        infer=_infer_of("sum", empty=True),
        rule=_rule,
        kernel=in_float32(_sum_kernel),
        gradient=_sum_gradient,
        linear=((0,),),
        flops=_input_flops,
        doc="The sum over axes, in the dtype of the input.",
    )
)


# --- max and min ----------------------------------------------------------------------------------


def _lowest(dtype: np.dtype[Any]) -> float | int:
    return -np.inf if dtype.kind == "f" else int(np.iinfo(dtype).min)


def _highest(dtype: np.dtype[Any]) -> float | int:
    return np.inf if dtype.kind == "f" else int(np.iinfo(dtype).max)


def _extreme_gradient(
    attrs: AttrMap, inputs: Sequence[Any], outputs: Sequence[Any], grads: Sequence[Any]
) -> Sequence[Any]:
    x = inputs[0]
    mask = x.equal(_kept_axes(outputs[0], attrs, x))
    ties = mask.cast(x.dtype).sum(axes_attr(attrs, x.ndim), keepdims=True)
    share = _kept_axes(grads[0], attrs, x) / ties
    return (masked(expand_to(share, x.shape), mask),)


def _extreme_extra(reduction: Reduction) -> Extra:
    def extra(inputs: Types, outputs: Types, attrs: AttrMap, parts: int) -> tuple[Signature, ...]:
        return (Signature((Partial(reduction),), (Partial(reduction),)),)

    return extra


def _register_extreme(
    kind: str,
    ufunc: np.ufunc,
    reduction: Reduction,
    identity: Callable[[np.dtype[Any]], float | int],
) -> None:
    def kernel(context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        (x,), (out,) = inputs, outputs
        axes = axes_attr(context.attrs, x.ndim)
        keepdims = bool_attr(context.attrs, "keepdims", False)
        if x.size:
            ufunc.reduce(x, axis=axes, out=out, keepdims=keepdims)
        else:
            # The shard of a split reduced axis may be empty.
            out.fill(identity(out.dtype))

    register(
        OpDef(
            kind,
            infer=_infer_of(kind, empty=False),
            rule=_rule,
            kernel=kernel,
            gradient=_extreme_gradient,
            reduction=reduction,
            extra=_extreme_extra(reduction),
            flops=_input_flops,
            doc=f"The {kind} over axes; equal elements share the gradient equally.",
        )
    )


_register_extreme("max", np.maximum, Reduction.MAX, _lowest)
_register_extreme("min", np.minimum, Reduction.MIN, _highest)


# --- argmax ---------------------------------------------------------------------------------------


def _argmax_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_inputs("argmax", inputs, 1)
    only_attrs("argmax", attrs, "axis", "keepdims")
    expect_dtype("argmax", inputs[0], NUMBERS)
    shape = inputs[0].shape
    axis = axis_attr(attrs, len(shape))
    if shape[axis] == 0:
        raise ShapeError("argmax over an empty axis has no value", got=shape)
    reduced = _reduced_shape(shape, (axis,), bool_attr(attrs, "keepdims", False))
    return (TensorType(reduced, DType.INT64),)


def _argmax_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    ndim = len(inputs[0].shape)
    axis = axis_attr(attrs, ndim)
    keepdims = bool_attr(attrs, "keepdims", False)
    kept = ["1" if each == axis else f"a{each}" for each in range(ndim) if keepdims or each != axis]
    return f"{operand_line(ndim, whole=(axis,))} -> {' '.join(kept) or '...'}"


def _argmax_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    (x,), (out,) = inputs, outputs
    axis = axis_attr(context.attrs, x.ndim)
    found = np.argmax(x, axis=axis, keepdims=bool_attr(context.attrs, "keepdims", False))
    np.copyto(out, found)


register(
    OpDef(
        "argmax",
        infer=_argmax_infer,
        rule=_argmax_rule,
        kernel=_argmax_kernel,
        flops=_input_flops,
        doc="The first index of the greatest element along an axis, which stays whole.",
    )
)
