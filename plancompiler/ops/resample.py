"""One axis resampled to another extent: each new element is a weighted sum of a few old ones.

Interpolation over several axes is one op after another. The rules are those of PyTorch's
`interpolate`: for s old elements per new one, "nearest" takes the element at floor(i s),
"nearest-exact" that at floor((i + 1/2) s); "linear" and "cubic" (R. Keys, 1981, with a = -3/4)
weigh the two and the four elements around (i + 1/2) s - 1/2, or i s with `align_corners`, where s
takes the last element to the last. With `antialias` the filter widens with s > 1, so that all
elements count (then a = -1/2). Along a split axis each device has the elements that its own depend
on (see `halo`).
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.ir.halo import Reach
from plancompiler.ir.op import TensorType
from plancompiler.ir.sbp import Split
from plancompiler.ir.shard import element_count
from plancompiler.ops.attributes import Axis, Bool, Float, Int, Text
from plancompiler.ops.gradient import of_one
from plancompiler.ops.halo import needed
from plancompiler.ops.kernel import in_float32, of_box, scratch
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    KernelContext,
    Types,
    Windows,
    apply,
    define_op,
)
from plancompiler.ops.rule import Signature
from plancompiler.ops.scan import axis_rule

MODES = ("nearest", "nearest-exact", "linear", "cubic")
_MOST_DIVISOR = 1 << 16
"""Of the ratio of extents where it is given as a float: halos are found in whole numbers."""

Taps = tuple[Array, Array]
"""For each element of a result [n, k] places in the source, and their weights."""


# --- which elements count -------------------------------------------------------------------------


def _cubic(distance: Array, a: float) -> Array:
    """Weights of elements at these distances."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))


def _widened(extent: int, size: int, mode: str, step: float) -> Taps:
    """Places and weights under a filter that is as wide as a step."""
    stretch = max(step, 1.0)
    support = stretch * (1 if mode == "linear" else 2)
    centers = step * (np.arange(size) + 0.5)
    low = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    high = np.minimum((centers + support + 0.5).astype(np.int64), extent)
    places = low[:, None] + np.arange(max(1, int((high - low).max())))
    distance = np.abs(places - centers[:, None] + 0.5) / stretch
    weights = np.maximum(1 - distance, 0.0) if mode == "linear" else _cubic(distance, -0.5)
    weights = np.where(places < high[:, None], weights, 0.0)
    return places, weights / weights.sum(1, keepdims=True)


def _around(extent: int, size: int, mode: str, align_corners: bool, step: float) -> Taps:
    """Places and weights of the elements around each new one."""
    new = np.arange(size)
    if mode.startswith("nearest"):
        shift = np.float32(0.5 if mode == "nearest-exact" else 0)
        places = np.floor((new.astype(np.float32) + shift) * np.float32(step)).astype(np.int64)
        return places[:, None], np.ones((size, 1))
    at = new * step if align_corners else (new + 0.5) * step - 0.5
    if mode == "linear":
        at = np.clip(at, 0, extent - 1)
    low = np.floor(at).astype(np.int64)
    share = at - low
    if mode == "linear":
        return low[:, None] + np.arange(2), np.stack([1 - share, share], 1)
    distance = np.abs(np.arange(-1, 3) - share[:, None])
    return low[:, None] + np.arange(-1, 3), _cubic(distance, -0.75)


def _ratio(extent: int, size: int, align_corners: bool, factor: float) -> Fraction:
    """Old elements per new one."""
    if align_corners:
        return Fraction(extent - 1, size - 1) if size > 1 else Fraction(0)
    if factor:
        return Fraction(1 / factor).limit_denominator(_MOST_DIVISOR)
    return Fraction(extent, size)


@lru_cache(maxsize=256)
def _taps(
    extent: int, size: int, mode: str, align_corners: bool, factor: float, antialias: bool
) -> Taps:
    """For each of `size` elements the places among `extent` that it depends on, and their weights.

    A place that does not count stands for the one that counts most, whose weight is shared: so an
    infinite element is multiplied by no zero.
    """
    step = float(_ratio(extent, size, align_corners, 0.0))
    if factor and not align_corners:
        step = 1 / factor
    if antialias:
        places, weights = _widened(extent, size, mode, step)
    else:
        places, weights = _around(extent, size, mode, align_corners, step)
    places = np.clip(places, 0, extent - 1)
    return _shared(places, weights)


def _shared(places: Array, weights: Array) -> Taps:
    """Each weight of zero gets a part of its row's greatest, and that one's place."""
    most = np.abs(weights).argmax(1)[:, None]
    idle = weights == 0
    greatest = np.take_along_axis(weights, most, 1) / (1 + idle.sum(1, keepdims=True))
    np.put_along_axis(idle, most, True, 1)
    return (
        np.where(idle, np.take_along_axis(places, most, 1), places),
        np.where(idle, greatest, weights),
    )


@lru_cache(maxsize=256)
def _taps_back(
    extent: int, size: int, mode: str, align_corners: bool, factor: float, antialias: bool
) -> Taps:
    """The same of the transposed map: for each of `extent` elements, what depends on it."""
    places, weights = _taps(extent, size, mode, align_corners, factor, antialias)
    order = np.argsort(places, axis=None, kind="stable")
    counts = np.bincount(places.reshape(-1), minlength=extent)
    row = np.repeat(np.arange(extent), counts)
    column = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    back = np.zeros((extent, max(1, counts.max())), np.int64)
    shares = np.zeros(back.shape)
    back[row, column] = order // places.shape[1]
    shares[row, column] = weights.reshape(-1)[order]
    return _shared(back, shares)


def _how(attrs: AttrMap) -> tuple[str, bool, float, bool]:
    return attrs["mode"], attrs["align_corners"], attrs["factor"], attrs["antialias"]


@lru_cache(maxsize=256)
def _reach(
    extent: int, size: int, mode: str, align_corners: bool, factor: float, antialias: bool
) -> Reach:
    """Which of `extent` elements each of `size` depends on."""
    ratio = _ratio(extent, size, align_corners, factor)
    places, _ = _taps(extent, size, mode, align_corners, factor, antialias)
    steps = np.arange(size) * ratio.numerator
    first = (places.min(1) * ratio.denominator - steps).min()
    last = (places.max(1) * ratio.denominator - steps).max()
    return Reach(ratio.numerator, int(first), int(last), ratio.denominator, extent)


# --- the ops --------------------------------------------------------------------------------------


def _check(kind: str, extent: int, size: int, attrs: AttrMap) -> None:
    mode, align_corners, factor, antialias = _how(attrs)
    if extent < 1 or size < 1:
        raise ShapeError(
            f"{kind} needs at least one element along the axis", got=f"{extent} to {size}"
        )
    if not math.isfinite(factor):
        raise AttributeValueError(f"the factor of {kind} is no number", got=factor)
    smooth = mode in ("linear", "cubic")
    if not smooth and (align_corners or antialias):
        raise AttributeValueError(
            f"{kind} aligns corners and avoids aliases where elements are weighed",
            got=f"mode {mode!r}",
            expected="linear or cubic",
        )


def _infer(inputs: Types, attrs: AttrMap) -> Types:
    (x,), axis, size = inputs, attrs["axis"], attrs["size"]
    _check("resample", x.shape[axis], size, attrs)
    return (TensorType((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype),)


def _grad_infer(inputs: Types, attrs: AttrMap) -> Types:
    (dy,), axis, extent = inputs, attrs["axis"], attrs["extent"]
    _check("resample_grad", extent, dy.shape[axis], attrs)
    return (TensorType((*dy.shape[:axis], extent, *dy.shape[axis + 1 :]), dy.dtype),)


def _weigh(context: KernelContext, x: Array, y: Array, taps: Taps) -> None:
    """The box of the result from the box of the source, both held here."""
    axis = context.attrs["axis"]
    (start, stop), rows = context.input_regions[0][axis], context.output_regions[0][axis]

    def local() -> tuple[list[Array], list[Array], Array]:
        places, weights = (each[slice(*rows)] for each in taps)
        inside = np.clip(places - start, 0, max(0, stop - start - 1))
        beside = (-1, *(1,) * (x.ndim - 1 - axis))
        idle = np.flatnonzero(weights.any(1) == 0)
        asarray = context.arrays.asarray
        return (
            [asarray(inside[:, each]) for each in range(inside.shape[1])],
            [
                asarray(weights[:, each].reshape(beside).astype(x.dtype))
                for each in range(weights.shape[1])
            ],
            asarray(idle),
        )

    if not x.size or not y.size:
        y.fill(0)
        return
    places, weights, idle = of_box(context, "taps", (start, stop, rows), local)
    work = scratch(context, "work", y.shape, y.dtype)
    for number, (place, weight) in enumerate(zip(places, weights, strict=True)):
        target = work if number else y
        target[...] = np.take(x, place, axis=axis)
        np.multiply(target, weight, out=target)
        if number:
            np.add(y, work, out=y)
    if idle.size:
        y[(*(slice(None),) * axis, idle)] = 0  # nothing depends on these, be it infinite


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    extent, size = context.input_shapes[0][context.attrs["axis"]], context.attrs["size"]
    _weigh(context, inputs[0], outputs[0], _taps(extent, size, *_how(context.attrs)))


def _grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    extent, size = context.attrs["extent"], context.input_shapes[0][context.attrs["axis"]]
    _weigh(context, inputs[0], outputs[0], _taps_back(extent, size, *_how(context.attrs)))


def _windows(*, back: bool) -> Windows:
    def windows(inputs: Types, outputs: Types, attrs: AttrMap) -> tuple[Signature, ...]:
        axis = attrs["axis"]
        given, made = inputs[0].shape[axis], outputs[0].shape[axis]
        if made < 2:
            return ()
        extent, size = (made, given) if back else (given, made)
        reach = _reach(extent, size, *_how(attrs))
        seen = reach.inverse(size) if back else reach
        return (Signature((needed(axis, made, seen),), (Split(axis),)),)

    return windows


def _flops(inputs: Types, outputs: Types, attrs: AttrMap) -> int:
    taps = {"linear": 2, "cubic": 4}.get(attrs["mode"], 1)
    return 2 * taps * max(element_count(each.shape) for each in (*inputs, *outputs))


def _passed(attrs: AttrMap) -> dict[str, Any]:
    kept = ("axis", "mode", "align_corners", "factor", "antialias")
    return {name: attrs[name] for name in kept if name in attrs}


_ATTRS = (
    Axis(),
    Text("mode", "nearest", MODES),
    Bool("align_corners", False),
    Float("factor", 0.0, least=0.0),
    Bool("antialias", False),
)
define_op(
    "resample",
    infer=_infer,
    operands="x F -> y F",
    rule=axis_rule,
    attrs=(*_ATTRS, Int("size", least=1)),
    kernel=in_float32(_kernel),
    gradient=of_one(
        lambda attrs, x, y, dy: apply(
            "resample_grad", dy, **_passed(attrs), extent=x.shape[attrs["axis"]]
        )
    ),
    linear=((0,),),
    windows=_windows(back=False),
    flops=_flops,
    doc="x with its axis resampled to `size` elements by `mode`: nearest, nearest-exact, linear or "
    "cubic. `factor`, new elements per old one, is that of the extents unless it is given.",
)
define_op(
    "resample_grad",
    infer=_grad_infer,
    operands="dy F -> dx F",
    rule=axis_rule,
    attrs=(*_ATTRS, Int("extent", least=1)),
    kernel=in_float32(_grad_kernel),
    gradient=of_one(
        lambda attrs, dy, dx, ddx: apply(
            "resample", ddx, **_passed(attrs), size=dy.shape[attrs["axis"]]
        )
    ),
    linear=((0,),),
    windows=_windows(back=True),
    flops=_flops,
    doc="The gradient of resample: dy -> dx, whose axis has the extent `extent`.",
)
