"""Images in other sizes, and images seen through a grid of places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from plancompiler.errors import AttributeValueError, ShapeError, UsageError
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.elementwise import abs as abs_of
from plancompiler.frontend.functions.elementwise import floor as floor_of
from plancompiler.frontend.functions.elementwise import maximum, minimum, where
from plancompiler.frontend.functions.elementwise import round as round_of
from plancompiler.frontend.functions.linear import matmul
from plancompiler.frontend.functions.shape import concat, expand
from plancompiler.frontend.nn.functional.public import public
from plancompiler.ir import AttrValue
from plancompiler.ir.operators import filled, whole_numbers
from plancompiler.ops.registry import apply_one, apply_source

_MODES = {
    "nearest": ("nearest", None),
    "nearest-exact": ("nearest-exact", None),
    "linear": ("linear", 1),
    "bilinear": ("linear", 2),
    "trilinear": ("linear", 3),
    "bicubic": ("cubic", 2),
    "area": ("area", None),
}
"""How one axis is resampled, and of how many axes of space the mode is."""


@public
def interpolate(
    input: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """x [n, c, *space] with space resampled to `size`, or to floor(extent * scale_factor).

    `mode` is "nearest", "nearest-exact", "linear" (one axis), "bilinear" or "bicubic" (two),
    "trilinear" (three) or "area". With `align_corners` the first and last elements stay at the
    ends. A scale factor that is given is also the distance of the elements, unless
    `recompute_scale_factor`. With `antialias` (bilinear, bicubic) no element is passed over where
    the image becomes smaller. Axes of space that are split stay so: devices exchange the rows that
    they need of each other.
    """
    space = input.ndim - 2
    kind, wanted = _MODES.get(mode, ("", None))
    if not kind or space < 1 or space > 3 or wanted not in (None, space):
        raise AttributeValueError(
            "interpolation has no such mode for this many axes",
            got=f"{mode!r} for {input.shape}",
            expected=", ".join(name for name, (_, axes) in _MODES.items() if axes in (None, space)),
        )
    if (size is None) == (scale_factor is None):
        raise UsageError(
            "interpolate needs the new size or the scale factor, and not both",
            got=f"size={size}, scale_factor={scale_factor}",
        )
    if align_corners and kind not in ("linear", "cubic"):
        raise AttributeValueError("only elements that are weighed have corners", got=mode)
    if antialias and mode not in ("bilinear", "bicubic"):
        raise AttributeValueError(
            "antialias is for two axes", got=mode, expected="bilinear or bicubic"
        )
    sizes, factors = _extents(input.shape[2:], size, scale_factor)
    if recompute_scale_factor:
        factors = [0.0] * space
    if kind == "area":
        return apply_one(f"adaptive_avg_pool{space}d", input, size=tuple(sizes))
    x = input
    how: dict[str, AttrValue] = {
        "mode": kind,
        "align_corners": bool(align_corners),
        "antialias": antialias,
    }
    for axis in range(2, input.ndim):
        x = apply_one(
            "resample", x, axis=axis, size=sizes[axis - 2], factor=factors[axis - 2], **how
        )
    return x


def _extents(
    space: tuple[int, ...],
    size: int | Sequence[int] | None,
    scale_factor: float | Sequence[float] | None,
) -> tuple[list[int], list[float]]:
    """New extents, and the factors that were given (0 without)."""
    if size is not None:
        given = whole_numbers("size", size)
        given = given * len(space) if isinstance(size, int) else given
        factors = [0.0] * len(space)
        sizes = list(given)
    else:
        assert scale_factor is not None  # one of them is given
        each_axis = scale_factor if isinstance(scale_factor, Sequence) else [scale_factor]
        each_axis = list(each_axis) * (1 if isinstance(scale_factor, Sequence) else len(space))
        factors = [float(each) for each in each_axis]
        if not all(each > 0 and math.isfinite(each) for each in factors):
            raise AttributeValueError("a scale factor is positive", got=scale_factor)
        sizes = [math.floor(n * each) for n, each in zip(space, factors, strict=False)]
    if len(sizes) != len(space) or min(sizes) < 1:
        raise ShapeError(
            "interpolate needs an extent of at least 1 for each axis of space",
            got=sizes,
            expected=f"{len(space)} extents",
        )
    return sizes, factors


# --- grids ----------------------------------------------------------------------------------------


def _line(like: Tensor, count: int, align_corners: bool) -> Tensor:
    """`count` places from -1 to 1: those of the ends, or the middles of equal parts."""
    edge = 1.0 if align_corners else 1.0 - 1.0 / max(1, count)
    if align_corners and count == 1:
        edge = 0.0
    line: Any = apply_source(
        like, "linspace", start=-edge, stop=edge, count=count, dtype=str(like.dtype)
    )
    made: Tensor = line
    return made


@public
def affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool = False) -> Tensor:
    """For each pixel of images of `size` [n, c, *space] the place where an affine map takes it.

    `theta` [n, 2, 3] gives [n, h, w, 2], `theta` [n, 3, 4] gives [n, d, h, w, 3]; places are (x, y)
    or (x, y, z), from -1 to 1 across the image, for `grid_sample`.
    """
    space = whole_numbers("size", size)[2:]
    axes = len(space)
    if axes not in (2, 3) or theta.shape != (size[0], axes, axes + 1):
        raise ShapeError(
            "an affine grid needs a map for each image",
            got=f"{theta.shape} for {tuple(size)}",
            expected="theta [n, 2, 3] for [n, c, h, w], or [n, 3, 4] for [n, c, d, h, w]",
        )
    columns = []
    for place in range(axes - 1, -1, -1):  # x belongs to the last axis
        across = [1] * axes
        across[place] = space[place]
        line = _line(theta, space[place], align_corners).reshape(across)
        columns.append(expand(line, space).reshape((math.prod(space), 1)))
    columns.append(filled(theta, 1.0, (math.prod(space), 1)))
    base = concat(columns, 1)
    placed = matmul(base, theta, transpose_b=True)
    return placed.reshape((theta.shape[0], *space, axes))


def _reflected(x: Tensor, low: float, high: float) -> Tensor:
    """Places beyond the ends mirrored at them, as often as needed."""
    span = high - low
    if span <= 0:
        return x * 0.0
    away = abs_of(x - low)
    turns = floor_of(away / span)
    rest = away - turns * span
    even = apply_one("fmod", turns, turns * 0.0 + 2.0).equal(0.0)
    return where(even, rest + low, high - rest)


def _at_pixels(x: Tensor, extent: int, align_corners: bool) -> Tensor:
    """Places from -1 to 1 in pixels."""
    if align_corners:
        return (x + 1.0) * ((extent - 1) / 2)
    return (x + 1.0) * (extent / 2) - 0.5


def _kept_inside(x: Tensor, extent: int, padding_mode: str, align_corners: bool) -> Tensor:
    if padding_mode == "reflection":
        ends = (0.0, extent - 1.0) if align_corners else (-0.5, extent - 0.5)
        x = _reflected(x, *ends)
    if padding_mode in ("border", "reflection"):
        x = minimum(maximum(x, 0.0), extent - 1.0)
    return x


@public
def grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool = False,
) -> Tensor:
    """Images [n, c, *space] seen at the places `grid` [n, *new, axes]: [n, c, *new] (M. Jaderberg
    et al., 2015).

    A place is (x, y) or (x, y, z) from -1 to 1 across the image: from middle to middle of the
    outermost pixels with `align_corners`, else from edge to edge. `mode` is "bilinear", "nearest"
    or (two axes) "bicubic"; beyond the image there are zeros, its "border", or its "reflection".
    """
    axes = input.ndim - 2
    if axes not in (2, 3) or grid.ndim != input.ndim or grid.shape[-1] != axes:
        raise ShapeError(
            "grid_sample needs a place in space for each new pixel",
            got=f"{input.shape} at {grid.shape}",
            expected="[n, c, h, w] at [n, h, w, 2], or [n, c, d, h, w] at [n, d, h, w, 3]",
        )
    if grid.shape[0] != input.shape[0]:
        raise ShapeError("images and grids are not equally many", got=(input.shape, grid.shape))
    known = ("bilinear", "nearest", "bicubic") if axes == 2 else ("bilinear", "nearest")
    if mode not in known or padding_mode not in ("zeros", "border", "reflection"):
        raise AttributeValueError(
            "grid_sample has no such mode",
            got=f"mode {mode!r}, padding_mode {padding_mode!r}",
            expected=f"{', '.join(known)}; zeros, border or reflection",
        )
    space, new = input.shape[2:], grid.shape[1:-1]
    count = math.prod(new)
    flat = grid.reshape((grid.shape[0], count, axes))
    at: list[Tensor] = []
    for axis in range(axes):
        pixel = _at_pixels(flat[:, :, axes - 1 - axis], space[axis], align_corners)
        if mode != "bicubic":
            pixel = _kept_inside(pixel, space[axis], padding_mode, align_corners)
        at.append(pixel)
    image = input.reshape((*input.shape[:2], math.prod(space)))

    def taken(places: Sequence[Tensor], weight: Tensor | None) -> Tensor:
        """The elements at whole places, times a weight; nothing beyond the image."""
        inside: Tensor | None = None
        index: Tensor | None = None
        for axis, place in enumerate(places):
            if mode == "bicubic":
                place = _kept_inside(place, space[axis], padding_mode, align_corners)
            fits = (place >= 0.0) & (place <= space[axis] - 1.0)
            inside = fits if inside is None else inside & fits
            bounded = minimum(maximum(place, 0.0), space[axis] - 1.0).cast("int64")
            index = bounded if index is None else index * space[axis] + bounded
        assert index is not None  # there are axes
        assert inside is not None
        wide = expand(index.reshape((index.shape[0], 1, count)), (*input.shape[:2], count))
        elements = apply_one("take_along_axis", image, wide, axis=2)
        share = inside.cast(elements.dtype)
        share = share if weight is None else share * weight
        beside = share.reshape((share.shape[0], 1, count))
        return apply_one("masked", elements, inside.reshape((inside.shape[0], 1, count))) * beside

    if mode == "nearest":
        made = taken([round_of(place) for place in at], None)
    else:
        reach = range(2) if mode == "bilinear" else range(-1, 3)
        low = [apply_one("stop_gradient", floor_of(place)) for place in at]
        shares = [place - first for place, first in zip(at, low, strict=True)]
        total: Tensor | None = None
        for corner in _corners(reach, axes):
            weight: Tensor | None = None
            for share, step in zip(shares, corner, strict=True):
                part = _weight(share, step, mode)
                weight = part if weight is None else weight * part
            each = taken(
                [first + float(step) for first, step in zip(low, corner, strict=True)], weight
            )
            total = each if total is None else total + each
        assert total is not None  # there are corners
        made = total
    return made.reshape((*input.shape[:2], *new))


def _corners(reach: range, axes: int) -> list[tuple[int, ...]]:
    corners: list[tuple[int, ...]] = [()]
    for _ in range(axes):
        corners = [(*corner, step) for corner in corners for step in reach]
    return corners


def _weight(share: Tensor, step: int, mode: str) -> Tensor:
    """How much the element `step` places after a place's floor counts."""
    if mode == "bilinear":
        return share if step else 1.0 - share
    a = -0.75
    distance = share + 1.0 if step == -1 else share if step == 0 else float(step) - share
    if step in (0, 1):
        return ((a + 2) * distance - (a + 3)) * distance * distance + 1.0
    return ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a


# Names of PyTorch for two cases of it.


@public
def upsample(
    input: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
) -> Tensor:
    """`interpolate`."""
    return interpolate(input, size, scale_factor, mode, align_corners)
