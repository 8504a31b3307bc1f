"""Attention over several heads, and the encoder and decoder made of it (A. Vaswani et al., 2017),
with PyTorch's parameters and arguments.

Masks are PyTorch's: of truth values, True hides a key; numbers are added to scores. A query that
sees no key gets zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any, ClassVar

from plancompiler.errors import AttributeValueError, ShapeError, UsageError
from plancompiler.frontend.functions.attention import scaled_dot_product_attention
from plancompiler.frontend.functions.elementwise import logical_not
from plancompiler.frontend.functions.linear import linear, matmul
from plancompiler.frontend.functions.shape import concat, expand
from plancompiler.frontend.nn import functional
from plancompiler.frontend.nn.functional.attention import additive
from plancompiler.frontend.nn.layers import Dropout, LayerNorm, Linear, ModuleList
from plancompiler.frontend.nn.module import Module, Parameter
from plancompiler.ir import DType
from plancompiler.ir.operators import filled
from plancompiler.ops.registry import apply_source


def _uniform(shape: tuple[int, ...], dtype: DType | str) -> Parameter:
    """A weight [out, in], uniform within sqrt(6 / (in + out)) (X. Glorot and Y. Bengio, 2010)."""
    bound = math.sqrt(6.0 / max(1, sum(shape)))
    return Parameter(shape, dtype, "uniform", (-bound, bound))


class MultiheadAttention(Module):
    """Attention of queries [t, n, dim] to keys and values [s, n, ...] in `num_heads` heads; with
    `batch_first` [n, t, dim], without a batch [t, dim].

    Gives the result like the queries, and with `need_weights` the weights [n, t, s], averaged over
    heads, or with `average_attn_weights=False` [n, heads, t, s]. `key_padding_mask` [n, s] hides
    keys of a sequence, `attn_mask` [t, s] or [n heads, t, s] keys of a query; `is_causal` hides
    what comes after a query. Without `need_weights` scores are made in tiles. Weights are
    `in_proj_weight` [3 dim, dim] (or `q_proj_weight`, `k_proj_weight`, `v_proj_weight` where keys
    or values have other features), `in_proj_bias`, `out_proj`, `bias_k`, `bias_v`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        dtype: DType | str = "float32",
    ) -> None:
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise AttributeValueError(
                "the heads must divide the dimension evenly",
                got=f"embed_dim {embed_dim}, {num_heads} heads",
            )
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.batch_first, self.add_zero_attn = batch_first, add_zero_attn
        keys, values = kdim or embed_dim, vdim or embed_dim
        if keys == values == embed_dim:
            bound = math.sqrt(6.0 / (4 * embed_dim))
            self.in_proj_weight = Parameter(
                (3 * embed_dim, embed_dim), dtype, "uniform", (-bound, bound)
            )
        else:
            self.q_proj_weight = _uniform((embed_dim, embed_dim), dtype)
            self.k_proj_weight = _uniform((embed_dim, keys), dtype)
            self.v_proj_weight = _uniform((embed_dim, values), dtype)
        self.in_proj_bias = Parameter((3 * embed_dim,), dtype, "zeros") if bias else None
        self.out_proj = Linear(embed_dim, embed_dim, bias, dtype)
        if self.out_proj.bias is not None:
            self.out_proj.bias = Parameter((embed_dim,), dtype, "zeros")
        self.bias_k = self.bias_v = None
        if add_bias_kv:
            deviation = (0.0, math.sqrt(2.0 / (1 + embed_dim)))
            self.bias_k = Parameter((1, 1, embed_dim), dtype, "normal", deviation)
            self.bias_v = Parameter((1, 1, embed_dim), dtype, "normal", deviation)

    def _projected(self, query: Any, key: Any, value: Any) -> list[Any]:
        dim = self.embed_dim
        bias = None if self.in_proj_bias is None else self.in_proj_bias.value
        whole = getattr(self, "in_proj_weight", None)
        if whole is not None:
            weight = whole.value
            if query is key and key is value:
                made = linear(query, weight, bias)
                return [made[..., dim * each : dim * (each + 1)] for each in range(3)]
            weights = [weight[dim * each : dim * (each + 1)] for each in range(3)]
        else:
            named = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            weights = [each.value for each in named]
        biases = [
            None if bias is None else bias[dim * each : dim * (each + 1)] for each in range(3)
        ]
        return [linear(*each) for each in zip((query, key, value), weights, biases, strict=True)]

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Any, Any]:
        single = query.ndim == 2
        same = query is key and key is value
        if single or not self.batch_first:
            axes = (1, 0, 2)
            turned = [
                each.reshape((1, *each.shape)) if single else each.transpose(axes)
                for each in ((query,) if same else (query, key, value))
            ]
            query, key, value = turned * 3 if same else turned
        if query.ndim != 3 or query.shape[-1] != self.embed_dim:
            raise ShapeError(
                "attention takes sequences of vectors", got=query.shape, expected=self.embed_dim
            )
        batch, length, dim = query.shape
        query, key, value = self._projected(query, key, value)
        given = key.shape[1]
        key, value = self._longer(key, value)
        heads = self.num_heads
        query, key, value = (
            each.reshape((batch, each.shape[1], heads, dim // heads)).transpose((0, 2, 1, 3))
            for each in (query, key, value)
        )
        more = key.shape[2] - given
        mask = self._mask(key_padding_mask, attn_mask, (batch, length, given), query.dtype, single)
        causal = is_causal and attn_mask is None
        tiled = causal and not need_weights and not more
        if causal and not tiled:
            seen = apply_source(query, "causal_mask", size=max(length, given))[:length, :given]
            hidden = additive(seen, query.dtype)
            mask = hidden if mask is None else mask + hidden
        if mask is not None and more:
            mask = functional.pad(mask, (0, more))
        weights = None
        if need_weights:
            scores = matmul(query * (1.0 / math.sqrt(dim // heads)), key, transpose_b=True)
            weights = functional.softmax(scores if mask is None else scores + mask, -1)
            if self.dropout and self.training:
                weights = functional.dropout(weights, self.dropout)
            mixed = matmul(weights, value)
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            rate = self.dropout if self.training else 0.0
            mixed = scaled_dot_product_attention(
                query, key, value, causal=tiled, mask=mask, dropout=rate
            )
        joined = mixed.transpose((0, 2, 1, 3)).reshape((batch, length, dim))
        output = self.out_proj(joined)
        if single:
            return output[0], None if weights is None else weights[0]
        return (output if self.batch_first else output.transpose((1, 0, 2))), weights

    def _longer(self, key: Any, value: Any) -> tuple[Any, Any]:
        """Keys and values with those that every sequence has at its end."""
        batch, _, dim = key.shape
        ends = []
        if self.bias_k is not None and self.bias_v is not None:
            ends.append((self.bias_k.value, self.bias_v.value))
        if self.add_zero_attn:
            zeros = filled(key, 0.0, (1, 1, dim))
            ends.append((zeros, zeros))
        for one, other in ends:
            key = concat([key, expand(one, (batch, 1, dim))], 1)
            value = concat([value, expand(other, (batch, 1, dim))], 1)
        return key, value

    def _mask(
        self,
        padding: Any,
        mask: Any,
        shape: tuple[int, int, int],
        dtype: DType,
        single: bool,
    ) -> Any:
        """Both masks as what is added to scores [n, heads, t, s]; None without."""
        batch, length, keys = shape
        total = None
        if mask is not None:
            if mask.shape not in ((length, keys), (batch * self.num_heads, length, keys)):
                raise ShapeError(
                    "a mask of attention does not fit",
                    got=mask.shape,
                    expected=f"{(length, keys)} or {(batch * self.num_heads, length, keys)}",
                )
            total = _added(mask, dtype)
            if total.ndim == 3:
                total = total.reshape((batch, self.num_heads, length, keys))
        if padding is not None:
            if single and padding.ndim == 1:
                padding = padding.reshape((1, *padding.shape))
            if padding.shape != (batch, keys):
                raise ShapeError(
                    "a mask of keys does not fit", got=padding.shape, expected=(batch, keys)
                )
            beside = _added(padding, dtype).reshape((batch, 1, 1, keys))
            total = beside if total is None else total + beside
        return total


def _added(mask: Any, dtype: DType) -> Any:
    return additive(logical_not(mask) if mask.dtype is DType.BOOL else mask, dtype)


Activation = str | Callable[[Any], Any]


def _activation(given: Activation) -> Callable[[Any], Any]:
    if not isinstance(given, str):
        return given
    known: dict[str, Callable[[Any], Any]] = {"relu": functional.relu, "gelu": functional.gelu}
    if given not in known:
        raise AttributeValueError(
            "unknown activation", got=repr(given), expected="'relu', 'gelu' or a function"
        )
    return known[given]


class _TransformerLayer(Module):
    """Attention and two linear layers, each around a residual path with a norm behind it, or with
    `norm_first` before it. A subclass names its attentions and says what flows through them.
    """

    recomputable = True
    attentions: ClassVar[tuple[str, ...]]
    self_attn: MultiheadAttention
    multihead_attn: MultiheadAttention

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        dtype: DType | str = "float32",
    ) -> None:
        for name in self.attentions:
            attention = MultiheadAttention(
                d_model, nhead, dropout, bias, batch_first=batch_first, dtype=dtype
            )
            setattr(self, name, attention)
        self.linear1 = Linear(d_model, dim_feedforward, bias, dtype)
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias, dtype)
        self.norm_first = norm_first
        self.paths = range(1, len(self.attentions) + 2)  # PyTorch counts norms and dropouts from 1
        for number in self.paths:
            norm = LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype)
            setattr(self, f"norm{number}", norm)
        for number in self.paths:
            setattr(self, f"dropout{number}", Dropout(dropout))
        self.activation = _activation(activation)

    def _through(self, x: Any, *attended: Callable[[Any], Any]) -> Any:
        """What the layer makes of x: through each attention, then through the linear layers."""

        def fed(x: Any) -> Any:
            return self.linear2(self.dropout(self.activation(self.linear1(x))))

        for number, branch in zip(self.paths, (*attended, fed), strict=True):
            norm, dropout = getattr(self, f"norm{number}"), getattr(self, f"dropout{number}")
            x = x + dropout(branch(norm(x))) if self.norm_first else norm(x + dropout(branch(x)))
        return x


class TransformerEncoderLayer(_TransformerLayer):
    """Attention of src [t, n, d_model] to itself, then two linear layers, each around a residual
    path with a norm behind it, or with `norm_first` before it.
    """

    attentions = ("self_attn",)

    def forward(
        self,
        src: Any,
        src_mask: Any = None,
        src_key_padding_mask: Any = None,
        is_causal: bool = False,
    ) -> Any:
        def attended(x: Any) -> Any:
            return self.self_attn(
                x, x, x, src_key_padding_mask, False, src_mask, is_causal=is_causal
            )[0]

        return self._through(src, attended)


class TransformerDecoderLayer(_TransformerLayer):
    """As `TransformerEncoderLayer`, with attention to `memory`, the encoder's result, between the
    two.
    """

    attentions = ("self_attn", "multihead_attn")

    def forward(
        self,
        tgt: Any,
        memory: Any,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Any:
        def attended(x: Any) -> Any:
            return self.self_attn(
                x, x, x, tgt_key_padding_mask, False, tgt_mask, is_causal=tgt_is_causal
            )[0]

        def looked(x: Any) -> Any:
            padding, mask = memory_key_padding_mask, memory_mask
            return self.multihead_attn(
                x, memory, memory, padding, False, mask, is_causal=memory_is_causal
            )[0]

        return self._through(tgt, attended, looked)


def _copies(layer: Module, count: int) -> ModuleList:
    if count < 1:
        raise AttributeValueError("a stack needs at least one layer", got=count)
    return ModuleList([deepcopy(layer) for _ in range(count)])


class TransformerEncoder(Module):
    """`num_layers` layers like `encoder_layer`, and a norm."""

    def __init__(
        self,
        encoder_layer: Module,
        num_layers: int,
        norm: Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        self.layers = _copies(encoder_layer, num_layers)
        self.norm = norm

    def forward(
        self,
        src: Any,
        mask: Any = None,
        src_key_padding_mask: Any = None,
        is_causal: bool | None = None,
    ) -> Any:
        for layer in self.layers:
            src = layer(src, mask, src_key_padding_mask, bool(is_causal))
        return src if self.norm is None else self.norm(src)


class TransformerDecoder(Module):
    """`num_layers` layers like `decoder_layer`, and a norm."""

    def __init__(self, decoder_layer: Module, num_layers: int, norm: Module | None = None) -> None:
        self.layers = _copies(decoder_layer, num_layers)
        self.norm = norm

    def forward(
        self,
        tgt: Any,
        memory: Any,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Any:
        for layer in self.layers:
            tgt = layer(
                tgt,
                memory,
                tgt_mask,
                memory_mask,
                tgt_key_padding_mask,
                memory_key_padding_mask,
                bool(tgt_is_causal),
                memory_is_causal,
            )
        return tgt if self.norm is None else self.norm(tgt)


class Transformer(Module):
    """An encoder of src and a decoder of tgt [t, n, d_model], each with a norm at its end."""

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        dtype: DType | str = "float32",
    ) -> None:
        options = (dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first)
        norms = [LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype) for _ in range(2)]
        self.encoder = TransformerEncoder(
            TransformerEncoderLayer(d_model, nhead, *options, bias, dtype),
            num_encoder_layers,
            norms[0],
        )
        self.decoder = TransformerDecoder(
            TransformerDecoderLayer(d_model, nhead, *options, bias, dtype),
            num_decoder_layers,
            norms[1],
        )

    def forward(
        self,
        src: Any,
        tgt: Any,
        src_mask: Any = None,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        src_key_padding_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Any:
        if src.ndim != tgt.ndim:
            raise UsageError("source and target differ in their axes", got=(src.shape, tgt.shape))
        memory = self.encoder(src, src_mask, src_key_padding_mask, src_is_causal)
        return self.decoder(
            tgt,
            memory,
            tgt_mask,
            memory_mask,
            tgt_key_padding_mask,
            memory_key_padding_mask,
            tgt_is_causal,
            memory_is_causal,
        )
