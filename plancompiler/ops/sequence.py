"""Sequences of numbers. Each device computes its own part from the global index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plancompiler.errors import DTypeError
from plancompiler.ir.op import TensorType
from plancompiler.ops.check import dtype_attr, expect_inputs, float_attr, int_attr, only_attrs
from plancompiler.ops.registry import (
    Array,
    AttrMap,
    KernelContext,
    OpDef,
    Types,
    register,
)
from plancompiler.ops.shape import no_flops


def _arange_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_inputs("arange", inputs, 0)
    only_attrs("arange", attrs, "start", "step", "count", "dtype")
    dtype = dtype_attr(attrs)
    for name in ("start", "step"):
        float_attr(attrs, name)
        if isinstance(attrs[name], float) and not dtype.is_floating:
            raise DTypeError(
                "arange cannot put fractions into a tensor of its dtype",
                got=f"{name} {attrs[name]!r} for {dtype}",
            )
    return (TensorType((int_attr(attrs, "count", least=0),), dtype),)


def _arange_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    start, step = context.attrs["start"], context.attrs["step"]
    index = np.arange(*context.output_regions[0][0])
    np.copyto(outputs[0], start + step * index, casting="unsafe")  # type: ignore[operator]  # numbers, as checked


register(
    OpDef(
        "arange",
        infer=_arange_infer,
        rule="-> n",
        kernel=_arange_kernel,
        flops=no_flops,
        doc="`count` numbers from `start` on, `step` apart.",
    )
)


def _linspace_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_inputs("linspace", inputs, 0)
    only_attrs("linspace", attrs, "start", "stop", "count", "dtype")
    float_attr(attrs, "start")
    float_attr(attrs, "stop")
    dtype = dtype_attr(attrs)
    if not dtype.is_floating:
        raise DTypeError("linspace needs a floating dtype", got=dtype)
    return (TensorType((int_attr(attrs, "count", least=0),), dtype),)


def _linspace_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    start, stop = float_attr(context.attrs, "start"), float_attr(context.attrs, "stop")
    last = max(context.output_shapes[0][0] - 1, 1)
    # Each half is computed from its own end, so that both ends are exact.
    index = np.arange(*context.output_regions[0][0])
    step = (stop - start) / last
    found = np.where(2 * index < last, start + step * index, stop - step * (last - index))
    np.copyto(outputs[0], found, casting="same_kind")


register(
    OpDef(
        "linspace",
        infer=_linspace_infer,
        rule="-> n",
        kernel=_linspace_kernel,
        flops=no_flops,
        doc="`count` numbers at equal distances from `start` to `stop`, both included.",
    )
)
