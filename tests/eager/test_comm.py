"""Communicators: one suite for ranks that are threads and ranks that are processes."""

from __future__ import annotations

import multiprocessing
import secrets
import traceback

import numpy as np
import pytest

from plancompiler.eager import current_world, spawn
from plancompiler.errors import (
    AbortedError,
    AttributeValueError,
    DeadlineError,
    ShapeError,
    TransportError,
)
from plancompiler.executor.comm.host_board import STAGING_BYTES, HostBoardMaker
from plancompiler.executor.comm.manager import CommContextManager

RANKS = 3


def run_suite(comm: CommContextManager) -> None:
    """Every operation, on the group of all ranks and on smaller ones."""
    rank, everyone = comm.rank, range(RANKS)
    group = comm.context(everyone)
    assert comm.context(everyone) is group
    for size in (0, 1, 7, 40_000, STAGING_BYTES // 4 + 12_345):
        x = np.arange(size, dtype=np.float32) % 1000 + rank
        base = np.arange(size, dtype=np.float32) % 1000
        np.testing.assert_array_equal(group.all_reduce(x), RANKS * base + 3)
        np.testing.assert_array_equal(group.all_reduce(x, "max"), base + 2)
        np.testing.assert_array_equal(
            group.reduce_scatter(x), np.array_split(RANKS * base + 3, RANKS)[rank]
        )
        gathered = group.all_gather(x[: max(size - rank, 0)])
        assert gathered.size == sum(max(size - other, 0) for other in everyone)
        np.testing.assert_array_equal(gathered[:size], base)
    x = np.arange(RANKS, dtype=np.int64) + rank
    assert group.all_reduce(x, "min").tolist() == [0, 1, 2]
    assert group.all_reduce(x, "prod").tolist() == [0, 6, 24]
    assert group.all_reduce(x, "avg").tolist() == [1, 2, 3]
    half = np.array([0.5, 60000.0], np.float16)
    assert group.all_reduce(half, "avg").tolist() == [0.5, 60000.0]
    truth = np.array([rank == 1, True, False])
    assert group.all_reduce(truth).tolist() == [True, True, False]
    assert group.all_reduce(truth, "prod").tolist() == [False, True, False]
    assert group.all_reduce(np.array(1.5)).shape == ()
    total = group.reduce(x, root=2)
    assert (total is None) == (rank != 2)
    assert group.broadcast(truth if rank == 1 else None, 1).tolist() == [True, True, False]
    pieces = group.gather(np.full((1, rank), rank), 0, axis=1)
    assert (pieces.tolist() if rank == 0 else pieces) == ([[1, 2, 2]] if rank == 0 else None)
    given = [np.full(other, other) for other in everyone] if rank == 0 else None
    assert group.scatter(given, 0).tolist() == [rank] * rank
    grid = np.arange(5 * 4).reshape(5, 4)[:, [rank]]
    rows = group.all_to_all(grid, split_axis=0, join_axis=1)
    np.testing.assert_array_equal(
        rows, np.array_split(np.arange(5 * 4).reshape(5, 4)[:, :3], RANKS)[rank]
    )
    came = group.exchange([np.full(other * rank, rank) for other in everyone])
    assert [piece.tolist() for piece in came] == [[o] * (o * rank) for o in everyone]
    if rank < 2:
        pair = comm.context((0, 1))
        assert pair.all_reduce(np.array([rank + 1.0])).tolist() == [3.0]
        if rank == 0:
            group.send(np.array([2.5], np.float16), 1)
        else:
            got = group.recv(0)
            assert (got.tolist(), got.dtype) == ([2.5], np.float16)
    kept = np.arange(100_000, dtype=np.float64)
    found = group.all_gather(kept)
    kept[:] = -1  # the result is no view of what was given
    group.barrier()
    assert found.min() == 0
    with pytest.raises(AttributeValueError, match="unknown reduction"):
        group.all_reduce(x, "mean")
    with pytest.raises(AttributeValueError, match="no member"):
        group.broadcast(None, 9)
    with pytest.raises(ShapeError, match="one shape"):
        group.all_reduce(np.zeros(rank + 1))
    with pytest.raises(TransportError, match=r"different calls.*rank 0: all_gather"):
        group.all_gather(x) if rank == 0 else group.all_reduce(x)


def test_threads():
    spawn(lambda: run_suite(current_world().comm), RANKS, deadline=60.0)


def in_process(token, rank, reports):
    try:
        comm = CommContextManager(HostBoardMaker(token, rank, RANKS, 60.0))
        run_suite(comm)
        comm.context(range(RANKS)).barrier()
        comm.close()
        reports.put((rank, ""))
    except BaseException:
        reports.put((rank, traceback.format_exc()))
        raise


def test_processes():
    context = multiprocessing.get_context("spawn")
    reports, token = context.Queue(), secrets.token_hex(16)
    processes = [
        context.Process(target=in_process, args=(token, rank, reports)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    try:
        said = dict(reports.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()
    assert said == dict.fromkeys(range(RANKS), "")


def test_a_rank_that_does_not_come_is_named():
    def rank():
        if current_world().rank == 0:
            current_world().comm.context((0, 1)).all_reduce(np.zeros(3))

    with pytest.raises((DeadlineError, TransportError), match=r"rank 1 has closed|not entered"):
        spawn(rank, 2, deadline=5.0)


def test_the_first_failure_is_raised_and_wakes_the_others():
    seen = []

    def rank():
        world = current_world()
        if world.rank == 1:
            raise ValueError("broken on purpose")
        try:
            world.comm.context((0, 1)).barrier()
        except AbortedError as error:
            seen.append(str(error))
            raise

    with pytest.raises(ValueError, match="on purpose"):
        spawn(rank, 2)
    assert len(seen) == 1
    assert "broken on purpose" in seen[0]
