"""Elements by a condition: `where`, and `masked`, which is linear in what it masks."""

from __future__ import annotations

import numpy as np

from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ops.check import (
    FLOATS,
    broadcast_shapes,
    expect_dtype,
    expect_same_dtype,
)
from plancompiler.ops.elementwise import BINARY_RULE
from plancompiler.ops.gradient import masked, reduce_to
from plancompiler.ops.kernel import copy_unless_shared, keep_where
from plancompiler.ops.registry import (
    Arrays,
    AttrMap,
    KernelContext,
    Tensors,
    Types,
    apply,
    define_op,
)


def _masked_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_dtype("masked", inputs[0], FLOATS)
    expect_dtype("masked", inputs[1], frozenset({DType.BOOL}), "mask")
    shape = broadcast_shapes("masked", [one.shape for one in inputs])
    return (TensorType(shape, inputs[0].dtype),)


define_op(
    "masked",
    infer=_masked_infer,
    rule=BINARY_RULE,
    inputs=2,
    kernel=lambda context, inputs, outputs: keep_where(inputs[0], inputs[1], outputs[0]),
    gradient=lambda attrs, inputs, outputs, grads: (
        reduce_to(masked(grads[0], inputs[1]), inputs[0].shape),
        None,
    ),
    linear=((0,),),
    inplace=((0, 0),),
    takes_bfloat16=True,
    elementwise=True,
    precision="following",
    code="({1} ? {0} : T(0))",
    doc="(x, mask) -> x where the mask is true, else 0, whatever x is there; they broadcast.",
)


def _where_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_dtype("where", inputs[0], frozenset({DType.BOOL}), "condition")
    dtype = expect_same_dtype("where", inputs[1:])
    return (TensorType(broadcast_shapes("where", [one.shape for one in inputs]), dtype),)


def _where_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    condition, x, y = inputs
    copy_unless_shared(y, outputs[0])
    np.copyto(outputs[0], x, where=condition)


def _where_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    condition, x, y = inputs
    grad = grads[0]
    return (
        None,
        reduce_to(masked(grad, condition), x.shape),
        reduce_to(masked(grad, apply("logical_not", condition)), y.shape),
    )


define_op(
    "where",
    infer=_where_infer,
    rule="..., ..., ... -> ...",
    kernel=_where_kernel,
    gradient=_where_gradient,
    linear=((1, 2),),
    inplace=((0, 2),),
    elementwise=True,
    precision="following",
    code="({0} ? {1} : {2})",
    doc="x where the condition holds, else y; all three broadcast.",
)
