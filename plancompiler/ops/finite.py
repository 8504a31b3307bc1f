"""Whether a tensor is finite, what loss scaling asks of gradients before it uses them."""

from __future__ import annotations

import numpy as np

from plancompiler.ir.sbp import Reduction
from plancompiler.ops.kernel import blocks
from plancompiler.ops.registry import Arrays, KernelContext, define_op
from plancompiler.ops.rule import operand_line


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    finite = all(np.isfinite(x).all() for (x,) in blocks(*inputs))
    outputs[0].fill(0.0 if finite else 1.0)


define_op(
    "found_inf",
    infer="x F -> found float32 ()",
    rule=lambda inputs, outputs, attrs: f"{operand_line(len(inputs[0].shape))} -> ...",
    kernel=_kernel,
    reduction=Reduction.MAX,
    flops=1,
    doc="1 if any element is infinite or no number, else 0: a float32 scalar. Devices that "
    "hold parts have partial maxima.",
)
