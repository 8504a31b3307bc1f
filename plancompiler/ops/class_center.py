"""Sampling of class centers, for training with very many classes (X. An et al.: Partial FC, 2021).

The classes lie in ranges, the shards; range r holds `counts[r]` classes and gives `sizes[r]` of
them: those that occur among the labels, and random others. Which others follows from a random word
per class, so any device can make any part of the sample, and the same words give the same sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plancompiler.errors import AttributeValueError, ExecutionError, ShapeError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ir.sbp import BROADCAST
from plancompiler.ir.shard import Range
from plancompiler.ops import random
from plancompiler.ops.attributes import Int, Ints
from plancompiler.ops.check import (
    expect_shape,
)
from plancompiler.ops.gradient import by_op
from plancompiler.ops.loss import check_labels
from plancompiler.ops.registry import Array, Arrays, AttrMap, KernelContext, Types, define_op
from plancompiler.ops.rule import NdSignature, Signature, operand_line
from plancompiler.ops.shards import (
    FIRST,
    are_balanced,
    cut_together,
    shards_stay_whole,
    starts_of,
)
from plancompiler.ops.softmax import IGNORE_INDEX


def _shards(kind: str, attrs: AttrMap) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Classes of each shard, and how many of them it gives."""
    counts, sizes = attrs["counts"], attrs["sizes"]
    if not counts or min(counts) < 0 or sum(counts) == 0:
        raise AttributeValueError(
            f"{kind} needs the number of classes of each shard", got=counts, expected="at least one"
        )
    if len(sizes) != len(counts) or any(
        not 0 <= size <= count for size, count in zip(sizes, counts, strict=True)
    ):
        raise AttributeValueError(
            f"{kind} takes from each shard some of its classes",
            got=f"{sizes} of {counts}",
            expected="one size per shard, from 0 to its number of classes",
        )
    return counts, sizes


# --- the sample -----------------------------------------------------------------------------------


def distinct_labels(flat: Array, counts: Sequence[int], ignored: int) -> tuple[Array, Array]:
    """The classes among the labels, in order; and where those of each shard begin among them.

    ExecutionError for a label that is no class.
    """
    starts = np.asarray(starts_of(counts))
    check_labels("class_center_sample", flat, int(starts[-1]), ignored)
    distinct = np.unique(flat[flat != ignored]).astype(np.int64)
    return distinct, np.searchsorted(distinct, starts)


def _infer(inputs: Types, attrs: AttrMap) -> Types:
    _, sizes = _shards("class_center_sample", attrs)
    return TensorType((sum(sizes),), DType.INT64), TensorType(inputs[0].shape, DType.INT64)


def _rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    ndim = len(inputs[0].shape)
    line = operand_line(ndim, whole=range(ndim))
    return f"{line} -> s, {line}"


def _own_part(inputs: Types, outputs: Types, attrs: AttrMap, parts: int) -> tuple[Signature, ...]:
    """Each device makes its part of the sample, of labels that all know."""
    return (Signature((BROADCAST,), (FIRST, BROADCAST)),)


def _by_shard(
    inputs: Types,
    outputs: Types,
    attrs: AttrMap,
    signature: NdSignature,
    hierarchy: tuple[int, ...],
) -> bool:
    """Whether the sample is made split, if the last mesh axis has a device for each shard.

    To make it whole would cost no more, but then the rows of weights split by shards are not where
    their samples are.
    """
    counts, sizes = attrs["counts"], attrs["sizes"]
    if not 1 < len(counts) == hierarchy[-1] or not (are_balanced(counts) and are_balanced(sizes)):
        return True
    return signature.outputs[0][len(hierarchy) - 1] == FIRST


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (labels,), (sampled, remapped) = inputs, outputs
    counts, sizes = _shards("class_center_sample", context.attrs)
    ignored = context.attrs["ignore_index"]
    flat = labels.reshape(-1)
    positives, bounds = distinct_labels(flat, counts, ignored)
    for shard, (size, held) in enumerate(zip(sizes, np.diff(bounds), strict=True)):
        if held > size:
            raise ExecutionError(
                "class_center_sample has more distinct labels in a range than it samples",
                got=f"{held} labels in range {shard}",
                expected=f"at most {size}",
                hint="give a greater num_samples, or use eager tensors, whose samples grow",
            )
    # A label's position: its place among the labels of its shard, which come first there.
    starts, offsets = np.asarray(starts_of(counts)), np.asarray(starts_of(sizes))
    place = np.searchsorted(positives, flat)
    shard_of = np.searchsorted(starts, flat, side="right") - 1
    shard_of = np.clip(shard_of, 0, len(counts) - 1)
    moved = offsets[shard_of] + place - bounds[shard_of]
    np.copyto(remapped, np.where(flat == ignored, ignored, moved).reshape(labels.shape))
    low, high = context.output_regions[0][0]
    start = random.stream_of(context)
    for shard in range(len(counts)):
        first, last = int(offsets[shard]), int(offsets[shard + 1])
        if max(first, low) >= min(last, high):
            continue
        own = positives[bounds[shard] : bounds[shard + 1]] - starts[shard]
        classes = (int(starts[shard]), int(starts[shard + 1]))
        chosen = _with_others(own, last - first, classes, int(starts[-1]), start)
        begin, end = max(first, low), min(last, high)
        sampled[begin - low : end - low] = chosen[begin - first : end - first]


def _with_others(own: Array, size: int, classes: Range, total: int, start: int) -> Array:
    """Classes of a shard, from 0, and random others in order, `size` together."""
    free = np.ones(classes[1] - classes[0], bool)
    free[own] = False
    others = np.flatnonzero(free)
    missing = size - len(own)
    if missing < len(others):
        # Those with the smallest words: no two words of a stream are equal.
        words = random.words(start, (total,), (classes,))[others]
        others = np.sort(others[np.argpartition(words, missing)[:missing]])
    return np.concatenate((own, others))


define_op(
    "class_center_sample",
    infer=_infer,
    operands="labels i -> sampled int64, remapped int64",
    rule=_rule,
    attrs=(
        Ints("counts"),
        Ints("sizes"),
        Int("ignore_index", IGNORE_INDEX),
        Int("key"),
    ),
    kernel=_kernel,
    extra=_own_part,
    legal=_by_shard,
    flops=lambda inputs, outputs, attrs: sum(attrs["counts"]),
    portable=False,
    doc="labels [...] -> (sampled [s], labels [...]): of each range of `counts` classes the "
    "ones among the labels and random others, `sizes` together, counted from the start of the "
    "range; and each label as a position in the sample. `key` names the stream of numbers.",
)


# --- rows of a tensor for the sample, and their gradient ------------------------------------------


def _aligned(inputs: Types, outputs: Types, attrs: AttrMap, parts: int) -> tuple[Signature, ...]:
    """Classes and samples split by shards, where splits are what the shards are."""
    counts, sizes = attrs["counts"], attrs["sizes"]
    if len(counts) != parts or not (are_balanced(counts) and are_balanced(sizes)):
        return ()
    return cut_together(len(inputs), len(outputs))


def _class_rows(context: KernelContext, sampled: Array, held: Range, part: Range) -> Array:
    """For each sample of the part, the row of its class among those of [held); -1 if not held."""
    counts, sizes = context.attrs["counts"], context.attrs["sizes"]
    offsets = np.asarray(starts_of(sizes))
    shard = np.searchsorted(offsets, np.arange(*part), side="right") - 1
    wrong = (sampled < 0) | (sampled >= np.asarray(counts)[shard])
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ExecutionError(
            "a sample of class_center_rows is no class of its range",
            got=f"{int(sampled[at])} in range {int(shard[at])}",
            expected=f"0 to {counts[int(shard[at])] - 1}",
        )
    rows = np.asarray(starts_of(counts))[shard] + sampled.astype(np.int64, copy=False)
    held_rows: Array = np.where((rows >= held[0]) & (rows < held[1]), rows - held[0], -1)
    return held_rows


def _rows_infer(inputs: Types, attrs: AttrMap) -> Types:
    kind = "class_center_rows"
    counts, sizes = _shards(kind, attrs)
    weight, sampled = inputs
    if weight.shape[0] != sum(counts):
        raise ShapeError(
            f"{kind} needs one row per class", got=weight.shape, expected=f"{sum(counts)} rows"
        )
    expect_shape(kind, sampled, (sum(sizes),), "sample")
    return (TensorType((sum(sizes), *weight.shape[1:]), weight.dtype),)


def _rows_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (weight, sampled), (out,) = inputs, outputs
    held, part = context.input_regions[0][0], context.output_regions[0][0]
    rows = _class_rows(context, sampled, held, part)
    inside = rows >= 0
    if inside.all():
        np.copyto(out, weight[rows])
    else:
        out.fill(0)
        out[inside] = weight[rows[inside]]


def _rows_grad_infer(inputs: Types, attrs: AttrMap) -> Types:
    kind = "class_center_rows_grad"
    counts, sizes = _shards(kind, attrs)
    sampled, drows = inputs
    expect_shape(kind, sampled, (sum(sizes),), "sample")
    return (TensorType((sum(counts), *drows.shape[1:]), drows.dtype),)


def _rows_grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (sampled, drows), (out,) = inputs, outputs
    held, part = context.output_regions[0][0], context.input_regions[1][0]
    rows = _class_rows(context, sampled, held, part)
    inside = rows >= 0
    chosen, values = rows[inside], drows[inside]
    out.fill(0)
    if len(np.unique(chosen)) == len(chosen):
        out[chosen] = values
    else:  # No sample has a class twice, but one that somebody else has made may.
        np.add.at(out, chosen, values)


define_op(
    "class_center_rows",
    infer=_rows_infer,
    operands="weight F, sampled i -> rows F",
    rule="c ..., s -> s ...",
    attrs=(
        Ints("counts"),
        Ints("sizes"),
    ),
    kernel=_rows_kernel,
    gradient=by_op("class_center_rows", "class_center_rows_grad"),
    linear=((0,),),
    extra=_aligned,
    legal=shards_stay_whole,
    flops=0,
    portable=False,
    doc="(weight [classes, ...], sampled [s]) -> [s, ...]: the rows of sampled classes, which "
    "count from the start of their range as class_center_sample gives them.",
)
define_op(
    "class_center_rows_grad",
    infer=_rows_grad_infer,
    operands="sampled i, drows F -> dweight F",
    rule="s, s ... -> c ...",
    attrs=(
        Ints("counts"),
        Ints("sizes"),
    ),
    kernel=_rows_grad_kernel,
    gradient=by_op("class_center_rows_grad", "class_center_rows"),
    linear=((1,),),
    extra=_aligned,
    legal=shards_stay_whole,
    portable=False,
    doc="The gradient of class_center_rows: (sampled, drows) -> dweight.",
)
