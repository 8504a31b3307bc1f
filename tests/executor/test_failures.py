"""What happens when a rank fails, is late, is interrupted or dies."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from plancompiler.errors import (
    AbortedError,
    DeadlineError,
    ExecutionError,
    PlanCompilerError,
    TransportError,
)
from plancompiler.executor.comm.host import HostLink
from plancompiler.executor.comm.local import LocalHub
from plancompiler.executor.comm.remote import PeerServer, remote_link
from plancompiler.executor.local_run import LocalWorld
from plancompiler.executor.runtime import Runtime
from tests.executor.host_world import HostWorld
from tests.executor.plans import data_parallel, failing, pipeline, with_op

X = np.ones(3, np.float32)
KINDS = ["local", "host", "remote"]
SERVERS: list[PeerServer] = []


@pytest.fixture(autouse=True)
def servers_end() -> Iterator[None]:
    """Close what `transports` has opened."""
    yield
    while SERVERS:
        SERVERS.pop().close()


def transports(kind: str, ranks: int) -> list:
    if kind == "local":
        hub = LocalHub()
        return [hub.link(rank) for rank in range(ranks)]
    token = secrets.token_hex(8)
    if kind == "remote":
        servers = [PeerServer("127.0.0.1:0") for _ in range(ranks)]
        SERVERS.extend(servers)
        addresses = {rank: f"127.0.0.1:{each.port}" for rank, each in enumerate(servers)}
        return [remote_link(token, rank, servers[rank], addresses) for rank in range(ranks)]
    return [HostLink(token, rank) for rank in range(ranks)]


class Ranks:
    """Runtimes of all ranks in this process, driven one by one, over any transport."""

    def __init__(self, plans, kind: str, deadline: float = 60.0) -> None:
        self.runtimes = [
            Runtime(plans[rank], transport, deadline=deadline)
            for rank, transport in enumerate(transports(kind, len(plans)))
        ]
        self.pool = ThreadPoolExecutor(len(plans))

    def __enter__(self):
        try:
            list(self.pool.map(Runtime.prepare, self.runtimes))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for runtime in self.runtimes:
            runtime.close()
        self.pool.shutdown()

    def start(self, rank: int, feeds: dict, steps: int = 1):
        for _ in range(steps):
            self.runtimes[rank].feed(feeds)
        return self.pool.submit(self.runtimes[rank].run, steps)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failing_kernel_stops_all_ranks(kind, test_ops):
    with Ranks(failing(3), kind) as ranks:
        futures = [ranks.start(rank, {"x": X}, 3) for rank in range(3)]
        errors = [future.exception() for future in futures]
        report = errors[1].report
        assert type(errors[1]) is ExecutionError
        assert (report.op, report.rank, report.source) == ("the_op", 1, "sketch.py:2")
        assert report.what == "ValueError: boom"
        assert isinstance(errors[1].__cause__, ValueError)
        for other in (0, 2):
            assert isinstance(errors[other], AbortedError)
            assert "rank 1 failed" in str(errors[other])
            assert "boom" in str(errors[other])
        with pytest.raises(ExecutionError, match="boom"):
            ranks.runtimes[1].run(1)


def test_the_world_raises_the_first_cause(test_ops):
    with LocalWorld(failing(2)) as world:
        np.testing.assert_array_equal(world.step({"x": X})["y0"], 2 * X)
        with pytest.raises(ExecutionError, match="boom") as caught:
            world.step({"x": X})
        assert caught.value.report.rank == 1


def test_failure_on_real_processes(host_world):
    host_world.open(failing, 3, ranks=range(3))
    host_world.step([{"x": X}], range(3))
    for rank in range(3):
        host_world.tell(rank, "step", [{"x": X}])
    errors = []
    for rank in range(3):
        with pytest.raises(PlanCompilerError) as caught:
            host_world.answer(rank)
        errors.append(caught.value)
    assert isinstance(errors[1], ExecutionError)
    assert isinstance(errors[0], AbortedError)
    assert isinstance(errors[2], AbortedError)
    assert "rank 1 failed" in str(errors[0])
    host_world.close_run(range(3))
    for rank in range(3):
        assert host_world.ask(rank, "leaks") == ([], [])


@pytest.mark.parametrize("kind", KINDS)
def test_abort_from_another_thread(kind):
    with Ranks(data_parallel(2), kind) as ranks:
        future = ranks.start(0, {"x": np.ones((6, 4), np.float32)})
        ranks.runtimes[0].abort(AbortedError("enough"))
        with pytest.raises(AbortedError, match="enough"):
            future.result()
        other = ranks.start(1, {"x": np.ones((6, 4), np.float32)})
        with pytest.raises(AbortedError, match="rank 0 failed"):
            other.result()


@pytest.mark.parametrize("kind", KINDS)
def test_a_producer_that_does_not_come(kind):
    with Ranks(pipeline(2), kind, deadline=0.2) as ranks:
        future = ranks.pool.submit(ranks.runtimes[1].run, 1)
        with pytest.raises(DeadlineError, match="rank 0 was not told to run step 0"):
            future.result()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_never_starts(kind):
    runtime = Runtime(data_parallel(2)[0], transports(kind, 2)[0], deadline=0.05)
    with pytest.raises(DeadlineError, match=r"missing ranks \[1\]"):
        runtime.prepare()
    runtime.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_that_closed(kind):
    with Ranks(data_parallel(2), kind) as ranks:
        ranks.runtimes[1].close()
        future = ranks.start(0, {"x": np.ones((6, 4), np.float32)})
        with pytest.raises(TransportError, match="rank 1 has closed its run"):
            future.result()


@pytest.mark.parametrize("kind", KINDS)
def test_closing_in_the_middle_of_a_step(kind):
    with Ranks(data_parallel(2), kind) as ranks:
        future = ranks.start(0, {"x": np.ones((6, 4), np.float32)})
        while not ranks.runtimes[0].running and not future.done():
            pass
        ranks.runtimes[0].close()
        with pytest.raises(AbortedError, match="closed in the middle"):
            future.result()


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c(kind, test_ops):
    """A kernel sends SIGINT while the caller waits for a collective that cannot end."""
    with Ranks(with_op("test_interrupt"), kind) as ranks:
        runtime = ranks.runtimes[0]
        runtime.feed({"x": X})
        with pytest.raises(KeyboardInterrupt):
            runtime.run(1)
        with pytest.raises(AbortedError, match="interrupted"):
            runtime.run(1)
        assert not any(one.name.startswith("plancompiler-0-") for one in threading.enumerate())


@pytest.mark.processes
@pytest.mark.parametrize("hosts", [(), (0, 0, 1), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_process_is_noticed(victim, hosts):
    world = HostWorld(3)
    try:
        world.open(data_parallel, 3, ranks=range(3), hosts=hosts)
        others = [rank for rank in range(3) if rank != victim]
        for rank in others:
            world.tell(rank, "step", [{"x": np.ones((6, 4), np.float32)}])
        world.kill(victim)
        for rank in others:
            with pytest.raises(ExecutionError) as caught:
                world.answer(rank)
            assert isinstance(caught.value, (TransportError, AbortedError))
            assert caught.value.report.rank == victim
            world.close_run([rank])
            assert world.ask(rank, "leaks") == ([], [])
    finally:
        world.shut_down()


@pytest.mark.processes
@pytest.mark.parametrize("hosts", [(), (0, 1)], ids=str)
def test_a_killed_producer_is_noticed(hosts):
    world = HostWorld(2)
    try:
        world.open(pipeline, 2, ranks=range(2), hosts=hosts)
        world.tell(1, "step", [{}])
        world.kill(0)
        with pytest.raises(TransportError, match="rank 0 went away"):
            world.answer(1)
        world.close_run([1])
        assert world.ask(1, "leaks") == ([], [])
    finally:
        world.shut_down()
