"""Pooling over the trailing one to three axes: greatest element, average, and average to a size.

Pooling treats every leading axis alike, so these split freely; along a split axis under the window
each device has a halo (see `halo`). Sums and maxima over windows run over the positions of the
window (see `window`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.ir.halo import Reach
from plancompiler.ir.op import TensorType
from plancompiler.ir.sbp import Partial, Reduction, Split
from plancompiler.ir.shard import Region, element_count, intersect, region_index, relative
from plancompiler.ops import kernel as blocking
from plancompiler.ops.attributes import Bool, Ints
from plancompiler.ops.check import (
    expect_shape,
)
from plancompiler.ops.gradient import by_op, of_one
from plancompiler.ops.halo import needed, over_axes
from plancompiler.ops.kernel import contiguous, in_float32, scratch
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    Gradient,
    KernelContext,
    Types,
    Windows,
    apply,
    define_op,
)
from plancompiler.ops.rule import Signature
from plancompiler.ops.window import Index, Window, box, window_attributes, window_of


def _window(kind: str, attrs: AttrMap, ndim: int) -> Window:
    extents = attrs["kernel"]
    if len(extents) != ndim:
        raise AttributeValueError(
            f"attribute 'kernel' of {kind} has a wrong value",
            got=extents,
            expected=f"{ndim} whole numbers of at least 1",
        )
    window = window_of(kind, attrs, extents)
    for axis, pair in enumerate(window.padding):
        if max(pair) >= window.reach(axis):
            raise AttributeValueError(
                f"the padding of {kind} reaches across a whole window",
                got=f"padding {pair} of a window of {window.reach(axis)}",
                expected=f"less than {window.reach(axis)}, so that every window has an element",
            )
    return window


def _planes(ndim: int, *arrays: Array) -> Iterator[tuple[Array, ...]]:
    """The arrays with their leading axes as one, in pieces that fit in cache."""
    leading = prod(arrays[0].shape[: arrays[0].ndim - ndim])
    flat = [array.reshape(leading, *array.shape[array.ndim - ndim :]) for array in arrays]
    widest = max(prod(array.shape[1:]) * array.itemsize for array in flat)
    step = max(1, blocking.BLOCK_BYTES // max(1, widest))
    if not isinstance(arrays[0], np.ndarray):
        step = max(1, leading)
    for start in range(0, len(flat[0]), step):
        yield tuple(array[start : start + step] for array in flat)


def _line(ndim: int, operands: str) -> str:
    """`operands` of the letters s (elements) and t (windows), each over `ndim` whole axes."""
    axes = {
        name: "... " + " ".join(f"[{name}{axis}]" for axis in range(ndim)) for name in ("s", "t")
    }
    left, right = (", ".join(axes[name] for name in side) for side in operands.split(">"))
    return f"{left} -> {right}"


def _pool_flops(inputs: Types, outputs: Types, attrs: AttrMap) -> int:
    return element_count(outputs[0].shape) * prod(attrs["kernel"])


def _grad_flops(inputs: Types, outputs: Types, attrs: AttrMap) -> int:
    return element_count(inputs[-1].shape) * prod(attrs["kernel"])


def _windows(ndim: int) -> Windows:
    """Signatures that split the windows, of an op of one input."""

    def windows(inputs: Types, outputs: Types, attrs: AttrMap) -> tuple[Signature, ...]:
        (x,), (y,) = inputs, outputs
        window = window_of("pooling", attrs, attrs["kernel"])

        def split(at: int, axis: int) -> Signature:
            seen = window.needs(at, x.shape[axis])
            return Signature((needed(axis, y.shape[axis], seen),), (Split(axis),))

        return over_axes(y, ndim, split)

    return windows


# --- the greatest element -------------------------------------------------------------------------


def _register_max(ndim: int) -> None:
    kind = f"max_pool{ndim}d"
    grad_kind, pick_kind = f"{kind}_grad", f"{kind}_pick"
    attrs = (Ints("kernel"), *window_attributes(ndim))

    def output_type(name: str, inputs: Types, attrs: AttrMap) -> TensorType:
        x = inputs[0]
        spatial = _window(name, attrs, ndim).output_shape(name, x.shape[x_axis(x) :])
        return TensorType((*x.shape[: x_axis(x)], *spatial), x.dtype)

    def x_axis(x: TensorType) -> int:
        return len(x.shape) - ndim

    def infer(inputs: Types, attrs: AttrMap) -> Types:
        return (output_type(kind, inputs, attrs),)

    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        window = _window(kind, context.attrs, ndim)
        window = window.within(context.input_regions[0], context.output_regions[0])
        for x, y in _planes(ndim, *inputs, *outputs):
            y.fill(-np.inf if y.dtype.kind == "f" else np.iinfo(y.dtype).min)
            for _, target, source in window.positions(x.shape[1:], y.shape[1:]):
                made = y[box(slice(None), *target)]
                np.maximum(made, x[box(slice(None), *source)], out=made)

    def grad_infer(inputs: Types, attrs: AttrMap) -> Types:
        made = output_type(grad_kind, inputs, attrs)
        expect_shape(grad_kind, inputs[1], made.shape, "pooled input")
        return (inputs[0],)

    def winners(context: KernelContext, x: Array, y: Array) -> Iterator[tuple[Index, Index, Array]]:
        """Windows, an element of each, and whether it is the window's first greatest one."""
        open_ = scratch(context, "open", y.shape, np.dtype(bool))
        open_.fill(True)
        window = _window(grad_kind, context.attrs, ndim).within(*context.input_regions[:2])
        for _, target, source in window.positions(x.shape[1:], y.shape[1:]):
            target, source = (slice(None), *target), (slice(None), *source)
            chosen = np.equal(x[source], y[target])
            np.logical_and(chosen, open_[target], out=chosen)
            np.logical_xor(open_[target], chosen, out=open_[target])
            yield target, source, chosen

    def grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        # A device has the whole of each window that sees one of its elements; what lies outside of
        # these is seen by none.
        seen, made = context.input_regions[0][-ndim:], context.output_regions[0][-ndim:]
        common = intersect(seen, made)
        for x, y, dy, dx in _planes(ndim, *inputs, *outputs):
            spread = dx if seen == made else scratch(context, "spread", x.shape, x.dtype)
            spread.fill(0)
            for target, source, chosen in winners(context, x, y):
                spread[source] += dy[target] * chosen
            if spread is dx:
                continue
            dx.fill(0)
            if common is not None:
                own, read = (region_index(relative(common, each)) for each in (made, seen))
                dx[(slice(None), *own)] = spread[(slice(None), *read)]

    def pick_infer(inputs: Types, attrs: AttrMap) -> Types:
        made = output_type(pick_kind, inputs, attrs)
        expect_shape(pick_kind, inputs[1], made.shape, "pooled input")
        return (made,)

    def pick_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        for x, y, values, out in _planes(ndim, *inputs, *outputs):
            out.fill(0)
            for target, source, chosen in winners(context, x, y):
                out[target] += values[source] * chosen

    def extra(inputs: Types, outputs: Types, attrs: AttrMap, parts: int) -> tuple[Signature, ...]:
        whole = Partial(Reduction.MAX)
        return (Signature((whole,), (whole,)),)

    def grad_windows(inputs: Types, outputs: Types, attrs: AttrMap) -> tuple[Signature, ...]:
        x, y, _ = inputs
        window = _window(grad_kind, attrs, ndim)

        def split(at: int, axis: int) -> Signature:
            seen = window.needs(at, x.shape[axis])
            seen_by = seen.inverse(y.shape[axis])
            windows = needed(axis, x.shape[axis], seen_by)
            elements = needed(axis, x.shape[axis], seen_by, seen)
            return Signature((elements, windows, windows), (Split(axis),))

        return over_axes(x, ndim, split)

    def pick_windows(inputs: Types, outputs: Types, attrs: AttrMap) -> tuple[Signature, ...]:
        x, y, _ = inputs
        window = _window(pick_kind, attrs, ndim)

        def split(at: int, axis: int) -> Signature:
            seen = needed(axis, y.shape[axis], window.needs(at, x.shape[axis]))
            return Signature((seen, Split(axis), seen), (Split(axis),))

        return over_axes(y, ndim, split)

    define_op(
        kind,
        infer=infer,
        operands="x N -> y N",
        rule=_line(ndim, "s>t"),
        attrs=attrs,
        kernel=contiguous(kernel),
        gradient=by_op(kind, grad_kind),
        windows=_windows(ndim),
        extra=extra,
        flops=_pool_flops,
        doc=f"The greatest element of each window over the last {ndim} axes; padding never wins.",
    )
    define_op(
        grad_kind,
        infer=grad_infer,
        operands="x N, y N, dy N -> dx N",
        rule=_line(ndim, "stt>s"),
        attrs=attrs,
        kernel=in_float32(contiguous(grad_kernel)),
        gradient=by_op(grad_kind, pick_kind),
        linear=((2,),),
        windows=grad_windows,
        flops=_grad_flops,
        doc=f"The gradient of {kind}: (x, y, dy) -> dx, to the first greatest element of each "
        "window.",
    )
    define_op(
        pick_kind,
        infer=pick_infer,
        operands="x N, y N, ddx N -> ddy N",
        rule=_line(ndim, "sts>t"),
        attrs=attrs,
        kernel=in_float32(contiguous(pick_kernel)),
        gradient=by_op(pick_kind, grad_kind),
        linear=((2,),),
        windows=pick_windows,
        flops=_pool_flops,
        doc=f"What {kind}_grad is transposed: (x, y, elements like x) -> the element of each "
        "window where x is greatest, the first of equal ones.",
    )


# --- the average ----------------------------------------------------------------------------------


def _counts(window: Window, spatial: Sequence[int], windows: Region, padded: bool) -> Array:
    """What the sum of each window of a box is divided by: all its elements, or those that are no
    padding.
    """
    if padded:
        return np.full((1,) * window.ndim, float(prod(window.kernel)))
    counts = np.ones((1,) * window.ndim)
    for axis, (extent, (low, high)) in enumerate(zip(spatial, windows, strict=True)):
        start = np.arange(low, high) * window.stride[axis] - window.padding[axis][0]
        places = start[:, None] + np.arange(window.kernel[axis]) * window.dilation[axis]
        inside = np.count_nonzero((places >= 0) & (places < extent), axis=1)
        counts = counts * inside.reshape([-1 if each == axis else 1 for each in range(window.ndim)])
    return counts


def _register_average(ndim: int) -> None:
    kind = f"avg_pool{ndim}d"
    grad_kind = f"{kind}_grad"
    attrs = (Ints("kernel"), *window_attributes(ndim), Bool("count_padding", True))

    def infer(inputs: Types, attrs: AttrMap) -> Types:
        window = _window(kind, attrs, ndim)
        shape = inputs[0].shape
        spatial = window.output_shape(kind, shape[len(shape) - ndim :])
        return (TensorType((*shape[: len(shape) - ndim], *spatial), inputs[0].dtype),)

    def prepare(
        context: KernelContext,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        elements: Region,
        windows: Region,
    ) -> tuple[Window, Array]:
        """The window over this device's box of elements of this global shape, and what the sums of
        its box of windows are multiplied by.
        """
        window = _window(kind, context.attrs, ndim)
        inverse = context.state.get("inverse")
        if inverse is None:
            padded = context.attrs["count_padding"]
            counts = _counts(window, shape[-ndim:], windows[-ndim:], padded)
            inverse = context.arrays.asarray(np.reciprocal(counts).astype(dtype))
            context.state["inverse"] = inverse
        return window.within(elements, windows), inverse

    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        boxes = context.input_regions[0], context.output_regions[0]
        window, inverse = prepare(context, inputs[0].dtype, context.input_shapes[0], *boxes)
        for x, y in _planes(ndim, *inputs, *outputs):
            y.fill(0)
            for _, target, source in window.positions(x.shape[1:], y.shape[1:]):
                made = y[box(slice(None), *target)]
                np.add(made, x[box(slice(None), *source)], out=made)
            np.multiply(y, inverse, out=y)

    def gradient(attrs: AttrMap, x: Any, y: Any, dy: Any) -> Any:
        return apply(grad_kind, dy, **attrs, size=x.shape[x.ndim - ndim :])

    def grad_infer(inputs: Types, attrs: AttrMap) -> Types:
        window = _window(grad_kind, attrs, ndim)
        size, (dy,) = attrs["size"], inputs
        leading = len(dy.shape) - ndim
        if len(size) != ndim or window.output_shape(grad_kind, size) != dy.shape[leading:]:
            raise ShapeError(
                f"{grad_kind} needs a gradient of one element per window",
                got=f"{dy.shape} for windows over {size}",
            )
        return (TensorType((*dy.shape[:leading], *size), dy.dtype),)

    def grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        boxes = context.output_regions[0], context.input_regions[0]
        window, inverse = prepare(context, inputs[0].dtype, context.output_shapes[0], *boxes)
        for dy, dx in _planes(ndim, *inputs, *outputs):
            share = scratch(context, "share", dy.shape, dy.dtype)
            np.multiply(dy, inverse, out=share)
            dx.fill(0)
            for _, target, source in window.positions(dx.shape[1:], dy.shape[1:]):
                part = dx[box(slice(None), *source)]
                np.add(part, share[box(slice(None), *target)], out=part)

    def grad_windows(inputs: Types, outputs: Types, attrs: AttrMap) -> tuple[Signature, ...]:
        (dy,), (dx,) = inputs, outputs
        window = _window(grad_kind, attrs, ndim)

        def split(at: int, axis: int) -> Signature:
            seen_by = window.needs(at, dx.shape[axis]).inverse(dy.shape[axis])
            return Signature((needed(axis, dx.shape[axis], seen_by),), (Split(axis),))

        return over_axes(dx, ndim, split)

    define_op(
        kind,
        infer=infer,
        operands="x F -> y F",
        rule=_line(ndim, "s>t"),
        attrs=attrs,
        kernel=in_float32(contiguous(kernel)),
        gradient=of_one(gradient),
        linear=((0,),),
        windows=_windows(ndim),
        flops=_pool_flops,
        doc=f"The average of each window over the last {ndim} axes, padding counted as zeros "
        "unless `count_padding` is false.",
    )
    define_op(
        grad_kind,
        infer=grad_infer,
        operands="dy F -> dx F",
        rule=_line(ndim, "t>s"),
        attrs=(*attrs, Ints("size")),
        kernel=in_float32(contiguous(grad_kernel)),
        gradient=by_op(grad_kind, kind),
        linear=((0,),),
        windows=grad_windows,
        flops=_grad_flops,
        doc=f"The gradient of {kind}: dy -> dx, whose last axes have the extents `size`.",
    )


# --- the average to a size ------------------------------------------------------------------------


def _bins(extent: int, count: int, dtype: np.dtype[Any]) -> Array:
    """[extent, count]: how much each element adds to each of `count` averages along an axis.

    Average i covers the elements from floor(i extent / count) to ceil((i + 1) extent / count).
    """
    shares = np.zeros((extent, count), dtype)
    for index in range(count):
        low, high = index * extent // count, -(-(index + 1) * extent // count)
        shares[low:high, index] = 1.0 / (high - low)
    return shares


def _along_axes(
    context: KernelContext, source: Array, target: Array, matrices: Callable[[int], Array]
) -> None:
    """Multiply the trailing axes by a matrix each, last axis first."""
    ndim = len(context.attrs["size"])
    product = source
    for axis in range(source.ndim - 1, source.ndim - 1 - ndim, -1):
        matrix = matrices(axis)
        product = np.moveaxis(np.matmul(np.moveaxis(product, axis, -1), matrix), -1, axis)
    np.copyto(target, product)


def _register_adaptive(ndim: int) -> None:
    kind = f"adaptive_avg_pool{ndim}d"
    grad_kind = f"{kind}_grad"

    def resized(name: str, inputs: Types, attrs: AttrMap) -> Types:
        size, shape = attrs["size"], inputs[0].shape
        leading = len(shape) - ndim
        if len(size) != ndim or min(size) < 1 or 0 in shape[leading:]:
            raise ShapeError(
                f"{name} needs at least one element along every axis",
                got=f"{shape[leading:]} to {size}",
                expected=f"{ndim} extents of at least 1",
            )
        return (TensorType((*shape[:leading], *size), inputs[0].dtype),)

    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        (x,), (y,) = inputs, outputs
        (shape,), (size,) = context.input_shapes, context.output_shapes
        (seen,), (made,) = context.input_regions, context.output_regions

        def shares(axis: int) -> Array:
            bins = _bins(shape[axis], size[axis], x.dtype)
            own = np.ascontiguousarray(bins[slice(*seen[axis]), slice(*made[axis])])
            placed: Array = context.arrays.asarray(own)
            return placed

        _along_axes(context, x, y, shares)

    def grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        (dy,), (dx,) = inputs, outputs
        (size,), (shape,) = context.input_shapes, context.output_shapes
        (seen,), (made,) = context.input_regions, context.output_regions

        def shares(axis: int) -> Array:
            bins = _bins(shape[axis], size[axis], dy.dtype)
            own = np.ascontiguousarray(bins[slice(*made[axis]), slice(*seen[axis])].T)
            placed: Array = context.arrays.asarray(own)
            return placed

        _along_axes(context, dy, dx, shares)

    def bins_of(extent: int, count: int) -> Reach:
        return Reach(extent, 0, extent - 1, count, extent)

    def windows(inputs: Types, outputs: Types, attrs: AttrMap) -> tuple[Signature, ...]:
        (x,), (y,) = inputs, outputs

        def split(at: int, axis: int) -> Signature:
            extent, count = x.shape[axis], y.shape[axis]
            return Signature((needed(axis, count, bins_of(extent, count)),), (Split(axis),))

        return over_axes(y, ndim, split)

    def grad_windows(inputs: Types, outputs: Types, attrs: AttrMap) -> tuple[Signature, ...]:
        (dy,), (dx,) = inputs, outputs

        def split(at: int, axis: int) -> Signature:
            extent, count = dx.shape[axis], dy.shape[axis]
            seen_by = bins_of(extent, count).inverse(count)
            return Signature((needed(axis, extent, seen_by),), (Split(axis),))

        return over_axes(dx, ndim, split)

    def by(other: str) -> Gradient:
        return of_one(lambda attrs, x, y, dy: apply(other, dy, size=x.shape[x.ndim - ndim :]))

    define_op(
        kind,
        infer=lambda inputs, attrs: resized(kind, inputs, attrs),
        operands="x F -> y F",
        rule=_line(ndim, "s>t"),
        attrs=(Ints("size"),),
        kernel=in_float32(kernel),
        gradient=by(grad_kind),
        linear=((0,),),
        windows=windows,
        flops=2,
        doc=f"Averages over the last {ndim} axes to the extents `size`, over windows as equal "
        "as they can be.",
    )
    define_op(
        grad_kind,
        infer=lambda inputs, attrs: resized(grad_kind, inputs, attrs),
        operands="x F -> y F",
        rule=_line(ndim, "t>s"),
        attrs=(Ints("size"),),
        kernel=in_float32(grad_kernel),
        gradient=by(kind),
        linear=((0,),),
        windows=grad_windows,
        flops=lambda inputs, outputs, attrs: 2 * element_count(outputs[0].shape),
        doc=f"The gradient of {kind}: dy -> dx, whose last axes have the extents `size`.",
    )


for _ndim in (1, 2, 3):
    _register_max(_ndim)
    _register_average(_ndim)
    _register_adaptive(_ndim)
