"""SwiGLU, a gated unit of two products (N. Shazeer, 2020): silu(gate) * up."""

from __future__ import annotations

from typing import Any

import numpy as np

from plancompiler.ops.check import (
    FLOATS,
    expect_dtype,
    expect_same_dtype,
    expect_shape,
)
from plancompiler.ops.formula import by_formula
from plancompiler.ops.kernel import blocks, in_float32, scratch
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    Infer,
    KernelContext,
    OpDef,
    Tensors,
    Types,
    apply,
    register,
)


def _infer_of(kind: str, results: int) -> Infer:
    def infer(inputs: Types, attrs: AttrMap) -> Types:
        for tensor in inputs:
            expect_dtype(kind, tensor, FLOATS)
            expect_shape(kind, tensor, inputs[0].shape, "inputs")
        expect_same_dtype(kind, inputs)
        return inputs[:results]

    return infer


def _sigmoid(x: Array, out: Array) -> None:
    """As 1/2 + tanh(x / 2) / 2, which cannot overflow."""
    np.multiply(x, 0.5, out=out)
    np.tanh(out, out=out)
    np.multiply(out, 0.5, out=out)
    np.add(out, 0.5, out=out)


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    for gate, up, out in blocks(*inputs, *outputs):
        work = scratch(context, "work", gate.shape, gate.dtype)
        _sigmoid(gate, work)
        np.multiply(work, gate, out=work)
        np.multiply(work, up, out=out)


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


def _gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    passed: tuple[Any, ...] = apply("swiglu_grad", *inputs, grads[0])
    return passed


register(
    OpDef(
        "swiglu",
        infer=_infer_of("swiglu", 1),
        rule="..., ... -> ...",
        kernel=in_float32(_kernel),
        gradient=_gradient,
        linear=((1,),),
        flops=6,
        inplace=((0, 0), (0, 1)),
        elementwise=True,
        precision="following",
        doc="gate * sigmoid(gate) * up.",
    )
)
register(
    OpDef(
        "swiglu_grad",
        infer=_infer_of("swiglu_grad", 2),
        rule="..., ..., ... -> ..., ...",
        kernel=in_float32(_grad_kernel),
        gradient=by_formula(_grad_formula),
        linear=((2,),),
        flops=11,
        inplace=((0, 0), (1, 1), (1, 2)),
        precision="following",
        doc="(gate, up, dy) -> (dgate, dup).",
    )
)
