"""Searching: places of elements that are not zero, places in sorted numbers, distinct elements.

How many results a search has depends on numbers, and shapes do not: `nonzero` and `unique` make as
many as their attribute `size` says.
"""

from __future__ import annotations

import math

import numpy as np

from plancompiler.errors import ExecutionError, ShapeError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ops.attributes import Int, Text
from plancompiler.ops.registry import Arrays, AttrMap, KernelContext, Types, define_op
from plancompiler.ops.rule import operand_line


def _whole(ndim: int) -> str:
    """An operand whose axes all stay whole."""
    return operand_line(ndim, whole=range(ndim))


# --- nonzero --------------------------------------------------------------------------------------


def _nonzero_infer(inputs: Types, attrs: AttrMap) -> Types:
    if not inputs[0].shape:
        raise ShapeError(
            "a scalar has no axes along which it has places", got="shape ()", hint="ask x != 0"
        )
    return (TensorType((len(inputs[0].shape), attrs["size"]), DType.INT64),)


def _nonzero_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x,), (out,) = inputs, outputs
    out.fill(context.attrs["fill"])
    size = context.attrs["size"]
    for axis, places in enumerate(np.nonzero(x)):
        count = min(size, len(places))
        out[axis, :count] = places[:count]


define_op(
    "nonzero",
    infer=_nonzero_infer,
    operands="x X -> places int64",
    rule=lambda inputs, outputs, attrs: f"{_whole(len(inputs[0].shape))} -> [axes] [places]",
    attrs=(Int("size", least=0), Int("fill", 0)),
    kernel=_nonzero_kernel,
    flops=1,
    doc="The places of the first `size` elements that are not zero (or True) in row-major order, "
    "as int64 [axes, size]; where there are fewer, `fill`.",
)


# --- searchsorted ---------------------------------------------------------------------------------


def _search_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    row, values = inputs
    np.copyto(outputs[0], np.searchsorted(row, values, side=context.attrs["side"]))


define_op(
    "searchsorted",
    infer="sorted N n, values N ... -> places int64 ...",
    rule="[n], ... -> ...",
    attrs=(Text("side", "left", among=("left", "right")),),
    kernel=_search_kernel,
    flops=lambda inputs, outputs, attrs: (
        math.prod(inputs[1].shape) * max(1, inputs[0].shape[0].bit_length())
    ),
    doc="(sorted [n], values) -> for each value the place at which it would be put in front of "
    "equal ones (side 'left') or behind them ('right'), as int64.",
)


# --- isin -----------------------------------------------------------------------------------------


def _isin_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    own = operand_line(len(inputs[0].shape))
    return f"{own}, {operand_line(len(inputs[1].shape), range(len(inputs[1].shape)), 'b')} -> {own}"


def _isin_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    np.copyto(outputs[0], np.isin(inputs[0], inputs[1]))


define_op(
    "isin",
    infer="x X ..., elements X -> y bool ...",
    rule=_isin_rule,
    kernel=_isin_kernel,
    doc="Whether each element of the first tensor is one of the second; NaN is none.",
)


# --- unique ---------------------------------------------------------------------------------------


def _unique_infer(inputs: Types, attrs: AttrMap) -> Types:
    (x,), size = inputs, attrs["size"]
    vector = TensorType((size,), DType.INT64)
    inverse = TensorType(x.shape, DType.INT64)
    return TensorType((size,), x.dtype), vector, inverse, vector, TensorType((), DType.INT64)


def _unique_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    whole = _whole(len(inputs[0].shape))
    return f"{whole} -> [n], [n], {whole}, [n], ..."


def _unique_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    size = context.attrs["size"]
    values, first, inverse, counts = np.unique(
        inputs[0].reshape(-1),
        return_index=True,
        return_inverse=True,
        return_counts=True,
        equal_nan=False,
    )
    count = len(values)
    if count > size:
        raise ExecutionError(
            "a tensor has more distinct elements than there is room for",
            got=count,
            expected=f"at most {size}",
            hint="make size as large as the tensor, which always suffices",
        )
    for out, made, rest in zip(
        (outputs[0], outputs[1], outputs[3]),
        (values, first, counts),
        (values[-1] if count else 0, 0, 0),
        strict=True,
    ):
        out[:count] = made
        out[count:] = rest
    np.copyto(outputs[2], inverse.reshape(outputs[2].shape))
    outputs[4].fill(count)


define_op(
    "unique",
    infer=_unique_infer,
    operands="x X -> values X, first int64, inverse int64, counts int64, number int64",
    rule=_unique_rule,
    attrs=(Int("size", least=0),),
    kernel=_unique_kernel,
    flops=lambda inputs, outputs, attrs: (
        math.prod(inputs[0].shape) * max(1, math.prod(inputs[0].shape).bit_length())
    ),
    doc="The distinct elements in order (each NaN is one of its own), the place of the first of "
    "each in row-major order, for each element the place of its value, how often each value "
    "occurs, and how many there are. The vectors have `size` elements: the rest repeats the last "
    "value, which then occurs 0 times. More distinct elements than that fail the run.",
)
