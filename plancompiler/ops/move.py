"""Ops that move elements along each axis on its own: flip, roll, tile, pad, and strided slices
read and written.

Such an op is, per axis, a function from output indices to input indices (negative: none, so the
output is filled there). The kernels take it for the boxes that a device holds, so both sides can be
split on their own: a device that holds a box of the output takes from the whole input, and one that
holds a box of the input leaves a partial output, with zeros where it has nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from operator import itemgetter
from types import EllipsisType
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.ir.op import TensorType
from plancompiler.ir.operators import filled
from plancompiler.ir.sbp import PARTIAL_SUM
from plancompiler.ir.shard import Region
from plancompiler.ops.attributes import Axes, Axis, Int, Ints, Number, Shape
from plancompiler.ops.check import same_types
from plancompiler.ops.elementwise import check_scalar
from plancompiler.ops.gradient import of_one
from plancompiler.ops.kernel import copy_unless_shared, of_box
from plancompiler.ops.registry import (
    Alias,
    Array,
    Arrays,
    AttrMap,
    Kernel,
    KernelContext,
    Rule,
    Tensors,
    Types,
    View,
    apply,
    apply_source,
    define_op,
)
from plancompiler.ops.rule import Signature
from plancompiler.ops.shape import MOVES, SLICED, keeps_extremes, slice_like

Indices = np.ndarray[Any, np.dtype[np.int64]]
AxisMap = Callable[[Indices], Indices]
"""Input indices of output indices along one axis; negative where there is none."""
Maps = Callable[[KernelContext], Mapping[int, AxisMap]]
"""The maps of the axes that are not simply kept."""


def moving_rule(moved: Callable[[Types, Types, AttrMap], Sequence[int]]) -> Rule:
    """Kept axes share their factor; a moved axis has one of its own on each side."""

    def rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
        own = set(moved(inputs, outputs, attrs))
        axes = range(len(inputs[0].shape))
        left = " ".join(f"i{axis}" if axis in own else f"a{axis}" for axis in axes)
        right = " ".join(f"o{axis}" if axis in own else f"a{axis}" for axis in axes)
        return f"{left or '...'} -> {right or '...'}"

    return rule


def _runs(targets: Indices, sources: Indices) -> list[tuple[slice, slice]]:
    """Pairs of indices as pairs of slices of constant steps, as few as there are."""
    steps = np.stack((np.diff(targets), np.diff(sources)), axis=1)
    changes = np.flatnonzero((steps[1:] != steps[:-1]).any(axis=1)) + 1
    ends = [*changes.tolist(), len(targets) - 1]
    runs = []
    first = 0
    for end in ends:
        if end < first:
            # The jump from one run to the next.
            continue
        runs.append((_slice(targets[first : end + 1]), _slice(sources[first : end + 1])))
        first = end + 1
    if first < len(targets):
        runs.append((_slice(targets[first:]), _slice(sources[first:])))
    return runs


def _slice(indices: Indices) -> slice:
    """Indices of a constant step as a slice; one index that repeats is taken once, to broadcast."""
    start, last = int(indices[0]), int(indices[-1])
    step = int(indices[1]) - start if len(indices) > 1 and last != start else 1
    stop = last + (1 if step > 0 else -1)
    return slice(start, stop if stop >= 0 else None, step)


_Index = tuple[slice | EllipsisType, ...]
"""It ends in `...`: without axes it would be an element, not a view."""


def _copies(
    source: Region, target: Region, maps: Mapping[int, AxisMap]
) -> tuple[list[tuple[_Index, _Index]], bool]:
    """What to copy, as (target index, source index), and whether that leaves gaps."""
    per_axis = []
    covered = True
    for axis, ((low, high), (start, stop)) in enumerate(zip(source, target, strict=True)):
        if axis not in maps:
            per_axis.append([(slice(None), slice(None))])
            continue
        places = np.arange(stop - start, dtype=np.int64)
        wanted = maps[axis](places + start)
        here = (wanted >= low) & (wanted < high)
        covered = covered and bool(here.all())
        per_axis.append(_runs(places[here], wanted[here] - low) if here.any() else [])
    copies: list[tuple[_Index, _Index]] = [
        ((*(pair[0] for pair in pairs), ...), (*(pair[1] for pair in pairs), ...))
        for pairs in product(*per_axis)
    ]
    return copies, not covered


def moving_kernel(maps: Maps, fill: Callable[[AttrMap], Any] = lambda attrs: 0) -> Kernel:
    """The kernel of an op that is a function of indices per axis."""

    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        (x,), (out,) = inputs, outputs
        boxes = context.input_regions[0], context.output_regions[0]
        copies, gaps = of_box(context, "copies", boxes, lambda: _copies(*boxes, maps(context)))
        if gaps:
            out.fill(fill(context.attrs))
        for target, source in copies:
            np.copyto(out[target], x[source])

    return kernel


# --- flip -----------------------------------------------------------------------------------------


def _flip_maps(context: KernelContext) -> Mapping[int, AxisMap]:
    shape = context.input_shapes[0]
    last = {axis: shape[axis] - 1 for axis in context.attrs["axes"]}
    return {axis: lambda index, end=end: end - index for axis, end in last.items()}  # type: ignore[misc]  # the default binds the loop's value


def _turned(attrs: AttrMap, made: tuple[int, ...]) -> Alias:
    back, on = slice(None, None, -1), slice(None)
    axes = attrs["axes"]
    return itemgetter((*(back if axis in axes else on for axis in range(len(made))), ...))


define_op(
    "flip",
    infer=same_types,
    rule=moving_rule(lambda inputs, outputs, attrs: attrs["axes"]),
    inputs=1,
    attrs=(Axes(),),
    kernel=moving_kernel(_flip_maps),
    gradient=of_one(lambda attrs, x, y, dy: apply("flip", dy, **attrs)),
    **MOVES,
    strided=View(
        _turned,
        lambda source, value, attrs: apply("flip", value, **attrs),
        cuts=True,
    ),
    doc="The elements in reverse order along axes.",
)


# --- roll -----------------------------------------------------------------------------------------


def _roll_infer(inputs: Types, attrs: AttrMap) -> Types:
    axes, shifts = attrs["axes"], attrs["shifts"]
    if len(axes) != len(shifts):
        raise AttributeValueError(
            "roll needs one shift per axis", got=f"shifts {shifts} for axes {axes}"
        )
    return inputs


def _roll_maps(context: KernelContext) -> Mapping[int, AxisMap]:
    shape = context.input_shapes[0]
    pairs = zip(context.attrs["axes"], context.attrs["shifts"], strict=True)

    def map_of(extent: int, shift: int) -> AxisMap:
        return lambda index: (index - shift) % extent

    return {axis: map_of(shape[axis], shift) for axis, shift in pairs}


def _roll_gradient(attrs: AttrMap, x: Any, y: Any, dy: Any) -> Any:
    back = tuple(-shift for shift in attrs["shifts"])
    return apply("roll", dy, shifts=back, axes=attrs["axes"])


define_op(
    "roll",
    infer=_roll_infer,
    rule=moving_rule(lambda inputs, outputs, attrs: attrs["axes"]),
    inputs=1,
    attrs=(
        Ints("shifts"),
        Axes(),
    ),
    kernel=moving_kernel(_roll_maps),
    gradient=of_one(_roll_gradient),
    **MOVES,
    doc="The elements moved by `shifts` places along `axes`; what leaves at one end comes in "
    "at the other.",
)


# --- tile -----------------------------------------------------------------------------------------


def _repeats(attrs: AttrMap, ndim: int) -> tuple[int, ...]:
    repeats: tuple[int, ...] = attrs["repeats"]
    if len(repeats) != ndim or any(count < 0 for count in repeats):
        raise AttributeValueError(
            "tile needs a number of repeats per axis, of at least 0",
            got=f"repeats {repeats} for {ndim} axes",
        )
    return repeats


def _tile_infer(inputs: Types, attrs: AttrMap) -> Types:
    shape = inputs[0].shape
    repeats = _repeats(attrs, len(shape))
    tiled = tuple(extent * count for extent, count in zip(shape, repeats, strict=True))
    return (TensorType(tiled, inputs[0].dtype),)


def _tiled(inputs: Types, outputs: Types, attrs: AttrMap) -> Sequence[int]:
    return [axis for axis, count in enumerate(attrs["repeats"]) if count != 1]


def _tile_maps(context: KernelContext) -> Mapping[int, AxisMap]:
    def map_of(extent: int) -> AxisMap:
        return lambda index: index % max(extent, 1)

    shape = context.input_shapes[0]
    return {
        axis: map_of(shape[axis])
        for axis, count in enumerate(context.attrs["repeats"])
        if count != 1
    }


def _tile_gradient(attrs: AttrMap, x: Any, y: Any, dy: Any) -> Any:
    pairs = [extent for pair in zip(attrs["repeats"], x.shape, strict=True) for extent in pair]
    return dy.reshape(pairs).sum(tuple(range(0, len(pairs), 2)))


define_op(
    "tile",
    infer=_tile_infer,
    rule=moving_rule(_tiled),
    inputs=1,
    attrs=(Ints("repeats"),),
    kernel=moving_kernel(_tile_maps),
    gradient=of_one(_tile_gradient),
    **MOVES,
    doc="The whole tensor repeated along each axis, as NumPy's tile.",
)


# --- pad ------------------------------------------------------------------------------------------


def _pad_infer(inputs: Types, attrs: AttrMap) -> Types:
    shape = inputs[0].shape
    low, high = attrs["low"], attrs["high"]
    if not len(low) == len(high) == len(shape) or min((*low, *high), default=0) < 0:
        raise AttributeValueError(
            "pad needs two extents per axis, of at least 0",
            got=f"low {low}, high {high} for shape {shape}",
            expected=f"low and high of {len(shape)} extents each",
        )
    check_scalar("pad", inputs[0], attrs, "value")
    padded = tuple(sum(extents) for extents in zip(low, shape, high, strict=True))
    return (TensorType(padded, inputs[0].dtype),)


def _pad_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    # Only zeros may be filled in by several devices whose outputs add up.
    whole = attrs["value"] != 0
    left, right = [], []
    for axis, (before, after) in enumerate(zip(inputs[0].shape, outputs[0].shape, strict=True)):
        kept = before == after
        left.append(f"a{axis}" if kept else f"[i{axis}]" if whole else f"i{axis}")
        right.append(f"a{axis}" if kept else f"o{axis}")
    return f"{' '.join(left) or '...'} -> {' '.join(right) or '...'}"


def _pad_extra(inputs: Types, outputs: Types, attrs: AttrMap, parts: int) -> tuple[Signature, ...]:
    extremes = keeps_extremes(inputs, outputs, attrs, parts)
    if attrs["value"] == 0:
        return (Signature((PARTIAL_SUM,), (PARTIAL_SUM,)), *extremes)
    return extremes


def _pad_maps(context: KernelContext) -> Mapping[int, AxisMap]:
    def map_of(low: int, extent: int) -> AxisMap:
        return lambda index: np.where(index < low + extent, index - low, -1)

    shape, low = context.input_shapes[0], context.attrs["low"]
    return {
        axis: map_of(low[axis], extent)
        for axis, extent in enumerate(shape)
        if extent != context.output_shapes[0][axis]
    }


def _pad_gradient(attrs: AttrMap, x: Any, y: Any, dy: Any) -> Any:
    return slice_like(dy, x, attrs["low"])


define_op(
    "pad",
    infer=_pad_infer,
    rule=_pad_rule,
    inputs=1,
    attrs=(
        Ints("low"),
        Ints("high"),
        Number("value"),
    ),
    kernel=moving_kernel(_pad_maps, lambda attrs: attrs["value"]),
    gradient=of_one(_pad_gradient),
    extra=_pad_extra,
    flops=0,
    doc="`low` elements of `value` before and `high` after each axis; linear where they are zero.",
)


# --- strided_slice and its gradient ---------------------------------------------------------------


def _strided(attrs: AttrMap, shape: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Start, stop and step of each axis."""
    bounds = tuple(attrs[name] for name in ("starts", "stops", "steps"))
    if any(len(each) != len(shape) for each in bounds) or any(
        not 0 <= start <= stop <= extent or step < 1
        for start, stop, step, extent in zip(*bounds, shape, strict=True)
    ):
        starts, stops, steps = bounds
        raise AttributeValueError(
            "strided_slice needs a start, a stop and a step within each axis",
            got=f"starts {starts}, stops {stops}, steps {steps} for shape {shape}",
            expected="0 <= start <= stop <= extent and step >= 1, one of each per axis",
            hint="flip the axis first to walk it backwards",
        )
    return tuple(zip(*bounds, strict=True))


def _strided_shape(attrs: AttrMap, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(len(range(*bounds)) for bounds in _strided(attrs, shape))


def _cut(inputs: Types, outputs: Types, attrs: AttrMap) -> Sequence[int]:
    pairs = zip(inputs[0].shape, outputs[0].shape, strict=True)
    return [axis for axis, (before, after) in enumerate(pairs) if before != after]


def _strided_slice_maps(context: KernelContext) -> Mapping[int, AxisMap]:
    def map_of(start: int, step: int) -> AxisMap:
        return lambda index: start + step * index

    bounds = _strided(context.attrs, context.input_shapes[0])
    return {
        axis: map_of(start, step)
        for axis, (start, _, step) in enumerate(bounds)
        if context.input_shapes[0][axis] != context.output_shapes[0][axis]
    }


define_op(
    "strided_slice",
    infer=lambda inputs, attrs: (
        (TensorType(_strided_shape(attrs, inputs[0].shape), inputs[0].dtype),)
    ),
    rule=moving_rule(_cut),
    inputs=1,
    attrs=(
        Ints("starts"),
        Ints("stops"),
        Ints("steps"),
    ),
    kernel=moving_kernel(_strided_slice_maps),
    gradient=of_one(
        lambda attrs, x, y, dy: apply("strided_slice_grad", dy, shape=x.shape, **attrs)
    ),
    **MOVES,
    strided=SLICED,
    doc="Every step-th element from start to stop along each axis.",
)


def _strided_slice_grad_infer(inputs: Types, attrs: AttrMap) -> Types:
    shape = attrs["shape"]
    expected = _strided_shape(attrs, shape)
    if inputs[0].shape != expected:
        raise ShapeError(
            "strided_slice_grad needs the gradient of its slice",
            got=inputs[0].shape,
            expected=expected,
        )
    return (TensorType(shape, inputs[0].dtype),)


def _strided_slice_grad_maps(context: KernelContext) -> Mapping[int, AxisMap]:
    def map_of(start: int, stop: int, step: int) -> AxisMap:
        return lambda index: np.where(
            (index >= start) & (index < stop) & ((index - start) % step == 0),
            (index - start) // step,
            -1,
        )

    bounds = _strided(context.attrs, context.output_shapes[0])
    return {
        axis: map_of(*bounds[axis])
        for axis, extent in enumerate(context.input_shapes[0])
        if extent != context.output_shapes[0][axis]
    }


def _strided_slice_grad_gradient(
    attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors
) -> Tensors:
    bounds = {name: attrs[name] for name in ("starts", "stops", "steps")}
    return (apply("strided_slice", grads[0], **bounds),)


define_op(
    "strided_slice_grad",
    infer=_strided_slice_grad_infer,
    rule=moving_rule(_cut),
    inputs=1,
    attrs=(
        Shape(),
        Ints("starts"),
        Ints("stops"),
        Ints("steps"),
    ),
    kernel=moving_kernel(_strided_slice_grad_maps),
    gradient=_strided_slice_grad_gradient,
    linear=((0,),),
    flops=0,
    precision="following",
    doc="Elements put back where strided_slice took them from, into zeros of a shape.",
)


# --- unfold_axis ----------------------------------------------------------------------------------


def _unfold_infer(inputs: Types, attrs: AttrMap) -> Types:
    ((shape, dtype),), axis, size = inputs, attrs["axis"], attrs["size"]
    if size > shape[axis]:
        raise ShapeError(
            "unfold_axis needs windows that fit the axis",
            got=f"{size} elements of {shape[axis]}",
            expected=f"at most {shape[axis]}",
        )
    count = (shape[axis] - size) // attrs["step"] + 1
    return (TensorType((*shape[:axis], count, *shape[axis + 1 :], size), dtype),)


def _unfold_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    axes, own = range(len(inputs[0].shape)), attrs["axis"]
    x = " ".join("[n]" if axis == own else f"a{axis}" for axis in axes)
    y = " ".join("[count]" if axis == own else f"a{axis}" for axis in axes)
    return f"{x} -> {y} [size]"


def _place_bounds(attrs: AttrMap, shape: Sequence[int], count: int, place: int) -> AttrMap:
    """Bounds of the slice that has the elements at one place of all windows over an axis."""
    axis, step = attrs["axis"], attrs["step"]
    starts, stops, steps = [0] * len(shape), list(shape), [1] * len(shape)
    starts[axis], stops[axis], steps[axis] = place, place + (count - 1) * step + 1, step
    return {"starts": tuple(starts), "stops": tuple(stops), "steps": tuple(steps)}


def _unfold_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    axis, step, size = (context.attrs[name] for name in ("axis", "step", "size"))
    count = outputs[0].shape[axis]
    for place in range(size):
        places = slice(place, place + (count - 1) * step + 1, step)
        np.copyto(outputs[0][..., place], inputs[0][(*(slice(None),) * axis, places)])


def _unfold_gradient(attrs: AttrMap, x: Any, y: Any, dy: Any) -> Any:
    total = None
    for place in range(attrs["size"]):
        bounds = _place_bounds(attrs, x.shape, y.shape[attrs["axis"]], place)
        put = apply("strided_slice_grad", dy[..., place], shape=x.shape, **bounds)
        total = put if total is None else total + put
    return filled(x) if total is None else total


def _windows_of(attrs: AttrMap, made: tuple[int, ...]) -> Alias:
    axis, step = attrs["axis"], attrs["step"]

    def windows(array: Array) -> Array:
        along = array.strides[axis]
        strides = (*array.strides[:axis], along * step, *array.strides[axis + 1 :], along)
        return as_strided(array, made, strides)

    return windows


def _put_windows(source: Any, value: Any, attrs: AttrMap) -> Any:
    for place in range(attrs["size"]):
        bounds = _place_bounds(attrs, source.shape, value.shape[attrs["axis"]], place)
        source = apply("slice_scatter", source, value[..., place], **bounds)
    return source


define_op(
    "unfold_axis",
    infer=_unfold_infer,
    rule=_unfold_rule,
    inputs=1,
    attrs=(Axis(), Int("size", least=0), Int("step", least=1)),
    kernel=_unfold_kernel,
    gradient=of_one(_unfold_gradient),
    **MOVES,
    strided=View(
        _windows_of,
        _put_windows,
        cuts=True,
        overlaps=lambda attrs: attrs["size"] > attrs["step"],
        on_host=True,
    ),
    doc="Windows of `size` elements of an axis, `step` apart, along a new last axis: [..., n, ...] "
    "-> [..., count, ..., size].",
)


# --- slice_scatter --------------------------------------------------------------------------------


def _slice_scatter_infer(inputs: Types, attrs: AttrMap) -> Types:
    expected = _strided_shape(attrs, inputs[0].shape)
    if inputs[1].shape != expected:
        raise ShapeError(
            "slice_scatter needs a value of the slice's shape",
            got=inputs[1].shape,
            expected=expected,
        )
    return inputs[:1]


def _slice_scatter_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    """The value is whole along axes that are cut; there a device takes what falls into its box."""
    own = set(_cut(inputs, inputs[1:], attrs))
    axes = range(len(inputs[0].shape))
    x = " ".join(f"a{axis}" for axis in axes) or "..."
    value = " ".join(f"[v{axis}]" if axis in own else f"a{axis}" for axis in axes) or "..."
    return f"{x}, {value} -> {x}"


def _written_box(context: KernelContext) -> tuple[_Index, _Index]:
    """Where in this device's box of the tensor the slice lies, and what of the value that takes."""
    shape, small = context.input_shapes
    target: list[slice | EllipsisType] = []
    source: list[slice | EllipsisType] = []
    bounds = zip(_strided(context.attrs, shape), context.input_regions[0], strict=True)
    for axis, ((start, _, step), (low, high)) in enumerate(bounds):
        if shape[axis] == small[axis]:
            target.append(slice(None))
            source.append(slice(None))
            continue
        first = max(0, -((start - low) // step))
        last = min(small[axis], -((start - high) // step))
        begin = start + first * step - low
        count = max(0, last - first)
        target.append(slice(begin, begin + count * step, step) if count else slice(0, 0))
        source.append(slice(first, first + count))
    return (*target, ...), (*source, ...)


def _slice_scatter_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x, value), (out,) = inputs, outputs
    box = context.input_regions[0]
    target, source = of_box(context, "written", box, lambda: _written_box(context))
    copy_unless_shared(x, out)
    place = out[target]
    np.copyto(place, value[source])


def _slice_scatter_gradient(
    attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors
) -> Tensors:
    (grad,), value = grads, inputs[1]
    zeros = apply_source(grad, "fill", shape=value.shape, dtype=str(value.dtype), value=0.0)
    return (
        apply("slice_scatter", grad, zeros, **attrs),
        apply("strided_slice", grad, **attrs),
    )


define_op(
    "slice_scatter",
    infer=_slice_scatter_infer,
    operands="x X, value X -> y X",
    rule=_slice_scatter_rule,
    attrs=(
        Ints("starts"),
        Ints("stops"),
        Ints("steps"),
    ),
    kernel=_slice_scatter_kernel,
    gradient=_slice_scatter_gradient,
    linear=((0, 1),),
    extra=keeps_extremes,
    flops=0,
    inplace=((0, 0),),
    precision="following",
    doc="The first tensor with the second in the place of every step-th element from start to "
    "stop along each axis: what a change in place of a slice makes of the whole.",
)
