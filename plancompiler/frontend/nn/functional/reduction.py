"""How losses are reduced."""

from __future__ import annotations

from plancompiler.errors import AttributeValueError
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.ops.gradient import widened


def check_reduction(reduction: str, *more: str) -> None:
    """AttributeValueError for an unknown reduction."""
    known = ("none", "mean", "sum", *more)
    if reduction not in known:
        raise AttributeValueError(
            "unknown reduction of a loss", got=repr(reduction), expected=", ".join(known)
        )


def reduced(losses: Tensor, reduction: str) -> Tensor:
    """Losses as `reduction` says: "none", "mean" or "sum". Those of 16 bits are added up in
    float32.
    """
    check_reduction(reduction)
    if reduction == "none":
        return losses
    wide: Tensor = widened(losses)
    loss = wide.mean() if reduction == "mean" else wide.sum()
    return loss if loss.dtype is losses.dtype else loss.cast(losses.dtype)
