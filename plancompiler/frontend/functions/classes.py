"""Losses over classes that are split over devices, and training on a sample of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple

import numpy as np

from plancompiler.errors import AttributeValueError, UsageError
from plancompiler.frontend.draws import key_of, takes_generator
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.losses import reduce_rows
from plancompiler.frontend.out import takes_out
from plancompiler.ir import Value
from plancompiler.ir.arguments import real_number, whole_number
from plancompiler.ops import class_center, split_softmax
from plancompiler.ops.registry import apply, apply_one
from plancompiler.ops.shards import balanced_sizes
from plancompiler.ops.softmax import IGNORE_INDEX

__all__ = [
    "ClassSample",
    "c_softmax_with_cross_entropy",
    "class_center_rows",
    "class_center_sample",
    "margin_cross_entropy",
]


# --- a sample of the classes ----------------------------------------------------------------------


class ClassSample(NamedTuple, Generic[Tensor]):
    """What `class_center_sample` gives."""

    sampled: Tensor
    """[s] int64: classes of one range after another, each counted from the start of its range."""
    labels: Tensor
    """Like the labels given, int64: the position of each in `sampled`."""
    sizes: tuple[int, ...]
    """How many classes of each range were sampled; their sum is s."""


@takes_out
@takes_generator
def class_center_sample(
    labels: Tensor,
    classes: int | Sequence[int],
    num_samples: int,
    shards: int | None = None,
    ignore_index: int | None = -100,
    key: int | None = None,
    *,
    generator: Any = None,
    out: Sequence[Tensor | None] | None = None,
) -> ClassSample[Tensor]:
    """Of each range of classes those among the labels, and random others up to `num_samples`.

    `classes` is their number, cut into `shards` balanced ranges (default: one per device of a mesh
    with one axis), or the number in each range. Labels that are `ignore_index` stay as they are.
    The sample depends on the seed, the step, `key` and the ranges, on no layout. Of a range come
    first the classes among the labels, then the others, both in order.

    A range gives `num_samples` classes, or all if it has fewer. If more of its classes are among
    the labels, a job fails in that step (ExecutionError); eager tensors give all of them where the
    labels lie on all ranks, outside of `pc.compile`. `class_center_rows` picks the rows of the
    sample (X. An et al.: Partial FC, 2021).
    """
    wanted = whole_number("num_samples of class_center_sample", num_samples)
    if wanted < 1:
        raise AttributeValueError(
            "class_center_sample needs a number of samples", got=wanted, expected="at least 1"
        )
    counts = _class_counts(labels, classes, shards)
    ignored = IGNORE_INDEX if ignore_index is None else ignore_index
    sizes = tuple(min(wanted, count) for count in counts)
    drawn = key_of(key)
    if not isinstance(labels, Value) and labels.dtype.is_integer:
        labels, sizes = _grown(labels, counts, sizes, ignored)
    sampled, remapped = apply(
        "class_center_sample", labels, counts=counts, sizes=sizes, ignore_index=ignored, key=drawn
    )
    return ClassSample(sampled, remapped, sizes)


def _class_counts(labels: Any, classes: int | Sequence[int], shards: int | None) -> tuple[int, ...]:
    """Classes of each range."""
    if isinstance(classes, Sequence):
        counts = tuple(whole_number("classes of a range", count) for count in classes)
        if shards is not None and shards != len(counts):
            raise UsageError(
                "class_center_sample needs a number of classes for each range",
                got=f"{len(counts)} numbers for shards={shards}",
            )
        return counts
    total = whole_number("classes of class_center_sample", classes)
    if shards is None:
        hierarchy = labels.placement.hierarchy
        if len(hierarchy) != 1:
            raise UsageError(
                "class_center_sample needs the number of ranges on a mesh of several axes",
                got=f"a mesh {hierarchy}",
                hint="give shards, the extent of the axis over which the classes are split",
            )
        shards = int(hierarchy[0])
    parts = whole_number("shards of class_center_sample", shards)
    if parts < 1 or total < parts:
        raise AttributeValueError(
            "class_center_sample needs a class in every range",
            got=f"{total} classes in {parts} ranges",
            expected="at least one range, and as many classes",
        )
    return balanced_sizes(total, parts)


def _grown(
    labels: Any, counts: tuple[int, ...], sizes: tuple[int, ...], ignored: int
) -> tuple[Any, tuple[int, ...]]:
    """Eager labels, whole on each rank, and sizes with room for all classes among them."""
    world = labels.spec.world
    # A rank without labels cannot know what they ask for, nor can a function that is compiled.
    if labels.placement.size != world.size or world.mode.traces:
        return labels, sizes
    labels = labels.redistribute(sbp=["B"] * labels.placement.ndim)
    _, bounds = class_center.distinct_labels(labels.numpy().reshape(-1), counts, ignored)
    held = np.diff(bounds).tolist()
    return labels, tuple(map(max, zip(sizes, held, strict=True)))


@takes_out
def class_center_rows(
    weight: Tensor,
    sampled: Tensor,
    sizes: Sequence[int],
    classes: Sequence[int] | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The rows of weight [classes, ...] that `class_center_sample` has sampled: [s, ...].

    `sizes` is what it gave; `classes` the number in each range where these are not balanced. With
    weight and sample split by ranges, neither rows nor their gradients move.
    """
    taken = tuple(whole_number("sizes of class_center_rows", size) for size in sizes)
    if not taken:
        raise UsageError("class_center_rows needs the size of each range's sample", got="none")
    if classes is None:
        counts = balanced_sizes(weight.shape[0] if weight.ndim else 0, len(taken))
    else:
        counts = tuple(whole_number("classes of a range", count) for count in classes)
    return apply_one("class_center_rows", weight, sampled, counts=counts, sizes=taken)


# --- losses ---------------------------------------------------------------------------------------


@takes_out
def c_softmax_with_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int | None = -100,
    return_softmax: bool = False,
    *,
    out: Any = None,
) -> Any:
    """-log softmax(logits)[label] of logits [..., classes], whose classes may be split over
    devices: one loss per row, [...]; with `return_softmax` (losses, softmax [..., classes]).

    Three numbers per row are all-reduced: the greatest logit, the sum of exponentials and the logit
    of the label. The gradient, softmax - one-hot, is made where the logits are, and exchanges
    nothing. Rows whose label is `ignore_index` have no loss and no gradient; any other label that
    is no class fails the run (ExecutionError).
    """
    attrs = {} if ignore_index is None else {"ignore_index": ignore_index}
    if return_softmax:
        losses, softmax = split_softmax.split_softmax_with_cross_entropy(logits, labels, **attrs)
        return reduce_rows(losses, labels, "none", ignore_index, logits.dtype), softmax
    losses = split_softmax.split_cross_entropy(logits, labels, **attrs)
    return reduce_rows(losses, labels, "none", ignore_index, logits.dtype)


@takes_out
def margin_cross_entropy(
    cosines: Tensor,
    labels: Tensor,
    margin1: float = 1.0,
    margin2: float = 0.5,
    margin3: float = 0.0,
    scale: float = 64.0,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    return_softmax: bool = False,
    *,
    out: Any = None,
) -> Any:
    """Cross-entropy of `scale` * cosines [..., classes], where that of the label, x, becomes
    cos(margin1 * acos x + margin2) - margin3 first. margin2 is an angle in radians.

    (1, 0.5, 0) is ArcFace (J. Deng et al., 2019), (1, 0, 0.35) CosFace (H. Wang et al., 2018). The
    classes may be split over devices, as in `c_softmax_with_cross_entropy`. x is clamped to
    ±(1 - 1e-6) for the angle, and has no gradient beyond; without margin1 and margin2 there is no
    angle. `reduction` is "mean" (over the rows that count), "sum" or "none"; with `return_softmax`
    the result is (loss, softmax).
    """
    if reduction not in ("mean", "sum", "none"):
        raise AttributeValueError(
            "unknown reduction of margin_cross_entropy",
            got=repr(reduction),
            expected="mean, sum or none",
        )
    ignored = {} if ignore_index is None else {"ignore_index": ignore_index}
    logits = apply(
        "margin_logits",
        cosines,
        labels,
        margin1=real_number("margin1 of margin_cross_entropy", margin1),
        margin2=real_number("margin2 of margin_cross_entropy", margin2),
        margin3=real_number("margin3 of margin_cross_entropy", margin3),
        scale=real_number("scale of margin_cross_entropy", scale),
        **ignored,
    )
    softmax = None
    if return_softmax:
        losses, softmax = split_softmax.split_softmax_with_cross_entropy(logits, labels, **ignored)
    else:
        losses = split_softmax.split_cross_entropy(logits, labels, **ignored)
    losses = reduce_rows(losses, labels, reduction, ignore_index, cosines.dtype)
    return losses if softmax is None else (losses, softmax)
