"""Fused reductions: neighbouring reductions of one group of ranks become one collective.

Gradients come one by one, and each reduction pays the start of a collective. Reductions over the
same mesh axes, of the same kind, dtype and stream, that follow each other make a *run*, and a run
is cut into buckets: by bytes, or where it pays (`buckets`). A bucket's collective takes the place
of its last member. A use of a member ends its run, so nothing waits longer than for reductions that
nobody has used yet. A bucket reads and writes its members' registers where they are: there is no
buffer to copy into.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from plancompiler.boxing.buckets import MOST_BYTES, cut
from plancompiler.boxing.graph import BoxingTaskGraph, FamilyOutput, PlacedOp, TaskFamily
from plancompiler.boxing.report import bytes_of_group, cost_of
from plancompiler.boxing.step_time import placed_op_seconds
from plancompiler.costs import Machine, generic_machine
from plancompiler.ir import Placement
from plancompiler.ir.settings import Settings, option
from plancompiler.ir.shard import element_count
from plancompiler.ir.task import SLOT_BITS, Primitive
from plancompiler.plan.plan import Stream

MAX_MEMBERS = (1 << SLOT_BITS) - 8
"""Members of a bucket: each is a slot of the fused task, and a few slots are reserved."""

Entry = TypeVar("Entry", PlacedOp, TaskFamily)
AUTO = "auto"
FUSED = (Primitive.ALL_REDUCE, Primitive.REDUCE_SCATTER)
"""What buckets are made of: gathers of gradients start one by one."""


@dataclass(frozen=True, kw_only=True)
class FuseOptions(Settings):
    """What boxing itself can be asked for."""

    fuse_bytes: int | str = option(
        AUTO,
        "Largest bucket of fused reductions; 0 fuses none, `auto` cuts buckets by estimated times.",
        metavar="BYTES",
        choices=(AUTO,),
        or_number=True,
    )


@dataclass(frozen=True, slots=True)
class Bucket:
    """Reductions that are one call."""

    members: tuple[TaskFamily, ...]
    """As they were before, in order."""
    ended: str
    """Why no more reductions are in it."""

    @property
    def nbytes(self) -> int:
        """Of the global values."""
        return sum(map(_nbytes, self.members))

    @property
    def family(self) -> TaskFamily:
        """The one family that takes the place of all."""
        last = self.members[-1]
        if len(self.members) == 1:
            return last
        return replace(
            last,
            name=f"{last.name} of {len(self.members)} values",
            inputs=tuple(source for member in self.members for source in member.inputs),
            outputs=tuple(layout for member in self.members for layout in member.outputs),
        )


@dataclass(frozen=True, slots=True)
class FusedReductions:
    """What fusing did."""

    buckets: tuple[Bucket, ...]
    """In the order in which they are reduced."""

    @property
    def before(self) -> int:
        """Reductions there were."""
        return sum(len(bucket.members) for bucket in self.buckets)

    @property
    def after(self) -> int:
        """Reductions there are."""
        return len(self.buckets)


def fuse_reductions(
    graph: BoxingTaskGraph, fuse_bytes: int | str = AUTO, machine: Machine | None = None
) -> tuple[BoxingTaskGraph, FusedReductions]:
    """The graph with neighbouring reductions fused; `fuse_bytes` 0 leaves it as it is.

    `auto` goes by what ops and calls take on the machine, by default the generic one. Bytes are
    those of the global values, so that all ranks decide alike.
    """
    if fuse_bytes == 0:
        alone = tuple(
            Bucket((family,), "fuse_bytes=0") for family in graph.families if _is_reduction(family)
        )
        return graph, FusedReductions(alone)
    if isinstance(fuse_bytes, str):
        machine = machine or generic_machine()
        ready = _ready(graph, machine)
        buckets = [bucket for run in _buckets(graph, None) for bucket in _cut(run, ready, machine)]
    else:
        buckets = list(_buckets(graph, fuse_bytes))
    buckets.sort(key=lambda bucket: bucket.members[-1].number)
    moved: dict[FamilyOutput, FamilyOutput] = {}
    fused: dict[int, TaskFamily] = {}
    gone: set[int] = set()
    for bucket in buckets:
        if len(bucket.members) == 1:
            continue
        family = bucket.family
        fused[family.number] = family
        gone.update(member.number for member in bucket.members[:-1])
        for slot, member in enumerate(bucket.members):
            moved[FamilyOutput(member.number, 0)] = FamilyOutput(family.number, slot)
    families = tuple(
        _redirected(fused.get(family.number, family), moved)
        for family in graph.families
        if family.number not in gone
    )
    ops = tuple(_redirected(placed, moved) for placed in graph.ops)
    return replace(graph, ops=ops, families=families), FusedReductions(tuple(buckets))


def _is_reduction(family: TaskFamily) -> bool:
    return family.transfer is not None and family.transfer.primitive in FUSED


def _nbytes(family: TaskFamily) -> int:
    layout = family.outputs[0]
    return element_count(layout.shape) * layout.dtype.itemsize


def _buckets(graph: BoxingTaskGraph, fuse_bytes: int | None) -> Iterator[Bucket]:
    """Runs of reductions, cut by bytes where a number is given, in the order in which they end."""
    open_runs: dict[object, list[TaskFamily]] = {}
    sizes: dict[object, int] = {}
    member_of: dict[int, object] = {}

    def close(key: object, reason: str) -> Iterator[Bucket]:
        run = open_runs.pop(key, None)
        if run is not None:
            for member in run:
                del member_of[member.number]
            yield Bucket(tuple(run), reason)

    for entry in graph.in_order():
        for source in entry.inputs:
            key = member_of.get(source.family)
            if key is not None:
                yield from close(key, f"{_name(entry)} reads one of them")
        if not isinstance(entry, TaskFamily) or not _is_reduction(entry):
            continue
        key = _bucket_key(entry)
        nbytes = _nbytes(entry)
        run = open_runs.get(key)
        if run is not None:
            if len(run) == MAX_MEMBERS:
                yield from close(key, f"a call takes {MAX_MEMBERS} values")
            elif fuse_bytes is not None and sizes[key] + nbytes > fuse_bytes:
                yield from close(key, f"with the next they have more than {fuse_bytes} bytes")
        if key not in open_runs:
            open_runs[key], sizes[key] = [], 0
        open_runs[key].append(entry)
        sizes[key] += nbytes
        member_of[entry.number] = key
    for key in list(open_runs):
        yield from close(key, "no more of the same ranks, kind, dtype and stream follow")


def _name(entry: PlacedOp | TaskFamily) -> str:
    return entry.name if isinstance(entry, TaskFamily) else entry.op.name


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


# --- where it pays --------------------------------------------------------------------------------


def _ready(graph: BoxingTaskGraph, machine: Machine) -> dict[int, float]:
    """When the value of each reduction is made, by its family: seconds of the ops on its placement
    since the first reduction there.
    """
    seconds: dict[Placement, float] = {}
    ready: dict[int, float] = {}
    for entry in graph.in_order():
        if isinstance(entry, PlacedOp):
            placement = entry.op.placement
            if placement in seconds:
                seconds[placement] += placed_op_seconds(entry, machine)
        elif _is_reduction(entry):
            ready[entry.number] = seconds.setdefault(entry.placement, 0.0)
    return ready


def _cut(run: Bucket, ready: dict[int, float], machine: Machine) -> Iterator[Bucket]:
    """The buckets of a run. What runs on the compute stream overlaps with nothing, so that fewer
    calls are all that can be won there.
    """
    members = run.members
    transfer = members[0].transfer
    assert transfer is not None
    if len(members) == 1:
        yield run
        return
    begin = 0
    for end in (
        _by_bytes(members)
        if transfer.stream is Stream.COMPUTE
        else _by_times(members, ready, machine)
    ):
        last = end == len(members)
        reason = run.ended if last else "cut here, the estimated end of all is earliest (auto)"
        yield Bucket(members[begin:end], reason)
        begin = end


def _by_times(
    members: Sequence[TaskFamily], ready: dict[int, float], machine: Machine
) -> list[int]:
    cost = cost_of(members[0], machine, members[0].outputs[0])
    # Costs are per byte of what a group holds together, which is less where other axes split it.
    share = bytes_of_group(members[0].outputs[0], members[0]) / max(1, _nbytes(members[0]))
    return cut(
        [ready[member.number] for member in members],
        list(map(_nbytes, members)),
        cost.start,
        cost.per_byte * share,
    )


def _by_bytes(members: Sequence[TaskFamily]) -> Iterator[int]:
    size = 0
    for place, member in enumerate(members):
        size += _nbytes(member)
        if place and size > MOST_BYTES:
            yield place
            size = _nbytes(member)
    yield len(members)


def _redirected(entry: Entry, moved: dict[FamilyOutput, FamilyOutput]) -> Entry:
    if not any(source in moved for source in entry.inputs):
        return entry
    return replace(entry, inputs=tuple(moved.get(source, source) for source in entry.inputs))
