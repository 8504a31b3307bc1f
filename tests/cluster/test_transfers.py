"""Fetches from a real master: turns, copies on a host, broken streams, progress."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from queue import SimpleQueue
from typing import Any, TypeVar

import pytest

import plancompiler as pc
from plancompiler.cluster import messages as m
from plancompiler.cluster.checked import Sent
from plancompiler.cluster.chunks import (
    CHUNK_BYTES,
    MAX_JOB_BYTES,
    Assembler,
    Parcel,
    digest_of,
    pack,
)
from plancompiler.cluster.serde import MASTER_MESSAGES, WORKER_MESSAGES, Reader
from plancompiler.errors import (
    AbortedError,
    ClusterError,
    MasterUnreachableError,
    UsageError,
    WireFormatError,
)
from plancompiler.master.events import Limits
from plancompiler.master.server import MasterServer
from plancompiler.master.transfers import Gate
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.proto.cluster_pb2_grpc import WorkerStub
from plancompiler.running.client import Client
from plancompiler.version import VERSION
from plancompiler.worker.local_copy import OfferedCopy, read_copy
from plancompiler.worker.transfer import Interruption, Transfers
from tests.cluster.conftest import Workers, signed_in
from tests.examples import mlp

SECONDS = 60.0
LARGE = random.Random(0).randbytes(5 * CHUNK_BYTES + 7)
M = TypeVar("M", bound=m.MasterMessage)


# --- turns at the master --------------------------------------------------------------------------


def test_the_gate_lets_so_many_in() -> None:
    async def check() -> None:
        gate = Gate(2)
        inside: asyncio.Queue[int] = asyncio.Queue()
        leave = asyncio.Event()

        async def enter(number: int) -> None:
            async with gate.place():
                inside.put_nowait(number)
                await leave.wait()

        tasks = [asyncio.create_task(enter(number)) for number in range(4)]
        assert [await inside.get(), await inside.get()] == [0, 1]
        tasks[2].cancel()  # given up before its turn
        await asyncio.wait(tasks[2:3])
        assert inside.empty()
        leave.set()
        assert await inside.get() == 3
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(check(), SECONDS))
    with pytest.raises(UsageError, match="at least one"):
        MasterServer(transfers=0)


class LightWorker:
    """Registers and does what a test tells it, without compiling anything."""

    def __init__(self, address: str, rank: int | None = None, host: str = "host") -> None:
        self.address = address
        self._outbox: SimpleQueue[m.WorkerMessage | None] = SimpleQueue()
        self._channel = signed_in(address)
        self._messages = WorkerStub(self._channel).Connect(self._requests(), timeout=SECONDS)
        self.interruption = Interruption()
        self.session = self._channel.session
        self.transfers = Transfers(address, None, self.interruption, self.session)
        self.send(m.Register(rank, host, "cpu", VERSION))
        registered = self.next(m.Registered)
        self.token, self.rank = registered.token, registered.slot

    def _requests(self) -> Iterator[pb.WorkerMessages]:
        sent = Sent()
        while (message := self._outbox.get()) is not None:
            yield sent(pb.WorkerMessages(messages=WORKER_MESSAGES.write(message)))

    def send(self, message: m.WorkerMessage) -> None:
        self._outbox.put(message)

    def next(self, kind: type[M]) -> M:
        """The next message of a kind; others are passed over."""
        for message in self._messages:
            actual = Reader(MASTER_MESSAGES).read(message)
            if isinstance(actual, kind):
                return actual
        raise AssertionError(f"the master said no {kind.__name__}")

    def fetch(self, job_id: int, digest: bytes = b"", ticket: int = 0) -> bytes:
        request = pb.FetchRequest(token=self.token, job_id=job_id, ticket=ticket, digest=digest)
        return self.transfers.fetch(request, "it", MAX_JOB_BYTES)

    def close(self) -> None:
        self._outbox.put(None)
        self.transfers.close()
        self._messages.cancel()
        self._channel.close()


class CountingGate(Gate):
    """Knows how many were inside at the same time, and can let them meet there."""

    def __init__(self, places: int) -> None:
        super().__init__(places)
        self.inside = self.most = self.total = 0
        self.barrier: asyncio.Barrier | None = None

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        async with super().place():
            self.inside += 1
            self.total += 1
            self.most = max(self.most, self.inside)
            try:
                if self.barrier is not None:
                    async with asyncio.timeout(SECONDS):
                        await self.barrier.wait()
                yield
            finally:
                self.inside -= 1


@contextmanager
def shipping_master(
    job: pc.Job, ranks: int, places: int = 4
) -> Iterator[tuple[MasterServer, list[LightWorker], CountingGate]]:
    """A master that has compiled a job, and its light workers."""
    gate = CountingGate(places)
    with ExitStack() as stack:
        server = MasterServer(ranks=ranks, limits=Limits(silence=SECONDS), mode="rank_per_process")
        server._gate = gate
        stack.enter_context(server)
        with ThreadPoolExecutor(16) as pool:
            workers = list(pool.map(lambda _: LightWorker(server.address), range(ranks)))
        for worker in workers:
            stack.callback(worker.close)
        client = stack.enter_context(Client(server.address))
        client.submit(job, 1, ranks=ranks).close()
        yield server, workers, gate


@pytest.mark.slow
def test_256_workers_get_their_slices_once_per_host_or_in_turns() -> None:
    ranks = 256
    with shipping_master(mlp(ranks=2), ranks) as (server, workers, gate), ExitStack() as stack:
        copies: SimpleQueue[OfferedCopy] = SimpleQueue()

        def follow(worker: LightWorker) -> tuple[int, bytes, bool]:
            """Do what a worker does with its command."""
            command = worker.next(m.Compile)
            if command.chunk:
                whole = Assembler("it", MAX_JOB_BYTES).add_message(command.chunk)
                assert whole is not None
                data = whole
            elif command.copy is None:
                data = worker.fetch(command.job_id, command.digest)
            else:
                actual = read_copy(command.copy, command.digest, MAX_JOB_BYTES)
                assert actual is not None
                data = actual
            copy = None
            if command.share:
                offered = OfferedCopy(data)
                copies.put(offered)
                copy = offered.place
            worker.send(m.Fetched(command.job_id, copy))
            return command.job_id, command.digest, command.copy is None and not command.chunk

        with ThreadPoolExecutor(ranks) as pool:
            done = list(pool.map(follow, workers))
            while not copies.empty():
                stack.enter_context(copies.get())
            digests = {
                worker.rank: digest for worker, (_, digest, _) in zip(workers, done, strict=True)
            }
            asked = [digest for _, digest, from_master in done if from_master]
            assert len(asked) == gate.total == len(set(asked)) == 1
            assert len(set(digests.values())) == 2  # that of ranks without work came with a command
            with Client(server.address) as client:
                job = wait_for(client, lambda status: status.jobs[0].fetched_ranks == ranks)
            parcels = server._shell.channel(job.job_id).parcels
            once = {each.digest: sum(map(len, each.messages)) for each in parcels.values()}
            assert job.sent_bytes == sum(once.values())
            # Now all of them fetch from the master at once, four by four.
            gate.barrier = asyncio.Barrier(4)
            slices = list(
                pool.map(lambda each: each.fetch(job.job_id, digests[each.rank]), workers)
            )
        assert {digest_of(data) for data in slices} == once.keys()
        assert gate.total == 1 + ranks
        assert gate.most == 4
        assert gate.inside == 0


def wait_for(client: Client, holds: Callable[[m.ClusterStatus], bool]) -> m.JobStatus:
    """The first job's status once this holds."""
    for _ in range(3000):
        status = client.status()
        if holds(status):
            return status.jobs[0]
    raise AssertionError(f"the cluster stays as {status}")


# --- broken streams -------------------------------------------------------------------------------


class CuttingProxy:
    """Passes connections on to an address until `cut`, or until `limit` bytes of replies."""

    def __init__(self, address: str, limit: int = 1 << 62) -> None:
        host, port = address.split(":")
        self._target = (host, int(port))
        self._limit = limit
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._sockets: list[socket.socket] = []
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            thread = threading.Thread(target=self._join, args=(near, far))
            self._threads.append(thread)
            thread.start()

    def _join(self, near: socket.socket, far: socket.socket) -> None:
        asking = threading.Thread(target=self._pass, args=(near, far, 1 << 62))
        asking.start()
        self._pass(far, near, self._limit)
        asking.join(SECONDS)
        # Closed, not only shut down: else the master goes on to fill the connection.
        near.close()
        far.close()

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket, limit: int) -> None:
        with suppress(OSError):
            while limit and (data := source.recv(min(limit, 1 << 16))):
                target.sendall(data)
                limit -= len(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """End the connections that there are."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive()


@pytest.fixture
def offered() -> Iterator[tuple[MasterServer, LightWorker, int, Parcel]]:
    """A job whose only rank is to fetch a large parcel."""
    with shipping_master(mlp(ranks=1), 1, places=1) as (server, (worker,), _):
        job_id = worker.next(m.Compile).job_id
        parcel = pack(LARGE, checked=True)
        server._shell.channel(job_id).parcels = {0: parcel}
        yield server, worker, job_id, parcel


Offered = tuple[MasterServer, LightWorker, int, Parcel]


def through(proxy: CuttingProxy, worker: LightWorker) -> Transfers:
    return Transfers(proxy.address, None, worker.interruption, worker.session)


@pytest.mark.parametrize("ticket", [0, 7])
def test_a_broken_transfer_goes_on_where_it_broke(
    offered: Offered, ticket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, worker, job_id, parcel = offered
    proxy = CuttingProxy(server.address)
    breaks = [threading.Event(), threading.Event()]
    offsets: list[int] = []

    class Breaking(Parcel):
        """Sends two chunks, and the others once the connection has broken."""

        def messages_from(self, offset: int) -> Iterator[bytes]:
            offsets.append(offset)
            number = len(offsets) - 1
            for index, message in enumerate(Parcel.messages_from(self, offset)):
                if index == 2 and number < len(breaks):
                    breaks[number].wait(SECONDS)
                yield message

    arrived = itertools.count(1)
    add_message = Assembler.add_message

    def add_and_break(assembler: Assembler, message: bytes) -> bytes | None:
        actual = add_message(assembler, message)
        number = next(arrived)
        if number in (2, 4):
            proxy.cut()
            breaks[number // 2 - 1].set()
        return actual

    monkeypatch.setattr(Assembler, "add_message", add_and_break)
    digest = b"" if ticket else parcel.digest
    breaking = Breaking(digest, parcel.wire_bytes, parcel.messages)
    channel = server._shell.channel(job_id)
    channel.parcels, channel.feeds = {0: breaking}, {7: breaking}
    transfers = through(proxy, worker)
    try:
        request = pb.FetchRequest(token=worker.token, job_id=job_id, ticket=ticket, digest=digest)
        assert transfers.fetch(request, "it", MAX_JOB_BYTES) == LARGE
    finally:
        transfers.close()
        proxy.close()
    assert offsets == [0, 2 * CHUNK_BYTES, 4 * CHUNK_BYTES]
    assert request.offset == 0


def test_a_transfer_that_never_gets_anywhere_ends(offered: Offered) -> None:
    server, worker, job_id, parcel = offered
    proxy = CuttingProxy(server.address, limit=100)
    transfers = through(proxy, worker)
    try:
        request = pb.FetchRequest(token=worker.token, job_id=job_id, digest=parcel.digest)
        with pytest.raises(MasterUnreachableError):
            transfers.fetch(request, "it", MAX_JOB_BYTES)
    finally:
        transfers.close()
        proxy.close()


def test_a_job_that_changed_in_between_is_not_mixed(
    offered: Offered, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, worker, job_id, parcel = offered
    proxy = CuttingProxy(server.address)
    broken = threading.Event()

    class Breaking(Parcel):
        def messages_from(self, offset: int) -> Iterator[bytes]:
            yield self.messages[0]
            broken.wait(SECONDS)
            yield from self.messages[1:]

    add_message = Assembler.add_message

    def add_and_break(assembler: Assembler, message: bytes) -> bytes | None:
        actual = add_message(assembler, message)
        channel.parcels = {0: pack(LARGE[::-1], checked=True)}
        proxy.cut()
        broken.set()
        return actual

    monkeypatch.setattr(Assembler, "add_message", add_and_break)
    channel = server._shell.channel(job_id)
    channel.parcels = {0: Breaking(parcel.digest, parcel.wire_bytes, parcel.messages)}
    transfers = through(proxy, worker)
    try:
        request = pb.FetchRequest(token=worker.token, job_id=job_id, digest=parcel.digest)
        with pytest.raises(WireFormatError, match="told to fetch"):
            transfers.fetch(request, "it", MAX_JOB_BYTES)
    finally:
        transfers.close()
        proxy.close()


class InterruptedAtOnce(Interruption):
    """Is interrupted when a call has begun and nobody can cancel it yet."""

    @contextmanager
    def cancels(self, call: Any) -> Iterator[None]:
        self.interrupt(ClusterError("too early"))
        with super().cancels(call):
            yield


def test_a_call_that_begins_while_it_is_interrupted_frees_its_turn(offered: Offered) -> None:
    server, worker, job_id, _ = offered
    parcel = pack(LARGE * 16, checked=True)  # more than connections hold on the way
    server._shell.channel(job_id).parcels = {0: parcel}
    early = Transfers(worker.address, None, InterruptedAtOnce(), worker.session)
    request = pb.FetchRequest(token=worker.token, job_id=job_id, digest=parcel.digest)
    # The error is kept, and with it the call: nothing but cancelling ends that.
    with pytest.raises(AbortedError, match="too early") as kept:
        early.fetch(request, "it", MAX_JOB_BYTES)
    assert worker.fetch(job_id, parcel.digest) == LARGE * 16
    early.close()
    assert kept.value.__traceback__ is not None


def test_an_interrupted_transfer_ends_and_frees_its_turn(offered: Offered) -> None:
    server, worker, job_id, parcel = offered
    begun, go_on = threading.Event(), threading.Event()

    class Stuck(Parcel):
        def messages_from(self, offset: int) -> Iterator[bytes]:
            yield self.messages[0]
            begun.set()
            go_on.wait(SECONDS)
            yield from self.messages[1:]

    server._shell.channel(job_id).parcels = {
        0: Stuck(parcel.digest, parcel.wire_bytes, parcel.messages)
    }
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(worker.fetch, job_id, parcel.digest)
        assert begun.wait(SECONDS)
        worker.interruption.interrupt(ClusterError("enough"))
        with pytest.raises(AbortedError, match="enough"):
            fetching.result(SECONDS)
        with pytest.raises(AbortedError, match="enough"):
            worker.fetch(job_id, parcel.digest)
        go_on.set()
    worker.interruption.clear()
    server._shell.channel(job_id).parcels = {0: parcel}
    # There is one place, and the transfer that was interrupted had it.
    assert worker.fetch(job_id, parcel.digest) == LARGE


# --- whole jobs -----------------------------------------------------------------------------------


def test_a_job_is_shipped_once_and_its_progress_is_told(workers: Workers) -> None:
    events: list[tuple[int, m.JobEvent]] = []
    observe: Callable[[int, m.JobEvent], None] = lambda *event: events.append(event)  # noqa: E731
    with MasterServer(ranks=4, mode="rank_per_process", observe=observe) as server:
        workers(server.address, 4)
        with Client(server.address) as client:
            handle = client.submit(mlp(ranks=4), 2)
            assert handle.result()["step"] == 1
            (status,) = client.status().jobs
        shipped = [event for _, event in events if isinstance(event, m.Shipped)]
        assert [event.ranks for event in shipped] == [1, 2, 3, 4]
        assert all(event.world_size == 4 for event in shipped)
        assert status.fetched_ranks == 4
        assert status.sent_bytes == shipped[-1].sent_bytes == shipped[0].sent_bytes > 0
        for worker in workers.started:
            worker.stop()
            assert worker.error is None


def test_a_small_slice_comes_with_the_command_to_compile_it(workers: Workers) -> None:
    gate = CountingGate(1)
    server = MasterServer(ranks=1, mode="rank_per_process")
    server._gate = gate
    mesh = pc.Placement("cpu", [0])
    with pc.job("small") as job:
        pc.output("sum", pc.full((2,), 0.5, "float32", mesh).sum())
    with server:
        workers(server.address, 1)
        with Client(server.address) as client:
            assert client.submit(job, 1).result()["sum"] == 1.0
            (status,) = client.status().jobs
    assert gate.total == 0
    assert status.sent_bytes > 0


def test_workers_without_a_readable_copy_ask_the_master(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The first worker ends its copy before the others read it, as if it had been killed.
    place = OfferedCopy.place.fget
    assert place is not None

    def close_and_tell(copy: OfferedCopy) -> m.LocalCopy:
        actual = place(copy)
        copy.close()
        return actual

    monkeypatch.setattr(OfferedCopy, "place", property(close_and_tell))
    with MasterServer(ranks=3, mode="rank_per_process") as server:
        workers(server.address, 3)
        with Client(server.address) as client:
            assert client.submit(mlp(ranks=3), 2).result()["step"] == 1
        for worker in workers.started:
            worker.stop()
            assert worker.error is None
    assert caplog.text.count("no copy on this host") == 2
