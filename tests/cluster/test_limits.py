"""Limits of a master and of its workers: what is beyond them is refused, and the refusal logged."""

from __future__ import annotations

import pytest

from plancompiler.errors import LimitError
from plancompiler.master.server import MasterServer
from plancompiler.running.client import Client
from tests.cluster.conftest import Workers
from tests.examples import mlp


def test_a_job_of_too_many_ops(caplog: pytest.LogCaptureFixture) -> None:
    job = mlp(ranks=1)
    with MasterServer(max_ops=len(job.ops) - 1) as server, Client(server.address) as client:
        with pytest.raises(LimitError, match="larger --max-ops"):
            client.submit(job, 1)
        assert client.status().jobs == ()
    assert "refused a call of ipv4:127.0.0.1" in caplog.text
    with MasterServer(max_ops=len(job.ops)) as server, Client(server.address) as client:
        assert client.cancel(client.submit(job, 1).job_id)


def test_a_job_that_takes_too_much_memory(workers: Workers) -> None:
    with MasterServer() as server, Client(server.address) as client:
        (worker,) = workers(server.address, max_memory=1 << 10)
        with pytest.raises(LimitError, match="larger --max-memory") as refused:
            client.submit(mlp(ranks=1), 1).result()
        assert refused.value.report.rank == 0
        worker.stop()
        (worker,) = workers(server.address, max_memory=1 << 30)
        assert client.submit(mlp(ranks=1), 1).result()["step"] == 0
        worker.stop()
