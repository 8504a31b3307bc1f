"""What distributed LAMB needs beside the steps of `optimizer_steps`: gradients added up over steps,
clipping before a reduction, one decision per step for all parameters, and the same steps on many
parameters that lie behind each other in one flat buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from plancompiler.errors import AttributeValueError
from plancompiler.ir.op import TensorType
from plancompiler.ir.sbp import PARTIAL_SUM, Partial
from plancompiler.ops.attributes import Float, Int, Ints
from plancompiler.ops.check import (
    FLOATS,
    expect_dtype,
    expect_shape,
)
from plancompiler.ops.kernel import blocks, copy_unless_shared, in_float32, scratch
from plancompiler.ops.registry import (
    AT_LEAST_ONE,
    Array,
    Arrays,
    AttrMap,
    KernelContext,
    Types,
    define_op,
)
from plancompiler.ops.rule import NdSignature, Signature

# --- gradients of several steps -------------------------------------------------------------------


def _sum_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (total, gradient), (out,) = inputs, outputs
    scale = context.attrs["grad_scale"]
    if scale != 1.0:
        gradient = gradient * scale
    if context.step % context.attrs["every"] == 0:
        copy_unless_shared(gradient, out)
    else:
        np.add(total, gradient, out=out)


define_op(
    "gradient_sum_update",
    infer="sum F, gradient F -> sum F",
    rule="..., ... -> ...",
    attrs=(Int("every", least=1), Float("grad_scale", 1.0)),
    scaled=(1,),
    skips_itself=True,
    kernel=_sum_kernel,
    linear=((0, 1),),
    mutates=((0, 0),),
    counts_steps=True,
    doc="(sum, g) -> g in every `every`-th step, counted from step 0, and sum + g in others.",
)


# --- clipping before a reduction ------------------------------------------------------------------


def _clip_infer(inputs: Types, attrs: AttrMap) -> Types:
    if not attrs["max_norm"] > 0:
        raise AttributeValueError("a norm is clipped to a positive number", got=attrs["max_norm"])
    for tensor in inputs:
        expect_dtype("clip_addends", tensor, FLOATS)
    return inputs


def _clip_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    whole = [
        " ".join(f"[a{place}_{axis}]" for axis in range(len(tensor.shape))) or "..."
        for place, tensor in enumerate(inputs)
    ]
    return f"{', '.join(whole)} -> {', '.join(whole)}"


def _clip_extra(inputs: Types, outputs: Types, attrs: AttrMap, parts: int) -> Sequence[Signature]:
    count = len(inputs)
    return (Signature((PARTIAL_SUM,) * count, (PARTIAL_SUM,) * count),)


def _clip_legal(
    inputs: Types,
    outputs: Types,
    attrs: AttrMap,
    signature: NdSignature,
    hierarchy: tuple[int, ...],
) -> bool:
    """Gradients are addends wherever there are several devices: nothing is reduced before."""
    return all(
        isinstance(entry, Partial)
        for entry, extent in zip(signature.inputs[0], hierarchy, strict=True)
        if extent > 1
    )


def _clip_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    limit = context.attrs["max_norm"]
    scale = context.attrs["grad_scale"]
    norm = math.sqrt(sum(_square_sum(each) for each in inputs)) * abs(scale)
    factor = min(1.0, limit / (norm + context.attrs["eps"])) * scale
    for source, target in zip(inputs, outputs, strict=True):
        np.multiply(source, factor, out=target)


def _square_sum(array: Array) -> float:
    """In float64, piece by piece."""
    return sum(
        float(np.dot(flat, flat))
        for (piece,) in blocks(array)
        for flat in (piece.reshape(-1).astype(np.float64),)
    )


define_op(
    "clip_addends",
    infer=_clip_infer,
    rule=_clip_rule,
    inputs=AT_LEAST_ONE,
    attrs=(
        Float("max_norm"),
        Float("eps", 1e-06, least=0.0),
        Float("grad_scale", 1.0),
    ),
    scaled=range(AT_LEAST_ONE.stop),
    kernel=_clip_kernel,
    extra=_clip_extra,
    legal=_clip_legal,
    doc="(g, ...) -> gradients scaled together to the norm `max_norm` where theirs is greater. "
    "They are partial, and every device scales its own addends by their own norm: the result "
    "depends on who holds what, as clipping before a reduction does. Of what is whole the "
    "first device has all.",
)


# --- one decision for all -------------------------------------------------------------------------


def _control_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    attrs = context.attrs
    total, count = float(inputs[0]), int(inputs[1])
    every, limit = attrs["every"], attrs["max_norm"]
    norm = math.sqrt(total) / every if total >= 0 and math.isfinite(total) else math.inf
    skipped = not math.isfinite(norm) or context.step % every != every - 1
    factor = min(1.0, limit / (norm + attrs["eps"])) if limit else 1.0
    outputs[0].fill(factor / every)
    outputs[1].fill(skipped)
    outputs[2].fill(count if skipped else count + 1)


define_op(
    "lamb_control",
    infer="squares F (), count int32 () -> factor F (), skipped F (), count int32 ()",
    rule="..., ... -> ..., ..., ...",
    attrs=(
        Int("every", least=1),
        Float("max_norm", 0.0, least=0.0),
        Float("eps", 1e-06, least=0.0),
    ),
    kernel=_control_kernel,
    mutates=((2, 1),),
    skips_itself=True,
    counts_steps=True,
    doc="(sum of squares of all gradients, updates so far) -> (what gradients are multiplied "
    "with, whether this step updates nothing, updates with this one). Gradients are sums of "
    "`every` steps, and the last of these updates, unless the sum of squares is not finite. "
    "Their mean is clipped to `max_norm`, if it is not 0.",
)


# --- flat buffers ---------------------------------------------------------------------------------


def _check_flat(attrs: AttrMap, inputs: Types, kind: str) -> tuple[int, ...]:
    """The sizes of segments, which flat buffers must have."""
    sizes: tuple[int, ...] = attrs["sizes"]
    if any(size < 0 for size in sizes):
        raise AttributeValueError(f"{kind} needs sizes of at least 0", got=sizes)
    for flat in inputs:
        expect_shape(kind, flat, (sum(sizes),), f"buffer of {len(sizes)} segments")
    return sizes


def segments(context: KernelContext) -> list[tuple[int, slice]]:
    """Number and local place of every segment that this device holds a part of."""
    by_box = context.state.setdefault("segments", {})
    low, high = box = context.input_regions[0][0]
    if box not in by_box:
        ends = np.cumsum((0, *context.attrs["sizes"]))
        pairs = zip(np.maximum(ends[:-1], low), np.minimum(ends[1:], high), strict=True)
        by_box[box] = [
            (number, slice(int(start) - low, int(stop) - low))
            for number, (start, stop) in enumerate(pairs)
            if start < stop
        ]
    cut: list[tuple[int, slice]] = by_box[box]
    return cut


def _square_sums_infer(inputs: Types, attrs: AttrMap) -> Types:
    sizes = _check_flat(attrs, inputs, "segment_square_sums")
    return (TensorType((2, len(sizes)), inputs[0].dtype.accumulator),)


def _square_sums_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (out,) = outputs
    out.fill(0)
    for number, place in segments(context):
        for row, flat in zip(out, inputs, strict=True):
            row[number] = _square_sum(flat[place])


define_op(
    "segment_square_sums",
    infer=_square_sums_infer,
    operands="first F, second F -> sums A",
    rule="a, a -> [two] [n]",
    attrs=(Ints("sizes"),),
    kernel=_square_sums_kernel,
    flops=4,
    portable=False,
    doc="Two flat buffers [a], cut into segments of these `sizes` -> the sums of squares of "
    "each, [2, n], in at least float32.",
)


def _flat_infer(inputs: Types, attrs: AttrMap) -> Types:
    kind = "flat_lamb_update"
    sizes = _check_flat(attrs, inputs[:2], kind)
    expect_shape(kind, inputs[2], (2, len(sizes)), "sums of squares")
    return inputs[:1]


def _flat_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (w, u, sums, rate, skipped), (out,) = inputs, outputs
    if skipped:
        copy_unless_shared(w, out)
        return
    for number, place in segments(context):
        above, below = float(sums[0, number]), float(sums[1, number])
        trust = math.sqrt(above / below) if above > 0 and below > 0 else 1.0
        for each, step, to in blocks(w[place], u[place], out[place]):
            work = scratch(context, "work", each.shape, each.dtype)
            np.multiply(step, float(rate) * trust, out=work)
            np.subtract(each, work, out=to)


define_op(
    "flat_lamb_update",
    infer=_flat_infer,
    operands="w F, u F, sums f, rate f (), skipped f () -> w F",
    rule="a, a, [two] [n], ..., ... -> a",
    attrs=(Ints("sizes"),),
    kernel=in_float32(_flat_kernel),
    flops=2,
    inplace=((0, 0),),
    portable=False,
    doc="(w [a], u [a], sums of squares of the segments of both [2, n], lr, skipped) -> "
    "w - lr trust u, where the trust ratio is that of each segment (see lamb_update), or w "
    "where `skipped` is not 0.",
)
