"""Connections between workers that nobody answers: named by who waits, with the peer's rank."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from plancompiler.cluster.channel import open_channel
from plancompiler.errors import AbortedError, TransportError
from plancompiler.executor.comm import messages, remote
from plancompiler.executor.comm.remote import PeerServer, remote_link
from plancompiler.executor.runtime import Runtime
from tests.cluster.test_damaged_connections import altering
from tests.executor.plans import data_parallel


@pytest.fixture(params=["accepts and says nothing", "does not accept", "refuses"])
def silent_address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where no rank answers."""
    with ExitStack() as stack:
        # The kernel accepts as many as the backlog has room for, and drops what asks for more.
        accepts = request.param == "accepts and says nothing"
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64 * accepts))
        address = listener.getsockname()
        for _ in range(0 if accepts else 4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        if request.param == "refuses":
            listener.close()
        yield f"127.0.0.1:{address[1]}"


def test_a_peer_that_cannot_be_heard_is_named(
    silent_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_UNREACHED_SECONDS", 1.0)
    monkeypatch.setattr(messages, "REACH_INTERVAL_SECONDS", 0.2)
    token = secrets.token_hex(8)
    with ExitStack() as stack:
        servers = [PeerServer("127.0.0.1:0") for _ in range(2)]
        for server in servers:
            stack.callback(server.close)
        reached = [silent_address, f"127.0.0.1:{servers[0].port}"]
        runtimes = []
        for rank, plan in data_parallel(2).items():
            link = remote_link(token, rank, servers[rank], {1 - rank: reached[rank]}, open_channel)
            runtimes.append(stack.enter_context(Runtime(plan, link)))
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(runtime.prepare) for runtime in runtimes]
            error = futures[0].exception()
            runtimes[1].abort(AbortedError("the job was stopped"))  # as a master would
            assert isinstance(futures[1].exception(), AbortedError)
    assert isinstance(error, TransportError)
    assert error.report.what == "rank 1 cannot be reached"
    assert error.report.rank == 1
    assert silent_address in str(error.report.got)


def test_a_peer_that_answers_and_never_hears_of_this_rank_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number of the stream that greets it is another on the way, so that both ends wait."""
    monkeypatch.setattr(remote, "_UNHEARD_SECONDS", 0.1)
    monkeypatch.setattr(remote, "_PROBE_SECONDS", 1.0)
    monkeypatch.setattr(messages, "REACH_INTERVAL_SECONDS", 0.2)

    def renumbered(data: bytes) -> bytes:
        headers = b"\x01\x04%b" + b"@\x05:path"
        first, other = (number.to_bytes(4, "big") for number in (1, 257))
        return data.replace(headers % first, headers % other)

    token = secrets.token_hex(8)
    with ExitStack() as stack:
        servers = [PeerServer("127.0.0.1:0") for _ in range(2)]
        for server in servers:
            stack.callback(server.close)
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        proxy = stack.enter_context(altering(addresses[1], renumbered))
        proxy.armed = True
        reached = [proxy.address, addresses[0]]
        runtimes = [
            stack.enter_context(
                Runtime(
                    plan,
                    remote_link(
                        token, rank, servers[rank], {1 - rank: reached[rank]}, open_channel
                    ),
                )
            )
            for rank, plan in data_parallel(2).items()
        ]
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(runtime.prepare) for runtime in runtimes]
            error = futures[0].exception()
            runtimes[1].abort(AbortedError("the job was stopped"))  # as a master would
            assert isinstance(futures[1].exception(), AbortedError)
        assert proxy.altered
    assert isinstance(error, TransportError)
    assert error.report.what == "what this rank sends does not reach rank 1"
    assert error.report.rank == 1
