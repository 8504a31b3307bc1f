"""Pure: what a master says of a job that took too long."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from plancompiler.cluster.messages import JobPhase
from plancompiler.errors import DeadlineError
from plancompiler.limits.time_limits import DEADLINE
from plancompiler.master.events import Limits
from plancompiler.master.records import Job, Worker


def somebody_works(job: Job, workers: Mapping[int, Worker], now: float) -> bool:
    """Whether a rank that a job waits for has used its processor within the deadline; such a rank
    is waited for, however slow it is, so the job is not overdue before it has stood still.
    """
    awaited = job.waiting if job.saving is None else job.waiting | job.saving.waiting
    works = job.phase is not JobPhase.QUEUED and any(
        now - workers[rank].worked < DEADLINE for rank in awaited & workers.keys()
    )
    if works:
        job.deadline = now + DEADLINE
    return works


def too_late(job: Job, present: Collection[int], world_size: int, limits: Limits) -> DeadlineError:
    """What an overdue job fails with. `present` are the ranks with a worker."""
    if job.phase is JobPhase.QUEUED:
        return too_few_workers(present, world_size, limits.workers)
    if job.phase is not JobPhase.RUNNING or job.current is not None:
        return no_progress(job.phase, job.waiting)
    if job.saving is not None:
        return no_progress(job.phase, job.saving.waiting)
    return nothing_asked(limits.idle)


def too_few_workers(present: Collection[int], world_size: int, seconds: float) -> DeadlineError:
    """Nobody came for some ranks. `present` are the ranks with a worker."""
    missing = [rank for rank in range(world_size) if rank not in present]
    return DeadlineError(
        f"no worker came for rank {', '.join(map(str, missing))}, which the job needs",
        got=f"{len(present)} workers after {seconds:g} s",
        expected=f"{world_size} workers",
        hint="start more workers with `plancompiler worker --master`",
    )


def nothing_asked(seconds: float) -> DeadlineError:
    """The client is there, and asks for nothing."""
    return DeadlineError(
        "the client of an open job asked for nothing within the time limit",
        expected=f"a request within {seconds:g} s",
    )


def no_progress(phase: JobPhase, awaited: Collection[int]) -> DeadlineError:
    """Some ranks have not done what they were asked for."""
    late = ", ".join(map(str, sorted(awaited))) or "none; the master itself is late"
    return DeadlineError(
        f"the job did not get on within the time limit while it was {phase}",
        got=f"ranks still awaited: {late}",
    )
