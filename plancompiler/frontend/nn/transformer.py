"""The parts of transformers: causal self-attention, perceptrons, and the pre-norm block of GPT.

Tensor parallelism in the layout of Megatron-LM (Shoeybi et al., 2019) needs no communication
inside a part: with the weights of `query`, `key`, `value` and `fc1` split along their outputs,
`S(0)`, heads and hidden units are split; with `projection` and `fc2` split along their inputs,
`S(1)`, results come out partial and are reduced once.
"""

from __future__ import annotations

from plancompiler.errors import AttributeValueError
from plancompiler.frontend.functions.attention import scaled_dot_product_attention, swiglu
from plancompiler.frontend.nn.layers import Dropout, LayerNorm, Linear
from plancompiler.frontend.nn.module import Module
from plancompiler.ir import DType, Value


class CausalSelfAttention(Module):
    """Multi-head attention of x [batch, length, dim] to itself, no position seeing later ones.

    With `zigzag=n` the sequence is in the order that `pc.zigzag` gives it for n devices.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        dropout: float = 0.0,
        dtype: DType | str = "float32",
        std: float | None = None,
        projection_std: float | None = None,
        zigzag: int = 0,
    ) -> None:
        if heads < 1 or dim % heads:
            raise AttributeValueError(
                "the heads must divide the dimension evenly", got=f"dim {dim}, {heads} heads"
            )
        self.heads, self.zigzag = heads, zigzag
        self.query = Linear(dim, dim, dtype=dtype, std=std)
        self.key = Linear(dim, dim, dtype=dtype, std=std)
        self.value = Linear(dim, dim, dtype=dtype, std=std)
        self.projection = Linear(dim, dim, dtype=dtype, std=projection_std or std)
        self.dropout = Dropout(dropout)

    def forward(self, x: Value) -> Value:
        batch, length, dim = x.shape
        query, key, value = (
            layer(x).reshape(batch, length, self.heads, dim // self.heads).transpose(0, 2, 1, 3)
            for layer in (self.query, self.key, self.value)
        )
        mixed = scaled_dot_product_attention(query, key, value, causal=True, zigzag=self.zigzag)
        joined = mixed.transpose(0, 2, 1, 3).reshape(batch, length, dim)
        output: Value = self.dropout(self.projection(joined))
        return output


class MLP(Module):
    """x [..., dim] through a hidden layer with GELU and back to [..., dim]."""

    def __init__(
        self,
        dim: int,
        hidden: int,
        dropout: float = 0.0,
        dtype: DType | str = "float32",
        std: float | None = None,
        projection_std: float | None = None,
    ) -> None:
        self.fc1 = Linear(dim, hidden, dtype=dtype, std=std)
        self.fc2 = Linear(hidden, dim, dtype=dtype, std=projection_std or std)
        self.dropout = Dropout(dropout)

    def forward(self, x: Value) -> Value:
        output: Value = self.dropout(self.fc2(self.fc1(x).gelu()))
        return output


class SwiGLU(Module):
    """x [..., dim] through a hidden layer with a gate, silu(gate(x)) * up(x), and back by `down`
    (N. Shazeer, 2020).

    Tensor parallelism is that of `MLP`: `gate` and `up` as `fc1`, `down` as `fc2`.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        dropout: float = 0.0,
        bias: bool = False,
        dtype: DType | str = "float32",
        std: float | None = None,
        projection_std: float | None = None,
    ) -> None:
        self.gate = Linear(dim, hidden, bias, dtype, std)
        self.up = Linear(dim, hidden, bias, dtype, std)
        self.down = Linear(hidden, dim, bias, dtype, projection_std or std)
        self.dropout = Dropout(dropout)

    def forward(self, x: Value) -> Value:
        output: Value = self.dropout(self.down(swiglu(self.gate(x), self.up(x))))
        return output


class TransformerBlock(Module):
    """x + attention(norm1(x)), then + mlp(norm2(...)): the pre-norm block of GPT-2.

    `hidden` defaults to 4 * dim. `std` and `projection_std` are the standard deviations with
    which weights start: the latter for those that write to the residual stream. `zigzag` as in
    `CausalSelfAttention`.
    """

    recomputable = True

    def __init__(
        self,
        dim: int,
        heads: int,
        dropout: float = 0.0,
        hidden: int | None = None,
        dtype: DType | str = "float32",
        std: float | None = None,
        projection_std: float | None = None,
        zigzag: int = 0,
    ) -> None:
        self.norm1 = LayerNorm(dim, dtype=dtype)
        self.attention = CausalSelfAttention(
            dim, heads, dropout, dtype, std, projection_std, zigzag
        )
        self.norm2 = LayerNorm(dim, dtype=dtype)
        self.mlp = MLP(dim, hidden or 4 * dim, dropout, dtype, std, projection_std)

    def forward(self, x: Value) -> Value:
        x = x + self.attention(self.norm1(x))
        output: Value = x + self.mlp(self.norm2(x))
        return output
