"""Attention and its gradient as formulas of other ops, for second derivatives.

They hold all weights [batch, heads, queries, keys] at once, which the kernels do not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plancompiler.ir.operators import filled
from plancompiler.ops.attention_tiles import causal_diagonal
from plancompiler.ops.gradient import reduce_to
from plancompiler.ops.registry import AttrMap, apply, apply_source


def attention_formula(
    attrs: AttrMap, query: Any, key: Any, value: Any, *mask: Any
) -> tuple[Any, Any]:
    """The result and the normalisers, as the op `attention` gives them."""
    kept = _precise(query)
    query, key, value, *masks = (each.cast(kept) for each in (query, key, value, *mask))
    scores = _scores(attrs, query, key, masks)
    normaliser = apply("logsumexp", scores, axes=(3,))
    weights = _dropped(attrs, _weights(scores, normaliser))
    result = (_by_keys(weights, key) @ value).reshape((*query.shape[:3], value.shape[3]))
    return result.cast(query.dtype), normaliser


def gradient_formula(
    attrs: AttrMap,
    query: Any,
    key: Any,
    value: Any,
    result: Any,
    normaliser: Any,
    passed: Any,
    *mask: Any,
) -> tuple[Any, Any, Any]:
    """The gradients of queries, keys and values, as the op `attention_grad` gives them."""
    given = (query, key, value, result, normaliser, passed, *mask)
    weights, slopes = _slopes(attrs, *given)
    dtype, scale = query.dtype, attrs["scale"]
    query, key, passed = (each.cast(normaliser.dtype) for each in (query, key, passed))
    by_keys = _by_keys(slopes, key)
    dquery = (by_keys @ key).reshape(query.shape) * scale
    dkey = (_turned(by_keys) @ _by_keys(query, key)) * scale
    dvalue = _turned(_by_keys(_dropped(attrs, weights), key)) @ _by_keys(passed, key)
    return dquery.cast(dtype), dkey.cast(dtype), dvalue.cast(dtype)


def mask_formula(
    attrs: AttrMap,
    query: Any,
    key: Any,
    value: Any,
    result: Any,
    normaliser: Any,
    passed: Any,
    mask: Any,
) -> Any:
    """The gradient of the mask, as the op `attention_mask_grad` gives it."""
    _, slopes = _slopes(attrs, query, key, value, result, normaliser, passed, mask)
    return reduce_to(slopes, mask.shape).cast(mask.dtype)


def _precise(query: Any) -> str:
    """The dtype of normalisers."""
    return "float32" if query.dtype.is_half else str(query.dtype)


def _by_keys(tensor: Any, key: Any) -> Any:
    """[batch, heads, length, n] as [batch, heads of keys, the length of all that share them, n]."""
    batch, heads, length, width = tensor.shape
    shared = key.shape[1]
    return tensor.reshape((batch, shared, heads // shared * length, width))


def _turned(tensor: Any) -> Any:
    return tensor.transpose((0, 1, 3, 2))


def _scores(attrs: AttrMap, query: Any, key: Any, masks: list[Any]) -> Any:
    """[batch, heads, queries, keys], finite where hidden."""
    shape = (*query.shape[:3], key.shape[2])
    scores = (_by_keys(query, key) @ _turned(key)).reshape(shape) * attrs["scale"]
    for each in masks:
        scores = scores + each
    lowest = _lowest(scores)
    diagonal = causal_diagonal(attrs, *shape[2:])
    if diagonal is not None:
        ones = filled(scores, 1.0, shape[2:])
        lower = apply("tril", ones, diagonal=diagonal)
        if attrs["zigzag"]:
            lower = _in_order(_in_order(lower, attrs["zigzag"], 0), attrs["zigzag"], 1)
        seen = lower > 0
        hidden = filled(scores, lowest, ())
        scores = apply("where", seen, scores, hidden)
    return apply("maximum_scalar", scores, scalar=lowest)


def _in_order(matrix: Any, pieces: int, axis: int) -> Any:
    """Rows or columns in zigzag order."""
    order = apply_source(matrix, "zigzag_order", count=matrix.shape[axis], pieces=pieces)
    return apply("index_select", matrix, order, axis=axis)


def _lowest(scores: Any) -> float:
    """The score of what is hidden."""
    return float(np.finfo(scores.dtype.numpy).min) / 2


def _weights(scores: Any, normaliser: Any) -> Any:
    """Zero for what is hidden, also where that is all that a query has."""
    seen = (scores > _lowest(scores)).cast(scores.dtype)
    return (scores - normaliser.reshape((*normaliser.shape, 1))).exp() * seen


def _dropped(attrs: AttrMap, weights: Any) -> Any:
    rate = attrs["dropout"]
    if not rate:
        return weights
    return apply("dropout", weights, rate=rate, key=attrs["key"])


def _slopes(
    attrs: AttrMap,
    query: Any,
    key: Any,
    value: Any,
    result: Any,
    normaliser: Any,
    passed: Any,
    *mask: Any,
) -> tuple[Any, Any]:
    """The weights and the gradient of the scores."""
    kept = normaliser.dtype
    given = (query, key, value, result, passed, *mask)
    query, key, value, result, passed, *masks = (each.cast(kept) for each in given)
    scores = _scores(attrs, query, key, masks)
    weights = _weights(scores, normaliser)
    back = (_by_keys(passed, key) @ _turned(value)).reshape(scores.shape)
    pull = (passed * result).sum(3, keepdims=True)
    return weights, (_dropped(attrs, back) - pull) * weights
