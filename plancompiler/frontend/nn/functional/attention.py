"""Attention, with PyTorch's arguments."""

from __future__ import annotations

import math

from plancompiler.errors import ShapeError
from plancompiler.frontend.functions import attention as ours
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.elementwise import where
from plancompiler.frontend.functions.shape import expand
from plancompiler.frontend.nn.functional.public import public
from plancompiler.ir import DType
from plancompiler.ir.operators import filled
from plancompiler.ops.check import broadcast_shapes


def additive(mask: Tensor, dtype: DType) -> Tensor:
    """A mask as what is added to scores: of truth values, -inf where there is False."""
    if mask.dtype is DType.BOOL:
        zeros: Tensor = filled(mask, 0.0, (), dtype)
        return where(mask, zeros, -math.inf)
    return mask if mask.dtype is dtype else mask.cast(dtype)


def _on_one_batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values whose batch axes are equal, and heads, where one head is all."""
    given = (query, key, value)
    leads = [each.shape[:-2] for each in given]
    if len(set(leads)) == 1:
        return given
    batch = broadcast_shapes("attention", [lead[:-1] for lead in leads])
    heads = [lead[-1] if lead else 1 for lead in leads]
    most = max(heads[1:])
    wanted = (max(heads) if heads[0] == 1 else heads[0], most, most)
    lengths = [(*batch, count) if any(leads) else () for count in wanted]
    query, key, value = (
        each if each.shape[:-2] == lead else expand(each, (*lead, *each.shape[-2:]))
        for each, lead in zip(given, lengths, strict=True)
    )
    return query, key, value


@public
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale q kᵀ + mask) v of q [..., t, d], k [..., s, d] and v [..., s, e], which have
    one to four axes; batch axes broadcast. A mask of truth values hides keys where it is False.
    Heads of keys serve as many heads of queries each, whether or not `enable_gqa` says so. See
    `pc.scaled_dot_product_attention`.
    """

    query, key, value = _on_one_batch(query, key, value)

    def four_axes(x: Tensor) -> Tensor:
        if x.ndim < 2:
            raise ShapeError("attention needs lengths and features", got=x.shape)
        lead = x.shape[:-2]
        if len(lead) == 2:
            return x
        outer = (1, *lead[-1:]) if len(lead) < 2 else (math.prod(lead[:-1]), lead[-1])
        return x.reshape((*((1, 1) if not lead else outer), *x.shape[-2:]))

    shape = query.shape
    mask = None
    if attn_mask is not None:
        mask = additive(attn_mask, query.dtype)
        if mask.ndim > 4 or (mask.ndim == 3 and query.ndim == 3):
            mask = four_axes(mask)
    attended = ours.scaled_dot_product_attention(
        four_axes(query), four_axes(key), four_axes(value), is_causal, scale, mask, dropout_p
    )
    return attended.reshape((*shape[:-1], value.shape[-1]))
