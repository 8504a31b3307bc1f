"""SwiGLU, a gated unit of two products (N. Shazeer, 2020): silu(gate) * up."""

from __future__ import annotations

from typing import Any

import numpy as np

from plancompiler.ops.elementwise_program import kernel_of
from plancompiler.ops.formula import by_formula
from plancompiler.ops.gradient import by_op
from plancompiler.ops.kernel import blocks, in_float32, scratch
from plancompiler.ops.registry import Array, Arrays, AttrMap, KernelContext, define_op


def _sigmoid(x: Array, out: Array) -> None:
    """As 1/2 + tanh(x / 2) / 2, which cannot overflow."""
    np.multiply(x, 0.5, out=out)
    np.tanh(out, out=out)
    np.multiply(out, 0.5, out=out)
    np.add(out, 0.5, out=out)


def _formula(attrs: AttrMap, gate: Any, up: Any) -> Any:
    return gate.sigmoid() * gate * up


def _grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    # With s = sigmoid(gate): dup = dy * gate * s, dgate = dy * up * s * (1 + gate * (1 - s)).
    for gate, up, dy, dgate, dup in blocks(*inputs, *outputs):
        unit = scratch(context, "unit", gate.shape, gate.dtype)
        slope = scratch(context, "slope", gate.shape, gate.dtype)
        value = scratch(context, "value", gate.shape, gate.dtype)
        _sigmoid(gate, unit)
        np.multiply(unit, gate, out=value)
        np.subtract(1.0, unit, out=slope)
        np.multiply(slope, value, out=slope)
        np.add(slope, unit, out=slope)
        np.multiply(slope, up, out=slope)
        np.multiply(value, dy, out=value)
        np.multiply(slope, dy, out=dgate)
        np.copyto(dup, value)


def _grad_formula(attrs: AttrMap, gate: Any, up: Any, dy: Any) -> tuple[Any, Any]:
    unit = gate.sigmoid()
    value = gate * unit
    return dy * up * (unit + (1.0 - unit) * value), dy * value


define_op(
    "swiglu",
    infer="gate F, up F -> y F",
    rule="..., ... -> ...",
    takes_bfloat16=True,
    kernel=kernel_of(_formula),
    formula=_formula,
    gradient=by_op("swiglu", "swiglu_grad"),
    linear=((1,),),
    flops=6,
    inplace=((0, 0), (0, 1)),
    elementwise=True,
    precision="following",
    doc="gate * sigmoid(gate) * up.",
)
define_op(
    "swiglu_grad",
    infer="gate F, up F, dy F -> dgate F, dup F",
    rule="..., ..., ... -> ..., ...",
    kernel=in_float32(_grad_kernel),
    gradient=by_formula(_grad_formula),
    linear=((2,),),
    flops=11,
    inplace=((0, 0), (1, 1), (1, 2)),
    precision="following",
    doc="(gate, up, dy) -> (dgate, dup).",
)
