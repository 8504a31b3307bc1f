"""Rotary position embedding (J. Su et al., 2021): pairs of features turn with the position."""

from __future__ import annotations

from typing import Any

import numpy as np

from plancompiler.errors import ShapeError
from plancompiler.ir.shard import element_count
from plancompiler.ops import kernel as blocking
from plancompiler.ops.attributes import Bool, Float, Int
from plancompiler.ops.kernel import contiguous, in_float32, of_box, scratch
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    KernelContext,
    Tensors,
    Types,
    apply,
    define_op,
)
from plancompiler.ops.zigzag import positions_of


def _infer(inputs: Types, attrs: AttrMap) -> Types:
    x = inputs[0]
    if x.shape[-1] % 2:
        raise ShapeError(
            "rotary_embedding turns pairs of features", got=x.shape, expected="an even last axis"
        )
    return inputs[:1]


def _rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    position = "".join(", ..." for _ in inputs[1:])
    return f"... t [d]{position} -> ... t [d]"


def _turns(
    context: KernelContext, width: int, dtype: np.dtype[Any], position: int | None
) -> tuple[Array, Array]:
    """Cosines and sines [positions, width / 2] of the positions held here."""
    start, stop = context.input_regions[0][-2]
    length = context.input_shapes[0][-2]

    def turned() -> tuple[Array, Array]:
        attrs, arrays = context.attrs, context.arrays
        offset = attrs["offset"] + (position or 0)
        positions = positions_of(attrs["zigzag"], length, (start, stop), arrays) + float(offset)
        rates = attrs["base"] ** (arrays.arange(0, width, 2) / -max(width, 1))
        angles = np.outer(positions, rates)
        sines = np.sin(angles) * (-1.0 if attrs["inverse"] else 1.0)
        return np.cos(angles).astype(dtype), sines.astype(dtype)

    # Those of a position that changes from call to call are not worth keeping.
    return turned() if position is not None else of_box(context, "turns", (start, stop), turned)


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x, *position), (out,) = inputs, outputs
    length, width = x.shape[-2:]
    cosines, sines = _turns(context, width, x.dtype, int(position[0]) if position else None)
    source, target = (
        array.reshape(element_count(array.shape[:-2]), length, width) for array in (x, out)
    )
    if context.attrs["interleaved"]:
        halves = slice(0, None, 2), slice(1, None, 2)
    else:
        halves = slice(0, width // 2), slice(width // 2, None)
    step = max(1, blocking.BLOCK_BYTES // max(1, length * width * x.itemsize))
    for start in blocking.piece_starts(source, len(source), step):
        piece, made = source[start : start + step], target[start : start + step]
        first, second = (piece[..., half] for half in halves)
        shape = (len(piece), length, width // 2)
        across = scratch(context, "across", shape, x.dtype)
        down = scratch(context, "down", shape, x.dtype)
        # Both products with sines are taken before anything is written, as `made` may be `piece`.
        np.multiply(first, sines, out=across)
        np.multiply(second, sines, out=down)
        for half, part in zip(halves, (first, second), strict=True):
            np.multiply(part, cosines, out=made[..., half])
        np.subtract(made[..., halves[0]], down, out=made[..., halves[0]])
        np.add(made[..., halves[1]], across, out=made[..., halves[1]])


def _gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    turned = {**attrs, "inverse": not attrs["inverse"]}
    back = apply("rotary_embedding", grads[0], *inputs[1:], **turned)
    return (back, *(None for _ in inputs[1:]))


define_op(
    "rotary_embedding",
    infer=_infer,
    operands="x F ... t d, position? p () -> y F",
    rule=_rule,
    attrs=(
        Float("base", least=1.0),
        Int("offset", 0),
        Bool("interleaved", False),
        Bool("inverse", False),
        Int("zigzag", 0, least=0),
    ),
    kernel=in_float32(contiguous(_kernel)),
    gradient=_gradient,
    linear=((0,),),
    flops=3,
    inplace=((0, 0),),
    precision="following",
    doc="x [..., t, d]: pair i of features at position p turned by p * base ** (-2 i / d). "
    "Pairs are feature i and i + d / 2, or neighbours where `interleaved`; positions count "
    "from `offset`, plus a second input, a whole number; with `zigzag` the "
    "sequence is in zigzag order of so many pieces. `inverse` turns back, which is the gradient.",
)
