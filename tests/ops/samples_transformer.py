"""Calls of what transformers' parts are made of: masked attention, heads, caches, flat LAMB."""

from __future__ import annotations

import numpy as np

from tests.ops.sample import Maker, Sample
from tests.ops.sharding import run_dense


def samples(make: Maker) -> list[Sample]:
    return [*_attentions(make), *_heads(make), *_caches(make), *_ends(make), *_flat_lamb(make)]


# Shapes of queries and keys, of the mask, and attributes.
MASKED: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, dict], ...] = (
    ((2, 3, 3, 2), (2, 3, 3, 2), (2, 3, 3, 3), {"causal": True}),
    ((2, 2, 3, 2), (2, 2, 5, 2), (2, 1, 1, 5), {}),
    ((3, 4, 2, 2), (3, 2, 3, 2), (1, 4, 2, 1), {"dropout": 0.3, "key": 4}),
    ((2, 2, 5, 2), (2, 2, 5, 2), None, {"dropout": 0.4, "key": 3, "causal": True}),
    ((2, 2, 5, 2), (2, 1, 5, 2), (1, 2, 5, 5), {"causal": True, "zigzag": 2}),
)


def _attentions(make: Maker) -> list[Sample]:
    real = make.real
    samples = []
    for query, key, mask, extra in MASKED:
        attrs = {"scale": 0.6, **extra}
        inputs = (real(*query), real(*key), real(*key))
        masks = () if mask is None else (real(*mask),)
        outputs = run_dense("attention", (*inputs, *masks), attrs, seed=5, step=2)
        given = (*inputs, *outputs, real(*outputs[0].shape), *masks)
        samples.append(Sample("attention", (*inputs, *masks), attrs))
        samples.append(Sample("attention_grad", given, attrs))
        if masks:
            samples.append(Sample("attention_mask_grad", given, attrs))
    return samples


def _heads(make: Maker) -> list[Sample]:
    real = make.real
    samples = []
    for shape in ((2, 3, 3, 3, 2), (1, 2, 4, 4, 1), (3, 2, 2, 5, 2)):
        product, (groups, heads, width) = real(*shape), shape[2:]
        samples.append(Sample("split_qkv", (product,)))
        samples.append(Sample("split_qkv", (product, real(groups, heads, width))))
        keys = (shape[0], groups, shape[1], width)
        queries = real(shape[0], groups * (heads - 2), shape[1], width)
        samples.append(Sample("join_qkv", (queries, real(*keys), real(*keys))))
    return samples


def _caches(make: Maker) -> list[Sample]:
    real = make.real
    samples = []
    for query, key, position in (
        ((2, 3, 2, 2), (2, 3, 5, 2), 3),
        ((2, 4, 1, 2), (2, 2, 4, 2), 2),
        ((3, 2, 3, 2), (3, 2, 3, 2), 0),
    ):
        new = real(*key[:2], query[2], key[3])
        at = np.array(position, np.int32)
        samples.append(Sample("cache_update", (real(*key), new, at), {}, False))
        inputs = (real(*query), real(*key), real(*key), at)
        samples.append(Sample("cached_attention", inputs, {"scale": 0.7}, False))
    for interleaved in (False, True):
        attrs = {"base": 10.0, "offset": 2, "interleaved": interleaved}
        samples.append(Sample("rotary_embedding", (real(2, 5, 4), np.array(7)), attrs))
    return samples


def _ends(make: Maker) -> list[Sample]:
    real = make.real
    samples = []
    for shape in ((2, 3, 4), (5, 3), (4,)):
        x, residual, bias = real(*shape), real(*shape), real(shape[-1])
        dropped = {"rate": 0.3, "key": 2}
        samples.append(Sample("bias_dropout_residual", (x, residual, bias)))
        samples.append(Sample("bias_dropout_residual", (x, residual, bias), dropped))
        samples.append(Sample("bias_dropout_residual", (x, residual), dropped))
    return samples


def _flat_lamb(make: Maker) -> list[Sample]:
    real, positive = make.real, make.positive
    scalar = [np.array(value, make.dtype) for value in (0.1, 2.5)]
    samples = []
    for every in (1, 3, 4):
        samples.append(Sample("gradient_sum_update", (real(5, 3), real(5, 3)), {"every": every}))
        for total in (4.0, np.nan):
            attrs = {"every": every, "max_norm": 0.5}
            inputs = (np.array(total, make.dtype), np.array(6, np.int32))
            samples.append(Sample("lamb_control", inputs, attrs, False))
    # A limit that clips nothing: clipping addends by their own norm has no dense result.
    samples.append(Sample("clip_addends", (real(5, 3), real(4), real()), {"max_norm": 1e9}, False))
    for sizes in ((3, 0, 4), (5,), (1, 1, 2)):
        w, u = real(sum(sizes)), real(sum(sizes))
        samples.append(Sample("segment_square_sums", (w, u), {"sizes": sizes}, False))
        sums = positive(2, len(sizes))
        sums[1, -1] = 0
        for flag in (0, 1):
            skipped = np.array(flag, make.dtype)
            inputs = (w, u, sums, scalar[0], skipped)
            samples.append(Sample("flat_lamb_update", inputs, {"sizes": sizes}, False))
    inputs = (real(5, 3), real(5, 3), real(5, 3), positive(5, 3), scalar[0], np.array(4, np.int32))
    attrs = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
    samples.append(Sample("controlled_lamb_direction", inputs, attrs, False))
    return samples
