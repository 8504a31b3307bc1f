"""The I/O shell of a worker: its connection, its clock, and the thread that does the work.

Whichever thread brings an event to the state machine also does what that asks for, in turn: to hand
it to another thread takes as long as a small step.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from plancompiler.cluster.channel import (
    SessionChannel,
    TlsFiles,
    call_error,
    connect_master,
)
from plancompiler.cluster.checked import Received, Sent
from plancompiler.cluster.messages import (
    Heartbeat,
    LogLines,
    Register,
    Registered,
    SendFiles,
    WorkerMessage,
    WriteIndex,
)
from plancompiler.cluster.serde import MASTER_MESSAGES, WORKER_MESSAGES, Reader, grouped
from plancompiler.errors import (
    ClusterError,
    DeadlineError,
    PlanCompilerError,
    UsageError,
)
from plancompiler.executor.host_identity import HOST_VARIABLE
from plancompiler.limits import time_limits
from plancompiler.limits.time_limits import DEADLINE
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.proto.cluster_pb2_grpc import WorkerStub
from plancompiler.version import VERSION
from plancompiler.worker.allowed_paths import AllowedPaths
from plancompiler.worker.events import (
    Close,
    Exit,
    FromMaster,
    Interrupt,
    MasterGone,
    Reconnect,
    Start,
    StartBeside,
    StopAsked,
    TellMaster,
    WorkerAction,
    WorkerEvent,
    WorkerTick,
)
from plancompiler.worker.file_sender import FileSender
from plancompiler.worker.heartbeats import Heartbeats
from plancompiler.worker.job_log import JobLog
from plancompiler.worker.job_runner import JobRunner
from plancompiler.worker.outbox import Outbox
from plancompiler.worker.peers import LISTEN, Peers, open_peers
from plancompiler.worker.quiet_work import QuietWork
from plancompiler.worker.state import WorkerState

_log = logging.getLogger(__name__)

_TICK_SECONDS = 0.2
_LONGEST_TICK = 1.0
"""What a tick takes longer than this, the process stood still."""
_RECONNECT_SECONDS = 0.2
"""Between two attempts to reach a master that was lost."""
_ATTEMPT_SECONDS = time_limits.SILENCE
_LOG_SECONDS = 0.2
"""Between two batches of lines that were printed."""
_STOP_SECONDS = time_limits.AGENT_STOP
"""How long the end of the job's thread and of the connection may take."""


def run_worker(
    master: str,
    rank: int | None = None,
    device: str = "cpu",
    *,
    stop: threading.Event | None = None,
    tls: TlsFiles | None = None,
    timeout: float = time_limits.SILENCE,
    host: str | None = None,
    listen: str = LISTEN,
    insecure: bool = False,
    transport: str = "grpc",
    version: str | None = None,
    silence_seconds: float = time_limits.WORKER_SILENCE,
    record: Path | None = None,
    deadline: float = DEADLINE,
    token_file: Path | None = None,
    allow_paths: Sequence[Path] | None = None,
    master_grace: float = time_limits.MASTER_GRACE,
    log: JobLog | None = None,
    max_memory: int | None = None,
) -> None:
    """Serve jobs as one rank of the master at `master` until `stop` is set.

    `rank` None takes the lowest free one. `timeout` (seconds) bounds the first contact; `host` and
    `version` are what the worker says of itself, by default the truth; workers with different hosts
    share no memory. `listen` is where workers of other hosts reach this one; beyond this machine it
    needs `tls` or `insecure`. `transport` is one of `peers.TRANSPORTS`. `record` is a folder where
    the timeline of each job is recorded, over that of the job before. `deadline` (seconds) is how
    long a rank of a job may stand still while this one waits for it. `token_file` holds the secret
    to show, by default that of a master of the same user. Paths that jobs name must lead below
    `allow_paths`; None lets them lead anywhere. Where a master with a journal is lost, the worker
    goes on with its job and waits `master_grace` seconds for the master to be started again. `log`
    takes what this process prints. Jobs whose plan takes more than `max_memory` bytes are refused.
    Raises MasterUnreachableError where no master answers or it is lost later, SecurityError where
    there is no such secret or the master does not know it, RegistrationError, RankError or
    VersionError where it refuses the worker.
    """
    if device != "cpu":
        # It takes long to load, and workers on CPUs have no use for it.
        from plancompiler.executor.cuda.device import local_device  # noqa: PLC0415  # see above

        local_device(0, device)
    if rank is not None and rank < 0:
        raise UsageError("a rank is negative", got=rank)
    channel = peers = None
    log = log or JobLog()
    streams = log.streams
    heartbeats = Heartbeats() if streams is None else Heartbeats(streams.stderr, streams.pipes)
    try:
        named = host or os.environ.get(HOST_VARIABLE) or socket.gethostname()
        heartbeats.announce(master, tls, token_file, rank, named)
        peers = open_peers(transport, master, listen, tls, insecure, host)
        register = peers.offer(rank, device, version or VERSION)
        register = replace(register, deadline=deadline)
        channel = connect_master(master, tls, token_file, timeout, is_worker=True)
        stop = stop or threading.Event()
        _Agent(
            channel,
            heartbeats,
            master,
            tls,
            token_file,
            register,
            peers,
            stop,
            silence_seconds,
            record,
            deadline,
            None if allow_paths is None else AllowedPaths(allow_paths),
            master_grace,
            log,
            max_memory,
        ).serve()
    finally:
        if channel is not None:
            channel.close()
        if peers is not None:
            peers.close()
        heartbeats.close()


class _Agent:
    """One life of a worker."""

    def __init__(
        self,
        channel: SessionChannel,
        heartbeats: Heartbeats,
        master: str,
        tls: TlsFiles | None,
        token_file: Path | None,
        register: Register,
        peers: Peers,
        stop: threading.Event,
        silence_seconds: float,
        record: Path | None,
        deadline: float,
        allowed: AllowedPaths | None,
        grace: float,
        log: JobLog,
        max_memory: int | None,
    ) -> None:
        self._master = master
        self._tls = tls
        self._token_file = token_file
        self._channel = channel
        self._register = register
        self._heartbeats = heartbeats
        self._peers = peers
        self._stop = stop
        self._turn = threading.Lock()
        """Of the state machine, and of what it asks for."""
        self._exit: Exit | None = None
        self._failure: BaseException | None = None
        """Of whatever thread brought an event."""
        self._has_ended = threading.Event()
        """There is one of these two."""
        self._outbox = Outbox()
        self._pieces = 0
        """Messages to the master, without heartbeats and logs."""
        self._call: Any = None
        self._reader: threading.Thread | None = None
        self._reconnector: threading.Thread | None = None
        self._leaving = threading.Event()
        stub = WorkerStub(channel)  # type: ignore[no-untyped-call]  # generated
        device = None if register.device == "cpu" else register.device
        self._runner = JobRunner(
            stub,
            master,
            tls,
            channel.session,
            peers,
            self._take,
            self._outbox,
            heartbeats.await_ready,
            record,
            device,
            deadline,
            allowed,
            log,
            max_memory,
        )
        self._files = FileSender(stub, allowed)
        self._log = log
        self._log_sender = threading.Thread(
            target=self._send_log, name="plancompiler-log", daemon=True
        )
        self._stood_still = 0.0
        self._quiet_work = QuietWork(
            lambda: self._pieces + self._runner.transferred + self._files.pieces
        )
        self._state = WorkerState(time.monotonic(), silence_seconds, grace)

    def serve(self) -> None:
        """Keep the clock until the state machine says to exit; raise what it exits with."""
        self._talk(register=self._register)
        self._log_sender.start()
        stopping = False
        try:
            while not self._has_ended.is_set():
                before = time.monotonic()
                self._has_ended.wait(_TICK_SECONDS)
                # Time in which this process stood still says nothing of the master.
                self._stood_still += max(0.0, time.monotonic() - before - _LONGEST_TICK)
                self._heartbeats.sign()
                if self._stop.is_set() and not stopping:
                    stopping = True
                    self._take(StopAsked())
                self._take(WorkerTick(time.process_time(), self._quiet_work.was_seen()))
        finally:
            self._leaving.set()
            self._outbox.end()
            self._runner.stop(_STOP_SECONDS)
            self._files.close(_STOP_SECONDS)
            self._log.close()
            self._log_sender.join()
            self._end_call()
        if self._failure is not None:
            raise self._failure
        if self._exit is not None and self._exit.error is not None:
            raise PlanCompilerError.from_report(self._exit.error)

    def _take(self, event: WorkerEvent) -> None:
        """Do what an event asks for; from any thread."""
        with self._turn:
            if self._has_ended.is_set():
                return
            try:
                for action in self._state.handle(event, time.monotonic() - self._stood_still):
                    if isinstance(action, Exit):
                        self._exit = action
                    else:
                        self._act(action)
            except BaseException as error:  # it ends the worker, whose thread `serve` raises it
                self._failure = error
            if self._exit is not None or self._failure is not None:
                self._has_ended.set()

    def _act(self, action: WorkerAction) -> None:
        match action:
            case TellMaster(message):
                self._outbox.put(message)
            case Start(work):
                self._runner.start(work)
            case StartBeside(SendFiles() as order):
                self._files.send(order, self._runner.token)
            case StartBeside(WriteIndex() as order):
                self._runner.write_index_beside(order)
            case Interrupt(error):
                self._runner.interrupt(PlanCompilerError.from_report(error))
            case Close(job_id):
                self._runner.close_job(job_id)
            case Reconnect():
                self._outbox.closed()
                self._reconnector = threading.Thread(
                    target=self._reconnect, name="plancompiler-reconnect", daemon=True
                )
                self._reconnector.start()

    def _talk(self, register: Register) -> None:
        """Begin a stream of messages each way."""
        stub = WorkerStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        call = self._call = stub.Connect(self._requests(register))
        self._reader = threading.Thread(
            target=self._read, args=(call,), name="plancompiler-master", daemon=True
        )
        self._reader.start()

    def _reconnect(self) -> None:
        """Connect to the master that was started again, however often that fails; the state machine
        says when to give up.
        """
        while not self._leaving.wait(_RECONNECT_SECONDS):
            try:
                channel = connect_master(
                    self._master,
                    self._tls,
                    self._token_file,
                    _ATTEMPT_SECONDS,
                    stop=self._leaving,
                    is_worker=True,
                )
            except PlanCompilerError as error:
                _log.debug("the master is not there again: %s", error)
                continue
            before, self._channel = self._channel, channel
            before.close()
            stub = WorkerStub(channel)  # type: ignore[no-untyped-call]  # generated
            self._runner.reconnected(stub, channel.session)
            self._files.reconnected(stub)
            self._talk(
                replace(self._register, token=self._runner.token, received=self._state.received)
            )
            return

    def _requests(self, register: Register) -> Iterator[pb.WorkerMessages]:
        sent = Sent()
        for messages in self._outbox.messages(register):
            for group in grouped(self._written(messages)):
                yield sent(pb.WorkerMessages(messages=group))

    def _written(self, messages: Iterable[tuple[int, WorkerMessage]]) -> Iterator[pb.WorkerMessage]:
        for number, message in messages:
            for proto in WORKER_MESSAGES.write(message):
                self._pieces += not isinstance(message, (Heartbeat, LogLines))
                proto.number = number
                yield proto

    def _send_log(self) -> None:
        """Send what is printed, several times a second."""
        while self._log.wait():
            for lines in self._log.take():
                self._outbox.put(lines)
            self._leaving.wait(_LOG_SECONDS)

    def _read(self, call: Any) -> None:
        """Turn the master's stream into events, until it ends."""
        error: PlanCompilerError = ClusterError("the master ended the connection")
        received, reader = Received("the master"), Reader(MASTER_MESSAGES)
        try:
            for proto in call:
                message = reader.read(received(proto))
                if message is None:
                    continue
                if isinstance(message, Heartbeat):
                    self._outbox.acknowledged(message.received)
                elif isinstance(message, Registered):
                    self._outbox.opened(message.received, message.is_durable)
                    self._runner.token = message.token
                    self._heartbeats.introduce(
                        self._master,
                        self._tls,
                        self._channel.session,
                        message.token,
                        message.silence_seconds,
                    )
                    self._peers.admit(message.peer_key)
                self._take(FromMaster(message))
        except grpc.RpcError as failure:
            error = call_error(failure, self._master)
        except PlanCompilerError as failure:
            error = failure
        self._take(MasterGone(error.report))

    def _end_call(self) -> None:
        """Let what was said last reach the master, then end the connection."""
        if self._reconnector is not None:
            self._reconnector.join(_STOP_SECONDS)
        if self._reader is not None:
            self._reader.join(1.0)
            self._call.cancel()
            self._reader.join(_STOP_SECONDS)
            if self._reader.is_alive():
                raise DeadlineError("the connection to the master did not end")
        self._channel.close()
