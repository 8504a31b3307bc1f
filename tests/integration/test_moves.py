"""Values go through chains of random layouts, on real ranks, and come back unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.ir import Partial, Reduction
from plancompiler.master.server import MasterServer
from plancompiler.running.client import Client, RemoteSession
from tests.boxing.cases import random_placement, random_sbp
from tests.cluster.local_workers import LocalWorkers

SHAPES = ((4, 6), (5, 3), (1, 7), (2, 1), (9,), ())


def chain(seed: int, moves: int) -> tuple[pc.Job, np.ndarray]:
    """A job that moves an input through `moves` layouts on up to 8 ranks, and a value to feed."""
    rng = np.random.default_rng(seed)
    shape = SHAPES[seed % len(SHAPES)]
    dtype = ("float32", "float64", "int64")[seed % 3]
    with pc.job("chain") as job:
        moved = pc.input("x", shape, dtype, random_placement(rng))
        for _ in range(moves):
            placement = random_placement(rng)
            sbp = random_sbp(rng, placement, len(shape))
            if dtype == "int64" and Partial(Reduction.AVG) in sbp:
                continue  # the mean of whole numbers is not a whole number
            moved = moved.redistribute(placement=placement, sbp=sbp)
        pc.output("y", moved)
    return job, rng.integers(1, 9, size=shape).astype(dtype)


def check(session: pc.Session | RemoteSession, value: np.ndarray) -> None:
    for scale in (1, 2):
        np.testing.assert_allclose(session.step(x=value * scale)["y"], value * scale, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_on_threads(seed: int) -> None:
    job, value = chain(seed, 20)
    with pc.run(job) as session:
        check(session, value)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Of a master with eight worker processes."""
    with (
        MasterServer(ranks=8) as server,
        Client(server.address) as client,
        closing(LocalWorkers(server.address, 8)),
    ):
        yield client


@pytest.mark.processes
@pytest.mark.parametrize("seed", range(2))
def test_on_processes(seed: int, client: Client) -> None:
    job, value = chain(100 + seed, 25)
    with client.open(job) as session:
        check(session, value)
