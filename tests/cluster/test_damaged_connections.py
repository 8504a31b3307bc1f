"""What is damaged, repeated or lost between worker, master and client is an error that says so."""

from __future__ import annotations

import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.campaign.proxy import Fault, Proxy
from plancompiler import Client
from plancompiler.cli.program import cli
from plancompiler.cluster.checked import Received, Sent
from plancompiler.cluster.chunks import Assembler, to_chunks
from plancompiler.cluster.messages import JobPhase, JobRequest, Outputs
from plancompiler.errors import ClusterError, PlanCompilerError, WireFormatError
from plancompiler.master.server import MasterServer
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.running.step_count import StepCount
from tests.cluster.conftest import Workers
from tests.cluster.simulated import cluster_of, until
from tests.integration.tiny_jobs import regression

MLP = Path(__file__).resolve().parents[2] / "examples" / "mlp.py"

# --- messages of a stream -------------------------------------------------------------------------


def stream() -> list[pb.WorkerMessages]:
    sent = Sent()
    outputs = [
        pb.WorkerMessage(outputs=pb.StepOutputs(job_id=1, step=step, arrays=pb.Chunk(data=b"1234")))
        for step in range(4)
    ]
    every = (*outputs, pb.WorkerMessage(heartbeat=pb.Heartbeat()))
    return [sent(pb.WorkerMessages(messages=[each])) for each in every]


def test_a_stream_that_comes_as_it_was_sent_is_read() -> None:
    received = Received("a worker")
    steps = [received(message).messages[0].outputs.step for message in stream()]
    assert steps == [0, 1, 2, 3, 0]


def damaged(messages: list[pb.WorkerMessages], at: int) -> list[pb.WorkerMessages]:
    """One bit of one message is another."""
    data = bytearray(messages[1].SerializeToString())
    data[at] ^= 1
    return [messages[0], pb.WorkerMessages.FromString(bytes(data)), *messages[2:]]


DAMAGES: dict[str, Callable[[list[pb.WorkerMessages]], list[pb.WorkerMessages]]] = {
    "a number of the outputs": lambda messages: damaged(messages, -11),
    "the step": lambda messages: damaged(messages, 7),
    "the check": lambda messages: damaged(messages, -1),
    "twice": lambda messages: [*messages[:2], *messages[1:]],
    "lost": lambda messages: [messages[0], *messages[2:]],
    "exchanged": lambda messages: [messages[0], messages[2], messages[1], *messages[3:]],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_stream_that_comes_otherwise_is_refused(damage: str) -> None:
    came = DAMAGES[damage](stream())
    assert came != stream()
    received = Received("a worker")
    with pytest.raises(WireFormatError, match="a message of a worker was damaged, repeated or los"):
        list(map(received, came))


def test_a_damaged_transfer_is_refused() -> None:
    for place in (0, 1, 2):
        chunks = to_chunks(bytes(5 << 19))
        data = bytearray(chunks[place].data)
        data[100] ^= 16
        chunks[place].data = bytes(data)
        assembler = Assembler("the feeds", 1 << 30)
        with pytest.raises(WireFormatError, match="the feeds was damaged on its way"):
            list(map(assembler.add, chunks))


# --- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [[0, 1, 3], [0, 1, 1], [0, 2], [5, 4]])
def test_a_rank_reports_each_step_once(steps: list[int]) -> None:
    cluster, workers = cluster_of(2)
    job = cluster.submit(JobRequest(4), needs=2)
    until(cluster, job, JobPhase.RUNNING)
    for step in steps:
        workers[0].to_master.append(Outputs(job, step, b""))
    cluster.run()
    error = cluster.error(job)
    assert error is not None
    assert "outputs of steps were lost or repeated" in error.what
    assert (error.rank, error.got) == (0, f"step {steps[-1]}")
    assert error.expected == (
        f"4 steps, each once and in order, of which step {steps[-2] + 1} comes next"
    )


@pytest.mark.parametrize("count", [3, 5])
def test_a_rank_reports_as_many_steps_as_it_ran(count: int) -> None:
    cluster, workers = cluster_of(1)
    job = cluster.submit(JobRequest(4))
    until(cluster, job, JobPhase.RUNNING)
    workers[0].reported = count
    cluster.run()
    error = cluster.error(job)
    assert error is not None
    assert "outputs of steps were lost or repeated" in error.what
    assert error.got == ("3 steps" if count == 3 else "step 4")


def test_a_client_counts_the_steps() -> None:
    count = StepCount({"loss"})
    for step in (7, 8):
        count.came(step, {"loss"})
    count.passed(2)
    count.came(11, {"loss", "more"})
    count.expect(5)
    for wrong in (11, 13, 0):
        with pytest.raises(ClusterError, match=rf"step {wrong}\b.* step 12 with all outputs"):
            count.came(wrong, {"loss"})
    with pytest.raises(ClusterError, match="step 12 without 'loss'"):
        count.came(12, {"more"})
    with pytest.raises(ClusterError, match=r"outputs of 5 steps.* 6 steps"):
        count.expect(6)
    StepCount(()).expect(9)  # it has no outputs, so nobody says when its steps are done


# --- a real connection ----------------------------------------------------------------------------


class Altering:
    """Passes a connection on to a master, and changes the first piece that `alter` changes, of what
    goes to the master or of what comes from it.
    """

    def __init__(
        self, address: str, alter: Callable[[bytes], bytes], *, to_master: bool = True
    ) -> None:
        host, _, port = address.rpartition(":")
        self._master = (host, int(port))
        self._alter = alter
        self._to_master = to_master
        self.altered = False
        self.armed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ends = (self._listener.accept()[0], socket.create_connection(self._master))
                self._sockets += ends
                for source, target, changes in (
                    (*ends, self._to_master),
                    (*ends[::-1], not self._to_master),
                ):
                    self._threads.append(
                        threading.Thread(target=self._pass_on, args=(source, target, changes))
                    )
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket, changes: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if changes and self.armed and not self.altered:
                    data, before = self._alter(data), data
                    self.altered = data != before
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()


def other_loss(data: bytes) -> bytes:
    """A bit of the first loss in a piece is another."""
    match = re.search(rb'"loss".*?}} *(....)', data, re.DOTALL)
    if match is None:
        return data
    at = match.start(1) + 2
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def has_outputs(data: bytes) -> bool:
    return b'"loss"' in data


def doubled(data: bytes) -> bytes:
    """A piece with outputs comes twice. Small messages fill whole frames, so gRPC takes it."""
    return 2 * data if has_outputs(data) else data


def lost(data: bytes) -> bytes:
    """A piece with outputs never comes."""
    return b"" if has_outputs(data) else data


@contextmanager
def altering(
    address: str, alter: Callable[[bytes], bytes], *, to_master: bool = True
) -> Iterator[Altering]:
    proxy = Altering(address, alter, to_master=to_master)
    try:
        yield proxy
    finally:
        proxy.close()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    """The secret, by which a master is known under the address of a proxy."""
    path = tmp_path / "token"
    path.write_text("0123456789abcdef" * 4)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("alter", [other_loss, doubled, lost])
def test_what_is_changed_between_worker_and_master_is_an_error(
    token: Path, workers: Workers, alter: Callable[[bytes], bytes]
) -> None:
    with (
        MasterServer(ranks=1, token_file=token) as server,
        altering(server.address, alter) as proxy,
        Client(server.address, token_file=token) as client,
    ):
        (worker,) = workers(proxy.address, 1, token_file=token)
        assert len(list(client.submit(regression(1), 5))) == 5
        proxy.armed = True
        with pytest.raises(PlanCompilerError, match="was damaged, repeated or lost on its way"):
            list(client.submit(regression(1), 50))  # the end is not in the changed piece
        assert proxy.altered
        error = worker.join()
        assert error is not None
        assert "damaged" in str(error)


@pytest.mark.parametrize("alter", [other_loss, doubled, lost])
def test_what_is_changed_between_master_and_client_is_an_error(
    token: Path, workers: Workers, alter: Callable[[bytes], bytes]
) -> None:
    with (
        MasterServer(ranks=1, token_file=token) as server,
        altering(server.address, alter, to_master=False) as proxy,
        Client(proxy.address, token_file=token) as client,
    ):
        workers(server.address, 1, token_file=token)
        proxy.armed = True
        # Where the piece was not made of whole frames, gRPC is the first to notice.
        noticed = "was damaged, repeated or lost on its way|Failed parsing HTTP/2"
        with pytest.raises(PlanCompilerError, match=noticed):
            list(client.submit(regression(1), 50))  # the end is not in the changed piece
        assert proxy.altered


def test_a_master_that_is_gone_is_not_asked_to_cancel(token: Path, workers: Workers) -> None:
    """Whoever lost it would wait as long once more for an answer."""
    with (
        MasterServer(ranks=2, token_file=token) as server,
        Proxy(server.address, random.Random(0)) as proxy,
    ):
        workers(server.address, 2, token_file=token)
        proxy.arm(Fault("blackhole", to_server=False, after=30_000))
        words = ("--master", proxy.address, "--token-file", token, "--timeout", 2)
        submit = ("submit", MLP, *words, "--steps", 10**6)
        done = CliRunner().invoke(cli, [*map(str, submit)])
        assert done.exit_code == 1
        assert "MasterUnreachableError" in done.stderr
        assert proxy.connections == 1
        with Client(server.address, token_file=token) as client:
            client.cancel(1)
