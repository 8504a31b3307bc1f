"""What the ops and the transport of a step take on a machine, added up one after another.

Rewrites of a job are compared by it. The step is that of the busiest rank. What overlaps, and who
waits for whom, is not in it: a forecast has that.
"""

from __future__ import annotations

from dataclasses import dataclass

from plancompiler.boxing.graph import BoxingTaskGraph, PlacedOp
from plancompiler.boxing.report import boxing_costs
from plancompiler.costs import Machine, generic_machine, op_seconds
from plancompiler.costs.op_time import FREE_OPS
from plancompiler.ir import Placement, Split
from plancompiler.ir.halo import Halo
from plancompiler.ir.shard import element_count
from plancompiler.ops.registry import flops_of, op_def, pointwise_of


@dataclass(frozen=True, slots=True)
class StepTime:
    """The busiest rank's step."""

    rank: int
    compute_seconds: float
    transport_seconds: float

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.transport_seconds


def step_time(graph: BoxingTaskGraph, machine: Machine | None = None) -> StepTime:
    """The step of the busiest rank. Ranks of a placement do alike; its first stands for all."""
    compute: dict[Placement, float] = {}
    for placed in graph.ops:
        placement = placed.op.placement
        compute[placement] = compute.get(placement, 0.0) + placed_op_seconds(placed, machine)
    transport: dict[Placement, float] = {}
    for cost in boxing_costs(graph, machine):
        placement = graph.family_by_number[cost.family].placement
        transport[placement] = transport.get(placement, 0.0) + cost.seconds
    ranks = sorted({placement.rank_list[0] for placement in (*compute, *transport)})
    estimates = [
        StepTime(rank, _of_rank(compute, rank), _of_rank(transport, rank)) for rank in ranks
    ]
    return max(estimates, key=lambda each: each.seconds, default=StepTime(0, 0.0, 0.0))


def _of_rank(seconds: dict[Placement, float], rank: int) -> float:
    return sum(spent for placement, spent in seconds.items() if rank in placement.rank_list)


def placed_op_seconds(placed: PlacedOp, machine: Machine | None = None) -> float:
    """Seconds of one device's share of an op; on the generic machine where none is given."""
    op, signature = placed.op, placed.signature
    if op.kind in FREE_OPS or op_def(op.kind).view:
        return 0.0
    shares = [1] * op.placement.ndim
    nbytes = 0.0
    for values, layouts in ((op.inputs, signature.inputs), (op.outputs, signature.outputs)):
        for value, sbp in zip(values, layouts, strict=True):
            held: float = element_count(value.shape) * value.dtype.itemsize
            for axis, entry in enumerate(sbp):
                if isinstance(entry, (Split, Halo)):
                    shares[axis] = op.placement.hierarchy[axis]
                    held /= shares[axis]
            nbytes += held
    typed = op.kind, op.input_types, op.output_types, dict(op.attrs)
    dtype, parts = (op.outputs or op.inputs)[0].dtype, element_count(shares)
    pointwise = pointwise_of(*typed) / parts
    return op_seconds(
        machine or generic_machine(), flops_of(*typed) / parts, nbytes, dtype, pointwise
    )
