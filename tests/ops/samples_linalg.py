"""Calls of linear algebra, on matrices far from singular."""

from __future__ import annotations

import numpy as np

from tests.ops.sample import Maker, Sample

FREE_SIGNS = {"eigh", "qr", "svd"}
"""Kinds whose vectors are as right with the other sign, which cuSOLVER and LAPACK choose each for
itself."""


def samples(make: Maker) -> list[Sample]:
    """All calls of this file."""

    def square(size: int, *batch: int) -> np.ndarray:
        steps = np.diag(np.arange(2.0, 2.0 + size))
        return np.asarray(make.real(*batch, size, size) * 0.4 + steps, make.dtype)

    def positive(size: int, *batch: int) -> np.ndarray:
        x = square(size, *batch).astype(np.float64)
        return np.asarray((x + np.swapaxes(x, -1, -2)) / 2 + np.eye(size), make.dtype)

    def oblong(rows: int, columns: int) -> np.ndarray:
        size = max(rows, columns)
        return square(size, 5)[:, :rows, :columns].copy()

    several = ("inv", "det", "cofactors", "slogdet", "matrix_exp", "pinv", "svd", "qr", "lu_factor")
    sides = ("pinv", "svd", "qr", "lu_factor")
    return [
        *(Sample(kind, (square(3, 5),)) for kind in several),
        *(Sample(kind, (square(2, 2, 3),)) for kind in ("inv", "det")),
        *(Sample(kind, (oblong(3, 2),)) for kind in sides),
        *(Sample(kind, (oblong(2, 3),)) for kind in sides),
        Sample("pinv", (square(3),), {"rank": 3}),
        Sample("qr", (oblong(2, 3),), {"complete": True}),
        Sample("svd", (square(3),), {"full": True}),
        Sample("cholesky", (positive(3, 5),)),
        Sample("eigh", (positive(3, 5),)),
        Sample("solve", (square(3, 5), make.real(5, 3, 2))),
        Sample("solve", (square(3), make.real(3, 5))),
        Sample(
            "pivot_matrix",
            (np.array([[3, 3, 3], [1, 2, 3]], np.int32),),
            {"rows": 4, "dtype": "float64"},
            differentiable=False,
        ),
    ]
