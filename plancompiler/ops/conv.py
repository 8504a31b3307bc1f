"""Convolutions over one to three spatial axes, transposed ones, and the gradient of the weight.

Layouts are `x [n, c, *spatial]` and `weight [o, c / groups, *kernel]`. A transposed convolution is
the gradient of a convolution by its input, so the three kinds per number of axes are closed under
differentiation. All are matrix products with columns: the elements of each window below each other,
written piece by piece into a buffer that stays in cache. Where each channel is a group of its own
(depthwise) there is nothing to multiply, and sums over the positions of the window are faster.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.ir.op import TensorType
from plancompiler.ir.sbp import BROADCAST, PARTIAL_SUM, Split
from plancompiler.ir.shard import element_count
from plancompiler.ops import depthwise
from plancompiler.ops import kernel as blocking
from plancompiler.ops.attributes import Int, Ints
from plancompiler.ops.groups import GroupCount, group_split
from plancompiler.ops.halo import needed, over_axes
from plancompiler.ops.kernel import contiguous, in_float32, scratch
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    Gradient,
    Infer,
    Kernel,
    KernelContext,
    Rule,
    Tensors,
    Types,
    apply,
    define_op,
)
from plancompiler.ops.rule import Signature
from plancompiler.ops.window import WINDOW_ATTRS, Window, box, window_attributes, window_of

_SPATIAL = {1: "[n, c, length]", 2: "[n, c, height, width]", 3: "[n, c, depth, height, width]"}
_COLUMN_BLOCKS = 8
"""Pieces' worth of bytes in the buffer of columns: products gain by width more than by cache."""


def _pass_on(attrs: AttrMap, **more: Any) -> dict[str, Any]:
    """The attributes that a convolution and its gradients share, and some more."""
    kept = {name: attrs[name] for name in (*WINDOW_ATTRS, "groups") if name in attrs}
    return {**kept, **more}


def _divide(kind: str, what: str, channels: int, groups: int) -> None:
    if channels % groups:
        raise ShapeError(
            f"the groups of {kind} must divide its {what}", got=f"{channels} in {groups} groups"
        )


# --- pieces ---------------------------------------------------------------------------------------


def _pieces(images: int, rows: int, row_bytes: int) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Images, and rows of their windows, whose columns fit the buffer: several whole images, or a
    part of one.
    """
    budget = _COLUMN_BLOCKS * blocking.BLOCK_BYTES
    if rows * row_bytes <= budget:
        step = max(1, budget // max(1, rows * row_bytes))
        for start in range(0, images, step):
            yield slice(start, min(start + step, images)), (0, rows)
        return
    step = max(1, budget // row_bytes)
    for image in range(images):
        for start in range(0, rows, step):
            yield slice(image, image + 1), (start, min(start + step, rows))


# --- convolution ----------------------------------------------------------------------------------


def _conv_infer(kind: str, ndim: int) -> Infer:
    def infer(inputs: Types, attrs: AttrMap) -> Types:
        x, weight = inputs
        groups = attrs["groups"]
        _divide(kind, "output channels", weight.shape[0], groups)
        if x.shape[1] != weight.shape[1] * groups:
            raise ShapeError(
                f"the channels of {kind} do not fit its weight",
                got=f"{x.shape[1]} channels, weight {weight.shape}, {groups} groups",
                expected=f"{weight.shape[1] * groups} channels",
            )
        window = window_of(kind, attrs, weight.shape[2:])
        spatial = window.output_shape(kind, x.shape[2:])
        return (TensorType((x.shape[0], weight.shape[0], *spatial), x.dtype),)

    return infer


def _conv_kernel(kind: str) -> Kernel:
    def run(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        (x, weight), (out,) = inputs, outputs
        window = window_of(kind, context.attrs, weight.shape[2:])
        window = window.within(context.input_regions[0], context.output_regions[0])
        if x.size == 0 or out.size == 0:
            out.fill(0)
        elif _is_depthwise(context.input_shapes[1], context.attrs["groups"]):
            depthwise.convolve(context, window, x, weight, out)
        else:
            _convolve(context, window, x, weight, out)

    return run


def _is_depthwise(weight: tuple[int, ...], groups: int) -> bool:
    """Whether each channel is a group of its own, by the global shape of the weight."""
    return weight[:2] == (groups, 1)


def _convolve(context: KernelContext, window: Window, x: Array, weight: Array, out: Array) -> None:
    spatial, windows = x.shape[2:], out.shape[2:]
    inner = prod(weight.shape[1:])
    groups = x.shape[1] // weight.shape[1]
    left = weight.reshape(groups, -1, inner)
    result = out.reshape(len(out), groups, left.shape[1], -1)
    if window.is_point:
        np.matmul(left, x.reshape(len(x), groups, inner, -1), out=result)
        return
    width = prod(windows[1:])
    for images, rows in _pieces(len(x), windows[0], groups * inner * width * x.itemsize):
        count, height = images.stop - images.start, rows[1] - rows[0]
        shape = (count, x.shape[1], *window.kernel, height, *windows[1:])
        columns = scratch(context, "columns", shape, x.dtype)
        if any(before or after for before, after in window.padding):
            columns.fill(0)
        for at, target, source in window.positions(spatial, windows, rows):
            np.copyto(
                columns[box(slice(None), slice(None), *at, *target)],
                x[box(images, slice(None), *source)],
            )
        np.matmul(
            left,
            columns.reshape(count, groups, inner, height * width),
            out=result[images, :, :, rows[0] * width : rows[1] * width],
        )


# --- transposed convolution, the gradient by the input --------------------------------------------


def _transpose_infer(kind: str, ndim: int) -> Infer:
    def infer(inputs: Types, attrs: AttrMap) -> Types:
        x, weight = inputs
        groups = attrs["groups"]
        _divide(kind, "input channels", weight.shape[0], groups)
        window = window_of(kind, attrs, weight.shape[2:])
        more = attrs["output_padding"]
        if len(more) != ndim or not all(
            0 <= extra < stride for extra, stride in zip(more, window.stride, strict=True)
        ):
            raise AttributeValueError(
                f"attribute 'output_padding' of {kind} has a wrong value",
                got=more,
                expected=f"a number from 0 and below the stride {window.stride} per axis",
            )
        spatial = []
        for axis, extent in enumerate(x.shape[2:]):
            before, after = window.padding[axis]
            size = (extent - 1) * window.stride[axis] + window.reach(axis) - before - after
            spatial.append(size + more[axis])
            if extent < 1 or spatial[-1] < 1:
                raise ShapeError(
                    f"{kind} has no elements along a spatial axis",
                    got=f"input {x.shape}, padding {before, after}",
                    expected="an output of at least one element along every axis",
                )
        return (TensorType((x.shape[0], weight.shape[1] * groups, *spatial), x.dtype),)

    return infer


def _transpose_kernel(kind: str) -> Kernel:
    def run(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        (x, weight), (out,) = inputs, outputs
        window = window_of(kind, context.attrs, weight.shape[2:])
        window = window.within(context.output_regions[0], context.input_regions[0])
        out.fill(0)
        if x.size == 0 or out.size == 0:
            return
        if _is_depthwise(context.input_shapes[1], context.attrs["groups"]):
            depthwise.convolve_transposed(context, window, x, weight, out)
        else:
            _convolve_transposed(context, window, x, weight, out)

    return run


def _convolve_transposed(
    context: KernelContext, window: Window, x: Array, weight: Array, out: Array
) -> None:
    windows, spatial = x.shape[2:], out.shape[2:]
    inner = prod(weight.shape[1:])
    groups = out.shape[1] // weight.shape[1]
    left = weight.reshape(groups, -1, inner).swapaxes(-1, -2)
    right = x.reshape(len(x), groups, left.shape[2], -1)
    if window.is_point:
        np.matmul(left, right, out=out.reshape(len(out), groups, inner, -1))
        return
    width = prod(windows[1:])
    for images, rows in _pieces(len(x), windows[0], groups * inner * width * x.itemsize):
        count, height = images.stop - images.start, rows[1] - rows[0]
        flat = (count, groups, inner, height * width)
        columns = scratch(context, "columns", flat, x.dtype)
        np.matmul(left, right[images, :, :, rows[0] * width : rows[1] * width], out=columns)
        columns = columns.reshape(count, out.shape[1], *window.kernel, height, *windows[1:])
        for at, target, source in window.positions(spatial, windows, rows):
            part = out[box(images, slice(None), *source)]
            np.add(part, columns[box(slice(None), slice(None), *at, *target)], out=part)


# --- the gradient by the weight -------------------------------------------------------------------


def _weight_infer(kind: str, ndim: int) -> Infer:
    def infer(inputs: Types, attrs: AttrMap) -> Types:
        x, dy = inputs
        groups = attrs["groups"]
        _divide(kind, "channels", x.shape[1], groups)
        _divide(kind, "channels of the gradient", dy.shape[1], groups)
        extents = attrs["kernel"]
        if len(extents) != ndim:
            raise AttributeValueError(
                f"attribute 'kernel' of {kind} has a wrong value",
                got=extents,
                expected=f"{ndim} whole numbers of at least 1",
            )
        window = window_of(kind, attrs, extents)
        wanted = (x.shape[0], dy.shape[1], *window.output_shape(kind, x.shape[2:]))
        if dy.shape != wanted:
            raise ShapeError(
                f"{kind} needs another shape for its gradient", got=dy.shape, expected=wanted
            )
        return (TensorType((dy.shape[1], x.shape[1] // groups, *extents), x.dtype),)

    return infer


def _weight_kernel(kind: str) -> Kernel:
    def run(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        (x, dy), (out,) = inputs, outputs
        window = window_of(kind, context.attrs, out.shape[2:])
        window = window.within(*context.input_regions)
        out.fill(0)
        if x.size == 0 or dy.size == 0:
            return
        if _is_depthwise(context.output_shapes[0], context.attrs["groups"]):
            depthwise.weight_gradient(window, x, dy, out)
        else:
            _weight_product(context, window, x, dy, out)

    return run


def _weight_product(
    context: KernelContext, window: Window, x: Array, dy: Array, out: Array
) -> None:
    # The images stand next to each other in the columns, so that one product sums over them.
    spatial, windows = x.shape[2:], dy.shape[2:]
    inner = prod(out.shape[1:])
    groups = x.shape[1] // out.shape[1]
    result = out.reshape(groups, -1, inner)
    work = scratch(context, "work", result.shape, out.dtype)
    width = prod(windows[1:])
    for images, rows in _pieces(len(x), windows[0], groups * inner * width * x.itemsize):
        count, height = images.stop - images.start, rows[1] - rows[0]
        shape = (x.shape[1], *window.kernel, count, height, *windows[1:])
        columns = scratch(context, "columns", shape, x.dtype)
        if any(before or after for before, after in window.padding):
            columns.fill(0)
        for at, target, source in window.positions(spatial, windows, rows):
            np.copyto(
                columns[box(slice(None), *at, slice(None), *target)],
                x[box(images, slice(None), *source)].swapaxes(0, 1),
            )
        part = scratch(context, "part", (dy.shape[1], count, height, *windows[1:]), dy.dtype)
        np.copyto(part, dy[images, :, rows[0] : rows[1]].swapaxes(0, 1))
        seen = count * height * width
        np.matmul(
            part.reshape(groups, -1, seen),
            columns.reshape(groups, inner, seen).swapaxes(-1, -2),
            out=work,
        )
        np.add(result, work, out=result)


# --- sharding -------------------------------------------------------------------------------------


def _group_count(inputs: Types, attrs: AttrMap) -> int | None:
    groups = attrs["groups"]
    return None if groups == 1 or _is_depthwise(inputs[1].shape, groups) else groups


def _weight_group_count(inputs: Types, attrs: AttrMap) -> int | None:
    groups = attrs["groups"]
    channels = {tensor.shape[1] for tensor in inputs}
    return None if groups == 1 or channels == {groups} else groups


def _rule(ndim: int, count: GroupCount, *lines: str) -> Rule:
    """One of the lines for one group, groups (split by `group_split`), a group per channel."""
    axes = {name: " ".join(f"[{name}{axis}]" for axis in range(ndim)) for name in "skt"}
    single, grouped, apart = (
        re.sub(r"\b[skt]\b", lambda letter: axes[letter[0]], line) for line in lines
    )

    def rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
        if attrs["groups"] == 1:
            return single
        return apart if count(inputs, attrs) is None else grouped

    return rule


def _conv_windows(inputs: Types, outputs: Types, attrs: AttrMap) -> tuple[Signature, ...]:
    (x, weight), (y,) = inputs, outputs
    window = window_of("conv", attrs, weight.shape[2:])

    def split(at: int, axis: int) -> Signature:
        seen = window.needs(at, x.shape[axis])
        return Signature((needed(axis, y.shape[axis], seen), BROADCAST), (Split(axis),))

    return over_axes(y, window.ndim, split)


def _transpose_windows(inputs: Types, outputs: Types, attrs: AttrMap) -> tuple[Signature, ...]:
    (x, weight), (y,) = inputs, outputs
    window = window_of("conv", attrs, weight.shape[2:])

    def split(at: int, axis: int) -> Signature:
        seen_by = window.needs(at, y.shape[axis]).inverse(x.shape[axis])
        return Signature((needed(axis, y.shape[axis], seen_by), BROADCAST), (Split(axis),))

    return over_axes(y, window.ndim, split)


def _weight_windows(inputs: Types, outputs: Types, attrs: AttrMap) -> tuple[Signature, ...]:
    x, dy = inputs
    window = window_of("conv", attrs, attrs["kernel"])

    def split(at: int, axis: int) -> Signature:
        seen = window.needs(at, x.shape[axis])
        return Signature((needed(axis, dy.shape[axis], seen), Split(axis)), (PARTIAL_SUM,))

    return over_axes(dy, window.ndim, split)


# --- gradients ------------------------------------------------------------------------------------


def _left_over(attrs: AttrMap, kernel: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Elements behind the last window, which a transposed convolution must add again."""
    window = window_of("conv", attrs, tuple(kernel))
    return tuple(
        (size + sum(window.padding[axis]) - window.reach(axis)) % window.stride[axis]
        for axis, size in enumerate(sizes)
    )


def _conv_gradient(kind: str) -> Gradient:
    def gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
        (x, weight), (dy,) = inputs, grads
        kernel = weight.shape[2:]
        more = _left_over(attrs, kernel, x.shape[2:])
        shared = _pass_on(attrs)
        return (
            apply(f"{kind}_transpose", dy, weight, **shared, output_padding=more),
            apply(f"{kind}_weight_grad", x, dy, **shared, kernel=kernel),
        )

    return gradient


def _transpose_gradient(kind: str) -> Gradient:
    def gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
        (x, weight), (dy,) = inputs, grads
        shared = _pass_on(attrs)
        return (
            apply(kind, dy, weight, **shared),
            apply(f"{kind}_weight_grad", dy, x, **shared, kernel=weight.shape[2:]),
        )

    return gradient


def _weight_gradient(kind: str) -> Gradient:
    def gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
        (x, dy), (dw,) = inputs, grads
        more = _left_over(attrs, dw.shape[2:], x.shape[2:])
        shared = _pass_on(attrs)
        return (
            apply(f"{kind}_transpose", dy, dw, **shared, output_padding=more),
            apply(kind, x, dw, **shared),
        )

    return gradient


# --- the table ------------------------------------------------------------------------------------


def _register(ndim: int) -> None:
    kind = f"conv{ndim}d"
    extra, legal = group_split(_group_count, (1, 0), (1,))
    attrs = (*window_attributes(ndim), Int("groups", 1, least=1))
    space, windows, kernel = (
        " ".join(f"{name}{axis}" for axis in range(ndim)) for name in ("s", "t", "k")
    )
    define_op(
        kind,
        infer=_conv_infer(kind, ndim),
        operands=f"x N n c {space}, weight N o i {kernel} -> y N",
        rule=_rule(
            ndim,
            _group_count,
            "n c s, o c k -> n o t",
            "n [c] s, [o] [i] k -> n [o] t",
            "n g s, g [i] k -> n g t",
        ),
        attrs=attrs,
        kernel=in_float32(contiguous(_conv_kernel(kind))),
        gradient=_conv_gradient(kind),
        linear=((0,), (1,)),
        windows=_conv_windows,
        extra=extra,
        legal=legal,
        flops=lambda inputs, outputs, attrs: (
            2 * element_count(outputs[0].shape) * prod(inputs[1].shape[1:])
        ),
        precision="low",
        doc=f"x {_SPATIAL[ndim]} and weight [o, c / groups, *kernel] -> [n, o, *windows]: the "
        "sum over channels and window of x times weight. Along a split spatial axis each device "
        "has a halo.",
    )
    define_op(
        f"{kind}_transpose",
        infer=_transpose_infer(f"{kind}_transpose", ndim),
        operands=f"x N n i {windows}, weight N i o {kernel} -> y N",
        rule=_rule(
            ndim,
            _group_count,
            "n i t, i o k -> n o s",
            "n [i] t, [i] [c] k -> n [o] s",
            "n g t, g [c] k -> n g s",
        ),
        attrs=(*attrs, Ints("output_padding", (0,) * ndim)),
        kernel=in_float32(contiguous(_transpose_kernel(kind))),
        gradient=_transpose_gradient(kind),
        linear=((0,), (1,)),
        windows=_transpose_windows,
        extra=extra,
        legal=legal,
        flops=lambda inputs, outputs, attrs: (
            2 * element_count(inputs[0].shape) * prod(inputs[1].shape[1:])
        ),
        precision="low",
        doc=f"The transposed {kind}: x [n, i, *windows] and weight [i, o / groups, *kernel] -> "
        "[n, o, *spatial], what each element passes back to its window. `output_padding` adds "
        "elements behind the last window.",
    )
    extra, legal = group_split(_weight_group_count, (1, 1), (0,))
    define_op(
        f"{kind}_weight_grad",
        infer=_weight_infer(f"{kind}_weight_grad", ndim),
        operands=f"x N n c {space}, dy N n o {windows} -> dweight N",
        rule=_rule(
            ndim,
            _weight_group_count,
            "n c s, n o t -> o c k",
            "n [c] s, n [o] t -> [o] [i] k",
            "n g s, n g t -> g [i] k",
        ),
        attrs=(*attrs, Ints("kernel")),
        kernel=in_float32(contiguous(_weight_kernel(kind))),
        gradient=_weight_gradient(kind),
        linear=((0,), (1,)),
        windows=_weight_windows,
        extra=extra,
        legal=legal,
        flops=lambda inputs, outputs, attrs: (
            2 * element_count(inputs[1].shape) * prod(outputs[0].shape[1:])
        ),
        precision="low",
        doc=f"The gradient of {kind} by its weight: (x, dy) -> dweight.",
    )


for _ndim in (1, 2, 3):
    _register(_ndim)
