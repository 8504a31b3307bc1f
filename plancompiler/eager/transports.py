"""The transports between the processes of an SPMD program: shared memory, gRPC or MPI."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import grpc

from plancompiler.engines.launch_variables import (
    ADDRESSES,
    INSECURE,
    PIPE,
    TLS,
    TOKEN,
    TRANSPORT,
    Launched,
    processes_of,
)
from plancompiler.errors import SecurityError, UsageError
from plancompiler.executor.comm.choice import join_world, open_link
from plancompiler.executor.comm.messages import MessageLink
from plancompiler.executor.comm.mpi import MpiWorld
from plancompiler.executor.comm.remote import (
    PeerServer,
    channel_options,
    plain_channel,
    remote_link,
)
from plancompiler.executor.comm.rendezvous import WorldLink
from plancompiler.limits import time_limits
from plancompiler.limits.time_limits import DEADLINE, UNSEEN_DEADLINE

TRANSPORTS = ("host", "grpc", "mpi")
SECRET = TOKEN
"""The secret of a run: `plancompiler launch` makes it; for several hosts the user has to."""

LINGER_SECONDS = time_limits.LINGER
"""How long a rank that is done listens for the goodbyes of others, whose streams would break."""


def open_world(
    transport: str | None,
    launched: Launched,
    deadline: float | None,
    start_deadline: float,
    environment: Mapping[str, str],
) -> WorldLink:
    """This rank's connection to the others.

    UsageError for an unknown transport or inconsistent variables, SecurityError for an address that
    other machines could reach without TLS.
    """
    name = transport or environment.get(TRANSPORT) or "host"
    rank, size = launched.rank, launched.size
    if name == "host":
        if launched.is_on_several_hosts:
            raise UsageError(
                "the transport host reaches the ranks of one host only",
                got=f"{launched.local_size} of {size} ranks on this host",
                expected="all ranks on one host, or another transport",
                hint=f"set {TRANSPORT}=grpc with {ADDRESSES} and {SECRET}, or {TRANSPORT}=mpi "
                "under mpiexec",
            )
        # `plancompiler launch` watches over its ranks itself.
        find = None if PIPE in environment else partial(processes_of, launched)
        link = open_link(launched.run, rank, size, find=find)
        return join_world(link, size, deadline or DEADLINE, start_deadline)
    if name == "mpi":
        token, remote, closing, linger = "eager", *_over_mpi(rank, size), 0.0
    elif name == "grpc":
        token = environment.get(SECRET, "")
        remote, closing = _over_streams(rank, size, environment)
        linger = LINGER_SECONDS
    else:
        raise UsageError(
            "unknown transport", got=repr(name), expected="one of " + ", ".join(TRANSPORTS)
        )
    others = [peer for peer in range(size) if peer != rank]
    link = open_link(
        token, rank, size, far=others, remote=partial(remote, closing=closing, linger=linger)
    )
    start = deadline or max(UNSEEN_DEADLINE, start_deadline)
    return join_world(link, size, deadline or DEADLINE, start, remote)


def _over_mpi(rank: int, size: int) -> tuple[Callable[..., MessageLink], Callable[[float], None]]:
    """What makes links, and what ends them all; see `MessageLink`."""
    world = MpiWorld()
    if (world.rank, world.size) != (rank, size):
        world.close()
        raise UsageError(
            "MPI knows this process as another rank than its launcher does",
            got=f"rank {world.rank} of {world.size}",
            expected=f"rank {rank} of {size}",
            hint="start the script with mpiexec",
        )
    return world.link, lambda _: world.close()


def _over_streams(
    rank: int, size: int, environment: Mapping[str, str]
) -> tuple[Callable[..., MessageLink], Callable[[float], None]]:
    """The same."""
    addresses = environment.get(ADDRESSES, "").split(",")
    if len(addresses) != size or not all(":" in address for address in addresses):
        raise UsageError(
            "the transport grpc needs an address for each rank",
            got=f"{ADDRESSES}={environment.get(ADDRESSES, '')}",
            expected=f"{size} times HOST:PORT, separated by commas",
        )
    token = environment.get(SECRET, "")
    if not token:
        # Other launchers only tell runs apart by what anyone on the network could guess.
        raise UsageError(
            "the transport grpc needs a secret that all ranks know",
            got=f"no {SECRET}",
            expected="the same long random text on all ranks",
        )
    own = addresses[rank]
    files = [environment.get(name, "") for name in TLS]
    server_credentials = None
    open_channel = plain_channel
    if all(files):
        ca, cert, key = map(_contents, files)
        server_credentials = grpc.ssl_server_credentials(
            [(key, cert)], ca, require_client_auth=True
        )
        credentials = grpc.ssl_channel_credentials(ca, key, cert)

        def open_channel(address: str) -> grpc.Channel:
            return grpc.secure_channel(address, credentials, options=channel_options())

    elif not _is_loopback(own.rpartition(":")[0]) and environment.get(INSECURE, "0") == "0":
        raise SecurityError(
            "data of this rank would cross the network in the clear",
            got=own,
            expected="a loopback address, or TLS with client certificates",
            hint=f"set {', '.join(TLS)}, or {INSECURE}=1 on a network you trust",
        )
    key = hashlib.sha256(b"peers:" + token.encode()).digest()
    server = PeerServer(own, server_credentials, key)
    peers = dict(enumerate(addresses))
    remote = partial(
        remote_link,
        rank=rank,
        server=server,
        addresses=peers,
        open_channel=open_channel,
        with_tls=all(files),
    )
    return remote, server.close


def _contents(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SecurityError("a TLS file cannot be read", got=f"{path}: {error.strerror}") from None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
