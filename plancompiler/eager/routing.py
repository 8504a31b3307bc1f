"""Rows between ranks in numbers that are known only at run time, with their gradients.

Here each rank has a tensor of its own, on a placement of that rank alone. Shapes differ by rank, so
that these have no compiled form; `pc.global_scatter` with a capacity has both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plancompiler.eager.spec import AnyWorld
from plancompiler.eager.tape import OneToOne
from plancompiler.eager.tensor import DistTensor, record
from plancompiler.errors import PlacementError, UsageError
from plancompiler.executor.comm import rows
from plancompiler.ir import NdSbp
from plancompiler.ir.source import user_line
from plancompiler.ops.registry import Array


def global_scatter(
    x: DistTensor, counts: Array, group: Sequence[int] | None = None
) -> tuple[DistTensor, Array]:
    """Send each row of this rank's `x` [r, ...] to the rank that has its expert.

    Experts are numbered over the ranks of `group` (default: all), equally many on each; the rows
    are sorted by expert, and `counts` (int64, zeros allowed) says how many are for each. Returns
    this rank's rows, sorted by (own expert, rank that they came from), and how many those are:
    int64 [experts, ranks]. All ranks of the group call it, and all or none record it: the gradient
    is `global_gather`, a collective.
    """
    world, ranks = _alone("global_scatter", x, group)
    context = world.comm.context(ranks, device_type=x.placement.device_type)
    scattered, received = rows.global_scatter(context, x.local, np.asarray(counts))
    return _recorded(world, _Scatter(x, scattered, counts, received, ranks), x, scattered), received


def global_gather(
    x: DistTensor, counts: Array, received: Array, group: Sequence[int] | None = None
) -> DistTensor:
    """Bring rows back: the inverse of `global_scatter`, which was given `counts` and found
    `received`. Its gradient is `global_scatter`.
    """
    world, ranks = _alone("global_gather", x, group)
    context = world.comm.context(ranks, device_type=x.placement.device_type)
    gathered = rows.global_gather(context, x.local, np.asarray(counts), np.asarray(received))
    return _recorded(world, _Gather(x, gathered, counts, received, ranks), x, gathered)


def _alone(
    kind: str, x: DistTensor, group: Sequence[int] | None
) -> tuple[AnyWorld, tuple[int, ...]]:
    """The world, and the ranks that exchange rows."""
    if not isinstance(x, DistTensor):
        raise UsageError(
            f"{kind} takes a tensor of this rank",
            source=user_line(),
            got=type(x).__name__,
            hint="in a job, pc.global_scatter takes a capacity",
        )
    world = x.spec.world
    if x.placement.rank_list != (world.rank,):
        raise PlacementError(
            f"{kind} takes a tensor that lies on this rank alone",
            source=user_line(),
            rank=world.rank,
            got=str(x.spec),
            expected=f'pc.Placement("cpu", [{world.rank}])',
            hint="pc.global_scatter takes tensors of all ranks, with a capacity",
        )
    return world, tuple(range(world.size)) if group is None else tuple(group)


def _recorded(world: AnyWorld, op: _Routed, x: DistTensor, local: Array) -> DistTensor:
    tensor = DistTensor(op.outputs[0], local)
    if x.node is not None and world.recording:
        record(tensor, op, x)
    return tensor


class _Routed(OneToOne):
    """An exchange of rows on the tape."""

    def __init__(
        self, x: DistTensor, routed: Array, counts: Array, received: Array, ranks: tuple[int, ...]
    ) -> None:
        spec = x.spec
        whole = NdSbp.broadcast(spec.placement.ndim)
        made = spec.world.spec(routed.shape, spec.dtype, spec.placement, whole)
        super().__init__(spec, made)
        self.counts = counts
        self.received = received
        self.ranks = ranks


class _Scatter(_Routed):
    kind = "global_scatter"

    def back(self, grad: DistTensor, create_graph: bool) -> DistTensor:
        return global_gather(grad, self.counts, self.received, self.ranks)


class _Gather(_Routed):
    kind = "global_gather"

    def back(self, grad: DistTensor, create_graph: bool) -> DistTensor:
        return global_scatter(grad, self.counts, self.ranks)[0]
