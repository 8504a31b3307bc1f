"""A master that is killed and started again on its journal: nothing lost, nothing twice."""

from __future__ import annotations

import json
import logging
import random
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from plancompiler.cluster.checked import Sent
from plancompiler.cluster.chunks import to_chunks
from plancompiler.cluster.codec import encode
from plancompiler.cluster.messages import (
    JobPhase,
    JobRequest,
    OperationDone,
    Registered,
    StepDone,
)
from plancompiler.errors import ClusterError
from plancompiler.master.events import FromWorker
from plancompiler.master.job_channel import Retention
from plancompiler.master.journal import Journal
from plancompiler.master.server import MasterServer
from plancompiler.plan.job_serde import job_to_bytes
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.proto.cluster_pb2_grpc import ClientStub
from plancompiler.running.client import Client
from plancompiler.version import VERSION
from plancompiler.worker.events import Exit, FromMaster, MasterGone, Reconnect, WorkerTick
from plancompiler.worker.state import WorkerState
from tests.cluster.conftest import Workers, signed_in
from tests.cluster.local_workers import LocalWorkers
from tests.cluster.simulated import ALL_GOOD, SimulatedCluster, cluster_of, until
from tests.examples import mlp


def steps_of(cluster: SimulatedCluster, job: int) -> list[int]:
    return [event.step for event in cluster.events[job] if isinstance(event, StepDone)]


# --- the state machines ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_jobs_end_however_often_the_master_is_killed(seed: int) -> None:
    chance = random.Random(seed)
    cluster, workers = cluster_of(4)
    jobs = [
        cluster.submit(
            JobRequest(steps=6, save="folder", save_every=chance.choice((0, 2))),
            needs=chance.randint(1, 4),
        )
        for _ in range(5)
    ]
    kills = {chance.randrange(400) for _ in range(6)}
    for moment in range(4000):
        choices = cluster.choices()
        if not choices:
            break
        chance.choice(choices)()
        if moment in kills:
            cluster.restart_master()
    assert cluster.busy() == dict.fromkeys(range(4), 0)
    for job in jobs:
        assert cluster.phases(job)[-1] is JobPhase.FINISHED
        assert steps_of(cluster, job) == list(range(6))
    assert not any(worker.exited for worker in workers)


def test_a_job_that_runs_goes_on_and_one_that_compiles_begins_anew() -> None:
    cluster, _ = cluster_of(2)
    running = cluster.submit(JobRequest(steps=3), needs=1)
    until(cluster, running, JobPhase.RUNNING)
    compiling = cluster.submit(JobRequest(steps=3), needs=1)
    cluster.restart_master()
    cluster.run()
    assert cluster.phases(running) == ALL_GOOD
    assert cluster.phases(compiling) == [JobPhase.QUEUED, JobPhase.COMPILING, *ALL_GOOD]


def test_an_open_job_ends_with_its_master() -> None:
    cluster, _ = cluster_of(2)
    job = cluster.submit(JobRequest(steps=0, open=True))
    cluster.run()
    cluster.restart_master()
    cluster.run()
    assert cluster.phases(job)[-1] is JobPhase.FAILED
    error = cluster.error(job)
    assert error is not None
    assert "session" in error.what
    assert cluster.busy() == {0: 0, 1: 0}


def test_a_worker_that_does_not_come_back_is_lost_after_the_grace() -> None:
    cluster, workers = cluster_of(2)
    job = cluster.submit(JobRequest(steps=3))
    until(cluster, job, JobPhase.RUNNING)
    cluster.kill(workers[1])
    cluster.restart_master()
    cluster.pass_time(cluster.limits.grace - 2)
    assert cluster.phases(job)[-1] is JobPhase.RUNNING
    cluster.pass_time(4)
    error = cluster.error(job)
    assert error is not None
    assert error.rank == 1
    assert "did not come back" in error.what
    assert cluster.busy() == {0: 0}


def test_files_are_asked_of_a_worker_that_has_come_back() -> None:
    cluster, workers = cluster_of(2)
    job = cluster.submit(JobRequest(steps=3))
    cluster.run()
    assert cluster.master.connection_for(job) == workers[0].connection
    cluster.kill(workers[0])
    cluster.restart_master()
    assert cluster.master.connection_for(job) == workers[1].connection
    cluster.kill(workers[1])
    cluster.restart_master()
    with pytest.raises(ClusterError, match="none of its workers is there"):
        cluster.master.connection_for(job)


def test_a_message_that_is_sent_again_counts_once() -> None:
    cluster, workers = cluster_of(1)
    job = cluster.submit(JobRequest(steps=0, open=True))
    cluster.run()
    done = FromWorker(workers[0].connection, OperationDone(job, 5), 1)
    cluster.tell_master(done)
    worker = cluster.master.worker(0)
    assert worker is not None
    assert worker.received == 1
    before = worker.last_seen
    cluster.now += 1
    cluster.tell_master(done)
    assert worker.received == 1
    assert worker.last_seen > before


def test_a_worker_tries_again_when_its_master_is_lost_before_it_has_answered() -> None:
    worker = WorkerState(0.0, 10.0, grace=60.0)
    gone = MasterGone(ClusterError("gone").report)
    worker.handle(FromMaster(Registered(0, 1, 10.0, b"token", is_durable=True)), 0.0)
    assert worker.handle(gone, 1.0) == [Reconnect()]
    assert worker.handle(gone, 50.0) == [Reconnect()]
    left = worker.handle(WorkerTick(), 61.5)
    assert any(isinstance(each, Exit) for each in left)


def test_without_a_journal_a_worker_ends_with_its_master() -> None:
    worker = WorkerState(0.0, 10.0)
    worker.handle(FromMaster(Registered(0, 1, 10.0, b"token")), 0.0)
    (left,) = worker.handle(MasterGone(ClusterError("gone").report), 1.0)
    assert isinstance(left, Exit)


# --- real processes -------------------------------------------------------------------------------


class KilledMaster:
    """A master process on a journal."""

    def __init__(self, journal: Path, ranks: int) -> None:
        self._words = ["--ranks", str(ranks), "--journal", str(journal), "--json"]
        self.address = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Start it on the address that it had, and wait until it serves."""
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "plancompiler",
                "master",
                "--listen",
                self.address,
                *self._words,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = json.loads(self.process.stdout.readline())["address"]

    def fill_disk(self) -> str:
        """From now on it can write no file; what it says last before it ends."""
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (0, 0))
        return self.process.communicate(timeout=30)[1]

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.communicate()

    def stop(self) -> None:
        """SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=30)


@contextmanager
def cluster_on_a_journal(folder: Path, ranks: int) -> Iterator[tuple[KilledMaster, LocalWorkers]]:
    master = KilledMaster(folder / "journal", ranks)
    try:
        workers = LocalWorkers(master.address, ranks)
        try:
            yield master, workers
        finally:
            master.stop()
            workers.close()
    finally:
        if master.process.poll() is None:
            master.kill()


def test_a_submission_that_comes_twice_is_one_job(tmp_path: Path) -> None:
    job = mlp(ranks=1)

    def messages(key: str) -> Iterator[pb.SubmitRequest]:
        header = encode(pb.SubmitHeader, JobRequest(1))
        header.version, header.key = VERSION, key
        sent = Sent()
        yield sent(pb.SubmitRequest(header=header))
        for chunk in to_chunks(job_to_bytes(job)):
            yield sent(pb.SubmitRequest(chunk=chunk))

    def submit(key: str) -> int:
        with MasterServer(ranks=1, journal=tmp_path / "journal") as server:
            channel = signed_in(server.address)
            ids = [int(ClientStub(channel).Submit(messages(key)).job_id) for _ in range(2)]
            channel.close()
        assert ids[0] == ids[1]
        return ids[0]

    assert [submit(key) for key in ("one", "one", "two")] == [1, 1, 2]


@pytest.mark.processes
def test_a_killed_master_goes_on_where_it_was(tmp_path: Path) -> None:
    steps = 400
    with cluster_on_a_journal(tmp_path, 2) as (master, _), Client(master.address) as client:
        quiet = [each["loss"] for each in client.submit(mlp(ranks=2), steps)]
        running = client.submit(mlp(ranks=2), steps)
        queued = client.submit(mlp(ranks=1), 5)
        seen = [next(running)["loss"] for _ in range(20)]
        assert seen == quiet[:20]
        master.kill()
        master.start()
        assert [*seen, *(each["loss"] for each in running)] == quiet
        assert len(list(queued)) == 5


@pytest.mark.processes
def test_a_master_whose_disk_is_full_ends_and_goes_on_where_it_was(tmp_path: Path) -> None:
    steps = 400
    with cluster_on_a_journal(tmp_path, 2) as (master, _), Client(master.address) as client:
        quiet = [each["loss"] for each in client.submit(mlp(ranks=2), steps)]
        running = client.submit(mlp(ranks=2), steps)
        seen = [next(running)["loss"] for _ in range(20)]
        said = master.fill_disk()
        assert master.process.returncode == 1
        assert "the master's journal cannot be used" in said.splitlines()[-1]
        assert str(tmp_path / "journal") in said
        assert "Traceback" not in said
        master.start()
        assert [*seen, *(each["loss"] for each in running)] == quiet


@pytest.mark.parametrize("table", ["event", "job", "command"])
def test_a_master_ends_where_it_cannot_clean_its_journal(
    workers: Workers, tmp_path: Path, caplog: pytest.LogCaptureFixture, table: str
) -> None:
    """Outputs beyond what it keeps, jobs that are long over, commands that were confirmed."""
    path = tmp_path / "journal"
    Journal(path, VERSION, 1).close()
    database = sqlite3.connect(path)
    database.execute(
        f"create trigger full before delete on {table} begin select raise(fail, 'disk full'); end"
    )
    database.commit()
    database.close()
    with (
        caplog.at_level(logging.WARNING),
        MasterServer(ranks=1, journal=path, retention=Retention(1000, 1)) as server,
        Client(server.address) as client,
    ):
        if table == "job":  # which is forgotten when a hundred others have ended after it
            with suppress(ClusterError):
                while True:
                    client.submit(mlp(ranks=1), 1).cancel()
        else:
            workers(server.address)
            client.submit(mlp(ranks=1), 100)
        server.wait()
        with pytest.raises(ClusterError, match=r"cannot be used.*disk full"):
            server.check()
    assert not [record for record in caplog.records if record.exc_info]
