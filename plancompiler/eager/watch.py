"""`with pc.comm_trace() as t:` lists the collectives of a rank, for inspection and tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from plancompiler.eager.world import current_world
from plancompiler.executor.comm.flight_recorder import CommRecord
from plancompiler.ir import SourceLine


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of this rank."""

    op: str
    source: SourceLine
    """The user's line that led to it."""
    nbytes: int
    """Of this rank's input."""
    group: tuple[int, ...]


class CommTrace:
    """The collectives of a block, in order."""

    def __init__(self) -> None:
        self.collectives: list[Collective] = []

    def counts(self) -> dict[str, int]:
        """How often each collective ran."""
        return dict(Counter(each.op for each in self.collectives))

    def nbytes(self) -> int:
        """Bytes of all inputs together."""
        return sum(each.nbytes for each in self.collectives)

    def __str__(self) -> str:
        return "\n".join(
            f"{each.op} of {each.nbytes} bytes among {list(each.group)} at {each.source}"
            for each in self.collectives
        )


@contextmanager
def comm_trace() -> Iterator[CommTrace]:
    """List every collective that this rank runs inside the block."""
    trace = CommTrace()
    world = current_world()
    if world.size == 1:
        yield trace
        return

    def observe(record: CommRecord) -> None:
        trace.collectives.append(Collective(record.op, record.source, record.nbytes, record.group))

    observers = world.comm.observers
    observers.append(observe)
    try:
        yield trace
    finally:
        observers.remove(observe)
