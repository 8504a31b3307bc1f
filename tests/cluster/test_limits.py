"""Limits of a master and of its workers: what is beyond them is refused, and the refusal logged."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import pytest

from plancompiler.cluster.address import split_address
from plancompiler.cluster.channel import SessionChannel, open_channel
from plancompiler.cluster.checked import Sent
from plancompiler.errors import LimitError
from plancompiler.master.connections import PER_RANK, RESERVE, SPARE, Connections, Place
from plancompiler.master.server import MasterServer
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.proto.cluster_pb2_grpc import ClientStub
from plancompiler.running.client import Client
from tests.cluster.conftest import Workers, eventually, signed_in
from tests.examples import mlp


def test_a_job_of_too_many_ops(caplog: pytest.LogCaptureFixture) -> None:
    job = mlp(ranks=1)
    with MasterServer(max_ops=len(job.ops) - 1) as server, Client(server.address) as client:
        with pytest.raises(LimitError, match="larger --max-ops"):
            client.submit(job, 1)
        assert client.status().jobs == ()
    assert "refused a call of ipv4:127.0.0.1" in caplog.text
    with MasterServer(max_ops=len(job.ops)) as server, Client(server.address) as client:
        assert client.cancel(client.submit(job, 1).job_id)


def test_a_job_that_takes_too_much_memory(workers: Workers) -> None:
    with MasterServer() as server, Client(server.address) as client:
        (worker,) = workers(server.address, max_memory=1 << 10)
        with pytest.raises(LimitError, match="larger --max-memory") as refused:
            client.submit(mlp(ranks=1), 1).result()
        assert refused.value.report.rank == 0
        worker.stop()
        (worker,) = workers(server.address, max_memory=1 << 30)
        assert client.submit(mlp(ranks=1), 1).result()["step"] == 0
        worker.stop()


TOKENS = {
    "alice": "submit",
    "ops": "operate,submit",
    "node": "worker",
}


@pytest.fixture
def token_files(tmp_path: Path) -> dict[str, Path]:
    """A token file with one line for each name, and all of them in one for the master."""
    lines = {name: f"{name} {roles} {name * 16}\n" for name, roles in TOKENS.items()}
    texts = {**lines, "master": "".join(lines.values())}
    paths = {name: tmp_path / name for name in texts}
    for name, path in paths.items():
        path.touch(mode=0o600)
        path.write_text(texts[name])
    return paths


def test_connections_of_clients_leave_places_to_workers_and_operators(
    caplog: pytest.LogCaptureFixture, token_files: dict[str, Path], workers: Workers
) -> None:
    master, ops = token_files["master"], token_files["ops"]
    with MasterServer(token_file=master, max_connections=2) as server, ExitStack() as opened:

        def sign_in(name: str, *, is_worker: bool = False) -> SessionChannel:
            channel = signed_in(server.address, token_files[name], is_worker=is_worker)
            return opened.enter_context(channel)

        first, _ = sign_in("alice"), sign_in("alice")
        # A claim to be a worker counts for nothing without the role.
        for claim in (False, True):
            with pytest.raises(LimitError, match="larger --max-connections") as refused:
                sign_in("alice", is_worker=claim)
            assert refused.value.report.expected == "at most 2"
        assert "too many open connections of clients" in caplog.text
        operators = [
            opened.enter_context(Client(server.address, token_file=ops)) for _ in range(RESERVE)
        ]
        with pytest.raises(LimitError, match="of clients"):
            sign_in("ops")
        workers(server.address, token_file=token_files["node"])
        eventually(lambda: len(operators[0].status().workers) == 1)
        # A session counts for each connection that shows it.
        with open_channel(server.address, None, first.session) as another:
            stub = ClientStub(another)  # type: ignore[no-untyped-call]  # generated
            with pytest.raises(grpc.RpcError, match="of clients"):
                stub.Status(Sent()(pb.StatusRequest()))
        # The places of operators are for nothing else.
        with pytest.raises(LimitError, match="of clients"):
            operators[-1].submit(mlp(ranks=1), 1)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_the_place_of_a_connection_that_was_closed_is_free(host: str) -> None:
    with MasterServer(f"{host}:0", max_connections=1) as server:
        limit = 1 + RESERVE
        opened = [signed_in(server.address) for _ in range(limit)]
        with pytest.raises(LimitError):
            signed_in(server.address)
        opened.pop().close()

        def another_is_served() -> bool:
            with suppress(LimitError):  # until the kernel has seen the end of the other one
                opened.append(signed_in(server.address))
            return len(opened) == limit

        eventually(another_is_served)
        for channel in opened:
            channel.close()


def test_connections_of_workers_beyond_the_limit(token_files: dict[str, Path]) -> None:
    with MasterServer(token_file=token_files["master"]) as server, ExitStack() as opened:
        for _ in range(PER_RANK + RESERVE):
            opened.enter_context(signed_in(server.address, token_files["node"], is_worker=True))
        with pytest.raises(LimitError, match="start no more workers"):
            signed_in(server.address, token_files["node"], is_worker=True)
        with Client(server.address, token_file=token_files["alice"]) as client:
            assert client.status().workers == ()


def test_connections_of_strangers_far_beyond_the_limit_are_closed() -> None:
    with (
        MasterServer(max_connections=2) as server,
        Client(server.address) as client,
        ExitStack() as opened,
    ):

        def connect() -> bytes:
            """The first byte that the master sends to whoever it has a place for."""
            stranger = opened.enter_context(socket.create_connection(split_address(server.address)))
            with suppress(ConnectionResetError):
                return stranger.recv(1)
            return b""

        places = 2 + RESERVE + PER_RANK + RESERVE + SPARE - 1
        assert all(connect() for _ in range(places))
        assert not connect()
        assert client.status().jobs == ()


def test_few_descriptors_leave_fewer_connections_to_clients_and_as_many_to_workers() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        for asked, ranks, clients in ((100, 2, 100), (4096, 300, 1)):
            limits = Connections(asked, ranks).limits
            assert limits[Place.CLIENT] == clients
            assert limits[Place.WORKER] >= PER_RANK * ranks
        assert 1 < Connections(4096, 2).limits[Place.CLIENT] < 1024 - SPARE
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
