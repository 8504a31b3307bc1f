"""The dtype uint64 works in eager programs, in jobs, on the wire and in checkpoints."""

from __future__ import annotations

import numpy as np

import plancompiler as pc
from plancompiler.plan.arrays import arrays_from_bytes, arrays_to_bytes
from plancompiler.plan.job_serde import job_from_bytes, job_to_bytes

X = np.uint64(2**64 - 1) - np.arange(8, dtype=np.uint64)
MESH = pc.Placement("cpu", [0, 1])


def test_eager_and_compiled() -> None:
    def rank() -> None:
        x = pc.tensor(X, MESH, "S(0)")
        assert pc.max(x).item() == 2**64 - 1
        assert x.sum().item() == int(X.sum())
        np.testing.assert_array_equal((x - 2**63).numpy(), X - np.uint64(2**63))
        np.testing.assert_array_equal(pc.sort(x)[0].numpy(), np.sort(X))
        np.testing.assert_array_equal(pc.compile(lambda x: x // 3)(x).numpy(), X // np.uint64(3))

    pc.eager.spawn(rank, 2)


def test_in_a_job_and_on_the_wire() -> None:
    with pc.job("large") as job:
        pc.output("y", pc.input("x", X.shape, "uint64", MESH, "S(0)") - 5)
    assert job_from_bytes(job_to_bytes(job)) == job
    with pc.run(job) as session:
        np.testing.assert_array_equal(session.step(x=X)["y"], X - np.uint64(5))


def test_in_checkpoints() -> None:
    np.testing.assert_array_equal(arrays_from_bytes(arrays_to_bytes({"x": X}))["x"], X)
