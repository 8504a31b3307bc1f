"""Layers of transformers made of the fused functions: attention and feed-forward parts for training
and inference, and a stack of them that generates with a cache of keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from plancompiler.errors import AttributeValueError, UsageError
from plancompiler.frontend.functions.fused import fused_attention, fused_feedforward
from plancompiler.frontend.nn.layers import ModuleList
from plancompiler.frontend.nn.module import Buffer, Module, Parameter
from plancompiler.ir import BROADCAST, DType, NdSbp, Placement, Split, Value
from plancompiler.ir.arguments import whole_number


class _TensorParallel(Module):
    """A module that knows which of its parameters tensor parallelism splits, and where."""

    splits: ClassVar[Mapping[str, int]] = {}
    """The tensor axis along which a parameter of this name is split."""

    def place_split(self, placement: Placement, axis: str = "tp") -> Self:
        """Put all parameters on `placement`, split along its axis of this name and broadcast along
        the others. Raises UsageError where the placement has no such axis.
        """
        names = placement.axes or ()
        if axis not in names:
            raise UsageError(
                "the placement has no axis of this name",
                got=repr(axis),
                expected=", ".join(names) or "a placement with named axes",
            )
        layouts = {}
        for name, _ in self.named_parameters():
            split = self.splits.get(name.rpartition(".")[2])
            if split is not None:
                whole = NdSbp((BROADCAST,) * placement.ndim)
                layouts[name] = whole.replace(names.index(axis), Split(split))
        return self.place(placement, layouts)


class FusedAttention(_TensorParallel):
    """`pc.fused_attention` with its parameters: x [batch, length, dim] to the same shape.

    `kv_heads` heads of keys and values (default: all) each serve `heads / kv_heads` heads of
    queries. `norm` is "layer", "rms" or None; with `pre_norm` False it comes after the part.
    """

    splits: ClassVar = {"qkv_weight": 0, "qkv_bias": 0, "out_weight": 0}

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        causal: bool | str = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        norm: str | None = "layer",
        pre_norm: bool = True,
        rotary_base: float | None = None,
        bias: bool = True,
        eps: float = 1e-5,
        dtype: DType | str = "float32",
        std: float = 0.02,
        projection_std: float | None = None,
    ) -> None:
        groups = heads if kv_heads is None else kv_heads
        if heads < 1 or dim % heads or groups < 1 or heads % groups:
            raise AttributeValueError(
                "heads divide the dimension evenly, and heads of keys those of queries",
                got=f"dim {dim}, {heads} heads, {groups} heads of keys",
            )
        _check_rates(dropout=dropout, attention_dropout=attention_dropout)
        self.causal, self.dropout, self.attention_dropout = causal, dropout, attention_dropout
        self.rotary_base, self.pre_norm, self.eps = rotary_base, pre_norm, eps
        shape = (groups, heads // groups + 2, dim // heads)
        self.norm_weight, self.norm_bias = _norm(norm, dim, dtype)
        self.qkv_weight = Parameter((*shape, dim), dtype, "normal", (0.0, std))
        self.qkv_bias = Parameter(shape, dtype) if bias else None
        self.out_weight = Parameter(
            (heads, dim // heads, dim), dtype, "normal", (0.0, projection_std or std)
        )
        self.out_bias = Parameter((dim,), dtype) if bias else None

    def forward(
        self,
        x: Value,
        mask: Value | None = None,
        cache: KeyValueCache | None = None,
        position: Value | None = None,
    ) -> Value:
        norm = _values(self.norm_weight, self.norm_bias)
        active = self.training and cache is None
        return fused_attention(
            x,
            self.qkv_weight.value,
            self.out_weight.value,
            qkv_bias=None if self.qkv_bias is None else self.qkv_bias.value,
            out_bias=None if self.out_bias is None else self.out_bias.value,
            pre_norm=norm if self.pre_norm else None,
            post_norm=None if self.pre_norm else norm,
            mask=mask,
            causal=self.causal,
            rotary_base=self.rotary_base,
            attention_dropout=self.attention_dropout if active else 0.0,
            dropout=self.dropout if active else 0.0,
            eps=self.eps,
            cache=None if cache is None else (cache.keys.value, cache.values.value),
            position=position,
        )


class FusedFeedForward(_TensorParallel):
    """`pc.fused_feedforward` with its parameters: x [..., dim] to the same shape.

    With `gated` the activation of a second product is multiplied with the first. `norm` and
    `pre_norm` are as in `FusedAttention`.
    """

    splits: ClassVar = {"weight1": 0, "bias1": 0, "gate_weight": 0, "weight2": 1}

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        activation: str = "gelu",
        gated: bool = False,
        dropout: float = 0.0,
        activation_dropout: float = 0.0,
        norm: str | None = "layer",
        pre_norm: bool = True,
        bias: bool = True,
        eps: float = 1e-5,
        dtype: DType | str = "float32",
        std: float = 0.02,
        projection_std: float | None = None,
    ) -> None:
        _check_rates(dropout=dropout, activation_dropout=activation_dropout)
        self.activation, self.pre_norm, self.eps = activation, pre_norm, eps
        self.dropout, self.activation_dropout = dropout, activation_dropout
        self.norm_weight, self.norm_bias = _norm(norm, dim, dtype)
        self.weight1 = Parameter((hidden, dim), dtype, "normal", (0.0, std))
        self.bias1 = Parameter((hidden,), dtype) if bias else None
        self.gate_weight = Parameter((hidden, dim), dtype, "normal", (0.0, std)) if gated else None
        self.weight2 = Parameter((dim, hidden), dtype, "normal", (0.0, projection_std or std))
        self.bias2 = Parameter((dim,), dtype) if bias else None

    def forward(self, x: Value) -> Value:
        norm = _values(self.norm_weight, self.norm_bias)
        return fused_feedforward(
            x,
            self.weight1.value,
            self.weight2.value,
            bias1=None if self.bias1 is None else self.bias1.value,
            bias2=None if self.bias2 is None else self.bias2.value,
            gate_weight=None if self.gate_weight is None else self.gate_weight.value,
            pre_norm=norm if self.pre_norm else None,
            post_norm=None if self.pre_norm else norm,
            activation=self.activation,
            activation_dropout=self.activation_dropout if self.training else 0.0,
            dropout=self.dropout if self.training else 0.0,
            eps=self.eps,
        )


class KeyValueCache(_TensorParallel):
    """Keys and values [batch, kv_heads, capacity, width] of the tokens that a layer has seen."""

    splits: ClassVar = {"keys": 1, "values": 1}

    def __init__(
        self, batch: int, kv_heads: int, capacity: int, width: int, dtype: DType | str = "float32"
    ) -> None:
        self.keys = Buffer((batch, kv_heads, capacity, width), dtype)
        self.values = Buffer((batch, kv_heads, capacity, width), dtype)


class FusedTransformerLayer(_TensorParallel):
    """An attention part and a feed-forward part."""

    splits: ClassVar = {**FusedAttention.splits, **FusedFeedForward.splits}
    recomputable = True

    def __init__(self, attention: FusedAttention, feedforward: FusedFeedForward) -> None:
        self.attention = attention
        self.feedforward = feedforward

    def forward(
        self,
        x: Value,
        mask: Value | None = None,
        cache: KeyValueCache | None = None,
        position: Value | None = None,
    ) -> Value:
        output: Value = self.feedforward(self.attention(x, mask, cache, position))
        return output


class KeyValueCaches(_TensorParallel):
    """One `KeyValueCache` per layer; made by `FusedMultiTransformer.caches`."""

    splits: ClassVar = KeyValueCache.splits

    def __init__(self, layers: ModuleList) -> None:
        self.layers = layers


class FusedMultiTransformer(_TensorParallel):
    """Layers of `FusedAttention` and `FusedFeedForward`, causal, for generation.

    Without a cache x [batch, length, dim] is a whole sequence. With `caches`, of this module, and
    `position`, a whole number as a scalar tensor, x are the tokens from that position on: the
    prompt at position 0 ("prefill"), then one token at a time. Each result is that of the whole
    sequence at those positions.
    """

    splits: ClassVar = FusedTransformerLayer.splits

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int,
        layers: int,
        kv_heads: int | None = None,
        *,
        norm: str = "layer",
        activation: str = "gelu",
        gated: bool = False,
        rotary_base: float | None = 10000.0,
        bias: bool = True,
        eps: float = 1e-5,
        dtype: DType | str = "float32",
        std: float = 0.02,
    ) -> None:
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.width = dim // max(1, heads)
        self.dtype = DType.parse(dtype)

        def layer() -> FusedTransformerLayer:
            attention = FusedAttention(
                dim,
                heads,
                kv_heads,
                norm=norm,
                rotary_base=rotary_base,
                bias=bias,
                eps=eps,
                dtype=dtype,
                std=std,
            )
            feedforward = FusedFeedForward(
                dim,
                hidden,
                activation=activation,
                gated=gated,
                norm=norm,
                bias=bias,
                eps=eps,
                dtype=dtype,
                std=std,
            )
            return FusedTransformerLayer(attention, feedforward)

        self.layers = ModuleList(layer() for _ in range(whole_number("layers", layers)))

    def caches(self, batch: int, capacity: int) -> KeyValueCaches:
        """Empty caches for `batch` sequences of at most `capacity` tokens.

        They are variables: place them as the module is placed.
        """
        return KeyValueCaches(
            ModuleList(
                KeyValueCache(batch, self.kv_heads, capacity, self.width, self.dtype)
                for _ in self.layers
            )
        )

    def forward(
        self, x: Value, caches: KeyValueCaches | None = None, position: Value | None = None
    ) -> Value:
        if (caches is None) != (position is None):
            raise UsageError(
                "caches of keys and values and a position go together",
                got="a position alone" if caches is None else "caches alone",
            )
        kept = [None] * len(self.layers) if caches is None else list(caches.layers)
        if len(kept) != len(self.layers):
            raise UsageError(
                "every layer needs a cache", got=len(kept), expected=f"{len(self.layers)} caches"
            )
        for layer, cache in zip(self.layers, kept, strict=True):
            x = layer(x, cache=cache, position=position)
        return x


def _norm(
    kind: str | None, dim: int, dtype: DType | str
) -> tuple[Parameter | None, Parameter | None]:
    if kind not in ("layer", "rms", None):
        raise AttributeValueError("unknown norm", got=repr(kind), expected="'layer', 'rms' or None")
    weight = None if kind is None else Parameter((dim,), dtype, "ones")
    return weight, Parameter((dim,), dtype) if kind == "layer" else None


def _values(*parameters: Parameter | None) -> list[Value] | None:
    return [each.value for each in parameters if each is not None] or None


def _check_rates(**rates: float) -> None:
    for name, rate in rates.items():
        if not 0.0 <= rate < 1.0:
            raise AttributeValueError(
                f"{name} is a probability below one", got=rate, expected=f"0 <= {name} < 1"
            )
