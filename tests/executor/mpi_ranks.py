"""A rank of the tests of the `mpi` transport, started by mpiexec: `python -m` this, arguments CASE.

It checks its own results and says so on standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest

from plancompiler.errors import AbortedError, DeadlineError, ExecutionError, PlanCompilerError
from plancompiler.executor import runtime as runtime_module
from plancompiler.executor.comm.mpi import MpiWorld
from plancompiler.executor.runtime import Runtime
from plancompiler.ops import registry
from tests.executor.collectives import check_collectives, collective_feeds, collective_plans
from tests.executor.kernels import GATES, TEST_OPS, Gate
from tests.executor.pipelines import ROWS, WIDTH, train, train_reference
from tests.executor.plans import data_parallel, failing, pipeline, with_op

STEPS = 2
Outputs = dict[int, dict[str, np.ndarray]]


def open_runtime(world: MpiWorld, plans, token: str, **options) -> tuple[Runtime, Outputs]:
    """This rank's runtime, prepared, and where its outputs go."""
    outputs: Outputs = {}

    def collect(step: int, name: str, value: np.ndarray) -> None:
        outputs.setdefault(step, {})[name] = value

    runtime = Runtime(plans[world.rank], world.link(token), on_outputs=collect, **options)
    try:
        runtime.prepare()
    except BaseException:
        runtime.close()
        raise
    return runtime, outputs


def run(world: MpiWorld, plans, token: str, feeds) -> Outputs:
    """Run all steps at once."""
    runtime, outputs = open_runtime(world, plans, token)
    for fed in feeds:
        runtime.feed({name: fed[name] for name in runtime.input_names})
    runtime.run(len(feeds))
    runtime.close()
    return outputs


def collectives(world: MpiWorld) -> None:
    feeds = [collective_feeds(world.size, step) for step in range(STEPS)]
    outputs = run(world, collective_plans(world.size), "collectives", feeds)
    for step, fed in enumerate(feeds):
        check_collectives(world.size, fed, outputs[step], [world.rank])


def pipelines(world: MpiWorld) -> None:
    """Several runs one after another, each of copies between ranks, many steps ahead."""
    for number in range(3):
        feeds = [{"x": np.full((5, 3), step, np.float32)} for step in range(20)]
        outputs = run(world, pipeline(world.size, 2), f"pipeline {number}", feeds)
        for step, actual in outputs.items():
            np.testing.assert_array_equal(actual["y"], feeds[step]["x"] * 2**world.size)


def microbatches(world: MpiWorld) -> None:
    plans = train("1f1b", 4, 1, False, 2)
    rng = np.random.default_rng(3)
    feeds = [
        {
            "x": rng.normal(size=(ROWS * 4, WIDTH)).astype(np.float32) / 4,
            "scale": np.float32(0.4),
        }
        for _ in range(STEPS)
    ]
    runtime, outputs = open_runtime(world, plans, "microbatches")
    before = runtime.variables()
    for fed in feeds:
        runtime.feed({name: fed[name] for name in runtime.input_names})
    runtime.run(STEPS)
    runtime.close()
    comm = world.comm
    shared = {name: value for each in comm.allgather(before) for name, value in each.items()}
    w0, w1 = shared["w0"], shared["w1"]
    for step, fed in enumerate(feeds):
        wanted = train_reference(fed, w0, w1)
        w0, w1 = wanted["w0"], wanted["w1"]
        for name, key in (("y_0", "y"), ("dw0_0", "dw0"), ("dw1_0", "dw1")):
            if name in outputs.get(step, {}):
                np.testing.assert_allclose(outputs[step][name], wanted[key], rtol=2e-4, atol=1e-5)


def failure(world: MpiWorld) -> None:
    """A kernel of rank 1 fails; everybody hears of it, and the next run is not disturbed."""
    registry._TABLE.update(TEST_OPS)
    runtime, _ = open_runtime(world, failing(world.size), "failure")
    x = np.ones(3, np.float32)
    for _ in range(3):
        runtime.feed({"x": x})
    with pytest.raises(ExecutionError, match="boom"):
        runtime.run(3)
    runtime.close()
    collectives(world)


def late(world: MpiWorld) -> None:
    """Only rank 0 is told to run; it names the others, which hear of it."""
    runtime, _ = open_runtime(world, data_parallel(world.size), "late", deadline=1.0)
    if world.rank == 0:
        runtime.feed({"x": np.ones((6, 4), np.float32)})
        with pytest.raises(DeadlineError, match=r"rank 1 was not told to run|not answer"):
            runtime.run(1)
    else:
        link = runtime._link
        with link.changed:  # not in MPI, which would not leave a core to rank 0
            assert link.changed.wait_for(lambda: link.failure is not None, 60)
        with pytest.raises(AbortedError, match="rank 0 failed"):
            runtime.run(0)
    runtime.close()


def blocked(world: MpiWorld) -> None:
    """A kernel of rank 1 does not end; everybody hears from the watchdogs whose it is."""
    registry._TABLE.update(TEST_OPS)
    runtime_module.LEAVE_SECONDS = 0.2
    GATES[0] = Gate()
    plans = with_op("test_block", world.size, 1, {"step": 1, "gate": 0})
    runtime, _ = open_runtime(world, plans, "blocked", deadline=1.0)
    for _ in range(3):
        runtime.feed({"x": np.ones(3, np.float32)})
    with pytest.raises(PlanCompilerError) as caught:
        runtime.run(3)
    assert isinstance(caught.value, (DeadlineError, AbortedError))
    assert "rank 1 has been in 'the_op' (family 1, step 1) for" in str(caught.value)
    GATES[0].opened.set()
    runtime.close()


def damaged(world: MpiWorld) -> None:
    """What is no frame of rank 1's ends a run, and not the one after it."""
    runtime, _ = open_runtime(world, data_parallel(world.size), "damaged", deadline=60)
    world.comm.Barrier()  # else the other rank may still prepare, and fail there
    if world.rank == 1:
        world.comm.Send(bytearray(20), dest=0, tag=world.tag("damaged"))
    link = runtime._link
    with link.changed:
        assert link.changed.wait_for(lambda: link.failure is not None, 60)
    with pytest.raises(PlanCompilerError, match="was damaged, repeated or lost on its way"):
        runtime.run(0)
    runtime.close()
    collectives(world)


CASES: dict[str, Callable[[MpiWorld], None]] = {
    each.__name__: each
    for each in (collectives, pipelines, microbatches, failure, late, blocked, damaged)
}


def main(case: str) -> None:
    world = MpiWorld()
    try:
        CASES[case](world)
        print(f"rank {world.rank} of {world.size} is done", flush=True)
    finally:
        world.close()


if __name__ == "__main__":
    main(sys.argv[1])
