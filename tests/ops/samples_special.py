"""Calls of special functions."""

from __future__ import annotations

import numpy as np

from tests.ops.sample import Maker, Sample

EVERYWHERE = (
    *("erfc", "erfcx", "log_ndtr", "ndtr", "i0", "i0e", "i1", "i1e", "bessel_j0", "bessel_j1"),
    *("sinc", "spherical_bessel_j0", "deg2rad", "rad2deg"),
)
POSITIVE = (
    *("lgamma", "digamma", "entr", "bessel_y0", "bessel_y1", "modified_bessel_k0"),
    *("modified_bessel_k1", "scaled_modified_bessel_k0", "scaled_modified_bessel_k1"),
)
OF_TWO = ("logaddexp2", "fmax", "fmin")
FORMULAS = ("sinc", "spherical_bessel_j0", "deg2rad", "rad2deg")


def samples(make: Maker) -> list[Sample]:
    """All calls of this file."""
    real, positive, whole = make.real, make.positive, make.whole
    share = np.asarray(positive(5, 3) / 3, make.dtype)
    return [
        *(Sample(kind, (real(5, 3),)) for kind in EVERYWHERE),
        *(Sample(kind, (positive(5, 3),)) for kind in POSITIVE),
        *(Sample(kind, (positive(),)) for kind in ("erfc", "log_ndtr", "bessel_y0", "lgamma")),
        *(Sample(kind, (share,)) for kind in ("erfinv", "ndtri")),
        *(Sample(f"{kind}_grad", (real(5, 3), real(5, 3))) for kind in FORMULAS),
        Sample("entr_grad", (positive(5, 3), real(5, 3))),
        *(Sample("polygamma", (positive(5, 3),), {"order": order}) for order in (0, 1, 2)),
        *(Sample(kind, (real(5, 3), real(3))) for kind in OF_TWO),
        *(Sample(kind, (real(5, 3), positive(3))) for kind in ("xlogy", "xlog1py")),
        Sample("heaviside", (real(5, 3), real(3))),
        *(
            Sample("nextafter", (real(5, 3), real(3)), differentiable=False)
            for _ in range(make.dtype.itemsize > 2)
        ),
        Sample("zeta", (positive(5, 3) + make.dtype.type(1), positive(3)), differentiable=False),
        *(
            Sample(kind, (whole(30, 5, 3), whole(30, 3)), differentiable=False)
            for kind in ("gcd", "lcm")
        ),
        *(
            Sample(kind, (np.array([-np.inf, -1, -0.0, 0, np.nan, np.inf], make.dtype),), {}, False)
            for kind in ("signbit", "isposinf", "isneginf")
        ),
    ]
