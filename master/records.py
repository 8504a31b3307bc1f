"""What a master remembers of a worker and of a job."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from plancompiler.cluster.messages import JobRequest, Phase, Register, WriteIndex
from plancompiler.errors import ErrorReport
from plancompiler.master.saving import Operation, Saving
from plancompiler.master.shipping import Shipping
from plancompiler.plan.digest import CrossRankFact


@dataclass(slots=True)
class Worker:
    """A worker that has registered."""

    connection: int
    rank: int
    offer: Register
    last_seen: float
    job_id: int = 0

    @property
    def host(self) -> str:
        return self.offer.host


@dataclass(slots=True)
class Job:
    """A job from its submission until it is forgotten."""

    id: int
    name: str
    request: JobRequest
    transport_token: str
    submitted: float
    phase: Phase = Phase.QUEUED
    deadline: float = math.inf
    """When the phase, operation or (once ended) the release of the ranks takes too long."""
    waiting: set[int] = field(default_factory=set)
    """Ranks that have not yet done what the phase or operation asks for."""
    cached: bool = False
    """Whether neither the master nor the ranks heard of so far compiled anything."""
    shipping: Shipping | None = None
    """Of slices or plans, once there are any."""
    digests: dict[int, str] = field(default_factory=dict)
    facts: dict[int, tuple[CrossRankFact, ...]] = field(default_factory=dict)
    reporters: set[int] = field(default_factory=set)
    """Ranks that report outputs."""
    reported: dict[int, set[int]] = field(default_factory=dict)
    """Step -> ranks that have reported it."""
    operations: deque[Operation] = field(default_factory=deque)
    current: Operation | WriteIndex | None = None
    saving: Saving | None = None
    """A checkpoint that is written beside what the job does."""
    error: ErrorReport | None = None
    aborting: bool = False
    """Failed, with the phase still open because the first cause may yet be heard of."""
