"""Connections between workers that nobody answers: named by who waits, with the peer's rank."""

from __future__ import annotations

import random
import secrets
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue

import pytest

from benchmarks.campaign.proxy import Fault, Proxy
from plancompiler.cluster.channel import open_channel
from plancompiler.errors import AbortedError, PlanCompilerError, ShapeError, TransportError
from plancompiler.executor.comm import messages, remote
from plancompiler.executor.comm import remote_wire as wire
from plancompiler.executor.comm.host_wire import NOTE
from plancompiler.executor.comm.message_rendezvous import MessageWorldLink
from plancompiler.executor.comm.remote import PeerServer, plain_channel, remote_link
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


@pytest.mark.parametrize("fails", [True, False, None], ids=["after an error", "well", "broken off"])
def test_who_hears_nothing_of_a_peer_that_ends_is_told_over_its_own_stream(
    fails: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "CLOSE_SECONDS", 0.2)
    token = secrets.token_hex(8)
    with ExitStack() as stack:
        servers = [PeerServer("127.0.0.1:0") for _ in range(2)]
        for server in servers:
            stack.callback(server.close)
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        cut = stack.enter_context(Proxy(addresses[0], random.Random(0)))
        own = stack.enter_context(Proxy(addresses[1], random.Random(0)))
        reached = [own.address, cut.address]
        worlds = [
            MessageWorldLink(
                remote_link(
                    token,
                    rank,
                    servers[rank],
                    {1 - rank: reached[rank]},
                    closing=servers[rank].close,
                ),
                2,
                start_deadline=60.0,
            )
            for rank in range(2)
        ]
        stack.callback(worlds[0].close)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda world: world.rendezvous((0, 1)).publish("", (), ""), worlds))
        told: SimpleQueue[PlanCompilerError] = SimpleQueue()
        worlds[0].failed = told.put
        cut.arm(Fault("blackhole", to_server=True, after=0))
        if fails is None:  # its own stream ends before anything has come back
            own.arm(Fault("reset", to_server=True, after=0))
            worlds[0].link.send(1, bytes([NOTE]))
            error = told.get(timeout=60)
            worlds[1].abort(AbortedError("the test is over"))
            worlds[1].close()
            assert error.report.what == "rank 1 went away"
            return
        if fails:
            worlds[1].abort(ShapeError("broken on purpose"))
        worlds[1].close()
        error = told.get(timeout=60)
    if fails:
        assert isinstance(error, AbortedError)
        assert error.report.what == "the run was stopped because rank 1 failed"
        assert "broken on purpose" in str(error.report.got)
    else:
        assert "it ended its run, and what it sent last was lost" in str(error)


def test_nothing_is_noted_beside_our_errors(capfd: pytest.CaptureFixture[str]) -> None:
    """gRPC has words of its own for a server that ends before those who call it."""

    class Silent:
        rank = 0

        def receive(self, rank: int, frame: bytes) -> bool:
            greeted.set()
            return True

        def lost(self, rank: int, reason: str) -> None:
            """Nobody is told."""

    greeted, over = threading.Event(), threading.Event()

    def frames() -> Iterator[bytes]:
        yield wire.pack_hello("token", 1, 0)
        yield wire.with_check((bytes([NOTE]),), 1)
        over.wait(60)

    server = PeerServer("127.0.0.1:0")
    server.attach("token", Silent())
    with plain_channel(f"127.0.0.1:{server.port}") as channel:
        method = channel.stream_unary(f"/{remote.SERVICE}/{remote.METHOD}", None, None)
        call = method.future(frames(), wait_for_ready=True)
        assert greeted.wait(60)
        server.close()
        assert call.exception(60) is not None
        over.set()
    assert capfd.readouterr().err == ""
