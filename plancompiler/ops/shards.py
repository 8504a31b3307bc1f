"""Axes that are cut into one shard per device, together.

The rows of some tensors belong to shards (a range of classes, a group of examples), and what an op
does to the rows of one tensor depends on those of the same shard of another. Where a mesh axis has
as many devices as there are shards, all these tensors can be split along it: each device then
holds whole shards, and nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from plancompiler.ir.sbp import Split
from plancompiler.ir.shard import balanced_range
from plancompiler.ops.registry import AttrMap, Types
from plancompiler.ops.rule import NdSignature, Signature

FIRST = Split(0)


def starts_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Where each of the shards of these sizes begins, and where the last ends: their exclusive
    prefix sums, and the total.
    """
    return tuple(accumulate(sizes, initial=0))


def balanced_sizes(extent: int, shards: int) -> tuple[int, ...]:
    """Sizes of the balanced pieces of an axis, as every split has them."""
    ranges = (balanced_range(extent, shards, index) for index in range(shards))
    return tuple(stop - start for start, stop in ranges)


def are_balanced(sizes: Sequence[int]) -> bool:
    """Whether a split over as many devices gives each device one of the shards."""
    return tuple(sizes) == balanced_sizes(sum(sizes), len(sizes))


def cut_together(inputs: int, outputs: int) -> tuple[Signature, ...]:
    """All operands are split along their first axis: a shard per device."""
    return (Signature((FIRST,) * inputs, (FIRST,) * outputs),)


def shards_stay_whole(
    inputs: Types,
    outputs: Types,
    attrs: AttrMap,
    signature: NdSignature,
    hierarchy: tuple[int, ...],
) -> bool:
    """Whether no first axis is cut by an outer mesh axis before all are cut into shards.

    Cut before, the pieces of an operand would not be its shards.
    """
    operands = (*signature.inputs, *signature.outputs)
    cut = False
    for axis in range(len(hierarchy)):
        split = [sbp[axis] == FIRST for sbp in operands]
        if cut and all(split):
            return False
        cut = cut or any(split)
    return True
