"""The two parts of a transformer's layer as one call each, in a form that tensor parallelism splits
with one reduction forward and one backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plancompiler.errors import AttributeValueError, ShapeError, UsageError
from plancompiler.frontend.draws import key_of, takes_generator
from plancompiler.frontend.functions.activation import gelu, gelu_exact, relu, silu
from plancompiler.frontend.functions.attention import (
    cached_attention,
    rotary_embedding,
    scaled_dot_product_attention,
    swiglu,
)
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.linear import linear
from plancompiler.frontend.functions.normalization import layer_norm, rms_norm
from plancompiler.frontend.functions.training import dropout as drop
from plancompiler.frontend.out import takes_out
from plancompiler.ir import AttrValue
from plancompiler.ops.registry import apply, apply_one

__all__ = [
    "bias_dropout_residual",
    "fused_attention",
    "fused_feedforward",
]


ACTIVATIONS = ("gelu", "gelu_exact", "relu", "silu")
"""Activations of the feed-forward part."""


@takes_out
def fused_attention(
    x: Tensor,
    qkv_weight: Tensor,
    out_weight: Tensor,
    *,
    qkv_bias: Tensor | None = None,
    out_bias: Tensor | None = None,
    pre_norm: Sequence[Tensor] | None = None,
    post_norm: Sequence[Tensor] | None = None,
    mask: Tensor | None = None,
    causal: bool | str = False,
    scale: float | None = None,
    rotary_base: float | None = None,
    attention_dropout: float = 0.0,
    dropout: float = 0.0,
    eps: float = 1e-5,
    cache: tuple[Tensor, Tensor] | None = None,
    position: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The attention part of a transformer's layer, with its residual connection: [b, t, m] to
    [b, t, m].

    [normalise] → queries, keys and values of h heads → attention with `mask` and
    `attention_dropout` → product with `out_weight` → reduce → add `out_bias` → `dropout` → add x →
    [normalise].

    `qkv_weight` is [g, h / g + 2, d, m]: for each of g groups the heads of queries that share a
    head of keys, then that head, then its head of values; `qkv_bias` is [g, h / g + 2, d],
    `out_weight` [h, d, m], `out_bias` [m]. A norm is (weight, bias) of a layer norm or (weight,)
    of a root mean square norm. With the first axis of the weights split over devices, `S(0)` for
    `qkv_weight`, `qkv_bias` and `out_weight`, heads are split: the result is reduced once, before
    its bias, and in backward the gradient of the product's input, once (M. Shoeybi et al., 2019).

    With `rotary_base` queries and keys turn with their positions. With `cache` and `position`, two
    variables [b, g, capacity, d] and a whole number as a scalar tensor, x are the tokens from that
    position on, the cache holds keys and values of those before and takes the new ones in place;
    that form is causal, has no gradient, and takes neither mask nor `attention_dropout`.
    """
    _check_attention(x, qkv_weight, out_weight)
    inner: Tensor = apply("place_gradient", _normalised(x, pre_norm, eps))
    product: Tensor = apply("einsum", inner, qkv_weight, equation="btm,gpdm->btgpd")
    biases = () if qkv_bias is None else (qkv_bias,)
    query, key, value = apply("split_qkv", product, *biases)
    if rotary_base is not None:
        query = rotary_embedding(query, rotary_base, position=position)
        key = rotary_embedding(key, rotary_base, position=position)
    if cache is None and position is None:
        mixed = scaled_dot_product_attention(
            query, key, value, causal, scale, mask, attention_dropout
        )
    elif cache is None or position is None:
        raise UsageError(
            "a cache of keys and values and a position go together",
            got="a position alone" if cache is None else "a cache alone",
        )
    elif mask is not None or attention_dropout:
        raise UsageError(
            "attention through a cache takes neither a mask nor dropout",
            got="a mask" if mask is not None else f"attention_dropout={attention_dropout}",
            hint="it is causal, and for inference: call .eval() on the module",
        )
    else:
        mixed = cached_attention(query, key, value, cache, position, scale)
    product = apply("einsum", mixed, out_weight, equation="bhtd,hdm->btm")
    return _normalised(bias_dropout_residual(product, x, out_bias, dropout), post_norm, eps)


@takes_out
def fused_feedforward(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    *,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    gate_weight: Tensor | None = None,
    pre_norm: Sequence[Tensor] | None = None,
    post_norm: Sequence[Tensor] | None = None,
    activation: str = "gelu",
    activation_dropout: float = 0.0,
    dropout: float = 0.0,
    eps: float = 1e-5,
    out: Tensor | None = None,
) -> Tensor:
    """The feed-forward part of a transformer's layer, with its residual connection: [..., m] to
    [..., m].

    [normalise] → product with `weight1` [hidden, m], plus `bias1` → activation →
    `activation_dropout` → product with `weight2` [m, hidden] → reduce → add `bias2` → `dropout` →
    add x → [normalise]. With `gate_weight` [hidden, m] the activation of that product is multiplied
    with the other one (SwiGLU with "silu"). Norms are as in `fused_attention`. Tensor parallelism
    splits hidden units: `S(0)` for `weight1`, `bias1` and `gate_weight`, `S(1)` for `weight2`.
    """
    if activation not in ACTIVATIONS:
        raise AttributeValueError(
            "unknown activation", got=repr(activation), expected=", ".join(ACTIVATIONS)
        )
    inner: Tensor = apply("place_gradient", _normalised(x, pre_norm, eps))
    hidden = linear(inner, weight1, bias1)
    if gate_weight is None:
        hidden = _activated(hidden, activation)
    else:
        gate = linear(inner, gate_weight)
        hidden = (
            swiglu(gate, hidden) if activation == "silu" else _activated(gate, activation) * hidden
        )
    if activation_dropout:
        hidden = drop(hidden, activation_dropout)
    product = linear(hidden, weight2)
    return _normalised(bias_dropout_residual(product, x, bias2, dropout), post_norm, eps)


@takes_out
@takes_generator
def bias_dropout_residual(
    x: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    dropout_key: int | None = None,
    *,
    generator: Any = None,
    out: Tensor | None = None,
) -> Tensor:
    """residual + dropout(x + bias), of x and residual [..., m] and bias [m], in one pass.

    A partial x is reduced first. The key is as in `pc.dropout`, and gives the same bits.
    """
    biases = () if bias is None else (bias,)
    attrs: dict[str, AttrValue] = {}
    if dropout:
        attrs = {"rate": float(dropout), "key": key_of(dropout_key)}
    return apply_one("bias_dropout_residual", x, residual, *biases, **attrs)


def _check_attention(x: Tensor, qkv_weight: Tensor, out_weight: Tensor) -> None:
    fits = x.ndim == 3 and qkv_weight.ndim == 4 and out_weight.ndim == 3
    if fits:
        groups, heads, width, _ = qkv_weight.shape
        fits = out_weight.shape == (groups * (heads - 2), width, x.shape[-1])
    if not fits:
        raise ShapeError(
            "the weights of fused_attention do not fit",
            got=f"x {x.shape}, qkv_weight {qkv_weight.shape}, out_weight {out_weight.shape}",
            expected="x [b, t, m], qkv_weight [g, h / g + 2, d, m], out_weight [h, d, m]",
        )


def _normalised(x: Tensor, norm: Sequence[Tensor] | None, eps: float) -> Tensor:
    if norm is None:
        return x
    if len(norm) == 1:
        return rms_norm(x, norm[0], eps)
    if len(norm) == 2:
        return layer_norm(x, norm[0], norm[1], eps)
    raise UsageError(
        "a norm is (weight, bias), or (weight,) for the root mean square", got=len(norm)
    )


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "gelu":
        return gelu(x)
    if activation == "relu":
        return relu(x)
    return silu(x) if activation == "silu" else gelu_exact(x)
