"""How this worker meets the others: what it shares memory with, and where the rest reach it."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from functools import partial
from typing import Protocol

from plancompiler.cluster.address import is_loopback, split_address
from plancompiler.cluster.channel import (
    TlsFiles,
    check_exposure,
    check_listenable,
    open_channel,
    server_credentials,
)
from plancompiler.cluster.messages import Register
from plancompiler.errors import ClusterError, UsageError
from plancompiler.executor.comm.choice import open_link
from plancompiler.executor.comm.link import Link
from plancompiler.executor.comm.mpi import MpiWorld
from plancompiler.executor.comm.remote import PeerServer, remote_link
from plancompiler.executor.host_identity import HOST_VARIABLE, host_id, network_name

TRANSPORTS = ("grpc", "mpi")
"""How workers exchange data: shared memory and gRPC between hosts, or MPI."""
_MPI = "mpi:"
"""Before the number of a rank: its address where MPI is used."""
LISTEN = "127.0.0.1:0"
"""Where a worker listens for others unless told otherwise."""


class Peers(Protocol):
    """This worker's side of the connections between workers, for all its jobs."""

    def offer(self, rank: int | None, device: str, version: str) -> Register:
        """What to register with."""

    def admit(self, key: bytes) -> None:
        """Take streams of those who know this key: the master's other workers."""

    def link(self, token: str, rank: int, world_size: int, far: Mapping[int, str]) -> Link:
        """The link of a job's rank; `far` are the addresses of ranks on other hosts."""

    def close(self) -> None:
        """Let go of everything."""


def open_peers(
    transport: str,
    master: str,
    listen: str,
    tls: TlsFiles | None,
    insecure: bool,
    host: str | None,
) -> Peers:
    """The side of a transport's name; UsageError for one that there is not."""
    if transport == "mpi":
        return MpiPeers(host)
    if transport != "grpc":
        raise UsageError("no such transport", got=transport, expected=", ".join(TRANSPORTS))
    return HostPeers(master, listen, tls, insecure, host)


class MpiPeers:
    """All peers are processes of one MPI run, and this worker's rank is MPI's."""

    def __init__(self, host: str | None = None) -> None:
        self._world = MpiWorld()
        self._host = host or os.environ.get(HOST_VARIABLE) or socket.gethostname()

    def offer(self, rank: int | None, device: str, version: str) -> Register:
        """See `Peers.offer`."""
        own = self._world.rank
        if rank not in (None, own):
            raise UsageError(
                "with MPI a worker's rank is that of MPI", got=f"--rank {rank}", expected=own
            )
        # No two share memory as far as the master is told: MPI does that by itself.
        address = f"{_MPI}{own}"
        return Register(own, self._host, device, version, address, address)

    def admit(self, key: bytes) -> None:
        """See `Peers.admit`: MPI connects the processes of one run only."""

    def link(self, token: str, rank: int, world_size: int, far: Mapping[int, str]) -> Link:
        """See `Peers.link`."""
        for peer, address in far.items():
            if not address.startswith(_MPI):
                raise ClusterError(
                    f"rank {rank} talks over MPI and rank {peer} does not",
                    rank=rank,
                    got=address,
                    hint="start all workers of a master with the same --transport",
                )
        own = f"{_MPI}{self._world.rank}"
        addresses = [far.get(peer, own) for peer in range(world_size)]
        remote = partial(
            self._world.link,
            processes=[int(address.removeprefix(_MPI)) for address in addresses],
        )
        return open_link(token, rank, world_size, far=far, remote=remote)

    def close(self) -> None:
        """See `Peers.close`."""
        self._world.close()


class HostPeers:
    """Peers on this host share memory; all others are reached over gRPC."""

    def __init__(
        self,
        master: str,
        listen: str = LISTEN,
        tls: TlsFiles | None = None,
        insecure: bool = False,
        host: str | None = None,
    ) -> None:
        """Listen. SecurityError for an address beyond this machine without TLS or `insecure`."""
        check_exposure(listen, tls, insecure)
        check_listenable(listen, "the worker")
        self._tls = tls
        named = host or os.environ.get(HOST_VARIABLE, "")
        self.host = named or socket.gethostname()
        self.network = network_name()
        self.host_id = host_id(named)
        self._server = PeerServer(
            listen,
            None if tls is None else server_credentials(tls),
            key=secrets.token_bytes(32),  # until the master tells the right one, nobody knows it
        )
        address, _ = split_address(listen)
        self.is_loopback = is_loopback(address)
        if address in ("", "0.0.0.0", "::"):
            address = _own_address(master)
        shown = f"[{address}]" if ":" in address else address
        self.address = f"{shown}:{self._server.port}"

    def offer(self, rank: int | None, device: str, version: str) -> Register:
        """See `Peers.offer`."""
        return Register(
            rank,
            self.host,
            device,
            version,
            self.host_id,
            self.address,
            self.network,
            self.is_loopback,
        )

    def admit(self, key: bytes) -> None:
        """See `Peers.admit`."""
        self._server.key = key

    def link(self, token: str, rank: int, world_size: int, far: Mapping[int, str]) -> Link:
        """See `Peers.link`."""
        for peer, address in far.items():
            if address.startswith(_MPI):
                raise ClusterError(
                    f"rank {peer} talks over MPI and rank {rank} does not",
                    rank=rank,
                    hint="start all workers of a master with the same --transport",
                )
        remote = partial(
            remote_link,
            rank=rank,
            server=self._server,
            addresses=far,
            open_channel=lambda address: open_channel(address, self._tls),
            with_tls=self._tls is not None,
        )
        return open_link(token, rank, world_size, far=far, remote=remote)

    def close(self) -> None:
        """See `Peers.close`."""
        self._server.close()


def _own_address(master: str) -> str:
    """This machine's address as the master's side of the network sees it; nothing is sent."""
    host, port = split_address(master)
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ClusterError(
            "this worker cannot tell at which address others reach it",
            got=str(error),
            hint="give --listen the address of this host instead of a wildcard",
        ) from error
