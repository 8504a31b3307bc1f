"""Variables of a plan in memory that is not the plan's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from plancompiler.errors import UsageError
from plancompiler.executor.comm.local import LocalHub
from plancompiler.executor.runtime import Runtime
from plancompiler.ir import Reduction
from plancompiler.ir.task import Primitive
from tests.executor.plans import Sketch, chain, data_parallel


def published():
    """Both ranks read each other's variable `w`, and nobody else's `v`."""
    sketch, ranks = Sketch(2), range(2)
    ws = {rank: sketch.variable(rank, 0, "w", (3,)) for rank in ranks}
    vs = {rank: sketch.variable(rank, 1, "v", (3,)) for rank in ranks}
    totals = sketch.collective(
        ranks, 2, Primitive.ALL_REDUCE, ws, dict.fromkeys(ranks, (3,)), reduction=Reduction.SUM
    )
    for rank in ranks:
        (y,) = sketch.compute(rank, 3, "add", [vs[rank], totals[rank]], [((3,), "float32")])
        sketch.output(rank, 4, f"y{rank}", y)
        sketch.step_end(rank, 5)
    return sketch.build()


class Ranks:
    """All ranks of plans, as threads."""

    def __init__(self, plans, stack):
        hub = LocalHub()
        self.outputs = {}
        self.runtimes = [
            Runtime(plan, hub.link(rank), on_outputs=self.collect) for rank, plan in plans.items()
        ]
        self.pool = stack.enter_context(ThreadPoolExecutor(len(plans)))
        for runtime in self.runtimes:
            stack.callback(runtime.close)
        self.together(lambda runtime: runtime.prepare())

    def collect(self, step, name, value):
        self.outputs[name] = value

    def together(self, action):
        return list(self.pool.map(action, self.runtimes))

    def step(self, feeds):
        def run(runtime):
            runtime.feed(feeds)
            runtime.run(1)

        self.together(run)
        return dict(self.outputs)


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def test_steps_read_and_change_the_array(stack):
    ranks = Ranks(data_parallel(2), stack)
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    total = x.sum(0)
    ranks.step({"x": x})
    own = [runtime.shards()["w"] for runtime in ranks.runtimes]
    arrays = [np.full(4, 100.0 * (rank + 1), np.float32) for rank in range(2)]
    for runtime, array in zip(ranks.runtimes, arrays, strict=True):
        assert set(runtime.movable) == {"w"}
        runtime.place({"w": array})
    for step in (1, 2):
        outputs = ranks.step({"x": x})
        for rank, array in enumerate(arrays):
            np.testing.assert_array_equal(array, 100.0 * (rank + 1) + step * total)
            np.testing.assert_array_equal(outputs[f"w{rank}"], array)
    for each in own:
        np.testing.assert_array_equal(each, total)
    # Back in its own memory, a variable has what it had there.
    for runtime in ranks.runtimes:
        runtime.place({"w": None})
    ranks.step({"x": x})
    for each, runtime in zip(own, ranks.runtimes, strict=True):
        np.testing.assert_array_equal(each, 2 * total)
        np.testing.assert_array_equal(runtime.variables()["w"], each)


def test_several_slots_and_one_stream_more(stack):
    """`x` is read ahead on a stream of its own; `w` moves between any two steps."""
    ranks = Ranks(chain(2), stack)
    rng = np.random.default_rng(0)
    for _ in range(5):
        w, x = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 2), (3, 4)))
        ranks.runtimes[0].place({"w": w})
        np.testing.assert_allclose(ranks.step({"x": x})["y"], np.maximum(x @ w, 0), 1e-6)


def test_what_peers_read_stays(stack):
    ranks = Ranks(published(), stack)
    array = np.array([1, 2, 3], np.float32)
    for runtime in ranks.runtimes:
        assert set(runtime.movable) == {"v"}
        with pytest.raises(UsageError, match="others read them"):
            runtime.place({"w": array})
        runtime.place({"v": array})
    outputs = ranks.step({})
    np.testing.assert_array_equal(outputs["y0"], [3, 4, 5])
    np.testing.assert_array_equal(outputs["y1"], [3, 4, 5])


def test_only_a_prepared_runtime_has_places():
    runtime = Runtime(chain()[0], LocalHub().link(0))
    with pytest.raises(UsageError, match="prepared"):
        runtime.place({})
    runtime.prepare()
    runtime.close()
    with pytest.raises(UsageError, match="not closed"):
        _ = runtime.movable
