"""What a job does, one after another, and checkpoints that ranks write meanwhile, as the master
keeps track of them: pure.

All ranks write their shards; then the first one writes the index, which makes them a checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from plancompiler.cluster.messages import (
    Collect,
    Finish,
    JobRequest,
    Run,
    Save,
    SendPlan,
    SendTimeline,
    WriteIndex,
)

Operation = Run | Save | Collect | SendTimeline | SendPlan | Finish
"""What a running job does, one after another."""


def operations_of(job_id: int, request: JobRequest, tickets: Iterator[int]) -> Iterator[Operation]:
    """What a submitted job does, from its first step to its end."""
    if request.compile_only:
        yield SendPlan(job_id, next(tickets))
        yield Finish(job_id)
        return
    yield Run(job_id, next(tickets), request.steps, False)
    if request.save:
        yield Save(job_id, next(tickets), request.save)
    if request.record:
        yield SendTimeline(job_id, next(tickets))
    yield Finish(job_id)


def take_operation(
    operations: deque[Operation], request: JobRequest, tickets: Iterator[int]
) -> Operation:
    """The next operation; a run with checkpoints on its way is taken part by part."""
    operation, every = operations.popleft(), request.save_every
    if not isinstance(operation, Run) or not request.save or not 0 < every < operation.steps:
        return operation
    rest = replace(operation, ticket=next(tickets), steps=operation.steps - every)
    save = Save(operation.job_id, next(tickets), request.save, background=True)
    operations.extendleft((rest, save))
    return replace(operation, steps=every)


@dataclass(slots=True)
class Saving:
    """One checkpoint on its way."""

    order: Save
    waiting: set[int]
    """Ranks that have not yet written what they were asked for last."""
    asked: float
    """When that was."""
    indexing: bool = False
    """Whether all shards are there, and the index is being written."""

    def written(self, rank: int, ticket: int) -> bool:
        """Take note that a rank has written; whether it was the last that was awaited."""
        if ticket != self.order.ticket or rank not in self.waiting:
            return False
        self.waiting.remove(rank)
        return not self.waiting

    def index(self, first: int, now: float) -> WriteIndex:
        """The order to the first rank, once all shards are there."""
        self.indexing = True
        self.waiting, self.asked = {first}, now
        order = self.order
        return WriteIndex(order.job_id, order.ticket, order.directory, background=True)
