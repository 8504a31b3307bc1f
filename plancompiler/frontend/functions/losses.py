"""Losses beside `cross_entropy`.

`reduction` is "mean", "sum" or "none" (one loss per element, or per row of classes).
"""

from __future__ import annotations

from plancompiler.errors import AttributeValueError
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.elementwise import maximum
from plancompiler.frontend.out import takes_out
from plancompiler.ir import DType
from plancompiler.ops import split_softmax
from plancompiler.ops.gradient import widened
from plancompiler.ops.registry import apply, apply_one

__all__ = [
    "accuracy",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "nll_loss",
    "smooth_l1_loss",
]


def _pointwise(
    name: str, kind: str, x: Tensor, target: Tensor, reduction: str, *more: str, **attrs: float
) -> Tensor:
    """Losses of elements by op `kind`, reduced. Of 16 bits, those that are added up are float32:
    an element may leave their range where the mean does not.
    """
    if reduction == "none":
        return apply_one(kind, x, target, **attrs)
    if reduction not in ("mean", "sum", *more):
        raise AttributeValueError(
            f"unknown reduction of {name}",
            got=repr(reduction),
            expected=", ".join(("mean", "sum", "none", *more)),
        )
    losses: Tensor = apply(kind, widened(x), widened(target), **attrs)
    loss = losses.mean() if reduction == "mean" else losses.sum()
    if reduction == "batchmean":
        loss = loss * (1.0 / max(1, losses.shape[0]))
    return loss if loss.dtype is x.dtype else loss.cast(x.dtype)


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


@takes_out
def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    split_classes: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """-log softmax(logits)[label], of logits [..., classes] and integer labels [...].

    Positions whose label is `ignore_index` have no loss and do not count; None says that every
    position counts, which saves counting. `reduction` is "mean" (over the positions that count),
    "sum" or "none" (one loss per position). Any other label that is no class fails the run.

    With `split_classes` the classes may be split over devices, as a tensor-parallel last layer
    leaves them: three numbers per position are reduced, and neither logits nor their gradients are
    gathered.
    """
    if reduction not in ("mean", "sum", "none"):
        raise AttributeValueError(
            "unknown reduction of cross_entropy", got=repr(reduction), expected="mean, sum or none"
        )
    losses: Tensor
    if split_classes:
        attrs = {} if ignore_index is None else {"ignore_index": ignore_index}
        losses = split_softmax.split_cross_entropy(logits, labels, **attrs)
    elif ignore_index is None:
        losses = apply("cross_entropy", logits, labels)
    else:
        losses = apply("cross_entropy", logits, labels, ignore_index=ignore_index)
    return reduce_rows(losses, labels, reduction, ignore_index, logits.dtype)


def reduce_rows(
    losses: Tensor, labels: Tensor, reduction: str, ignore_index: int | None, dtype: DType
) -> Tensor:
    """Losses of rows as `reduction` says, rounded to `dtype`: their "mean" is over the rows whose
    label is not `ignore_index`. Those of 16 bits are added up and counted in float32.
    """
    loss: Tensor = losses if reduction == "none" else widened(losses)
    if reduction == "sum" or (reduction == "mean" and ignore_index is None):
        loss = loss.sum() if reduction == "sum" else loss.mean()
    elif reduction == "mean":
        counted = labels.not_equal(ignore_index).cast(loss.dtype).sum()
        loss = loss.sum() / maximum(counted, 1.0)
    return loss if loss.dtype is dtype else loss.cast(dtype)


@takes_out
def accuracy(logits: Tensor, labels: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Share of positions whose greatest logit (last axis) is the label's: a float32 scalar."""
    predicted = logits.argmax(-1)
    return predicted.equal(labels.cast(predicted.dtype)).cast(DType.FLOAT32).mean()
