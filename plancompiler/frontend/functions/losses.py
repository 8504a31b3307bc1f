"""Losses beside `cross_entropy`.

`reduction` is "mean", "sum" or "none" (one loss per element, or per row of classes).
"""

from __future__ import annotations

from plancompiler.errors import AttributeValueError
from plancompiler.frontend.functional import Tensor, reduce_rows
from plancompiler.frontend.out import takes_out
from plancompiler.ops.gradient import widened
from plancompiler.ops.registry import apply


def _pointwise(
    name: str, kind: str, x: Tensor, target: Tensor, reduction: str, *more: str, **attrs: float
) -> Tensor:
    """Losses of elements by op `kind`, reduced. Of 16 bits, those that are added up are float32:
    an element may leave their range where the mean does not.
    """
    if reduction == "none":
        plain: Tensor = apply(kind, x, target, **attrs)
        return plain
    if reduction not in ("mean", "sum", *more):
        raise AttributeValueError(
            f"unknown reduction of {name}",
            got=repr(reduction),
            expected=", ".join(("mean", "sum", "none", *more)),
        )
    losses: Tensor = apply(kind, widened(x), widened(target), **attrs)
    found = losses.mean() if reduction == "mean" else losses.sum()
    if reduction == "batchmean":
        found = found * (1.0 / max(1, losses.shape[0]))
    return found if found.dtype is x.dtype else found.cast(x.dtype)


@takes_out
def mse_loss(
    prediction: Tensor, target: Tensor, reduction: str = "mean", *, out: Tensor | None = None
) -> Tensor:
    """(prediction - target)², of tensors of one shape."""
    return _pointwise("mse_loss", "mse_loss", prediction, target, reduction)


@takes_out
def l1_loss(
    prediction: Tensor, target: Tensor, reduction: str = "mean", *, out: Tensor | None = None
) -> Tensor:
    """|prediction - target|, of tensors of one shape."""
    return _pointwise("l1_loss", "l1_loss", prediction, target, reduction)


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
    kind = "smooth_l1_loss"
    return _pointwise(kind, kind, prediction, target, reduction, beta=float(beta))


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
    kind = "huber_loss"
    return _pointwise(kind, kind, prediction, target, reduction, delta=float(delta))


@takes_out
def binary_cross_entropy(
    prediction: Tensor, target: Tensor, reduction: str = "mean", *, out: Tensor | None = None
) -> Tensor:
    """-(target log p + (1 - target) log(1 - p)) of probabilities p; logarithms not below -100."""
    return _pointwise("binary_cross_entropy", "bce_loss", prediction, target, reduction)


@takes_out
def binary_cross_entropy_with_logits(
    logits: Tensor, target: Tensor, reduction: str = "mean", *, out: Tensor | None = None
) -> Tensor:
    """Binary cross-entropy of sigmoid(logits), computed without overflow."""
    name = "binary_cross_entropy_with_logits"
    return _pointwise(name, "bce_with_logits", logits, target, reduction)


@takes_out
def kl_div(
    log_probabilities: Tensor, target: Tensor, reduction: str = "mean", *, out: Tensor | None = None
) -> Tensor:
    """Kullback-Leibler divergence target * (log target - log_probabilities) of probabilities
    `target`; zero where these are. `reduction` may also be "batchmean": the sum over the extent of
    the first axis.
    """
    more = ("batchmean",) if log_probabilities.ndim else ()
    return _pointwise("kl_div", "kl_div", log_probabilities, target, reduction, *more)


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
    if reduction not in ("mean", "sum", "none"):
        raise AttributeValueError(
            "unknown reduction of nll_loss", got=repr(reduction), expected="mean, sum, none"
        )
    losses: Tensor = apply("nll_loss", log_probabilities, labels, **attrs)
    return reduce_rows(losses, labels, reduction, ignore_index, losses.dtype)
