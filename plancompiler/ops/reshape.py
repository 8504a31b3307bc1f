"""Reshape: the same elements in row-major order under another shape.

Its sharding follows from groups: the shortest runs of old and new axes with equal products. In a
group of several axes only the leading axis (of extent above 1) can be split, on both sides at once,
and only into pieces that divide both leading extents: then every piece is one contiguous run of the
group's elements, the same run on both sides. An axis that a group maps to one axis can be split
freely.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.ir.op import TensorType
from plancompiler.ir.sbp import Split
from plancompiler.ops.attributes import Ints
from plancompiler.ops.gradient import of_one
from plancompiler.ops.kernel import copy_unless_shared
from plancompiler.ops.registry import AttrMap, Types, define_op
from plancompiler.ops.rule import NdSignature, Signature
from plancompiler.ops.shape import keeps_extremes


@dataclass(frozen=True, slots=True)
class AxisPair:
    """An old and a new axis that are split together."""

    old: int
    new: int
    free: bool
    """One axis on each side: any number of pieces. Else it must divide both extents."""


@lru_cache(maxsize=4096)
def axis_pairs(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[AxisPair, ...]:
    """The axes that a reshape from `old` to `new` lets split; none for empty tensors."""
    if 0 in old:
        return ()
    # Axes of extent 1 belong to no group: they can be put in and left out anywhere.
    left = [axis for axis, extent in enumerate(old) if extent > 1]
    right = [axis for axis, extent in enumerate(new) if extent > 1]
    pairs = []
    while left and right:
        olds, news = [left.pop(0)], [right.pop(0)]
        old_size, new_size = old[olds[0]], new[news[0]]
        while old_size != new_size:
            if old_size < new_size:
                olds.append(left.pop(0))
                old_size *= old[olds[-1]]
            else:
                news.append(right.pop(0))
                new_size *= new[news[-1]]
        pairs.append(AxisPair(olds[0], news[0], len(olds) == len(news) == 1))
    return tuple(pairs)


def _infer(inputs: Types, attrs: AttrMap) -> Types:
    wanted, size = attrs["shape"], prod(inputs[0].shape)
    if wanted.count(-1) > 1 or any(extent < -1 for extent in wanted):
        raise AttributeValueError(
            "reshape needs extents of at least 0, with at most one -1",
            got=wanted,
            expected=f"extents whose product is {size}",
        )
    shape = wanted
    if -1 in wanted:
        known = prod(extent for extent in wanted if extent != -1)
        if known == 0 or size % known:
            raise ShapeError(
                "no extent can stand for the -1 of this reshape",
                got=f"{inputs[0].shape} ({size} elements) to {wanted}",
            )
        shape = tuple(size // known if extent == -1 else extent for extent in wanted)
    if prod(shape) != size:
        raise ShapeError(
            "reshape must keep the number of elements",
            got=f"{inputs[0].shape} ({size} elements) to {wanted} ({prod(shape)} elements)",
            expected=f"extents whose product is {size}",
        )
    return (TensorType(shape, inputs[0].dtype),)


def _rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    old, new = inputs[0].shape, outputs[0].shape
    left = [f"[o{axis}]" for axis in range(len(old))]
    right = [f"[n{axis}]" for axis in range(len(new))]
    for pair in axis_pairs(old, new):
        if pair.free:
            left[pair.old] = right[pair.new] = f"a{pair.old}"
    return f"{' '.join(left) or '...'} -> {' '.join(right) or '...'}"


def _divides(pair: AxisPair, pieces: int, old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    return old[pair.old] % pieces == 0 and new[pair.new] % pieces == 0


def _extra(inputs: Types, outputs: Types, attrs: AttrMap, parts: int) -> tuple[Signature, ...]:
    old, new = inputs[0].shape, outputs[0].shape
    splits = tuple(
        Signature((Split(pair.old),), (Split(pair.new),))
        for pair in axis_pairs(old, new)
        if not pair.free and _divides(pair, parts, old, new)
    )
    return (*splits, *keeps_extremes(inputs, outputs, attrs, parts))


def _legal(
    inputs: Types,
    outputs: Types,
    attrs: AttrMap,
    signature: NdSignature,
    hierarchy: tuple[int, ...],
) -> bool:
    """Nested splits of a group's leading axes must divide them all together."""
    old, new = inputs[0].shape, outputs[0].shape
    for pair in axis_pairs(old, new):
        pieces = prod(
            parts
            for entry, parts in zip(signature.inputs[0], hierarchy, strict=True)
            if entry == Split(pair.old)
        )
        if not pair.free and not _divides(pair, pieces, old, new):
            return False
    return True


define_op(
    "reshape",
    infer=_infer,
    rule=_rule,
    inputs=1,
    attrs=(Ints("shape"),),
    kernel=lambda context, inputs, outputs: copy_unless_shared(
        inputs[0].reshape(outputs[0].shape), outputs[0]
    ),
    gradient=of_one(lambda attrs, x, y, dy: dy.reshape(x.shape)),
    linear=((0,),),
    extra=_extra,
    legal=_legal,
    flops=0,
    view=((0, 0),),
    moves=True,
    doc="The same elements in row-major order under another shape.",
)
