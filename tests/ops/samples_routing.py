"""Calls of the ops that send rows to experts, and of the one that places a gradient."""

from __future__ import annotations

import numpy as np

from tests.ops.sample import Maker, Sample

COUNTS = np.array([[2, 0, 1], [0, 0, 0], [1, 4, 0], [2, 1, 2]])
"""Rows [group, expert]: groups of 5 rows, some of which belong to no expert."""


def samples(make: Maker) -> list[Sample]:
    samples = [Sample("place_gradient", (make.real(*shape),)) for shape in ((5, 3), (1,), ())]
    samples.append(Sample("place_gradient", (make.real(5, 3),), {"along": 0, "split": 1}))
    for capacity, overflow in ((4, "error"), (2, "drop"), (0, "drop")):
        pack = {"capacity": capacity, "overflow": overflow}
        unpack = {"rows": 5, "overflow": overflow}
        for width in ((), (3,), (2, 3)):
            samples.append(Sample("pack_rows", (make.real(4, 5, *width), COUNTS), pack))
            packed = make.real(4, 3, capacity, *width)
            samples.append(Sample("unpack_rows", (packed, COUNTS), unpack))
    return samples
