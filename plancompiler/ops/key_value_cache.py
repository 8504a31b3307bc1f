"""Attention of new tokens to all earlier ones, whose keys and values are kept in caches.

A cache [b, g, capacity, d] is a variable; `cache_update` writes the new tokens from `position` on,
in place. `cached_attention` then sees position + i + 1 keys from token i on. Both are for
inference: neither has a gradient.
"""

from __future__ import annotations

import numpy as np

from plancompiler.errors import ExecutionError, ShapeError
from plancompiler.ir.shard import element_count
from plancompiler.ops.attention import attend, attention_line, check_attention, heads_of_keys
from plancompiler.ops.attention_tiles import LOWER_RIGHT, Tiles, Window
from plancompiler.ops.attributes import Float
from plancompiler.ops.groups import group_split
from plancompiler.ops.kernel import contiguous, copy_unless_shared, in_float32, scratch
from plancompiler.ops.registry import Array, Arrays, AttrMap, KernelContext, Types, define_op


def _update_infer(inputs: Types, attrs: AttrMap) -> Types:
    capacity, length = inputs[0].shape[2], inputs[1].shape[2]
    if length > capacity:
        raise ShapeError(
            "a cache has no room for so many tokens", got=length, expected=f"at most {capacity}"
        )
    return inputs[:1]


def _start(position: Array, length: int, capacity: int) -> int:
    """The position as a number; an ExecutionError where the tokens from there on do not fit."""
    start = int(position)
    if not 0 <= start <= capacity - length:
        raise ExecutionError(
            "new tokens do not fit into the cache of keys and values",
            got=f"{length} from position {start} on, in a cache of {capacity}",
            expected=f"positions 0 to {capacity - length}",
            hint="make a larger cache, or start again at position 0",
        )
    return start


def _update_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (cache, new, position), (out,) = inputs, outputs
    start = _start(position, new.shape[2], cache.shape[2])
    copy_unless_shared(cache, out)
    np.copyto(out[:, :, start : start + new.shape[2]], new)


define_op(
    "cache_update",
    infer=_update_infer,
    operands="cache F b h s d, new F b h t d, position p () -> cache F",
    rule="b h [s] d, b h [t] d, ... -> b h [s] d",
    kernel=_update_kernel,
    flops=lambda inputs, outputs, attrs: element_count(inputs[1].shape),
    mutates=((0, 0),),
    doc="(cache [b, h, s, d], new [b, h, t, d], position) -> the cache with `new` from there "
    "on. A step in which it does not fit fails.",
)


def _infer(inputs: Types, attrs: AttrMap) -> Types:
    # All new tokens are in the cache.
    kind = "cached_attention"
    return check_attention(kind, inputs, {**attrs, "causal": LOWER_RIGHT})[:1]


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    query, key, value, position = inputs
    start = _start(position, context.input_shapes[0][2], key.shape[2])
    row = context.input_regions[0][2][0]
    window = Window(row, 0, key.shape[2], start + row)
    tiles = Tiles(context, query, key, window)
    # The buffers for all keys at once: they would grow with the position.
    count, height = min(tiles.deep, tiles.pairs), tiles.heads * tiles.tall
    scratch(context, "scores", (count, height, tiles.wide), query.dtype)
    if tiles.keys > tiles.wide:
        scratch(context, "part", (count, height, value.shape[3]), query.dtype)
    attend(context, tiles, query, key, value, outputs[0])


def _flops(inputs: Types, outputs: Types, attrs: AttrMap) -> int:
    query, key, value = inputs[:3]
    return 2 * element_count(query.shape[:3]) * key.shape[2] * (query.shape[3] + value.shape[3])


_extra, _legal = group_split(heads_of_keys, (1, 1, 1, None), (1,))
define_op(
    "cached_attention",
    infer=_infer,
    operands="query F b h t d, key F b g s d, value F b g s e, position p () -> y F",
    rule=lambda inputs, outputs, attrs: attention_line(inputs, "Q, K, V, ... -> Y"),
    attrs=(Float("scale"),),
    kernel=in_float32(contiguous(_kernel)),
    extra=_extra,
    legal=_legal,
    flops=_flops,
    doc="(q [b, h, t, d], k [b, g, s, d], v [b, g, s, e], position) -> attention [b, h, t, e] "
    "of query i to the first position + i + 1 keys. What later keys hold is not read.",
)
