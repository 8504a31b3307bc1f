"""Losses beside `cross_entropy`.

`reduction` is "mean", "sum" or "none" (one loss per element, or per row of classes).
"""

from __future__ import annotations

from plancompiler.errors import AttributeValueError
from plancompiler.frontend.functional import Tensor, maximum
from plancompiler.frontend.out import takes_out
from plancompiler.ops.registry import apply


def _reduced(losses: Tensor, reduction: str, kind: str, *more: str) -> Tensor:
    if reduction == "mean":
        return losses.mean()
    if reduction == "sum":
        return losses.sum()
    if reduction == "none":
        return losses
    raise AttributeValueError(
        f"unknown reduction of {kind}",
        got=repr(reduction),
        expected=", ".join(("mean", "sum", "none", *more)),
    )


def _pointwise(kind: str, x: Tensor, target: Tensor, **attrs: float) -> Tensor:
    found: Tensor = apply(kind, x, target, **attrs)
    return found


@takes_out
def mse_loss(
    prediction: Tensor, target: Tensor, reduction: str = "mean", *, out: Tensor | None = None
) -> Tensor:
    """(prediction - target)², of tensors of one shape."""
    return _reduced(_pointwise("mse_loss", prediction, target), reduction, "mse_loss")


@takes_out
def l1_loss(
    prediction: Tensor, target: Tensor, reduction: str = "mean", *, out: Tensor | None = None
) -> Tensor:
    """|prediction - target|, of tensors of one shape."""
    return _reduced(_pointwise("l1_loss", prediction, target), reduction, "l1_loss")


@takes_out
def smooth_l1_loss(
    prediction: Tensor,
    target: Tensor,
    beta: float = 1.0,
    reduction: str = "mean",
    *,
    out: Tensor | None = None,
) -> Tensor:
    """With d = |prediction - target|: d² / (2 beta) where d < beta, else d - beta / 2."""
    losses = _pointwise("smooth_l1_loss", prediction, target, beta=float(beta))
    return _reduced(losses, reduction, "smooth_l1_loss")


@takes_out
def huber_loss(
    prediction: Tensor,
    target: Tensor,
    delta: float = 1.0,
    reduction: str = "mean",
    *,
    out: Tensor | None = None,
) -> Tensor:
    """With d = |prediction - target|: d² / 2 where d < delta, else delta (d - delta / 2) (P. J.
    Huber, 1964).
    """
    losses = _pointwise("huber_loss", prediction, target, delta=float(delta))
    return _reduced(losses, reduction, "huber_loss")


@takes_out
def binary_cross_entropy(
    prediction: Tensor, target: Tensor, reduction: str = "mean", *, out: Tensor | None = None
) -> Tensor:
    """-(target log p + (1 - target) log(1 - p)) of probabilities p; logarithms not below -100."""
    return _reduced(_pointwise("bce_loss", prediction, target), reduction, "binary_cross_entropy")


@takes_out
def binary_cross_entropy_with_logits(
    logits: Tensor, target: Tensor, reduction: str = "mean", *, out: Tensor | None = None
) -> Tensor:
    """Binary cross-entropy of sigmoid(logits), computed without overflow."""
    losses = _pointwise("bce_with_logits", logits, target)
    return _reduced(losses, reduction, "binary_cross_entropy_with_logits")


@takes_out
def kl_div(
    log_probabilities: Tensor, target: Tensor, reduction: str = "mean", *, out: Tensor | None = None
) -> Tensor:
    """Kullback-Leibler divergence target * (log target - log_probabilities) of probabilities
    `target`; zero where these are. `reduction` may also be "batchmean": the sum over the extent of
    the first axis.
    """
    losses = _pointwise("kl_div", log_probabilities, target)
    if reduction == "batchmean" and losses.ndim:
        return losses.sum() * (1.0 / losses.shape[0])
    return _reduced(losses, reduction, "kl_div", "batchmean")


@takes_out
def nll_loss(
    log_probabilities: Tensor,
    labels: Tensor,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """-log_probabilities[label], of log-probabilities [..., classes] and integer labels [...].

    Positions whose label is `ignore_index` have no loss and do not count; None says that every
    position counts. The classes may be split over devices. Any other label that is no class fails
    the run.
    """
    attrs = {} if ignore_index is None else {"ignore_index": ignore_index}
    losses: Tensor = apply("nll_loss", log_probabilities, labels, **attrs)
    if reduction != "mean" or ignore_index is None:
        return _reduced(losses, reduction, "nll_loss")
    counted = labels.not_equal(ignore_index).cast(losses.dtype).sum()
    found: Tensor = losses.sum() / maximum(counted, 1.0)
    return found
