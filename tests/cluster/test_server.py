"""Masters and workers over real gRPC: registration, refusals, limits, health, TLS."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from plancompiler.cluster.channel import MAX_MESSAGE_BYTES, call_error
from plancompiler.cluster.checked import Sent
from plancompiler.cluster.chunks import MAX_JOB_BYTES, to_chunks
from plancompiler.cluster.codec import decode
from plancompiler.errors import (
    ClusterError,
    DeviceError,
    ErrorReport,
    LimitError,
    MasterUnreachableError,
    PlanCompilerError,
    RankError,
    RegistrationError,
    SecurityError,
    UnknownModeError,
    VersionError,
    WireFormatError,
)
from plancompiler.master.events import Limits
from plancompiler.master.server import MasterServer
from plancompiler.plan.job_serde import job_to_bytes
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.proto.cluster_pb2_grpc import ClientStub, TransferStub, WorkerStub
from plancompiler.running.client import Client
from plancompiler.version import VERSION
from plancompiler.worker.agent import run_worker
from tests.cluster.certificates import tls
from tests.cluster.conftest import Workers, signed_in
from tests.examples import mlp

SECONDS = 30.0
SERVICES = ("Client", "Worker", "Transfer", "SignIn")


def closed_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_ranks(client: Client, ranks: list[int]) -> None:
    """Until these ranks are registered."""
    results: list[int] = []
    for _ in range(3000):
        results = [worker.slot for worker in client.status().workers]
        if results == ranks:
            return
    raise AssertionError(f"registered are {results}, not {ranks}")


def test_workers_register_and_leave(server: MasterServer, workers: Workers) -> None:
    with Client(server.address) as client:
        second, first = *workers(server.address, rank=1), *workers(server.address)
        wait_for_ranks(client, [0, 1])
        status = client.status()
        assert status.world_size == 2
        assert {worker.host for worker in status.workers} == {socket.gethostname()}
        assert {worker.version for worker in status.workers} == {VERSION}
        first.stop()
        wait_for_ranks(client, [1])
        second.stop()
        wait_for_ranks(client, [])
        assert first.error is second.error is None


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"rank": 0}, RegistrationError, "rank 0 is taken"),
        ({"rank": 2}, RankError, "outside the world"),
        ({"version": "99.1.0"}, VersionError, "99.1.0"),
    ],
)
def test_refused_workers(
    server: MasterServer,
    workers: Workers,
    options: dict[str, object],
    error: type[PlanCompilerError],
    said: str,
) -> None:
    workers(server.address, rank=0)
    with Client(server.address) as client:
        wait_for_ranks(client, [0])
        with pytest.raises(error, match=said):
            run_worker(server.address, **options)  # type: ignore[arg-type]
        wait_for_ranks(client, [0])


def test_a_device_that_this_executor_lacks(server: MasterServer) -> None:
    with pytest.raises(DeviceError, match=r"CUDA|device"):
        run_worker(server.address, device="cuda:99")


@pytest.mark.processes
def test_an_unreachable_master() -> None:
    address = f"127.0.0.1:{closed_port()}"
    with pytest.raises(MasterUnreachableError, match=address):
        Client(address, timeout=0.3)
    with pytest.raises(MasterUnreachableError, match=address):
        run_worker(address, timeout=0.3)
    for wrong in ("nowhere", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:99999"):
        with pytest.raises(ClusterError, match="not an address"):
            Client(wrong)


def test_the_master_going_away_ends_its_workers(workers: Workers) -> None:
    with MasterServer(ranks=1) as server, Client(server.address) as client:
        (worker,) = workers(server.address)
        wait_for_ranks(client, [0])
    error = worker.join()
    assert isinstance(error, ClusterError)
    assert "stopped" in str(error) or "ended" in str(error)


def test_a_worker_that_falls_silent_is_lost() -> None:
    with MasterServer(ranks=1, limits=Limits(silence=0.5)) as server:
        with signed_in(server.address) as channel:
            ended = threading.Event()

            def messages() -> Iterator[pb.WorkerMessages]:
                register = pb.WorkerMessage(register=pb.Register(version=VERSION))
                yield Sent()(pb.WorkerMessages(messages=[register]))
                ended.wait(SECONDS)  # no heartbeat, and the stream stays open on this side

            stream = WorkerStub(channel).Connect(messages(), timeout=SECONDS)
            replies = [message.WhichOneof("message") for message in stream]
            ended.set()
        assert replies == ["registered", "refused"]


def test_health_and_reflection(server: MasterServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for name in ("", *(f"plancompiler.proto.{each}" for each in SERVICES)):
            reply = check(health_pb2.HealthCheckRequest(service=name), timeout=SECONDS)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
    with signed_in(server.address) as channel:
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (reply,) = stub.ServerReflectionInfo(iter([ask]), timeout=SECONDS)
        names = {service.name for service in reply.list_services_response.service}
        assert {f"plancompiler.proto.{each}" for each in SERVICES} <= names


def submit_raw(address: str, *messages: pb.SubmitRequest) -> None:
    with signed_in(address) as channel:
        try:
            ClientStub(channel).Submit(map(Sent(), messages), timeout=SECONDS)
        except grpc.RpcError as error:
            raise call_error(error, address) from error


def test_submissions_that_are_not_what_they_claim(server: MasterServer) -> None:
    header = pb.SubmitRequest(header=pb.SubmitHeader(version=VERSION, steps=1))
    old = pb.SubmitRequest(header=pb.SubmitHeader(version="0.0.1"))
    garbage = pb.SubmitRequest(chunk=to_chunks(b"garbage")[0])
    huge = pb.SubmitRequest(chunk=pb.Chunk(data=b"x", wire_bytes=MAX_JOB_BYTES + 1))
    bomb = pb.SubmitRequest(
        chunk=pb.Chunk(data=b"x", wire_bytes=1, raw_bytes=1 << 60, compression=1)
    )
    cut = pb.SubmitRequest(chunk=pb.Chunk(data=b"x", wire_bytes=2, raw_bytes=2))
    mode = pb.SubmitRequest(header=pb.SubmitHeader(version=VERSION, mode="fast"))
    for messages, error, said in (
        ((), WireFormatError, "header"),
        ((garbage,), WireFormatError, "header"),
        ((old,), VersionError, "0.0.1"),
        ((header,), WireFormatError, "cut off"),
        ((header, garbage), WireFormatError, "too short"),
        ((header, huge), WireFormatError, "too large"),
        ((header, bomb), WireFormatError, "too large"),
        ((header, cut), WireFormatError, "cut off"),
        ((mode, garbage), WireFormatError, "too short"),
    ):
        with pytest.raises(error, match=said):
            submit_raw(server.address, *messages)
    assert UnknownModeError.exit_code == 2


def test_messages_without_a_check_are_refused(server: MasterServer) -> None:
    """Only the version is read before: who has another one hears of that."""
    version = VERSION
    header = pb.SubmitHeader(version=version, steps=1)
    with signed_in(server.address) as channel:
        client, worker = ClientStub(channel), WorkerStub(channel)

        def connect(first: pb.WorkerMessage) -> None:
            messages = iter([pb.WorkerMessages(messages=[first])])
            for reply in worker.Connect(messages, timeout=SECONDS):
                assert reply.WhichOneof("message") == "refused"
                raise PlanCompilerError.from_report(decode(ErrorReport, reply.refused))

        for call in (
            lambda: client.Submit(iter([pb.SubmitRequest(header=header)]), timeout=SECONDS),
            lambda: list(client.Watch(pb.JobRequest(job_id=1), timeout=SECONDS)),
            lambda: next(client.Step(iter([pb.StepRequest(job_id=1, steps=1)]), timeout=SECONDS)),
            lambda: client.Save(pb.SaveRequest(job_id=1), timeout=SECONDS),
            lambda: client.Finish(pb.JobRequest(job_id=1), timeout=SECONDS),
            lambda: list(client.FetchVariables(pb.JobRequest(job_id=1), timeout=SECONDS)),
            lambda: client.Cancel(pb.JobRequest(job_id=1), timeout=SECONDS),
            lambda: client.Status(pb.StatusRequest(), timeout=SECONDS),
            lambda: worker.Upload(iter([pb.UploadRequest(token=b"guess")]), timeout=SECONDS),
            lambda: worker.Beat(pb.BeatRequest(token=b"guess"), timeout=SECONDS),
            lambda: list(TransferStub(channel).Fetch(pb.FetchRequest(job_id=1), timeout=SECONDS)),
        ):
            with pytest.raises(grpc.RpcError, match="no check"):
                call()
        with pytest.raises(WireFormatError, match="no check"):
            connect(pb.WorkerMessage(register=pb.Register(version=version)))
        with pytest.raises(VersionError, match=r"0\.0\.1"):
            connect(pb.WorkerMessage(register=pb.Register(version="0.0.1")))
        old = pb.SubmitRequest(header=pb.SubmitHeader(version="0.0.1"))
        with pytest.raises(grpc.RpcError, match=r"a client of version 0\.0\.1"):
            client.Submit(iter([old]), timeout=SECONDS)
        say = channel.stream_stream("/plancompiler.proto.Worker/Connect")
        (answer,) = say(iter([b"\xff" * 9]), timeout=SECONDS)
        assert b"is not a message of this protocol" in answer


def test_uploads_give_back_what_they_hold_and_the_queue_has_an_end() -> None:
    data = job_to_bytes(mlp(ranks=1))
    header = pb.SubmitRequest(header=pb.SubmitHeader(version=VERSION, steps=1))
    job = pb.SubmitRequest(chunk=to_chunks(data)[0])
    with MasterServer(max_upload_bytes=len(data) + 10, max_queue=1) as server:
        for _ in range(3):
            with pytest.raises(WireFormatError):
                submit_raw(server.address, header, pb.SubmitRequest(chunk=to_chunks(b"bad")[0]))
        assert server._budget.held == 0
        submit_raw(server.address, header, job)  # it waits, as no worker comes
        assert server._budget.held == len(data)
        with pytest.raises(LimitError, match="--max-upload-bytes"):
            submit_raw(server.address, header, job)
        with Client(server.address) as client:
            assert client.cancel(1)
            assert server._budget.held == 0
            submit_raw(server.address, header, job)
            server._budget.limit *= 3
            with pytest.raises(LimitError, match="--max-queue"):
                client.submit(mlp(ranks=1), 1)
            assert server._budget.held == len(data)
    assert server._budget.held == 0


def test_a_message_over_the_limit_is_refused_before_it_is_read(server: MasterServer) -> None:
    header = pb.SubmitRequest(header=pb.SubmitHeader(version="x" * (MAX_MESSAGE_BYTES + 1)))
    with pytest.raises(LimitError, match=r"RESOURCE_EXHAUSTED.*at most 4194304 bytes"):
        submit_raw(server.address, header)


def test_only_registered_workers_may_fetch(server: MasterServer) -> None:
    with signed_in(server.address) as channel:
        stub = WorkerStub(channel)
        request = Sent()(pb.FetchRequest(token=b"guess", job_id=1))
        with pytest.raises(grpc.RpcError, match="only workers of the job"):
            list(TransferStub(channel).Fetch(request, timeout=SECONDS))
        with pytest.raises(grpc.RpcError, match="only workers of the job"):
            stub.Upload(map(Sent(), [pb.UploadRequest(token=b"guess")]), timeout=SECONDS)


def test_unknown_jobs(server: MasterServer) -> None:
    with Client(server.address) as client:
        with pytest.raises(ClusterError, match="no such job"):
            client.cancel(7)
        assert client.status().jobs == ()


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "some.host:0"])
def test_serving_beyond_this_machine_needs_more_care(listen: str) -> None:
    with pytest.raises(SecurityError, match="--insecure"):
        MasterServer(listen)


def test_a_port_that_is_taken(server: MasterServer) -> None:
    with pytest.raises(ClusterError, match="cannot listen"):
        MasterServer(server.address).start()


def test_the_port_is_closed_after_the_end() -> None:
    with MasterServer(ranks=1) as server:
        host, port = server.address.split(":")
        socket.create_connection((host, int(port)), timeout=SECONDS).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=SECONDS)
    server.stop()


def test_tls_with_client_certificates(certificates: Path, workers: Workers) -> None:
    with MasterServer(ranks=1, tls=tls(certificates, "server")) as server:
        with Client(server.address, tls=tls(certificates, "client")) as client:
            workers(server.address, tls=tls(certificates, "client"))
            wait_for_ranks(client, [0])
        for stranger in (None, tls(certificates, "stranger")):
            with (
                pytest.raises(PlanCompilerError),
                Client(server.address, timeout=1.0, tls=stranger) as client,
            ):
                client.status()
        for worker in workers.started:
            worker.stop()
    with pytest.raises(SecurityError, match=r"missing\.pem"):
        Client(server.address, tls=tls(certificates, "missing"))
