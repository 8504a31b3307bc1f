"""Sequences of numbers. Each device computes its own part from the global index."""

from __future__ import annotations

import numpy as np

from plancompiler.errors import DTypeError
from plancompiler.ir.op import TensorType
from plancompiler.ops.attributes import Dtype, Float, Int
from plancompiler.ops.registry import Arrays, AttrMap, KernelContext, Types, define_op


def _arange_infer(inputs: Types, attrs: AttrMap) -> Types:
    dtype = attrs["dtype"]
    for name in ("start", "step"):
        if isinstance(attrs[name], float) and not dtype.is_floating:
            raise DTypeError(
                "arange cannot put fractions into a tensor of its dtype",
                got=f"{name} {attrs[name]!r} for {dtype}",
            )
    return (TensorType((attrs["count"],), dtype),)


def _arange_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    start, step = context.attrs["start"], context.attrs["step"]
    index = np.arange(*context.output_regions[0][0])
    np.copyto(outputs[0], start + step * index, casting="unsafe")


define_op(
    "arange",
    infer=_arange_infer,
    rule="-> n",
    attrs=(
        Float("start", exact=True),
        Float("step", exact=True),
        Int("count", least=0),
        Dtype("dtype"),
    ),
    kernel=_arange_kernel,
    flops=0,
    doc="`count` numbers from `start` on, `step` apart.",
)


def _linspace_infer(inputs: Types, attrs: AttrMap) -> Types:
    dtype = attrs["dtype"]
    if not dtype.is_floating:
        raise DTypeError("linspace needs a floating dtype", got=dtype)
    return (TensorType((attrs["count"],), dtype),)


def _linspace_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    start, stop = context.attrs["start"], context.attrs["stop"]
    last = max(context.output_shapes[0][0] - 1, 1)
    # Each half is computed from its own end, so that both ends are exact.
    index = np.arange(*context.output_regions[0][0])
    step = (stop - start) / last
    values = np.where(2 * index < last, start + step * index, stop - step * (last - index))
    np.copyto(outputs[0], values, casting="same_kind")


define_op(
    "linspace",
    infer=_linspace_infer,
    rule="-> n",
    attrs=(
        Float("start"),
        Float("stop"),
        Int("count", least=0),
        Dtype("dtype"),
    ),
    kernel=_linspace_kernel,
    flops=0,
    doc="`count` numbers at equal distances from `start` to `stop`, both included.",
)
