"""A simple estimate of a step's time, by which rewrites of a job can be compared.

Of each rank, ops and transport are added up one after another: an op takes as long as its
arithmetic or its memory traffic, whichever is more (the roofline model of S. Williams et al.,
2009), transport what the α–β model of boxing says. The step is that of the busiest rank. What
overlaps, and who waits for whom, is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from plancompiler.boxing.graph import BoxingTaskGraph, PlacedOp
from plancompiler.boxing.report import boxing_costs
from plancompiler.ir import Placement, Split
from plancompiler.ir.halo import Halo
from plancompiler.ir.shard import element_count
from plancompiler.ops.registry import flops_of, op_def

FLOPS_PER_SECOND = 5e10
"""Of one rank: a core's matrix product in float32."""
BYTES_PER_SECOND = 2e10
"""Of one rank: from and to memory."""

_FREE = frozenset({"input", "variable", "output"})


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """The busiest rank's step."""

    rank: int
    compute_seconds: float
    transport_seconds: float

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.transport_seconds


def estimate_step(graph: BoxingTaskGraph) -> StepEstimate:
    """The step of the busiest rank. Ranks of a placement do alike; its first stands for all."""
    compute: dict[Placement, float] = {}
    for placed in graph.ops:
        placement = placed.op.placement
        compute[placement] = compute.get(placement, 0.0) + op_seconds(placed)
    transport: dict[Placement, float] = {}
    for cost in boxing_costs(graph):
        placement = graph.family_by_number[cost.family].placement
        transport[placement] = transport.get(placement, 0.0) + cost.seconds
    ranks = sorted({placement.rank_list[0] for placement in (*compute, *transport)})
    estimates = [
        StepEstimate(rank, _of_rank(compute, rank), _of_rank(transport, rank)) for rank in ranks
    ]
    return max(estimates, key=lambda each: each.seconds, default=StepEstimate(0, 0.0, 0.0))


def _of_rank(seconds: dict[Placement, float], rank: int) -> float:
    return sum(spent for placement, spent in seconds.items() if rank in placement.rank_list)


def op_seconds(placed: PlacedOp) -> float:
    """Time of one device's share of an op."""
    op, signature = placed.op, placed.signature
    if op.kind in _FREE or op_def(op.kind).view:
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
    flops = flops_of(
        op.kind,
        tuple(value.type for value in op.inputs),
        tuple(value.type for value in op.outputs),
        dict(op.attrs),
    )
    return max(flops / element_count(shares) / FLOPS_PER_SECOND, nbytes / BYTES_PER_SECOND)
