"""Calls of the ops that search, and of arithmetic on whole numbers."""

from __future__ import annotations

import numpy as np

from tests.ops.sample import Maker, Sample


def samples(make: Maker) -> list[Sample]:
    """All calls of this file."""
    real, whole = make.real, make.whole
    return [
        Sample("ravel_index", (whole(5, 7) - 2,), {"extents": (5,)}, differentiable=False),
        Sample("ravel_index", (whole(3, 4, 1), whole(5, 6) - 5), {"extents": (3, 5)}, False),
        Sample("nonzero", (make.truth(5, 3),), {"size": 6, "fill": 7}, differentiable=False),
        Sample("nonzero", (whole(3, 5),), {"size": 2}, differentiable=False),
        Sample("searchsorted", (np.sort(real(6)), real(5, 3)), differentiable=False),
        Sample("searchsorted", (np.sort(whole(9, 7)), whole(9, 5)), {"side": "right"}, False),
        Sample("isin", (whole(9, 5, 3), whole(9, 2, 2)), differentiable=False),
        Sample("isin", (make.truth(), make.truth(3)), differentiable=False),
        Sample("unique", (whole(5, 4, 3),), {"size": 12}, differentiable=False),
        Sample("unique", (real(5),), {"size": 5}, differentiable=False),
        Sample("pow", (whole(9, 5), whole(4, 3, 5)), differentiable=False),
        Sample("pow_scalar", (whole(9, 5),), {"scalar": 4}, False),
        Sample("pow_scalar", (whole(9, 5),), {"scalar": 3, "swapped": True}, False),
        Sample("neg", (whole(9, 5).astype(np.uint32),), differentiable=False),
        Sample("var", (real(5, 0),), {"axes": (1,)}, differentiable=False),
        Sample("std", (real(0),), {"axes": (0,), "keepdims": True}, differentiable=False),
    ]
