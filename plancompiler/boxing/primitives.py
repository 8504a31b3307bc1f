"""The primitive table: every layout change along one set of mesh axes, its task and its cost.

Costs follow the α–β model of Thakur, Rabenseifner and Gropp (2005): a message costs α, a byte β,
and n devices need about log2(n) rounds; starting a task costs one more α, so that one collective
over two mesh axes beats two. A byte copied in local memory costs γ. The costs only rank
alternatives, so one set of constants serves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from plancompiler.ir.halo import Halo
from plancompiler.ir.sbp import Broadcast, Partial, Sbp, Split
from plancompiler.ir.task import Primitive, TaskKind

ALPHA = 10e-6
"""Seconds per message."""
BETA = 1e-10
"""Seconds per byte between devices."""
GAMMA = 1e-11
"""Seconds per byte within a device's memory."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a primitive as a function of the bytes it works on."""

    start: float
    """Seconds whatever the size."""
    per_byte: float
    """Seconds per byte of the value as it is before these mesh axes split it."""

    def seconds(self, nbytes: float) -> float:
        """Seconds for a value of this size."""
        return self.start + self.per_byte * nbytes


def collective(devices: int, passes: int, share: float) -> Cost:
    """A collective of `passes` times log2(n) rounds that moves `share` of the value per device."""
    return Cost((1 + passes * math.log2(devices)) * ALPHA, share * BETA)


CostRule = Callable[[int], Cost]
"""Number of devices → cost."""


@dataclass(frozen=True, slots=True)
class PrimitiveRow:
    """One row of the table."""

    before: type[Sbp]
    after: type[Sbp]
    primitive: Primitive
    kind: TaskKind
    cost: CostRule


TABLE: tuple[PrimitiveRow, ...] = (
    # P → B: every device gets the reduced value (ring: reduce-scatter, then all-gather).
    PrimitiveRow(
        Partial,
        Broadcast,
        Primitive.ALL_REDUCE,
        TaskKind.COLLECTIVE_BOXING,
        lambda n: collective(n, 2, 2 * (n - 1) / n),
    ),
    # P → S: every device gets its piece of the reduced value.
    PrimitiveRow(
        Partial,
        Split,
        Primitive.REDUCE_SCATTER,
        TaskKind.COLLECTIVE_BOXING,
        lambda n: collective(n, 1, (n - 1) / n),
    ),
    # S → B: every device gets all pieces.
    PrimitiveRow(
        Split,
        Broadcast,
        Primitive.ALL_GATHER,
        TaskKind.COLLECTIVE_BOXING,
        lambda n: collective(n, 1, (n - 1) / n),
    ),
    # S(i) → S(j): every device sends a piece of its piece to every other.
    PrimitiveRow(
        Split,
        Split,
        Primitive.ALL_TO_ALL,
        TaskKind.COLLECTIVE_BOXING,
        lambda n: collective(n, 1, (n - 1) / (n * n)),
    ),
    # B → S: every device keeps its piece; nothing moves.
    PrimitiveRow(
        Broadcast, Split, Primitive.SLICE, TaskKind.SLICE_BOXING, lambda n: Cost(0.0, GAMMA / n)
    ),
    # B → H: every device keeps its piece and the halo around it; nothing moves. From any other
    # layout a halo comes by an exchange of boxes (`exchange`).
    PrimitiveRow(
        Broadcast, Halo, Primitive.SLICE, TaskKind.SLICE_BOXING, lambda n: Cost(0.0, GAMMA / n)
    ),
    # B → P: the first device keeps the value, the others hold the reduction's identity.
    PrimitiveRow(
        Broadcast,
        Partial,
        Primitive.PARTIALISE,
        TaskKind.BOXING_IDENTITY,
        lambda _: Cost(0.0, GAMMA),
    ),
)

_BY_TYPES = {(row.before, row.after): row for row in TABLE}


def primitive_between(before: Sbp, after: Sbp) -> PrimitiveRow | None:
    """The row that leads from one SBP to another in one step, or None (S → P, P → other P)."""
    return _BY_TYPES.get((type(before), type(after)))
