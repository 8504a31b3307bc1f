"""Kernels that choose elements on devices, by labels, indices or conditions.

The host's kernels check labels, indices and divisors, for which the host would have to wait. Here a
label or index that is out of range gives NaN, and zeros where there is no NaN; a whole number
divided by zero gives zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plancompiler.ops.kernel import contiguous, copy_unless_shared, in_float32, of_box, rows_of
from plancompiler.ops.order import stable_order
from plancompiler.ops.registry import Kernel, KernelContext

Array = Any
Arrays = Sequence[Array]


def _unchecked(function: Callable[..., Any]) -> Kernel:
    """A ufunc of two arrays, whatever the second holds."""

    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        function(*inputs, out=outputs[0])

    return kernel


def _logsumexp(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x,), (out,) = inputs, outputs
    axes = context.attrs["axes"]
    greatest = x.max(axis=axes, keepdims=True)
    # As on the host: where the greatest is not finite it is the answer.
    shift = np.where(np.isfinite(greatest), greatest, 0)
    total = np.exp(x - shift).sum(axis=axes, keepdims=True)
    np.copyto(out, (np.log(total) + shift).reshape(out.shape), casting="same_kind")


def _one_hot(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (ids,), (out,) = inputs, outputs
    classes = context.arrays.arange(*context.output_regions[0][-1])
    np.copyto(out, ids.reshape(*ids.shape, 1) == classes, casting="unsafe")


def known_labels(context: KernelContext, labels: Array, classes: int) -> tuple[Array, Array]:
    """Of flat labels, which count, and which are no class although they do."""
    counts = labels != context.attrs["ignore_index"]
    return counts, counts & ((labels < 0) | (labels >= classes))


def _nll_loss(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    logs, labels = inputs
    loss, flat = outputs[0].reshape(-1), labels.reshape(-1)
    low, high = context.input_regions[0][-1]
    counts, wrong = known_labels(context, flat, context.input_shapes[0][-1])
    loss.fill(0)
    if high > low:
        inside = counts & (flat >= low) & (flat < high)
        place = np.where(inside, flat - low, 0)
        picked = np.take_along_axis(rows_of(logs), place[:, None], axis=1)[:, 0]
        np.copyto(loss, -picked, where=inside)
    np.copyto(loss, math.nan, where=wrong)


def _nll_loss_grad(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    labels, dloss = inputs
    flat, out = labels.reshape(-1), rows_of(outputs[0])
    counts, wrong = known_labels(context, flat, context.output_shapes[0][-1])
    classes = context.arrays.arange(*context.output_regions[0][-1])
    chosen = (flat[:, None] == classes) & counts[:, None]
    out.fill(0)
    np.copyto(out, -dloss.reshape(-1)[:, None], where=chosen)
    np.copyto(out, math.nan, where=wrong[:, None])


def _index_select(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x, indices), (out,) = inputs, outputs
    axis = context.attrs["axis"]
    low, high = context.input_regions[0][axis]
    across = (-1, *(1,) * (x.ndim - axis - 1))
    out.fill(0)
    if high > low:
        inside = (indices >= low) & (indices < high)
        selected = np.take(x, np.where(inside, indices - low, 0), axis=axis)
        np.copyto(out, selected, where=inside.reshape(across))
    if out.dtype.kind == "f":
        wrong = (indices < 0) | (indices >= context.input_shapes[0][axis])
        np.copyto(out, math.nan, where=wrong.reshape(across))


def _take_along_axis(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x, indices), (out,) = inputs, outputs
    axis = context.attrs["axis"]
    low, high = context.input_regions[0][axis]
    out.fill(0)
    if high > low:
        inside = (indices >= low) & (indices < high)
        taken = np.take_along_axis(x, np.where(inside, indices - low, 0), axis=axis)
        np.copyto(out, taken, where=inside)
    if out.dtype.kind == "f":
        wrong = (indices < 0) | (indices >= context.input_shapes[0][axis])
        np.copyto(out, math.nan, where=wrong)


def _ravel_index(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    # Of an index out of range the place is -1, which is out of range too.
    (out,) = outputs
    out.fill(0)
    wrong = out < 0
    for places, extent in zip(inputs, context.attrs["extents"], strict=True):
        numbers = places.astype(np.int64)
        wrong = wrong | (numbers < -extent) | (numbers >= extent)
        np.multiply(out, extent, out=out)
        np.add(out, np.where(numbers < 0, numbers + extent, numbers), out=out)
    np.copyto(out, -1, where=wrong)


def _sorted(order: Callable[[Array, Any], Array]) -> Kernel:
    """The elements in an order along an axis, and the places that they had."""

    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        axis = context.attrs["axis"]
        x, values, places = (np.moveaxis(array, axis, -1) for array in (*inputs, *outputs))
        first = order(x, context.attrs)[..., : values.shape[-1]]
        np.copyto(places, first)
        np.copyto(values, np.take_along_axis(x, first, axis=-1))

    return kernel


def _triangle(outside: Callable[..., Any]) -> Kernel:
    """Zeros where `outside(column - row, diagonal)`."""

    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        box = context.output_regions[0][-2:]

        def masked() -> Array:
            rows, columns = (context.arrays.arange(start, stop) for start, stop in box)
            return outside(columns - rows[:, None], context.attrs["diagonal"])

        copy_unless_shared(inputs[0], outputs[0])
        np.copyto(outputs[0], 0, where=of_box(context, "mask", box, masked))

    return kernel


CHOICE_KERNELS: dict[str, Kernel] = {
    "floor_divide": _unchecked(np.floor_divide),
    "fmod": _unchecked(np.fmod),
    "index_select": contiguous(_index_select),
    "logsumexp": in_float32(_logsumexp),
    "nll_loss": contiguous(_nll_loss),
    "nll_loss_grad": contiguous(_nll_loss_grad),
    "one_hot": _one_hot,
    "ravel_index": _ravel_index,
    "remainder": _unchecked(np.remainder),
    "sort": _sorted(lambda x, attrs: stable_order(x, attrs["descending"])),
    "take_along_axis": _take_along_axis,
    "topk": _sorted(lambda x, attrs: stable_order(x, attrs["largest"])),
    "tril": _triangle(np.greater),
    "triu": _triangle(np.less),
}
"""By op kind, in place of the host's kernels."""
