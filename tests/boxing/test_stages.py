"""Boxing between pipeline stages: each part of it is work of the stage whose ranks do it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.executor.local_run import LocalWorld
from plancompiler.ir.pipeline import SCHEDULES
from plancompiler.lower.compile import compile_plans
from plancompiler.passes import Config
from tests.dense import run_dense


def two_stages() -> pc.Job:
    """The first stage ends with partial values that are reduced before they move on."""
    first = pc.Placement("cpu", [[0, 1, 2], [3, 4, 5]])
    second = pc.Placement("cpu", [6, 7])
    with pc.job("partial") as job:
        x = pc.input("x", (8, 6), "float32", first).redistribute(sbp=["S(0)", "P(prod)"])
        w = pc.nn.Parameter((6,), init="ones", name="w").place(second).value
        y = pc.tanh(x.redistribute(second, ["S(1)"]) * w)
        loss = y.mean()
        pc.optim.SGD(0.5).minimize(loss)
        pc.output("loss", loss)
        pc.output("y", y)
    return job


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_comes_before_an_exchange_is_work_of_the_first_stage(schedule: str) -> None:
    job = replace(two_stages(), config=Config(microbatches=4, schedule=schedule))
    compilation = compile_plans(job, 8, "rank_per_iter")
    assert compile_plans(job, 8, "naive").digest == compilation.digest
    segments = compilation.graph.pipeline.segments
    where = {
        str(family.transfer.primitive): (str(segments[family.segment]), family.placement.rank_list)
        for family in compilation.graph.families
        if family.transfer is not None and family.per_microbatch
    }
    assert where["all_reduce"] == ("forward 0", (0, 1, 2, 3, 4, 5))
    assert where["exchange"] == ("forward 1", (6, 7))
    random = np.random.default_rng(1)
    feeds = [{"x": random.normal(size=(8, 6)).astype(np.float32)} for _ in range(3)]
    with LocalWorld(compilation.plans) as world:
        for given, dense in zip(feeds, run_dense(job, 3, feeds), strict=True):
            outputs = world.step(given)
            for name, value in dense.items():
                np.testing.assert_allclose(outputs[name], value, rtol=1e-5, err_msg=name)
