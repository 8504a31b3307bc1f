"""Processes that a signal stops (SIGSTOP): who waits for them says so, within its limits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import plancompiler as pc
from plancompiler.cluster.messages import Waiting
from plancompiler.errors import MasterUnreachableError, PlanCompilerError, WorkerLostError
from plancompiler.limits import time_limits
from plancompiler.master.events import Limits
from plancompiler.master.server import MasterServer
from plancompiler.running.client import Client
from plancompiler.worker import heartbeats
from plancompiler.worker.heartbeats import Heartbeats
from tests.integration.tiny_jobs import hogging, regression

WAIT = 100.0
"""Seconds that only a hang takes."""
NOTICED = 30.0
"""Seconds far above the limit that clients ask for, and below gRPC's own of 60."""


class Cluster:
    """A master and workers as processes, which may be stopped."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def start_master(self, ranks: int) -> str:
        """Its address."""
        master = self.start("master", "--listen", "127.0.0.1:0", "--ranks", str(ranks))
        assert master.stderr is not None
        self.master = master.pid
        return master.stderr.readline().partition(" at ")[2].partition(";")[0]

    def start_workers(self, address: str, ranks: int) -> list[int]:
        """Their process ids."""
        words = ("--allow-ops", "tests")
        return [
            self.start("worker", "--master", address, "--rank", str(rank), *words).pid
            for rank in range(ranks)
        ]

    def start(self, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "plancompiler", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE if words[0] == "master" else subprocess.DEVNULL,
            text=True,
        )
        self._processes.append(process)
        return process

    def close(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.communicate()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    try:
        yield cluster
    finally:
        cluster.close()


def await_workers(client: Client, count: int) -> None:
    end = time.monotonic() + WAIT
    while len(client.status().workers) < count:
        assert time.monotonic() < end, "the workers do not come"


def test_clients_notice_that_their_master_is_stopped(cluster: Cluster) -> None:
    """One that watches a job, and one that submits."""
    errors: list[BaseException] = []
    address = cluster.start_master(2)
    cluster.start_workers(address, 2)
    with Client(address) as patient:
        await_workers(patient, 2)
    with Client(address, timeout=4.0) as running, Client(address, timeout=4.0) as new:
        handle = running.submit(regression(2), 10**7)
        assert next(handle)["step"] == 0
        os.kill(cluster.master, signal.SIGSTOP)

        def watch() -> None:
            with pytest.raises(PlanCompilerError) as caught:
                handle.result()
            errors.append(caught.value)

        def submit() -> None:
            with pytest.raises(PlanCompilerError) as caught:
                new.submit(regression(2), 1)
            errors.append(caught.value)

        threads = [threading.Thread(target=watch), threading.Thread(target=submit)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(NOTICED)
            assert not thread.is_alive()
    assert [type(error) for error in errors] == [MasterUnreachableError] * 2
    assert all("answers nothing any longer" in str(error) for error in errors)


@pytest.mark.parametrize("when", ["idle", "running"])
def test_a_worker_that_is_stopped_is_named(cluster: Cluster, when: str) -> None:
    """By the process beside it, before the master would miss it, and long before a deadline."""
    with MasterServer(ranks=2, limits=Limits(silence=60.0)) as server:
        workers = cluster.start_workers(server.address, 2)
        with Client(server.address) as client:
            await_workers(client, 2)
            if when == "idle":
                os.kill(workers[1], signal.SIGSTOP)
                end = time.monotonic() + WAIT
                while len(client.status().workers) == 2:
                    assert time.monotonic() < end, "the worker stays"
                assert client.status().workers[0].slot == 0
                return
            handle = client.submit(regression(2), 10**7)
            assert next(handle)["step"] == 0
            os.kill(workers[1], signal.SIGSTOP)
            with pytest.raises(WorkerLostError) as caught:
                handle.result()
    assert caught.value.report.rank == 1
    assert "its process is in state T, stopped by a signal" in str(caught.value)


STOPS_ITSELF = """
import os, signal
from plancompiler.worker.heartbeats import Heartbeats
beside = Heartbeats()
beside.announce({address!r}, None, None, 1, "elsewhere")
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.processes
def test_a_worker_that_is_stopped_before_it_registers_is_named_to_those_who_wait() -> None:
    class HeardError(Exception):
        pass

    def hear(waiting: Waiting) -> None:
        if waiting.stopped:
            raise HeardError(*waiting.stopped)

    with MasterServer(ranks=2) as server, Client(server.address) as client:
        handle = client.submit(regression(2), 1, on_waiting=hear)
        command = [sys.executable, "-c", STOPS_ITSELF.format(address=server.address)]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
            try:
                with pytest.raises(HeardError) as caught:
                    handle.result()
            finally:
                process.kill()
    assert caught.value.args == ("rank 1: its worker on host elsewhere is stopped (state T)",)


def test_a_worker_whose_interpreter_is_held_is_not_silent(cluster: Cluster) -> None:
    """For longer than the silence that its master allows."""
    with MasterServer(ranks=2, limits=Limits(silence=3.0)) as server:
        cluster.start_workers(server.address, 2)
        with Client(server.address) as client:
            await_workers(client, 2)
            job = regression(2, lambda x: hogging(x, seconds=7))
            assert len(list(client.submit(job, 2))) == 2


@pytest.mark.processes
def test_who_must_speak_soon_has_spoken_before_a_job_runs() -> None:
    """The process beside the worker of a master that is not patient."""
    worker = Heartbeats()
    try:
        worker.introduce("127.0.0.1:1", None, b"session", b"token", silence=3.0)
        worker.await_ready()
        assert "cygrpc" in Path(f"/proc/{worker.pid}/maps").read_text()
    finally:
        worker.close()


@pytest.mark.processes
def test_who_speaks_to_a_silent_master_ends_with_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not when the master's time for an answer is over."""
    monkeypatch.setattr(heartbeats, "_CLOSE_SECONDS", time_limits.BEAT - 1.0)
    with socket.create_server(("127.0.0.1", 0)) as master:
        worker = Heartbeats()
        address = f"127.0.0.1:{master.getsockname()[1]}"
        worker.introduce(address, None, b"session", b"token", silence=3.0)
        connection, _ = master.accept()  # it has something to say, and hears nothing
        with connection:
            worker.close()
    assert worker._process.returncode != -signal.SIGKILL


@pytest.mark.processes
def test_a_worker_that_is_stopped_while_it_starts_is_named(monkeypatch) -> None:
    """By its parent, which waits 120 s for those that only are slow."""
    start = subprocess.Popen

    def stopped(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        process = start(command, **options)
        if "--rank" in command and command[command.index("--rank") + 1] == "1":
            process.send_signal(signal.SIGSTOP)
        return process

    monkeypatch.setattr(subprocess, "Popen", stopped)
    with pytest.raises(WorkerLostError) as caught:
        pc.run(regression(2), backend="processes")
    assert caught.value.report.rank == 1
    assert "in state T, stopped by a signal" in str(caught.value)
