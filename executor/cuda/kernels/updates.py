"""Kernels on devices of updates that may be skipped, and of the loss's scale.

What the host's kernels read of a tensor to go by it (a scale, whether gradients are finite) the
device goes by here, so that the host does not wait. Updates themselves follow from their formulas
(`ops.update`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from plancompiler.ops.kernel import copy_unless_shared
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


_GUARDED: dict[str, Kernel] = {
    guarded: _guarded(kind, op_def(kind).kernel)
    for kind in SKIPPABLE
    if op_def(kind).portable and (guarded := guarded_kind(kind)) is not None
}

UPDATE_KERNELS: dict[str, Kernel] = {**_GUARDED, "loss_scale_update": _loss_scale}
"""By op kind, in place of the host's kernels."""
