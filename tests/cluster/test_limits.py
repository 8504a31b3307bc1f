"""Limits of a master and of its workers: what is beyond them is refused, and the refusal logged."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack, suppress

import pytest

from plancompiler.cluster.address import split_address
from plancompiler.errors import LimitError
from plancompiler.master.connections import PER_RANK, SPARE, Connections
from plancompiler.master.server import MasterServer
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


def test_connections_of_signed_in_callers_beyond_the_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limit = 2 + PER_RANK
    with MasterServer(max_connections=2) as server, ExitStack() as opened:
        last = [opened.enter_context(signed_in(server.address)) for _ in range(limit)][-1]
        with pytest.raises(LimitError, match="larger --max-connections") as refused:
            signed_in(server.address)
        assert refused.value.report.expected == f"at most {limit}, those of workers included"
        assert "too many open connections" in caplog.text
        last.close()

        def another_is_served() -> bool:
            with suppress(LimitError):  # until the master has seen that one is gone
                opened.enter_context(signed_in(server.address))
                return True
            return False

        eventually(another_is_served)


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

        places = 2 + PER_RANK + SPARE - 1
        assert all(connect() for _ in range(places))
        assert not connect()
        assert client.status().jobs == ()


def test_few_descriptors_leave_fewer_connections_to_clients_and_as_many_to_workers() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        assert Connections(100, 2).limit == 100 + PER_RANK * 2
        assert PER_RANK * 2 < Connections(4096, 2).limit < 1024 - SPARE
        assert Connections(4096, 300).limit == 1 + PER_RANK * 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
