"""Calls of the ops that move and select elements, of sequences, random tensors and einsum."""

from __future__ import annotations

import numpy as np

from tests.ops.sample import Maker, Sample


def samples(make: Maker) -> list[Sample]:
    """All calls of this file."""
    return [
        *_moves(make),
        *_slices_written(),
        *_diagonals(make),
        *_indexing(make),
        *_sources(make),
        *_einsum(make),
    ]


def _moves(make: Maker) -> list[Sample]:
    real = make.real
    strided = {"starts": (1, 0), "stops": (7, 3), "steps": (3, 1)}
    both = {"starts": (0, 1), "stops": (6, 5), "steps": (2, 3)}
    return [
        Sample("flip", (real(5, 3),), {"axes": (0,)}),
        Sample("flip", (real(2, 4, 3),), {"axes": (0, 2)}),
        Sample("flip", (real(3),), {"axes": ()}),
        Sample("roll", (real(5, 3),), {"shifts": (2,), "axes": (0,)}),
        Sample("roll", (real(4, 3),), {"shifts": (-1, 7), "axes": (0, 1)}),
        Sample("roll", (real(0, 3),), {"shifts": (1,), "axes": (0,)}),
        Sample("tile", (real(3, 2),), {"repeats": (2, 1)}),
        Sample("tile", (real(2, 1),), {"repeats": (2, 3)}),
        Sample("tile", (real(3),), {"repeats": (0,)}),
        Sample("pad", (real(5, 3),), {"low": (1, 0), "high": (2, 0), "value": 0.0}),
        Sample("pad", (real(3, 2),), {"low": (0, 2), "high": (1, 1), "value": 1.5}),
        Sample("pad", (make.whole(9, 3),), {"low": (1,), "high": (0,), "value": 7}, False),
        Sample("strided_slice", (real(7, 3),), strided),
        Sample("strided_slice", (real(6, 5),), both),
        Sample("strided_slice", (real(3),), {"starts": (2,), "stops": (2,), "steps": (2,)}),
        Sample("unfold_axis", (real(7, 3),), {"axis": 0, "size": 3, "step": 2}),
        Sample("unfold_axis", (real(3, 5, 2),), {"axis": 1, "size": 2, "step": 3}),
        Sample("unfold_axis", (real(3, 2),), {"axis": 1, "size": 0, "step": 1}),
        Sample("strided_slice_grad", (real(2, 3),), {"shape": (7, 3), **strided}),
        Sample("strided_slice_grad", (real(3, 2),), {"shape": (6, 5), **both}),
    ]


def _slices_written() -> list[Sample]:
    def ramp(*shape: int) -> np.ndarray:
        return np.linspace(-1.0, 2.0, int(np.prod(shape))).reshape(shape)

    samples = []
    for shape, starts, stops, steps in (
        ((7, 3), (1, 0), (7, 3), (3, 1)),
        ((6, 5), (0, 1), (6, 5), (2, 3)),
        ((4,), (2,), (2,), (2,)),
        ((5, 2, 2), (3, 0, 1), (5, 2, 2), (1, 1, 1)),
    ):
        bounds = {"starts": starts, "stops": stops, "steps": steps}
        small = [len(range(*each)) for each in zip(starts, stops, steps, strict=True)]
        samples.append(Sample("slice_scatter", (ramp(*shape), ramp(*small) ** 2), bounds))
    whole = (np.arange(9), np.arange(3) - 5)
    bounds = {"starts": (1,), "stops": (9,), "steps": (3,)}
    return [*samples, Sample("slice_scatter", whole, bounds, False)]


def _diagonals(make: Maker) -> list[Sample]:
    real = make.real
    samples = []
    for kind in ("tril", "triu"):
        for diagonal, shape in ((0, (5, 3)), (-2, (2, 4, 5)), (1, (3, 4))):
            samples.append(Sample(kind, (real(*shape),), {"diagonal": diagonal}))
    for offset, shape in ((0, (5, 3)), (1, (2, 3, 4)), (-2, (4, 4)), (9, (2, 3))):
        samples.append(Sample("diagonal", (real(*shape),), {"offset": offset}))
    for length, attrs in (
        (3, {"rows": 3, "columns": 5, "offset": 0}),
        (2, {"rows": 5, "columns": 2, "offset": -1}),
        (3, {"rows": 4, "columns": 5, "offset": 2}),
    ):
        samples.append(Sample("diag_embed", (real(length),), attrs))
    samples.append(Sample("diag_embed", (real(2, 2),), {"rows": 3, "columns": 3, "offset": 1}))
    return samples


def _indexing(make: Maker) -> list[Sample]:
    real, whole = make.real, make.whole
    samples = []
    for shape, count, axis in (((5, 3), 4, 0), ((2, 5, 3), 2, 1), ((4,), 5, 0)):
        indices = whole(shape[axis], *shape[:axis], count, *shape[axis + 1 :])
        attrs = {"axis": axis}
        samples += [
            Sample("take_along_axis", (real(*shape), indices), attrs),
            Sample(
                "take_along_axis_grad",
                (indices, real(*indices.shape)),
                {**attrs, "extent": shape[axis]},
            ),
            Sample("index_select", (real(*shape), whole(shape[axis], count)), attrs),
            Sample(
                "index_select_grad",
                (whole(shape[axis], count), real(*indices.shape)),
                {**attrs, "extent": shape[axis]},
            ),
        ]
        for mode in ("set", "add", "mul", "max", "min"):
            inputs = (real(*shape), indices, real(*indices.shape))
            samples.append(Sample("put_along_axis", inputs, {**attrs, "mode": mode}))
    one_hot = {"classes": 5, "dtype": str(make.dtype)}
    return [
        *samples,
        Sample("index_select", (real(3, 2), whole(3, 0)), {"axis": 0}),
        Sample("put_along_axis", (whole(9, 5), whole(5, 3), whole(9, 3)), _SET, False),
        Sample(
            "put_along_axis",
            (real(5, 2), np.array([[3, 0], [1, 4], [4, 2]]), real(3, 2)),
            {"axis": 0, "mode": "same"},
        ),
        Sample("one_hot", (whole(5, 4),), one_hot, differentiable=False),
        Sample("one_hot", (whole(5, 2, 3).astype(np.uint8),), one_hot, differentiable=False),
        Sample("bincount", (whole(5, 7),), {"classes": 5}, differentiable=False),
        Sample("bincount", (whole(3, 5, 2),), {"classes": 4}, differentiable=False),
    ]


_SET = {"axis": 0, "mode": "set"}


def _sources(make: Maker) -> list[Sample]:
    drawn = {"shape": (5, 3), "dtype": str(make.dtype), "key": 3}
    counted = {"start": 3, "step": -2, "count": 5}
    return [
        Sample("eye", (), {"rows": 5, "columns": 3, "offset": 0, "dtype": "float32"}),
        Sample("eye", (), {"rows": 3, "columns": 4, "offset": -1, "dtype": "int64"}),
        Sample("arange", (), {**counted, "dtype": "int32"}),
        Sample("arange", (), {**counted, "step": 0.3, "dtype": "float64"}),
        Sample("zigzag_order", (), {"count": 7, "pieces": 2}),
        Sample("zigzag_order", (), {"count": 5, "pieces": 3, "inverse": True}),
        Sample("linspace", (), {"start": -1.0, "stop": 2.0, "count": 7, "dtype": "float64"}),
        Sample("linspace", (), {"start": 5.0, "stop": 2.0, "count": 1, "dtype": "float32"}),
        Sample("uniform", (), {**drawn, "low": -1.0, "high": 3.0}),
        Sample("uniform", (), {**drawn, "shape": (), "low": 0.0, "high": 1.0}),
        Sample("normal", (), {**drawn, "mean": 1.0, "std": 0.5}),
        Sample("exponential", (), {**drawn, "rate": 2.0}),
        Sample("cauchy", (), {**drawn, "median": -1.0, "scale": 0.5}),
        Sample("log_normal", (), {**drawn, "mean": 0.5, "std": 0.25}),
        Sample("geometric", (), {**drawn, "p": 0.3}),
        Sample("geometric", (), {**drawn, "dtype": "int32", "p": 0.3}),
        Sample("bernoulli", (), {**drawn, "p": 0.4}),
        Sample("bernoulli", (), {**drawn, "dtype": "bool", "p": 0.4}),
        Sample("randint", (), {**drawn, "dtype": "int64", "low": -2, "high": 9}),
        Sample("randint", (), {**drawn, "dtype": "uint8", "low": 0, "high": 256}),
        Sample("permutation", (), {"shape": (7,), "dtype": "int64", "key": 1}),
    ]


def _einsum(make: Maker) -> list[Sample]:
    real = make.real
    extents = dict(zip("bijkhd", (2, 3, 5, 4, 2, 3), strict=True))
    samples = []
    for equation in (
        "ij->ji",
        "ij->",
        "ijk->j",
        "ij,jk->ik",
        "i,j->ij",
        "i,i->",
        "ij,jk->",
        "bij,bjk->bik",
        "bihd,bjhd->bhij",
        "ij,kj->kij",
        "ijk,->kj",
        "ij,jk,kd->id",
        "b,bi,bij->j",
        "i,j,k->ikj",
    ):
        parts = equation.partition("->")[0].split(",")
        inputs = tuple(real(*(extents[letter] for letter in part)) for part in parts)
        samples.append(Sample("einsum", inputs, {"equation": equation}))
    numbers = (make.whole(5, 3, 4), make.whole(5, 4, 2))
    samples.append(Sample("einsum", numbers, {"equation": "ij,jk->ik"}, differentiable=False))
    return samples
