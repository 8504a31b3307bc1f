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
    chosen = np.array([[3, 0], [-1, 2], [1, 3], [3, 2], [0, 3]])
    for pieces, bound, overflow in ((1, 10, "error"), (2, 7, "error"), (2, 3, "drop")):
        attrs = {"experts": 4, "pieces": pieces, "bound": bound, "overflow": overflow}
        samples.append(Sample("expert_places", (chosen,), attrs))
    placed = {"pieces": 3, "bound": 4}
    places = np.array([[11, 0], [-1, 5], [4, 2], [8, -1], [1, 9]])
    samples += [
        Sample("scatter_rows", (make.real(5, choices, 3), places), placed) for choices in (1, 2)
    ]
    samples.append(Sample("gather_rows", (make.real(3, 4, 3), places)))
    held = np.array([[1, 2], [0, 0], [4, 0]])
    for transpose, shape in ((False, (3, 2, 3, 5)), (True, (3, 2, 5, 3))):
        inputs = (make.real(3, 4, 3), held, make.real(*shape))
        samples.append(Sample("grouped_matmul", inputs, {"transpose": transpose}))
    inputs = (make.real(3, 4, 3), make.real(3, 4, 5), held)
    samples.append(Sample("grouped_matmul_weight", inputs))
    return samples
