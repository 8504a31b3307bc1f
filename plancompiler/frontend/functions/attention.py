"""The parts of transformers: attention in tiles, rotary positions, gated units."""

from __future__ import annotations

import math
from typing import Any

from plancompiler.errors import ShapeError
from plancompiler.frontend.draws import key_of, takes_generator
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.elementwise import where
from plancompiler.frontend.functions.linear import matmul
from plancompiler.frontend.out import takes_out
from plancompiler.ir import AttrValue, DType
from plancompiler.ir.operators import normalize_axes
from plancompiler.ops.attention import default_scale
from plancompiler.ops.registry import apply, apply_one, apply_source

__all__ = [
    "cached_attention",
    "causal_attention",
    "rotary_embedding",
    "scaled_dot_product_attention",
    "swiglu",
    "unzigzag",
    "zigzag",
]


@takes_out
@takes_generator
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool | str = False,
    scale: float | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    dropout_key: int | None = None,
    *,
    zigzag: int = 0,
    generator: Any = None,
    out: Tensor | None = None,
) -> Tensor:
    """softmax(scale q kᵀ) v of q [b, h, t, d], k [b, g, s, d] and v [b, g, s, e]: [b, h, t, e].

    Each of the g heads of keys serves h / g neighbouring heads of queries. With `causal=True` query
    i sees keys 0 to i, whatever t and s, as PyTorch's `is_causal` means it. With
    `causal="lower_right"` query i sees keys 0 to i + s - t, so that the last one sees all (t <= s):
    what queries of new tokens see of all tokens so far. `scale` is 1 / sqrt(d) by default.
    `mask` is added to the scores: its shape broadcasts to [b, h, t, s], -inf hides a key, and a
    query that sees no key gets 0. Weights are dropped with probability `dropout`, by the bits that
    `pc.dropout` with that key has for them. Scores are made in tiles, so memory grows with the
    sequence, not with its square (T. Dao et al., 2022). Batch, heads of keys and queries split over
    devices.

    Where queries, keys and values are all split along the sequence, no device gets all keys and
    values: blocks of them go round the ring of devices, and results are joined as blocks arrive (H.
    Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers", 2023). The compiler
    compares that with gathering them. In causal attention the devices of the first positions would
    have little to do: with `zigzag=n` the sequence is taken to be in the order that `pc.zigzag`
    gives it for n devices, in which all have the same work.
    """
    inputs = [query, key, value]
    if mask is not None:
        inputs.append(mask.reshape((1,) * (4 - mask.ndim) + mask.shape) if mask.ndim < 4 else mask)
    attrs: dict[str, AttrValue] = {"causal": causal, "scale": _scale(query, scale)}
    if zigzag:
        attrs["zigzag"] = zigzag
    if dropout:
        attrs.update(dropout=float(dropout), key=key_of(dropout_key))
    attended: Tensor = apply("attention", *inputs, **attrs)[0]
    return attended


@takes_out
def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: tuple[Tensor, Tensor],
    position: Tensor,
    scale: float | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of new tokens to themselves and to all before `position`, without gradient.

    q [b, h, t, d], k and v [b, g, t, d] are those of the tokens at `position` (a whole number, a
    scalar tensor) and after it. `cache` holds earlier keys and values, two variables
    [b, g, capacity, d], and takes the new ones in place. A step whose tokens do not fit fails.
    """
    keys = apply("cache_update", cache[0], key, position)
    values = apply("cache_update", cache[1], value, position)
    chosen = _scale(query, scale)
    return apply_one("cached_attention", query, keys, values, position, scale=chosen)


def _scale(query: Tensor, scale: float | None) -> float:
    return default_scale(query.shape[-1]) if scale is None else float(scale)


@takes_out
def rotary_embedding(
    x: Tensor,
    base: float = 10000.0,
    offset: int = 0,
    interleaved: bool = False,
    position: Tensor | None = None,
    *,
    zigzag: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Pairs of features of x [..., t, d] turned by position * base ** (-2 i / d) (J. Su et al.,
    2021).

    Positions count from `offset` along the axis before the last, over the whole tensor where it is
    split; `position`, a whole number as a scalar tensor, is added to them. Pairs are features i and
    i + d / 2, or neighbours where `interleaved`. With `zigzag=n` the sequence is in the order that
    `pc.zigzag` gives it.
    """
    more = () if position is None else (position,)
    attrs: dict[str, AttrValue] = {"base": float(base), "offset": offset}
    attrs["interleaved"] = interleaved
    if zigzag:
        attrs["zigzag"] = zigzag
    return apply_one("rotary_embedding", x, *more, **attrs)


@takes_out
def zigzag(x: Tensor, axis: int, pieces: int, *, out: Tensor | None = None) -> Tensor:
    """A tensor with a sequence, along `axis`, in the order in which causal attention of `pieces`
    devices gives each of them the same work.

    Positions are cut into 2n parts for n pieces; piece i holds parts i and 2n - 1 - i. Tokens,
    labels and positions are put in this order; what looks at positions is told: attention and
    `rotary_embedding` with `zigzag=n`. `unzigzag` is the inverse.
    """
    return _in_order(x, axis, pieces, inverse=False)


@takes_out
def unzigzag(x: Tensor, axis: int, pieces: int, *, out: Tensor | None = None) -> Tensor:
    """The inverse of `zigzag`: the sequence in its own order."""
    return _in_order(x, axis, pieces, inverse=True)


def _in_order(x: Tensor, axis: int, pieces: int, inverse: bool) -> Tensor:
    (at,) = normalize_axes(axis, x.ndim)
    count = x.shape[at]
    order = apply_source(x, "zigzag_order", count=count, pieces=pieces, inverse=inverse)
    return apply_one("index_select", x, order, axis=at)


@takes_out
def swiglu(gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """gate * sigmoid(gate) * up, of tensors of one shape (N. Shazeer, 2020)."""
    return apply_one("swiglu", gate, up)


@takes_out
def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """softmax(q kᵀ / sqrt(d)) v for q, k, v of shape [..., length, d]; a position sees none after
    it.

    The weights of later positions are exactly zero.
    """
    if query.ndim < 2 or key.ndim < 2 or not query.shape[-1]:
        raise ShapeError(
            "causal attention needs queries and keys of several numbers per position",
            got=f"{query.shape} and {key.shape}",
            expected="[..., length, d]",
        )
    length = query.shape[-2]
    if key.shape[-2] != length:
        raise ShapeError(
            "causal attention needs queries and keys of one length",
            got=f"{query.shape} and {key.shape}",
        )
    # Scaling the queries costs length * d multiplications where scaling the scores costs length².
    scores = matmul(query * (1.0 / math.sqrt(query.shape[-1])), key, transpose_b=True)
    mask = apply_source(query, "causal_mask", size=length)
    weights: Tensor = where(mask, scores, _FAR_BELOW[scores.dtype]).softmax(-1)
    return matmul(weights, value)


_FAR_BELOW = {
    DType.FLOAT16: -6e4,
    DType.BFLOAT16: -1e30,
    DType.FLOAT32: -1e30,
    DType.FLOAT64: -1e30,
}
