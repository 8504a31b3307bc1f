"""The parts of transformers: attention in tiles, rotary positions, gated units."""

from __future__ import annotations

from plancompiler.frontend.functional import Tensor
from plancompiler.ops.attention import default_scale
from plancompiler.ops.registry import apply


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale q kᵀ) v of q [b, h, t, d], k [b, g, s, d] and v [b, g, s, e]: [b, h, t, e].

    Each of the g heads of keys serves h / g neighbouring heads of queries. With `causal`, a query
    sees no keys after it, and the last query sees all (t <= s). `scale` is 1 / sqrt(d) by default.
    Scores are made in tiles, so memory grows with the sequence, not with its square (T. Dao et al.,
    2022). Batch, heads of keys and queries split over devices.
    """
    chosen = default_scale(query.shape[-1]) if scale is None else float(scale)
    found: Tensor = apply("attention", query, key, value, causal=causal, scale=chosen)[0]
    return found


def rotary_embedding(
    x: Tensor, base: float = 10000.0, offset: int = 0, interleaved: bool = False
) -> Tensor:
    """Pairs of features of x [..., t, d] turned by position * base ** (-2 i / d) (J. Su et al.,
    2021).

    Positions count from `offset` along the axis before the last, over the whole tensor where it is
    split. Pairs are features i and i + d / 2, or neighbours where `interleaved`.
    """
    found: Tensor = apply(
        "rotary_embedding", x, base=float(base), offset=offset, interleaved=interleaved
    )
    return found


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate * sigmoid(gate) * up, of tensors of one shape (N. Shazeer, 2020)."""
    found: Tensor = apply("swiglu", gate, up)
    return found
