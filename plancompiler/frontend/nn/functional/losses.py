"""Losses of predictions against targets, with PyTorch's names, arguments and results.

`reduction` is "mean", "sum" or "none". Classes are the second axis of [n, classes, ...]; the mean
over no label that counts is not a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from plancompiler.errors import AttributeValueError
from plancompiler.frontend.functions import losses as ours
from plancompiler.frontend.functions.activation import logsigmoid, softplus
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.elementwise import maximum, where
from plancompiler.frontend.functions.indexing import take_along_axis
from plancompiler.frontend.functions.shape import expand
from plancompiler.frontend.nn.functional.public import public
from plancompiler.frontend.nn.functional.reduction import check_reduction, reduced
from plancompiler.frontend.trace import constant
from plancompiler.ir.operators import TensorOperators, filled
from plancompiler.ops.check import broadcast_shapes
from plancompiler.ops.gradient import widened
from plancompiler.ops.registry import apply, apply_one


def like(target: Tensor, x: Tensor) -> Tensor:
    """A target in the dtype of the predictions."""
    return target if target.dtype is x.dtype else target.cast(x.dtype)


def _pair(name: str, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Predictions and targets of one dtype, in the shape to which both broadcast."""
    target = like(target, x)
    if x.shape == target.shape:
        return x, target
    shape = broadcast_shapes(name, [x.shape, target.shape])
    return expand(x, shape), expand(target, shape)


def _weighted(losses: Tensor, weight: Tensor | None, reduction: str) -> Tensor:
    return reduced(losses if weight is None else losses * like(weight, losses), reduction)


# --- classes --------------------------------------------------------------------------------------


def _class_axis(x: Tensor) -> int:
    return 1 if x.ndim > 1 else 0


def _mean_of_rows(
    losses: Tensor, labels: Tensor, counts: Tensor | None, ignore_index: int, reduction: str
) -> Tensor:
    """As `reduction` says; the mean divides by what counts, be it nothing."""
    if reduction != "mean":
        return reduced(losses, reduction)
    total: Tensor = widened(losses).sum()
    if counts is None:
        counts = labels.not_equal(ignore_index).cast(total.dtype)
    mean: Tensor = total / widened(counts).sum()
    return mean


@public
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    split_classes: bool = False,
) -> Tensor:
    """-log softmax(input)[target] of input [n, classes, ...] (or [classes]) and labels [n, ...], or
    probabilities like the input.

    `weight` [classes] says how much each class counts; the mean divides by the weights of the
    labels. `split_classes` and the rest as in `pc.cross_entropy`.
    """
    check_reduction(reduction)
    logits = ours.classes_last(input, _class_axis(input))
    if target.dtype.is_floating:
        labels = ours.classes_last(target, _class_axis(target))
        losses, _ = ours.class_losses(logits, labels, None, weight, label_smoothing, split_classes)
        return _in_dtype(reduced(losses, reduction), input)
    counts: Tensor | None = None
    if weight is None and not label_smoothing:
        losses = ours.label_losses(logits, target, ignore_index, split_classes)
    else:
        losses, counts = ours.class_losses(
            logits, target, ignore_index, weight, label_smoothing, split_classes
        )
    return _in_dtype(_mean_of_rows(losses, target, counts, ignore_index, reduction), input)


def _in_dtype(loss: Tensor, x: Tensor) -> Tensor:
    return loss if loss.dtype is x.dtype else loss.cast(x.dtype)


@public
def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """-input[target] of log-probabilities [n, classes, ...] (or [classes]) and labels [n, ...]; the
    rest as in `cross_entropy`.
    """
    check_reduction(reduction)
    logs = ours.classes_last(input, _class_axis(input))
    losses, counts = ours.nll_rows(logs, target, ignore_index, weight)
    return _in_dtype(_mean_of_rows(losses, target, counts, ignore_index, reduction), input)


@public
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Connectionist temporal classification (A. Graves et al., 2006) of log-probabilities
    [t, n, classes] (or [t, classes]) against targets: one loss per sequence.

    `targets` are [n, s], of each row the first `target_lengths` [n], or all rows one after another
    without what does not count. Each sequence has its first `input_lengths` [n] steps. Lengths
    may be lists, the same on all ranks. The mean
    divides each loss by the length of its target. A target that cannot be spelled in time has an
    infinite loss, or with `zero_infinity` none. ExecutionError for labels that are no classes, or
    the blank.
    """
    check_reduction(reduction)
    steps, sizes = _lengths(log_probs, input_lengths), _lengths(log_probs, target_lengths)
    single = log_probs.ndim == 2
    if single:
        log_probs = log_probs.reshape((log_probs.shape[0], 1, log_probs.shape[1]))
        targets = targets.reshape((1, *targets.shape)) if targets.ndim == 1 else targets
        steps, sizes = steps.reshape((1,)), sizes.reshape((1,))
    if targets.ndim == 1:
        targets = _padded_rows(targets, sizes)
    losses: Tensor = apply("ctc_loss", log_probs, targets, steps, sizes, blank=blank)
    if zero_infinity:
        losses = apply_one("masked", losses, losses.not_equal(math.inf))
    if reduction == "mean":
        losses = losses / maximum(like(sizes, losses), 1.0)
    loss = reduced(losses, reduction)
    return loss.reshape(()) if single and reduction == "none" else loss


def _lengths(beside: Any, given: Any) -> Any:
    """Lengths as a tensor beside another one."""
    if isinstance(given, TensorOperators):
        return given
    return constant(given, "int64", beside.placement)


def _padded_rows(rows: Tensor, sizes: Tensor) -> Tensor:
    """Rows of these sizes, one after another, as a matrix; no row can be longer than all."""
    most = rows.shape[0]
    sizes = sizes.cast("int64")
    starts = apply_one("cumsum", sizes, axis=0) - sizes
    ones = filled(rows, 1, (most,), sizes.dtype)
    places = starts.reshape((-1, 1)) + (apply_one("cumsum", ones, axis=0) - 1)
    flat = apply_one("minimum_scalar", places, scalar=max(0, most - 1)).reshape((-1,))
    taken = apply_one("index_select", rows, flat, axis=0)
    return taken.reshape((sizes.shape[0], most))


# --- elements -------------------------------------------------------------------------------------


@public
def l1_loss(
    input: Tensor, target: Tensor, *, reduction: str = "mean", weight: Tensor | None = None
) -> Tensor:
    """|input - target|."""
    return _weighted(apply_one("l1_loss", *_pair("l1_loss", input, target)), weight, reduction)


@public
def mse_loss(
    input: Tensor, target: Tensor, *, reduction: str = "mean", weight: Tensor | None = None
) -> Tensor:
    """(input - target)²."""
    return _weighted(apply_one("mse_loss", *_pair("mse_loss", input, target)), weight, reduction)


@public
def smooth_l1_loss(
    input: Tensor, target: Tensor, *, reduction: str = "mean", beta: float = 1.0
) -> Tensor:
    """With d = |input - target|: d² / (2 beta) where d < beta, else d - beta / 2; for beta = 0 it
    is `l1_loss`.
    """
    if beta == 0:
        return l1_loss(input, target, reduction=reduction)
    pair = _pair("smooth_l1_loss", input, target)
    return reduced(apply_one("smooth_l1_loss", *pair, beta=float(beta)), reduction)


@public
def huber_loss(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Tensor | None = None,
) -> Tensor:
    """With d = |input - target|: d² / 2 where d < delta, else delta (d - delta / 2)."""
    pair = _pair("huber_loss", input, target)
    return _weighted(apply_one("huber_loss", *pair, delta=float(delta)), weight, reduction)


@public
def binary_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean"
) -> Tensor:
    """-(target log p + (1 - target) log(1 - p)) of probabilities p; logarithms not below -100."""
    losses = apply_one("bce_loss", input, like(target, input))
    return _weighted(losses, weight, reduction)


@public
def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """Binary cross-entropy of sigmoid(input), computed without overflow. What is true counts
    `pos_weight` times, which broadcasts.
    """
    target = like(target, input)
    if pos_weight is None:
        return _weighted(apply_one("bce_with_logits", input, target), weight, reduction)
    share = (like(pos_weight, input) - 1.0) * target + 1.0
    losses = (1.0 - target) * input + share * softplus(-input)
    return _weighted(losses, weight, reduction)


@public
def kl_div(
    input: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False
) -> Tensor:
    """target (log target - input) of log-probabilities `input` and probabilities `target`, or their
    logarithms with `log_target`. "batchmean" divides the sum by the extent of the first axis.
    """
    check_reduction(reduction, "batchmean")
    x, target = _pair("kl_div", input, target)
    losses = target.exp() * (target - x) if log_target else apply_one("kl_div", x, target)
    if reduction == "batchmean":
        return reduced(losses, "sum") * (1.0 / max(1, input.shape[0] if input.ndim else 1))
    return reduced(losses, reduction)


@public
def poisson_nll_loss(
    input: Tensor,
    target: Tensor,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    *,
    reduction: str = "mean",
) -> Tensor:
    """Minus the logarithm of the Poisson probability of counts `target` at the rate exp(input), or
    `input` without `log_input`. The logarithm of the counts' factorial is left out, or with `full`
    approximated (J. Stirling).
    """
    target = like(target, input)
    losses = input.exp() - target * input if log_input else input - target * (input + eps).log()
    if full:
        safe = where(target > 1.0, target, 1.0)
        stirling = target * safe.log() - target + (safe * (2.0 * math.pi)).log() * 0.5
        losses = losses + where(target > 1.0, stirling, 0.0)
    return reduced(losses, reduction)


@public
def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Minus the logarithm of the normal density of `target` around `input` with variance `var`,
    which is not taken below `eps`; the constant only with `full`.
    """
    if isinstance(var, (int, float)):
        var = filled(input, float(var), ())
    if var.ndim and var.ndim == input.ndim - 1 and var.shape == input.shape[:-1]:
        var = var.reshape((*var.shape, 1))
    # The bound holds for the number; the gradient goes on to what was given.
    least: Tensor = maximum(var, eps)
    var = var + apply_one("stop_gradient", least - var)
    losses = (var.log() + apply_one("square", input - like(target, input)) / var) * 0.5
    if full:
        losses = losses + 0.5 * math.log(2.0 * math.pi)
    return reduced(losses, reduction)


@public
def soft_margin_loss(input: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """log(1 + exp(-target input)) for targets 1 and -1."""
    return reduced(softplus(-(like(target, input) * input)), reduction)


@public
def multilabel_soft_margin_loss(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean"
) -> Tensor:
    """Binary cross-entropy of sigmoid(input [n, classes]) per class, averaged over the classes."""
    target = like(target, input)
    losses = -(target * logsigmoid(input) + (1.0 - target) * logsigmoid(-input))
    if weight is not None:
        losses = losses * like(weight, losses)
    return reduced(losses.mean(-1), reduction)


# --- margins --------------------------------------------------------------------------------------


@public
def hinge_embedding_loss(
    input: Tensor, target: Tensor, margin: float = 1.0, *, reduction: str = "mean"
) -> Tensor:
    """The input where the target is 1, max(0, margin - input) where it is -1."""
    near = where(target.not_equal(-1), input, 0.0)
    far = where(target.not_equal(1), (margin - input).relu(), 0.0)
    return reduced(near + far, reduction)


@public
def margin_ranking_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, *, reduction: str = "mean"
) -> Tensor:
    """max(0, -target (input1 - input2) + margin) for targets 1 and -1."""
    return reduced((margin - like(target, input1) * (input1 - input2)).relu(), reduction)


_LEAST_SQUARE = 1e-12
"""Added to squares of lengths, so that vectors of zeros have a direction."""


@public
def cosine_embedding_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, *, reduction: str = "mean"
) -> Tensor:
    """1 - cosine of the vectors [n, d] (or [d]) where the target is 1, max(0, cosine - margin)
    where it is -1.
    """
    products = (input1 * input2).sum(-1)
    squares = [apply_one("square", each).sum(-1) + _LEAST_SQUARE for each in (input1, input2)]
    cosine = products / (squares[0] * squares[1]).sqrt()
    near = where(target.equal(1), 1.0 - cosine, 0.0)
    far = where(target.equal(-1), (cosine - margin).relu(), 0.0)
    return reduced(near + far, reduction)


@public
def multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    *,
    reduction: str = "mean",
) -> Tensor:
    """The sum of max(0, margin - input[target] + input[class])^p over all other classes, over the
    number of classes, of input [n, classes] (or [classes]) and labels [n]; times the label's
    weight [classes].
    """
    if p not in (1, 2):
        raise AttributeValueError("multi_margin_loss takes p = 1 or 2", got=p, expected="1 or 2")
    if not input.ndim:
        row = input.reshape((1,))
        return multi_margin_loss(row, target, p, margin, weight, reduction=reduction)
    labels = target.reshape((*input.shape[:-1], 1)).cast("int64")
    slack = (margin - take_along_axis(input, labels, -1) + input).relu()
    slack = apply_one("square", slack) if p == 2 else slack
    classes = input.shape[-1]
    own = apply_one("one_hot", target, classes=classes, dtype=str(input.dtype))
    losses = (slack * (1.0 - own.reshape(input.shape))).sum(-1) * (1.0 / max(1, classes))
    if weight is not None:
        losses = losses * apply_one(
            "index_select", like(weight, input), labels.reshape((-1,)), axis=0
        ).reshape(losses.shape)
    return reduced(losses, reduction)


@public
def multilabel_margin_loss(input: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """The sum of max(0, 1 - input[label] + input[class]) over all labels and all classes that are
    no label, over the number of classes, of input [n, classes] (or [classes]). The labels of a row
    of `target`, of the input's shape, end before its first negative number.
    """
    if not input.ndim:
        vector, marked = input.reshape((1,)), target.reshape((1,))
        return multilabel_margin_loss(vector, marked, reduction=reduction)
    classes = input.shape[-1]
    counted = apply_one("cumprod", (target >= 0).cast("int64"), axis=target.ndim - 1).cast(
        input.dtype
    )
    labels = apply_one("maximum_scalar", target.cast("int64"), scalar=0)
    marks = apply_one("one_hot", labels, classes=classes, dtype=str(input.dtype))
    column = (*input.shape, 1)
    other = (marks * counted.reshape(column)).max(-2).equal(0.0).cast(input.dtype)
    at_labels = take_along_axis(input, labels, -1).reshape(column)
    row = (*input.shape[:-1], 1, classes)
    slack = (1.0 - at_labels + input.reshape(row)).relu()
    losses = (slack * counted.reshape(column) * other.reshape(row)).sum((-2, -1))
    return reduced(losses * (1.0 / max(1, classes)), reduction)
