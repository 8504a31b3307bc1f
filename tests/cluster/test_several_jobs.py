"""Several jobs at once over real gRPC, each on workers of its own."""

from __future__ import annotations

import os
import signal

import pytest

from plancompiler.cluster.messages import JobPhase
from plancompiler.errors import JobCancelledError, NonFiniteError, WorkerLostError
from plancompiler.master.job_channel import Retention
from plancompiler.master.server import MasterServer
from plancompiler.running.client import Client, Handle
from tests.cluster.conftest import Workers
from tests.cluster.local_workers import LocalWorkers
from tests.examples import mlp

MANY = 1_000_000
STEPS = 30


def losses(handle: Handle, count: int) -> list[float]:
    """Of its first steps."""
    return [next(handle)["loss"] for _ in range(count)]


@pytest.mark.processes
@pytest.mark.slow
def test_jobs_on_disjoint_ranks_never_touch_each_other() -> None:
    """Of three jobs at once on 1 + 1 + 2 of 4 ranks one fails by itself and one is cancelled, so
    that a fourth, which needs two ranks, has its turn; then the worker of a fifth is killed.
    """
    keeping = Retention(1 << 30)  # what the jobs are ahead of this reader
    with (
        MasterServer(ranks=4, retention=keeping) as server,
        Client(server.address) as client,
    ):
        processes = LocalWorkers(server.address, 4)
        try:
            alone = losses(client.submit(mlp(ranks=1), STEPS), STEPS)
            together = losses(client.submit(mlp(ranks=2), STEPS), STEPS)

            going = client.submit(mlp(ranks=1), MANY)
            cancelled = client.submit(mlp(ranks=2), MANY)
            assert losses(going, 5) == alone[:5]
            assert losses(cancelled, 5) == together[:5]
            failing = client.submit(mlp(ranks=1, lr=1e30), MANY)
            queued = client.submit(mlp(ranks=2), MANY)
            with pytest.raises(NonFiniteError, match="not finite"):
                failing.result()
            assert losses(going, 5) == alone[5:10]
            assert losses(cancelled, 5) == together[5:10]
            assert queued.status().phase is JobPhase.QUEUED  # one rank is free, and it needs two

            assert client.cancel(cancelled.job_id)
            with pytest.raises(JobCancelledError):
                cancelled.result()
            assert losses(queued, 5) == together[:5]
            assert losses(going, 5) == alone[10:15]

            killed = client.submit(mlp(ranks=1), MANY)
            assert losses(killed, 3) == alone[:3]
            victim = next(
                each.slot for each in client.status().workers if each.job_id == killed.job_id
            )
            os.kill(processes.pids[victim], signal.SIGKILL)
            with pytest.raises(WorkerLostError, match="rank 0"):
                killed.result()
            assert losses(queued, STEPS - 5) == together[5:]
            assert losses(going, STEPS - 15) == alone[15:]
            assert client.cancel(going.job_id)
            assert client.cancel(queued.job_id)
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
