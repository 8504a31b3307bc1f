"""Whole jobs over real gRPC: all modes, sessions, checkpoints, failures and lost workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.cluster.messages import JobPhase
from plancompiler.errors import (
    CheckpointError,
    ClusterError,
    FeedError,
    JobCancelledError,
    NonFiniteError,
    PlanCompilerError,
    RankError,
    UnknownModeError,
    UsageError,
    WorkerLostError,
)
from plancompiler.executor.checkpoint import read_index
from plancompiler.lower.compile import MODES, compile_plans
from plancompiler.master.server import MasterServer
from plancompiler.running.client import Client
from tests.cluster.conftest import Workers
from tests.cluster.local_workers import LocalWorkers
from tests.dense import run_dense
from tests.examples import mlp

STEPS = 5


@pytest.fixture
def client(cluster: MasterServer) -> Iterator[Client]:
    with Client(cluster.address) as client:
        yield client


def fed_job(scale: float = 1.0, rows: int = 4) -> pc.Job:
    """Learns one matrix from what it is fed; also reports something large."""
    mesh = pc.Placement("cpu", [0, 1], axes=("dp",))
    with pc.job("fed") as job:
        x = pc.input("x", (rows, 600), "float32", mesh, ["S(0)"])
        model = pc.nn.Linear(600, 500).place(mesh, {"weight": ["S(1)"]})
        y = model(x * scale)
        loss = (y * y).mean()
        pc.optim.Adam(lr=0.0001).minimize(loss)
        pc.output("loss", loss)
        pc.output("y", y)
    return job


def growing_job() -> pc.Job:
    """Each step multiplies its parameters by -999, until their squares are infinite."""
    mesh = pc.Placement("cpu", [0, 1], axes=("dp",))
    with pc.job("growing") as job:
        weight = pc.nn.Parameter((4,), init="ones", name="w").place(mesh, "S(0)").value
        loss = (weight * weight).sum()
        pc.optim.SGD(lr=500.0).minimize(loss)
        pc.output("loss", loss)
    return job


def drawn() -> pc.Job:
    """Has no variables."""
    with pc.job("drawn") as job:
        pc.output("x", pc.full((), 1.0, "float32", pc.Placement("cpu", [0])))
    return job


def batch(step: int, rows: int = 4) -> np.ndarray:
    return np.random.default_rng(step).standard_normal((rows, 600)).astype("float32")


def test_all_modes_give_the_losses_of_the_dense_run(client: Client) -> None:
    job = mlp(ranks=2)
    dense = [float(each["loss"]) for each in run_dense(mlp(ranks=1), STEPS)]
    digest = compile_plans(job, 2, "rank_per_iter").digest
    for mode in MODES:
        phases: list[JobPhase] = []
        handle = client.submit(
            job, STEPS, mode=mode, on_phase=lambda phase, _, phases=phases: phases.append(phase)
        )
        metrics = list(handle)
        assert [each["step"] for each in metrics] == list(range(STEPS))
        np.testing.assert_allclose([each["loss"] for each in metrics], dense, rtol=1e-4)
        assert handle.result() == metrics[-1]
        assert handle.digest == digest
        assert phases == [
            JobPhase.QUEUED, JobPhase.COMPILING, JobPhase.CHECKING,
            JobPhase.PREPARING, JobPhase.RUNNING, JobPhase.FINISHED,
        ]  # fmt: skip


def test_jobs_wait_for_each_other_and_can_be_watched_late(client: Client) -> None:
    handles = [client.submit(mlp(ranks=2), STEPS) for _ in range(3)]
    assert handles[2].result()["step"] == STEPS - 1
    assert [len(list(handle)) for handle in handles[:2]] == [STEPS, STEPS]
    assert client.submit(mlp(ranks=2), 0).result() == {}


def test_submissions_that_cannot_run(client: Client) -> None:
    with pytest.raises(FeedError, match=r"pc\.data"):
        client.submit(fed_job(), 1)
    with pytest.raises(RankError, match="more ranks"):
        client.submit(mlp(ranks=3), 1)
    with pytest.raises(UnknownModeError, match="rank_per_process"):
        client.submit(mlp(ranks=2), 1, mode="fast")
    with pytest.raises(UsageError):
        client.submit(mlp(ranks=2), -1)
    with pytest.raises(UsageError, match="at most 1000000 steps"):
        client.submit(falling(lambda step: 0.1), 1_000_001)
    with pytest.raises(UsageError, match="gave no rate for step 1"):
        client.submit(falling(lambda step: 0.5 - step), 2)
    assert client.status().jobs == ()


def falling(rate: Callable[[int], float]) -> pc.Job:
    """One number, from which each step takes the rate."""
    with pc.job("falling") as job:
        weight = pc.nn.Parameter((1,)).place(pc.Placement("cpu", [0]))
        pc.optim.SGD(rate).minimize(weight.value.sum())
        pc.output("loss", weight.value.sum())
    return job


def test_a_job_has_the_values_of_its_clients_rates(client: Client, tmp_path: Path) -> None:
    first = client.submit(falling(lambda step: 2.0**step), 3, save=tmp_path)
    losses = [each["loss"] for each in first]
    second = client.submit(falling(lambda step: 2.0**step), 2, restore=tmp_path)
    losses += [each["loss"] for each in second]
    np.testing.assert_allclose(-np.diff(losses), [1, 2, 4, 8], rtol=1e-4)


def test_a_session_goes_step_by_step(client: Client) -> None:
    job = fed_job()
    with client.open(job) as session:
        first = session.step(x=batch(0))
        assert first["loss"].shape == ()
        assert first["y"].shape == (4, 500)
        np.testing.assert_allclose(np.mean(first["y"] ** 2), first["loss"], rtol=1e-5)
        for wrong in (
            {},
            {"x": batch(0), "z": 1},
            {"x": batch(0)[:2]},
            {"x": batch(0).astype("float64") + 1e300},
        ):
            with pytest.raises(FeedError):
                session.step(**wrong)
        with pytest.raises(FeedError):
            list(session.run(1))
        assert session.step(x=batch(0))["loss"] < first["loss"]
        assert session.lr == 0.0001
        session.lr = 0.0  # beside a step's feeds
        kept = session.step(x=batch(0))["loss"]
        assert session.step(x=batch(0))["loss"] == kept
        session.lr = lambda step: step * 0.0001
        session.step(x=batch(0))
        assert session.lr == 5 * 0.0001
        assert session.step(x=batch(0))["loss"] != kept
        variables = session.variables()
        assert variables["weight"].shape == (500, 600)
    assert session.phase is JobPhase.FINISHED
    with pytest.raises(UsageError, match="closed"):
        session.step(x=batch(0))
    assert client.submit(mlp(ranks=2), 1).result()["step"] == 0  # the workers are free again


def test_a_checkpoint_folder_that_cannot_be_written_fails_the_job_before_its_first_step(
    client: Client, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    phases: list[JobPhase] = []
    handle = client.submit(
        mlp(ranks=2), 3, save=file / "model", on_phase=lambda phase, _: phases.append(phase)
    )
    with pytest.raises(CheckpointError, match="cannot be written") as caught:
        handle.result()
    assert str(file) in str(caught.value.report.got)
    assert JobPhase.RUNNING not in phases
    for every in (-1, 2):
        with pytest.raises(UsageError, match="save_every"):
            client.submit(mlp(ranks=2), 3, save_every=every)


def test_a_session_saves_beside_its_steps(client: Client, tmp_path: Path) -> None:
    with client.open(mlp(ranks=2)) as session:
        list(session.run(2))
        session.save(tmp_path / "a", wait=False)
        list(session.run(2))
        session.save(tmp_path / "b", wait=False)
        list(session.run(1))
        session.save(tmp_path / "c")
    steps = [read_index(tmp_path / name)["step"] for name in "abc"]
    assert steps == [2, 4, 5]


def test_large_feeds_and_outputs(client: Client) -> None:
    """Neither fits into a chunk."""
    rows = 1000
    with client.open(fed_job(rows=rows)) as session:
        weight = session.variables()["weight"]
        bias = session.variables()["bias"]
        outputs = session.step(x=batch(1, rows))
    np.testing.assert_allclose(outputs["y"], batch(1, rows) @ weight.T + bias, rtol=1e-3, atol=1e-4)


def test_a_session_runs_many_steps_of_a_job_with_data(client: Client) -> None:
    dense = [float(each["loss"]) for each in run_dense(mlp(ranks=1), 2 * STEPS)]
    with client.open(mlp(ranks=2)) as session:
        losses = [float(each["loss"]) for each in session.run(STEPS)]
        losses += [float(each["loss"]) for each in session.run(STEPS)]
        assert list(session.run(0)) == []
    np.testing.assert_allclose(losses, dense, rtol=1e-4)


def test_a_session_asks_for_steps_before_those_asked_for_are_read(client: Client) -> None:
    unit = 2.0**-40

    with client.open(mlp(ranks=2)) as session:
        # The rate of the next step to be asked for says how many were.
        session.lr = lambda step: step * unit
        for read, _ in enumerate(session.run(60), 1):
            asked = session.lr / unit
            assert asked == 1 if read == 1 else read < asked or asked == 60
        stopped = session.run(1000)
        next(stopped)
        stopped.close()
        asked = session.lr / unit
        assert len(list(session.run(3))) == 3  # without what was left unread
        assert session.lr / unit == asked + 3
        cancelled = session.run(1_000_000)
        next(cancelled)
        assert session.cancel()
        with pytest.raises(JobCancelledError):
            list(cancelled)


def test_a_session_goes_on_from_its_checkpoint(client: Client, tmp_path: Path) -> None:
    with client.open(mlp(ranks=2)) as session:
        list(session.run(3))
        session.save(tmp_path / "a")
        saved = session.variables()
        after = [float(each["loss"]) for each in session.run(3)]
    with client.open(mlp(ranks=2, layout="tp"), restore=tmp_path / "a") as session:
        loaded = session.variables()
        assert loaded.keys() == saved.keys()
        for name, value in saved.items():
            np.testing.assert_array_equal(loaded[name], value)
        again = [float(each["loss"]) for each in session.run(3)]
    np.testing.assert_allclose(again, after, rtol=1e-4)
    client.submit(mlp(ranks=2), 3, save=tmp_path / "b", save_every=1).result()
    assert read_index(tmp_path / "b")["step"] == 3
    with pytest.raises(CheckpointError, match="holds variables that the job does not have"):
        client.submit(drawn(), 1, restore=tmp_path / "b").result()
    client.submit(drawn(), 1, restore=tmp_path / "b", strict_restore=False).result()
    whole = client.submit(mlp(ranks=2), 3, restore=tmp_path / "b")
    assert [each["step"] for each in whole] == [3, 4, 5]


def test_a_missing_checkpoint(client: Client, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"index\.json"):
        client.submit(mlp(ranks=2), 1, restore=tmp_path).result()
    assert client.submit(mlp(ranks=2), 1).result()["step"] == 0


def test_a_failing_step_fails_the_job_and_not_the_cluster(client: Client) -> None:
    with client.open(fed_job(scale=float("inf"))) as session:
        with pytest.raises(NonFiniteError, match="loss") as caught:
            session.step(x=batch(0))
        assert caught.value.report.rank is not None
        with pytest.raises(NonFiniteError):
            session.step(x=batch(0))
    assert client.submit(mlp(ranks=2), 1).result()["step"] == 0


@pytest.mark.parametrize("anomaly", [False, True])
def test_an_open_job_is_saved_after_a_value_that_is_not_finite(
    client: Client, tmp_path: Path, anomaly: bool
) -> None:
    """Ranks are at one step, before the failing one where `anomaly` keeps that."""
    with client.open(growing_job(), anomaly=anomaly) as session:
        good = []
        with pytest.raises(NonFiniteError) as first:
            good.extend(float(each["loss"]) for each in session.run(1000))
        assert np.isfinite(good).all()
        report = first.value.report
        assert report.rank is not None
        assert "test_jobs.py" in str(report.source)
        kept = session.variables()
        session.save(tmp_path)
        with pytest.raises(NonFiniteError) as again:
            next(session.run(1))
        assert str(again.value) == str(first.value)
    step = read_index(tmp_path)["step"]
    if anomaly:
        assert step == len(good)
        assert all(np.isfinite(each).all() for each in kept.values())
    else:
        assert step > len(good)
    assert client.status().jobs[-1].phase is JobPhase.FAILED
    with client.open(growing_job(), restore=tmp_path) as session:
        for name, value in session.variables().items():
            np.testing.assert_array_equal(value, kept[name])


def test_a_submitted_job_names_the_op_and_keeps_its_checkpoint(
    client: Client, tmp_path: Path
) -> None:
    handle = client.submit(growing_job(), 1000, save=tmp_path, save_every=1, anomaly=True)
    with pytest.raises(NonFiniteError, match="made the first") as caught:
        handle.result()
    assert "test_jobs.py" in str(caught.value.report.source)
    assert read_index(tmp_path)["step"] > 0


def test_cancelling(client: Client) -> None:
    handle = client.submit(mlp(ranks=2), 1_000_000)
    next(handle)
    queued = client.submit(mlp(ranks=2), 1)
    assert client.cancel(queued.job_id)
    assert handle.cancel()
    for each in (handle, queued):
        with pytest.raises(JobCancelledError):
            each.result()
        assert not each.cancel()
    assert client.submit(mlp(ranks=2), 1).result()["step"] == 0


def test_a_session_says_once_that_its_job_was_cancelled(client: Client) -> None:
    with client.open(mlp(ranks=2)) as session:
        assert session.cancel()
        with pytest.raises(JobCancelledError):
            next(session.run(1))


def test_an_open_job_ends_with_its_client(cluster: MasterServer) -> None:
    with Client(cluster.address) as client:
        client.open(mlp(ranks=2))
    with Client(cluster.address) as client:
        assert client.submit(mlp(ranks=2), 1).result()["step"] == 0
        assert client.status().jobs[0].phase is JobPhase.CANCELLED


def test_a_submitted_job_goes_on_without_its_client(cluster: MasterServer) -> None:
    with Client(cluster.address) as client:
        job_id = client.submit(mlp(ranks=2), STEPS).job_id
    with Client(cluster.address) as client:
        client.submit(mlp(ranks=2), 1).result()
        status = {job.job_id: job.phase for job in client.status().jobs}
        assert status[job_id] is JobPhase.FINISHED


def test_the_master_going_away_ends_clients_and_workers(workers: Workers) -> None:
    with MasterServer(ranks=2) as server:
        started = workers(server.address, 2)
        client = Client(server.address)
        handle = client.submit(mlp(ranks=2), 1_000_000)
        next(handle)
    with client, pytest.raises(ClusterError, match="master"):
        handle.result()
    for worker in started:
        assert isinstance(worker.join(), ClusterError)


# --- processes ------------------------------------------------------------------------------------


def shared_memory() -> list[str]:
    """What of ours has a name in shared memory."""
    return [path.name for path in Path("/dev/shm").iterdir() if "plancompiler" in path.name]


@pytest.mark.processes
def test_a_killed_worker_fails_its_job_and_frees_the_other(server: MasterServer) -> None:
    processes = LocalWorkers(server.address, 2)
    try:
        with Client(server.address) as client:
            handle = client.submit(mlp(ranks=2), 1_000_000)
            for _ in range(3):
                next(handle)
            os.kill(processes.pids[0], signal.SIGKILL)
            with pytest.raises(WorkerLostError, match="rank 0") as caught:
                handle.result()
            assert caught.value.report.rank == 0
            assert "running" in str(caught.value)
            replacement = LocalWorkers(server.address, 1)
            try:
                assert client.submit(mlp(ranks=2), 2).result()["step"] == 1
            finally:
                replacement.close()
    finally:
        processes.close()
    for pid in processes.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert shared_memory() == []


@pytest.mark.processes
def test_workers_killed_while_they_prepare_leave_nothing(server: MasterServer) -> None:
    processes = LocalWorkers(server.address, 2)

    def kill(phase: JobPhase, _: float) -> None:
        if phase is JobPhase.PREPARING:
            for pid in processes.pids:
                os.kill(pid, signal.SIGKILL)

    try:
        with Client(server.address) as client, pytest.raises(PlanCompilerError) as caught:
            client.submit(mlp(ranks=2), 1_000_000, on_phase=kill).result()
        assert isinstance(caught.value, WorkerLostError)
    finally:
        processes.close()
    assert shared_memory() == []
