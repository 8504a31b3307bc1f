"""Calls of updates that can be skipped, made from those that cannot."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from plancompiler.ops.loss_scale import guarded_kind
from plancompiler.ops.registry import op_def
from tests.ops.sample import Maker, Sample


def samples(make: Maker, others: Iterable[Sample]) -> list[Sample]:
    """Each update of `others`, done and skipped; and updates of the scale of a loss."""
    samples = []
    for sample in others:
        kind = guarded_kind(sample.kind)
        if kind is not None:
            for flag in (0.0, 1.0):
                # Samples run in step 0: the count is that of step 5.
                skipped = [np.array(-5, np.int32)] * op_def(sample.kind).counts_steps
                inputs = (*sample.inputs, np.array(flag, make.dtype), *skipped)
                samples.append(Sample(kind, inputs, sample.attrs, differentiable=False))
    for scale, good, flag in ((8.0, 0, 0.0), (8.0, 2, 0.0), (8.0, 2, 1.0), (1.0, 0, 1.0)):
        counts = np.array(good, np.int32), np.array(3, np.int32)
        inputs = (np.array(scale, make.dtype), *counts, np.array(flag, make.dtype))
        samples.append(Sample("loss_scale_update", inputs, {"interval": 3}, differentiable=False))
    return samples
