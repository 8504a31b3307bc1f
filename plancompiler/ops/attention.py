"""Scaled dot-product attention in tiles: memory grows with the sequence, not with its square.

Scores are made for a tile of queries and a tile of keys at a time, and their softmax is kept as a
running maximum and sum (M. Milakov, N. Gimelshein, 2018; T. Dao et al., 2022). Of the softmax only
its normaliser is kept, one number per query; the gradient makes the scores again.

Heads of queries may share heads of keys and values (grouped heads). Batches, groups of heads and
queries split over devices; keys stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from plancompiler.errors import ShapeError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ir.shard import element_count
from plancompiler.ops import kernel as blocking
from plancompiler.ops.check import (
    FLOATS,
    bool_attr,
    expect_dtype,
    expect_inputs,
    expect_same_dtype,
    expect_shape,
    float_attr,
    only_attrs,
)
from plancompiler.ops.gradient import only_first
from plancompiler.ops.groups import group_split
from plancompiler.ops.kernel import contiguous, in_float32, scratch
from plancompiler.ops.registry import (
    Array,
    AttrMap,
    KernelContext,
    OpDef,
    Types,
    apply,
    register,
)

_TILE_BLOCKS = 2
"""Pieces' worth of bytes in a tile of scores."""
_TILE_KEYS = 512
"""Keys of a tile: more cost cache, fewer cost calls."""
_CAUSAL_ROWS = 64
"""Queries of a tile of causal attention at most: half of what a tile has to either side of the
diagonal is work for nothing, but products of few rows are slow."""


def _check(kind: str, inputs: Types, attrs: AttrMap) -> tuple[TensorType, TensorType]:
    """Checks queries, keys and values; the types of the result and of the normalisers."""
    only_attrs(kind, attrs, "causal", "scale")
    causal = bool_attr(attrs, "causal", False)
    float_attr(attrs, "scale")
    query, key, value = inputs[:3]
    for tensor in inputs:
        expect_dtype(kind, tensor, FLOATS)
    expect_same_dtype(kind, (*inputs[:4], *inputs[5:]))
    for tensor, name in ((query, "queries"), (key, "keys"), (value, "values")):
        if len(tensor.shape) != 4:
            raise ShapeError(
                f"{kind} needs {name} with four axes",
                got=tensor.shape,
                expected="[batch, heads, length, features]",
            )
    (batch, heads, length, width), (_, shared, keys, _) = query.shape, key.shape
    expect_shape(kind, key, (batch, shared, keys, width), "keys (batch and features of queries)")
    expect_shape(
        kind, value, (batch, shared, keys, value.shape[3]), "values (like the keys but features)"
    )
    if not shared or heads % shared:
        raise ShapeError(
            f"{kind} needs a multiple of the heads of keys as heads of queries",
            got=f"{heads} and {shared}",
        )
    if not keys or not width or (causal and length > keys):
        raise ShapeError(
            f"{kind} needs at least one key that each query may see",
            got=f"{length} queries and {keys} keys of {width} features"
            + (", causal" if causal else ""),
        )
    # A normaliser is the exponent of all weights of its query: 16 bits would be too coarse.
    kept = DType.FLOAT32 if query.dtype.is_half else query.dtype
    return (
        TensorType((batch, heads, length, value.shape[3]), query.dtype),
        TensorType((batch, heads, length), kept),
    )


def _infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_inputs("attention", inputs, 3)
    return _check("attention", inputs, attrs)


def _grad_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_inputs("attention_grad", inputs, 6)
    result, normalisers = _check("attention_grad", inputs, attrs)
    expect_shape("attention_grad", inputs[3], result.shape, "result")
    expect_shape("attention_grad", inputs[4], normalisers.shape, "normalisers")
    expect_shape("attention_grad", inputs[5], result.shape, "gradient")
    return inputs[:3]


class _Tiles:
    """How the local work is cut up.

    Batch and heads of keys are one axis, "pairs"; the heads of queries of one pair stand below
    each other. A tile is some pairs, some positions of their queries, and some keys.
    """

    def __init__(self, context: KernelContext, query: Array, key: Array) -> None:
        self.keys: int = key.shape[2]
        self.pairs = key.shape[0] * key.shape[1]
        self.heads = query.shape[1] // max(1, key.shape[1])
        self.length: int = query.shape[2]
        self.causal = bool_attr(context.attrs, "causal", False)
        # Query i of the whole sequence sees the keys up to i + shift: the last one sees all.
        whole = context.input_shapes[0][2]
        self.shift: int = self.keys - whole + context.input_regions[0][2][0]
        self.wide = min(_TILE_KEYS, self.keys)
        budget = _TILE_BLOCKS * blocking.BLOCK_BYTES // query.itemsize
        most = min(self.length, _CAUSAL_ROWS) if self.causal else self.length
        self.tall = max(1, min(most, budget // (self.wide * max(1, self.heads))))
        self.deep = max(1, budget // (self.wide * max(1, self.heads) * self.tall))

    def queries(self) -> Iterator[tuple[slice, slice]]:
        """Pairs and positions of the tiles of queries; of the same pairs the last ones first, as
        they see the most keys."""
        for pair in range(0, self.pairs, self.deep):
            for start in reversed(range(0, self.length, self.tall)):
                stop = min(start + self.tall, self.length)
                yield slice(pair, pair + self.deep), slice(start, stop)

    def keys_of(self, rows: slice) -> Iterator[slice]:
        """Tiles of keys that queries at these positions may see."""
        seen = self.seen(rows)
        for start in range(0, seen, self.wide):
            yield slice(start, min(start + self.wide, seen))

    def seen(self, rows: slice) -> int:
        """How many of the keys queries at these positions may see."""
        return min(self.keys, rows.stop + self.shift) if self.causal else self.keys

    def hide(self, scores: Array, rows: slice, columns: slice) -> None:
        """Give -inf to the keys of a tile that queries may not see, in scores [pairs, heads * rows,
        keys]."""
        # The first key that not all of the queries see.
        first = max(columns.start, rows.start + self.shift + 1)
        if not self.causal or first >= columns.stop:
            return
        height = rows.stop - rows.start
        bounds = _bounds(
            height, columns.stop - first, rows.start + self.shift - first, scores.dtype
        )
        part = scores.reshape(len(scores), self.heads, height, -1)[..., first - columns.start :]
        np.minimum(part, bounds, out=part)

    def fold(self, array: Array) -> Array:
        """[batch, heads, length, ...] of queries as [pairs, heads of a pair, length, ...]."""
        return array.reshape(self.pairs, self.heads, *array.shape[2:])

    def below(self, array: Array) -> Array:
        """[pairs, heads of a pair, rows, width] as [pairs, rows, width]; a copy if needed."""
        if self.heads == 1:
            return array[:, 0]
        return array.reshape(len(array), array.shape[1] * array.shape[2], array.shape[3])


@lru_cache(maxsize=16)
def _bounds(rows: int, keys: int, last: int, dtype: np.dtype[Any]) -> Array:
    """[rows, keys]: inf where row i may see a key, those up to last + i, and -inf elsewhere."""
    visible = np.arange(keys) <= np.arange(rows)[:, None] + last
    found: Array = np.where(visible, np.inf, -np.inf).astype(dtype)
    found.flags.writeable = False
    return found


def _row_max(scores: Array) -> Array:
    """The greatest score of each row; to find its place and look it up beats a reduction."""
    rows = scores.reshape(-1, scores.shape[2])
    found: Array = rows[np.arange(len(rows)), rows.argmax(axis=-1)]
    return found.reshape(*scores.shape[:2], 1)


def _kernel(context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    query, key, value = inputs
    scale = float_attr(context.attrs, "scale")
    tiles = _Tiles(context, query, key)
    query, result = tiles.fold(query), tiles.fold(outputs[0])
    normaliser = tiles.fold(outputs[1])
    key, value = (array.reshape(tiles.pairs, *array.shape[2:]) for array in (key, value))
    ones = np.ones((tiles.wide, 1), query.dtype)
    for pairs, rows in tiles.queries():
        piece = query[pairs, :, rows]
        scaled = scratch(context, "scaled", piece.shape, piece.dtype)
        np.multiply(piece, scale, out=scaled)
        scaled = tiles.below(scaled)
        count, height = scaled.shape[:2]
        sums = scratch(context, "sums", (count, height, value.shape[2]), query.dtype)
        top = total = np.empty((count, height, 1), query.dtype)
        for columns in tiles.keys_of(rows):
            shape = (count, height, columns.stop - columns.start)
            scores = scratch(context, "scores", shape, query.dtype)
            np.matmul(scaled, key[pairs, columns].swapaxes(-1, -2), out=scores)
            tiles.hide(scores, rows, columns)
            # The first tile holds a key for every query, so `top` is finite from there on.
            higher = _row_max(scores)
            if columns.start == 0:
                _weigh(scores, higher)
                total = np.matmul(scores, ones[: shape[2]])
                np.matmul(scores, value[pairs, columns], out=sums)
            else:
                np.maximum(top, higher, out=higher)
                _weigh(scores, higher)
                _weigh(top, higher)
                np.multiply(total, top, out=total)
                np.add(total, np.matmul(scores, ones[: shape[2]]), out=total)
                np.multiply(sums, top, out=sums)
                part = scratch(context, "part", sums.shape, query.dtype)
                np.matmul(scores, value[pairs, columns], out=part)
                np.add(sums, part, out=sums)
            top = higher
        target = result[pairs, :, rows]
        np.divide(sums.reshape(target.shape), total.reshape(*target.shape[:3], 1), out=target)
        np.log(total, out=total)
        np.add(total, top, out=total)
        np.copyto(normaliser[pairs, :, rows], total.reshape(piece.shape[:3]))


def _weigh(scores: Array, level: Array) -> None:
    """exp(scores - level) in place."""
    np.subtract(scores, level, out=scores)
    np.exp(scores, out=scores)


def _grad_kernel(context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    # With weights w = exp(scores - normaliser): dvalue = wᵀ dy, dw = dy valueᵀ,
    # dscores = w * (dw - sum(dy * y)), dquery = dscores key, dkey = dscoresᵀ query.
    query, key, value, result, normaliser, passed = inputs
    scale = float_attr(context.attrs, "scale")
    tiles = _Tiles(context, query, key)
    query, result, normaliser, passed, dquery = map(
        tiles.fold, (query, result, normaliser, passed, outputs[0])
    )
    key, value, dkey, dvalue = (
        array.reshape(tiles.pairs, *array.shape[2:]) for array in (key, value, *outputs[1:])
    )
    for pairs, rows in tiles.queries():
        piece = query[pairs, :, rows]
        scaled = scratch(context, "scaled", piece.shape, piece.dtype)
        np.multiply(piece, scale, out=scaled)
        scaled = tiles.below(scaled)
        dy, y = tiles.below(passed[pairs, :, rows]), tiles.below(result[pairs, :, rows])
        level = normaliser[pairs, :, rows].reshape(*dy.shape[:2], 1)
        pull = np.einsum("prd,prd->pr", dy, y)[:, :, None]
        back = scratch(context, "back", scaled.shape, query.dtype)
        # What sees the most keys comes first: it sets what the others of its pairs add to.
        sets = rows.stop == tiles.length
        for columns in tiles.keys_of(rows):
            shape = (*dy.shape[:2], columns.stop - columns.start)
            weights = scratch(context, "scores", shape, query.dtype)
            slopes = scratch(context, "slopes", shape, query.dtype)
            keys, values = key[pairs, columns], value[pairs, columns]
            np.matmul(scaled, keys.swapaxes(-1, -2), out=weights)
            tiles.hide(weights, rows, columns)
            _weigh(weights, level)
            _product(context, weights.swapaxes(-1, -2), dy, dvalue[pairs, columns], sets)
            np.matmul(dy, values.swapaxes(-1, -2), out=slopes)
            np.subtract(slopes, pull, out=slopes)
            np.multiply(slopes, weights, out=slopes)
            _product(context, slopes, keys, back, columns.start == 0)
            _product(context, slopes.swapaxes(-1, -2), scaled, dkey[pairs, columns], sets)
        if sets:
            for unseen in (dkey[pairs, tiles.seen(rows) :], dvalue[pairs, tiles.seen(rows) :]):
                unseen.fill(0)
        target = dquery[pairs, :, rows]
        np.multiply(back.reshape(target.shape), scale, out=target)
    if not tiles.length:
        dkey.fill(0)
        dvalue.fill(0)


def _product(context: KernelContext, left: Array, right: Array, out: Array, sets: bool) -> None:
    """left @ right into `out`, or added to it."""
    if sets:
        np.matmul(left, right, out=out)
        return
    part = scratch(context, "part", out.shape, out.dtype)
    np.matmul(left, right, out=part)
    np.add(out, part, out=out)


def _gradient(
    attrs: AttrMap, inputs: Sequence[Any], outputs: Sequence[Any], grads: Sequence[Any]
) -> Sequence[Any]:
    dy = only_first("attention", grads)
    found: tuple[Any, ...] = apply("attention_grad", *inputs, *outputs, dy, **attrs)
    return found


def _group_count(inputs: Types, attrs: AttrMap) -> int | None:
    """Heads of keys, where the rule line cannot split them."""
    heads, shared = inputs[0].shape[1], inputs[1].shape[1]
    return None if heads == shared else shared


def _line(inputs: Types, pattern: str) -> str:
    """`pattern` with Q, K, V, Y, L for the operands."""
    h = "h" if _group_count(inputs, {}) is None else "[h]"
    k = "h" if _group_count(inputs, {}) is None else "[k]"
    names = {
        "Q": f"b {h} t [d]",
        "K": f"b {k} [s] [d]",
        "V": f"b {k} [s] [e]",
        "Y": f"b {h} t [e]",
        "L": f"b {h} t",
    }
    for name, text in names.items():
        pattern = pattern.replace(name, text)
    return pattern


def _flops(inputs: Types, outputs: Types, attrs: AttrMap) -> int:
    query, _, value = inputs[:3]
    scores = element_count(query.shape[:3]) * value.shape[2]
    found = 2 * scores * (query.shape[3] + value.shape[3])
    return found // 2 if bool_attr(attrs, "causal", False) else found


def default_scale(width: int) -> float:
    """1 / sqrt(features), the scale of scores unless told otherwise."""
    return 1.0 / math.sqrt(width)


_extra, _legal = group_split(_group_count, (1, 1, 1), (1, 1))
register(
    OpDef(
        "attention",
        infer=_infer,
        rule=lambda inputs, outputs, attrs: _line(inputs, "Q, K, V -> Y, L"),
        kernel=in_float32(contiguous(_kernel)),
        gradient=_gradient,
        extra=_extra,
        legal=_legal,
        flops=_flops,
        doc="(q [b, h, t, d], k [b, g, s, d], v [b, g, s, e]) -> (softmax(scale q kᵀ) v, the "
        "logarithm of the softmax's sum). Each of the g heads of keys serves h / g heads of "
        "queries; `causal` hides the keys after a query, the last query seeing all. Gradients flow "
        "through the first output alone.",
    )
)
_extra, _legal = group_split(_group_count, (1, 1, 1, 1, 1, 1), (1, 1, 1))
register(
    OpDef(
        "attention_grad",
        infer=_grad_infer,
        rule=lambda inputs, outputs, attrs: _line(inputs, "Q, K, V, Y, L, Y -> Q, K, V"),
        kernel=in_float32(contiguous(_grad_kernel)),
        linear=((5,),),
        extra=_extra,
        legal=_legal,
        flops=lambda inputs, outputs, attrs: 5 * _flops(inputs, outputs, attrs) // 2,
        doc="(q, k, v, y, logarithm of sums, dy) -> (dq, dk, dv).",
    )
)
