"""Whole runs in trouble: ranks that stop answering, too few cores, one slow rank, many steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

import plancompiler as pc
from plancompiler.errors import DeadlineError, PlanCompilerError, UsageError, WorkerLostError
from plancompiler.executor import local_run
from plancompiler.executor import runtime as runtime_module
from plancompiler.master.server import MasterServer
from plancompiler.running.client import Client
from tests.cluster.test_hosts import LIMITS, worker_processes
from tests.integration import tiny_jobs
from tests.integration.tiny_jobs import burdened, held, regression, stopping

STEPS = 20
LEAVE_SECONDS = 0.2
WORKER_SECONDS = 20.0
MODULE = "tests"
"""Workers may import ops from here."""


def losses(session: pc.Session, steps: int = STEPS) -> list[float]:
    return [float(outputs["loss"]) for outputs in session.run(steps)]


def reference(ranks: int, steps: int = STEPS) -> list[float]:
    with pc.run(regression(ranks), ranks) as session:
        return losses(session, steps)


def pids_of(session: pc.Session) -> list[int]:
    return [each.process.pid for each in session._world._workers.started]


def states(pids: Sequence[int]) -> list[str]:
    """Of processes that still are: R, S, T (stopped), Z."""
    states = []
    for pid in pids:
        try:
            states.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
        except FileNotFoundError:
            continue
    return states


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `held` waits for comes at the end of the test, and then no thread is left."""
    for module in (local_run, runtime_module):
        monkeypatch.setattr(module, "LEAVE_SECONDS", LEAVE_SECONDS)
    tiny_jobs.ENTERED.clear()
    tiny_jobs.OPENED.clear()
    yield
    tiny_jobs.OPENED.set()
    for thread in threading.enumerate():
        if thread.name.startswith("plancompiler"):
            thread.join(WORKER_SECONDS)
            assert not thread.is_alive()


# --- a rank that stops answering ------------------------------------------------------------------


def test_a_thread_that_blocks(opened: None) -> None:
    session = pc.run(regression(2, partial(held, step=3)), 2, deadline=0.5)
    with pytest.raises(DeadlineError) as caught:
        losses(session)
    report = caught.value.report
    assert tiny_jobs.ENTERED.is_set()
    assert report.rank == 1
    assert "step 3" in report.what
    assert report.op is not None
    assert "held" in report.op
    assert "tiny_jobs.py" in str(report.source)
    assert "rank 0 has waited for rank 1" in report.got
    with pytest.raises(UsageError, match="session is closed"):
        session.step()


@pytest.mark.processes
def test_a_process_that_is_stopped() -> None:
    """In the middle of a step, by itself. The worker's helper sees it before any deadline."""
    job = regression(2, partial(stopping, step=50))
    session = pc.run(job, 2, "processes", allow_ops=[MODULE])
    pids = pids_of(session)
    with pytest.raises(WorkerLostError) as caught:
        losses(session, 1000)
    report = caught.value.report
    assert report.rank == 1
    assert report.what.endswith("its process is in state T, stopped by a signal")
    assert report.got.endswith("step 50 under way")
    assert states(pids) == []


@pytest.mark.processes
def test_a_worker_on_another_host_that_is_stopped() -> None:
    options = ("--deadline", "1", "--allow-ops", MODULE)
    job = regression(2, partial(stopping, step=5))
    with (
        MasterServer(ranks=2, limits=LIMITS) as server,
        worker_processes(server.address, "ab", *options) as children,
        Client(server.address) as client,
    ):
        try:
            with pytest.raises(PlanCompilerError) as caught:
                client.submit(job, 1000).result()
            assert isinstance(caught.value, (DeadlineError, WorkerLostError))
            assert caught.value.report.rank == 1
            assert states([children[1].pid]) == ["T"]
        finally:
            os.kill(children[1].pid, signal.SIGCONT)
        # The other one goes on, and the one that was stopped ends as it can no longer be heard.
        assert children[0].poll() is None


# --- too few cores, and one slow rank -------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(("backend", "ranks"), [("threads", 8), ("processes", 4)])
def test_more_ranks_than_cores(backend: str, ranks: int) -> None:
    with pc.run(regression(ranks), ranks, backend, deadline=20.0) as session:
        actual = losses(session)
    assert actual == pytest.approx(reference(1), rel=1e-3, abs=1e-7)


@pytest.mark.processes
def test_a_slow_rank_changes_nothing() -> None:
    """Rank 1 does much more than rank 0 in every step, in all by far more than the deadline."""
    deadline = 0.5
    with pc.run(regression(2), 2) as session:
        wanted = losses(session)
    count = 200
    seconds = 0.0
    while seconds < 1.2 * deadline:
        count *= 2
        with pc.run(regression(2, partial(burdened, count=count)), 2, deadline=deadline) as session:
            assert losses(session) == wanted
            seconds = sum(session.step_seconds)
    job = regression(2, partial(burdened, count=count))
    with pc.run(job, 2, "processes", allow_ops=[MODULE], deadline=deadline) as session:
        assert losses(session) == pytest.approx(wanted, rel=1e-5)


# --- many steps -----------------------------------------------------------------------------------

WARM, MANY = 1_000, 3_000
GROWTH = 230 * (MANY - WARM)
COMPARED = 200
"""Bytes that a process may grow by in the steps after the first: less than 30 numbers a step."""


def size_of(pid: int) -> int:
    """Resident bytes of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


def held_by(pid: int) -> tuple[int, list[str], int]:
    """Open descriptors, mappings of shared memory, and threads of a process."""
    folder = Path(f"/proc/{pid}")
    memory = [
        line.split()[-1] for line in (folder / "maps").read_text().splitlines() if "memfd" in line
    ]
    return (
        len(list((folder / "fd").iterdir())),
        sorted(memory),
        len(list((folder / "task").iterdir())),
    )


@pytest.mark.processes
def test_thousands_of_steps(tmp_path: Path, record_property) -> None:
    with pc.run(regression(2), 2, "processes") as session:
        pids = [*pids_of(session)]
        first = losses(session, WARM)
        sizes, held_before = [size_of(pid) for pid in pids], [held_by(pid) for pid in pids]
        losses(session, MANY - WARM)
        grown = [size_of(pid) - before for pid, before in zip(pids, sizes, strict=True)]
        assert [held_by(pid) for pid in pids] == held_before
        assert max(grown) < GROWTH
        session.save(tmp_path)
        after = losses(session)
    record_property("growth_of_worker_processes_in_2000_steps_kib", [each >> 10 for each in grown])
    assert states(pids) == []
    # Not to the bit: this process may use another BLAS kernel than the workers.
    with pc.run(regression(2), 2) as session:
        assert losses(session, COMPARED) == pytest.approx(first[:COMPARED], rel=1e-4)
    with pc.run(regression(2), 2, restore=tmp_path) as session:
        assert losses(session) == pytest.approx(after, rel=1e-4)
