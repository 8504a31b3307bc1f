"""The master's gRPC server: the services of clients and workers, health checking, reflection.

Threads, not asyncio: each call has one, and a worker's stream has a second one that reads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from plancompiler.cluster.channel import (
    SERVER_OPTIONS,
    TRANSFER_SERVICE,
    TlsFiles,
    check_exposure,
    check_listenable,
    server_credentials,
    software_version,
    split_address,
)
from plancompiler.cluster.messages import JobEvent
from plancompiler.errors import ClusterError, UsageError
from plancompiler.lower.compile import resolve_mode
from plancompiler.master.edge import MasterEdge
from plancompiler.master.events import Limits
from plancompiler.master.services import ClientService, WorkerService
from plancompiler.master.transfers import SIMULTANEOUS, Gate, TransferService
from plancompiler.proto import cluster_pb2_grpc as pb_grpc

_SERVICES = ("plancompiler.proto.Client", "plancompiler.proto.Worker", TRANSFER_SERVICE)
_CLIENT_THREADS = 32
_STOP_SECONDS = 5.0


class MasterServer:
    """A master, embedded or for itself.

    `listen` is HOST:PORT, port 0 for any free one; an address beyond this machine needs `tls` or
    `insecure`. `ranks` is the world size. `mode` is the compile mode of jobs that name none; by
    default the environment's, else rank_per_process. `limits` says how long things may take.
    `transfers` workers fetch at the same time, the others wait. `observe` hears every event of
    every job and its id; it must not wait for anything.
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
        transfers: int = SIMULTANEOUS,
        observe: Callable[[int, JobEvent], None] | None = None,
    ) -> None:
        if transfers < 1:
            raise UsageError("a master must let at least one worker fetch", got=transfers)
        check_exposure(listen, tls, insecure)
        resolve_mode(mode, "rank_per_process")
        self._host, self._port = split_address(listen)
        self._tls = tls
        self._edge = MasterEdge(ranks, software_version(), limits or Limits(), mode, observe)
        self._gate = Gate(transfers)
        # A worker's stream, its fetches and uploads take a thread each.
        self._threads = ThreadPoolExecutor(
            3 * ranks + _CLIENT_THREADS, thread_name_prefix="plancompiler-rpc"
        )
        self._health = health.HealthServicer()
        self._server: grpc.Server | None = None
        self._stopped = False

    @property
    def address(self) -> str:
        """HOST:PORT that clients and workers connect to."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}"

    def start(self) -> Self:
        """Begin to serve; itself."""
        if self._server is not None:
            raise UsageError("a master can be started once")
        check_listenable(self.address, "the master")
        server = grpc.server(self._threads, options=SERVER_OPTIONS)
        pb_grpc.add_ClientServicer_to_server(ClientService(self._edge), server)  # type: ignore[no-untyped-call]  # generated
        pb_grpc.add_WorkerServicer_to_server(WorkerService(self._edge), server)  # type: ignore[no-untyped-call]  # generated
        TransferService(self._edge.parcel, self._edge.count_sent, self._gate).add_to(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
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
        self._port = port
        self._server = server
        self._edge.start()
        server.start()
        for name in ("", *_SERVICES):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return self

    def stop(self) -> None:
        """Fail the jobs, send the workers away, close the port. Safe to call again."""
        if self._server is None or self._stopped:
            return
        self._stopped = True
        self._health.enter_graceful_shutdown()
        self._edge.stop()
        self._server.stop(_STOP_SECONDS).wait()
        self._threads.shutdown(wait=True)

    def wait(self, seconds: float | None = None) -> None:
        """Return when the server has been stopped, or after a time."""
        if self._server is not None:
            self._server.wait_for_termination(seconds)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
