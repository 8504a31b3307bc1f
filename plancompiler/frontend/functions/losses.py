"""Losses beside `cross_entropy`.

`reduction` is "mean", "sum" or "none" (one loss per element, or per row of classes).
"""

from __future__ import annotations

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.elementwise import maximum, where
from plancompiler.frontend.out import takes_out
from plancompiler.ir import DType
from plancompiler.ir.operators import normalize_axes
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
    axis: int = -1,
    weight: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """-log_probabilities[label], of log-probabilities [..., classes] and integer labels [...].

    Positions whose label is `ignore_index` have no loss and do not count; None says that every
    position counts. `axis` is that of the classes, which may be split over devices. With `weight`
    [classes] losses are multiplied by the weight of their label, and the mean divides by the sum of
    these weights. Any other label that is no class fails the run.
    """
    _check_reduction("nll_loss", reduction)
    logs = classes_last(log_probabilities, axis)
    losses, counts = nll_rows(logs, labels, ignore_index, weight)
    if counts is not None:
        return weighted_mean(losses, counts, reduction, logs.dtype)
    return reduce_rows(losses, labels, reduction, ignore_index, losses.dtype)


@takes_out
def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    split_classes: bool = False,
    *,
    axis: int = -1,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """-log softmax(logits)[label], of logits [..., classes] and integer labels [...].

    Positions whose label is `ignore_index` have no loss and do not count; None says that every
    position counts, which saves counting. `reduction` is "mean" (over the positions that count),
    "sum" or "none" (one loss per position). Any other label that is no class fails the run.

    With `split_classes` the classes may be split over devices, as a tensor-parallel last layer
    leaves them: numbers per position are reduced, and neither logits nor their gradients are
    gathered.

    `axis` is that of the classes; labels have all other axes. Labels of the shape and dtype of the
    logits are probabilities of the classes, all of which count. With `weight` [classes] each class
    counts so much, and the mean over labels divides by the sum of their weights. A share
    `label_smoothing` of each label is spread evenly over all classes (C. Szegedy et al., 2016).
    """
    _check_reduction("cross_entropy", reduction)
    if axis != -1:
        logits = classes_last(logits, axis)
        labels = classes_last(labels, axis) if labels.dtype.is_floating else labels
    if weight is not None or label_smoothing or labels.dtype.is_floating:
        losses, counts = class_losses(
            logits, labels, ignore_index, weight, label_smoothing, split_classes
        )
        return weighted_mean(losses, counts, reduction, logits.dtype)
    losses = label_losses(logits, labels, ignore_index, split_classes)
    return reduce_rows(losses, labels, reduction, ignore_index, logits.dtype)


def _check_reduction(name: str, reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise AttributeValueError(
            f"unknown reduction of {name}", got=repr(reduction), expected="mean, sum or none"
        )


def classes_last(x: Tensor, axis: int) -> Tensor:
    """The axis of the classes moved to the end."""
    at = normalize_axes(axis, x.ndim)[0]
    if at == x.ndim - 1:
        return x
    return x.transpose([*(each for each in range(x.ndim) if each != at), at])


def label_losses(
    logits: Tensor, labels: Tensor, ignore_index: int | None, split_classes: bool
) -> Tensor:
    """One loss for each label, in at least float32."""
    attrs = {} if ignore_index is None else {"ignore_index": ignore_index}
    losses: Tensor
    if split_classes:
        losses = split_softmax.split_cross_entropy(logits, labels, **attrs)
    else:
        losses = apply("cross_entropy", logits, labels, **attrs)
    return losses


def nll_rows(
    logs: Tensor, labels: Tensor, ignore_index: int | None, weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """For each label its loss, and with weights the weight of it, which has been counted in."""
    attrs = {} if ignore_index is None else {"ignore_index": ignore_index}
    losses: Tensor = apply("nll_loss", logs, labels, **attrs)
    if weight is None:
        return losses, None
    if weight.shape != logs.shape[-1:]:
        raise ShapeError(
            "losses of classes need a weight for each class",
            got=weight.shape,
            expected=logs.shape[-1:],
        )
    negated = -(weight if weight.dtype is logs.dtype else weight.cast(logs.dtype))
    spread: Tensor = apply("expand_to", negated, shape=logs.shape)
    counts: Tensor = apply("nll_loss", spread, labels, **attrs)
    return losses * counts, counts


def class_losses(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int | None,
    weight: Tensor | None,
    label_smoothing: float,
    split_classes: bool,
) -> tuple[Tensor, Tensor | None]:
    """Losses of positions with weights of classes, smooth labels, or probabilities as labels; and
    by what a mean divides, position by position (None: one each).
    """
    if not 0.0 <= label_smoothing <= 1.0:
        raise AttributeValueError(
            "label smoothing is a share", got=label_smoothing, expected="0 to 1"
        )
    wide: Tensor = widened(logits)
    classes = wide.shape[-1]
    logs: Tensor
    if split_classes:
        logs = split_softmax.split_log_softmax(wide, wide.ndim - 1)
    else:
        logs = wide.log_softmax(-1)
    share = label_smoothing / max(1, classes)
    weighted = logs if weight is None else logs * weight.cast(logs.dtype)
    if labels.dtype.is_floating:
        if labels.shape != logits.shape:
            raise ShapeError(
                "probabilities of classes need the shape of the logits",
                got=labels.shape,
                expected=logits.shape,
            )
        target = labels if labels.dtype is logs.dtype else labels.cast(logs.dtype)
        if label_smoothing:
            target = target * (1.0 - label_smoothing) + share
        return -(weighted * target).sum(-1), None
    losses, counts = nll_rows(logs, labels, ignore_index, weight)
    if ignore_index is not None:
        counted = labels.not_equal(ignore_index).cast(logs.dtype)
        counts = counted if counts is None else counts
        if label_smoothing:
            smooth = -weighted.sum(-1) * counted
            losses = losses * (1.0 - label_smoothing) + smooth * share
    elif label_smoothing:
        losses = losses * (1.0 - label_smoothing) - weighted.sum(-1) * share
    return losses, counts


def weighted_mean(losses: Tensor, counts: Tensor | None, reduction: str, dtype: DType) -> Tensor:
    """Losses of positions as `reduction` says, rounded to `dtype`: their "mean" divides by the sum
    of `counts`; of nothing it is 0. Those of 16 bits are added up in float32.
    """
    loss: Tensor = losses if reduction == "none" else widened(losses)
    if reduction == "sum":
        loss = loss.sum()
    elif reduction == "mean" and counts is None:
        loss = loss.mean()
    elif reduction == "mean" and counts is not None:
        total = widened(counts).sum()
        loss = loss.sum() / where(total.equal(0), 1.0, total)
    return loss if loss.dtype is dtype else loss.cast(dtype)


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
