"""Memory and traffic of forecasts are what the runtime takes and sends, to the byte."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import plancompiler as pc
from plancompiler.costs.choice import FOLDER
from plancompiler.executor.local_run import LocalWorld
from plancompiler.forecasting import forecast
from plancompiler.forecasting.counted_wire import CountedWorld
from plancompiler.forecasting.measured_run import held_arrays
from plancompiler.ir import Job
from plancompiler.lower.compile import compile_plans
from tests.examples import gpt, mlp
from tests.passes.worlds import configured, mesh, tower_job

JOBS = {
    "mlp dp": lambda: mlp(layout="dp", ranks=2),
    "mlp tp": lambda: mlp(layout="tp", ranks=3),
    "gpt": lambda: gpt(dp=1),
    "gpt dp tp": lambda: gpt(dp=2, tp=2),
    "gpt three, zero 3": lambda: gpt(dp=3, zero=3),
    "gpt zero 1": lambda: gpt(dp=2, zero=1),
    "gpt pipeline": lambda: gpt(dp=2, pp=2, microbatches=4, schedule="1f1b"),
    "gpt interleaved": lambda: gpt(pp=2, layers=4, microbatches=2, schedule="interleaved"),
    "gpt zero bubble": lambda: gpt(pp=2, microbatches=2, schedule="zero_bubble"),
    "gpt sequence parallel": lambda: gpt(dp=1, tp=2, sequence_parallel=1),
    "gpt recomputed": lambda: gpt(dp=2, recompute="auto"),
    "gpt float16": lambda: gpt(dp=2, precision="float16"),
    "gpt bfloat16, three": lambda: gpt(dp=3, precision="bfloat16"),
    "ring": lambda: ring_job(12),
    "ring of uneven pieces": lambda: ring_job(13),
    "large reductions": lambda: configured(tower_job(mesh(3), layers=2, dim=200)),
    "large reductions of two": lambda: configured(
        tower_job(mesh(2), layers=1, dim=1500, batch=2), fuse_bytes="auto"
    ),
}


def ring_job(extent: int) -> Job:
    """Attention along a sequence that three ranks share, and its gradients."""
    placement = mesh(3)
    with pc.job("ring") as job:
        parts = [
            pc.normal((1, 2, extent, 4), placement=placement).redistribute(sbp="S(2)")
            for _ in range(3)
        ]
        y = pc.scaled_dot_product_attention(*parts, True, 0.7)
        one, two, three = pc.gradients((y * y).sum(), parts)
        pc.output("sum", (one * two * three).sum())
    return job


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generic machine with a node for each rank."""
    path = tmp_path_factory.mktemp("machine") / "apart.toml"
    figure = '{{ value = {}, source = "a test" }}'.format
    text = (FOLDER / "cpu-generic.toml").read_text() + f"devices = {figure(1)}\n[network]\n"
    text += f"latency_seconds = {figure(10e-6)}\nbytes_per_second = {figure(1e10)}\n"
    path.write_text(text + f"oversubscription = {figure(1.0)}\n")
    return path


def total(forecasted: object) -> int:
    return sum(each.count * each.memory.total for each in forecasted.classes)  # type: ignore[attr-defined]


QUICK = ("mlp tp", "ring of uneven pieces", "large reductions of two")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in JOBS]
)
def test_ranks_on_hosts_of_their_own(name: str, apart: Path) -> None:
    """Receive buffers included; every byte of payload is counted where it is handed over."""
    job: Job = JOBS[name]()
    expected = forecast(job, apart)
    plans = compile_plans(expected.job, job.world_size, "rank_per_iter").plans
    tracemalloc.start()
    try:
        before = held_arrays()
        with CountedWorld(plans) as world:
            assert total(expected) == held_arrays() - before
            tracemalloc.stop()  # which makes steps slow
            payload = world.payload_of_step()
            assert world.payload_of_step() == payload
    finally:
        tracemalloc.stop()
    received: Counter[tuple[int, int]] = Counter()
    for each, one in expected.received():
        if len(each.ranks) == 1:
            received[one.peer, each.rank] += round(one.nbytes)
    assert expected.traffic_bytes == sum(payload.values())
    assert expected.traffic_by_link.keys() <= {"between nodes"}
    alone = {each.rank for each in expected.rank_classes.classes if len(each.ranks) == 1}
    assert received == Counter({pair: n for pair, n in payload.items() if pair[1] in alone})
    for each in expected.classes:
        assert each.received_bytes == sum(n for (_, to), n in payload.items() if to == each.rank)


@pytest.mark.parametrize(
    "name",
    [
        "mlp dp",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gpt dp tp", "gpt pipeline", "gpt bfloat16, three")
        ),
    ],
)
def test_ranks_of_one_host(name: str) -> None:
    job: Job = JOBS[name]()
    expected = forecast(job)
    plans = compile_plans(expected.job, job.world_size, "rank_per_iter").plans
    tracemalloc.start()
    try:
        before = held_arrays()
        with LocalWorld(plans):
            assert total(expected) == held_arrays() - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_that_ranks_read_together_leave_nothing_behind(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"w": np.ones((40, 50), np.float32)}, path)
    with pc.job("stored") as job:
        weight = pc.nn.Parameter((40, 50), "float32", pc.data.Stored(path, "w"))
        pc.output("sum", (weight.place(mesh(ranks)).value * 2.0).sum())
    expected = forecast(job)
    tracemalloc.start()
    try:
        before = held_arrays()
        with LocalWorld(compile_plans(job, ranks).plans):
            assert total(expected) == held_arrays() - before
    finally:
        tracemalloc.stop()
