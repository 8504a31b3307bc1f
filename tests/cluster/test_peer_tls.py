"""TLS between workers: both sides show certificates, and who is refused is told by whom and why."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from plancompiler.cluster.channel import TlsFiles, open_channel, server_credentials
from plancompiler.errors import AbortedError, DeadlineError, PlanCompilerError, SecurityError
from plancompiler.executor.comm.remote import PeerServer, remote_link
from plancompiler.executor.runtime import Runtime
from plancompiler.master.server import MasterServer
from plancompiler.running.client import Client
from tests.cluster.certificates import tls
from tests.cluster.test_hosts import LIMITS, STEPS, local_losses, losses, worker_processes
from tests.examples import mlp
from tests.executor.plans import data_parallel

X = np.ones((6, 4), np.float32)
Side = tuple[TlsFiles | None, TlsFiles | None]
"""What a rank's server and its channels to others have."""


@contextmanager
def ranks_with(sides: Sequence[Side], deadline: float = 60.0) -> Iterator[list[Runtime]]:
    """Ranks of this process that share no memory."""
    token = secrets.token_hex(8)
    with ExitStack() as stack:
        servers = []
        for own, _ in sides:
            servers.append(
                PeerServer("127.0.0.1:0", None if own is None else server_credentials(own))
            )
            stack.callback(servers[-1].close)
        addresses = {rank: f"127.0.0.1:{each.port}" for rank, each in enumerate(servers)}
        runtimes = []
        for rank, (_, own) in enumerate(sides):
            transport = remote_link(
                token,
                rank,
                servers[rank],
                addresses,
                lambda address, own=own: open_channel(address, own),
                own is not None,
            )
            plan = data_parallel(len(sides))[rank]
            runtimes.append(stack.enter_context(Runtime(plan, transport, deadline=deadline)))
        yield runtimes


def security_error(runtimes: Sequence[Runtime]) -> SecurityError:
    """What rank 0 raises when the ranks meet. It cannot tell rank 1; a master would."""
    with ThreadPoolExecutor(len(runtimes)) as pool:
        futures = [pool.submit(runtime.prepare) for runtime in runtimes]
        error = futures[0].exception()
        runtimes[1].abort(AbortedError("the job was stopped"))
        assert isinstance(futures[1].exception(), AbortedError)
    assert isinstance(error, SecurityError)
    return error


@pytest.mark.processes
def test_ranks_that_trust_each_other(certificates: Path) -> None:
    files = tls(certificates, "server")
    with ranks_with([(files, files)] * 2) as runtimes:
        for runtime in runtimes:
            runtime.feed({"x": X})
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Runtime.prepare, runtimes))
            list(pool.map(lambda runtime: runtime.run(1), runtimes))
        for runtime in runtimes:
            np.testing.assert_array_equal(runtime.variables()["w"], np.full(4, 6, np.float32))


GOOD = ("server", "server")
CASES = {
    "a server of another authority": (
        ("stranger", "server"),
        "CERTIFICATE_VERIFY_FAILED",
        "signed by",
    ),
    "a server of another host": (("elsewhere", "server"), "Verification", "subjectAltName"),
    "a server without TLS": ((None, "server"), "WRONG_VERSION_NUMBER", "speaks no TLS"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_server_is_refused(certificates: Path, case: str) -> None:
    """Rank 0 trusts rank 1's server only with a good certificate."""
    names, got, hint = CASES[case]
    sides = [
        tuple(None if name is None else tls(certificates, name) for name in each)
        for each in (GOOD, names)
    ]
    with ranks_with(sides) as runtimes:
        report = security_error(runtimes).report
        assert report.rank == 1
        assert report.what.startswith("rank 1 at 127.0.0.1:")
        assert got in report.got
        assert hint in report.hint


@pytest.mark.parametrize(
    ("client", "hint"),
    [
        ("stranger", "hangs up on this rank's certificate"),
        (None, "rank 1 asks for TLS: give --tls-ca"),
    ],
    ids=["another authority", "no certificate"],
)
def test_a_client_is_refused(certificates: Path, client: str | None, hint: str) -> None:
    """Rank 1's server takes nobody without a certificate of its authority."""
    good = tls(certificates, "server")
    own = None if client is None else tls(certificates, client)
    with ranks_with([(good, own), (good, good)]) as runtimes:
        report = security_error(runtimes).report
        assert report.rank == 1
        assert hint in report.hint


def test_a_peer_that_is_not_there_is_not_called_untrusted(certificates: Path) -> None:
    files = tls(certificates, "server")
    with ranks_with([(files, files)] * 2, deadline=2.5) as runtimes:
        runtimes[1]._link._carrier._server.close()
        with pytest.raises(DeadlineError, match=r"missing ranks \[1\].*refused") as caught:
            runtimes[0].prepare()
        assert not isinstance(caught.value, SecurityError)


def test_nobody_speaks_to_a_server_without_a_certificate(certificates: Path) -> None:
    """TLS alone is not enough: the server asks for the client's certificate."""
    server = PeerServer("127.0.0.1:0", server_credentials(tls(certificates, "server")))
    authority = (certificates / "ca.pem").read_bytes()
    channel = grpc.secure_channel(
        f"127.0.0.1:{server.port}", grpc.ssl_channel_credentials(authority)
    )
    try:
        with pytest.raises(grpc.RpcError) as caught:
            channel.stream_unary("/plancompiler.Peers/Exchange", None, None)(iter([b"x"]))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        channel.close()
        server.close()


def tls_options(certificates: Path, name: str) -> list[str]:
    """Options by which a worker uses a certificate."""
    files = {"ca": "ca.pem", "cert": f"{name}.pem", "key": f"{name}.key"}
    return [f"--tls-{part}={certificates / file}" for part, file in files.items()]


def test_a_job_over_two_hosts(certificates: Path) -> None:
    """Client, master and workers all with certificates; the losses of one process."""
    options = tls_options(certificates, "client")
    with (
        MasterServer(ranks=2, limits=LIMITS, tls=tls(certificates, "server")) as server,
        worker_processes(server.address, "ab", *options),
        Client(server.address, tls=tls(certificates, "client")) as client,
    ):
        actual = losses(client, mlp(ranks=2))
    assert len(actual) == STEPS
    assert actual == pytest.approx(local_losses(mlp(ranks=2), 2), rel=1e-5)


def test_a_worker_whose_certificate_names_another_host(certificates: Path) -> None:
    """A certificate that names another host: the master takes the worker, its peers do not."""
    options = tls_options(certificates, "elsewhere")
    with (
        MasterServer(ranks=2, limits=LIMITS, tls=tls(certificates, "server")) as server,
        worker_processes(server.address, "ab", *options),
        Client(server.address, tls=tls(certificates, "client")) as client,
    ):
        with pytest.raises(PlanCompilerError) as caught:
            losses(client, mlp(ranks=2))
        assert isinstance(caught.value, SecurityError)
        assert "subjectAltName" in caught.value.report.hint
