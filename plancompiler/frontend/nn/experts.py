"""A mixture of experts in place of a feed-forward part."""

from __future__ import annotations

import math

from plancompiler.errors import AttributeValueError
from plancompiler.frontend.functions.activation import softmax
from plancompiler.frontend.functions.experts import (
    expert_places,
    gather_rows,
    grouped_matmul,
    scatter_rows,
)
from plancompiler.frontend.functions.reduction import topk
from plancompiler.frontend.nn.layers import Linear
from plancompiler.frontend.nn.module import Module, Parameter
from plancompiler.ir import DType, Value


class MixtureOfExperts(Module):
    """x [..., dim]: each token through the `top_k` of `experts` feed-forward parts that a router
    prefers, added up by the router's shares of these (N. Shazeer et al., 2017).

    Experts form `pieces`, and parameters `up` and `down` [experts, ...] are split by `S(0)` along
    the mesh axis of the experts, of which the pieces are a multiple. A piece has room for
    `capacity_factor` times its even share of all rows, or without a factor for all of them; more
    rows fail the step, or with `overflow="drop"` the last are left out. AttributeValueError for
    sizes that do not go together.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        top_k: int = 2,
        pieces: int = 1,
        capacity_factor: float | None = None,
        overflow: str = "error",
        dtype: DType | str = "float32",
    ) -> None:
        if not 1 <= top_k <= experts or pieces < 1 or experts % pieces:
            raise AttributeValueError(
                "a mixture needs as many experts in each piece, and no more choices than experts",
                got=f"{experts} experts, {pieces} pieces, top_k {top_k}",
            )
        if capacity_factor is not None and not capacity_factor > 0:
            raise AttributeValueError(
                "the capacity factor of a mixture is a positive number", got=repr(capacity_factor)
            )
        self.experts, self.top_k, self.pieces = experts, top_k, pieces
        self.capacity_factor, self.overflow = capacity_factor, overflow
        self.router = Linear(dim, experts, bias=False, dtype=dtype)
        self.up = self._weight(dim, hidden, dtype)
        self.down = self._weight(hidden, dim, dtype)

    def _weight(self, rows: int, columns: int, dtype: DType | str) -> Parameter:
        bound = 1.0 / math.sqrt(max(1, rows))
        return Parameter((self.experts, rows, columns), dtype, "uniform", (-bound, bound))

    def forward(self, x: Value) -> Value:
        tokens, dim = math.prod(x.shape[:-1]), x.shape[-1]
        flat = x.reshape(tokens, dim)
        shares, chosen = topk(softmax(self.router(flat), axis=-1), self.top_k)
        shares = shares / shares.sum(-1, keepdims=True)
        bound = tokens * self.top_k
        if self.capacity_factor is not None:
            bound = min(bound, math.ceil(self.capacity_factor * bound / self.pieces))
        places, counts = expert_places(chosen, self.experts, bound, self.pieces, self.overflow)
        rows = scatter_rows(flat.reshape(tokens, 1, dim), places, self.pieces, bound)
        up, down = (
            weight.value.reshape(self.pieces, self.experts // self.pieces, *weight.shape[1:])
            for weight in (self.up, self.down)
        )
        rows = grouped_matmul(grouped_matmul(rows, counts, up).gelu(), counts, down)
        back = gather_rows(rows, places)
        mixed: Value = (back * shares.reshape(tokens, self.top_k, 1)).sum(1).reshape(x.shape)
        return mixed
