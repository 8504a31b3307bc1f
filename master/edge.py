"""The master's hands: it holds the state machine under a lock and does what that asks for."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from plancompiler.boxing.serde import slice_to_bytes
from plancompiler.boxing.slices import Slicer
from plancompiler.cluster.channel import report_of
from plancompiler.cluster.chunks import to_chunks
from plancompiler.cluster.messages import (
    ClusterStatus,
    JobRequest,
    MasterMessage,
    Phase,
    Registered,
    Run,
)
from plancompiler.errors import ClusterError, PlanCompilerError
from plancompiler.ir import Job
from plancompiler.lower.compile import (
    DUMP_VARIABLE,
    build_graph,
    compile_plans,
    resolve_mode,
)
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
from plancompiler.proto.cluster_pb2 import Chunk

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

    def __init__(self, world_size: int, version: str, limits: Limits, mode: str | None) -> None:
        self._state = MasterState(world_size, version, limits)
        self._mode = mode
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
            return self._state.status(time.monotonic())

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

    def transfer(self, token: bytes, job_id: int, ticket: int) -> list[Chunk]:
        """What a worker fetches: its slice or plan, or the feeds of a ticket."""
        rank = self.rank_of_token(token)
        channel = self.channel(job_id)
        chunks = channel.feeds.get(ticket) if ticket else channel.transfers.get(rank)
        if chunks is None:
            raise ClusterError("there is nothing to fetch for this job", rank=rank)
        return list(chunks)

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
                self._channels[job_id].publish(event)
            case Release(job_id):
                self._channels[job_id].release()

    def _with_small_feeds(self, message: Run) -> Run:
        """Spare the workers a call where a step's feeds fit into the command itself."""
        chunks = self._channels[message.job_id].feeds.get(message.ticket, ())
        if len(chunks) != 1 or chunks[0].compression or len(chunks[0].data) > _INLINE_BYTES:
            return message
        return replace(message, feeds=chunks[0].data)

    def _compile(self, job_id: int) -> None:
        """Make what the ranks fetch. Runs in the compiler's thread."""
        try:
            channel = self.channel(job_id)
            job = channel.job
            if job is not None:
                channel.transfers = self._transfers(job, channel.request.mode)
            event: MasterEvent = MasterCompiled(job_id)
        except Exception as error:  # the job fails with whatever stopped its compilation
            if not isinstance(error, PlanCompilerError):
                _log.exception("job %d does not compile", job_id)
            event = MasterFailed(job_id, report_of(error, "compiling the job"))
        self.handle(event)

    def _transfers(self, job: Job, mode: str) -> dict[int, Sequence[Chunk]]:
        if mode != _PLAIN_MODE:
            plans = compile_plans(job, self.world_size, mode).plans
            return {
                rank: to_chunks(plan_to_bytes(plan), compress=True) for rank, plan in plans.items()
            }
        dump = os.environ.get(DUMP_VARIABLE)
        graph = build_graph(job, self.world_size, dump=Path(dump) if dump else None)
        slicer = Slicer(graph)
        made: dict[int, Sequence[Chunk]] = {}
        transfers: dict[int, Sequence[Chunk]] = {}
        for rank in range(self.world_size):
            rank_slice = slicer.for_rank(rank)  # equal slices are one object
            if id(rank_slice) not in made:
                made[id(rank_slice)] = to_chunks(slice_to_bytes(rank_slice), compress=True)
            transfers[rank] = made[id(rank_slice)]
        return transfers

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
