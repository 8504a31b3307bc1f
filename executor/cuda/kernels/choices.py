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
from plancompiler.ops.margin import NEAR_ONE, margins
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


def _own_labels(
    context: KernelContext, flat: Array, scores: Array
) -> tuple[Array, Array, Array, Array]:
    """Of flat labels: which are classes held here, the places of these, where they are in `scores`
    [rows, classes held here], and which labels are no class although they count.
    """
    low, high = context.input_regions[0][-1]
    counts, wrong = known_labels(context, flat, context.input_shapes[0][-1])
    inside = counts & (flat >= low) & (flat < high)
    place = np.where(inside, flat - low, 0)
    columns = context.arrays.arange(scores.shape[1])
    return inside, place, (place[:, None] == columns) & inside[:, None], wrong


def _class_sums(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    logits, labels, shift = inputs
    total, target = (array.reshape(-1) for array in outputs)
    flat, offset = logits.reshape(labels.size, logits.shape[-1]), shift.reshape(-1)
    inside, place, _, wrong = _own_labels(context, labels.reshape(-1), flat)
    target.fill(0)
    if logits.shape[-1]:
        picked = np.take_along_axis(flat, place[:, None], axis=1)[:, 0]
        np.copyto(target, picked - offset, where=inside)
    np.copyto(target, math.nan, where=wrong)
    np.copyto(total, np.exp(flat - offset[:, None]).sum(axis=1))


def _class_sums_grad(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    logits, labels, *numbers = inputs
    flat, out = (each.reshape(labels.size, logits.shape[-1]) for each in (logits, outputs[0]))
    offset, dtotal, dtarget = (each.reshape(-1)[:, None] for each in numbers)
    _, _, chosen, wrong = _own_labels(context, labels.reshape(-1), flat)
    np.copyto(out, np.exp(flat - offset) * dtotal + np.where(chosen, dtarget, 0))
    np.copyto(out, math.nan, where=wrong[:, None])


def _margin_logits(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    cosines, labels = inputs
    flat, out = (each.reshape(labels.size, cosines.shape[-1]) for each in (cosines, outputs[0]))
    first, second, third, scale = margins(context.attrs)
    _, _, chosen, wrong = _own_labels(context, labels.reshape(-1), flat)
    x = flat
    if first != 1.0 or second != 0.0:
        x = np.cos(np.arccos(np.clip(x, -NEAR_ONE, NEAR_ONE)) * first + second)
    np.copyto(out, np.where(chosen, x - third, flat) * scale)
    np.copyto(out, math.nan, where=wrong[:, None])


def _margin_logits_grad(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    cosines, labels, dy = inputs
    flat, dy, out = (
        each.reshape(labels.size, cosines.shape[-1]) for each in (cosines, dy, outputs[0])
    )
    first, second, _, scale = margins(context.attrs)
    _, _, chosen, wrong = _own_labels(context, labels.reshape(-1), flat)
    np.multiply(dy, scale, out=out)
    if first != 1.0 or second != 0.0:
        # As on the host: d cos(a acos x + b) / dx; the clamped is constant.
        inside = np.absolute(flat) < NEAR_ONE
        angle = np.arccos(np.where(inside, flat, 0))
        slope = inside * first * np.sin(angle * first + second) / np.sin(angle)
        np.multiply(out, np.where(chosen, slope, 1), out=out)
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
    "class_sums": in_float32(contiguous(_class_sums)),
    "class_sums_grad": in_float32(contiguous(_class_sums_grad)),
    "floor_divide": _unchecked(np.floor_divide),
    "fmod": _unchecked(np.fmod),
    "index_select": contiguous(_index_select),
    "logsumexp": in_float32(_logsumexp),
    "margin_logits": in_float32(contiguous(_margin_logits)),
    "margin_logits_grad": in_float32(contiguous(_margin_logits_grad)),
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
