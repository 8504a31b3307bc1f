"""The primitive table: every layout change along one set of mesh axes, and its task.

What they cost is in `plancompiler.costs.primitive`.
"""

from __future__ import annotations

from dataclasses import dataclass

from plancompiler.costs.links import LinkCost
from plancompiler.costs.primitive import Cost, primitive_cost
from plancompiler.ir.halo import Halo
from plancompiler.ir.sbp import Broadcast, Partial, Sbp, Split
from plancompiler.ir.task import Primitive, TaskKind


@dataclass(frozen=True, slots=True)
class PrimitiveRow:
    """One row of the table."""

    before: type[Sbp]
    after: type[Sbp]
    primitive: Primitive
    kind: TaskKind

    def cost(
        self, devices: int, link: LinkCost, sent_apart: bool = False, received_apart: bool = False
    ) -> Cost:
        """What it costs among so many devices that these links join; see `primitive_cost`."""
        return primitive_cost(self.primitive, devices, link, sent_apart, received_apart)


TABLE: tuple[PrimitiveRow, ...] = (
    # P → B: every device gets the reduced value (ring: reduce-scatter, then all-gather).
    PrimitiveRow(
        Partial,
        Broadcast,
        Primitive.ALL_REDUCE,
        TaskKind.COLLECTIVE_BOXING,
    ),
    # P → S: every device gets its piece of the reduced value.
    PrimitiveRow(
        Partial,
        Split,
        Primitive.REDUCE_SCATTER,
        TaskKind.COLLECTIVE_BOXING,
    ),
    # S → B: every device gets all pieces.
    PrimitiveRow(
        Split,
        Broadcast,
        Primitive.ALL_GATHER,
        TaskKind.COLLECTIVE_BOXING,
    ),
    # S(i) → S(j): every device sends a piece of its piece to every other.
    PrimitiveRow(
        Split,
        Split,
        Primitive.ALL_TO_ALL,
        TaskKind.COLLECTIVE_BOXING,
    ),
    # B → S: every device keeps its piece; nothing moves.
    PrimitiveRow(Broadcast, Split, Primitive.SLICE, TaskKind.SLICE_BOXING),
    # B → H: every device keeps its piece and the halo around it; nothing moves. From any other
    # layout a halo comes by an exchange of boxes (`exchange`).
    PrimitiveRow(Broadcast, Halo, Primitive.SLICE, TaskKind.SLICE_BOXING),
    # B → P: the first device keeps the value, the others hold the reduction's identity.
    PrimitiveRow(
        Broadcast,
        Partial,
        Primitive.PARTIALISE,
        TaskKind.BOXING_IDENTITY,
    ),
)

_BY_TYPES = {(row.before, row.after): row for row in TABLE}


def primitive_between(before: Sbp, after: Sbp) -> PrimitiveRow | None:
    """The row that leads from one SBP to another in one step, or None (S → P, P → other P)."""
    return _BY_TYPES.get((type(before), type(after)))
