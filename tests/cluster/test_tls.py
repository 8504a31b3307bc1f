"""TLS of clients and a master that does not fit: each case has its own message on both sides."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from plancompiler.cluster.tls_trouble import refused_handshake
from plancompiler.errors import MasterUnreachableError, SecurityError
from plancompiler.master.server import MasterServer
from plancompiler.running.client import Client
from plancompiler.worker.agent import run_worker
from tests.cluster.certificates import tls
from tests.cluster.test_server import closed_port

SECONDS = 30.0
CASES = {
    "a client without TLS": ("server", None, "asks for TLS, and this side uses none"),
    "a master without TLS": (None, "client", "speaks no TLS, and this side does"),
    "a client of another authority": ("server", "stranger", "this side's certificate is not sign"),
    "a client with a server's": ("server", "only_server", "may not be used for clientAuth"),
    "a client that has expired": ("server", "expired", "this side's certificate has expired"),
    "a master of another authority": ("stranger", "client", "is not signed by the authority"),
    "a master of another name": ("elsewhere", "client", "names another host"),
    "a master with a client's": ("only_client", "client", "may not be used for serverAuth"),
    "a master that has expired": ("expired", "client", r"master at \S+ has expired"),
}


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_a_client_is_told_at_once_what_does_not_fit(certificates: Path, case: str) -> None:
    master, client, said = CASES[case]
    files = None if client is None else tls(certificates, client)
    with MasterServer(tls=None if master is None else tls(certificates, master)) as server:
        for connect in (Client, run_worker):
            with pytest.raises(SecurityError, match=said) as refused:
                connect(server.address, timeout=SECONDS, tls=files)
            assert refused.value.report.hint


def test_a_client_whom_the_master_does_not_trust(certificates: Path) -> None:
    """Both hold good certificates, of two authorities; the client takes the master's."""
    both = certificates / "both.pem"
    both.write_text("".join((certificates / f"{each}.pem").read_text() for each in ("ca", "other")))
    files = tls(certificates, "stranger", "both")
    with (
        MasterServer(tls=tls(certificates, "server")) as server,
        pytest.raises(SecurityError, match="does not trust this side's certificate"),
    ):
        Client(server.address, timeout=SECONDS, tls=files)


def test_tls_is_not_blamed_where_nobody_listens(certificates: Path) -> None:
    for files in (None, tls(certificates, "client")):
        with pytest.raises(MasterUnreachableError):
            Client(f"127.0.0.1:{closed_port()}", timeout=0.3, tls=files)


def test_files_that_are_no_pair(certificates: Path) -> None:
    files = tls(certificates, "client")
    mixed = type(files)(files.ca, files.cert, certificates / "server.key")
    with (
        MasterServer(tls=tls(certificates, "server")) as server,
        pytest.raises(SecurityError, match="TLS files of this side cannot be used"),
    ):
        Client(server.address, timeout=SECONDS, tls=mixed)


MASTER_SAYS = {
    "no TLS": (None, "ca", "a caller speaks no TLS"),
    "another authority": ("stranger", "ca", "not signed by the authority that --tls-ca names"),
    "a server's": ("only_server", "ca", "is not one for clients"),
    "expired": ("expired", "ca", "a caller's certificate has expired"),
    "distrust": ("client", "other", "a caller broke off when it had seen this side's certificate"),
}


def test_the_master_says_whom_it_refuses_and_why(certificates: Path) -> None:
    command = [sys.executable, "-m", "plancompiler", "master", "--listen", "127.0.0.1:0"]
    command += ["--ranks", "1", "--json"]
    command += [f"--tls-ca={certificates / 'ca.pem'}"]
    command += [f"--tls-{part}={certificates / f'server.{end}'}" for part, end in
                (("cert", "pem"), ("key", "key"))]  # fmt: skip
    master = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    try:
        assert master.stdout is not None
        assert master.stderr is not None
        address = json.loads(master.stdout.readline())["address"]
        for name, authority, said in MASTER_SAYS.values():
            files = None if name is None else tls(certificates, name, authority)
            with pytest.raises(SecurityError):
                Client(address, timeout=SECONDS, tls=files)
            while said not in (line := master.stderr.readline()):
                assert line, f"the master ended without saying {said!r}"
                assert "ssl_transport_security" not in line
        with Client(address, tls=tls(certificates, "client")) as client:
            assert client.status().workers == ()
    finally:
        master.terminate()
        assert "stopping after" in master.communicate(timeout=SECONDS)[1]


def test_other_lines_are_left_as_they_are() -> None:
    for line in ("", "WARNING plancompiler: Handshake failed with error x", "I1122 x] fine"):
        assert refused_handshake(line) is None
    line = "I1122 14:12:34.486542    7045 ssl.cc:1] Handshake failed with error SSL_ERROR_NEW"
    assert refused_handshake(line) == "a TLS handshake with a caller failed"
