"""Calls of the ops between micro-batches and steps, where a step has one micro-batch."""

from __future__ import annotations

from tests.ops.sample import Maker, Sample


def samples(make: Maker) -> list[Sample]:
    samples = []
    for shape in ((5, 3), (1,), ()):
        for reduction in ("sum", "max", "min", "prod"):
            attrs = {"reduction": reduction}
            samples.append(Sample("accumulate", (make.real(*shape),), attrs, differentiable=False))
    for kind in ("collect_pieces", "take_piece"):
        for axis in range(2):
            sample = Sample(kind, (make.real(5, 3),), {"axis": axis}, differentiable=False)
            samples.append(sample)
    return samples
