"""Values go through chains of random layouts, on real ranks, and come back unchanged."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.ir import Partial, Reduction
from tests.boxing.cases import random_placement, random_sbp

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


def check(backend: str, seed: int, moves: int) -> None:
    job, value = chain(seed, moves)
    with pc.run(job, backend=backend) as session:
        for scale in (1, 2):
            np.testing.assert_allclose(session.step(x=value * scale)["y"], value * scale, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_on_threads(seed: int) -> None:
    check("threads", seed, 20)


@pytest.mark.processes
@pytest.mark.parametrize("seed", range(2))
def test_on_processes(seed: int) -> None:
    check("processes", 100 + seed, 25)
