"""The master as a pure state machine: workers, the queue of jobs, and the phases of active jobs.

Every worker has a slot of the cluster. A job of n ranks holds n of them from when its turn comes
until its workers have let go of it; jobs on disjoint slots run at the same time, and know nothing
of each other. `handle` takes an event and the time, and returns what the I/O shell (`io_shell.py`)
must do; nothing here waits, talks or computes. A job goes

    queued -> compiling -> checking -> preparing -> running -> finished
                 any of these -> failed | cancelled

and within `running` through its operations: runs of steps, checkpoints, the end. An open job whose
steps give a value that is not finite stays in `running` without further runs, so that its client
can save it; with its end it has failed. After its end the job stays active until every rank has let
go of it, so that the next job finds idle workers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

from plancompiler.cluster.messages import (
    Abort,
    ClusterStatus,
    Collect,
    Compile,
    CompileFinished,
    Failed,
    Fetched,
    Finish,
    Heartbeat,
    Idle,
    JobEvent,
    JobPhase,
    JobStatus,
    LocalCopy,
    MasterMessage,
    OperationDone,
    Outputs,
    PhaseChanged,
    Prepared,
    RankCompiled,
    RankOutputs,
    RankTimeline,
    Refused,
    Register,
    Registered,
    Run,
    RunFailed,
    Save,
    SendTimeline,
    Shipped,
    StepDone,
    StepsFailed,
    TicketDone,
    TimelineRecorded,
    Waiting,
    WriteIndex,
    Written,
)
from plancompiler.errors import (
    AbortedError,
    ClusterError,
    DigestMismatchError,
    ErrorReport,
    JobCancelledError,
    MixedKernelsError,
    NonFiniteError,
    PlanCompilerError,
    RankError,
    TransportError,
    WorkerLostError,
)
from plancompiler.master.events import (
    Asked,
    CancelAsked,
    Disconnect,
    FromWorker,
    JobSubmitted,
    Limits,
    MasterAction,
    MasterCompiled,
    MasterEvent,
    MasterFailed,
    MasterTick,
    Publish,
    Release,
    StartCompile,
    Stopping,
    Tell,
    WorkerBack,
    WorkerGone,
)
from plancompiler.master.job_queue import JobQueue
from plancompiler.master.peers import check_reachable, far_peers, host_of
from plancompiler.master.records import JobRecord, Worker, unknown_job
from plancompiler.master.registration import free_slot
from plancompiler.master.saving import Operation, Saving, operations_of, take_operation
from plancompiler.master.shipping import Delivery, Shipping
from plancompiler.master.slot_choice import choose_slots
from plancompiler.master.submission import check_submission
from plancompiler.master.timeouts import somebody_works, stalled_ranks_error, too_late
from plancompiler.plan.digest import check_cross_rank_facts, check_kernels, combine_digests

_CONSEQUENCES = {error.code for error in (AbortedError, TransportError)}
"""Errors by which a rank says that another one is the trouble, and not what that one met."""
_JOBS_REMEMBERED = 100
_KERNELS_CHARACTERS = 1 << 10


class MasterState:
    """All that a master knows."""

    def __init__(
        self,
        world_size: int,
        version: str,
        limits: Limits | None = None,
        allow_mixed_kernels: bool | None = None,
    ) -> None:
        if world_size < 1:
            raise RankError("a cluster needs at least one rank", got=world_size)
        self.world_size = world_size
        self.version = version
        self.limits = limits or Limits()
        self._allow_mixed_kernels = allow_mixed_kernels
        self._workers: dict[int, Worker] = {}
        """By slot."""
        self._slots: dict[int, int] = {}
        """Connection -> slot."""
        self._jobs: dict[int, JobRecord] = {}
        self._queue = JobQueue()
        self._active: dict[int, JobRecord] = {}
        """Jobs that hold slots."""
        self._ended: dict[int, None] = {}
        """Jobs that have ended, the last one last."""
        self._tickets = itertools.count(1 << 32)
        """For operations that no client asked for."""
        self._actions: list[MasterAction] = []
        self.changed_slots: set[int] = set()
        """Slots whose workers the latest event has changed."""
        self.changed_jobs: set[int] = set()
        """Jobs that it has changed, among them those that it made the master forget,"""
        self.counted_jobs: set[int] = set()
        """and those of which it has only reported a step."""

    # --- events -------------------------------------------------------------------------------

    def handle(self, event: MasterEvent, now: float) -> list[MasterAction]:
        """What must be done about an event. Only refused submissions and requests raise."""
        self._begin()
        match event:
            case FromWorker():
                self._from_worker(event, now)
            case WorkerGone(connection, how):
                self._lose(connection, how, now)
            case WorkerBack(connection, slot):
                self._back(connection, slot, now)
            case JobSubmitted():
                self._submit(event, now)
            case MasterCompiled():
                self._master_compiled(event, now)
            case MasterFailed(job_id, error):
                job = self._active.get(job_id)
                if job is not None:
                    self._fail(job, error, now)
            case Asked(operation):
                self._ask(operation, now)
            case CancelAsked(job_id, reason):
                self._cancel(job_id, reason, now)
            case MasterTick():
                self._tick(now)
            case Stopping():
                self._stop(now)
        self._start_waiting(now)
        self._tell_missing(now)
        return self._actions

    def _begin(self) -> None:
        self._actions = []
        self.changed_slots.clear()
        self.changed_jobs.clear()
        self.counted_jobs.clear()

    def status(self, now: float) -> ClusterStatus:
        """A picture of the cluster."""
        workers = tuple(each.status() for _, each in sorted(self._workers.items()))
        jobs = tuple(job.status(now) for job in self._jobs.values())
        return ClusterStatus(self.version, self.world_size, workers, jobs)

    def job(self, job_id: int) -> JobRecord | None:
        """A job, unless it was forgotten."""
        return self._jobs.get(job_id)

    def worker(self, slot: int) -> Worker | None:
        """The worker of a slot."""
        return self._workers.get(slot)

    def absent_worker(self, token: bytes) -> Worker | None:
        """The worker that is yet to come back and was given this token."""
        absent = (each for each in self._workers.values() if not each.connection)
        return next((each for each in absent if each.token == token), None)

    @property
    def ended_jobs(self) -> list[int]:
        """Those that are remembered, the last one last."""
        return list(self._ended)

    @property
    def queue_length(self) -> int:
        """Jobs that wait for their turn."""
        return len(self._queue)

    def slot_of(self, connection: int) -> int | None:
        """The slot of the worker that registered over a connection."""
        return self._slots.get(connection)

    def rank_in(self, job_id: int, connection: int) -> int | None:
        """The rank of a job that a worker is; None where it is none of them."""
        worker = self._workers.get(self._slots.get(connection, -1))
        return worker.rank if worker is not None and worker.job_id == job_id else None

    def rank_of(self, job_id: int, connection: int) -> int | None:
        """The rank of a job that a worker is, or was while the job ran."""
        job, slot = self._jobs.get(job_id), self._slots.get(connection)
        return None if job is None or slot not in job.slots else job.slots.index(slot)

    def connection_for(self, job_id: int) -> int:
        """A worker that can read what a job has written: the first of its slots' workers. A
        ClusterError where there is none.
        """
        job = self._known(job_id)
        for slot in job.slots:
            worker = self._workers.get(slot)
            if worker is not None and worker.connection:
                return worker.connection
        raise ClusterError(
            f"no worker can read what job {job_id} has written",
            got="a job that has not begun" if not job.slots else "none of its workers is there",
            hint="ask again when its workers are back",
        )

    def ranks_of(self, job_id: int) -> int:
        """How many ranks a job has; a ClusterError where there is no such job."""
        return self._known(job_id).world_size

    def job_status(self, job_id: int, now: float) -> JobStatus:
        """A picture of one job; a ClusterError where there is no such job."""
        return self._known(job_id).status(now)

    def job_phase(self, job_id: int) -> JobPhase:
        """Where a job is; a ClusterError where there is no such job."""
        return self._known(job_id).phase

    def restore(
        self, workers: Iterable[Worker], jobs: Iterable[JobRecord], now: float
    ) -> list[MasterAction]:
        """Take over from a master that was killed: its workers, who are yet to come back, and its
        jobs in the order in which they came.

        A job whose steps had begun runs on. One that was compiling or preparing begins anew, and an
        open one has lost its client's requests, so that it fails.
        """
        self._begin()
        for worker in workers:
            worker.connection, worker.last_seen, worker.worked = 0, now, now
            self._workers[worker.slot] = worker
        for job in jobs:
            self._jobs[job.id] = job
            self._tickets = itertools.count(max(next(self._tickets), 1 + _last_ticket(job)))
            if job.phase is JobPhase.QUEUED:
                job.blocked = None
                self._queue.add(job)
            elif self._ranks(job):
                self._active[job.id] = job
                self._resume(job, now)
        ended = [job for job in self._jobs.values() if job.phase.is_end]
        self._ended = {job.id: None for job in sorted(ended, key=lambda job: job.ended or 0.0)}
        return self._actions

    def _resume(self, job: JobRecord, now: float) -> None:
        """Go on with a job that holds slots."""
        job.asked = dict.fromkeys(job.waiting, now)
        if job.saving is not None:
            job.saving.asked = now
        if job.phase.is_end or job.aborting:
            job.deadline = now + self.limits.grace + self.limits.release
        elif job.request.open:
            error = ClusterError(
                "the master was started again, and a session does not outlive its master",
                hint="open a new one, from the last checkpoint",
            )
            self._fail(job, error.report, now)
        elif job.phase is JobPhase.RUNNING:
            job.deadline = now + self.limits.grace + self.limits.progress
        else:
            error = ClusterError("the master was started again, and begins the job anew")
            self._tell_all(job, Abort(job.id, error.report))
            for worker in self._ranks(job).values():
                worker.job_id = -job.id  # it has yet to let go of the job's first life
            del self._active[job.id]
            self._queue.add(job.begin_again(operations_of(job.id, job.request, self._tickets)))
            self._enter(job, JobPhase.QUEUED, math.inf, now)

    # --- workers ------------------------------------------------------------------------------

    def _from_worker(self, event: FromWorker, now: float) -> None:
        connection, message = event.connection, event.message
        if isinstance(message, Register):
            self._register(connection, message, now)
            return
        slot = self._slots.get(connection)
        if slot is None:  # a late message of a worker that was given up
            return
        worker = self._workers[slot]
        worker.last_seen = now
        if event.number:
            if event.number <= worker.received:  # it was sent again, and had come
                return
            worker.received = event.number
            self.changed_slots.add(slot)
        if isinstance(message, Heartbeat):
            if message.stopped:
                self._drop(worker, "its process is in state T, stopped by a signal", now)
            else:
                worker.beat(message, now)
                self._tell(worker, Heartbeat(received=worker.received))
            return
        if isinstance(message, Idle):
            self._idle(worker, message.job_id, now)
            return
        job = self._active.get(message.job_id)
        if job is None or worker.job_id != job.id or job.phase.is_end:
            return
        rank = worker.rank
        changed = self.counted_jobs if isinstance(message, Outputs) else self.changed_jobs
        changed.add(job.id)
        if isinstance(message, Failed):
            self._fail(job, message.error, now)
        elif job.aborting:
            return
        elif isinstance(message, Fetched):
            if job.phase is JobPhase.COMPILING:
                self._fetched(job, rank, message.copy, now)
        elif isinstance(message, RankCompiled):
            self._compiled(job, rank, message, now)
        elif isinstance(message, Prepared):
            if job.phase is JobPhase.PREPARING and self._all_done(job, rank):
                self._enter(job, JobPhase.RUNNING, math.inf, now)
                self._next_operation(job, now)
        elif isinstance(message, Outputs):
            self._outputs(job, rank, message, now)
        elif isinstance(message, TimelineRecorded):
            if isinstance(job.current, SendTimeline):
                job.deadline = now + self.limits.progress
                self._publish(job, RankTimeline(rank, message.timeline))
        elif isinstance(message, OperationDone):
            self._operation_done(job, rank, message.ticket, now)
        elif isinstance(message, RunFailed):
            self._run_failed(job, rank, message, now)
        elif isinstance(message, Written):
            self._written(job, rank, message.ticket, now)

    def _register(self, connection: int, message: Register, now: float) -> None:
        try:
            slot = free_slot(message, self._workers, self.world_size, self.version)
        except PlanCompilerError as error:
            self._actions.append(Tell(connection, Refused(error.report)))
            self._actions.append(Disconnect(connection))
            return
        worker = Worker(slot, message, now, connection)
        self._workers[slot] = worker
        self._slots[connection] = slot
        self.changed_slots.add(slot)
        # The I/O shell puts in the token that it drew for the connection.
        self._tell(worker, Registered(slot, self.world_size, self.limits.silence, b""))

    def _back(self, connection: int, slot: int, now: float) -> None:
        """A worker has come back, and goes on with what it was told before."""
        worker = self._workers[slot]
        worker.connection, worker.last_seen, worker.worked = connection, now, now
        self._slots[connection] = slot

    def _lose(self, connection: int, how: str, now: float) -> None:
        slot = self._slots.get(connection)
        if slot is not None:
            self._lose_worker(self._workers[slot], how, now)

    def _lose_worker(self, worker: Worker, how: str, now: float) -> None:
        self._slots.pop(worker.connection, None)
        del self._workers[worker.slot]
        self.changed_slots.add(worker.slot)
        job = self._active.get(worker.job_id)
        if job is None:
            return
        if not job.phase.is_end:
            self._fail(job, worker.lost(job, how).report, now)
        self._retire(job, now)

    def _idle(self, worker: Worker, job_id: int, now: float) -> None:
        if abs(worker.job_id) != job_id:
            return
        of_first_life, worker.job_id = worker.job_id < 0, 0
        if of_first_life:
            return
        job = self._active.get(job_id)
        if job is None:
            return
        if not job.phase.is_end and not job.aborting:
            error = ClusterError("a worker let go of a job before its end", rank=worker.rank)
            self._fail(job, error.report, now)
        self._retire(job, now)

    def _offers(self, job: JobRecord) -> dict[int, Register]:
        """What the workers of a job registered with, by rank."""
        return {rank: worker.offer for rank, worker in self._ranks(job).items()}

    def _ranks(self, job: JobRecord) -> dict[int, Worker]:
        """The workers that hold on to a job, by rank."""
        return {
            rank: worker
            for rank, slot in enumerate(job.slots)
            if (worker := self._workers.get(slot)) is not None and worker.job_id == job.id
        }

    def _retire(self, job: JobRecord, now: float) -> None:
        """Make room for the next job when no rank works on this one any longer."""
        if job.id not in self._active or self._ranks(job):
            return
        if job.aborting:  # every rank has spoken, so the first cause is known
            self._end(job, JobPhase.FAILED, now)
        if job.phase.is_end:
            del self._active[job.id]
            self._actions.append(Release(job.id))

    def _tell(self, worker: Worker, message: MasterMessage) -> None:
        place = 0
        if not isinstance(message, (Registered, Refused, Heartbeat)):
            place = worker.commands = worker.commands + 1
            self.changed_slots.add(worker.slot)
        self._actions.append(Tell(worker.connection, message, worker.slot, place))

    def _tell_all(self, job: JobRecord, message: MasterMessage) -> None:
        for worker in self._ranks(job).values():
            self._tell(worker, message)

    # --- jobs ---------------------------------------------------------------------------------

    def _submit(self, event: JobSubmitted, now: float) -> None:
        check_submission(event, self.world_size)
        request = event.request
        world_size = request.ranks or event.needs
        job = JobRecord(event.job_id, event.name, request, event.transport_token, world_size, now)
        if not request.open:
            job.operations.extend(operations_of(job.id, request, self._tickets))
        many = max(0, len(self._ended) - _JOBS_REMEMBERED + 1)
        for job_id in list(itertools.islice(self._ended, many)):
            if job_id not in self._active:
                del self._jobs[job_id], self._ended[job_id]
                self.changed_jobs.add(job_id)
        self._jobs[job.id] = job
        self._queue.add(job)
        self._enter(job, JobPhase.QUEUED, math.inf, now)

    def _start_waiting(self, now: float) -> None:
        """Start the jobs whose turn it is."""
        while self._queue:
            free = [each for each in self._workers.values() if each.connection and not each.job_id]
            job = self._queue.take(len(free), now)
            if job is None:
                break
            self._start(job, choose_slots(free, job.world_size), now)
        head = self._queue.head
        if head is not None and head.world_size > len(self._workers):
            head.deadline = min(head.deadline, now + self.limits.workers)

    def _start(self, job: JobRecord, slots: tuple[int, ...], now: float) -> None:
        """A job's turn has come, on these slots by rank."""
        self._active[job.id] = job
        job.started = now
        job.slots = slots
        for rank, slot in enumerate(slots):
            self._workers[slot].take(job.id, rank)
            self.changed_slots.add(slot)
        self._enter(job, JobPhase.COMPILING, self.limits.compiling, now)
        try:
            check_reachable(self._offers(job))
        except ClusterError as error:
            self._fail(job, error.report, now)
            return
        self._actions.append(StartCompile(job.id))

    def _tell_missing(self, now: float) -> None:
        """Say which workers the queue waits for: at once, when that changes, and now and then."""
        if not self._queue or len(self._workers) == self.world_size:
            return
        absent = [slot for slot in range(self.world_size) if slot not in self._workers]
        for job in self._queue:
            if job.world_size <= len(self._workers):
                continue
            waiting = job.tell_missing(absent, now)
            if waiting is not None:
                self._publish(job, waiting)

    def _master_compiled(self, event: MasterCompiled, now: float) -> None:
        job = self._active.get(event.job_id)
        if job is None or job.phase is not JobPhase.COMPILING or job.aborting:
            return
        job.cached = event.cached
        job.await_ranks(range(job.world_size), now)
        hosts = {rank: host_of(offer) for rank, offer in self._offers(job).items()}
        job.shipping = Shipping(event.digests, hosts)
        self._deliver(job, job.shipping.first())

    def _deliver(self, job: JobRecord, deliveries: list[Delivery]) -> None:
        mode, cache = job.request.mode, job.request.cache
        for each in deliveries:
            message = Compile(
                job.id, mode, each.rank, job.world_size, cache, each.digest, each.share, each.copy
            )
            self._tell(self._workers[job.slots[each.rank]], message)

    def _fetched(self, job: JobRecord, rank: int, copy: LocalCopy | None, now: float) -> None:
        """A rank has its slice or plan, so others of its host can get theirs from it."""
        shipping = job.shipping
        if shipping is None or not shipping.arrived(rank):
            return
        job.asked[rank] = now
        if shipping.is_worth_telling:
            self._publish(job, Shipped(shipping.fetched, job.world_size))
        self._deliver(job, shipping.after(rank, copy))

    def _compiled(self, job: JobRecord, rank: int, message: RankCompiled, now: float) -> None:
        if job.phase is not JobPhase.COMPILING:
            return
        self._fetched(job, rank, None, now)  # it has said so, unless it cannot share
        job.cached = job.cached and message.cached
        job.digests[rank] = message.digest
        job.facts[rank] = message.facts
        job.kernels[rank] = message.kernels[:_KERNELS_CHARACTERS]
        if message.reports:
            job.reporters.add(rank)
        if not self._all_done(job, rank):
            return
        self._enter(job, JobPhase.CHECKING, self.limits.checking, now)
        try:
            check_cross_rank_facts(job.facts)
            if not job.request.compile_only:
                check_kernels(job.kernels, self._allow_mixed_kernels)
        except (DigestMismatchError, MixedKernelsError) as error:
            self._fail(job, error.report, now)
            return
        job.facts.clear()
        job.kernels.clear()
        digest = combine_digests(job.digests)
        self._publish(job, CompileFinished(digest, now - (job.started or now), job.cached))
        if job.request.compile_only:
            self._next_operation(job, now)
            return
        self._enter(job, JobPhase.PREPARING, self.limits.preparing, now)
        job.await_ranks(range(job.world_size), now)
        offers = self._offers(job)
        for rank, worker in self._ranks(job).items():
            self._tell(worker, job.prepare(rank, far_peers(rank, offers)))

    def _all_done(self, job: JobRecord, rank: int) -> bool:
        """Whether this rank was the last that the phase or operation waited for."""
        if rank not in job.waiting:
            return False
        job.waiting.remove(rank)
        return not job.waiting

    def _outputs(self, job: JobRecord, rank: int, message: Outputs, now: float) -> None:
        if rank not in job.reporters or not isinstance(job.current, Run):
            return
        error = job.counts.came(rank, message.step, job.current.steps, job.reported)
        if error is not None:
            self._fail(job, error, now)
            return
        job.deadline = now + self.limits.progress
        job.asked[rank] = now
        self._publish(job, RankOutputs(message.step, rank, message.arrays))
        ranks = job.reported.setdefault(message.step, set())
        ranks.add(rank)
        if ranks == job.reporters:
            del job.reported[message.step]
            job.done_steps += 1
            self._publish(job, StepDone(message.step))

    # --- operations ---------------------------------------------------------------------------

    def _ask(self, operation: Operation, now: float) -> None:
        job = self._known(operation.job_id)
        if job.phase.is_end or job.aborting:
            if job.error is not None:
                raise PlanCompilerError.from_report(job.error)
            raise ClusterError(f"job {job.id} has ended", got=f"phase {job.phase}")
        if not job.request.open or any(isinstance(each, Finish) for each in job.operations):
            raise ClusterError(
                "this job takes no more requests", hint="open a session to go step by step"
            )
        if isinstance(operation, Run) and job.not_finite is not None:
            raise PlanCompilerError.from_report(job.not_finite)
        job.operations.append(operation)
        if job.phase is JobPhase.RUNNING and job.current is None:
            self._next_operation(job, now)

    def _next_operation(self, job: JobRecord, now: float) -> None:
        if not job.operations:
            job.current = None
            job.deadline = now + self.limits.idle
            return
        if job.saving is not None and isinstance(job.operations[0], (Save, Finish)):
            job.current = None  # it has its turn when the checkpoint before it is written
            job.deadline = now + self.limits.progress
            return
        operation = take_operation(job.operations, job.request, self._tickets)
        job.current = operation
        if isinstance(operation, Finish):
            self._tell_all(job, operation)
            job.error = job.not_finite
            self._end(job, JobPhase.FINISHED if job.error is None else JobPhase.FAILED, now)
            return
        if job.not_finite is not None:
            if isinstance(operation, Run):  # it was asked for before the failure was known
                self._publish(job, StepsFailed(operation.ticket, job.not_finite))
                self._next_operation(job, now)
                return
            if isinstance(operation, (Save, Collect)):
                job.current = operation = replace(operation, before=True)
        job.await_ranks(range(job.world_size), now)
        if isinstance(operation, Save) and operation.background:
            job.saving = Saving(operation, set(range(job.world_size)), now)
        job.deadline = now + self.limits.progress
        self._tell_all(job, operation)

    def _written(self, job: JobRecord, rank: int, ticket: int, now: float) -> None:
        """A rank has written its part of the checkpoint that is under way."""
        saving = job.saving
        if saving is None or not saving.written(rank, ticket):
            return
        if job.current is None:
            job.deadline = now + self.limits.progress
        if not saving.indexing:
            self._tell(self._workers[job.slots[0]], saving.index(0, now))
            return
        job.saving = None
        if job.current is None:
            self._next_operation(job, now)

    def _operation_done(self, job: JobRecord, rank: int, ticket: int, now: float) -> None:
        current = job.current
        if current is None or isinstance(current, Finish) or current.ticket != ticket:
            return
        if isinstance(current, Run) and rank in job.reporters:
            error = job.counts.ended(rank, current.steps)
            if error is not None:
                self._fail(job, error, now)
                return
        job.deadline = now + self.limits.progress
        if not self._all_done(job, rank):
            return
        if job.run_errors:
            self._run_ended_badly(job, current.ticket, now)
            return
        if isinstance(current, Save) and not current.background:
            # The index names all shards, so it comes after them.
            job.current = WriteIndex(job.id, ticket, current.directory)
            job.await_ranks([0], now)
            self._tell(self._workers[job.slots[0]], job.current)
            return
        self._publish(job, TicketDone(ticket))
        self._next_operation(job, now)

    def _run_failed(self, job: JobRecord, rank: int, message: RunFailed, now: float) -> None:
        """A run of an open job has ended on a rank, and the others end theirs."""
        current = job.current
        if not isinstance(current, Run) or current.ticket != message.ticket:
            return
        if rank not in job.waiting:
            return
        job.run_errors.append(message.error)
        # A rank that was stopped by another one waits for what that one says.
        job.deadline = now + self.limits.progress
        if self._all_done(job, rank):
            self._run_ended_badly(job, current.ticket, now)

    def _run_ended_badly(self, job: JobRecord, ticket: int, now: float) -> None:
        """All ranks have ended a run that failed on some of them."""
        causes = [each for each in job.run_errors if each.code not in _CONSEQUENCES]
        error = (causes or job.run_errors)[0]
        job.run_errors.clear()
        if error.code != NonFiniteError.code or not job.request.open:
            self._fail(job, error, now, cause=True)
            return
        job.not_finite = error
        self._publish(job, StepsFailed(ticket, error))
        self._next_operation(job, now)

    # --- ends ---------------------------------------------------------------------------------

    def _fail(
        self, job: JobRecord, error: ErrorReport, now: float, cause: bool | None = None
    ) -> None:
        """Stop a job on all ranks. The first cause is reported, not what followed from it."""
        if cause is None:
            cause = error.code not in _CONSEQUENCES
        if job.phase.is_end or (job.aborting and not cause):
            return
        job.error = error
        if not job.aborting:
            job.aborting = True
            job.deadline = now + self.limits.first_cause
            self._tell_all(job, Abort(job.id, error))
        if cause:
            self._end(job, JobPhase.FAILED, now)
        self._retire(job, now)

    def _cancel(self, job_id: int, reason: str, now: float) -> None:
        job = self._jobs.get(job_id)
        if job is None or job.phase.is_end or job.aborting:
            return
        job.error = job.not_finite
        if job.error is None:
            job.error = JobCancelledError(f"job {job.name!r} was cancelled: {reason}").report
        self._tell_all(job, Abort(job.id, job.error))
        self._end(job, JobPhase.CANCELLED if job.not_finite is None else JobPhase.FAILED, now)
        self._retire(job, now)

    def _end(self, job: JobRecord, phase: JobPhase, now: float) -> None:
        """The job's last phase. Its ranks have a little time to let go of it."""
        job.aborting = False
        job.ended = now
        self._ended[job.id] = None
        job.operations.clear()
        job.facts.clear()
        job.kernels.clear()
        job.reported.clear()
        job.saving = None
        self._enter(job, phase, self.limits.release, now)
        if job.id not in self._active:
            self._queue.remove(job)
            self._actions.append(Release(job.id))

    def _stop(self, now: float) -> None:
        for job in list(self._jobs.values()):
            if not job.phase.is_end:
                error = ClusterError("the master was stopped before the job ended")
                self._fail(job, error.report, now)
        for worker in self._workers.values():
            error = ClusterError("the master was stopped")
            self._tell(worker, Refused(error.report))
            self._actions.append(Disconnect(worker.connection))
        self._workers.clear()
        self._slots.clear()
        self._active.clear()

    # --- time ---------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        for worker in list(self._workers.values()):
            if not worker.connection:
                if now - worker.last_seen > self.limits.grace:
                    how = "it did not come back when the master was started again"
                    self._lose_worker(worker, how, now)
            elif now - worker.last_seen > self.limits.silence:
                self._drop(worker, f"it said nothing for {self.limits.silence:g} s", now)
        head = self._queue.head
        for job in (*self._active.values(), *(() if head is None else (head,))):
            self._check_time(job, now)

    def _check_time(self, job: JobRecord, now: float) -> None:
        ranks = self._ranks(job)
        if not all(worker.connection for worker in ranks.values()):
            return  # first they have to come back
        error = stalled_ranks_error(job, ranks, now, self.limits)
        if error is None and now <= job.deadline:
            return
        if job.phase.is_end:
            for worker in ranks.values():
                self._drop(worker, "it did not let go of an ended job in time", now)
            return
        if job.aborting:
            self._end(job, JobPhase.FAILED, now)
            return
        if error is None and somebody_works(job, ranks, now):
            return
        error = error or too_late(job, self._workers, self.limits)
        self._fail(job, error.report, now, cause=True)

    def _drop(self, worker: Worker, how: str, now: float) -> None:
        error = WorkerLostError(f"the master gave up this worker: {how}", rank=worker.slot)
        self._tell(worker, Refused(error.report))
        self._actions.append(Disconnect(worker.connection))
        self._lose_worker(worker, how, now)

    # --- small things -------------------------------------------------------------------------

    def _enter(self, job: JobRecord, phase: JobPhase, limit: float, now: float) -> None:
        job.phase = phase
        job.deadline = now + limit
        error = job.error if phase.is_end else None
        self._publish(job, PhaseChanged(phase, now - job.submitted, error))

    def _publish(self, job: JobRecord, event: JobEvent) -> None:
        self._actions.append(Publish(job.id, event))
        if not isinstance(event, (RankOutputs, StepDone, Waiting)):
            self.changed_jobs.add(job.id)

    def _known(self, job_id: int) -> JobRecord:
        job = self._jobs.get(job_id)
        if job is None:
            raise unknown_job(job_id)
        return job


def _last_ticket(job: JobRecord) -> int:
    """The highest ticket of what a job does, or has yet to do."""
    saving = () if job.saving is None else (job.saving.order,)
    orders = (job.current, *job.operations, *saving)
    return max((getattr(each, "ticket", 0) for each in orders), default=0)
