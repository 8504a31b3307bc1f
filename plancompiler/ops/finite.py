"""Whether a tensor is finite, what loss scaling asks of gradients before it uses them."""

from __future__ import annotations

import numpy as np

from plancompiler.ir.sbp import Reduction
from plancompiler.ir.shard import element_count
from plancompiler.ops.kernel import block_elements, blocks
from plancompiler.ops.registry import Arrays, AttrMap, KernelContext, Scratch, Types, define_op
from plancompiler.ops.rule import operand_line


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    finite = all(np.isfinite(x).all() for (x,) in blocks(*inputs))
    outputs[0].fill(0.0 if finite else 1.0)


def _scratch(inputs: Types, outputs: Types, attrs: AttrMap) -> Scratch:
    x = inputs[0]
    return Scratch(0, block_elements(element_count(x.shape), x.dtype.itemsize))


define_op(
    "found_inf",
    infer="x F -> found float32 ()",
    rule=lambda inputs, outputs, attrs: f"{operand_line(len(inputs[0].shape))} -> ...",
    kernel=_kernel,
    scratch=_scratch,
    reduction=Reduction.MAX,
    flops=1,
    doc="1 if any element is infinite or no number, else 0: a float32 scalar. Devices that "
    "hold parts have partial maxima.",
)
