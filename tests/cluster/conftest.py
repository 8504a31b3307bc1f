"""Real masters and workers on the loopback address, all gone after each test."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plancompiler.cluster.channel import SessionChannel, connect_master
from plancompiler.errors import PlanCompilerError
from plancompiler.master.server import MasterServer
from plancompiler.worker.agent import run_worker
from tests.cluster.certificates import make_certificates

JOIN_SECONDS = 30.0


def signed_in(
    address: str, token_file: Path | None = None, *, is_worker: bool = False
) -> SessionChannel:
    """A channel to a master of this user, for calls that no client and no worker would make."""
    return connect_master(address, None, token_file, JOIN_SECONDS, is_worker=is_worker)


def eventually(is_so: Callable[[], bool]) -> None:
    """Return when something has come about that a master says of itself."""
    until = time.monotonic() + JOIN_SECONDS
    while not is_so():
        assert time.monotonic() < until


class WorkerThread:
    """A worker in a thread of this process."""

    def __init__(self, master: str, rank: int | None = None, **options: Any) -> None:
        self.error: PlanCompilerError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(master, rank), kwargs=options, name="worker"
        )
        self._thread.start()

    def _run(self, master: str, rank: int | None, **options: Any) -> None:
        try:
            run_worker(master, rank, stop=self._stop, **options)
        except PlanCompilerError as error:
            self.error = error

    def join(self) -> PlanCompilerError | None:
        """Wait for its end; the error that it ended with."""
        self._thread.join(JOIN_SECONDS)
        assert not self._thread.is_alive(), "the worker does not end"
        return self.error

    def stop(self) -> None:
        """Ask it to end, and wait."""
        self._stop.set()
        self.join()


class Workers:
    """The workers of a test."""

    def __init__(self) -> None:
        self.started: list[WorkerThread] = []

    def __call__(self, master: str, count: int = 1, **options: Any) -> list[WorkerThread]:
        """Start some."""
        results = [WorkerThread(master, **options) for _ in range(count)]
        self.started += results
        return results


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Starts workers in threads; stops them afterwards."""
    workers = Workers()
    yield workers
    for worker in workers.started:
        worker.stop()
    left = [each.name for each in threading.enumerate() if each.name.startswith("plancompiler-job")]
    assert not left


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of certificates."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates of this test")
    folder = tmp_path_factory.mktemp("tls")
    make_certificates(folder)
    return folder


@pytest.fixture
def server() -> Iterator[MasterServer]:
    """A master of two ranks."""
    with MasterServer(ranks=2) as server:
        yield server
    assert not [each for each in threading.enumerate() if each.name.startswith("plancompiler")]


@pytest.fixture
def cluster(server: MasterServer, workers: Workers) -> Iterator[MasterServer]:
    """A master of two ranks with its workers."""
    workers(server.address, 2)
    yield server
    for worker in workers.started:  # before the master, so that they end without an error
        worker.stop()
        assert worker.error is None
