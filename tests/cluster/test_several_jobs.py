"""Several jobs at once over real gRPC, each on workers of its own."""

from __future__ import annotations

import os
import signal

import pytest

from plancompiler.cluster.messages import JobPhase
from plancompiler.errors import JobCancelledError, WorkerLostError
from plancompiler.master.server import MasterServer
from plancompiler.running.client import Client, Handle
from plancompiler.running.worker_processes import WorkerProcesses
from tests.cluster.conftest import Workers
from tests.examples import mlp

MANY = 1_000_000


def losses(handle: Handle, count: int) -> list[float]:
    """Of its first steps."""
    return [next(handle)["loss"] for _ in range(count)]


@pytest.mark.processes
def test_jobs_on_disjoint_ranks_never_touch_each_other() -> None:
    with MasterServer(ranks=4) as server, Client(server.address) as client:
        processes = WorkerProcesses(server.address, 4)
        try:
            quiet = losses(client.submit(mlp(ranks=2), 12), 12)
            alone = losses(client.submit(mlp(ranks=1), 12), 12)
            killed = client.submit(mlp(ranks=1), MANY)
            cancelled = client.submit(mlp(ranks=1), MANY)
            going = client.submit(mlp(ranks=2), 12)
            queued = client.submit(mlp(ranks=2), 12)
            for handle in (killed, cancelled):
                assert losses(handle, 3) == alone[:3]
            victim = next(
                each.slot for each in client.status().workers if each.job_id == killed.job_id
            )
            os.kill(processes.pids[victim], signal.SIGKILL)
            with pytest.raises(WorkerLostError, match="rank 0"):
                killed.result()
            assert client.cancel(cancelled.job_id)
            with pytest.raises(JobCancelledError):
                cancelled.result()
            assert losses(going, 12) == quiet
            assert losses(queued, 12) == quiet
        finally:
            processes.close()


def test_a_job_takes_as_many_workers_as_it_has_ranks(
    server: MasterServer, workers: Workers
) -> None:
    started = workers(server.address, 2)
    with Client(server.address) as client:
        first = client.submit(mlp(ranks=1), MANY)
        second = client.submit(mlp(ranks=1), 3)
        assert len(losses(second, 3)) == 3  # while the first one runs
        wide = client.submit(mlp(ranks=2), 3, priority=1)
        narrow = client.submit(mlp(ranks=1), 3)
        assert narrow.result()["step"] == 2  # it has passed the wide one, which does not fit
        assert client.cancel(first.job_id)
        assert wide.result()["step"] == 2
        assert wide.phase is JobPhase.FINISHED
    for worker in started:
        worker.stop()
        assert worker.error is None
