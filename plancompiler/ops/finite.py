"""Whether a tensor is finite, what loss scaling asks of gradients before it uses them."""

from __future__ import annotations

import numpy as np

from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ir.sbp import Reduction
from plancompiler.ops.check import FLOATS, expect_dtype
from plancompiler.ops.kernel import blocks
from plancompiler.ops.registry import Arrays, AttrMap, KernelContext, OpDef, Types, register
from plancompiler.ops.rule import operand_line


def _infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_dtype("found_inf", inputs[0], FLOATS)
    return (TensorType((), DType.FLOAT32),)


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    finite = all(np.isfinite(x).all() for (x,) in blocks(*inputs))
    outputs[0].fill(0.0 if finite else 1.0)


def _rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    return f"{operand_line(len(inputs[0].shape))} -> ..."


register(
    OpDef(
        "found_inf",
        infer=_infer,
        rule=_rule,
        inputs=1,
        kernel=_kernel,
        reduction=Reduction.MAX,
        flops=1,
        doc="1 if any element is infinite or no number, else 0: a float32 scalar. Devices that "
        "hold parts have partial maxima.",
    )
)
