"""Kernels for devices of what transformers' parts are made of, beside attention itself, and of the
decisions of distributed LAMB.

A position is a tensor, and the host does not wait to read it: what depends on it is chosen on the
device. Tokens that do not fit into a cache make all of it NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from plancompiler.ops.dropout import kept_in_rows, stream_of
from plancompiler.ops.kernel import contiguous, in_float32
from plancompiler.ops.registry import Kernel, KernelContext

Array = Any
Arrays = Sequence[Array]


def _bias_dropout_residual(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x, residual, *bias), (out,) = inputs, outputs
    rate = context.attrs["rate"]
    for each in bias:
        x = x + each
    if rate and x.size:
        shape, region = context.input_shapes[0], context.input_regions[0]
        rows: Any = np.zeros((), np.int64)
        for extent, (start, stop) in zip(shape[:-1], region[:-1], strict=True):
            rows = rows[..., None] * extent + np.arange(start, stop)
        keep = kept_in_rows(
            context, rows.reshape(-1), shape[-1], region[-1], *stream_of(context, rate)
        )
        x = x * keep.reshape(x.shape) * (1.0 / (1.0 - rate))
    np.add(x, residual, out=out)


def _cache_update(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (cache, new, position), (out,) = inputs, outputs
    capacity, length = cache.shape[2], new.shape[2]
    if not length:
        np.copyto(out, cache)
        return
    number = context.arrays.arange(capacity) - position
    rows = np.take(new, np.clip(number, 0, length - 1), axis=2)
    fresh = ((number >= 0) & (number < length))[:, None]
    np.copyto(out, np.where(fresh, rows, cache))
    np.copyto(out, math.nan, where=(position < 0) | (position > capacity - length))


def _cached_attention(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (query, key, value, position), (out,) = inputs, outputs
    if not out.size:
        return
    batch, heads, length, width = query.shape
    groups, keys = key.shape[1:3]
    below = (batch, groups, heads // groups * length)
    scaled = (query * context.attrs["scale"]).reshape(*below, width)
    scores = np.matmul(scaled, key.swapaxes(-1, -2)).reshape(batch, heads, length, keys)
    first = context.input_regions[0][2][0]
    last = context.arrays.arange(first, first + length) + position
    hidden = context.arrays.arange(keys) > last[:, None]
    np.copyto(scores, -math.inf, where=hidden)
    np.subtract(scores, scores.max(axis=-1, keepdims=True), out=scores)
    np.exp(scores, out=scores)
    np.divide(scores, scores.sum(axis=-1, keepdims=True), out=scores)
    # What was never written may hold anything, and 0 * NaN is no number.
    whole = context.input_shapes[0][2]
    seen = (context.arrays.arange(keys) < position + whole)[:, None]
    mixed = np.matmul(scores.reshape(*below, keys), np.where(seen, value, 0))
    np.copyto(out, mixed.reshape(out.shape))


def _lamb_control(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (total, count), (factor, skipped, counted) = inputs, outputs
    every, limit = context.attrs["every"], context.attrs["max_norm"]
    known = np.isfinite(total) & (total >= 0)
    norm = np.sqrt(np.where(known, total, 0)) / every
    share: Any = 1.0
    if limit:
        share = np.minimum(limit / (norm + context.attrs["eps"]), 1.0)
    np.copyto(factor, np.where(known, share, 0) / every, casting="same_kind")
    known = known & (context.step % every == every - 1)
    np.copyto(skipped, np.where(known, 0, 1), casting="unsafe")
    np.copyto(counted, np.where(known, count + 1, count), casting="same_kind")


def _clip_addends(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    limit, eps = context.attrs["max_norm"], context.attrs["eps"]
    total: Any = 0.0
    for each in inputs:
        total = total + np.square(each.astype(np.float64)).sum()
    factor = np.minimum(limit / (np.sqrt(total) + eps), 1.0)
    for source, target in zip(inputs, outputs, strict=True):
        np.multiply(source, factor, out=target)


TRANSFORMER_KERNELS: dict[str, Kernel] = {
    "bias_dropout_residual": contiguous(_bias_dropout_residual),
    "cache_update": _cache_update,
    "cached_attention": in_float32(contiguous(_cached_attention)),
    "clip_addends": _clip_addends,
    "lamb_control": _lamb_control,
}
"""By op kind, in place of the host's kernels."""
