"""Fused reductions: neighbouring reductions of one group of ranks become one collective.

Gradients come one by one, and each reduction pays the start of a collective. Reductions over the
same mesh axes, of the same kind and dtype, are gathered into buckets of at most `fuse_bytes`; the
bucket's collective takes the place of its last member. A use of a member inside the bucket's span
closes it, so nothing waits longer than for reductions that nobody has used yet. A bucket reads and
writes its members' registers where they are: there is no buffer to copy into.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from plancompiler.boxing.graph import BoxingTaskGraph, FamilyOutput, PlacedOp, TaskFamily
from plancompiler.ir.settings import Settings, option
from plancompiler.ir.shard import element_count
from plancompiler.ir.task import SLOT_BITS, Primitive

MAX_MEMBERS = (1 << SLOT_BITS) - 8
"""Members of a bucket: each is a slot of the fused task, and a few slots are reserved."""

Entry = TypeVar("Entry", PlacedOp, TaskFamily)
FUSE_BYTES = 32 << 20
_FUSED = (Primitive.ALL_REDUCE, Primitive.REDUCE_SCATTER)


@dataclass(frozen=True, kw_only=True)
class FuseOptions(Settings):
    """What boxing itself can be asked for."""

    fuse_bytes: int = option(
        FUSE_BYTES, "Largest bucket of fused reductions; 0 fuses none.", metavar="BYTES"
    )


@dataclass(frozen=True, slots=True)
class FusedReductions:
    """What fusing did."""

    before: int
    """Reductions there were."""
    after: int
    """Reductions there are."""


def fuse_reductions(
    graph: BoxingTaskGraph, fuse_bytes: int = FUSE_BYTES
) -> tuple[BoxingTaskGraph, FusedReductions]:
    """The graph with neighbouring reductions fused; `fuse_bytes` 0 leaves it as it is.

    Bytes are those of the global values, so that all ranks decide alike.
    """
    reductions = sum(_is_reduction(family) for family in graph.families)
    if fuse_bytes <= 0:
        return graph, FusedReductions(reductions, reductions)
    buckets = [bucket for bucket in _buckets(graph, fuse_bytes) if len(bucket) > 1]
    moved: dict[FamilyOutput, FamilyOutput] = {}
    fused: dict[int, TaskFamily] = {}
    gone: set[int] = set()
    for bucket in buckets:
        family = _fuse(bucket)
        fused[family.number] = family
        gone.update(member.number for member in bucket[:-1])
        for slot, member in enumerate(bucket):
            moved[FamilyOutput(member.number, 0)] = FamilyOutput(family.number, slot)
    families = tuple(
        _redirected(fused.get(family.number, family), moved)
        for family in graph.families
        if family.number not in gone
    )
    ops = tuple(_redirected(placed, moved) for placed in graph.ops)
    saved = sum(len(bucket) - 1 for bucket in buckets)
    return (
        replace(graph, ops=ops, families=families),
        FusedReductions(reductions, reductions - saved),
    )


def _is_reduction(family: TaskFamily) -> bool:
    return family.transfer is not None and family.transfer.primitive in _FUSED


def _buckets(graph: BoxingTaskGraph, fuse_bytes: int) -> Iterator[list[TaskFamily]]:
    """Reductions to fuse, in the order in which buckets are closed."""
    open_buckets: dict[object, list[TaskFamily]] = {}
    sizes: dict[object, int] = {}
    member_of: dict[int, object] = {}

    def close(key: object) -> Iterator[list[TaskFamily]]:
        bucket = open_buckets.pop(key, None)
        if bucket is not None:
            for member in bucket:
                del member_of[member.number]
            yield bucket

    for entry in graph.in_order():
        for source in entry.inputs:
            key = member_of.get(source.family)
            if key is not None:
                yield from close(key)
        if not isinstance(entry, TaskFamily) or not _is_reduction(entry):
            continue
        key = _bucket_key(entry)
        layout = entry.outputs[0]
        nbytes = element_count(layout.shape) * layout.dtype.itemsize
        bucket = open_buckets.get(key)
        if bucket is not None and (sizes[key] + nbytes > fuse_bytes or len(bucket) == MAX_MEMBERS):
            yield from close(key)
        if key not in open_buckets:
            open_buckets[key], sizes[key] = [], 0
        open_buckets[key].append(entry)
        sizes[key] += nbytes
        member_of[entry.number] = key
    for key in list(open_buckets):
        yield from close(key)


def _bucket_key(family: TaskFamily) -> object:
    """What members of a bucket have in common: they are one call of one communicator."""
    transfer = family.transfer
    assert transfer is not None
    return (
        family.segment,
        family.placement,
        transfer.mesh_axes,
        transfer.primitive,
        transfer.reduction,
        transfer.dst_axis,
        transfer.stream,
        family.outputs[0].dtype,
    )


def _fuse(bucket: list[TaskFamily]) -> TaskFamily:
    last = bucket[-1]
    return replace(
        last,
        name=f"{last.name} of {len(bucket)} values",
        inputs=tuple(source for member in bucket for source in member.inputs),
        outputs=tuple(layout for member in bucket for layout in member.outputs),
    )


def _redirected(entry: Entry, moved: dict[FamilyOutput, FamilyOutput]) -> Entry:
    if not any(source in moved for source in entry.inputs):
        return entry
    return replace(entry, inputs=tuple(moved.get(source, source) for source in entry.inputs))
