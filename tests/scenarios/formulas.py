"""What NumPy has no function for, on whole arrays, written from the definitions."""

from __future__ import annotations

from itertools import product
from math import erf as scalar_erf
from math import sqrt

import numpy as np

erf = np.vectorize(scalar_erf, otypes=[float])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + erf(x / sqrt(2)))


def softmax(x, axis=-1):
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def logsumexp(x, axis=-1):
    return np.log(np.exp(x).sum(axis))


def log_softmax(x, axis=-1):
    return x - np.expand_dims(logsumexp(x, axis), axis)


def nll(log_probabilities, labels):
    """Minus the entries that the labels select, per row."""
    return -np.take_along_axis(log_probabilities, labels[..., None], -1)[..., 0]


def cross_entropy(logits, labels):
    return nll(log_softmax(logits), labels).mean()


def normalized(x, axes, eps=1e-5):
    """With mean 0 and variance 1 over the axes."""
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


def layer_norm(x, gamma=1.0, beta=0.0):
    return normalized(x, (-1,)) * gamma + beta


def rms_norm(x, gamma=1.0, eps=1e-5):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gamma


def group_norm(x, groups):
    return normalized(x.reshape(len(x), groups, -1), (-1,)).reshape(x.shape)


def convolution(x, weight, stride=1, padding=0, groups=1):
    """Of any number of spatial axes: the sum over the places of the kernel."""
    spatial = x.ndim - 2
    x = np.pad(x, [(0, 0), (0, 0)] + [(padding, padding)] * spatial)
    kernel = weight.shape[2:]
    extents = [(n - k) // stride + 1 for n, k in zip(x.shape[2:], kernel, strict=True)]
    parts = []
    for part, filters in zip(np.split(x, groups, 1), np.split(weight, groups), strict=True):
        total = np.zeros((len(x), len(filters), *extents))
        for place in product(*map(range, kernel)):
            window = tuple(
                slice(at, at + stride * (n - 1) + 1, stride)
                for at, n in zip(place, extents, strict=True)
            )
            factors = filters[(slice(None), slice(None), *place)]
            total += np.einsum(
                "nc...,oc->no...", part[(slice(None), slice(None), *window)], factors
            )
        parts.append(total)
    return np.concatenate(parts, 1)


def pool(x, size, combine):
    """`combine` over windows of `size` by `size` that do not overlap."""
    n, c, h, w = x.shape
    return combine(x.reshape(n, c, h // size, size, w // size, size), axis=(3, 5))


def attention(query, key, value, causal=False):
    scores = query @ np.swapaxes(key, -1, -2) / sqrt(query.shape[-1])
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    return softmax(scores) @ value


def silu(x):
    return x * sigmoid(x)


def swapped_heads(x, heads):
    """`[batch, length, width]` as `[batch, heads, length, width / heads]`."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)
