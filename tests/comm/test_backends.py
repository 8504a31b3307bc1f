"""One suite for all backends of communicators that the machine has."""

from __future__ import annotations

import importlib.util
import re
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from plancompiler.eager import current_world, spawn
from plancompiler.eager.transports import ADDRESSES, SECRET, TLS, TRANSPORT, open_world
from plancompiler.engines.launch_variables import Launched
from plancompiler.errors import SecurityError, UsageError
from plancompiler.executor.comm.manager import CommContextManager
from tests.cluster.certificates import make_certificates
from tests.comm import suite
from tests.comm.suite import RANKS

WAIT = 60


@pytest.mark.slow
def test_threads(record_property):
    counts = spawn(lambda: suite.run(current_world().comm), RANKS, deadline=60.0)
    record_property("results_of_communicators_proved,_ranks_as_threads", sum(counts))
    assert min(counts) > 800


@pytest.mark.processes
def test_processes(record_property):
    command = [sys.executable, "-m", "plancompiler", "launch", "-n", str(RANKS)]
    check([*command, ranks_file()], record_property, "ranks_as_processes")


@pytest.mark.processes
def test_streams_between_hosts(record_property, monkeypatch):
    """gRPC: each rank has an address of its own, and shares no memory with the others."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(RANKS)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    monkeypatch.setenv(ADDRESSES, ",".join(f"127.0.0.1:{port}" for port in ports))
    command = [sys.executable, "-m", "plancompiler", "launch", "-n", str(RANKS)]
    check([*command, ranks_file(), "grpc"], record_property, "over_gRPC")


@pytest.mark.processes
def test_streams_with_certificates(tls):
    """Two ranks with TLS; a third party without a certificate would not be heard."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        addresses = ",".join(f"localhost:{each.getsockname()[1]}" for each in sockets)
    gathered = {}

    def run(rank):
        environment = {ADDRESSES: addresses, SECRET: "secret of this test", **tls}
        link = open_world("grpc", Launched(None, rank, 2, ""), 60.0, 60.0, environment)
        comm = CommContextManager(link)
        gathered[rank] = comm.context((0, 1)).all_gather(np.array([rank + 5])).tolist()
        comm.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gathered == {0: [5, 6], 1: [5, 6]}


@pytest.fixture
def tls(tmp_path) -> dict[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates of this test")
    make_certificates(tmp_path)
    files = ("ca.pem", "server.pem", "server.key")
    return {name: str(tmp_path / file) for name, file in zip(TLS, files, strict=True)}


WRONG = {
    "another transport": ({}, "carrier pigeon", UsageError, "unknown transport"),
    "no addresses": ({}, "grpc", UsageError, "an address for each rank"),
    "too few addresses": ({ADDRESSES: "127.0.0.1:1"}, "grpc", UsageError, "an address for each"),
    "no secret": ({ADDRESSES: "127.0.0.1:1,127.0.0.1:2"}, "grpc", UsageError, "a secret"),
    "in the clear": (
        {ADDRESSES: "0.0.0.0:1,127.0.0.1:2", SECRET: "x"},
        None,
        SecurityError,
        "in the clear",
    ),
    "no certificate": (
        {ADDRESSES: "127.0.0.1:1,127.0.0.1:2", SECRET: "x", **dict.fromkeys(TLS, "nowhere")},
        "grpc",
        SecurityError,
        "cannot be read",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_make_no_sense(name):
    environment, transport, error, message = WRONG[name]
    if transport is None:
        environment = {**environment, TRANSPORT: "grpc"}
    with pytest.raises(error, match=message):
        open_world(transport, Launched(None, 0, 2, "run"), 5.0, 5.0, environment)


@pytest.mark.processes
def test_mpi(record_property):
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if importlib.util.find_spec("mpi4py") is None or mpiexec is None:
        pytest.skip("mpi4py or mpiexec is not installed: the extra `mpi`")
    command = [mpiexec, "-n", str(RANKS), sys.executable]
    check([*command, ranks_file(), "mpi"], record_property, "over_MPI")


def ranks_file() -> str:
    return str(Path(__file__).with_name("ranks.py"))


def check(command: list[str], record_property, how: str) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT, check=False, cwd=root
    )
    assert done.returncode == 0, done.stderr
    counts = [int(count) for count in re.findall(r"proved (\d+)", done.stdout)]
    assert len(counts) == RANKS
    record_property(f"results_of_communicators_proved,_{how}", sum(counts))
