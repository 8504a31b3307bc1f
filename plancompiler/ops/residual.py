"""The end of a transformer's part: bias, dropout and residual connection in one pass."""

from __future__ import annotations

import numpy as np

from plancompiler.ops import kernel as blocking
from plancompiler.ops.attributes import Float, Int
from plancompiler.ops.dropout import Mask, stream_of
from plancompiler.ops.kernel import contiguous, of_box, rows_of, scratch
from plancompiler.ops.registry import (
    Arrays,
    AttrMap,
    KernelContext,
    Tensors,
    Types,
    apply,
    define_op,
)

_KIND = "bias_dropout_residual"


def _rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    bias = "".join(", d" for _ in inputs[2:])
    return f"... d, ... d{bias} -> ... d"


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    x, residual, *bias = inputs
    if x.size == 0:
        return
    rate = context.attrs["rate"]
    source, beside, target = (rows_of(array) for array in (x, residual, outputs[0]))
    if rate == 0.0:
        step = max(1, blocking.BLOCK_BYTES // (source.shape[1] * source.itemsize))
        for start in blocking.piece_starts(source, len(source), step):
            rows = slice(start, start + step)
            work = source[rows]
            if bias:
                work = np.add(work, bias[0], out=scratch(context, "work", work.shape, x.dtype))
            np.add(work, beside[rows], out=target[rows])
        return
    shape, region = context.input_shapes[0], context.input_regions[0]
    mask = of_box(context, "mask", region, lambda: Mask(shape, region, context.arrays))
    start, threshold = stream_of(context, rate)
    scale = 1.0 / (1.0 - rate)
    for rows, columns, keep in mask.pieces(start, threshold):
        work = scratch(context, "work", keep.shape, x.dtype)
        np.copyto(work, source[rows, columns])
        for each in bias:
            np.add(work, each[columns], out=work)
        np.multiply(work, scale, out=work)
        np.multiply(work, keep, out=work)
        np.add(work, beside[rows, columns], out=target[rows, columns])


def _gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    (dy,) = grads
    dx = apply("dropout", dy, **attrs) if attrs["rate"] else dy
    return (dx, dy, *(dx.sum(tuple(range(len(dy.shape) - 1))) for _ in inputs[2:]))


define_op(
    _KIND,
    infer="x F ... d, residual F ... d, bias? F d -> y F ... d",
    rule=_rule,
    attrs=(
        Float("rate", 0.0, least=0.0, below=1.0),
        Int("key", 0),
    ),
    kernel=contiguous(_kernel),
    gradient=_gradient,
    inplace=((0, 0), (0, 1)),
    doc="(x, residual[, bias]) -> residual + dropout(x + bias), with the bits that `dropout` "
    "has for this `rate` and `key`. Never linear, so that what is partial is reduced before.",
)
