"""The rules of ONNX's operators that read between elements: resizing, and sampling at places that
are computed.

Resizing is separable. Along each axis, an element of the result is a weighted sum of neighbours.
Which ones, with which weights, is known when a model is read: so it is a look-up for each of up to
four neighbours, and a product with a matrix where there are more. Sampling looks up all neighbours
of a place in all axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plancompiler.frontend import functions as f
from plancompiler.importers.graph import Array
from plancompiler.importers.onnx_rules import as_tensor, at, numbers, refused, taken
from plancompiler.importers.rules import onnx_rule
from plancompiler.ir import DType

_FEW = 4
"""Neighbours that are looked up one by one."""

# --- resizing -------------------------------------------------------------------------------------


def _coordinates(
    mode: str, size: int, extent: int, scale: float, bounds: tuple[float, float]
) -> Array:
    """For each of `size` elements of the result, its place among `extent` elements."""
    places = np.arange(size, dtype=np.float64)
    if mode == "half_pixel" or (mode == "pytorch_half_pixel" and size > 1):
        return (places + 0.5) / scale - 0.5
    if mode == "pytorch_half_pixel":
        return np.zeros(size)
    if mode == "half_pixel_symmetric":
        shift = extent / 2 * (1 - size / (scale * extent))
        return shift + (places + 0.5) / scale - 0.5
    if mode == "align_corners":
        return np.zeros(size) if size == 1 else places * (extent - 1) / (scale * extent - 1)
    if mode == "asymmetric":
        return places / scale
    if mode == "tf_crop_and_resize":
        low, high = bounds
        if size == 1:
            return np.full(size, 0.5 * (low + high) * (extent - 1))
        return low * (extent - 1) + places * (high - low) * (extent - 1) / (size - 1)
    raise refused("resizing", mode, "a coordinate_transformation_mode of the standard")


_NEAREST: dict[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _linear(distance: Array) -> Array:
    made: Array = np.clip(1 - np.abs(distance), 0, 1)
    return made


def _cubic(a: float) -> Callable[[Array], Array]:
    """The kernel of R. Keys, 1981."""

    def weight(distance: Array) -> Array:
        x = np.abs(distance)
        near = (a + 2) * x**3 - (a + 3) * x**2 + 1
        far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
        made: Array = np.where(x <= 1, near, np.where(x < 2, far, 0.0))
        return made

    return weight


def _weights(
    places: Array,
    extent: int,
    kernel: Callable[[Array], Array],
    reach: int,
    scale: float,
    exclude_outside: bool,
) -> Array:
    """[size, extent]: how much of each element is in each one of the result."""
    wide = math.ceil(reach / scale) + 1
    taps = np.floor(places)[:, None] + np.arange(-wide, wide + 1)
    weights = kernel((taps - places[:, None]) * scale)
    if exclude_outside:
        weights = np.where((taps < 0) | (taps > extent - 1), 0.0, weights)
    if exclude_outside or scale < 1:
        weights = weights / weights.sum(1, keepdims=True)
    matrix = np.zeros((len(places), extent))
    rows = np.broadcast_to(np.arange(len(places))[:, None], taps.shape)
    np.add.at(matrix, (rows, np.clip(taps, 0, extent - 1).astype(int)), weights)
    return matrix


def _mixed(x: Any, matrix: Array, axis: int) -> Any:
    """Weighted sums of the elements of an axis."""
    rows = matrix.shape[0]
    count = int((matrix != 0).sum(1).max())
    if count > _FEW:
        order = [each for each in range(x.ndim) if each != axis] + [axis]
        made = f.matmul(x.transpose(order), as_tensor(matrix.T.astype(x.dtype.numpy), x))
        return made.transpose([order.index(each) for each in range(x.ndim)])
    # The columns of the greatest weights of each row, in their order.
    columns = np.sort(np.argsort(-np.abs(matrix), 1, kind="stable")[:, :count], 1)
    shape = [rows if each == axis else 1 for each in range(x.ndim)]
    total = None
    for number in range(count):
        column = columns[:, number]
        weight = matrix[np.arange(rows), column].reshape(shape).astype(x.dtype.numpy)
        part = taken(x, column, axis)
        part = part if (weight == 1).all() else part * as_tensor(weight, x)
        total = part if total is None else total + part
    return total


def _sizes(
    x: Any, axes: Sequence[int], scales: Any, sizes: Any, policy: str
) -> tuple[list[int], list[float]]:
    """Extents of the result along axes, and how many times as long they are."""
    extents = [x.shape[axis] for axis in axes]
    if sizes is None or not np.size(sizes):
        factors = [float(each) for each in np.asarray(scales).reshape(-1)]
        return [math.floor(e * s) for e, s in zip(extents, factors, strict=True)], factors
    wanted = numbers(sizes)
    factors = [size / extent for size, extent in zip(wanted, extents, strict=True)]
    if policy != "stretch":
        factor = min(factors) if policy == "not_larger" else max(factors)
        factors = [factor] * len(axes)
        wanted = [math.floor(factor * extent + 0.5) for extent in extents]
    return wanted, factors


@onnx_rule("Resize", since=11, known=[1, 2, 3])
def _resized(
    x: Any,
    roi: Any = None,
    scales: Any = None,
    sizes: Any = None,
    antialias: int = 0,
    axes: Sequence[int] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Any:
    every = list(range(x.ndim)) if axes is None else [at(x, each) for each in axes]
    wanted, factors = _sizes(x, every, scales, sizes, keep_aspect_ratio_policy)
    bounds = np.zeros(0) if roi is None else np.asarray(roi, np.float64).reshape(-1)
    outside: Any = None
    kind = x.dtype
    if mode != "nearest" and not kind.is_floating:
        raise refused("resizing", f"mode {mode!r} of {kind}", "floating numbers")
    if kind.is_half:
        x = x.cast(DType.FLOAT32)
    for number, (axis, size, scale) in enumerate(zip(every, wanted, factors, strict=True)):
        extent = x.shape[axis]
        cropped = coordinate_transformation_mode == "tf_crop_and_resize"
        if size == extent and scale == 1 and not cropped:
            continue
        limits = (0.0, 1.0)
        if cropped:
            limits = (float(bounds[number]), float(bounds[number + len(every)]))
        places = _coordinates(coordinate_transformation_mode, size, extent, scale, limits)
        if cropped:
            line = (places < 0) | (places > extent - 1)
            shaped = line.reshape([-1 if each == axis else 1 for each in range(x.ndim)])
            outside = shaped if outside is None else outside | shaped
        if mode == "nearest":
            nearest = np.clip(_NEAREST[nearest_mode](places), 0, extent - 1)
            x = taken(x, nearest.astype(np.int64), axis)
            continue
        kernel, reach = (_linear, 1) if mode == "linear" else (_cubic(cubic_coeff_a), 2)
        narrow = min(scale, 1.0) if antialias else 1.0
        matrix = _weights(places, extent, kernel, reach, narrow, bool(exclude_outside))
        x = _mixed(x, matrix, axis)
    if outside is not None and outside.any():
        x = f.where(as_tensor(outside, x), f.full_like(x, extrapolation_value), x)
    return x if x.dtype is kind else x.cast(kind)


@onnx_rule("Upsample", known=[1])
@onnx_rule("Resize", known=[1])
def _upsampled(x: Any, scales: Any, mode: str = "nearest") -> Any:
    """Before opset 11, places are multiples of 1 / scale."""
    return _resized(
        x,
        scales=np.asarray(scales),
        mode=mode,
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )


# --- sampling -------------------------------------------------------------------------------------


def _reflected(x: Any, low: float, high: float) -> Any:
    """Places outside as in mirrors at both ends."""
    span = high - low
    if span <= 0:
        return f.zeros_like(x)
    away = f.abs(x - low)
    turns = f.floor(away * (1 / span))
    rest = away - turns * span
    odd = f.not_equal(f.remainder(turns, 2.0), 0)
    return f.where(odd, high - rest, rest + low)


Tap = tuple[Any, Any, Any]
"""Along one axis: indices, weights, and where the indices are inside."""


def _inside(index: Any, extent: int, padding: str, aligned: bool) -> tuple[Any, Any]:
    """Whole places as indices of an axis, and whether they are in it."""
    if padding == "reflection":
        ends = (0.0, extent - 1.0) if aligned else (-0.5, extent - 0.5)
        index = _reflected(index, *ends)
    clipped = f.clip(index, 0.0, extent - 1.0)
    inside = f.equal(index, clipped) if padding == "zeros" else None
    return f.round(clipped).cast(DType.INT64), inside


def _taps(place: Any, extent: int, mode: str, padding: str, aligned: bool) -> list[Tap]:
    if mode in ("nearest",):
        return [(*_at_index(f.round(place), extent, padding, aligned, None),)]
    base = f.floor(place)
    away = place - base
    if mode in ("linear", "bilinear"):
        pairs = [(base, 1 - away), (base + 1, away)]
    else:
        pairs = [(base + shift, _keys(away - shift)) for shift in (-1, 0, 1, 2)]
    return [(*_at_index(index, extent, padding, aligned, weight),) for index, weight in pairs]


def _at_index(index: Any, extent: int, padding: str, aligned: bool, weight: Any) -> Tap:
    number, inside = _inside(index, extent, padding, aligned)
    return number, weight, inside


def _keys(distance: Any, a: float = -0.75) -> Any:
    x = f.abs(distance)
    squares = f.square(x)
    near = squares * ((a + 2) * x - (a + 3)) + 1
    far = squares * (a * x - 5 * a) + 8 * a * x - 4 * a
    return f.where(f.less_equal(x, 1), near, far)


def _sampled(x: Any, taps: Sequence[Sequence[Tap]]) -> Any:
    """Weighted sums of the neighbours of places; x is [n, c, *extents], and a tap [n, places]."""
    n, c = x.shape[:2]
    extents = x.shape[2:]
    flat = x.reshape([n, c, math.prod(extents)])
    total = None
    for combination in itertools.product(*taps):
        index: Any = None
        share: Any = None
        for (number, weight, inside), extent in zip(combination, extents, strict=True):
            index = number if index is None else index * extent + number
            for each in (weight, None if inside is None else inside.cast(x.dtype)):
                if each is not None:
                    share = each if share is None else share * each
        places = index.shape[1]
        wide = f.expand(f.unsqueeze(index, 1), [n, c, places])
        part = f.gather(flat, 2, wide)
        part = part if share is None else part * f.unsqueeze(share, 1)
        total = part if total is None else total + part
    return total


@onnx_rule("GridSample")
def _grid_sampled(
    x: Any,
    grid: Any,
    align_corners: int = 0,
    mode: str = "linear",
    padding_mode: str = "zeros",
) -> Any:
    count = x.ndim - 2
    shape = grid.shape[1:-1]
    rows = grid.reshape([grid.shape[0], math.prod(shape), count])
    if rows.dtype is not x.dtype:
        rows = rows.cast(x.dtype)
    taps = []
    for axis in range(count):
        extent = x.shape[2 + axis]
        place = f.select(rows, 2, count - 1 - axis)  # the last axis of the tensor comes first
        if align_corners:
            place = (place + 1) * ((extent - 1) / 2)
        else:
            place = ((place + 1) * extent - 1) * 0.5
        if mode not in ("cubic", "bicubic"):
            if padding_mode == "border":
                place = f.clip(place, 0.0, extent - 1.0)
            elif padding_mode == "reflection":
                ends = (0.0, extent - 1.0) if align_corners else (-0.5, extent - 0.5)
                place = f.clip(_reflected(place, *ends), 0.0, extent - 1.0)
        padding = "border" if padding_mode == "border" else padding_mode
        taps.append(_taps(place, extent, mode, padding, bool(align_corners)))
    return _sampled(x, taps).reshape([x.shape[0], x.shape[1], *shape])


@onnx_rule("RoiAlign")
def _roi_aligned(
    x: Any,
    rois: Any,
    batch_indices: Any,
    coordinate_transformation_mode: str | None = None,
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
    outputs: int = 1,
) -> Any:
    """Averages of samples in the cells of rectangles (K. He et al., 2017)."""
    del outputs
    if sampling_ratio <= 0:
        raise refused("RoiAlign", f"sampling_ratio {sampling_ratio}", "a positive number")
    return _aligned(
        x,
        rois,
        batch_indices,
        "half_pixel" if coordinate_transformation_mode is None else coordinate_transformation_mode,
        mode,
        (output_height, output_width),
        sampling_ratio,
        spatial_scale,
    )


def _aligned(
    x: Any,
    rois: Any,
    batches: Any,
    transform: str,
    mode: str,
    size: tuple[int, int],
    samples: int,
    scale: float,
) -> Any:
    shift = 0.5 if transform == "half_pixel" else 0.0
    corners = rois * scale - shift
    boxes = rois.shape[0]
    axes = []
    for axis, (low, high) in enumerate(((1, 3), (0, 2))):
        extent, cells = x.shape[2 + axis], size[axis]
        begin, end = f.select(corners, 1, low), f.select(corners, 1, high)
        length = end - begin
        if transform != "half_pixel":
            length = f.maximum(length, 1.0)
        steps = (np.arange(cells * samples) + 0.5) / (cells * samples)
        along = as_tensor(steps.astype(x.dtype.numpy).reshape(1, -1), x)
        place = f.unsqueeze(begin, 1) + f.unsqueeze(length, 1) * along
        # A sample further out than one element counts as zero, a nearer one as the element there.
        out = f.logical_or(f.less(place, -1.0), f.greater(place, float(extent)))
        place = f.clip(place, 0.0, extent - 1.0)
        base = f.floor(place)
        away = place - base
        keep = f.logical_not(out).cast(x.dtype)
        near = base.cast(DType.INT64)
        far = f.clip(base + 1, 0.0, extent - 1.0).cast(DType.INT64)
        axes.append([(near, (1 - away) * keep), (far, away * keep)])
    n, c, height, width = x.shape
    flat = x.transpose([0, 2, 3, 1]).reshape([n * height * width, c])
    start = f.reshape(batches.cast(DType.INT64), [boxes, 1, 1]) * (height * width)
    parts = []
    for (row, vertical), (column, horizontal) in itertools.product(*axes):
        index = start + f.unsqueeze(row, 2) * width + f.unsqueeze(column, 1)
        share = f.unsqueeze(vertical, 2) * f.unsqueeze(horizontal, 1)
        picked = f.index_select(flat, index.reshape([math.prod(index.shape)]), 0)
        parts.append(picked.reshape([*index.shape, c]) * f.unsqueeze(share, 3))
    grid = [boxes, size[0], samples, size[1], samples, c]
    if mode == "avg":
        total = parts[0] + parts[1] + parts[2] + parts[3]
        made = f.mean(total.reshape(grid), [2, 4])
    else:
        most = f.maximum(f.maximum(parts[0], parts[1]), f.maximum(parts[2], parts[3]))
        made = f.max(most.reshape(grid), [2, 4])
    return made.transpose([0, 3, 1, 2])


onnx_rule("RoiAlign", since=10)(
    lambda *args, **named: _roi_aligned(
        *args, **{"coordinate_transformation_mode": "output_half_pixel", **named}
    )
)
onnx_rule("RoiAlign", since=16)(_roi_aligned)
