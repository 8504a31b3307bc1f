"""`OpGraph`, `TaskFamily` and `BoxingTaskGraph`: what the master builds and all ranks agree on.

A family is "this task on every device of that placement", stored once per placement. Families are
numbered along one topological order of the logical graph with its boxing: the global order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from plancompiler.ir import UNKNOWN_SOURCE, DType, Job, NdSbp, Op, Placement, Reduction, SourceLine
from plancompiler.ir.pipeline import Pipeline
from plancompiler.ir.task import Primitive, TaskKind
from plancompiler.ops.rule import NdSignature
from plancompiler.plan.plan import Stream

_SPECIAL_KINDS = {
    "input": TaskKind.INPUT,
    "variable": TaskKind.VARIABLE,
    "output": TaskKind.OUTPUT,
}


def task_kind_of(op_kind: str) -> TaskKind:
    """The kind of task that runs an op."""
    return _SPECIAL_KINDS.get(op_kind, TaskKind.COMPUTE)


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A global tensor and its SBP on the family's placement."""

    shape: tuple[int, ...]
    dtype: DType
    sbp: NdSbp


@dataclass(frozen=True, slots=True)
class FamilyOutput:
    """Where a value comes from: an output slot of a family."""

    family: int
    slot: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a transport family does."""

    primitive: Primitive
    mesh_axes: tuple[int, ...] = ()
    """Mesh axes of the family's placement along which devices talk (collectives)."""
    reduction: Reduction | None = None
    src_axis: int = -1
    """Tensor axis split before, for all_gather and all_to_all."""
    dst_axis: int = -1
    """Tensor axis split after, for reduce_scatter, all_to_all and slice."""
    src_placement: Placement | None = None
    """Set for exchanges between placements."""
    src_sbp: NdSbp | None = None
    """Layout of the input (of a fused reduction, of its last)."""
    late: bool = False
    """Whether it waits for the op before it in the global order, though it needs nothing of it: it
    must not hold memory earlier."""
    stream: Stream = Stream.COLLECTIVE
    """Where ranks run it, if it is a collective."""


@dataclass(frozen=True, slots=True)
class TaskFamily:
    """One task on every device of a placement."""

    number: int
    kind: TaskKind
    name: str
    """Op name for compute kinds; value name and primitive for transport."""
    placement: Placement
    inputs: tuple[FamilyOutput, ...]
    outputs: tuple[TensorLayout, ...]
    transfer: Transfer | None = None
    """Set for transport kinds."""
    source: SourceLine = UNKNOWN_SOURCE
    segment: int = 0
    """Index into the segments of the graph's pipeline; shapes of what runs once per micro-batch are
    those of one micro-batch."""
    per_microbatch: bool = False
    """Whether its outputs have a version per micro-batch."""


@dataclass(frozen=True)
class OpGraph:
    """A job whose every op has its signature; inputs are in the layouts that the op accepts."""

    job: Job
    signatures: tuple[NdSignature, ...]
    """Aligned with `job.ops`."""


@dataclass(frozen=True)
class PlacedOp:
    """One op with its signature, its family number and where its inputs come from after boxing."""

    op: Op
    signature: NdSignature
    family: int
    inputs: tuple[FamilyOutput, ...]


@dataclass(frozen=True)
class PlacedGraph:
    """Families at boxing edges, and numbered ops: of all ranks, or what one rank needs."""

    job_name: str
    seed: int
    world_size: int
    ops: tuple[PlacedOp, ...]
    """In global order."""
    families: tuple[TaskFamily, ...]
    """Transport families, and the compute families at both ends of boxing edges, in global order.
    """
    pipeline: Pipeline | None = None

    def in_order(self) -> list[PlacedOp | TaskFamily]:
        """Ops and transport families in global order."""
        transport = (family for family in self.families if family.transfer is not None)
        return sorted(
            [*self.ops, *transport],
            key=lambda entry: entry.family if isinstance(entry, PlacedOp) else entry.number,
        )


@dataclass(frozen=True)
class BoxingTaskGraph(PlacedGraph):
    """All families at boxing edges, and all ops."""

    @cached_property
    def family_by_number(self) -> dict[int, TaskFamily]:
        return {family.number: family for family in self.families}


@dataclass(frozen=True)
class RankSlice(PlacedGraph):
    """What one rank must know to rebuild its own task graph.

    It holds the ops and families with a member on the rank and, for every register that crosses
    ranks, its producer and all its CopyCommNet consumers.
    """
