"""Clients that end while they submit: their jobs do not stay behind with nobody to cancel them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

from plancompiler.cluster.call_apart import call_apart
from plancompiler.cluster.messages import JobPhase, JobRequest
from plancompiler.master.events import Limits
from plancompiler.master.server import MasterServer
from plancompiler.running.client import Client
from tests.cluster.conftest import eventually
from tests.examples import mlp

WAIT = 60


class InterruptedStub:
    """A stub whose `method` is interrupted, as by Ctrl-C, when the master has answered it."""

    def __init__(self, stub: Any, method: str) -> None:
        self._stub = stub
        self._method = method

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stub, name)
        if name != self._method:
            return method

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            method(*args, **kwargs)
            raise KeyboardInterrupt

        return interrupted


SUBMISSIONS: dict[str, Callable[[Client], object]] = {
    "submit": lambda client: client.submit(mlp(ranks=1), 10**6),
    "compile": lambda client: client.compile(mlp(ranks=1)),
    "open": lambda client: client.open(mlp(ranks=1)),
}


@pytest.mark.parametrize("submission", SUBMISSIONS)
@pytest.mark.parametrize("method", ["Submit", "Watch"])
def test_who_interrupts_a_submission_leaves_no_job(submission: str, method: str) -> None:
    with MasterServer(ranks=1) as server, Client(server.address) as client:
        real = client._stub
        client._stub = InterruptedStub(real, method)
        with pytest.raises(KeyboardInterrupt):
            SUBMISSIONS[submission](client)
        client._stub = real
        (job,) = client.status().jobs
        assert job.phase is JobPhase.CANCELLED


def test_an_open_job_whose_client_never_listened_ends() -> None:
    with (
        MasterServer(ranks=1, limits=Limits(stream=0.2)) as server,
        Client(server.address) as client,
    ):
        with client._submitted(mlp(ranks=1), JobRequest(0, open=True)) as job_id:
            pass
        eventually(lambda: client.job(job_id).status().phase is JobPhase.CANCELLED)


def test_a_lock_that_was_left_taken_does_not_hold_a_client() -> None:
    """Ctrl-C can leave the lock of a call taken; gRPC waits for it when it closes a channel."""
    requests: SimpleQueue[None] = SimpleQueue()
    with MasterServer(ranks=1) as server:
        client = Client(server.address)
        call = client._stub.Step(iter(requests.get, None))
        with call._state.condition:
            call_apart(client.close, WAIT)
            (closing,) = (each for each in threading.enumerate() if each.name == "apart")
        requests.put(None)
        closing.join(WAIT)
