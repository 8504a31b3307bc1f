"""Calls of convolutions and pooling: strides, padding, dilation and groups that do not divide."""

from __future__ import annotations

from typing import Any

from tests.ops.sample import Maker, Sample
from tests.ops.sharding import run_dense

# Shape of the input, of the weight, and attributes.
CONVOLUTIONS: tuple[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ((3, 2, 5), (3, 2, 2), {}),
    ((2, 4, 6), (6, 2, 3), {"stride": (2,), "padding": (2, 1), "groups": 2}),
    ((2, 3, 5), (3, 1, 3), {"padding": (1, 1), "dilation": (2,), "groups": 3}),
    ((2, 2, 3), (2, 1, 1), {"padding": (1, 2), "groups": 2}),
    ((2, 3, 4), (2, 3, 1), {}),
    ((2, 2, 4, 3), (3, 2, 2, 2), {"stride": (2, 1), "padding": (1, 0, 0, 2)}),
    ((1, 4, 4, 4), (4, 2, 2, 1), {"dilation": (1, 2), "padding": (1, 1, 0, 0), "groups": 2}),
    ((2, 2, 4, 4), (2, 1, 3, 2), {"stride": (3, 2), "padding": (1, 1, 1, 0), "groups": 2}),
    ((2, 1, 3, 2, 3), (2, 1, 2, 1, 2), {"stride": (1, 1, 2), "padding": (0, 1, 0, 0, 1, 0)}),
    ((1, 2, 3, 2, 2), (2, 1, 2, 2, 1), {"padding": (1, 0, 0, 0, 0, 1), "groups": 2}),
)


def samples(make: Maker) -> list[Sample]:
    return [*_convolutions(make), *_pools(make), *_resampled(make)]


def _convolutions(make: Maker) -> list[Sample]:
    real = make.real
    samples = []
    for x_shape, weight_shape, attrs in CONVOLUTIONS:
        ndim = len(x_shape) - 2
        kind = f"conv{ndim}d"
        stride, dilation = attrs.get("stride", (1,) * ndim), attrs.get("dilation", (1,) * ndim)
        padding = attrs.get("padding", (0,) * 2 * ndim)
        spans = [
            x_shape[axis + 2]
            + padding[2 * axis]
            + padding[2 * axis + 1]
            - dilation[axis] * (weight_shape[axis + 2] - 1)
            - 1
            for axis in range(ndim)
        ]
        windows = [span // step + 1 for span, step in zip(spans, stride, strict=True)]
        more = tuple(span % step for span, step in zip(spans, stride, strict=True))
        dy_shape = (x_shape[0], weight_shape[0], *windows)
        samples += [
            Sample(kind, (real(*x_shape), real(*weight_shape)), attrs),
            Sample(
                f"{kind}_transpose",
                (real(*dy_shape), real(*weight_shape)),
                {**attrs, "output_padding": more},
            ),
            Sample(
                f"{kind}_weight_grad",
                (real(*x_shape), real(*dy_shape)),
                {**attrs, "kernel": weight_shape[2:]},
            ),
        ]
    samples.append(
        Sample("conv1d", (make.whole(5, 2, 2, 4), make.whole(5, 3, 2, 2)), differentiable=False)
    )
    return samples


# Shape of the input, number of pooled axes, and attributes.
POOLS: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((3, 2, 5), {"kernel": (2,)}),
    ((5, 6), {"kernel": (3,), "stride": (2,), "padding": (1, 2)}),
    ((2, 3, 4, 5), {"kernel": (2, 3), "stride": (2, 1), "padding": (0, 1, 1, 0)}),
    ((4, 5), {"kernel": (2, 2), "dilation": (2, 1)}),
    ((2, 3, 2, 4), {"kernel": (2, 1, 2), "stride": (1, 2, 3), "padding": (1, 0, 0, 0, 1, 1)}),
)


def _pools(make: Maker) -> list[Sample]:
    real = make.real
    samples = []
    for shape, attrs in POOLS:
        ndim = len(attrs["kernel"])
        kind = f"max_pool{ndim}d"
        x = real(*shape)
        y = run_dense(kind, [x], attrs)[0]
        samples.append(Sample(kind, (x,), attrs))
        samples.append(Sample(f"{kind}_grad", (x, y, real(*y.shape)), attrs, False))
        samples.append(Sample(f"{kind}_pick", (x, y, real(*x.shape)), attrs, False))
        for count_padding in (True, False):
            chosen = {**attrs, "count_padding": count_padding}
            size = shape[len(shape) - ndim :]
            samples.append(Sample(f"avg_pool{ndim}d", (x,), chosen))
            samples.append(
                Sample(f"avg_pool{ndim}d_grad", (real(*y.shape),), {**chosen, "size": size})
            )
    samples.append(
        Sample("max_pool1d", (make.whole(9, 3, 5),), {"kernel": (2,)}, differentiable=False)
    )
    for shape, size in (((3, 5), (2,)), ((2, 3, 5, 4), (3, 4)), ((3, 4, 2, 3), (2, 1, 5))):
        kind = f"adaptive_avg_pool{len(size)}d"
        small = (*shape[: len(shape) - len(size)], *size)
        samples.append(Sample(kind, (real(*shape),), {"size": size}))
        samples.append(
            Sample(f"{kind}_grad", (real(*small),), {"size": shape[len(shape) - len(size) :]})
        )
    return samples


# Shape, axis, new extent, and attributes.
RESAMPLED: tuple[tuple[tuple[int, ...], int, int, dict[str, Any]], ...] = (
    ((2, 5, 3), 1, 8, {}),
    ((7, 2), 0, 3, {"mode": "nearest-exact"}),
    ((2, 5), 1, 11, {"mode": "linear"}),
    ((6, 2), 0, 4, {"mode": "linear", "align_corners": True}),
    ((2, 5), 1, 9, {"mode": "cubic"}),
    ((2, 9), 1, 4, {"mode": "cubic", "align_corners": True}),
    ((2, 9), 1, 4, {"mode": "linear", "antialias": True}),
    ((9, 2), 0, 5, {"mode": "cubic", "antialias": True}),
    ((2, 6), 1, 9, {"mode": "linear", "factor": 1.6}),
    ((1, 3), 1, 1, {"mode": "linear", "align_corners": True}),
)


def _resampled(make: Maker) -> list[Sample]:
    samples = []
    for shape, axis, size, how in RESAMPLED:
        new = (*shape[:axis], size, *shape[axis + 1 :])
        attrs = {"axis": axis, **how}
        samples.append(Sample("resample", (make.real(*shape),), {**attrs, "size": size}))
        samples.append(
            Sample("resample_grad", (make.real(*new),), {**attrs, "extent": shape[axis]})
        )
    return samples
