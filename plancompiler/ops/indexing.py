"""Selecting and placing elements by index tensors: take, put, index_select, ravel_index, one_hot,
bincount.

With the indexed axis split, each device takes what it holds and leaves zeros elsewhere, so that the
result is partial; in the other direction each device makes its own part. Indices count from 0; one
outside the axis fails the run.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from plancompiler.errors import ExecutionError, ShapeError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ir.sbp import BROADCAST, PARTIAL_SUM, Partial, Reduction, Split
from plancompiler.ops.attributes import Axis, Dtype, Int, Ints, Text
from plancompiler.ops.check import (
    INTEGERS,
    NUMBERS,
    broadcast_shapes,
    expect_dtype,
    expect_shape,
)
from plancompiler.ops.embedding import add_rows
from plancompiler.ops.gradient import by_op, masked, over_positive
from plancompiler.ops.kernel import contiguous, copy_unless_shared, in_float32
from plancompiler.ops.registry import (
    AT_LEAST_ONE,
    Array,
    Arrays,
    AttrMap,
    KernelContext,
    Tensors,
    Types,
    apply,
    apply_source,
    define_op,
)
from plancompiler.ops.rule import Signature


def local_indices(indices: Array, extent: int, low: int, high: int) -> tuple[Array, Array | None]:
    """Indices of the part [low, high) of an axis, and which of them are in it (None: all)."""
    if indices.size and not 0 <= indices.min() <= indices.max() < extent:
        wrong = indices[(indices < 0) | (indices >= extent)]
        raise ExecutionError(
            "an index is outside its axis",
            got=f"index {int(wrong.flat[0])}",
            expected=f"0 to {extent - 1}",
        )
    numbers = indices.astype(np.int64, copy=False)
    if (low, high) == (0, extent):
        return numbers, None
    return numbers - low, (numbers >= low) & (numbers < high)


def _line(ndim: int, axis: int, name: str) -> str:
    """An operand whose axis `axis` carries factor `name`, a factor of its own on each other."""
    return " ".join(name if each == axis else f"a{each}" for each in range(ndim))


def _keeps_first(
    inputs: Types, outputs: Types, attrs: AttrMap, parts: int
) -> tuple[Signature, ...]:
    """P(max) and P(min) of the first input pass through."""
    rest = (BROADCAST,) * (len(inputs) - 1)
    return tuple(
        Signature((Partial(reduction), *rest), (Partial(reduction),))
        for reduction in (Reduction.MAX, Reduction.MIN)
    )


def _expect_outside(kind: str, axis: int, x: tuple[int, ...], other: TensorType) -> None:
    """Equal extents on all axes but one."""
    if len(other.shape) != len(x) or any(
        before != after
        for each, (before, after) in enumerate(zip(x, other.shape, strict=True))
        if each != axis
    ):
        raise ShapeError(
            f"the inputs of {kind} must agree outside axis {axis}",
            got=f"{x} and {other.shape}",
            expected=f"{len(x)} axes, equal but for axis {axis}",
        )


# --- take_along_axis and its gradient -------------------------------------------------------------


def _take_infer(inputs: Types, attrs: AttrMap) -> Types:
    x, indices = inputs
    _expect_outside("take_along_axis", attrs["axis"], x.shape, indices)
    return (TensorType(indices.shape, x.dtype),)


def _take_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    ndim = len(inputs[0].shape)
    axis = attrs["axis"]
    line = _line(ndim, axis, "i")
    return f"{_line(ndim, axis, 'v')}, {line} -> {line}"


def _take_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x, indices), (out,) = inputs, outputs
    axis = context.attrs["axis"]
    low, high = context.input_regions[0][axis]
    places, inside = local_indices(indices, context.input_shapes[0][axis], low, high)
    if inside is None:
        np.copyto(out, np.take_along_axis(x, places, axis))
    elif low == high:
        out.fill(0)
    else:
        taken = np.take_along_axis(x, np.where(inside, places, 0), axis)
        np.copyto(out, np.where(inside, taken, np.zeros((), out.dtype)))


def _take_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    x, indices = inputs
    axis = attrs["axis"]
    grad = apply("take_along_axis_grad", indices, grads[0], axis=axis, extent=x.shape[axis])
    return grad, None


define_op(
    "take_along_axis",
    infer=_take_infer,
    operands="x X, indices i -> y X",
    rule=_take_rule,
    attrs=(Axis(),),
    kernel=_take_kernel,
    gradient=_take_gradient,
    linear=((0,),),
    extra=_keeps_first,
    flops=0,
    portable=False,
    doc="(x, indices) -> for each index, the element of x there along `axis`; the other axes "
    "agree.",
)


def _take_grad_infer(inputs: Types, attrs: AttrMap) -> Types:
    dy, axis, extent = inputs[1], attrs["axis"], attrs["extent"]
    return (TensorType((*dy.shape[:axis], extent, *dy.shape[axis + 1 :]), dy.dtype),)


def _take_grad_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    ndim = len(inputs[0].shape)
    axis = attrs["axis"]
    line = _line(ndim, axis, "i")
    return f"{line}, {line} -> {_line(ndim, axis, 'v')}"


def _flat_places(places: Array, axis: int, shape: tuple[int, ...]) -> Array:
    """Row-major positions in an array of `shape` of indices along `axis`, in an array like them."""
    inner = prod(shape[axis + 1 :])
    outer = np.arange(prod(shape[:axis]), dtype=np.int64, like=places) * (shape[axis] * inner)
    flat = places.reshape(len(outer), places.shape[axis], inner) * inner
    flat += outer[:, None, None]
    flat += np.arange(inner, dtype=np.int64, like=places)
    return flat.reshape(-1)


def _add_at(out: Array, flat: Array, values: Array) -> None:
    """Add values at flat positions of a contiguous array, in order."""
    if out.dtype == np.float64:
        # Counting with weights is several times faster than a general scatter.
        out += np.bincount(flat, values, out.size).reshape(out.shape)
    else:
        np.add.at(out.reshape(-1), flat, values)


def _take_grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (indices, dy), (out,) = inputs, outputs
    axis = context.attrs["axis"]
    low, high = context.output_regions[0][axis]
    places, inside = local_indices(indices, context.output_shapes[0][axis], low, high)
    out.fill(0)
    if not out.size:
        return
    flat, values = _flat_places(places, axis, out.shape), dy.reshape(-1)
    if inside is not None:
        flat, values = flat[inside.reshape(-1)], values[inside.reshape(-1)]
    _add_at(out, flat, values)


define_op(
    "take_along_axis_grad",
    infer=_take_grad_infer,
    operands="indices i ..., dy N ... -> dx N",
    rule=_take_grad_rule,
    attrs=(
        Axis(),
        Int("extent", least=0),
    ),
    kernel=in_float32(contiguous(_take_grad_kernel)),
    gradient=by_op("take_along_axis_grad", "take_along_axis"),
    linear=((1,),),
    portable=False,
    doc="(indices, dy) -> zeros with `extent` elements along `axis` and dy added at the "
    "indices: the gradient of take_along_axis.",
)


# --- put_along_axis -------------------------------------------------------------------------------

_COMBINED = {"mul": np.multiply, "max": np.maximum, "min": np.minimum}
PUTS = ("set", "same")
"""Modes that put updates in the place of what was there. Of equal indices the last wins; with
"same" these are known to have the same update, so that the gradient goes to all of them."""
MODES = (*PUTS, "add", *_COMBINED)


_PARTIAL_BY = {
    **dict.fromkeys(PUTS, PARTIAL_SUM),
    "add": PARTIAL_SUM,
    "max": Partial(Reduction.MAX),
    "min": Partial(Reduction.MIN),
}
"""As what x may be partial, by the mode."""


def _put_infer(inputs: Types, attrs: AttrMap) -> Types:
    kind = "put_along_axis"
    x, indices, _ = inputs
    if attrs["mode"] not in PUTS:
        expect_dtype(kind, x, NUMBERS)
    _expect_outside(kind, attrs["axis"], x.shape, indices)
    return (x,)


def _put_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    ndim = len(inputs[0].shape)
    axis = attrs["axis"]
    x, line = _line(ndim, axis, "v"), _line(ndim, axis, "[i]")
    return f"{x}, {line}, {line} -> {x}"


def _put_extra(inputs: Types, outputs: Types, attrs: AttrMap, parts: int) -> tuple[Signature, ...]:
    part = _PARTIAL_BY.get(attrs["mode"])
    if part is None:
        return ()
    both = Signature((part, BROADCAST, part), (part,))
    if attrs["mode"] in PUTS:
        return (both,)
    # Each device puts its own updates into its own part of x.
    split = Split(attrs["axis"])
    return (both, Signature((part, split, split), (part,)))


def _put_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x, indices, updates), (out,) = inputs, outputs
    axis = context.attrs["axis"]
    low, high = context.output_regions[0][axis]
    places, inside = local_indices(indices, context.output_shapes[0][axis], low, high)
    copy_unless_shared(x, out)
    if not out.size:
        return
    flat, values = _flat_places(places, axis, out.shape), updates.reshape(-1)
    if inside is not None:
        flat, values = flat[inside.reshape(-1)], values[inside.reshape(-1)]
    mode = context.attrs["mode"]
    if mode == "add":
        _add_at(out, flat, values)
    elif mode in _COMBINED:
        _COMBINED[mode].at(out.reshape(-1), flat, values)
    else:
        # One flat index array is walked in order, so that the last of equal indices wins.
        out.reshape(-1)[flat] = values


def _put_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    x, indices, updates = inputs
    axis, dz = attrs["axis"], grads[0]
    taken = apply("take_along_axis", dz, indices, axis=axis)
    if attrs["mode"] == "add":
        return dz, None, taken
    if attrs["mode"] == "mul":
        return _product_gradient(x, indices, updates, dz, axis)
    if attrs["mode"] not in PUTS:
        return _extreme_gradient(x, indices, updates, outputs[0], dz, axis)
    zeros = apply_source(x, "fill", shape=updates.shape, dtype=str(x.dtype), value=0.0)
    dx = apply("put_along_axis", dz, indices, zeros, axis=axis, mode="same")
    if attrs["mode"] == "same":
        return dx, None, taken
    # Of equal indices only the last left its update: find which by putting their numbers instead.
    count = indices.shape[axis]
    numbers = apply_source(x, "arange", start=0, step=1, count=count, dtype="int64")
    ndim = len(indices.shape)
    numbers = numbers.reshape(tuple(count if each == axis else 1 for each in range(ndim)))
    numbers = apply("expand_to", numbers, shape=indices.shape)
    empty = apply_source(x, "fill", shape=x.shape, dtype="int64", value=0)
    winners = apply("put_along_axis", empty, indices, numbers, axis=axis, mode="set")
    last = apply("take_along_axis", winners, indices, axis=axis).equal(numbers)
    return dx, None, masked(taken, last)


def _put(x: Any, indices: Any, updates: Any, axis: int, mode: str) -> Any:
    return apply("put_along_axis", x, indices, updates, axis=axis, mode=mode)


def _product_gradient(x: Any, indices: Any, updates: Any, dz: Any, axis: int) -> Tensors:
    """Of a product each factor gets that of the others: that of all which are not zero without its
    own, if no other is zero.
    """
    zero, one = (apply_source(x, "fill", shape=(), dtype=str(x.dtype), value=v) for v in (0.0, 1.0))
    ones = apply("expand_to", one, shape=x.shape)
    none = apply("expand_to", zero, shape=x.shape)
    naught = updates.equal(0)
    safe = apply("where", naught, one, updates)
    others = _put(x, indices, safe, axis, "mul")
    zeros = _put(none, indices, naught.cast(x.dtype), axis, "add")
    taken = apply("take_along_axis", dz * others, indices, axis=axis)
    left = apply("take_along_axis", zeros, indices, axis=axis) - naught.cast(x.dtype)
    return dz * _put(ones, indices, updates, axis, "mul"), None, masked(taken / safe, left.equal(0))


def _extreme_gradient(x: Any, indices: Any, updates: Any, z: Any, dz: Any, axis: int) -> Tensors:
    """Of a greatest or least element equal ones share the gradient."""
    own = x.equal(z)
    others = updates.equal(apply("take_along_axis", z, indices, axis=axis))
    count = _put(own.cast(x.dtype), indices, others.cast(x.dtype), axis, "add")
    share = over_positive(dz, count)
    taken = apply("take_along_axis", share, indices, axis=axis)
    return masked(share, own), None, masked(taken, others)


define_op(
    "put_along_axis",
    infer=_put_infer,
    operands="x X, indices i ..., updates X ... -> y X",
    rule=_put_rule,
    attrs=(
        Axis(),
        Text("mode", among=MODES),
    ),
    kernel=in_float32(contiguous(_put_kernel)),
    gradient=_put_gradient,
    extra=_put_extra,
    flops=0,
    inplace=((0, 0),),
    portable=False,
    doc="(x, indices, updates) -> x with updates at the indices along `axis`, put there (of "
    "equal indices the last wins; with `same` all have the gradient), added, multiplied, or the "
    "greatest or least of all, by `mode`.",
)


# --- index_select and its gradient ----------------------------------------------------------------


def _select_infer(inputs: Types, attrs: AttrMap) -> Types:
    x, indices = inputs
    axis = attrs["axis"]
    return (TensorType((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype),)


def _select_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    ndim = len(inputs[0].shape)
    axis = attrs["axis"]
    return f"{_line(ndim, axis, 'v')}, i -> {_line(ndim, axis, 'i')}"


def _select_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x, indices), (out,) = inputs, outputs
    axis = context.attrs["axis"]
    low, high = context.input_regions[0][axis]
    places, inside = local_indices(indices, context.input_shapes[0][axis], low, high)
    if inside is None:
        # The indices are checked, so `clip` only spares the buffer that `raise` needs.
        np.take(x, places, axis=axis, out=out, mode="clip")
        return
    out.fill(0)
    np.moveaxis(out, axis, 0)[inside] = np.moveaxis(x, axis, 0)[places[inside]]


def _select_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    x, indices = inputs
    axis = attrs["axis"]
    return apply("index_select_grad", indices, grads[0], axis=axis, extent=x.shape[axis]), None


define_op(
    "index_select",
    infer=_select_infer,
    operands="x X, indices i i -> y X",
    rule=_select_rule,
    attrs=(Axis(),),
    kernel=contiguous(_select_kernel),
    gradient=_select_gradient,
    linear=((0,),),
    extra=_keeps_first,
    flops=0,
    doc="(x, indices [i]) -> x with the elements of `axis` at the indices, in their order.",
)


def _select_grad_infer(inputs: Types, attrs: AttrMap) -> Types:
    kind = "index_select_grad"
    indices, dy = inputs
    axis = attrs["axis"]
    expect_shape(kind, indices, dy.shape[axis : axis + 1], "indices")
    extent = attrs["extent"]
    return (TensorType((*dy.shape[:axis], extent, *dy.shape[axis + 1 :]), dy.dtype),)


def _select_grad_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    ndim = len(inputs[1].shape)
    axis = attrs["axis"]
    return f"i, {_line(ndim, axis, 'i')} -> {_line(ndim, axis, 'v')}"


def _select_grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (indices, dy), (out,) = inputs, outputs
    axis = context.attrs["axis"]
    low, high = context.output_regions[0][axis]
    places, inside = local_indices(indices, context.output_shapes[0][axis], low, high)
    out.fill(0)
    # Rows of two axes, so that a row is never a single number, of which no view is made.
    rows, values = (np.moveaxis(array, axis, 0)[:, None] for array in (out, dy))
    add_rows(rows, places, values, inside)


define_op(
    "index_select_grad",
    infer=_select_grad_infer,
    operands="indices i, dy N -> dx N",
    rule=_select_grad_rule,
    attrs=(
        Axis(of=1),
        Int("extent", least=0),
    ),
    kernel=in_float32(_select_grad_kernel),
    gradient=by_op("index_select_grad", "index_select"),
    linear=((1,),),
    flops=lambda inputs, outputs, attrs: prod(inputs[1].shape),
    portable=False,
    doc="(indices [i], dy) -> zeros with `extent` elements along `axis` and those of dy added "
    "at the indices: the gradient of index_select.",
)


# --- ravel_index ----------------------------------------------------------------------------------


def _ravel_infer(inputs: Types, attrs: AttrMap) -> Types:
    extents = attrs["extents"]
    if len(extents) != len(inputs):
        raise ShapeError(
            "ravel_index needs an extent for each of its inputs",
            got=f"{len(inputs)} inputs and extents {extents}",
        )
    for tensor in inputs:
        expect_dtype("ravel_index", tensor, INTEGERS)
    shape = broadcast_shapes("ravel_index", [tensor.shape for tensor in inputs])
    return (TensorType(shape, DType.INT64),)


def _ravel_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (out,) = outputs
    out.fill(0)
    for places, extent in zip(inputs, context.attrs["extents"], strict=True):
        if places.size and not -extent <= int(places.min()) <= int(places.max()) < extent:
            wrong = places[(places < -extent) | (places >= extent)]
            raise ExecutionError(
                "an index is outside its axis",
                got=f"index {int(wrong.flat[0])}",
                expected=f"{-extent} to {extent - 1}",
            )
        numbers = places.astype(np.int64)
        np.multiply(out, extent, out=out)
        np.add(out, numbers, out=out)
        np.add(out, (numbers < 0) * np.int64(extent), out=out)


define_op(
    "ravel_index",
    infer=_ravel_infer,
    rule=lambda inputs, outputs, attrs: f"{', '.join(['...'] * len(inputs))} -> ...",
    inputs=AT_LEAST_ONE,
    attrs=(Ints("extents"),),
    kernel=_ravel_kernel,
    elementwise=True,
    portable=False,
    doc="The places in row-major order of elements of a tensor with these extents, from their "
    "indices along each axis; negative ones count from the end, and one outside fails the run.",
)


# --- one_hot and bincount -------------------------------------------------------------------------


def _one_hot_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (ids,), (out,) = inputs, outputs
    low, high = context.output_regions[0][-1]
    places, inside = local_indices(ids.reshape(-1), context.output_shapes[0][-1], low, high)
    out.fill(0)
    if not out.size:
        return
    rows = np.arange(places.size, like=places) if inside is None else np.flatnonzero(inside)
    out.reshape(-1, high - low)[rows, places[rows]] = 1


define_op(
    "one_hot",
    infer="ids i -> y dtype",
    rule="... -> ... classes",
    attrs=(
        Int("classes", least=0),
        Dtype("dtype"),
    ),
    kernel=contiguous(_one_hot_kernel),
    flops=0,
    doc="ids [...] -> [..., classes]: 1 at each id, zeros elsewhere.",
)


def _bincount_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    low, high = context.output_regions[0][0]
    flat = inputs[0].reshape(-1)
    places, inside = local_indices(flat, context.output_shapes[0][0], low, high)
    counted = places if inside is None else places[inside]
    np.copyto(outputs[0], np.bincount(counted, minlength=high - low))


define_op(
    "bincount",
    infer="ids i -> y int64",
    rule="... -> classes",
    attrs=(Int("classes", least=0),),
    kernel=_bincount_kernel,
    flops=lambda inputs, outputs, attrs: prod(inputs[0].shape),
    portable=False,
    doc="How often each number from 0 to classes - 1 occurs, as int64.",
)
