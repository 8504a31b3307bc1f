"""The master's hands: it feeds the state machine and does what that asks for.

All of it belongs to the thread of the master's event loop. What would hold that up for long, such
as compiling, is done by `WorkThreads`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from plancompiler.cache.plan_cache import open_cache
from plancompiler.cluster.channel import report_of
from plancompiler.cluster.chunks import Parcel, Reservation
from plancompiler.cluster.messages import (
    ClusterStatus,
    Compile,
    Heartbeat,
    JobEvent,
    JobPhase,
    JobRequest,
    JobStatus,
    LogLines,
    MasterMessage,
    Refused,
    Register,
    Registered,
    Run,
    SendFiles,
    Shipped,
    Waiting,
)
from plancompiler.errors import (
    ClusterError,
    ErrorReport,
    LimitError,
    PlanCompilerError,
    RegistrationError,
    WireFormatError,
)
from plancompiler.ir import Job
from plancompiler.limits import time_limits
from plancompiler.lower.compile import is_mode_chosen, resolve_mode
from plancompiler.master.events import (
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
from plancompiler.master.job_channel import JobChannel, Relay, Retention
from plancompiler.master.journal import GRAPH, Journal, Writing
from plancompiler.master.kept_log import KeptLog
from plancompiler.master.masters_half import SLICES_MODE, masters_half
from plancompiler.master.observation import Observation
from plancompiler.master.records import unknown_job
from plancompiler.master.snapshot import Snapshot
from plancompiler.master.state import MasterState
from plancompiler.master.stopped_early import StoppedEarly
from plancompiler.master.work_threads import WorkThreads
from plancompiler.plan.plan import Plan
from plancompiler.proto.cluster_pb2 import Chunk, FetchRequest, FilePart

MAX_QUEUE = 10_000
"""Jobs that may wait."""
TICK_SECONDS = 0.2
_LONGEST_TICK = 1.0
"""What a tick takes longer than this, the process or its event loop stood still."""
_STOP_SECONDS = time_limits.MASTER_STOP
_ENDED_LOG_BYTES = 64 << 20
"""What ended jobs may keep together of what their ranks printed; those that ended last have
precedence.
"""
_SHOWN_ERRORS = 20
_COMPILATIONS = 2
"""At the same time. A job that was cancelled meanwhile is compiled to its end, so one more is let
in beside it.
"""
_ALIVE_SECONDS = 0.5
"""How often whoever follows a job hears of the master while nothing happens."""
_ALIVE_SECONDS_PER_READER = 0.0025
"""With many readers it is less often, so that this takes a bounded part of the master's time."""
_INLINE_BYTES = 256 << 10
"""Feeds of a step that go with the command to run it."""
_INLINE_SLICE_BYTES = 4 << 10
"""A slice or plan that goes with the command to compile it. Larger ones are fetched, a few at the
same time, as a large world has many.
"""

_log = logging.getLogger(__name__)


class Connection:
    """One worker's stream, seen from the master."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.token = secrets.token_bytes(16)
        self.confirmed = 0
        """How many commands the worker is known to have."""
        self.outbox: asyncio.Queue[MasterMessage | None] = asyncio.Queue()
        """Messages to send; None ends the stream."""


class MasterShell:
    """Everything between the gRPC services and the pure state."""

    def __init__(
        self,
        world_size: int,
        version: str,
        limits: Limits,
        mode: str | None,
        observe: Callable[[int, JobEvent], None] | None = None,
        max_queue: int = MAX_QUEUE,
        allow_mixed_kernels: bool | None = None,
        retention: Retention | None = None,
        plans: Mapping[int, Plan] | None = None,
        journal: Journal | None = None,
        on_failure: Callable[[PlanCompilerError], None] | None = None,
    ) -> None:
        self._plans = plans
        self._journal = journal
        self._submitted: dict[int, tuple[str, tuple[str, ...], bytes]] = {}
        """Owner, names of outputs and bytes of a job that the journal does not have yet."""
        self._on_failure = on_failure
        self._failure: PlanCompilerError | None = None
        """Why the journal cannot be written any longer."""
        self._max_queue = max_queue
        self._retention = retention or Retention()
        self._state = MasterState(world_size, version, limits, allow_mixed_kernels)
        self._mode = mode
        self._observe = observe
        self._cache = open_cache()
        self._peer_key = secrets.token_bytes(32) if journal is None else journal.peer_key
        self._connections: dict[int, Connection] = {}
        self._by_token: dict[bytes, Connection] = {}
        self._channels: dict[int, JobChannel] = {}
        self._files: dict[int, tuple[Connection, Relay[FilePart]]] = {}
        """Files that workers upload, by ticket, with who is asked and for whom."""
        self._keys: dict[tuple[str, str], int] = {}
        """Owner and key of a submission -> its job."""
        self._numbers = itertools.count(1)
        self._job_ids = itertools.count(1 if journal is None else journal.last_job + 1)
        self._tickets = itertools.count(1)
        self._compilations: set[asyncio.Task[None]] = set()
        self._compilers = WorkThreads("plancompiler-compile", _COMPILATIONS)
        self._clock: asyncio.Task[None] | None = None
        self._stopped_early = StoppedEarly()
        self._stopping = False
        self._began = time.time() - time.monotonic()
        self._sent_bytes = 0
        """For all jobs."""
        self._stood_still = 0.0

    def start(self) -> None:
        """Take over from a master that was killed, if there was one, and start the clock."""
        if self._journal is not None and self._journal.starts > 1:
            self._restore(self._journal)
        self._clock = asyncio.create_task(self._tick())

    def stop(self) -> None:
        """Fail what runs and send the workers away."""
        self._stopping = True
        self.handle(Stopping())

    async def finish(self) -> None:
        """End the clock and, if they can be waited for, the threads."""
        if self._clock is not None:
            self._clock.cancel()
        for each in self._compilations:
            each.cancel()  # those that have not begun need not
        await self._compilers.finish(_STOP_SECONDS)

    @property
    def world_size(self) -> int:
        return self._state.world_size

    @property
    def is_durable(self) -> bool:
        """Whether jobs outlive this master."""
        return self._journal is not None

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    def _now(self) -> float:
        """Seconds since the epoch, as those in a journal are, by a clock that nobody sets; without
        those in which this process stood still, as they say nothing of workers.
        """
        return self._began + time.monotonic() - self._stood_still

    def handle(self, event: MasterEvent) -> None:
        """Feed the state machine, keep what has changed, and do what it asks for. Refused requests
        raise, and everything does once the journal cannot be written.
        """
        if self._failure is not None:
            raise self._failure
        self._perform(self._state.handle(event, self._now()))

    def take(self, event: MasterEvent) -> None:
        """The same for an event that nobody is to hear an error of."""
        with self._unasked():
            self.handle(event)

    def _perform(self, actions: Sequence[MasterAction]) -> None:
        for action in actions:
            if isinstance(action, Tell) and isinstance(action.message, Registered):
                self._give_token(action)
        if self._journal is not None:
            self._keep(self._journal, actions)
        for action in actions:
            self._act(action)

    def _give_token(self, registered: Tell) -> None:
        """A worker that has just registered gets the token that was drawn for its connection."""
        connection = self._connections.get(registered.connection)
        worker = None if registered.slot is None else self._state.worker(registered.slot)
        if connection is not None and worker is not None:
            worker.token = connection.token

    # --- the journal --------------------------------------------------------------------------

    @contextmanager
    def _writing(self, journal: Journal) -> Iterator[Writing]:
        """What is written within the block is kept as a whole. Where it cannot be kept the master
        ends, as what is not kept must not be done either.
        """
        try:
            with journal.transaction() as writing:
                yield writing
        except PlanCompilerError as error:
            self._failure = self._failure or error
            if self._on_failure is not None:
                self._on_failure(error)
            raise

    @contextmanager
    def _unasked(self) -> Iterator[None]:
        """Trouble with the journal within the block ends the master, and is the error of no client
        or worker: workers wait for the master to be started again.
        """
        try:
            yield
        except PlanCompilerError:
            if self._failure is None:
                raise

    def _keep(self, journal: Journal, actions: Sequence[MasterAction]) -> None:
        """Write what the latest event has changed."""
        state = self._state
        published = [each for each in actions if isinstance(each, Publish)]
        if not (state.changed_slots or state.changed_jobs or state.counted_jobs or published):
            return
        with self._writing(journal) as writing:
            for each in published:
                if not isinstance(each.event, Waiting):
                    writing.add_event(each.job_id, each.event)
            for action in actions:
                if isinstance(action, Tell) and action.place and action.slot is not None:
                    writing.add_command(action.slot, action.place, action.message)
            for slot in state.changed_slots:
                worker = state.worker(slot)
                if worker is None:
                    writing.forget_worker(slot)
                else:
                    writing.save_worker(worker)
            for job_id in state.changed_jobs | state.counted_jobs:
                job = state.job(job_id)
                if job is None:
                    continue
                if job_id in self._submitted:
                    writing.add_job(job, *self._submitted[job_id])
                elif job_id in state.changed_jobs:
                    writing.save_job(job)
                else:
                    writing.save_counts(job)

    def _restore(self, journal: Journal) -> None:
        """Take over the jobs and workers of an earlier master."""
        kept = list(journal.jobs())
        for job in kept:
            ranks = job.record.world_size
            channel = self._channel_of(
                job.data, job.record.request, job.owner, job.outputs, job.data, ranks
            )
            for event in job.events:
                channel.publish(event)
            for rank, first, lines in job.lines:
                channel.log.restore(rank, first, lines)
            graph = job.plans.pop(GRAPH, None)
            is_whole = len(job.plans) == job.record.world_size
            if graph is not None and is_whole and job.record.phase is JobPhase.FINISHED:
                channel.restore_plans(job.plans, graph)
            if job.record.phase.is_end:
                channel.release()
            self._channels[job.record.id] = channel
            self._keys[job.owner, job.record.request.key] = job.record.id
        records = [job.record for job in kept]
        self._perform(self._state.restore(journal.workers(), records, self._now()))
        self._forget_old_jobs()
        if kept:
            going = sum(not record.phase.is_end for record in records)
            _log.info("took over %d jobs, %d of which go on", len(kept), going)

    def _come_back(self, connection: Connection, register: Register) -> None:
        """A worker of an earlier master goes on here: it gets the commands that it has not had."""
        worker = self._state.absent_worker(register.token)
        if worker is None or self._journal is None:
            error = RegistrationError(
                "the master does not know this worker any longer",
                got="a token that it has not given, or of a worker that it has given up",
                hint="start the worker again",
            )
            connection.outbox.put_nowait(Refused(error.report))
            connection.outbox.put_nowait(None)
            return
        del self._by_token[connection.token]
        connection.token = register.token
        self._by_token[connection.token] = connection
        self._send(
            connection,
            Registered(
                worker.slot,
                self.world_size,
                self._state.limits.silence,
                b"",
                received=worker.received,
            ),
        )
        with self._writing(self._journal) as writing:
            writing.confirm_commands(worker.slot, register.received)
            commands = self._journal.commands(worker.slot, register.received)
        for command in commands:
            self._send(connection, command)
        self.handle(WorkerBack(connection.number, worker.slot))

    def status(self, owner: str | None = None) -> ClusterStatus:
        """A picture of the cluster; with the jobs of one owner only, if one is named."""
        status = self._state.status(self._now())
        jobs = tuple(
            self._described(job)
            for job in status.jobs
            if owner in (None, self._channels[job.job_id].owner)
        )
        return replace(status, jobs=jobs)

    def job_status(self, job_id: int) -> JobStatus:
        """A picture of one job."""
        return self._described(self._state.job_status(job_id, self._now()))

    def _described(self, job: JobStatus) -> JobStatus:
        channel = self._channels[job.job_id]
        return replace(
            job,
            sent_bytes=channel.sent_bytes,
            owner=channel.owner,
            outputs=channel.outputs,
            is_durable=self.is_durable and not job.open,
        )

    # --- files --------------------------------------------------------------------------------

    def request_files(self, job_id: int, relay: Relay[FilePart]) -> int:
        """Let a worker of a job upload the files of its checkpoint; the ticket of that."""
        directory = self.channel(job_id).saved
        if not directory:
            raise ClusterError(
                f"job {job_id} writes no checkpoint",
                hint="submit it with --save DIR, or save the open job",
            )
        connection = self._connections[self._state.connection_for(job_id)]
        ticket = self.next_ticket()
        self._files[ticket] = connection, relay
        connection.outbox.put_nowait(SendFiles(ticket, directory))
        return ticket

    def files_wanted(self, token: bytes, ticket: int) -> Relay[FilePart]:
        """Who waits for the files of a ticket, which a worker with this token was asked for."""
        connection, relay = self._files.get(ticket, (None, None))
        if connection is None or relay is None or self._by_token.get(token) is not connection:
            raise ClusterError("nobody waits for these files", got=f"ticket {ticket}")
        return relay

    def end_files(self, ticket: int) -> None:
        """Nobody waits for these files any longer."""
        _, relay = self._files.pop(ticket)
        relay.close()

    def snapshot(
        self, address: str, observation: Observation, refused: Mapping[str, int]
    ) -> Snapshot:
        """A picture for those who look at the master from outside."""
        channels = self._channels
        errors = [
            (job_id, line)
            for job_id, channel in sorted(channels.items(), reverse=True)
            for line in channel.log.latest_errors
        ]
        held = {
            "outputs": sum(channel.held_bytes for channel in channels.values()),
            "logs": sum(channel.log.held_bytes for channel in channels.values()),
        }
        return Snapshot(
            address,
            time.monotonic(),
            self.status(),
            observation,
            self._state.queue_length,
            self._sent_bytes,
            held,
            refused,
            tuple(errors[:_SHOWN_ERRORS]),
        )

    # --- workers ------------------------------------------------------------------------------

    def connect(self) -> Connection:
        """A new stream of a worker that has not yet registered."""
        connection = Connection(next(self._numbers))
        self._connections[connection.number] = connection
        self._by_token[connection.token] = connection
        return connection

    def disconnect(self, connection: Connection, error: ErrorReport | None = None) -> None:
        """The stream ended, or what came of it cannot be read."""
        self._connections.pop(connection.number, None)
        self._by_token.pop(connection.token, None)
        for asked, relay in self._files.values():
            if asked is connection:
                relay.close()
        if error is None:
            self.take(WorkerGone(connection.number))
        else:
            self.take(WorkerGone(connection.number, error.what))

    def rank_of_token(self, token: bytes, job_id: int) -> int:
        """The rank of a job that the worker is which holds a token."""
        connection = self._by_token.get(token)
        rank = None if connection is None else self._state.rank_in(job_id, connection.number)
        if rank is None:
            raise ClusterError("only workers of the job may ask for this", got=f"job {job_id}")
        return rank

    def beat(self, token: bytes, heartbeat: Heartbeat) -> None:
        """Something is said of a worker that says nothing itself."""
        connection = self._by_token.get(token)
        if connection is not None:
            self.take(FromWorker(connection.number, heartbeat))

    def stopped_early(self, rank: int, host: str) -> None:
        """A worker that has not registered is stopped by a signal; `rank` -1: it wants any."""
        if self._stopped_early.note(rank, host, self._now()):
            for channel in self._channels.values():
                if channel.waiting is not None:
                    self._publish_waiting(channel, channel.waiting)

    def _publish(self, job_id: int, channel: JobChannel, event: JobEvent) -> None:
        before = channel.dropped_through
        channel.publish(event)
        if self._journal is not None and channel.dropped_through > before:
            with self._unasked(), self._writing(self._journal) as writing:
                writing.drop_outputs(job_id, channel.dropped_through)

    def _publish_waiting(self, channel: JobChannel, waiting: Waiting) -> None:
        stopped = self._stopped_early.texts(waiting.ranks, self._now())
        channel.publish(replace(waiting, stopped=stopped))

    # --- jobs ---------------------------------------------------------------------------------

    def submit(
        self, job: Job, data: bytes, request: JobRequest, owner: str, reservation: Reservation
    ) -> int:
        """Queue a job, which came as `data` and holds `reservation` until it has ended; its id."""
        known = self._keys.get((owner, request.key)) if request.key else None
        if known is not None:  # the client did not hear of it, as the master was killed
            reservation.close()
            return known
        mode = request.mode or self._mode
        request = replace(
            request,
            mode=resolve_mode(mode, SLICES_MODE),
            cache=request.cache and not is_mode_chosen(mode) and not request.compile_only,
        )
        if self.is_stopping:
            raise ClusterError("the master is about to stop")
        queued = self._state.queue_length
        if queued >= self._max_queue:
            raise LimitError(
                "too many jobs wait for this master",
                got=queued + 1,
                expected=f"at most {self._max_queue}",
                hint="submit again later, or start the master with a larger --max-queue",
            )
        job_id = next(self._job_ids)
        ranks, outputs = request.ranks or job.world_size, tuple(job.outputs)
        self._channels[job_id] = self._channel_of(
            data if queued else job, request, owner, outputs, data, ranks, reservation
        )
        self._channels[job_id].is_awaited = True
        self._keys[owner, request.key] = job_id
        self._submitted[job_id] = owner, outputs, data
        try:
            self.handle(
                JobSubmitted(
                    job_id,
                    request.name or job.name,
                    request,
                    job.world_size,
                    tuple(job.inputs),
                    secrets.token_hex(16),
                )
            )
        except PlanCompilerError:
            del self._channels[job_id], self._keys[owner, request.key]
            raise
        finally:
            del self._submitted[job_id]
        self._forget_old_jobs()
        return job_id

    def job_of_key(self, owner: str, key: str) -> int | None:
        """The job that a client submitted with this key."""
        return self._keys.get((owner, key))

    def _channel_of(
        self,
        job: Job | bytes,
        request: JobRequest,
        owner: str,
        outputs: tuple[str, ...],
        data: bytes,
        ranks: int,
        reservation: Reservation | None = None,
    ) -> JobChannel:
        return JobChannel(
            job,
            request,
            owner,
            self._retention.job_bytes,
            reservation=reservation,
            outputs=outputs,
            data=data,
            log=KeptLog(ranks),
        )

    def _forget_old_jobs(self) -> None:
        """Let go of what the state has forgotten, and of what jobs that ended earlier have made."""
        forgotten = [each for each in self._state.changed_jobs if self._state.job(each) is None]
        for job_id in forgotten:
            channel = self._channels.pop(job_id)
            channel.forget_plans()
            self._keys.pop((channel.owner, channel.request.key), None)
        if self._journal is not None and forgotten:
            with self._unasked(), self._writing(self._journal) as writing:
                writing.forget_jobs(forgotten)
        outputs = plans = self._retention.job_bytes * self._retention.jobs
        kept_logs = _ENDED_LOG_BYTES
        for number, job_id in enumerate(reversed(self._state.ended_jobs)):
            channel = self._channels[job_id]
            is_kept = number < self._retention.jobs or channel.readers or channel.is_awaited
            outputs -= channel.held_bytes
            plans -= channel.plan_bytes
            if (not is_kept or outputs < 0) and not channel.has_forgotten:
                channel.forget_outputs()
                if self._journal is not None:
                    with self._unasked(), self._writing(self._journal) as writing:
                        writing.drop_outputs(job_id, channel.dropped_through)
            if (not is_kept or plans < 0) and channel.data:
                channel.forget_plans()
                self._drop_plans(job_id)
            held = channel.log.held_bytes
            kept_logs -= held
            if kept_logs < 0 and held:
                self._forget_lines(job_id, channel)

    def channel(self, job_id: int) -> JobChannel:
        """A job's things; ClusterError where there is no such job."""
        channel = self._channels.get(job_id)
        if channel is None:
            raise unknown_job(job_id)
        return channel

    def ranks_of(self, job_id: int) -> int:
        """How many ranks a job has."""
        return self._state.ranks_of(job_id)

    async def provide_plans(self, job_id: int) -> None:
        """Wait for what a job is compiled into; raise why there is nothing of it."""
        channel = self.channel(job_id)
        await channel.compiled()
        error = self.job_status(job_id).error
        only = channel.request.compile_only
        if error is not None and (only or not channel.digest):
            raise PlanCompilerError.from_report(error)
        if channel.data and not only and not channel.parcels:  # an earlier master had them
            made = await self._compilers.run(
                masters_half, channel.data, channel.request, self._cache, self._plans
            )
            if channel.data:  # else they were to be forgotten meanwhile
                channel.parcels = made.parcels
        if not channel.data or (only and not channel.plans):
            raise ClusterError(
                f"the plans of job {job_id} are no longer kept",
                hint="ask earlier, or start the master with a larger --keep-jobs"
                + (
                    " or --keep-outputs-bytes, beyond which none are in its journal" if only else ""
                ),
            )

    def save_plan(self, job_id: int, rank: int, plan: Parcel) -> None:
        """Write down what a rank has made of a job that is compiled only, unless all of its plans
        come to more than is kept of a job.
        """
        if self._journal is None:
            return
        if self.channel(job_id).plan_bytes > self._retention.job_bytes:
            self._drop_plans(job_id)
            return
        with self._unasked(), self._writing(self._journal) as writing:
            writing.save_plan(job_id, rank, plan)

    def _drop_plans(self, job_id: int) -> None:
        """Keep the plans of a job in the journal no longer."""
        if self._journal is not None:
            with self._unasked(), self._writing(self._journal) as writing:
                writing.drop_plans(job_id)

    def phase(self, job_id: int) -> JobPhase:
        """Where a job is."""
        return self._state.job_phase(job_id)

    def next_ticket(self) -> int:
        """A number for a client's request."""
        return next(self._tickets)

    def parcel(self, request: FetchRequest) -> Parcel:
        """What a worker fetches: its slice or plan, or the feeds of a ticket."""
        rank = self.rank_of_token(request.token, request.job_id)
        channel = self.channel(request.job_id)
        if request.ticket:
            parcel = channel.feeds.get(request.ticket)
        else:
            parcel = channel.parcels.get(rank)
        if parcel is None:
            raise ClusterError("there is nothing to fetch for this job", rank=rank)
        if request.digest != parcel.digest:
            raise WireFormatError(
                "these are not the bytes that the worker was told to fetch",
                rank=rank,
                got=f"digest {parcel.digest.hex()}",
                expected=f"digest {request.digest.hex()}",
            )
        return parcel

    def count_sent(self, request: FetchRequest, nbytes: int) -> None:
        """So many bytes are about to be sent to a worker."""
        self._count_sent(self.channel(request.job_id), nbytes)

    def _count_sent(self, channel: JobChannel, nbytes: int) -> None:
        channel.sent_bytes += nbytes
        self._sent_bytes += nbytes

    # --- actions ------------------------------------------------------------------------------

    def _act(self, action: MasterAction) -> None:
        match action:
            case Tell(number, message):
                connection = self._connections.get(number)
                if connection is not None:
                    self._send(connection, message)
            case Disconnect(number):
                connection = self._connections.get(number)
                if connection is not None:
                    connection.outbox.put_nowait(None)
            case StartCompile(job_id):
                compilation = asyncio.create_task(self._compile(job_id))
                self._compilations.add(compilation)
                compilation.add_done_callback(self._compilations.discard)
            case Publish(job_id, event):
                channel = self._channels[job_id]
                if isinstance(event, Shipped):
                    event = replace(event, sent_bytes=channel.sent_bytes)
                if isinstance(event, Waiting):
                    self._publish_waiting(channel, event)
                else:
                    self._publish(job_id, channel, event)
                if self._observe is not None:
                    self._observe(job_id, event)
            case Release(job_id):
                channel = self._channels[job_id]
                channel.release()
                if channel.request.compile_only and not channel.data:
                    self._drop_plans(job_id)

    def _send(self, connection: Connection, message: MasterMessage) -> None:
        """Send a worker a message, with what only this shell knows."""
        if isinstance(message, Registered):
            message = replace(
                message,
                token=connection.token,
                peer_key=self._peer_key,
                is_durable=self._journal is not None,
            )
        elif isinstance(message, Refused):
            _log.warning("refused worker %d: %s", connection.number, message.error.what)
        elif isinstance(message, Run) and message.fed:
            message = self._with_small_feeds(message)
        elif isinstance(message, Compile) and message.copy is None:
            message = self._with_small_slice(message)
        connection.outbox.put_nowait(message)

    def _with_small_feeds(self, message: Run) -> Run:
        """Spare the workers a call where a step's feeds fit into the command itself."""
        parcel = self._channels[message.job_id].feeds.get(message.ticket)
        if parcel is None or parcel.wire_bytes > _INLINE_BYTES:
            return message
        return replace(message, feeds=Chunk.FromString(parcel.messages[0]).data)

    def _with_small_slice(self, message: Compile) -> Compile:
        """Spare the worker a call where what it compiles fits into the command itself."""
        channel = self._channels[message.job_id]
        parcel = channel.parcels.get(message.rank)
        if parcel is None or parcel.wire_bytes > _INLINE_SLICE_BYTES:
            return message
        (chunk,) = parcel.messages
        self._count_sent(channel, len(chunk))
        return replace(message, chunk=chunk)

    async def _compile(self, job_id: int) -> None:
        """Make what the ranks fetch."""
        try:
            channel = self.channel(job_id)
            job = channel.job
            if job is None:  # it has already ended
                return
            made = await self._compilers.run(
                masters_half, job, channel.request, self._cache, self._plans
            )
            if channel.job is job:  # else it ended meanwhile
                channel.parcels, channel.graph = made.parcels, made.graph
                if made.graph is not None:
                    self.save_plan(job_id, GRAPH, made.graph)
            digests = {rank: parcel.digest for rank, parcel in made.parcels.items()}
            event: MasterEvent = MasterCompiled(job_id, digests, made.cached)
        except Exception as error:  # the job fails with whatever stopped its compilation
            if not isinstance(error, PlanCompilerError):
                _log.exception("job %d does not compile", job_id)
            event = MasterFailed(job_id, report_of(error, "compiling the job"))
        self.take(event)

    async def _tick(self) -> None:
        woken = 0.0
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_SECONDS)
            self._stood_still += max(0.0, time.monotonic() - before - _LONGEST_TICK)
            try:
                self.take(MasterTick())
            except Exception:
                _log.exception("the clock of the master stumbled")
            readers = sum(channel.readers for channel in self._channels.values())
            if time.monotonic() - woken >= max(_ALIVE_SECONDS, readers * _ALIVE_SECONDS_PER_READER):
                woken = time.monotonic()
                for channel in self._channels.values():
                    channel.wake()

    def from_worker(self, connection: Connection, event: FromWorker) -> None:
        """A message of a worker; what it provokes is never the worker's error."""
        if connection.number not in self._connections:
            return
        message = event.message
        if isinstance(message, LogLines):
            self._keep_lines(connection, message)
            return
        with self._unasked():
            if isinstance(message, Register) and message.token:
                self._come_back(connection, message)
                return
            self.handle(event)
            if self._journal is not None and isinstance(message, Heartbeat) and message.received:
                self._confirm(self._journal, connection, message.received)

    def _confirm(self, journal: Journal, connection: Connection, received: int) -> None:
        """A worker has so many commands for good."""
        slot = self._state.slot_of(connection.number)
        if slot is not None and received > connection.confirmed:
            connection.confirmed = received
            with self._writing(journal) as writing:
                writing.confirm_commands(slot, received)

    def _keep_lines(self, connection: Connection, message: LogLines) -> None:
        """What a worker printed; a job that is forgotten needs it no longer."""
        rank = self._state.rank_of(message.job_id, connection.number)
        channel = self._channels.get(message.job_id)
        if rank is None or channel is None:
            return
        log = channel.log
        first, kept = log.next_number(rank), log.first_number(rank)
        log.add(rank, message)
        if self._journal is not None:
            with self._unasked(), self._writing(self._journal) as writing:
                writing.add_lines(rank, first, message)
                if log.first_number(rank) > kept:
                    writing.drop_lines(message.job_id, rank, log.first_number(rank))

    def _forget_lines(self, job_id: int, channel: JobChannel) -> None:
        """Keep only how many lines the ranks of a job have printed."""
        counts = channel.log.forget()
        if self._journal is not None:
            with self._unasked(), self._writing(self._journal) as writing:
                for rank, count in counts:
                    writing.drop_lines(job_id, rank, count)
                    writing.add_lines(rank, count, LogLines(job_id, ()))
