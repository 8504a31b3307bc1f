"""The master's hands: it holds the state machine under a lock and does what that asks for."""

from __future__ import annotations

import itertools
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from plancompiler.cache.plan_cache import open_cache
from plancompiler.cluster.channel import report_of
from plancompiler.cluster.chunks import Parcel, pack
from plancompiler.cluster.messages import (
    ClusterStatus,
    JobEvent,
    JobRequest,
    MasterMessage,
    Phase,
    Registered,
    Run,
    Shipped,
)
from plancompiler.errors import ClusterError, PlanCompilerError, WireFormatError
from plancompiler.ir import Job
from plancompiler.lower.cached import plans_of_job, slices_of_job
from plancompiler.lower.compile import resolve_mode
from plancompiler.master.events import (
    Disconnect,
    FromWorker,
    JobSubmitted,
    Limits,
    MasterAction,
    MasterCompiled,
    MasterEvent,
    MasterFailed,
    Publish,
    Release,
    StartCompile,
    Stopping,
    Tell,
    Tick,
    WorkerGone,
)
from plancompiler.master.job_channel import JobChannel
from plancompiler.master.state import MasterState
from plancompiler.plan.serde import plan_to_bytes
from plancompiler.proto.cluster_pb2 import Chunk, FetchRequest

TICK_SECONDS = 0.2
_STOP_SECONDS = 5.0
_JOBS_WITH_OUTPUTS = 4
"""Ended jobs whose outputs are kept for late readers."""
_INLINE_BYTES = 256 << 10
_PLAIN_MODE = "rank_per_process"

_log = logging.getLogger(__name__)


class Connection:
    """One worker's stream, seen from the master."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.token = secrets.token_bytes(16)
        self.outbox: queue.SimpleQueue[MasterMessage | None] = queue.SimpleQueue()
        """Messages to send; None ends the stream."""


class MasterEdge:
    """Everything between the gRPC services and the pure state. Any thread may call it."""

    def __init__(
        self,
        world_size: int,
        version: str,
        limits: Limits,
        mode: str | None,
        observe: Callable[[int, JobEvent], None] | None = None,
    ) -> None:
        self._state = MasterState(world_size, version, limits)
        self._mode = mode
        self._observe = observe
        self._cache = open_cache()
        self._lock = threading.RLock()
        self._connections: dict[int, Connection] = {}
        self._by_token: dict[bytes, Connection] = {}
        self._channels: dict[int, JobChannel] = {}
        self._numbers = itertools.count(1)
        self._job_ids = itertools.count(1)
        self._tickets = itertools.count(1)
        self._compilers: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._clock = threading.Thread(target=self._tick, name="plancompiler-clock", daemon=True)

    def start(self) -> None:
        """Start the clock."""
        self._clock.start()

    def stop(self) -> None:
        """Fail what runs, send workers away, end the threads."""
        self._stopping.set()
        self.handle(Stopping())
        self._clock.join()
        # A compilation cannot be interrupted; one that goes on is of no use to anybody.
        until = time.monotonic() + _STOP_SECONDS
        for compiler in self._compilers:
            compiler.join(max(0.0, until - time.monotonic()))

    @property
    def world_size(self) -> int:
        return self._state.world_size

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def handle(self, event: MasterEvent) -> None:
        """Feed the state machine and do what it asks for. Refused requests raise."""
        with self._lock:
            for action in self._state.handle(event, time.monotonic()):
                self._act(action)

    def status(self) -> ClusterStatus:
        """A picture of the cluster."""
        with self._lock:
            status = self._state.status(time.monotonic())
            jobs = tuple(
                replace(job, sent_bytes=self._channels[job.job_id].sent_bytes)
                for job in status.jobs
            )
        return replace(status, jobs=jobs)

    # --- workers ------------------------------------------------------------------------------

    def connect(self) -> Connection:
        """A new stream of a worker that has not yet registered."""
        with self._lock:
            connection = Connection(next(self._numbers))
            self._connections[connection.number] = connection
            self._by_token[connection.token] = connection
        return connection

    def disconnect(self, connection: Connection) -> None:
        """The stream ended."""
        with self._lock:
            self._connections.pop(connection.number, None)
            self._by_token.pop(connection.token, None)
        self.handle(WorkerGone(connection.number))

    def rank_of_token(self, token: bytes) -> int:
        """The rank of the registered worker that holds a token."""
        with self._lock:
            connection = self._by_token.get(token)
            rank = None if connection is None else self._state.rank_of(connection.number)
        if rank is None:
            raise ClusterError("only registered workers may ask for this")
        return rank

    # --- jobs ---------------------------------------------------------------------------------

    def submit(self, job: Job, request: JobRequest) -> int:
        """Queue a job; its id."""
        request = replace(request, mode=resolve_mode(request.mode or self._mode, _PLAIN_MODE))
        with self._lock:
            if self.is_stopping:
                raise ClusterError("the master is about to stop")
            job_id = next(self._job_ids)
            self._channels[job_id] = JobChannel(job, request)
            try:
                self.handle(
                    JobSubmitted(
                        job_id,
                        job.name,
                        request,
                        job.world_size,
                        tuple(job.inputs),
                        secrets.token_hex(16),
                    )
                )
            except PlanCompilerError:
                del self._channels[job_id]
                raise
            self._forget_old_jobs()
        return job_id

    def _forget_old_jobs(self) -> None:
        known = {job.job_id: job for job in self._state.status(0.0).jobs}
        for job_id in self._channels.keys() - known.keys():
            del self._channels[job_id]
        ended = [job_id for job_id, job in known.items() if job.phase.is_end]
        for job_id in ended[:-_JOBS_WITH_OUTPUTS]:
            self._channels[job_id].forget_outputs()

    def channel(self, job_id: int) -> JobChannel:
        """A job's things; ClusterError where there is no such job."""
        with self._lock:
            channel = self._channels.get(job_id)
        if channel is None:
            raise ClusterError("the master knows no such job", got=f"job {job_id}")
        return channel

    def phase(self, job_id: int) -> Phase:
        """Where a job is."""
        with self._lock:
            return self._state.job_phase(job_id)

    def next_ticket(self) -> int:
        """A number for a client's request."""
        return next(self._tickets)

    def parcel(self, request: FetchRequest) -> Parcel:
        """What a worker fetches: its slice or plan, or the feeds of a ticket."""
        rank = self.rank_of_token(request.token)
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
        self.channel(request.job_id).count_sent(nbytes)

    # --- actions ------------------------------------------------------------------------------

    def _act(self, action: MasterAction) -> None:
        match action:
            case Tell(number, message):
                connection = self._connections.get(number)
                if connection is not None:
                    if isinstance(message, Registered):
                        message = replace(message, token=connection.token)
                    elif isinstance(message, Run) and message.fed:
                        message = self._with_small_feeds(message)
                    connection.outbox.put(message)
            case Disconnect(number):
                connection = self._connections.get(number)
                if connection is not None:
                    connection.outbox.put(None)
            case StartCompile(job_id):
                self._compilers = [each for each in self._compilers if each.is_alive()]
                compiler = threading.Thread(
                    target=self._compile, args=(job_id,), name="plancompiler-compile", daemon=True
                )
                self._compilers.append(compiler)
                compiler.start()
            case Publish(job_id, event):
                channel = self._channels[job_id]
                if isinstance(event, Shipped):
                    event = replace(event, sent_bytes=channel.sent_bytes)
                channel.publish(event)
                if self._observe is not None:
                    self._observe(job_id, event)
            case Release(job_id):
                self._channels[job_id].release()

    def _with_small_feeds(self, message: Run) -> Run:
        """Spare the workers a call where a step's feeds fit into the command itself."""
        parcel = self._channels[message.job_id].feeds.get(message.ticket)
        if parcel is None or parcel.wire_bytes > _INLINE_BYTES:
            return message
        return replace(message, feeds=Chunk.FromString(parcel.messages[0]).data)

    def _compile(self, job_id: int) -> None:
        """Make what the ranks fetch. Runs in the compiler's thread."""
        try:
            channel = self.channel(job_id)
            job = channel.job
            cached = False
            if job is not None:
                channel.parcels, cached = self._parcels(job, channel.request)
            digests = {rank: parcel.digest for rank, parcel in channel.parcels.items()}
            event: MasterEvent = MasterCompiled(job_id, digests, cached)
        except Exception as error:  # the job fails with whatever stopped its compilation
            if not isinstance(error, PlanCompilerError):
                _log.exception("job %d does not compile", job_id)
            event = MasterFailed(job_id, report_of(error, "compiling the job"))
        self.handle(event)

    def _parcels(self, job: Job, request: JobRequest) -> tuple[Mapping[int, Parcel], bool]:
        """What each rank fetches, and whether nothing was compiled for it."""
        cache = self._cache if request.cache else None
        if request.mode != _PLAIN_MODE:
            made = plans_of_job(job, self.world_size, request.mode, cache)
            plans = {
                rank: pack(plan_to_bytes(plan), compress=True, checked=True)
                for rank, plan in made.plans.items()
            }
            return plans, made.cached
        slices, cached = slices_of_job(job, self.world_size, cache)
        parcels = [pack(data, compress=True, checked=True) for data in slices.distinct]
        return {rank: parcels[number] for rank, number in enumerate(slices.of_rank)}, cached

    def _tick(self) -> None:
        while not self._stopping.wait(TICK_SECONDS):
            try:
                self.handle(Tick())
            except Exception:
                _log.exception("the clock of the master stumbled")

    def from_worker(self, connection: Connection, event: FromWorker) -> None:
        """A message of a worker; what it provokes is never the worker's error."""
        with self._lock:
            if connection.number in self._connections:
                self.handle(event)
