"""Pure: what a master says of a job that took too long."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from plancompiler.cluster.messages import JobPhase, Run, Save, WriteIndex
from plancompiler.errors import DeadlineError
from plancompiler.limits.time_limits import DEADLINE, LONGEST_ANSWER, if_unseen
from plancompiler.master.events import Limits
from plancompiler.master.records import JobRecord, Worker


def somebody_works(job: JobRecord, workers: Mapping[int, Worker], now: float) -> bool:
    """Whether a rank that a job waits for has used its processor within the deadline; such a rank
    is waited for, however slow it is, so the job does not time out before it has stood still.
    """
    awaited = job.waiting if job.saving is None else job.waiting | job.saving.waiting
    works = job.phase is not JobPhase.QUEUED and any(
        now - workers[rank].worked < DEADLINE for rank in awaited & workers.keys()
    )
    if works:
        job.deadline = now + DEADLINE
    return works


def stalled_ranks_error(
    job: JobRecord, workers: Mapping[int, Worker], now: float, limits: Limits
) -> DeadlineError | None:
    """What a job fails with because ranks that it waits for stand still, their processors idle."""
    if job.phase.is_end or job.aborting:
        return None
    late = _late_together(job, workers, now, limits) | _late_alone(job, workers, now, limits)
    if not late:
        return None
    first = workers[min(late)]
    hosts = ", ".join(f"rank {rank} on host {workers[rank].host}" for rank in sorted(late))
    return DeadlineError(
        f"rank {first.rank} stands still, its processor idle, while the job is {job.phase}",
        rank=first.rank,
        got=f"awaited, and idle: {hosts}",
        expected=f"some work within {_deadline(job, first):g} s",
        hint="look at what its worker waits for, or allow more time with a longer deadline",
    )


def _late_alone(
    job: JobRecord, workers: Mapping[int, Worker], now: float, limits: Limits
) -> set[int]:
    """Of ranks that wait for nobody, as they compile what they have, or save: those that have stood
    still for their deadline.
    """
    asked: dict[int, float] = {}
    if job.saving is not None:
        asked.update(dict.fromkeys(job.saving.waiting, job.saving.asked))
    if job.phase is JobPhase.COMPILING and job.shipping is not None:
        asked.update({rank: job.asked[rank] for rank in job.waiting if job.shipping.has(rank)})
    elif isinstance(job.current, (Save, WriteIndex)):
        asked.update({rank: job.asked[rank] for rank in job.waiting})
    return {
        rank
        for rank, since in asked.items()
        # Within less than a silence a worker need not have said that it works.
        if _idle(workers[rank], since, now) > max(_deadline(job, workers[rank]), limits.silence)
    }


def _late_together(
    job: JobRecord, workers: Mapping[int, Worker], now: float, limits: Limits
) -> set[int]:
    """All ranks that are awaited, where one may wait for another and all stand still. Those that
    run have watchdogs, which say more, so they have the first word.
    """
    if job.phase is JobPhase.RUNNING and not isinstance(job.current, Run):
        return set()  # ranks send what others may be slow to take
    late = all(
        _idle(workers[rank], job.asked[rank], now)
        > max(_deadline(job, workers[rank], running=True), limits.silence) + LONGEST_ANSWER
        for rank in job.waiting
    )
    return set(job.waiting) if late else set()


def _idle(worker: Worker, since: float, now: float) -> float:
    """For how long a worker has stood still that was asked for something `since` then."""
    return now - max(worker.worked, since)


def _deadline(job: JobRecord, worker: Worker, running: bool = False) -> float:
    """How long a rank may stand still; one that runs may wait for its device."""
    seconds = job.request.deadline or worker.offer.deadline or DEADLINE
    return if_unseen(seconds) if running and worker.offer.device != "cpu" else seconds


def too_late(job: JobRecord, present: Collection[int], limits: Limits) -> DeadlineError:
    """What a job that timed out fails with. `present` are the slots with a worker."""
    if job.phase is JobPhase.QUEUED:
        return too_few_workers(present, job.world_size, limits.workers)
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
