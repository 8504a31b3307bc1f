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

from plancompiler.ir.sbp import Broadcast, Partial, Sbp, Split
from plancompiler.ir.task import Primitive, TaskKind

ALPHA = 10e-6
"""Seconds per message."""
BETA = 1e-10
"""Seconds per byte between devices."""
GAMMA = 1e-11
"""Seconds per byte within a device's memory."""


def rounds(devices: int) -> float:
    """Message rounds of a collective over `devices`."""
    return math.log2(devices)


def start(messages: float) -> float:
    """Seconds to start a transfer of this many message rounds."""
    return (1 + messages) * ALPHA


Cost = Callable[[int, float], float]
"""(devices n, bytes v of the value before it is split along these axes) → seconds."""


@dataclass(frozen=True, slots=True)
class PrimitiveRow:
    """One row of the table."""

    before: type[Sbp]
    after: type[Sbp]
    primitive: Primitive
    kind: TaskKind
    cost: Cost


TABLE: tuple[PrimitiveRow, ...] = (
    # P → B: every device gets the reduced value (ring: reduce-scatter, then all-gather).
    PrimitiveRow(
        Partial,
        Broadcast,
        Primitive.ALL_REDUCE,
        TaskKind.COLLECTIVE_BOXING,
        lambda n, v: start(2 * rounds(n)) + 2 * (n - 1) / n * v * BETA,
    ),
    # P → S: every device gets its piece of the reduced value.
    PrimitiveRow(
        Partial,
        Split,
        Primitive.REDUCE_SCATTER,
        TaskKind.COLLECTIVE_BOXING,
        lambda n, v: start(rounds(n)) + (n - 1) / n * v * BETA,
    ),
    # S → B: every device gets all pieces.
    PrimitiveRow(
        Split,
        Broadcast,
        Primitive.ALL_GATHER,
        TaskKind.COLLECTIVE_BOXING,
        lambda n, v: start(rounds(n)) + (n - 1) / n * v * BETA,
    ),
    # S(i) → S(j): every device sends a piece of its piece to every other.
    PrimitiveRow(
        Split,
        Split,
        Primitive.ALL_TO_ALL,
        TaskKind.COLLECTIVE_BOXING,
        lambda n, v: start(rounds(n)) + (n - 1) / (n * n) * v * BETA,
    ),
    # B → S: every device keeps its piece; nothing moves.
    PrimitiveRow(
        Broadcast, Split, Primitive.SLICE, TaskKind.SLICE_BOXING, lambda n, v: v / n * GAMMA
    ),
    # B → P: the first device keeps the value, the others hold the reduction's identity.
    PrimitiveRow(
        Broadcast,
        Partial,
        Primitive.PARTIALISE,
        TaskKind.BOXING_IDENTITY,
        lambda _, v: v * GAMMA,
    ),
)

_BY_TYPES = {(row.before, row.after): row for row in TABLE}


def primitive_between(before: Sbp, after: Sbp) -> PrimitiveRow | None:
    """The row that leads from one SBP to another in one step, or None (S → P, P → other P)."""
    return _BY_TYPES.get((type(before), type(after)))
