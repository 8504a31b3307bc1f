"""Requests for steps of an open job: one stream carries them all, and the answers."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import grpc
import numpy as np
import pytest

import plancompiler as pc
from plancompiler.cluster.channel import call_error
from plancompiler.cluster.checked import Sent
from plancompiler.cluster.chunks import CHUNK_BYTES, Reservation, arrays_to_bytes, to_chunks
from plancompiler.errors import JobCancelledError, LimitError, NonFiniteError, WireFormatError
from plancompiler.executor.checkpoint import read_index
from plancompiler.master.events import Limits
from plancompiler.master.server import MasterServer
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.running.client import Client
from plancompiler.running.step_stream import StepStream
from tests.cluster.conftest import Workers

SECONDS = 60.0
SILENCE = 1.0
"""Seconds that a stream may say nothing which has to say something."""


def fed_job(rows: int = 8) -> pc.Job:
    """Learns a matrix from what it is fed; its outputs are as large as its feeds."""
    mesh = pc.Placement("cpu", [0, 1], axes=("dp",))
    with pc.job("fed") as job:
        x = pc.input("x", (rows, 600), "float32", mesh, ["S(0)"])
        y = pc.nn.Linear(600, 600).place(mesh)(x)
        loss = (y * y).mean()
        pc.optim.SGD(lr=0.001).minimize(loss)
        pc.output("loss", loss)
        pc.output("y", y)
    return job


def batch(step: int, rows: int = 8) -> np.ndarray:
    return np.random.default_rng(step).standard_normal((rows, 600)).astype("float32")


def test_requests_keep_their_order_and_their_feeds(cluster: MasterServer, tmp_path: Path) -> None:
    """Several are under way at once, each of more than a message of gRPC may hold; what is asked
    in other calls comes after them.
    """
    rows, steps = 2000, 3
    feeds = [batch(step, rows) for step in range(steps)]
    assert feeds[0].nbytes > 4 * CHUNK_BYTES
    with pc.run(fed_job(rows), 2) as threads:
        expected = [threads.step(x=each) for each in feeds]
    with Client(cluster.address) as client, client.open(fed_job(rows)) as session:
        asked = [session._ask_steps(1, {"x": each}) for each in feeds]
        session.save(tmp_path)
        assert read_index(tmp_path)["step"] == steps
        assert session.variables().keys() == fed_job().variables.keys()
        assert [each.ticket for each in asked] == sorted({each.ticket for each in asked})
    # Who saves passes over the outputs of steps that were asked for before.
    with Client(cluster.address) as client, client.open(fed_job(rows)) as session:
        asked = [session._ask_steps(1, {"x": each}) for each in feeds]
        actual = [outputs for each in asked for outputs in session._steps_until(each)]
    for outputs, wanted in zip(actual, expected, strict=True):
        assert float(outputs["loss"]) == wanted["loss"]
        assert outputs["y"].tobytes() == wanted["y"].tobytes()


def test_a_refused_request_leaves_the_job_as_it_was(workers: Workers) -> None:
    with (
        MasterServer(ranks=2) as server,
        Client(server.address) as client,
    ):
        workers(server.address, 2)
        with client.open(fed_job()) as session:
            first = session.step(x=batch(0))
            others = Reservation(server._budget)
            others.take(server._budget.limit - server._budget.held)
            for _ in range(2):
                with pytest.raises(LimitError, match="too many bytes of uploads"):
                    session.step(x=batch(1))
            others.close()
            second = session.step(x=batch(1))
        with pc.run(fed_job(), 2) as threads:
            for step, outputs in enumerate((first, second)):
                assert outputs["y"].tobytes() == threads.step(x=batch(step))["y"].tobytes()
        for worker in workers.started:
            worker.stop()


def test_a_value_that_is_not_finite_stops_the_requests_behind_it(cluster: MasterServer) -> None:
    with Client(cluster.address) as client, client.open(fed_job()) as session:
        feeds = [batch(0), np.full_like(batch(1), np.inf), batch(2)]
        good, bad, behind = (session._ask_steps(1, {"x": each}) for each in feeds)
        assert [each["y"].shape for each in session._steps_until(good)] == [(8, 600)]
        for request in (bad, behind):
            with pytest.raises(NonFiniteError):
                list(session._steps_until(request))
        with pytest.raises(NonFiniteError):
            session.step(x=batch(3))


def test_a_client_may_take_its_time_but_not_beyond_the_end_of_its_job(workers: Workers) -> None:
    with (
        MasterServer(ranks=2, limits=Limits(stream=SILENCE)) as server,
        Client(server.address) as client,
    ):
        workers(server.address, 2)
        with client.open(fed_job()) as session:
            session.step(x=batch(0))
            call = session._step_stream._call
            # While nothing happens, who watches a job hears that twice a second.
            watched = client._stub.Watch(Sent()(pb.JobRequest(job_id=session.job_id, beside=True)))
            quiet = (message for message in watched if not message.events)
            assert len(list(islice(quiet, 4))) == 4
            session.step(x=batch(1))
            assert session._step_stream._call is call
            watched.cancel()
            session.cancel()
            ended = call.exception(SECONDS)
            assert isinstance(call_error(ended, server.address), JobCancelledError)
            with pytest.raises(JobCancelledError):
                session.step(x=batch(2))
        for worker in workers.started:
            worker.stop()


def test_feeds_that_are_cut_off_are_refused(cluster: MasterServer) -> None:
    with Client(cluster.address) as client, client.open(fed_job(2000)) as session:
        sent = Sent()
        chunk = to_chunks(arrays_to_bytes({"x": batch(0, 2000)}))[0]
        request = sent(pb.StepRequest(job_id=session.job_id, steps=1, chunk=chunk))
        with pytest.raises(grpc.RpcError) as refused:
            next(client._stub.Step(iter([request])))
        error = call_error(refused.value, cluster.address)
        assert isinstance(error, WireFormatError)
        assert "the feeds is cut off" in str(error)
        other = StepStream(client._stub, cluster.address, session.job_id)
        with pytest.raises(WireFormatError, match="does not say how many"):
            other.ask(0, [])
        assert session.step(x=batch(0, 2000))["y"].shape == (2000, 600)
