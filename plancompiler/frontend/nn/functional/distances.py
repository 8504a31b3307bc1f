"""Distances between vectors, and losses that compare distances, as PyTorch has them."""

from __future__ import annotations

from collections.abc import Callable

from plancompiler.frontend.functions.assembly import broadcast_tensors
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.elementwise import maximum, minimum
from plancompiler.frontend.functions.reduction import norm
from plancompiler.frontend.nn.functional.public import public
from plancompiler.frontend.nn.functional.reduction import reduced


@public
def pairwise_distance(
    x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    """The p-norm of x1 - x2 + eps along the last axis."""
    return norm(x1 - x2 + eps, p, -1, keepdim)


@public
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The cosine of x1 and x2 along an axis; no length counts as less than `eps`. Shapes
    broadcast.
    """

    def unit(x: Tensor) -> Tensor:
        length: Tensor = maximum(norm(x, 2.0, dim, True), eps)
        return x / length

    # Both first: an axis of extent 1 is as long as what it is broadcast to.
    one, other = broadcast_tensors(x1, x2)
    return (unit(one) * unit(other)).sum(dim)


@public
def normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """The input over its p-norm along an axis, which counts as at least `eps`."""
    length: Tensor = maximum(norm(input, p, dim, True), eps)
    return input / length


@public
def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    *,
    reduction: str = "mean",
) -> Tensor:
    """max(0, margin + |anchor - positive| - |anchor - negative|) in the p-norm of the last axis (V.
    Balntas et al., 2016). With `swap` the negative is also compared with the positive, and the
    nearer counts.
    """

    def distance(x: Tensor, y: Tensor) -> Tensor:
        return pairwise_distance(x, y, float(p), eps)

    return _triplets(anchor, positive, negative, distance, margin, swap, reduction)


@public
def triplet_margin_with_distance_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    distance_function: Callable[[Tensor, Tensor], Tensor] | None = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """`triplet_margin_loss` with a distance of two tensors that the caller gives."""
    distance = pairwise_distance if distance_function is None else distance_function
    return _triplets(anchor, positive, negative, distance, margin, swap, reduction)


def _triplets(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    distance: Callable[[Tensor, Tensor], Tensor],
    margin: float,
    swap: bool,
    reduction: str,
) -> Tensor:
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = minimum(far, distance(positive, negative))
    return reduced((near - far + margin).relu(), reduction)
