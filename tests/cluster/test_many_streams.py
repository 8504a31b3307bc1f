"""Very many calls at the same time: those that wait cost no thread, those that say nothing end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import pytest

from plancompiler.cluster.channel import SESSION_KEY, call_error
from plancompiler.cluster.messages import JobPhase
from plancompiler.errors import DeadlineError
from plancompiler.master.events import Limits
from plancompiler.master.server import MasterServer
from plancompiler.proto.cluster_pb2_grpc import ClientStub, WorkerStub
from plancompiler.running.client import Client
from plancompiler.running.watched_job import job_request
from tests.cluster.conftest import Workers, signed_in
from tests.examples import mlp

SECONDS = 60.0
JOBS, READERS, SILENT, CONNECTIONS = 20, 50, 1000, 10


class Crowd:
    """Clients in one event loop, over a few connections."""

    def __init__(self, address: str) -> None:
        with signed_in(address) as channel:
            self.call: Any = {
                "timeout": SECONDS,
                "metadata": ((SESSION_KEY, channel.session),),
            }
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channels = [
            grpc.aio.insecure_channel(address, options=options) for _ in range(CONNECTIONS)
        ]

    def stub(self, number: int) -> ClientStub:
        return ClientStub(self.channels[number % CONNECTIONS])

    async def follow(self, number: int, job_id: int, begun: asyncio.Semaphore) -> str:
        """The last phase of a job, as a client that waits for it hears."""
        phase = ""
        async for message in self.stub(number).Watch(job_request(job_id), **self.call):
            if not phase:
                begun.release()
            for event in message.events:
                if event.HasField("phase_changed"):
                    phase = event.phase_changed.phase
        return phase

    async def say_nothing(self, number: int) -> str:
        """Open a stream and leave it at that; what the master says."""
        stub = self.stub(number)
        if number % 30 == 0:  # of workers there are fewer, whose streams have a limit of their own
            answer = WorkerStub(self.channels[number % CONNECTIONS]).Upload(**self.call)
        elif number % 2:
            answer = stub.Submit(**self.call)
        else:
            answer = stub.Step(**self.call).read()
        with pytest.raises(grpc.RpcError) as failure:
            await answer
        return str(call_error(failure.value, "the master"))

    async def close(self) -> None:
        for channel in self.channels:
            await channel.close(None)


def test_waiting_clients_are_served_and_silent_streams_end(workers: Workers) -> None:
    with MasterServer(ranks=1, limits=Limits(stream=2.0)) as server, Client(server.address) as own:
        job = mlp(ranks=1)
        handles = [own.submit(job, 1) for _ in range(JOBS)]
        running = {each.name for each in threading.enumerate()}
        seen: dict[str, object] = {}

        def ask() -> None:
            """Beside the crowd, as any other client."""
            with Client(server.address) as client:
                seen["jobs"] = len(client.status().jobs)
                seen["cancelled"] = client.cancel(handles[-1].job_id)
            seen["open"] = server._admission._open
            seen["threads"] = {each.name for each in threading.enumerate()} - running

        async def crowd() -> tuple[list[str], list[str]]:
            clients = Crowd(server.address)
            begun = asyncio.Semaphore(0)
            watching = [
                asyncio.create_task(clients.follow(number, handles[number % JOBS].job_id, begun))
                for number in range(JOBS * READERS)
            ]
            for _ in watching:
                await begun.acquire()
            silent = [asyncio.create_task(clients.say_nothing(each)) for each in range(SILENT)]
            await asyncio.to_thread(ask)
            # It had its answers while the others had none, and only now can they get any.
            assert not any(
                each.done() for number, each in enumerate(watching) if (number + 1) % JOBS
            )
            workers(server.address)
            try:
                return await asyncio.gather(*watching), await asyncio.gather(*silent)
            finally:
                await clients.close()

        phases, said = asyncio.run(crowd())
        for handle in handles[:-1]:
            assert handle.result()["step"] == 0
        for worker in workers.started:
            worker.stop()
    assert phases.count(str(JobPhase.FINISHED)) == (JOBS - 1) * READERS
    assert phases.count(str(JobPhase.CANCELLED)) == READERS
    assert seen["jobs"] == JOBS
    assert seen["cancelled"] is True
    assert seen["open"] >= (JOBS - 1) * READERS
    assert not {name for name in seen["threads"] if name.startswith("plancompiler")}
    assert len(said) == SILENT
    assert all(DeadlineError.code in each and "--stream-silence" in each for each in said), said[0]
