"""Calls of the further elementwise ops, activations, reductions, scans and orders."""

from __future__ import annotations

import numpy as np

from tests.ops.sample import Maker, Sample

UNARY = (
    "sin",
    "cos",
    "tan",
    "atan",
    "sinh",
    "cosh",
    "asinh",
    "exp2",
    "expm1",
    "reciprocal",
    "floor",
    "ceil",
    "round",
    "trunc",
    "erf",
    "isnan",
    "isinf",
    "isfinite",
)
POSITIVE_UNARY = ("log2", "log10", "log1p")
UNIT_UNARY = ("asin", "acos", "atanh")
ACTIVATIONS = (
    "softplus",
    "logsigmoid",
    "silu",
    "mish",
    "elu",
    "selu",
    "leaky_relu",
    "hardsigmoid",
    "hardswish",
    "softsign",
    "gelu_exact",
)
BINARY = ("atan2", "hypot", "logaddexp", "copysign")
DIVISIONS = ("fmod", "remainder", "floor_divide")


def samples(make: Maker) -> list[Sample]:
    """All calls of this file."""
    return [
        *_unary(make),
        *_activations(make),
        *_binary(make),
        *_bits(make),
        *_reductions(make),
        *_scans(make),
        *_orders(make),
    ]


def _unary(make: Maker) -> list[Sample]:
    real, positive, whole = make.real, make.positive, make.whole
    samples = [Sample(kind, (real(*shape),)) for kind in UNARY for shape in ((5, 3), ())]
    samples += [Sample(kind, (positive(5, 2),)) for kind in POSITIVE_UNARY]
    samples += [Sample(kind, (real(5, 2) * make.dtype.type(0.4),)) for kind in UNIT_UNARY]
    strange = real(5, 3)
    strange[0], strange[3] = (np.nan, np.inf, -np.inf), (0.5, np.nan, -np.inf)
    samples += [
        Sample("acosh", (positive(5, 2) + make.dtype.type(1),)),
        *(Sample(kind, (strange,), {}, False) for kind in ("isnan", "isinf", "isfinite")),
        Sample("nan_to_num", (real(5, 3),)),
        Sample(
            "nan_to_num", (strange,), {"nan": 1.0, "posinf": 9.0, "neginf": float("-inf")}, False
        ),
        Sample("clip", (real(5, 3),), {"low": -0.71, "high": 0.73}),
        Sample("clip", (real(5),), {"low": 0.3}),
        Sample("clip", (whole(9, 5, 2),), {"high": 4}, differentiable=False),
        Sample("lerp", (real(5, 3), real(5, 3), real(5, 3))),
        Sample("lerp", (real(5, 1), real(3), real())),
    ]
    return samples


def _activations(make: Maker) -> list[Sample]:
    real = make.real
    samples = []
    for kind in ACTIVATIONS:
        # From -4 to 4, beyond the bends of the hard ones.
        samples.append(Sample(kind, (real(5, 3) * make.dtype.type(2.01),)))
        samples.append(Sample(f"{kind}_grad", (real(5, 3), real(5, 3))))
    samples += [
        Sample("elu", (real(5, 2),), {"alpha": 0.7}),
        Sample("leaky_relu", (real(),), {"slope": 0.3}),
        Sample("leaky_relu_grad", (real(5), real(5)), {"slope": 0.3}),
    ]
    return samples


def _binary(make: Maker) -> list[Sample]:
    real, positive, whole = make.real, make.positive, make.whole
    pairs = [((5, 3), (5, 3)), ((2, 1, 3), (5, 1)), ((4, 3), ())]
    samples = [Sample(kind, (real(*a), real(*b))) for kind in BINARY for a, b in pairs]
    samples += [Sample(kind, (real(*a), positive(*b))) for kind in DIVISIONS for a, b in pairs]
    samples += [
        Sample(kind, (whole(9, 5) - 4, whole(3, 3, 5) + 1), differentiable=False)
        for kind in DIVISIONS
    ]
    return samples


def _bits(make: Maker) -> list[Sample]:
    whole, truth = make.whole, make.truth
    samples = []
    for kind in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        samples.append(Sample(kind, (whole(99, 5, 3), whole(99, 3)), differentiable=False))
        samples.append(Sample(kind, (truth(5), truth(5)), differentiable=False))
    samples += [
        Sample(kind, (whole(99, 5, 3) - 50, whole(4, 3)), differentiable=False)
        for kind in ("shift_left", "shift_right")
    ]
    for kind in ("logical_and", "logical_or", "logical_xor"):
        samples.append(Sample(kind, (truth(5, 3), truth(5, 1)), differentiable=False))
        samples.append(Sample(kind, (truth(5), truth(5)), differentiable=False))
    for options in ({}, {"equal_nan": True}):
        close = {"rtol": 0.1, "atol": 0.01, **options}
        pair = make.real(5, 3), make.real(3)
        samples.append(Sample("isclose", pair, close, differentiable=False))
    samples += [
        Sample("bitwise_not", (whole(99, 5, 3).astype(np.uint8),), differentiable=False),
        Sample("bitwise_not", (truth(5),), differentiable=False),
    ]
    return samples


REDUCTIONS = (
    ((5, 3), (0,), False),
    ((2, 5, 3), (0, 2), True),
    ((5,), (0,), False),
    ((5, 3), (), False),
)


def _reductions(make: Maker) -> list[Sample]:
    real, whole, truth = make.real, make.whole, make.truth
    samples = []
    for shape, axes, keepdims in REDUCTIONS:
        attrs = {"axes": axes, "keepdims": keepdims}
        samples += [
            Sample(kind, (real(*shape),), attrs)
            for kind in ("prod", "square_sum", "abs_sum", "abs_max", "logsumexp")
        ]
        samples += [
            Sample(kind, (truth(*shape),), attrs, differentiable=False) for kind in ("all", "any")
        ]
        samples.append(Sample("count_nonzero", (whole(2, *shape),), attrs, differentiable=False))
        if axes:
            samples.append(Sample("var", (real(*shape),), attrs))
            samples.append(Sample("std", (real(*shape),), {**attrs, "correction": 1.0}))
    zeros = real(4, 3)
    zeros[1, 0] = zeros[0, 1] = zeros[2, 1] = 0
    # The extents of both axes at once, and none.
    whole_tensor = {"axes": (0, 1)}
    samples += [
        Sample("prod", (zeros,), {"axes": (0,)}),
        Sample("prod", (whole(5, 3, 2),), whole_tensor, differentiable=False),
        Sample("prod", (real(0, 3),), {"axes": (0,)}),
        Sample("square_sum", (real(5, 3),), whole_tensor),
        Sample("abs_sum", (whole(9, 5) - 4,), {"axes": (0,)}, differentiable=False),
        Sample("count_nonzero", (zeros,), whole_tensor, differentiable=False),
        Sample("count_nonzero", (truth(5, 2),), {"axes": (1,)}, differentiable=False),
        Sample("all", (truth(5, 3) | True,), whole_tensor, differentiable=False),
        Sample("any", (truth(5, 3) & False,), whole_tensor, differentiable=False),
        *(
            Sample(kind, (array,), {"axes": (0,)}, differentiable=False)
            for kind in ("sum", "prod")
            for array in (_narrow(make), _narrow(make).view(np.int8), truth(5, 3))
        ),
        Sample("abs_sum", (_narrow(make).view(np.int8),), whole_tensor, differentiable=False),
        Sample("argmin", (whole(3, 5, 4),), {"axis": 0}, differentiable=False),
        Sample("argmin", (whole(3, 5, 4),), {"axis": 1, "keepdims": True}, differentiable=False),
    ]
    return samples


def _narrow(make: Maker) -> np.ndarray:
    """Whole numbers of 8 bits whose totals need more."""
    return (make.whole(56, 5, 3) + 200).astype(np.uint8)


def _scans(make: Maker) -> list[Sample]:
    real, whole = make.real, make.whole
    samples = []
    for shape, axis in (((5, 3), 0), ((2, 5, 3), 1), ((4,), 0)):
        samples += [
            Sample("cumsum", (real(*shape),), {"axis": axis, "reverse": reverse})
            for reverse in (False, True)
        ]
        samples += [
            Sample(kind, (real(*shape),), {"axis": axis})
            for kind in ("cumprod", "cummax", "cummin")
        ]
        pair = (real(*shape), real(*shape))
        samples.append(Sample("cumprod_grad", pair, {"axis": axis}))
    zeros = real(5, 3)
    zeros[1, 0] = zeros[0, 1] = zeros[2, 1] = zeros[4, 1] = 0
    samples += [
        Sample("cumprod", (zeros,), {"axis": 0}),
        Sample("cumsum", (whole(9, 5, 2),), {"axis": 0}, differentiable=False),
        *(
            Sample(kind, (array,), {"axis": 0}, differentiable=False)
            for kind in ("cumsum", "cumprod")
            for array in (_narrow(make), _narrow(make).view(np.int8), make.truth(5, 3))
        ),
        Sample("cummax", (whole(3, 5, 2),), {"axis": 0}, differentiable=False),
        Sample("cummin", (whole(3, 2, 5),), {"axis": 1}, differentiable=False),
    ]
    return samples


def _orders(make: Maker) -> list[Sample]:
    real, whole = make.real, make.whole
    samples = []
    for descending in (False, True):
        attrs = {"axis": 0, "descending": descending}
        samples += [
            Sample("sort", (real(5, 3),), attrs),
            Sample("sort", (whole(3, 2, 5),), {**attrs, "axis": 1}, differentiable=False),
            Sample("argsort", (whole(3, 5, 3),), attrs, differentiable=False),
            Sample("topk", (real(5, 3),), {"axis": 0, "k": 2, "largest": descending}),
            Sample(
                "topk",
                (whole(3, 2, 6),),
                {"axis": 1, "k": 6, "largest": descending},
                differentiable=False,
            ),
        ]
    samples.append(Sample("topk", (real(5, 3),), {"axis": 1, "k": 0}))
    return samples
