"""None in the place of an argument that PyTorch lets one leave out is what leaving it out is."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc

F = pc.nn.functional
ALONE = pc.Placement("cpu", [0])
RANDOM = np.random.default_rng(3)


def real(*shape):
    return pc.tensor(RANDOM.normal(size=shape), ALONE)


def unit(*shape):
    return pc.tensor(RANDOM.uniform(0.1, 0.9, shape), ALONE)


def whole(high, *shape):
    return pc.tensor(RANDOM.integers(0, high, shape), ALONE)


A, B, ROW = real(4, 6), real(4, 6), real(6)
IMAGE, CHANNELS, LABELS = real(2, 4, 6, 6), real(4), whole(6, 4)
SPREAD, WEIGHT, EDGES = unit(4), real(3, 4, 2, 2), pc.tensor(np.arange(6.0), ALONE)
SHARES, KEYS, GRID = unit(4, 6), real(2, 2, 5, 4), real(2, 3, 3, 2)
ROWS, NANS = real(6, 3), pc.tensor(np.array([np.nan, np.inf, -np.inf, 1.0]), ALONE)

CALLS = {
    "layer_norm": (lambda: F.layer_norm(A, (6,), None, None), lambda: F.layer_norm(A, (6,))),
    "layer_norm's weight": (
        lambda: F.layer_norm(A, (6,), None, ROW),
        lambda: F.layer_norm(A, (6,)) + ROW,
    ),
    "rms_norm": (lambda: F.rms_norm(A, (6,), None, None), lambda: F.rms_norm(A, (6,))),
    "group_norm": (lambda: F.group_norm(IMAGE, 2, None, None), lambda: F.group_norm(IMAGE, 2)),
    "batch_norm": (
        lambda: F.batch_norm(IMAGE, CHANNELS, SPREAD, None, None, False),
        lambda: F.batch_norm(IMAGE, CHANNELS, SPREAD),
    ),
    "batch_norm's statistics": (
        lambda: F.batch_norm(IMAGE, None, None, None, None, True),
        lambda: (
            F.instance_norm(IMAGE.transpose(0, 1)[None].flatten(2))
            .reshape(4, 2, 6, 6)
            .transpose(0, 1)
        ),
    ),
    "linear": (lambda: F.linear(A, B, None), lambda: A @ B.T),
    "conv2d": (lambda: F.conv2d(IMAGE, WEIGHT, None), lambda: F.conv2d(IMAGE, WEIGHT)),
    "conv_transpose2d": (
        lambda: F.conv_transpose2d(IMAGE[:, :3], WEIGHT, None),
        lambda: F.conv_transpose2d(IMAGE[:, :3], WEIGHT),
    ),
    "cross_entropy": (
        lambda: F.cross_entropy(A, LABELS, None),
        lambda: F.cross_entropy(A, LABELS),
    ),
    "nll_loss": (lambda: F.nll_loss(A, LABELS, None), lambda: F.nll_loss(A, LABELS)),
    "binary_cross_entropy": (
        lambda: F.binary_cross_entropy(SHARES, SHARES, None),
        lambda: F.binary_cross_entropy(SHARES, SHARES),
    ),
    "with logits": (
        lambda: F.binary_cross_entropy_with_logits(A, SHARES, None, pos_weight=None),
        lambda: F.binary_cross_entropy_with_logits(A, SHARES),
    ),
    "attention": (
        lambda: F.scaled_dot_product_attention(KEYS, KEYS, KEYS, None, 0.0, False, scale=None),
        lambda: F.scaled_dot_product_attention(KEYS, KEYS, KEYS),
    ),
    "embedding": (
        lambda: F.embedding(LABELS, ROWS, padding_idx=None, max_norm=None),
        lambda: ROWS[LABELS],
    ),
    "clip's least": (lambda: pc.clip(A, None, B), lambda: pc.minimum(A, B)),
    "clip's greatest": (lambda: A.clamp(B, None), lambda: pc.maximum(A, B)),
    "bincount": (lambda: pc.bincount(LABELS, None), lambda: pc.bincount(LABELS)),
    "cov": (lambda: pc.cov(A, fweights=None, aweights=None), lambda: pc.cov(A)),
    "diff": (
        lambda: pc.diff(A, 1, 0, prepend=None, append=B),
        lambda: pc.diff(pc.concat([A, B]), 1, 0),
    ),
    "nan_to_num": (lambda: pc.nan_to_num(NANS, None, None, None), NANS.nan_to_num),
    "searchsorted": (
        lambda: pc.searchsorted(EDGES, A, side=None, sorter=None),
        lambda: pc.searchsorted(EDGES, A, "left"),
    ),
    "repeat_interleave": (
        lambda: pc.repeat_interleave(A, 2, dim=0, output_size=None),
        lambda: pc.repeat_interleave(A, 2, 0),
    ),
    "sum": (lambda: pc.sum(A, dim=None, dtype=None), lambda: pc.sum(A)),
    "softmax": (lambda: F.softmax(A, dim=1, dtype=None), lambda: pc.softmax(A, 1)),
    "argmax": (lambda: pc.argmax(A, dim=None), lambda: pc.argmax(A)),
    "norm": (lambda: pc.linalg.norm(A, None, None, dtype=None), lambda: pc.linalg.norm(A)),
    "vector_norm": (
        lambda: pc.linalg.vector_norm(A, 3.0, None, dtype=None),
        lambda: pc.linalg.vector_norm(A, 3.0),
    ),
    "matrix_norm": (
        lambda: pc.linalg.matrix_norm(A, dtype=None),
        lambda: pc.linalg.matrix_norm(A),
    ),
    "lstsq": (lambda: pc.linalg.lstsq(A, B, None), lambda: pc.linalg.lstsq(A, B)),
    "roll": (lambda: pc.roll(A, 2, dims=None), lambda: pc.roll(A, 2)),
    "logit": (lambda: pc.logit(SHARES, eps=None), lambda: pc.logit(SHARES)),
    "quantile": (lambda: pc.quantile(A, 0.5, dim=None), lambda: pc.quantile(A, 0.5)),
    "div": (lambda: pc.div(A, B, rounding_mode=None), lambda: A / B),
    "interpolate": (
        lambda: F.interpolate(IMAGE, (3, 3), None, "bilinear", align_corners=None),
        lambda: F.interpolate(IMAGE, (3, 3), mode="bilinear"),
    ),
    "grid_sample": (
        lambda: F.grid_sample(IMAGE, GRID, align_corners=None),
        lambda: F.grid_sample(IMAGE, GRID),
    ),
    "pad": (lambda: F.pad(A, (1, 1), "constant", None), lambda: F.pad(A, (1, 1))),
    "max_pool2d": (lambda: F.max_pool2d(IMAGE, 2, None), lambda: F.max_pool2d(IMAGE, 2, 2)),
    "avg_pool2d": (
        lambda: F.avg_pool2d(IMAGE, 2, None, divisor_override=None),
        lambda: F.avg_pool2d(IMAGE, 2, 2),
    ),
    "adaptive_avg_pool2d": (
        lambda: F.adaptive_avg_pool2d(IMAGE, (None, 2)),
        lambda: F.adaptive_avg_pool2d(IMAGE, (6, 2)),
    ),
    "an index": (lambda: A[None, :, [0, 1]], lambda: A[:, [0, 1]].reshape(1, 4, 2)),
    "zeros_like": (lambda: pc.zeros_like(A, dtype=None), lambda: A * 0.0),
}


@pytest.mark.parametrize("name", CALLS)
def test_none_is_as_if_it_were_left_out(name):
    given, left_out = (call().numpy() for call in CALLS[name])
    assert given.dtype == left_out.dtype
    np.testing.assert_allclose(given, left_out, 1e-12, 1e-12)
