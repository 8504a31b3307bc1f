"""What layout changes cost: the α–β model of Thakur, Rabenseifner and Gropp (2005).

A message costs α, a byte β, and n devices need about log2(n) rounds; starting a task costs one more
α, so that one collective over two mesh axes beats two. A byte copied in local memory costs γ: parts
that lie apart in a device's memory, in short runs along an inner axis, are packed to be sent, and
put in their places where they come.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from plancompiler.costs.links import LinkCost
from plancompiler.ir.task import Primitive


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a primitive as a function of the bytes it works on."""

    start: float
    """Seconds whatever the size."""
    per_byte: float
    """Seconds per byte of the value as it is before these mesh axes split it."""
    share: float = 0.0
    """Bytes that a device receives, per byte of that value."""

    def seconds(self, nbytes: float) -> float:
        """Seconds for a value of this size."""
        return self.start + self.per_byte * nbytes


def _collective(passes: int, share: Callable[[int], float]) -> Callable[[int, LinkCost], Cost]:
    """A collective of `passes` times log2(n) rounds that moves `share` of the value per device."""

    def cost(devices: int, link: LinkCost) -> Cost:
        moved = share(devices)
        rounds = 1 + passes * math.log2(devices)
        return Cost(rounds * link.per_message, moved * link.per_byte, moved)

    return cost


_COSTS: dict[Primitive, Callable[[int, LinkCost], Cost]] = {
    # A ring: reduce-scatter, then all-gather.
    Primitive.ALL_REDUCE: _collective(2, lambda n: 2 * (n - 1) / n),
    Primitive.REDUCE_SCATTER: _collective(1, lambda n: (n - 1) / n),
    Primitive.ALL_GATHER: _collective(1, lambda n: (n - 1) / n),
    # Every device sends a piece of its piece to every other.
    Primitive.ALL_TO_ALL: _collective(1, lambda n: (n - 1) / (n * n)),
    # Nothing moves: every device keeps its piece, or fills what it does not hold.
    Primitive.SLICE: lambda n, link: Cost(0.0, link.per_copied_byte / n),
    Primitive.PARTIALISE: lambda n, link: Cost(0.0, link.per_copied_byte),
}
_COPIED: dict[Primitive, Callable[[int], float]] = {
    Primitive.REDUCE_SCATTER: lambda n: 1.0,
    Primitive.ALL_GATHER: lambda n: 1.0,
    Primitive.ALL_TO_ALL: lambda n: 1 / n,
}
"""Bytes that a device packs, or unpacks, per byte of the value."""


def primitive_cost(
    primitive: Primitive,
    devices: int,
    link: LinkCost,
    sent_apart: bool = False,
    received_apart: bool = False,
) -> Cost:
    """The cost of a layout change among so many devices, which these links join: whether the parts
    that a device sends to others, and those that it receives, lie apart in its memory.
    """
    cost = _COSTS[primitive](devices, link)
    if not (sent_apart or received_apart) or primitive not in _COPIED:
        return cost
    copied = (sent_apart + received_apart) * _COPIED[primitive](devices)
    return replace(cost, per_byte=cost.per_byte + copied * link.per_copied_byte)


def boxes_seconds(boxes: int, nbytes: float, link: LinkCost, at_once: bool = False) -> float:
    """Seconds in which a device reads so many boxes of others, of so many bytes together: one after
    another with a question each, or `at_once`, in as many rounds as in an all-to-all.
    """
    if at_once and boxes:
        return (1 + math.log2(1 + boxes)) * link.per_message + nbytes * link.per_byte
    return boxes * 2 * link.per_message + nbytes * link.per_byte
