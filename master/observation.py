"""What a master has done so far, in numbers: for its metrics and its page.

It hears every event of every job, in the thread of the master's event loop, and does little about
each: what it keeps of a job is bounded, and a loss is looked at a few times a second only.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from plancompiler.cluster.chunks import arrays_from_bytes
from plancompiler.cluster.messages import JobEvent, JobPhase, PhaseChanged, RankOutputs, StepDone
from plancompiler.errors import WireFormatError

LATENCY_BOUNDS = (0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds; above the last one is a bucket of its own."""
_JOBS = 100
"""Jobs that are remembered, the latest."""
_POINTS = 256
"""Of a job's curve; of a longer one every second point goes, again and again."""
_SAMPLE_SECONDS = 0.1
"""Between two looks at a job's loss."""
_SCALAR_BYTES = 16 << 10
"""Outputs of a step that are larger hold more than a few scalars, and are not looked at."""
_RATE_STEPS = 64
_RATE_WINDOW = 10.0
"""Steps per second are of the last so many steps, and 0 after so long without one."""


@dataclass(slots=True)
class ObservedJob:
    """One job."""

    submitted: float
    steps: int = 0
    curve: list[tuple[int, float]] = field(default_factory=list)
    """Step and loss: the output of this name, or the first scalar of a step."""
    stride: int = 1
    sampled: float = -math.inf
    unseen: RankOutputs | None = None
    """What came since a loss was looked at."""
    last_loss: float | None = None
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_RATE_STEPS))
    """When its last steps were done."""

    def rate(self, now: float) -> float:
        """Steps per second."""
        if len(self.latest) < 2 or now - self.latest[-1] > _RATE_WINDOW:
            return 0.0
        return (len(self.latest) - 1) / max(self.latest[-1] - self.latest[0], 1e-9)

    def add_point(self, step: int, loss: float) -> None:
        """One more point of its curve."""
        self.last_loss = loss
        if step % self.stride:
            return
        self.curve.append((step, loss))
        if len(self.curve) > _POINTS:
            self.stride *= 2
            self.curve = [point for point in self.curve if not point[0] % self.stride]


class Observation:
    """Everything that is counted."""

    def __init__(self) -> None:
        self.jobs: dict[int, ObservedJob] = {}
        """The latest ones."""
        self.submitted = 0
        self.ended: Counter[JobPhase] = Counter()
        """By how they ended."""
        self.steps = 0
        self.output_bytes = 0
        """That ranks have sent."""
        self.latencies = [0] * (len(LATENCY_BOUNDS) + 1)
        """Jobs by the time from their submission to their first step, in seconds."""
        self.latency_sum = 0.0

    def note(self, job_id: int, event: JobEvent) -> None:
        """Something happened to a job."""
        if isinstance(event, PhaseChanged):
            self._entered(job_id, event.phase)
            return
        job = self.jobs.get(job_id)
        if job is None:
            return
        if isinstance(event, RankOutputs):
            self.output_bytes += len(event.arrays)
            self._look(job, event)
        elif isinstance(event, StepDone):
            self._stepped(job)

    def _entered(self, job_id: int, phase: JobPhase) -> None:
        if phase is JobPhase.QUEUED:
            self.submitted += 1
            self.jobs[job_id] = ObservedJob(time.monotonic())
            if len(self.jobs) > _JOBS:
                del self.jobs[min(self.jobs)]
        elif phase.is_end:
            self.ended[phase] += 1

    def _stepped(self, job: ObservedJob) -> None:
        now = time.monotonic()
        self.steps += 1
        job.steps += 1
        job.latest.append(now)
        if job.steps == 1:
            seconds = now - job.submitted
            self.latencies[bisect_left(LATENCY_BOUNDS, seconds)] += 1
            self.latency_sum += seconds

    def _look(self, job: ObservedJob, event: RankOutputs) -> None:
        if len(event.arrays) > _SCALAR_BYTES:
            return
        job.unseen = event
        now = time.monotonic()
        if now - job.sampled >= _SAMPLE_SECONDS and _add_loss(job):
            job.sampled = now

    def catch_up(self) -> None:
        """Look at the latest loss of every job."""
        for job in self.jobs.values():
            _add_loss(job)


def _add_loss(job: ObservedJob) -> bool:
    """Look at the outputs that came last; whether they hold a scalar."""
    event, job.unseen = job.unseen, None
    if event is None:
        return False
    try:
        arrays = arrays_from_bytes(event.arrays)
    except WireFormatError:  # whoever reads the outputs is told
        return False
    scalars = {
        name: value
        for name, value in arrays.items()
        if value.ndim == 0 and np.issubdtype(value.dtype, np.number)
    }
    if not scalars:
        return False
    job.add_point(event.step, float(scalars.get("loss", next(iter(scalars.values())))))
    return True
