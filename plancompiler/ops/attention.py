"""Scaled dot-product attention in tiles: memory grows with the sequence, not with its square.

Scores are made for a tile of queries and a tile of keys at a time, and their softmax is kept as a
running maximum and sum (M. Milakov, N. Gimelshein, 2018; T. Dao et al., 2022). Of the softmax only
its normaliser is kept, one number per query; the gradient makes the scores again.

Heads of queries may share heads of keys and values (grouped heads). A mask may be added to the
scores, and weights may be dropped; both are made tile by tile too. Batches, groups of heads and
queries split over devices; keys stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from plancompiler.errors import ShapeError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ir.shard import element_count
from plancompiler.ops import row_loops
from plancompiler.ops.attention_blocks import (
    attend_in_blocks,
    is_in_blocks,
    mask_part,
    parts_of,
    pull_back_in_blocks,
    wide_dtype,
)
from plancompiler.ops.attention_formula import attention_formula, gradient_formula, mask_formula
from plancompiler.ops.attention_tiles import Tiles, Window, causal_diagonal, window_of
from plancompiler.ops.attributes import Attribute, Float, Int
from plancompiler.ops.formula import by_formula, unless_first
from plancompiler.ops.groups import group_split
from plancompiler.ops.kernel import contiguous, in_float32, scratch
from plancompiler.ops.numba_loops import row_loop
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    Extra,
    Kernel,
    KernelContext,
    Legal,
    Rule,
    Tensors,
    Types,
    apply,
    define_op,
)
from plancompiler.ops.ring import Round
from plancompiler.ops.rule import Signature

_QUERY = "query F b h t d, key F b g s d, value F b g s e"
_GRADIENT = f"{_QUERY}, result F b h t e, normaliser f b h t, dresult F b h t e"
_ATTRS = (
    Attribute("causal", False),
    Float("scale"),
    Float("dropout", 0.0, least=0.0, below=1.0),
    Int("key", 0),
    Int("zigzag", 0, least=0),
)


def check_attention(kind: str, inputs: Types, attrs: AttrMap) -> tuple[TensorType, TensorType]:
    """Checks queries, keys and values; the types of the result and of the normalisers."""
    query, key, value = inputs[:3]
    (batch, heads, length, width), (_, shared, keys, _) = query.shape, key.shape
    if not shared or heads % shared:
        raise ShapeError(
            f"{kind} needs a multiple of the heads of keys as heads of queries",
            got=f"{heads} and {shared}",
        )
    first = causal_diagonal(attrs, length, keys)
    if not keys or not width or (first is not None and first < 0):
        raise ShapeError(
            f"{kind} needs at least one key that each query may see",
            got=f"{length} queries and {keys} keys of {width} features"
            + ("" if first is None else f", causal={attrs['causal']!r}"),
        )
    # A normaliser is the exponent of all weights of its query: 16 bits would be too coarse.
    kept = DType.FLOAT32 if query.dtype.is_half else query.dtype
    return (
        TensorType((batch, heads, length, value.shape[3]), query.dtype),
        TensorType((batch, heads, length), kept),
    )


def _check(kind: str, inputs: Types, attrs: AttrMap, given: int) -> tuple[TensorType, TensorType]:
    """Checks the inputs of an op that has `given` of them before the mask; the types of the result
    and of the normalisers.
    """
    types = check_attention(kind, inputs, attrs)
    if len(inputs) > given:
        _check_mask(kind, inputs[given], (*inputs[0].shape[:3], inputs[1].shape[2]))
    return types


def _check_mask(kind: str, mask: TensorType, scores: tuple[int, ...]) -> None:
    fits = len(mask.shape) == 4 and all(
        got in (1, wanted) for got, wanted in zip(mask.shape, scores, strict=True)
    )
    if not fits:
        raise ShapeError(
            f"{kind} cannot add this mask to its scores",
            got=mask.shape,
            expected=f"{scores}, or 1 in place of any of them",
        )


def _grad_infer(inputs: Types, attrs: AttrMap) -> Types:
    _check("attention_grad", inputs, attrs, 6)
    return inputs[:3]


def _mask_grad_infer(inputs: Types, attrs: AttrMap) -> Types:
    _check("attention_mask_grad", inputs, attrs, 6)
    return inputs[6:]


def _row_max(scores: Array) -> Array:
    """The greatest score of each row; to find its place and look it up beats a reduction."""
    rows = scores.reshape(-1, scores.shape[2])
    greatest: Array = rows[np.arange(len(rows), like=rows), rows.argmax(axis=-1)]
    return greatest.reshape(*scores.shape[:2], 1)


@in_float32
@contiguous
def _whole(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    _block(context, window_of(context), inputs, outputs)


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    if is_in_blocks(context):
        attend_in_blocks(context, inputs, outputs, _block)
    else:
        _whole(context, inputs, outputs)


def _wide(inputs: Arrays) -> Arrays:
    """Inputs of a block, halves as float32."""
    return [array.astype(wide_dtype(array.dtype), copy=False) for array in inputs]


def _block(context: KernelContext, window: Window, inputs: Arrays, outputs: Arrays) -> None:
    query, key, value, *mask = _wide(inputs)
    attend(context, Tiles(context, query, key, window, mask), query, key, value, *outputs)


def attend(
    context: KernelContext,
    tiles: Tiles,
    query: Array,
    key: Array,
    value: Array,
    result: Array,
    normaliser: Array | None = None,
) -> None:
    """Attention of a device's queries to its keys, into `result` and `normaliser`."""
    scale = context.attrs["scale"]
    query, result = tiles.fold(query), tiles.fold(result)
    normaliser = None if normaliser is None else tiles.fold(normaliser)
    key, value = (array.reshape(tiles.pairs, *array.shape[2:]) for array in (key, value))
    ones = context.arrays.ones((tiles.wide, 1), query.dtype)
    lowest = np.finfo(query.dtype).min
    for pairs, rows in tiles.queries():
        piece = query[pairs, :, rows]
        scaled = scratch(context, "scaled", piece.shape, piece.dtype)
        np.multiply(piece, scale, out=scaled)
        scaled = tiles.below(scaled)
        count, height = scaled.shape[:2]
        sums = scratch(context, "sums", (count, height, value.shape[2]), query.dtype)
        top = total = context.arrays.empty((count, height, 1), query.dtype)
        for columns in tiles.keys_of(rows):
            shape = (count, height, columns.stop - columns.start)
            scores = scratch(context, "scores", shape, query.dtype)
            np.matmul(scaled, key[pairs, columns].swapaxes(-1, -2), out=scores)
            tiles.mask(scores, pairs, rows, columns)
            tiles.hide(scores, rows, columns)
            # The first tile holds a key for every query, so `top` is finite from there on, unless a
            # mask hides all of them.
            higher = _row_max(scores)
            if tiles.masked:
                np.maximum(higher, lowest, out=higher)
            if columns.start == 0:
                _weigh(scores, higher)
                total = np.matmul(scores, ones[: shape[2]])
                tiles.drop(scores, pairs, rows, columns)
                np.matmul(scores, value[pairs, columns], out=sums)
            else:
                np.maximum(top, higher, out=higher)
                _weigh(scores, higher)
                _weigh(top, higher)
                np.multiply(total, top, out=total)
                np.add(total, np.matmul(scores, ones[: shape[2]]), out=total)
                tiles.drop(scores, pairs, rows, columns)
                np.multiply(sums, top, out=sums)
                part = scratch(context, "part", sums.shape, query.dtype)
                np.matmul(scores, value[pairs, columns], out=part)
                np.add(sums, part, out=sums)
            top = higher
        if tiles.masked:
            # A query that sees no key has the sum 0: weights exp(score - inf) are 0 as well.
            np.copyto(top, np.inf, where=total == 0)
            np.copyto(total, 1, where=total == 0)
        target = result[pairs, :, rows]
        np.divide(sums.reshape(target.shape), total.reshape(*target.shape[:3], 1), out=target)
        if normaliser is not None:
            level = np.log(total, dtype=normaliser.dtype)
            np.add(level, top, out=level)
            np.copyto(normaliser[pairs, :, rows], level.reshape(piece.shape[:3]))


def _weigh(scores: Array, level: Array) -> None:
    """exp(scores - level) in place."""
    np.subtract(scores, level, out=scores)
    np.exp(scores, out=scores)


def _slopes(
    context: KernelContext, inputs: Arrays, tiles: Tiles
) -> Iterator[tuple[slice, slice, slice, Array, Array, Array, Array]]:
    """Tile by tile: pairs, positions of queries, keys, scaled queries, gradients of the result, the
    weights that are multiplied with the values, and the gradient of the scores.
    """
    # With weights w = exp(scores - normaliser): dw = dy valueᵀ, dscores = w * (dw - sum(dy * y)).
    query, key, value, result, normaliser, passed = inputs[:6]
    scale = context.attrs["scale"]
    query, result, normaliser, passed = map(tiles.fold, (query, result, normaliser, passed))
    key, value = (array.reshape(tiles.pairs, *array.shape[2:]) for array in (key, value))
    for pairs, rows in tiles.queries():
        piece = query[pairs, :, rows]
        scaled = scratch(context, "scaled", piece.shape, piece.dtype)
        np.multiply(piece, scale, out=scaled)
        scaled = tiles.below(scaled)
        dy, y = tiles.below(passed[pairs, :, rows]), tiles.below(result[pairs, :, rows])
        level = np.ascontiguousarray(normaliser[pairs, :, rows], like=normaliser).reshape(
            *dy.shape[:2], 1
        )
        pull = np.einsum("prd,prd->pr", dy, y)[:, :, None]
        for columns in tiles.keys_of(rows):
            shape = (*dy.shape[:2], columns.stop - columns.start)
            weights = scratch(context, "scores", shape, query.dtype)
            slopes = scratch(context, "slopes", shape, query.dtype)
            np.matmul(scaled, key[pairs, columns].swapaxes(-1, -2), out=weights)
            tiles.mask(weights, pairs, rows, columns)
            lower = row_loop(row_loops.lower, weights, level)
            if lower is None:
                tiles.hide(weights, rows, columns)
                np.subtract(weights, level, out=weights)
            else:
                height = rows.stop - rows.start
                lower(weights, height, tiles.first_hidden(rows, columns), level)
            np.exp(weights, out=weights)
            np.matmul(dy, value[pairs, columns].swapaxes(-1, -2), out=slopes)
            kept = weights
            if tiles.rate:
                kept = scratch(context, "kept", shape, query.dtype)
                np.multiply(tiles.keep(pairs, rows, columns), 1 / (1 - tiles.rate), out=kept)
                np.multiply(slopes, kept, out=slopes)
                np.multiply(kept, weights, out=kept)
            pull_and_weigh = row_loop(row_loops.pull_and_weigh, slopes, pull, weights)
            if pull_and_weigh is None:
                np.subtract(slopes, pull, out=slopes)
                np.multiply(slopes, weights, out=slopes)
            else:
                pull_and_weigh(slopes, pull, weights)
            yield pairs, rows, columns, scaled, dy, kept, slopes


@in_float32
@contiguous
def _whole_grad(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    _grad_block(context, window_of(context), inputs, outputs)


def _grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    if is_in_blocks(context):
        pull_back_in_blocks(context, inputs, outputs, _grad_block)
    else:
        _whole_grad(context, inputs, outputs)


def _grad_block(context: KernelContext, window: Window, inputs: Arrays, outputs: Arrays) -> None:
    # dvalue = wᵀ dy, dquery = dscores key, dkey = dscoresᵀ query.
    query, key, *_ = inputs = _wide(inputs)
    scale = context.attrs["scale"]
    tiles = Tiles(context, query, key, window, inputs[6:])
    dquery = tiles.fold(outputs[0])
    key, dkey, dvalue = (
        array.reshape(tiles.pairs, *array.shape[2:]) for array in (key, *outputs[1:])
    )
    for pairs, rows, columns, scaled, dy, kept, slopes in _slopes(context, inputs, tiles):
        # What sees the most keys comes first: it sets what the others of its pairs add to.
        sets = rows.stop == tiles.length
        back = scratch(context, "back", scaled.shape, query.dtype)
        _product(context, kept.swapaxes(-1, -2), dy, dvalue[pairs, columns], sets)
        _product(context, slopes, key[pairs, columns], back, columns.start == 0)
        _product(context, slopes.swapaxes(-1, -2), scaled, dkey[pairs, columns], sets)
        seen = tiles.seen(rows)
        if columns.stop < seen:
            continue
        if sets:
            for unseen in (dkey[pairs, seen:], dvalue[pairs, seen:]):
                unseen.fill(0)
        target = dquery[pairs, :, rows]
        np.multiply(back.reshape(target.shape), scale, out=target)
    if not tiles.length:
        dkey.fill(0)
        dvalue.fill(0)


def mask_grad_kernel(block: Callable[[KernelContext, Window, Arrays, Array], None]) -> Kernel:
    """The gradient of a mask, by `block`, which adds that of some queries and keys to an array."""

    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        query, key, value, result, normaliser, passed, mask = inputs
        (out,) = outputs
        out.fill(0)
        for rows, columns, window in parts_of(context):
            by_row = [each[:, :, rows] for each in (query, result, normaliser, passed)]
            by_column = [each[:, :, columns] for each in (key, value)]
            part = mask_part(mask, rows, columns)
            given = (by_row[0], *by_column, *by_row[1:], part)
            block(context, window, given, mask_part(out, rows, columns))

    return in_float32(contiguous(kernel))


def _mask_grad_block(context: KernelContext, window: Window, inputs: Arrays, total: Array) -> None:
    """Add the gradient of a mask that some queries and keys have to `total`."""
    query, key, *_ = inputs
    tiles = Tiles(context, query, key, window, inputs[6:])
    for pairs, rows, columns, _, _, _, slopes in _slopes(context, inputs, tiles):
        places, part = tiles.in_mask(total, rows, columns)
        for row, pair in zip(slopes, range(pairs.start, tiles.pairs), strict=False):
            target = part[places(pair)]
            by_head = row.reshape(tiles.heads, rows.stop - rows.start, row.shape[1])
            shared = tuple(
                axis
                for axis, (got, wanted) in enumerate(zip(by_head.shape, target.shape, strict=True))
                if got != wanted
            )
            summed = by_head.sum(axis=shared, keepdims=True) if shared else by_head
            np.add(target, summed, out=target)


def _product(context: KernelContext, left: Array, right: Array, out: Array, sets: bool) -> None:
    """left @ right into `out`, or added to it."""
    if sets:
        np.matmul(left, right, out=out)
        return
    part = scratch(context, "part", out.shape, out.dtype)
    np.matmul(left, right, out=part)
    np.add(out, part, out=out)


def _gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    (query, key, value, *mask) = inputs
    given = (query, key, value, *outputs, grads[0], *mask)
    passed: tuple[Any, ...] = apply("attention_grad", *given, **attrs)
    # The gradient of a mask that is no parameter is needed by nobody, and left out.
    return (*passed, *(apply("attention_mask_grad", *given, **attrs) for _ in mask))


def heads_of_keys(inputs: Types, attrs: AttrMap) -> int | None:
    """Heads of keys, where the rule line cannot split them."""
    heads, shared = inputs[0].shape[1], inputs[1].shape[1]
    return None if heads == shared else shared


def attention_line(inputs: Types, pattern: str, mask: TensorType | None = None) -> str:
    """`pattern` with Q, K, V, Y, L for the operands, and M for the mask."""
    h = "h" if heads_of_keys(inputs, {}) is None else "[h]"
    k = "h" if heads_of_keys(inputs, {}) is None else "[k]"
    names = {
        "Q": f"b {h} t [d]",
        "K": f"b {k} [s] [d]",
        "V": f"b {k} [s] [e]",
        "Y": f"b {h} t [e]",
        "L": f"b {h} t",
    }
    if mask is not None:
        axes = zip(("b", h, "t", "[s]"), mask.shape, strict=True)
        names["M"] = " ".join("1" if extent == 1 else name for name, extent in axes)
    for name, text in names.items():
        pattern = pattern.replace(name, text)
    return pattern


def _rule(given: int, targets: str) -> Rule:
    """The rule of an op with `given` operands before the mask."""
    operands = ["Q", "K", "V", "Y", "L", "Y"][:given]

    def rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
        mask = inputs[given] if len(inputs) > given else None
        line = ", ".join(operands if mask is None else (*operands, "M"))
        return attention_line(inputs, f"{line} -> {targets}", mask)

    return rule


def split_by_groups(given: int, made: int) -> tuple[Extra, Legal]:
    """What splits an op between its heads of keys: all of its `given` inputs, the mask if it has
    heads, and its `made` outputs.
    """
    targets = (1,) * made
    _, legal = group_split(heads_of_keys, (1,) * given, targets)

    def extra(inputs: Types, outputs: Types, attrs: AttrMap, parts: int) -> Sequence[Signature]:
        masks = tuple(1 if mask.shape[1] > 1 else None for mask in inputs[given:])
        split, _ = group_split(heads_of_keys, (*(1,) * given, *masks), targets)
        return split(inputs, outputs, attrs, parts)

    return extra, legal


def _flops(inputs: Types, outputs: Types, attrs: AttrMap) -> int:
    return 2 * _scores(inputs, attrs) * (inputs[0].shape[3] + inputs[2].shape[3])


def _scores(inputs: Types, attrs: AttrMap) -> int:
    """How many scores are made."""
    query, _, value = inputs[:3]
    scores = element_count(query.shape[:3]) * value.shape[2]
    return scores // 2 if attrs["causal"] else scores


# Of a score, counted as what a multiply-add's two operations take: an exponential takes four of
# these, as a GPU's multiprocessor has a quarter as many results of special functions in a cycle
# (CUDA C++ Programming Guide, "Arithmetic Instructions", compute capability 8.0), a conversion to
# 16 bits two. Forward: scaling and lowering by the maximum in one, the exponential, comparing,
# adding up, converting. Gradient: the first two again, subtracting, weighing, converting twice.
# That such work is dear beside products is what T. Dao (2023, section 3.1) starts from.
_OF_SCORE, _OF_SCORE_GRADIENT = 2 * (1 + 4 + 1 + 1 + 2), 2 * (1 + 4 + 1 + 1 + 4)


def default_scale(width: int) -> float:
    """1 / sqrt(features), the scale of scores unless told otherwise. The op refuses none."""
    return 1.0 / math.sqrt(max(1, width))


_extra, _legal = split_by_groups(3, 2)
define_op(
    "attention",
    infer=lambda inputs, attrs: _check("attention", inputs, attrs, 3),
    operands=f"{_QUERY}, mask? F -> result F, normaliser A",
    rule=_rule(3, "Y, L"),
    attrs=_ATTRS,
    kernel=_kernel,
    gradient=unless_first(_gradient, attention_formula),
    extra=_extra,
    legal=_legal,
    passing=Round((1, 2), 2),
    flops=_flops,
    pointwise=lambda inputs, outputs, attrs: _OF_SCORE * _scores(inputs, attrs),
    precision="low",
    doc="(q [b, h, t, d], k [b, g, s, d], v [b, g, s, e]) -> (softmax(scale q kᵀ) v, the "
    "logarithm of the softmax's sum). Each of the g heads of keys serves h / g heads of "
    'queries; with `causal` query i sees keys 0 to i, with "lower_right" the last query sees '
    "all keys and each before it one fewer. A fourth input is added to the scores "
    "[b, h, t, s]; each of its extents may be 1. Of the weights a share of `dropout` is "
    "zeroed, the others scaled by 1 / (1 - dropout), by the bits that dropout "
    "with this `key` has for them. A query that sees no key gets 0.",
)
_extra, _legal = split_by_groups(6, 3)
define_op(
    "attention_grad",
    infer=_grad_infer,
    operands=f"{_GRADIENT}, mask? F -> dquery F, dkey F, dvalue F",
    rule=_rule(6, "Q, K, V"),
    attrs=_ATTRS,
    kernel=_grad_kernel,
    gradient=by_formula(gradient_formula),
    linear=((5,),),
    extra=_extra,
    legal=_legal,
    passing=Round((1, 2), 2, sums=True),
    flops=lambda inputs, outputs, attrs: 5 * _flops(inputs, outputs, attrs) // 2,
    pointwise=lambda inputs, outputs, attrs: _OF_SCORE_GRADIENT * _scores(inputs, attrs),
    precision="low",
    wide=(4,),
    doc="(q, k, v, y, logarithm of sums, dy) -> (dq, dk, dv); a mask follows them.",
)
define_op(
    "attention_mask_grad",
    infer=_mask_grad_infer,
    operands=f"{_GRADIENT}, mask F -> dmask F",
    rule=_rule(6, "M"),
    attrs=_ATTRS,
    kernel=mask_grad_kernel(_mask_grad_block),
    gradient=by_formula(mask_formula),
    linear=((5,),),
    flops=_flops,
    precision="low",
    wide=(4,),
    portable=False,
    doc="(q, k, v, y, logarithm of sums, dy, mask) -> the gradient of the mask.",
)
