"""Real processes: exit codes, signals, a master with workers, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from plancompiler.errors import WorkerLostError
from plancompiler.executor.process_status import process_arguments
from plancompiler.master.server import MasterServer
from tests.cluster.local_workers import LocalWorkers

WAIT = 60
PROGRAM = [sys.executable, "-m", "plancompiler"]
Started = subprocess.Popen[str]
Start = Callable[..., Started]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts the program; whatever still runs at the end of the test is killed."""
    children: list[Started] = []

    def start_program(*arguments: str, **environment: str) -> Started:
        child = subprocess.Popen(
            [*PROGRAM, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        children.append(child)
        return child

    yield start_program
    for child in children:
        if child.poll() is None:
            child.kill()
        child.communicate()


def read_until(stream: IO[str] | None, words: str) -> str:
    """The first line with these words."""
    assert stream is not None
    for line in stream:
        if words in line:
            return line
    raise AssertionError(f"no line with {words!r}")


def workers_of(pid: int) -> list[int]:
    """Live child processes of a process that are workers."""
    workers = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # After the name in brackets: state, then the parent's id.
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == pid and state != "Z" and "worker" in process_arguments(int(entry.name)):
            workers.append(int(entry.name))
    return workers


def await_end(pids: list[int]) -> None:
    """Return when none of the processes lives; pidfds become readable at the end of a process."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with closing(descriptor):
            assert wait_readable(descriptor), f"process {pid} still runs"


@contextmanager
def closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


def wait_readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], WAIT)[0])


@pytest.mark.processes
def test_exit_codes_of_the_program(start: Start, mlp: str) -> None:
    assert start("--version").wait(WAIT) == 0
    assert start("run", mlp, "--mode", "odd").wait(WAIT) == 2
    assert start("run", mlp, "--steps", "1", "--restore", "none").wait(WAIT) == 1


ODD = """
import plancompiler as pc


class OddJob(pc.Job):
    @property
    def world_size(self):
        raise RuntimeError("nobody could know this")


def build():
    with pc.job("odd") as job:
        pc.output("x", pc.ones((2,), "float32", pc.Placement("cpu", [0])))
    return OddJob(job.name, job.ops)
"""


@pytest.mark.processes
def test_an_unforeseen_error_is_one_paragraph_and_shows_its_traceback_on_demand(
    start: Start, write: Callable[..., str]
) -> None:
    command = ("compile", write(ODD, "odd.py"))
    child = start(*command)
    _, errors = child.communicate(timeout=WAIT)
    assert child.returncode == 1
    assert "Traceback" not in errors
    assert "RuntimeError: nobody could know this" in errors
    assert "PLANCOMPILER_LOG=debug" in errors
    child = start(*command, PLANCOMPILER_LOG="debug")
    _, errors = child.communicate(timeout=WAIT)
    assert child.returncode == 1
    assert "Traceback" in errors


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_ctrl_c_ends_a_run_and_its_children(start: Start, mlp: str, backend: str) -> None:
    child = start("run", mlp, "--steps", "1000000", "--backend", backend)
    read_until(child.stderr, "step 1/1000000")
    workers = workers_of(child.pid)
    assert len(workers) == (2 if backend == "processes" else 0)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=WAIT)
    assert child.returncode == 130
    assert errors.splitlines()[-1] == (
        "plancompiler: interrupted; everything it started has been stopped."
    )
    assert "Traceback" not in errors
    await_end(workers)


@pytest.mark.processes
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_workers_do_not_outlive_a_run(start: Start, mlp: str, number: int, code: int) -> None:
    child = start("run", mlp, "--steps", "1000000", "--backend", "processes")
    read_until(child.stderr, "step 1/1000000")
    workers = workers_of(child.pid)
    assert len(workers) == 2
    child.send_signal(number)
    child.communicate(timeout=WAIT)
    assert child.returncode == code
    await_end(workers)


@pytest.mark.processes
def test_a_killed_worker_fails_the_run_and_names_the_rank(start: Start, mlp: str) -> None:
    child = start("run", mlp, "--steps", "1000000", "--backend", "processes")
    read_until(child.stderr, "step 1/1000000")
    workers = workers_of(child.pid)
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in workers}
    second = next(
        pid for pid, words in commands.items() if words[words.index(b"--rank") + 1] == b"1"
    )
    os.kill(second, signal.SIGKILL)
    _, errors = child.communicate(timeout=WAIT)
    assert child.returncode == 1
    assert "WorkerLostError" in errors
    assert "rank 1" in errors
    await_end(workers)


@pytest.mark.processes
def test_worker_processes_that_are_refused_say_why() -> None:
    with MasterServer("127.0.0.1:0", ranks=1) as server:
        workers = LocalWorkers(server.address, 2)
        try:
            assert workers.started[1].ended.wait(WAIT)
            with pytest.raises(WorkerLostError, match="RankError") as caught:
                workers.check()
            assert caught.value.report.rank == 1
        finally:
            workers.close()
        await_end(workers.pids)


@pytest.mark.processes
def test_a_master_two_workers_and_a_client(start: Start, mlp: str, tmp_path: Path) -> None:
    master = start("master", "--listen", "127.0.0.1:0", "--ranks", "2", "--json")
    assert master.stdout is not None
    address = json.loads(master.stdout.readline())["address"]
    allowed = ("--allow-path", str(tmp_path))
    workers = [start("worker", "--master", address, *allowed, "--json") for _ in range(2)]

    alone = start("run", mlp, "--ranks", "2", "--steps", "8", "--json")
    client = start("submit", mlp, "--master", address, "--steps", "8", "--json")
    report = json.loads(client.communicate(timeout=WAIT)[0])
    expected = json.loads(alone.communicate(timeout=WAIT)[0])
    assert client.returncode == alone.returncode == 0
    assert list(report) == [*expected, "queued_seconds"]
    assert report["ranks"] == 2
    assert report["backend"] == "cluster"
    assert report["steps"] == len(report["losses"]) == 8
    assert report["digest"] == expected["digest"]
    np.testing.assert_allclose(report["losses"], expected["losses"], rtol=1e-5)

    # A second job on the same workers, cancelled by Ctrl-C; then a third that restores.
    folder = str(tmp_path / "model")
    endless = start("submit", mlp, "--master", address, "--steps", "1000000")
    read_until(endless.stderr, "step 1/")
    endless.send_signal(signal.SIGINT)
    endless.communicate(timeout=WAIT)
    assert endless.returncode == 130
    saved = start("submit", mlp, "--master", address, "--steps", "4", "--anomaly", "--save", folder)
    saved.communicate(timeout=WAIT)
    assert saved.returncode == 0
    restored = start(
        "submit", mlp, "--master", address, "--steps", "4", "--restore", folder, "--json"
    )
    losses = json.loads(restored.communicate(timeout=WAIT)[0])["losses"]
    np.testing.assert_allclose(losses, expected["losses"][4:], rtol=1e-5)

    workers[0].send_signal(signal.SIGINT)
    out, errors = workers[0].communicate(timeout=WAIT)
    assert workers[0].returncode == 130, errors
    assert json.loads(out)["master"] == address
    master.send_signal(signal.SIGTERM)
    _, errors = master.communicate(timeout=WAIT)
    assert master.returncode == 143, errors
    assert "job 1: 2 of 2 ranks have their slice or plan, " in errors
    assert "job 1: finished after " in errors
    assert "job 2: cancelled after " in errors
    _, errors = workers[1].communicate(timeout=WAIT)
    assert workers[1].returncode == 1
    assert re.search(r"\[E18\d ", errors)


@pytest.mark.processes
def test_a_master_whose_port_is_taken(start: Start) -> None:
    first = start("master", "--listen", "127.0.0.1:0", "--ranks", "1", "--json")
    assert first.stdout is not None
    address = json.loads(first.stdout.readline())["address"]
    second = start("master", "--listen", address, "--ranks", "1")
    _, errors = second.communicate(timeout=WAIT)
    assert second.returncode == 1
    # One paragraph, and no line of gRPC's own.
    (said,) = errors.splitlines()
    assert "the master cannot listen on this address" in said
    assert f"{address}: Address already in use" in said
    worker = start("worker", "--master", address, "--listen", address)
    _, errors = worker.communicate(timeout=WAIT)
    assert worker.returncode == 1
    (hello, said) = errors.splitlines()
    assert hello.startswith("worker of the master")
    assert f"the worker cannot listen on this address. Got: {address}: Address already" in said


@pytest.mark.processes
def test_a_master_beyond_this_machine_needs_care(start: Start) -> None:
    child = start("master", "--listen", "0.0.0.0:0", "--ranks", "1")
    _, errors = child.communicate(timeout=WAIT)
    assert child.returncode == 2
    assert "SecurityError" in errors
    assert "--insecure" in errors
