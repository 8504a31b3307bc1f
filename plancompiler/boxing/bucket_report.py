"""What fusing did, for people: which gradients are in which bucket, and why no more of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plancompiler.boxing.fuse import Bucket, FusedReductions
from plancompiler.boxing.graph import BoxingTaskGraph, PlacedOp, TaskFamily
from plancompiler.ir.shard import element_count
from plancompiler.ops.registry import op_def


@dataclass(frozen=True, slots=True)
class BucketMember:
    """A value that is reduced."""

    name: str
    """What it is for: `gradient of NAME` of a variable, `output NAME`, else the value's own name.
    """
    bytes: int
    """Of the global value."""


@dataclass(frozen=True, slots=True)
class BucketReport:
    """A call that reduces values."""

    primitive: str
    stream: str
    axes: tuple[str, ...]
    """Mesh axes along which devices reduce, by name or position."""
    bytes: int
    members: tuple[BucketMember, ...]
    ended: str
    """Why no more values are in it."""

    def __str__(self) -> str:
        names = ", ".join(member.name for member in self.members)
        what = "alone" if len(self.members) == 1 else f"{len(self.members)} values"
        return (
            f"{self.primitive} along {', '.join(self.axes)} on stream {self.stream}, "
            f"{self.bytes} bytes, {what}: {names} ({self.ended})"
        )


def bucket_reports(graph: BoxingTaskGraph, fused: FusedReductions) -> tuple[BucketReport, ...]:
    """A report on each bucket, in the order of their calls; `graph` is the one before fusing."""
    names = dict(_names(graph))
    return tuple(_report(bucket, names) for bucket in fused.buckets)


def _report(bucket: Bucket, names: dict[int, str]) -> BucketReport:
    last = bucket.members[-1]
    transfer = last.transfer
    assert transfer is not None
    axes = last.placement.axes
    return BucketReport(
        str(transfer.primitive),
        str(transfer.stream),
        tuple(str(axis) if axes is None else axes[axis] for axis in transfer.mesh_axes),
        bucket.nbytes,
        tuple(
            BucketMember(
                names.get(member.number) or member.name.rsplit(":", 1)[0],
                element_count(member.outputs[0].shape) * member.outputs[0].dtype.itemsize,
            )
            for member in bucket.members
        ),
        bucket.ended,
    )


def _names(graph: BoxingTaskGraph) -> Iterator[tuple[int, str]]:
    """(family, what its value is for), where an update or an output reads it, be it through ops
    that keep its shape.
    """
    variables = {
        placed.op.outputs[0].name: str(placed.op.attr("name"))
        for placed in graph.ops
        if placed.op.kind == "variable"
    }
    # Readers come after what they read, so that backwards each is known before its sources.
    known: dict[int, str] = {}
    for entry in reversed(graph.in_order()):
        if isinstance(entry, TaskFamily):
            name = known.get(entry.number)
            if name is not None:
                yield entry.number, name
        else:
            name = _purpose(entry, variables) or known.get(entry.family)
        if name is None:
            continue
        for place, source in enumerate(entry.inputs):
            if _is_same_value(entry, place):
                known.setdefault(source.family, name)


def _purpose(placed: PlacedOp, variables: dict[str, str]) -> str | None:
    op = placed.op
    if op.kind == "output":
        return f"output {op.attr('name')}"
    for _, source in op_def(op.kind).mutates:
        # An update of several tensors writes the parameter first.
        if op.inputs[source].name in variables:
            return f"gradient of {variables[op.inputs[source].name]}"
    return None


def _is_same_value(entry: PlacedOp | TaskFamily, place: int) -> bool:
    """Whether an input may be what the entry's outputs are called by."""
    if isinstance(entry, TaskFamily):
        return True
    op = entry.op
    shape = op.outputs[0].shape if op.outputs else op.inputs[0].shape
    return op.inputs[place].shape == shape
