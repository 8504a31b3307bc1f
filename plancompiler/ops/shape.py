"""Ops that move elements without computing: transpose, expand, concat, slice and its gradient.

(`reshape` has a file of its own, for its sharding takes more than a rule line.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import itemgetter, methodcaller
from typing import Any

import numpy as np

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.ir.op import TensorType
from plancompiler.ir.sbp import PARTIAL_SUM, Partial, Reduction
from plancompiler.ops.attributes import Axis, Ints, Shape
from plancompiler.ops.check import (
    broadcast_shapes,
    describe,
    expect_same_dtype,
)
from plancompiler.ops.gradient import of_one, reduce_to
from plancompiler.ops.registry import (
    AT_LEAST_ONE,
    Alias,
    Arrays,
    AttrMap,
    KernelContext,
    Tensors,
    Types,
    View,
    apply,
    define_op,
)
from plancompiler.ops.rule import Signature, operand_line


def keeps_extremes(
    inputs: Types, outputs: Types, attrs: AttrMap, parts: int
) -> tuple[Signature, ...]:
    """P(max) and P(min) of all inputs pass through an op that never falls and is exact, such as one
    that only rearranges elements.
    """
    return tuple(
        Signature((Partial(reduction),) * len(inputs), (Partial(reduction),))
        for reduction in (Reduction.MAX, Reduction.MIN)
    )


MOVES: Mapping[str, Any] = {
    "linear": ((0,),),
    "extra": keeps_extremes,
    "flops": 0,
    "moves": True,
}
"""Facts of an op that only moves the elements of its one input."""


def slice_bounds(attrs: AttrMap, ndim: int) -> dict[str, tuple[int, ...]]:
    """Starts, stops and steps of a slice."""
    return {
        "starts": attrs["starts"],
        "stops": attrs["stops"],
        "steps": attrs.get("steps", (1,) * ndim),
    }


def _sliced(attrs: AttrMap, made: tuple[int, ...]) -> Alias:
    return itemgetter((*map(slice, *slice_bounds(attrs, len(made)).values()), ...))


SLICED = View(
    _sliced,
    lambda source, value, attrs: apply(
        "slice_scatter", source, value, **slice_bounds(attrs, source.ndim)
    ),
    cuts=True,
)
"""The view that a slice is."""


# --- transpose ------------------------------------------------------------------------------------


def _transpose_infer(inputs: Types, attrs: AttrMap) -> Types:
    shape, axes = inputs[0].shape, attrs["axes"]
    if sorted(axes) != list(range(len(shape))):
        raise AttributeValueError(
            "transpose needs every axis once",
            got=f"axes {axes} for shape {shape}",
            expected=f"a permutation of 0 to {len(shape) - 1}",
        )
    return (TensorType(tuple(shape[axis] for axis in axes), inputs[0].dtype),)


def _transpose_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    axes = attrs["axes"]
    permuted = " ".join(f"a{axis}" for axis in axes) or "..."
    return f"{operand_line(len(axes))} -> {permuted}"


def _transpose_gradient(attrs: AttrMap, x: Any, y: Any, dy: Any) -> Any:
    axes = attrs["axes"]
    inverse = sorted(range(len(axes)), key=axes.__getitem__)
    return apply("transpose", dy, axes=tuple(inverse))


define_op(
    "transpose",
    infer=_transpose_infer,
    rule=_transpose_rule,
    inputs=1,
    attrs=(Ints("axes"),),
    kernel=lambda context, inputs, outputs: np.copyto(
        outputs[0], inputs[0].transpose(context.attrs["axes"])
    ),
    gradient=of_one(_transpose_gradient),
    **MOVES,
    strided=View(
        lambda attrs, made: methodcaller("transpose", attrs["axes"]),
        lambda source, value, attrs: value.transpose(
            [attrs["axes"].index(axis) for axis in range(source.ndim)]
        ),
    ),
    doc="Axes permuted.",
)


# --- expand_to ------------------------------------------------------------------------------------


def _expand_infer(inputs: Types, attrs: AttrMap) -> Types:
    shape = attrs["shape"]
    if broadcast_shapes("expand_to", [inputs[0].shape, shape]) != shape:
        raise ShapeError("expand_to cannot shrink a tensor", got=f"{inputs[0].shape} to {shape}")
    return (TensorType(shape, inputs[0].dtype),)


define_op(
    "expand_to",
    infer=_expand_infer,
    rule="... -> ...",
    attrs=(Shape(),),
    kernel=lambda context, inputs, outputs: np.copyto(outputs[0], inputs[0]),
    gradient=of_one(lambda attrs, x, y, dy: reduce_to(dy, x.shape)),
    **MOVES,
    strided=View(lambda attrs, made: partial(np.broadcast_to, shape=made), None),
    doc="The tensor broadcast to a shape, as NumPy does.",
)


# --- concat ---------------------------------------------------------------------------------------


def _concat_infer(inputs: Types, attrs: AttrMap) -> Types:
    dtype = expect_same_dtype("concat", inputs)
    first = inputs[0].shape
    axis = attrs["axis"]
    for tensor in inputs:
        if (
            len(tensor.shape) != len(first)
            or tensor.shape[:axis] != first[:axis]
            or tensor.shape[axis + 1 :] != first[axis + 1 :]
        ):
            raise ShapeError(
                f"the inputs of concat must agree outside axis {axis}",
                got=describe(inputs),
                expected=f"{len(first)} axes, equal but for axis {axis}",
            )
    extent = sum(tensor.shape[axis] for tensor in inputs)
    return (TensorType((*first[:axis], extent, *first[axis + 1 :]), dtype),)


def _concat_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    line = operand_line(len(outputs[0].shape), whole=(attrs["axis"],))
    return f"{', '.join([line] * len(inputs))} -> {line}"


def _concat_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    shape = outputs[0].shape
    axis = attrs["axis"]
    stops = list(accumulate(tensor.shape[axis] for tensor in inputs))
    pieces = []
    for tensor, stop in zip(inputs, stops, strict=True):
        starts_at = [0] * len(shape)
        stops_at = list(shape)
        starts_at[axis], stops_at[axis] = stop - tensor.shape[axis], stop
        pieces.append(apply("slice", grads[0], starts=tuple(starts_at), stops=tuple(stops_at)))
    return pieces


define_op(
    "concat",
    infer=_concat_infer,
    rule=_concat_rule,
    inputs=AT_LEAST_ONE,
    attrs=(Axis(),),
    kernel=lambda context, inputs, outputs: np.concatenate(
        inputs, axis=context.attrs["axis"], out=outputs[0]
    ),
    gradient=_concat_gradient,
    extra=lambda inputs, outputs, attrs, parts: (
        Signature((PARTIAL_SUM,) * len(inputs), (PARTIAL_SUM,)),
    ),
    flops=0,
    takes_bfloat16=True,
    precision="following",
    doc="Tensors one after another along an axis, which stays whole; linear in all together.",
)


# --- slice and slice_grad -------------------------------------------------------------------------


def _bounds(attrs: AttrMap, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    starts, stops = attrs["starts"], attrs["stops"]
    if (
        len(starts) != len(shape)
        or len(stops) != len(shape)
        or any(
            not 0 <= start <= stop <= extent
            for start, stop, extent in zip(starts, stops, shape, strict=True)
        )
    ):
        raise AttributeValueError(
            "slice needs a start and a stop within each axis",
            got=f"starts {starts}, stops {stops} for shape {shape}",
            expected="0 <= start <= stop <= extent, one of each per axis",
        )
    return starts, stops


def _slice_infer(inputs: Types, attrs: AttrMap) -> Types:
    starts, stops = _bounds(attrs, inputs[0].shape)
    shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return (TensorType(shape, inputs[0].dtype),)


def _cut_axes(inputs: Types, outputs: Types) -> tuple[int, ...]:
    """Axes whose extent changes; the others are fully kept."""
    pairs = zip(inputs[0].shape, outputs[0].shape, strict=True)
    return tuple(axis for axis, (before, after) in enumerate(pairs) if before != after)


def _slice_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    line = operand_line(len(inputs[0].shape), whole=_cut_axes(inputs, outputs))
    return f"{line} -> {line}"


def _window(large: Sequence[int], small: Sequence[int], starts: Sequence[int]) -> tuple[slice, ...]:
    """Where the small tensor lies in the large one; a kept axis has its local extent."""
    return tuple(
        slice(None) if extent == length else slice(start, start + length)
        for extent, length, start in zip(large, small, starts, strict=True)
    )


def _slice_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    window = _window(context.input_shapes[0], context.output_shapes[0], context.attrs["starts"])
    np.copyto(outputs[0], inputs[0][window])


def _slice_grad_infer(inputs: Types, attrs: AttrMap) -> Types:
    shape, starts = attrs["shape"], attrs["starts"]
    small = inputs[0].shape
    if not len(shape) == len(starts) == len(small) or any(
        not 0 <= start <= start + length <= extent
        for start, length, extent in zip(starts, small, shape, strict=True)
    ):
        raise AttributeValueError(
            "slice_grad needs a larger shape and starts that leave room",
            got=f"shape {shape}, starts {starts} for a gradient of {small}",
        )
    return (TensorType(shape, inputs[0].dtype),)


def _slice_grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    window = _window(context.output_shapes[0], context.input_shapes[0], context.attrs["starts"])
    outputs[0].fill(0)
    outputs[0][window] = inputs[0]


def slice_like(x: Any, small: Any, starts: tuple[int, ...]) -> Any:
    """The box of x at `starts` that has the shape of another tensor."""
    stops = tuple(start + extent for start, extent in zip(starts, small.shape, strict=True))
    return apply("slice", x, starts=starts, stops=stops)


define_op(
    "slice",
    infer=_slice_infer,
    rule=_slice_rule,
    inputs=1,
    attrs=(
        Ints("starts"),
        Ints("stops"),
    ),
    kernel=_slice_kernel,
    gradient=of_one(
        lambda attrs, x, y, dy: apply("slice_grad", dy, shape=x.shape, starts=attrs["starts"])
    ),
    **MOVES,
    strided=SLICED,
    doc="The box from starts to stops; an axis that is cut stays whole.",
)
define_op(
    "slice_grad",
    infer=_slice_grad_infer,
    rule=_slice_rule,
    inputs=1,
    attrs=(
        Shape(),
        Ints("starts"),
    ),
    kernel=_slice_grad_kernel,
    gradient=of_one(lambda attrs, x, y, dy: slice_like(dy, x, attrs["starts"])),
    linear=((0,),),
    flops=0,
    precision="following",
    doc="A box put at starts into zeros of a shape: the gradient of slice.",
)
