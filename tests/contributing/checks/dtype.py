"""The dtype complex64 works in eager programs, in jobs, on the wire and in checkpoints."""

from __future__ import annotations

import numpy as np

import plancompiler as pc
from plancompiler.plan.arrays import arrays_from_bytes, arrays_to_bytes
from plancompiler.plan.job_serde import job_from_bytes, job_to_bytes

X = (np.arange(8) - 3j).astype(np.complex64)
MESH = pc.Placement("cpu", [0, 1])


def test_eager_and_compiled() -> None:
    def rank() -> None:
        x = pc.tensor(X, MESH, "S(0)")
        assert x.sum().item() == X.sum()
        assert x.equal(x).numpy().all()
        np.testing.assert_array_equal(pc.flip(x).numpy(), X[::-1])
        np.testing.assert_array_equal(pc.compile(lambda x: x.sum())(x).numpy(), X.sum())

    pc.eager.spawn(rank, 2)


def test_in_a_job_and_on_the_wire() -> None:
    with pc.job("large") as job:
        pc.output("y", pc.input("x", X.shape, "complex64", MESH, "S(0)").reshape(4, 2))
    assert job_from_bytes(job_to_bytes(job)) == job
    with pc.run(job) as session:
        np.testing.assert_array_equal(session.step(x=X)["y"], X.reshape(4, 2))


def test_in_checkpoints() -> None:
    np.testing.assert_array_equal(arrays_from_bytes(arrays_to_bytes({"x": X}))["x"], X)
