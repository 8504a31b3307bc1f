"""The rule of ONNX's attention, where it is what `pc.scaled_dot_product_attention` computes.

What that function does not have, such as caches, capped scores and scores as a result, is left to
the standard's own description of the operator with others.
"""

from __future__ import annotations

from typing import Any

from plancompiler.frontend import functions as f
from plancompiler.importers.onnx_rules import as_tensor
from plancompiler.importers.rules import onnx_rule
from plancompiler.ir import DType


def _heads(x: Any, count: int) -> Any:
    """[batch, length, features] as [batch, heads, length, features of a head]."""
    if x.ndim == 4:
        return x
    batch, length, features = x.shape
    return x.reshape([batch, length, count, features // count]).transpose([0, 2, 1, 3])


@onnx_rule("Attention", since=23)
def _attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    lengths: Any = None,
    is_causal: int = 0,
    kv_num_heads: int = 0,
    q_num_heads: int = 0,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int = 0,
    outputs: int = 1,
    **more: Any,
) -> Any:
    if (
        more
        or softcap
        or outputs > 1
        or any(each is not None for each in (past_key, past_value, lengths))
    ):
        return NotImplemented
    flat = query.ndim == 3
    q = _heads(query, q_num_heads)
    k, v = _heads(key, kv_num_heads), _heads(value, kv_num_heads)
    if mask is not None:
        if mask.shape[-1] != k.shape[2] or mask.dtype is DType.BOOL:
            # A query that sees no key is treated as the standard says.
            return NotImplemented
        mask = as_tensor(mask, q)
        mask = mask.reshape([*[1] * (4 - mask.ndim), *mask.shape])
    made = f.scaled_dot_product_attention(q, k, v, causal=bool(is_causal), scale=scale, mask=mask)
    if not flat:
        return made
    batch, heads, length, size = made.shape
    return made.transpose([0, 2, 1, 3]).reshape([batch, length, heads * size])
