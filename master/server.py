"""The master's gRPC server: the services of clients and workers, health checking, reflection.

It is served by one thread with an event loop of its own, in which every call is a coroutine: a
stream that waits costs no thread. The methods of `MasterServer` may be called from any thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from plancompiler.cluster.address import split_address
from plancompiler.cluster.channel import (
    SERVER_OPTIONS,
    TRANSFER_SERVICE,
    TlsFiles,
    check_exposure,
    check_listenable,
    server_credentials,
)
from plancompiler.cluster.chunks import UploadBudget
from plancompiler.cluster.messages import JobEvent
from plancompiler.cluster.token import Challenger, SecretFile, new_credential, read_token_file
from plancompiler.errors import ClusterError, PlanCompilerError, UsageError
from plancompiler.limits import time_limits
from plancompiler.lower.compile import resolve_mode
from plancompiler.master.admission import (
    CLIENT_SERVICE,
    SIGN_IN_SERVICE,
    WORKER_SERVICE,
    Admission,
    SignInService,
    StreamLimits,
)
from plancompiler.master.connections import MAX_CONNECTIONS, Connections
from plancompiler.master.events import Limits
from plancompiler.master.http_endpoint import HttpEndpoint
from plancompiler.master.io_shell import MAX_QUEUE, MasterShell
from plancompiler.master.job_channel import Retention
from plancompiler.master.journal import Journal
from plancompiler.master.observation import Observation
from plancompiler.master.page import page
from plancompiler.master.services import MAX_OPS, ClientService, Unpacking, WorkerService
from plancompiler.master.snapshot import Snapshot
from plancompiler.master.token_watch import TokenWatch
from plancompiler.master.transfers import SIMULTANEOUS, Gate, TransferService
from plancompiler.plan.plan import Plan
from plancompiler.proto import cluster_pb2_grpc as pb_grpc
from plancompiler.version import VERSION

_SERVICES = (CLIENT_SERVICE, WORKER_SERVICE, TRANSFER_SERVICE, SIGN_IN_SERVICE)
MAX_UPLOAD_BYTES = 2 << 30
"""The feeds of one step may come to half of it."""
_STOP_SECONDS = time_limits.MASTER_STOP


def _both(
    observe: Callable[[int, JobEvent], None] | None, observation: Observation | None
) -> Callable[[int, JobEvent], None] | None:
    """Whoever wants to hear of events."""
    if observe is None or observation is None:
        return observe if observation is None else observation.note

    def tell(job_id: int, event: JobEvent) -> None:
        observation.note(job_id, event)
        observe(job_id, event)

    return tell


def _says_more_than_cancelled(record: logging.LogRecord) -> bool:
    """Not where gRPC writes, with a traceback, that the event loop's end cancelled a call."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, asyncio.CancelledError)


logging.getLogger("grpc._cython.cygrpc").addFilter(_says_more_than_cancelled)


async def _calls_end() -> None:
    """Wait for the calls that were cancelled: gRPC prints a traceback for each one that the end of
    the event loop cancels once more.
    """
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=_STOP_SECONDS)


class MasterServer:
    """A master, embedded or for itself.

    `listen` is HOST:PORT, port 0 for any free one; an address beyond this machine needs `tls` or
    `insecure`. `ranks` is the world size. `mode` is the compile mode of jobs that name none; by
    default the environment's, else rank_per_process. `limits` says how long things may take.
    `token_file` holds the secrets of clients and workers; by default the master makes one, which
    those of the same user find. `streams` says how many may be open, over at most
    `max_connections` of clients (see `Connections`). `max_upload_bytes` of what
    clients upload are held at the same time, and `max_queue` jobs may wait, each of at most
    `max_ops` ops. `retention` says what is kept for clients that come late. `transfers` workers
    fetch at the same time, the others wait. `observe` hears every event of every job and its id; it
    must not wait for anything. Where ranks of a job compute with other numeric kernels, the job
    fails; with `allow_mixed_kernels` (by default PLANCOMPILER_ALLOW_MIXED_KERNELS) that is a
    warning. With `plans`, by rank, every job is taken to be compiled into these already. With a
    `journal`, a file of this master alone, it can be killed and started again: see `Journal`. Where
    that cannot be written, the master stops, and `check` raises. `metrics` is HOST:PORT where the
    master answers over HTTP with its page and its metrics.
    """

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        ranks: int = 1,
        *,
        mode: str | None = None,
        tls: TlsFiles | None = None,
        insecure: bool = False,
        limits: Limits | None = None,
        token_file: Path | None = None,
        streams: StreamLimits | None = None,
        max_upload_bytes: int = MAX_UPLOAD_BYTES,
        max_queue: int = MAX_QUEUE,
        transfers: int = SIMULTANEOUS,
        observe: Callable[[int, JobEvent], None] | None = None,
        allow_mixed_kernels: bool | None = None,
        retention: Retention | None = None,
        plans: Mapping[int, Plan] | None = None,
        journal: Path | None = None,
        metrics: str | None = None,
        max_ops: int = MAX_OPS,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        if transfers < 1:
            raise UsageError("a master must let at least one worker fetch", got=transfers)
        check_exposure(listen, tls, insecure)
        resolve_mode(mode, "rank_per_process")
        self._host, self._port = split_address(listen)
        self._tls = tls
        self._limits = limits or Limits()
        self._journal = None if journal is None else Journal(journal, VERSION, ranks)
        self._failure: PlanCompilerError | None = None
        self._observation = None if metrics is None else Observation()
        self._shell = MasterShell(
            ranks,
            VERSION,
            self._limits,
            mode,
            _both(observe, self._observation),
            max_queue,
            allow_mixed_kernels,
            retention,
            plans,
            self._journal,
            self._fail,
        )
        self._max_ops = max_ops
        self._budget = UploadBudget(max_upload_bytes)
        self._gate = Gate(transfers)
        self._connections = Connections(max_connections, ranks)
        self._own = new_credential() if token_file is None else None
        """The secret that the master leaves where its user's clients and workers find it."""
        credentials = read_token_file(token_file) if token_file is not None else ()
        challenger = Challenger(credentials if self._own is None else (self._own,))
        self._sign_in = SignInService(challenger, self._connections, journal is not None)
        self._admission = Admission(challenger, streams or StreamLimits(), self._connections, ranks)
        self._token_watch = None
        if token_file is not None:
            self._token_watch = TokenWatch(token_file, challenger, self._admission.end_revoked)
        self._endpoint = None
        if metrics is not None:
            # Only here: its library takes a while to import.
            from plancompiler.master.metrics import Metrics  # noqa: PLC0415  # see above

            answers = {"/": self._page, "/metrics": Metrics(self._snapshot).text}
            self._endpoint = HttpEndpoint(
                metrics, tls, challenger, answers, self._admission.refused
            )
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_asked = asyncio.Event()
        self._ended = threading.Event()

    @property
    def address(self) -> str:
        """HOST:PORT that clients and workers connect to."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}"

    @property
    def metrics_address(self) -> str | None:
        """HOST:PORT of the page and the metrics, where they are served."""
        return None if self._endpoint is None else self._endpoint.address

    def start(self) -> Self:
        """Begin to serve; itself."""
        if self._thread is not None:
            raise UsageError("a master can be started once")
        check_listenable(self.address, "the master")
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="plancompiler-master", daemon=True
        )
        self._thread.start()
        started.result()
        return self

    def _run(self, started: Future[None]) -> None:
        """The thread of the event loop."""
        try:
            asyncio.run(self._serve(started))
        except BaseException as error:  # whoever starts it is told
            if started.done():
                raise
            started.set_exception(error)
        finally:
            self._ended.set()

    async def _serve(self, started: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        options = [*SERVER_OPTIONS, *self._connections.server_options]
        server = grpc.aio.server(options=options, interceptors=(self._admission,))
        silence = self._limits.stream
        unpacking = Unpacking(silence, self._budget)
        clients = ClientService(self._shell, silence, unpacking, self._max_ops)
        pb_grpc.add_ClientServicer_to_server(clients, server)  # type: ignore[no-untyped-call]  # generated
        pb_grpc.add_WorkerServicer_to_server(WorkerService(self._shell, silence, unpacking), server)  # type: ignore[no-untyped-call]  # generated
        TransferService(self._shell.parcel, self._shell.count_sent, self._gate).add_to(server)
        pb_grpc.add_SignInServicer_to_server(self._sign_in, server)  # type: ignore[no-untyped-call]  # generated
        healthy = health.aio.HealthServicer()  # type: ignore[attr-defined]  # its stubs lack `aio`
        health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
        names = (*_SERVICES, health.SERVICE_NAME)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
        try:
            if self._tls is None:
                port = server.add_insecure_port(self.address)
            else:
                port = server.add_secure_port(self.address, server_credentials(self._tls))
        except RuntimeError:
            port = 0
        if port == 0:
            raise ClusterError(
                "the master cannot listen on this address",
                got=self.address,
                hint="choose a free port, or 0 for any",
            )
        self._port = self._connections.port = port
        # Written before anyone gets an answer, so that whoever does finds it.
        token = None if self._own is None else SecretFile(self.address, self._own)
        watch = None
        try:
            if self._endpoint is not None:
                await self._endpoint.start()
            await server.start()
            self._shell.start()
            if self._token_watch is not None:
                watch = asyncio.create_task(self._token_watch.run())
            for name in ("", *_SERVICES):
                await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
            started.set_result(None)
            await self._stop_asked.wait()
            await healthy.enter_graceful_shutdown()
            if self._failure is None:
                self._shell.stop()
            await server.stop(_STOP_SECONDS if self._failure is None else None)
            await self._shell.finish()
        finally:
            if watch is not None:
                watch.cancel()
            if self._endpoint is not None:
                self._endpoint.close()
            if token is not None:
                token.remove()
            await _calls_end()
            if self._journal is not None:
                self._journal.close()

    def _fail(self, error: PlanCompilerError) -> None:
        """The journal cannot be written: end as if killed, so that nothing is done that is not in
        it. Workers wait for the master to be started again.
        """
        self._failure = self._failure or error
        self._stop_asked.set()

    def check(self) -> None:
        """Raise what the master has ended with, if it has ended by itself."""
        if self._failure is not None:
            raise self._failure

    def _snapshot(self) -> Snapshot:
        observation = self._observation or Observation()
        observation.catch_up()
        return self._shell.snapshot(self.address, observation, self._admission.refused)

    def _page(self) -> tuple[str, bytes]:
        return "text/html; charset=utf-8", page(self._snapshot()).encode()

    def stop(self) -> None:
        """Fail the jobs, send the workers away, close the port. Safe to call again."""
        if self._loop is None or self._thread is None:
            return
        with suppress(RuntimeError):  # the loop is closed: it has been stopped
            self._loop.call_soon_threadsafe(self._stop_asked.set)
        self._thread.join()

    def wait(self, seconds: float | None = None) -> None:
        """Return when the server has been stopped, or after a time."""
        if self._thread is not None:
            self._ended.wait(seconds)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
