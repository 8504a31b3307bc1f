"""Kernels written for devices: where the host kernel asks what a device's arrays do not do, makes
the host wait, or works around the host's caches.

They are written with the functions that both NumPy's and a device's arrays know, so that the tests
run them on the host. What they make, they make with `context.arrays`. A label or id that is out of
range makes its row NaN: to raise an error, the host would have to wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from plancompiler.executor.cuda.kernels.at_indices import AT_INDICES_KERNELS
from plancompiler.executor.cuda.kernels.choices import CHOICE_KERNELS, known_labels
from plancompiler.executor.cuda.kernels.products import product
from plancompiler.executor.cuda.kernels.transformer import TRANSFORMER_KERNELS
from plancompiler.executor.cuda.kernels.updates import UPDATE_KERNELS
from plancompiler.ops import random
from plancompiler.ops.attention import mask_grad_kernel
from plancompiler.ops.attention_blocks import (
    attend_in_blocks,
    is_in_blocks,
    pull_back_in_blocks,
)
from plancompiler.ops.attention_tiles import Window, window_of
from plancompiler.ops.dropout import kept_in_rows, stream_of
from plancompiler.ops.kernel import (
    contiguous,
    copy_unless_shared,
    in_float32,
    of_box,
    rows_of,
    scratch,
)
from plancompiler.ops.matmul import matmul_operands
from plancompiler.ops.registry import Kernel, KernelContext, op_def
from plancompiler.ops.zigzag import positions_of

Array = Any
Arrays = Sequence[Array]

SCORE_BYTES = 256 << 20
"""Scores of attention that are alive at once: memory stays linear in the sequence's length."""


# --- products -------------------------------------------------------------------------------------


def _matmul(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    # In the inputs' own dtype: tensor cores multiply halves and add in float32.
    a, b, out = matmul_operands(context, inputs, outputs)
    product(context, a, b, out)


def _contract_leading(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    a, b = inputs
    rows = math.prod(a.shape[:-1])
    np.matmul(a.reshape(rows, a.shape[-1]).T, b.reshape(rows, b.shape[-1]), out=outputs[0])


# --- softmax --------------------------------------------------------------------------------------


def _softmax(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x,), (y,) = inputs, outputs
    axis = context.attrs["axis"]
    np.subtract(x, x.max(axis=axis, keepdims=True), out=y)
    np.exp(y, out=y)
    np.divide(y, y.sum(axis=axis, keepdims=True), out=y)


def _softmax_grad(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (y, dy), (dx,) = inputs, outputs
    axis = context.attrs["axis"]
    work = scratch(context, "work", y.shape, y.dtype)
    np.multiply(y, dy, out=work)
    np.subtract(dy, work.sum(axis=axis, keepdims=True), out=dx)
    np.multiply(dx, y, out=dx)


def _log_softmax(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x,), (y,) = inputs, outputs
    axis = context.attrs["axis"]
    work = scratch(context, "work", x.shape, x.dtype)
    np.subtract(x, x.max(axis=axis, keepdims=True), out=y)
    np.exp(y, out=work)
    np.subtract(y, np.log(work.sum(axis=axis, keepdims=True)), out=y)


def _log_softmax_grad(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (y, dy), (dx,) = inputs, outputs
    axis = context.attrs["axis"]
    work = scratch(context, "work", y.shape, y.dtype)
    np.exp(y, out=work)
    np.multiply(work, dy.sum(axis=axis, keepdims=True), out=work)
    np.subtract(dy, work, out=dx)


def _labels(context: KernelContext, labels: Array, classes: int) -> tuple[Array, Array, Array]:
    """Flat labels that can be used as indices, which of them count, and which are no class."""
    flat = labels.reshape(-1)
    counts, wrong = known_labels(context, flat, classes)
    return np.where(counts & ~wrong, flat, 0), counts, wrong


def _cross_entropy(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    logits, labels = inputs
    x, loss = rows_of(logits), outputs[0].reshape(-1)
    label, counts, wrong = _labels(context, labels, x.shape[1])
    work = scratch(context, "work", x.shape, x.dtype)
    np.subtract(x, x.max(axis=1, keepdims=True), out=work)
    picked = np.take_along_axis(work, label[:, None], axis=1)[:, 0]
    np.exp(work, out=work)
    np.subtract(np.log(work.sum(axis=1)), picked, out=loss)
    np.multiply(loss, counts, out=loss)
    np.copyto(loss, math.nan, where=wrong)


def _cross_entropy_grad(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (logits, labels, dloss), (out,) = inputs, outputs
    x, dx = rows_of(logits), rows_of(out)
    label, counts, wrong = _labels(context, labels, x.shape[1])
    factor = dloss.reshape(-1) * counts
    np.copyto(factor, math.nan, where=wrong)
    np.subtract(x, x.max(axis=1, keepdims=True), out=dx)
    np.exp(dx, out=dx)
    np.divide(dx, dx.sum(axis=1, keepdims=True), out=dx)
    classes = context.arrays.arange(x.shape[1])
    np.subtract(dx, classes == label[:, None], out=dx)
    np.multiply(dx, factor[:, None], out=dx)


# --- rows of tables -------------------------------------------------------------------------------


def _embedding(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    table, ids = inputs
    low, high = context.input_regions[0][0]
    vocabulary = context.input_shapes[0][0]
    flat = ids.reshape(-1)
    out = outputs[0].reshape(flat.size, table.shape[1])
    inside = (flat >= low) & (flat < high)
    if high > low:
        np.take(table, np.where(inside, flat - low, 0), axis=0, out=out)
        np.multiply(out, inside[:, None], out=out)
    else:
        out.fill(0)
    np.copyto(out, math.nan, where=((flat < 0) | (flat >= vocabulary))[:, None])


def _embedding_grad(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (ids, dy), (out,) = inputs, outputs
    low, high = context.output_regions[0][0]
    flat = ids.reshape(-1)
    out.fill(0)
    if high == low:
        return
    inside = (flat >= low) & (flat < high)
    # Atomic additions: equal ids come in any order, so that the last bits may differ between runs.
    values = dy.reshape(flat.size, out.shape[1]) * inside[:, None]
    np.add.at(out, np.where(inside, flat - low, 0), values)


# --- random numbers -------------------------------------------------------------------------------


def _dropout(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    """The mask of the host's kernel, bit for bit: two elements of the last axis share a word."""
    (x,), (out,) = inputs, outputs
    rate = context.attrs["rate"]
    if rate == 0.0 or x.size == 0:
        copy_unless_shared(x, out)
        return
    shape, region = context.input_shapes[0] or (1,), context.input_regions[0] or ((0, 1),)
    low, high = region[-1]
    first, last = low // 2, -(-high // 2)

    def places() -> tuple[Array, Array]:
        per_row = -(-shape[-1] // 2)
        rows = random.offsets((*shape[:-1], per_row), (*region[:-1], (0, 1))).reshape(-1, 1)
        columns = np.arange(first, last, dtype=np.uint64) * np.uint64(random.GOLDEN)
        return context.arrays.asarray(rows), context.arrays.asarray(columns)

    rows, columns = of_box(context, "mask", region, places)
    start = random.stream_of(context)
    threshold = min(round(rate * 2**32), 2**32 - 1)
    words = rows + (columns + np.uint64(start))
    random.mix_words(words, np.empty_like(words))
    skip = low - 2 * first
    keep = (words.view(np.uint32) >= np.uint32(threshold))[:, skip : skip + high - low]
    source, target = x.reshape(keep.shape), out.reshape(keep.shape)
    np.multiply(source, 1.0 / (1.0 - rate), out=target)
    np.multiply(target, keep, out=target)


# --- attention ------------------------------------------------------------------------------------


def _folded(query: Array, key: Array) -> tuple[int, int]:
    """Pairs of batch and heads of keys, and heads of queries for each."""
    return key.shape[0] * key.shape[1], query.shape[1] // key.shape[1]


def _scores(
    context: KernelContext,
    query: Array,
    key: Array,
    shift: int | None,
    rows: slice,
    heads: int,
    mask: Arrays,
) -> Array:
    """Scores [pairs, heads * rows, keys] of some queries, in float32 where inputs are halves.

    `mask` is empty, or holds what is added to them.
    """
    scale = context.attrs["scale"]
    pairs, keys = key.shape[0], key.shape[1]
    count = rows.stop - rows.start
    scaled = (query[:, :, rows] * scale).astype(query.dtype)
    scaled = scaled.reshape(pairs, heads * count, query.shape[3])
    scores = product(context, scaled, key.swapaxes(-1, -2))
    scores = scores.astype(_wide(scores.dtype), copy=False)
    if shift is not None:
        last = context.arrays.arange(rows.start, rows.stop) + shift
        hidden = context.arrays.arange(keys) > last[:, None]
        np.copyto(scores.reshape(pairs, heads, count, keys), -math.inf, where=hidden)
    for each in mask:
        part = each[:, :, rows] if each.shape[2] > 1 else each
        batch = context.input_regions[0][0]
        target = scores.reshape(batch[1] - batch[0], -1, count, keys)
        np.add(target, part, out=target)
    return scores


def _kept(context: KernelContext, window: Window, rows: slice, heads: int, keys: int) -> Array:
    """What the weights [pairs, heads * rows, keys] of some queries are multiplied with: 0, or what
    makes up for those that are dropped; 1 without dropout.
    """
    rate = context.attrs["dropout"]
    if not rate:
        return 1.0
    (batch, batches), (head, stop) = context.input_regions[0][:2]
    row, column, width, _ = window
    _, whole, length, _ = context.input_shapes[0]
    count = np.arange(batch, batches)[:, None] * whole + np.arange(head, stop)
    number = count[..., None] * length + np.arange(row + rows.start, row + rows.stop)
    place = column, column + keys
    kept = kept_in_rows(context, number.reshape(-1), width, place, *stream_of(context, rate))
    return kept.reshape(-1, heads * (rows.stop - rows.start), keys) / (1 - rate)


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def _tiles(pairs: int, heads: int, length: int, keys: int) -> list[slice]:
    """Positions of queries whose scores are alive at once."""
    tall = max(1, SCORE_BYTES // max(1, 4 * pairs * heads * keys))
    return [slice(start, min(start + tall, length)) for start in range(0, length, tall)]


@contiguous
def _attention_to_all(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    _attention_block(context, window_of(context), inputs, outputs)


def _attention(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    if is_in_blocks(context):
        attend_in_blocks(context, inputs, outputs, _attention_block)
    else:
        _attention_to_all(context, inputs, outputs)


def _attention_block(
    context: KernelContext, window: Window, inputs: Arrays, outputs: Arrays
) -> None:
    query, key, value, *mask = inputs
    pairs, heads = _folded(query, key)
    shift = window.shift
    length, keys = query.shape[2], key.shape[2]
    query = query.reshape(pairs, heads, *query.shape[2:])
    key, value = (array.reshape(pairs, *array.shape[2:]) for array in (key, value))
    result = outputs[0].reshape(pairs, heads, length, value.shape[2])
    normaliser = outputs[1].reshape(pairs, heads, length)
    for rows in _tiles(pairs, heads, length, keys):
        count = rows.stop - rows.start
        scores = _scores(context, query, key, shift, rows, heads, mask)
        top = scores.max(axis=-1, keepdims=True)
        if mask:
            # As on the host: a query that sees no key has weights of 0 and an infinite normaliser.
            top = np.maximum(top, np.finfo(top.dtype).min)
        np.subtract(scores, top, out=scores)
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        if mask:
            np.copyto(top, math.inf, where=total == 0)
            np.copyto(total, 1, where=total == 0)
        np.divide(scores, total, out=scores)
        np.multiply(scores, _kept(context, window, rows, heads, keys), out=scores)
        mixed = product(context, scores.astype(value.dtype, copy=False), value)
        np.copyto(result[:, :, rows], mixed.reshape(pairs, heads, count, value.shape[2]))
        np.copyto(
            normaliser[:, :, rows],
            np.add(np.log(total), top, dtype=normaliser.dtype).reshape(pairs, heads, count),
            casting="same_kind",
        )


@contiguous
def _attention_grad_to_all(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    _attention_grad_block(context, window_of(context), inputs, outputs)


def _attention_grad(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    if is_in_blocks(context):
        pull_back_in_blocks(context, inputs, outputs, _attention_grad_block)
    else:
        _attention_grad_to_all(context, inputs, outputs)


def _attention_grad_block(
    context: KernelContext, window: Window, inputs: Arrays, outputs: Arrays
) -> None:
    # As on the host: w = exp(scores - normaliser), dvalue = wᵀ dy, dw = dy valueᵀ,
    # dscores = w * (dw - sum(dy * y)), dquery = dscores key, dkey = dscoresᵀ query.
    query, key = inputs[:2]
    scale = context.attrs["scale"]
    pairs, heads = _folded(query, key)
    query, dquery = (each.reshape(pairs, heads, *each.shape[2:]) for each in (query, outputs[0]))
    key, dkey, dvalue = (each.reshape(pairs, *each.shape[2:]) for each in (key, *outputs[1:]))
    # Sums over tiles of queries, added up in float32 where inputs are halves.
    by_key, by_value = (
        context.arrays.zeros(each.shape, _wide(each.dtype)) for each in (dkey, dvalue)
    )
    for rows, dy, weights, slopes in _slopes(context, window, inputs):
        count = rows.stop - rows.start
        narrow = weights.astype(dy.dtype, copy=False)
        np.add(by_value, product(context, narrow.swapaxes(-1, -2), dy), out=by_value)
        slopes = (slopes * scale).astype(dy.dtype, copy=False)
        back = product(context, slopes, key)
        np.copyto(dquery[:, :, rows], back.reshape(pairs, heads, count, key.shape[2]))
        piece = query[:, :, rows].copy().reshape(pairs, heads * count, key.shape[2])
        np.add(by_key, product(context, slopes.swapaxes(-1, -2), piece), out=by_key)
    np.copyto(dkey, by_key, casting="same_kind")
    np.copyto(dvalue, by_value, casting="same_kind")


def _mask_grad_block(context: KernelContext, window: Window, inputs: Arrays, total: Array) -> None:
    query, key = inputs[:2]
    for rows, _, _, slopes in _slopes(context, window, inputs):
        target = total[:, :, rows] if total.shape[2] > 1 else total
        by_head = slopes.reshape(*query.shape[:2], rows.stop - rows.start, key.shape[2])
        pairs = zip(by_head.shape, target.shape, strict=True)
        shared = tuple(axis for axis, (got, wanted) in enumerate(pairs) if got != wanted)
        summed = by_head.sum(axis=shared, keepdims=True) if shared else by_head
        np.add(target, summed, out=target)


def _slopes(
    context: KernelContext, window: Window, inputs: Arrays
) -> Iterator[tuple[slice, Array, Array, Array]]:
    """For tiles of queries the gradient dy that is passed to them, the weights that the values got,
    and the gradient of the scores [pairs, heads * queries, keys].
    """
    query, key, value, result, normaliser, passed, *mask = inputs
    pairs, heads = _folded(query, key)
    shift = window.shift
    length, keys = query.shape[2], key.shape[2]
    query, result, normaliser, passed = (
        array.reshape(pairs, heads, *array.shape[2:])
        for array in (query, result, normaliser, passed)
    )
    key, value = (array.reshape(pairs, *array.shape[2:]) for array in (key, value))
    for rows in _tiles(pairs, heads, length, keys):
        below = (pairs, heads * (rows.stop - rows.start))
        dy = passed[:, :, rows].copy().reshape(*below, value.shape[2])
        y = result[:, :, rows].copy().reshape(*below, value.shape[2])
        weights = _scores(context, query, key, shift, rows, heads, mask)
        wide = weights.dtype
        level = normaliser[:, :, rows].copy().reshape(*below, 1)
        np.subtract(weights, level, out=weights)
        np.exp(weights, out=weights)
        kept = _kept(context, window, rows, heads, keys)
        slopes = product(context, dy, value.swapaxes(-1, -2)).astype(wide, copy=False) * kept
        pull = (dy.astype(wide, copy=False) * y.astype(wide, copy=False)).sum(
            axis=-1, keepdims=True
        )
        slopes = np.subtract(slopes, pull).astype(wide, copy=False)
        np.multiply(slopes, weights, out=slopes)
        yield rows, dy, weights * kept, slopes


# --- positions ------------------------------------------------------------------------------------


def _rotary(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x, *position), (out,) = inputs, outputs
    length, width = x.shape[-2:]
    start, stop = context.input_regions[0][-2]
    total = context.input_shapes[0][-2]
    attrs, dtype = context.attrs, x.dtype

    def angles() -> tuple[Array, Array]:
        offset = attrs["offset"]
        positions = positions_of(attrs["zigzag"], total, (start, stop)) + float(offset)
        rates = attrs["base"] ** (np.arange(0, width, 2) / -max(width, 1))
        asarray = context.arrays.asarray
        return asarray(positions[:, None]), asarray(rates)

    def turned() -> tuple[Array, Array]:
        positions, rates = of_box(context, "angles", (start, stop), angles)
        phases = (positions + position[0] if position else positions) * rates
        sines = np.sin(phases) * (-1.0 if attrs["inverse"] else 1.0)
        return np.cos(phases).astype(dtype), sines.astype(dtype)

    cosines, sines = turned() if position else of_box(context, "turns", (start, stop), turned)
    shape = (math.prod(x.shape[:-2]), length, width)
    source, target = x.reshape(shape), out.reshape(shape)
    if attrs["interleaved"]:
        a, b = (slice(0, None, 2), slice(1, None, 2))
    else:
        a, b = slice(0, width // 2), slice(width // 2, None)
    first, second = source[:, :, a].copy(), source[:, :, b].copy()
    np.subtract(first * cosines, second * sines, out=target[:, :, a])
    np.add(second * cosines, first * sines, out=target[:, :, b])


def _causal_mask(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    rows, columns = (
        context.arrays.arange(start, stop) for start, stop in context.output_regions[0]
    )
    np.less_equal(columns, rows[:, None], out=outputs[0])


def _once(kind: str) -> Kernel:
    """What never changes is made on the host the first time, and kept on the device."""

    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        def made() -> Array:
            host = [np.empty(array.shape, array.dtype) for array in outputs]
            op_def(kind).kernel(replace(context, arrays=np, state={}), (), host)
            return context.arrays.asarray(host[0])

        np.copyto(outputs[0], of_box(context, "made", context.output_regions, made))

    return kernel


# --- reductions -----------------------------------------------------------------------------------


def _reduction(name: str, of: Callable[[Array], Array] = lambda x: x) -> Kernel:
    """A kernel that is a method of arrays: `max`, `min`, `all`, `any`."""

    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        axes, keepdims = context.attrs["axes"], context.attrs["keepdims"]
        np.copyto(outputs[0], getattr(of(inputs[0]), name)(axis=axes, keepdims=keepdims))

    return kernel


def _found_inf(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    np.copyto(outputs[0], ~np.isfinite(inputs[0]).all(), casting="unsafe")


DEVICE_KERNELS: dict[str, Kernel] = {
    "abs_max": _reduction("max", np.absolute),
    "all": _reduction("all"),
    "any": _reduction("any"),
    "arange": _once("arange"),
    "attention": _attention,
    "attention_grad": _attention_grad,
    "attention_mask_grad": mask_grad_kernel(_mask_grad_block),
    "causal_mask": _causal_mask,
    "constant": _once("constant"),
    "contract_leading": _contract_leading,
    "cross_entropy": in_float32(contiguous(_cross_entropy)),
    "cross_entropy_grad": in_float32(contiguous(_cross_entropy_grad)),
    "dropout": contiguous(_dropout),
    "embedding": contiguous(_embedding),
    "embedding_grad": in_float32(contiguous(_embedding_grad)),
    "found_inf": _found_inf,
    "linspace": _once("linspace"),
    "stored_constant": _once("stored_constant"),
    "log_softmax": in_float32(_log_softmax),
    "log_softmax_grad": in_float32(_log_softmax_grad),
    "matmul": _matmul,
    "max": _reduction("max"),
    "min": _reduction("min"),
    "rotary_embedding": in_float32(contiguous(_rotary)),
    "softmax": in_float32(_softmax),
    "softmax_grad": in_float32(_softmax_grad),
    **AT_INDICES_KERNELS,
    **CHOICE_KERNELS,
    **TRANSFORMER_KERNELS,
    **UPDATE_KERNELS,
}
"""By op kind, in place of the host's kernels."""
