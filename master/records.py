"""What a master remembers of a worker and of a job."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from plancompiler.cluster.messages import (
    MISSING_SHOWN,
    Heartbeat,
    JobPhase,
    JobRequest,
    JobStatus,
    PeerAddress,
    Prepare,
    Register,
    Run,
    Waiting,
    WorkerStatus,
    WriteIndex,
)
from plancompiler.errors import ClusterError, ErrorReport, WorkerLostError
from plancompiler.limits.time_limits import BUSY_SHARE, TELL
from plancompiler.master.saving import Operation, Saving
from plancompiler.master.shipping import Shipping
from plancompiler.master.step_counts import StepCounts
from plancompiler.plan.digest import CrossRankFact

_TELL_SECONDS = TELL
"""How often whoever waits hears which ranks are missing."""


@dataclass(slots=True)
class Worker:
    """A worker that has registered."""

    slot: int
    """Its place in the cluster."""
    offer: Register
    last_seen: float
    connection: int = 0
    """0 while a master that was started again waits for it to come back."""
    token: bytes = b""
    """What it shows when it comes back."""
    received: int = 0
    """How many messages of it the master has."""
    commands: int = 0
    """How many commands it was given."""
    cpu_seconds: float = 0.0
    """CPU time that its process had used when it last said so,"""
    cpu_told: float = -math.inf
    """which was then."""
    worked: float = -math.inf
    """When its process has last used a processor for more than BUSY_SHARE of the time, or got on
    without."""
    job_id: int = 0
    """What it works on; negative: it has yet to let go of what a killed master began."""
    rank: int = 0
    """Which rank of that job it is."""

    @property
    def host(self) -> str:
        return self.offer.host

    def status(self) -> WorkerStatus:
        """A picture of it."""
        return WorkerStatus(
            self.slot, self.host, self.offer.device, self.offer.version, abs(self.job_id), self.rank
        )

    def take(self, job_id: int, rank: int) -> None:
        """It works on a job from now on."""
        self.job_id, self.rank = job_id, rank

    def lost(self, job: JobRecord, how: str) -> WorkerLostError:
        """What a job fails with when the worker is lost."""
        step = job.counts.under_way if isinstance(job.current, Run) else None
        return WorkerLostError(
            f"the worker of rank {self.rank} was lost while the job was {job.phase}: {how}",
            rank=self.rank,
            got=f"no worker for rank {self.rank} on host {self.host!r}"
            + ("" if step is None else f", step {step} under way"),
            hint="start the worker again and submit the job again",
        )

    def beat(self, beat: Heartbeat, now: float) -> None:
        """Its process runs."""
        used = beat.cpu_seconds - self.cpu_seconds
        if beat.gets_on or used >= BUSY_SHARE * (now - self.cpu_told):
            self.worked = now
        self.cpu_seconds, self.cpu_told = beat.cpu_seconds, now


@dataclass(slots=True)
class JobRecord:
    """A job from its submission until it is forgotten."""

    id: int
    name: str
    request: JobRequest
    transport_token: str
    world_size: int
    """How many ranks it has."""
    submitted: float
    started: float | None = None
    """When its turn came."""
    ended: float | None = None
    slots: tuple[int, ...] = ()
    """By rank, once its turn has come."""
    blocked: float | None = None
    """When it was the first of the queue and did not fit."""
    told: tuple[Waiting, float] | None = None
    """Which ranks its client was told to be missing, and when."""
    phase: JobPhase = JobPhase.QUEUED
    deadline: float = math.inf
    """When the phase, operation or (once ended) the release of the ranks takes too long."""
    waiting: set[int] = field(default_factory=set)
    """Ranks that have not yet done what the phase or operation asks for."""
    asked: dict[int, float] = field(default_factory=dict)
    """By rank: when it was asked for that, or last got on with it."""
    cached: bool = False
    """Whether neither the master nor the ranks heard of so far compiled anything."""
    shipping: Shipping | None = None
    """Of slices or plans, once there are any."""
    digests: dict[int, str] = field(default_factory=dict)
    facts: dict[int, tuple[CrossRankFact, ...]] = field(default_factory=dict)
    kernels: dict[int, str] = field(default_factory=dict)
    """What ranks compute with."""
    reporters: set[int] = field(default_factory=set)
    """Ranks that report outputs."""
    reported: dict[int, set[int]] = field(default_factory=dict)
    """Step -> ranks that have reported it."""
    counts: StepCounts = field(default_factory=StepCounts)
    done_steps: int = 0
    """Which all of these have reported."""
    operations: deque[Operation] = field(default_factory=deque)
    current: Operation | WriteIndex | None = None
    saving: Saving | None = None
    """A checkpoint that is written beside what the job does."""
    run_errors: list[ErrorReport] = field(default_factory=list)
    """What ranks say of the run at hand, of those on which it failed."""
    not_finite: ErrorReport | None = None
    """Why an open job takes no more steps, though it can still be saved."""
    error: ErrorReport | None = None
    aborting: bool = False
    """Failed, with the phase still open because the first cause may yet be heard of."""

    def begin_again(self, operations: Iterable[Operation]) -> JobRecord:
        """The same job as it was when it was submitted; it is known under the same number."""
        self.operations, self.current = deque(operations), None
        self.transport_token += "+"  # so that nothing of its first life is taken for the second's
        self.started, self.slots, self.blocked, self.told = None, (), None, None
        self.waiting, self.asked, self.cached, self.shipping = set(), {}, False, None
        self.digests, self.facts, self.kernels, self.reporters = {}, {}, {}, set()
        return self

    def await_ranks(self, ranks: Iterable[int], now: float) -> None:
        """The phase or operation asks something of these ranks."""
        self.waiting = set(ranks)
        self.asked = dict.fromkeys(self.waiting, now)

    def seconds(self, now: float) -> float:
        """From the submission to the end, or until now."""
        return (now if self.ended is None else self.ended) - self.submitted

    def queued_seconds(self, now: float) -> float:
        """The part of them before its turn came."""
        return self.seconds(now) if self.started is None else self.started - self.submitted

    def status(self, now: float) -> JobStatus:
        """A picture of it."""
        return JobStatus(
            self.id,
            self.name,
            self.phase,
            self.seconds(now),
            self.error,
            0 if self.shipping is None else self.shipping.fetched,
            queued_seconds=self.queued_seconds(now),
            ranks=self.world_size,
            priority=self.request.priority,
            steps=self.request.steps,
            done_steps=self.done_steps,
            open=self.request.open,
        )

    def prepare(self, rank: int, far: tuple[PeerAddress, ...]) -> Prepare:
        """The order to prepare it, for a rank to which these are on other hosts."""
        request = self.request
        return Prepare(
            self.id,
            self.transport_token,
            request.restore,
            far,
            request.save,
            request.deadline,
            request.record,
            request.open,
            request.anomaly,
            request.restored if rank == 0 else (),  # one rank's look at the checkpoint does
        )

    def tell_missing(self, absent: Sequence[int], now: float) -> Waiting | None:
        """What its client is to hear of ranks without a worker; None if it has just heard that."""
        ranks, count = tuple(absent[:MISSING_SHOWN]), len(absent)
        if self.told is not None:
            told, when = self.told
            if (told.ranks, told.count) == (ranks, count) and now - when < _TELL_SECONDS:
                return None
        waiting = Waiting(ranks, count, self.seconds(now))
        self.told = waiting, now
        return waiting


def unknown_job(job_id: int) -> ClusterError:
    """The error of whoever asks for a job that is not remembered."""
    return ClusterError(
        "the master knows no such job",
        got=f"job {job_id}",
        hint="`plancompiler jobs` lists those that it knows: of jobs that ended only the latest",
    )
