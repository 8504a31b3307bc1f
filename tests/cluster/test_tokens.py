"""Who may call a master: tokens in files, proofs of both sides, roles, owners of jobs."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from plancompiler.cluster.channel import SESSION_KEY, call_error
from plancompiler.cluster.checked import Sent
from plancompiler.cluster.messages import JobPhase
from plancompiler.cluster.token import (
    ROLES,
    RUNTIME_VARIABLE,
    Challenger,
    find_credential,
    new_credential,
    parse_tokens,
    read_token_file,
)
from plancompiler.errors import DeadlineError, LimitError, SecurityError
from plancompiler.executor.comm.remote import METHOD, SERVICE
from plancompiler.master.admission import StreamLimits
from plancompiler.master.server import MasterServer
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.proto import cluster_pb2_grpc as pb_grpc
from plancompiler.running.client import Client
from plancompiler.running.watched_job import job_request
from plancompiler.worker.agent import run_worker
from plancompiler.worker.peers import HostPeers
from tests.cluster.conftest import Workers, eventually, signed_in
from tests.examples import mlp

SECONDS = 30.0
NOBODY = 65534
SECRET = "0123456789abcdef" * 4  # of these tests


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of this user, and a temporary one, both empty."""
    for name in ("runtime", "temporary"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setenv(RUNTIME_VARIABLE, str(tmp_path / "runtime"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "runtime"


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


# --- files ----------------------------------------------------------------------------------------


def test_lines_of_a_token_file() -> None:
    text = f"# who\n\nalice submit,operate {SECRET}a\nnode worker {SECRET}b\n{SECRET}c\n"
    alice, node, alone = parse_tokens(text, "file")
    assert (alice.name, alice.roles) == ("alice", {"submit", "operate"})
    assert node.roles == {"worker"}
    assert alone.roles == set(ROLES)
    assert SECRET not in repr((alice, node, alone))
    for wrong, said in (
        ("", "no secret"),
        (f"alice {SECRET}", "2 words"),
        (f"alice reads {SECRET}", "'reads'"),
        ("short", "could be guessed"),
        (f"{SECRET}\n{SECRET}", "twice"),
    ):
        with pytest.raises(SecurityError, match=said) as refused:
            parse_tokens(wrong, "file")
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o602])
def test_files_that_others_could_read_or_write_are_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(SecurityError, match="chmod 600"):
        read_token_file(write(tmp_path / "token", SECRET, mode))


def test_files_that_are_none(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(SecurityError, match=str(path)):
            read_token_file(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(SecurityError, match="no file of text"):
        read_token_file(tmp_path / "pipe")
    with pytest.raises(SecurityError, match="no file of text"):
        read_token_file(write(tmp_path / "large", "#" * (2 << 20)))
    with pytest.raises(SecurityError, match="missing"):
        MasterServer(token_file=tmp_path / "missing")


@pytest.mark.parametrize("with_variable", [True, False])
def test_a_master_leaves_its_token_for_its_user_until_it_ends(
    runtime: Path, with_variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = runtime / "plancompiler"
    if not with_variable:
        monkeypatch.delenv(RUNTIME_VARIABLE)
        folder = Path(tempfile.gettempdir()) / f"plancompiler-{os.getuid()}"
    with MasterServer() as server:
        host, port = server.address.split(":")
        file = folder / f"{host}-{port}.token"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [each.name for each in folder.iterdir()] == [file.name]
        for address in (server.address, f"localhost:{port}"):
            with Client(address) as client:
                assert client.status().workers == ()
        with MasterServer() as other:
            Client(other.address).close()
        assert list(folder.iterdir()) == [file]
        if not with_variable:  # a client of another environment
            monkeypatch.setenv(RUNTIME_VARIABLE, str(runtime))
            Client(server.address).close()
    assert not folder.exists()


@pytest.mark.processes
def test_a_master_removes_what_killed_masters_left(runtime: Path) -> None:
    command = [sys.executable, "-m", "plancompiler", "master", "--listen", "127.0.0.1:0", "--json"]
    with subprocess.Popen([*command, "--ranks", "1"], stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        killed.stdout.readline()  # it serves
        (left,) = (runtime / "plancompiler").iterdir()
        with MasterServer() as lives:
            assert left.exists()
            killed.kill()
            killed.wait(SECONDS)
            with MasterServer():
                assert not left.exists()
                Client(lives.address).close()
    assert not left.parent.exists()


def test_folders_and_files_that_another_could_have_made(runtime: Path, tmp_path: Path) -> None:
    folder = runtime / "plancompiler"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(SecurityError, match="symbolic link"):
        MasterServer().start()
    folder.unlink()
    folder.mkdir(mode=0o700)
    folder.chmod(0o770)
    with pytest.raises(SecurityError, match="mode 770"):
        MasterServer().start()
    with pytest.raises(SecurityError, match="mode 770"):
        find_credential("127.0.0.1:1")
    folder.chmod(0o700)
    file = folder / "127.0.0.1-1.token"
    file.symlink_to(write(tmp_path / "planted", SECRET))
    with pytest.raises(SecurityError, match="cannot be read"):
        find_credential("127.0.0.1:1")
    file.unlink()
    write(file, SECRET, 0o640)
    with pytest.raises(SecurityError, match="others could read"):
        find_credential("127.0.0.1:1")
    file.unlink()
    with pytest.raises(SecurityError, match="--token-file"):
        find_credential("127.0.0.1:1")


@pytest.mark.processes
def test_another_user_has_no_token_and_cannot_read_this_ones() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can play another user")
    with MasterServer() as server:
        host, port = server.address.split(":")
        own = find_credential(server.address)

        def as_nobody() -> str:
            """What another user's client finds, and what reading the file gives."""
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.environ.pop(RUNTIME_VARIABLE, None)
            told = []
            file = Path(tempfile.gettempdir()) / f"plancompiler-0/{host}-{port}.token"
            for attempt in (partial(find_credential, server.address), file.read_text):
                try:
                    told.append(str(attempt()))
                except (SecurityError, OSError) as error:
                    told.append(type(error).__name__)
            return " ".join(told)

        assert in_child(as_nobody) == "SecurityError PermissionError"
        assert own == find_credential(server.address)


def in_child(work: Callable[[], str]) -> str:
    """What some work tells in a forked process, which ends at once."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, work().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        text = told.read()
    os.waitpid(child, 0)
    return text


# --- calls ----------------------------------------------------------------------------------------

Call = Callable[[grpc.Channel], object]
CALLS: dict[str, Call] = {
    "Submit": lambda c: pb_grpc.ClientStub(c).Submit(iter(()), timeout=SECONDS),
    "Watch": lambda c: list(pb_grpc.ClientStub(c).Watch(pb.JobRequest(job_id=1), timeout=SECONDS)),
    "Step": lambda c: list(pb_grpc.ClientStub(c).Step(iter(()), timeout=SECONDS)),
    "Save": lambda c: pb_grpc.ClientStub(c).Save(pb.SaveRequest(job_id=1), timeout=SECONDS),
    "Finish": lambda c: pb_grpc.ClientStub(c).Finish(pb.JobRequest(job_id=1), timeout=SECONDS),
    "FetchVariables": lambda c: list(
        pb_grpc.ClientStub(c).FetchVariables(pb.JobRequest(job_id=1), timeout=SECONDS)
    ),
    "Cancel": lambda c: pb_grpc.ClientStub(c).Cancel(pb.JobRequest(job_id=1), timeout=SECONDS),
    "FetchPlans": lambda c: list(
        pb_grpc.ClientStub(c).FetchPlans(pb.JobRequest(job_id=1), timeout=SECONDS)
    ),
    "Describe": lambda c: pb_grpc.ClientStub(c).Describe(pb.JobRequest(job_id=1), timeout=SECONDS),
    "FetchCheckpoint": lambda c: list(
        pb_grpc.ClientStub(c).FetchCheckpoint(pb.JobRequest(job_id=1), timeout=SECONDS)
    ),
    "UploadFiles": lambda c: pb_grpc.WorkerStub(c).UploadFiles(iter(()), timeout=SECONDS),
    "Logs": lambda c: list(pb_grpc.ClientStub(c).Logs(pb.LogsRequest(job_id=1), timeout=SECONDS)),
    "Status": lambda c: pb_grpc.ClientStub(c).Status(pb.StatusRequest(), timeout=SECONDS),
    "Connect": lambda c: list(pb_grpc.WorkerStub(c).Connect(iter(()), timeout=SECONDS)),
    "Beat": lambda c: pb_grpc.WorkerStub(c).Beat(pb.BeatRequest(), timeout=SECONDS),
    "Upload": lambda c: pb_grpc.WorkerStub(c).Upload(iter(()), timeout=SECONDS),
    "Fetch": lambda c: list(pb_grpc.TransferStub(c).Fetch(pb.FetchRequest(), timeout=SECONDS)),
    "ServerReflectionInfo": lambda c: list(
        reflection_pb2_grpc.ServerReflectionStub(c).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=SECONDS
        )
    ),
}


def test_every_call_needs_a_session(server: MasterServer, caplog: pytest.LogCaptureFixture) -> None:
    services = (pb_grpc.ClientServicer, pb_grpc.WorkerServicer, pb_grpc.TransferServicer)
    methods = {name for service in services for name in vars(service) if name[0].isupper()}
    assert methods | {"ServerReflectionInfo"} == CALLS.keys()
    with grpc.insecure_channel(server.address) as channel:
        for name, call in CALLS.items():
            with pytest.raises(grpc.RpcError) as refused:
                call(channel)
            error = call_error(refused.value, server.address)
            assert isinstance(error, SecurityError), name
            assert "no session" in str(error)
        for session in (b"", b"x" * 64, new_session()):
            metadata = (("plancompiler-session-bin", session),)
            with pytest.raises(grpc.RpcError, match="no session"):
                pb_grpc.ClientStub(channel).Status(pb.StatusRequest(), metadata=metadata)
        check = health_pb2_grpc.HealthStub(channel).Check
        assert check(health_pb2.HealthCheckRequest(), timeout=SECONDS).status == 1
    assert caplog.text.count("refused a call of ipv4:127.0.0.1") == len(CALLS) + 3
    assert find_credential(server.address).secret not in caplog.text


def new_session() -> bytes:
    """One that another master has given."""
    credential = new_credential()
    challenger = Challenger([credential])
    nonce = bytes(16)
    challenge, _ = challenger.challenge(nonce, credential.key)
    proof = credential.proof(b"caller", nonce, challenge)
    session = challenger.session(nonce, credential.key, challenge, proof)
    assert challenger.credential_of(session) == credential
    for wrong in (proof[:-1], bytes(32), b""):
        with pytest.raises(SecurityError):
            challenger.session(nonce, credential.key, challenge, wrong)
    with pytest.raises(SecurityError):
        challenger.session(nonce, credential.key, bytes(len(challenge)), proof)
    return session


@pytest.mark.processes
def test_a_token_of_another_master(
    server: MasterServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = write(tmp_path / "token", SECRET)
    with pytest.raises(SecurityError, match="does not know this token"):
        Client(server.address, token_file=wrong)
    with pytest.raises(SecurityError, match="does not know this token"):
        run_worker(server.address, token_file=wrong)
    assert caplog.text.count("refused a call of") == 2
    assert SECRET not in caplog.text


@pytest.mark.processes
def test_whoever_has_taken_the_masters_port_learns_nothing(tmp_path: Path) -> None:
    learnt: list[object] = []

    class Impostor(pb_grpc.SignInServicer):
        def Challenge(  # noqa: N802
            self, request: pb.ChallengeRequest, context: grpc.ServicerContext
        ) -> pb.ChallengeReply:
            learnt.append(request)
            return pb.ChallengeReply(nonce=bytes(56), proof=bytes(32))

        def Prove(  # noqa: N802
            self, request: pb.ProveRequest, context: grpc.ServicerContext
        ) -> pb.ProveReply:
            learnt.append(request)
            return pb.ProveReply(session=b"welcome")

    with ThreadPoolExecutor(2) as pool:
        impostor = grpc.server(pool)
        pb_grpc.add_SignInServicer_to_server(Impostor(), impostor)
        address = f"127.0.0.1:{impostor.add_insecure_port('127.0.0.1:0')}"
        impostor.start()
        token = write(tmp_path / "token", SECRET)
        try:
            with pytest.raises(SecurityError, match="not the master"):
                Client(address, token_file=token)
            with pytest.raises(SecurityError, match="not the master"):
                run_worker(address, token_file=token)
        finally:
            impostor.stop(0).wait()
    assert len(learnt) == 2
    assert all(isinstance(each, pb.ChallengeRequest) for each in learnt)
    assert SECRET not in repr(learnt)


def test_streams_beyond_the_limit_are_refused() -> None:
    with (
        MasterServer(streams=StreamLimits(total=3, peer=2)) as server,
        signed_in(server.address) as first,
        signed_in(server.address) as second,
        Client(server.address) as client,
    ):
        job = client.submit(mlp(ranks=1), 1)  # no worker comes: it waits
        held = []

        def watch(channel: grpc.Channel) -> Iterator[pb.JobEvents]:
            stream = pb_grpc.ClientStub(channel).Watch(job_request(job.job_id))
            next(stream)
            held.append(stream)
            return stream

        watch(first)
        watch(first)
        for channel, option in ((first, "--max-streams-per-peer"), (second, "--max-streams")):
            with pytest.raises(grpc.RpcError) as refused:
                watch(channel)
            error = call_error(refused.value, server.address)
            assert isinstance(error, LimitError)
            assert f"larger {option}." in str(error)
        assert len(client.status().jobs) == 1
        assert client.cancel(job.job_id)
        for stream in held:
            stream.cancel()


def test_streams_of_workers_are_limited_by_the_number_of_ranks(server: MasterServer) -> None:
    with signed_in(server.address) as channel:
        metadata = ((SESSION_KEY, channel.session),)
    limit = 4 * 2 + 64

    async def connect() -> grpc.aio.AioRpcError:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = pb_grpc.WorkerStub(channel)
            streams = [stub.Connect(metadata=metadata, timeout=SECONDS) for _ in range(limit + 1)]
            reads = [asyncio.create_task(stream.read()) for stream in streams]
            refused, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            error = refused.pop().exception()
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
            assert isinstance(error, grpc.aio.AioRpcError)
            return error

    error = asyncio.run(connect())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"at most {limit}" in str(error.details())


# --- roles ----------------------------------------------------------------------------------------


def test_jobs_belong_to_who_submitted_them(workers: Workers, tmp_path: Path) -> None:
    lines = {
        "alice": "submit",
        "bob": "submit",
        "ops": "submit,operate",
        "node": "worker",
    }
    files = {
        name: write(tmp_path / name, f"{name} {roles} {SECRET}{name}\n")
        for name, roles in lines.items()
    }
    everyone = write(tmp_path / "all", "".join(each.read_text() for each in files.values()))
    with (
        MasterServer(token_file=everyone) as server,
        Client(server.address, token_file=files["alice"]) as alice,
        Client(server.address, token_file=str(files["bob"])) as bob,
        Client(server.address, token_file=files["ops"]) as ops,
    ):
        with pytest.raises(SecurityError, match="no token"):
            Client(server.address)
        with pytest.raises(SecurityError, match=r"alice may not.*Expected: worker"):
            run_worker(server.address, token_file=files["alice"])
        with (
            Client(server.address, token_file=files["node"]) as node,
            pytest.raises(SecurityError, match="submit or operate"),
        ):
            node.status()
        handle = alice.submit(mlp(ranks=1), 2)
        assert [len(each.status().jobs) for each in (alice, bob, ops)] == [1, 0, 1]
        with pytest.raises(SecurityError, match="belongs to somebody else"):
            bob.cancel(handle.job_id)
        with pytest.raises(SecurityError, match="belongs to somebody else"):
            bob.job(handle.job_id)
        assert ops.job(handle.job_id).status().owner == "alice"
        stub = bob._stub
        request = job_request(handle.job_id)
        for call in (
            lambda: list(stub.Watch(request)),
            lambda: stub.Finish(request),
            lambda: list(stub.FetchPlans(request)),
            lambda: list(stub.FetchCheckpoint(request)),
            lambda: list(stub.Logs(Sent()(pb.LogsRequest(job_id=handle.job_id)))),
            lambda: list(stub.FetchVariables(request)),
            lambda: stub.Save(Sent()(pb.SaveRequest(job_id=handle.job_id))),
            lambda: next(stub.Step(iter([Sent()(pb.StepRequest(job_id=handle.job_id, steps=1))]))),
        ):
            with pytest.raises(grpc.RpcError, match="belongs to somebody else"):
                call()
        workers(server.address, token_file=files["node"])
        assert handle.result()["step"] == 1
        second = alice.submit(mlp(ranks=1), 1 << 20)
        assert ops.cancel(second.job_id)
        assert {job.phase for job in ops.status().jobs} == {JobPhase.FINISHED, JobPhase.CANCELLED}
        for worker in workers.started:
            worker.stop()


# --- secrets that change --------------------------------------------------------------------------


def test_a_token_file_that_changes_counts_at_once(
    workers: Workers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """New secrets are accepted and removed ones refused, streams included; jobs stay."""
    alice, ops = f"alice submit {SECRET}alice\n", f"ops submit,operate,worker {SECRET}ops\n"
    everyone = write(tmp_path / "all", alice + ops)
    of_alice = write(tmp_path / "alice", alice)
    of_ops = write(tmp_path / "ops", ops)
    anew = write(tmp_path / "anew", f"alice submit {SECRET}anew\n")
    with (
        MasterServer(token_file=everyone) as server,
        Client(server.address, token_file=of_alice) as before,
        Client(server.address, token_file=of_ops) as operator,
    ):
        (node,) = workers(server.address, token_file=of_ops)
        handle = before.submit(mlp(ranks=1), 1 << 30)
        assert next(handle)["step"] == 0
        with pytest.raises(SecurityError, match="does not know this token"):
            Client(server.address, token_file=anew)

        write(everyone, "broken", 0o600)
        eventually(lambda: before.status() and "counts as it was before" in caplog.text)
        assert len(before.status().jobs) == 1

        write(everyone, anew.read_text() + ops)
        with pytest.raises(SecurityError, match="the token of alice has ended"):
            for _ in handle:
                pass
        with pytest.raises(SecurityError, match="does not know this token"):
            before.status()
        with Client(server.address, token_file=anew) as after:
            (job,) = after.status().jobs  # it runs on, and is hers
            assert job.phase is JobPhase.RUNNING
            assert operator.status().workers[0].job_id == job.job_id

            # The token of a worker ends in mid-job: the job fails, and the worker says why.
            write(everyone, anew.read_text())
            assert isinstance(node.join(), SecurityError)
            eventually(lambda: after.status().jobs[0].phase is JobPhase.FAILED)
            error = after.status().jobs[0].error
            assert error is not None
            assert "the worker of rank 0 was lost" in error.what
    assert "the token of ops has ended" in caplog.text
    assert SECRET not in caplog.text


# --- workers among each other ---------------------------------------------------------------------


def test_strangers_hold_no_stream_of_a_worker(caplog: pytest.LogCaptureFixture) -> None:
    """They are sent away before anything is waited for; who has the master's key is heard."""
    peers, other = HostPeers("127.0.0.1:1"), HostPeers("127.0.0.1:1")
    silent = threading.Event()

    def say_nothing() -> Iterator[bytes]:
        silent.wait(SECONDS)
        yield b""

    def call(metadata: tuple[tuple[str, bytes], ...], frames: Iterator[bytes]) -> grpc.StatusCode:
        with grpc.insecure_channel(peers.address) as channel:
            stream = channel.stream_unary(f"/{SERVICE}/{METHOD}", None, None)
            with pytest.raises(grpc.RpcError) as refused:
                stream(frames, timeout=SECONDS, metadata=metadata)
            return refused.value.code()

    try:
        for metadata in ((), other._server.credentials()):
            assert call(metadata, say_nothing()) is grpc.StatusCode.UNAUTHENTICATED
        for each in (peers, other):
            each.admit(b"the key of a master")
        assert call((), say_nothing()) is grpc.StatusCode.UNAUTHENTICATED
        greeting = iter([b"hello"])
        assert call(other._server.credentials(), greeting) is grpc.StatusCode.PERMISSION_DENIED
    finally:
        silent.set()
        peers.close()
        other.close()
    assert caplog.text.count("does not know this cluster") == 3


def test_a_first_call_that_nobody_answers_ends_in_time(runtime: Path) -> None:
    """A damaged frame can hide a call on a connection that goes on answering others."""
    limits, ended = [], threading.Event()

    def hide(request: bytes, context: grpc.ServicerContext) -> bytes:
        limits.append(context.time_remaining())
        ended.wait()
        return b""

    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        hidden = {"Challenge": grpc.unary_unary_rpc_method_handler(hide)}
        server.add_registered_method_handlers("plancompiler.proto.SignIn", hidden)
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        token = write(runtime / "token", SECRET)
        try:
            with pytest.raises(DeadlineError, match="did not answer in time"):
                Client(f"127.0.0.1:{port}", timeout=0.2, token_file=token)
        finally:
            ended.set()
            server.stop(None).wait()
    assert [limit < 1 for limit in limits] == [True]
