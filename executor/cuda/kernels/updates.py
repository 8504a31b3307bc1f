"""Kernels on devices of updates that may be skipped, and of the loss's scale.

What the host's kernels read of a tensor to go by it (a scale, whether gradients are finite) the
device goes by here, so that the host does not wait. Updates themselves follow from their formulas
(`ops.update`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from plancompiler.ops.fused_lamb import segments
from plancompiler.ops.kernel import copy_unless_shared, in_float32
from plancompiler.ops.loss_scale import LARGEST_SCALE, SKIPPABLE, guarded_kind
from plancompiler.ops.registry import Kernel, KernelContext, op_def

Array = Any
Arrays = Sequence[Array]


def _loss_scale(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    scale, steps, skipped, broken = inputs
    factor = context.attrs["factor"]
    good = steps + 1
    wrong = broken != 0
    grown = ~wrong & (good >= context.attrs["interval"])
    lower = np.maximum(scale / factor, 1.0)
    higher = np.minimum(scale * factor, LARGEST_SCALE)
    changed = np.where(wrong, lower, np.where(grown, higher, scale))
    np.copyto(outputs[0], changed, casting="same_kind")
    np.copyto(outputs[1], np.where(wrong | grown, 0, good), casting="same_kind")
    np.copyto(outputs[2], np.where(wrong, skipped + 1, skipped), casting="same_kind")


def _guarded(kind: str, plain: Kernel) -> Kernel:
    """An update with found_inf as one input more; the device decides."""
    definition = op_def(kind)
    kept, counts = dict(definition.mutates), definition.counts_steps

    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        *operands, broken = inputs[:-1] if counts else inputs
        made = [np.empty_like(output) for output in outputs]
        step = context.step
        if counts:
            # A number of the device, as what it is computed of: formulas take both.
            context.step = step - inputs[-1].astype(np.float64)
        plain(context, operands, made)
        context.step = step
        for target, (new, output) in enumerate(zip(made, outputs, strict=True)):
            if target in kept:
                copy_unless_shared(operands[kept[target]], output)
            else:
                output.fill(0)
            np.copyto(output, new, where=broken == 0)

    return kernel


def _square_sums(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (out,) = outputs
    out.fill(0)
    for number, place in segments(context):
        for row, flat in enumerate(inputs):
            part = flat[place].astype(out.dtype)
            out[row, number : number + 1] = np.multiply(part, part).sum(keepdims=True)


def _flat_lamb(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (w, u, sums, rate, skipped), (out,) = inputs, outputs
    above, below = sums[0], sums[1]
    usable = (above > 0) & (below > 0)
    # Where a sum is zero or no number, the ratio is that of ones.
    ratio = np.where(usable, above, usable + 1) / np.where(usable, below, usable + 1)
    factors = np.where(usable, np.sqrt(ratio), usable + 1) * rate
    kept = skipped != 0
    for number, place in segments(context):
        moved = w[place] - u[place] * factors[number : number + 1].astype(w.dtype)
        np.copyto(out[place], np.where(kept, w[place], moved))


_GUARDED: dict[str, Kernel] = {
    guarded: _guarded(kind, op_def(kind).kernel)
    for kind in SKIPPABLE
    if op_def(kind).portable and (guarded := guarded_kind(kind)) is not None
}

UPDATE_KERNELS: dict[str, Kernel] = {
    **_GUARDED,
    "flat_lamb_update": in_float32(_flat_lamb),
    "loss_scale_update": _loss_scale,
    "segment_square_sums": _square_sums,
}
"""By op kind, in place of the host's kernels."""
