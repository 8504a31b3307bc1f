"""What kernels pass between ranks that share no memory: the same results as on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.executor.comm.messages import MessageLink
from plancompiler.executor.runtime import Runtime
from plancompiler.forecasting.counted_wire import Wire, WireEnd
from plancompiler.lower.compile import compile_plans
from tests.integration import test_experts as experts
from tests.integration import test_ring_attention as rings

ALONE = pc.Placement("cpu", [0])
STEPS = 3  # pieces and slots are used again


def outputs_of(job: pc.Job, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The last step's outputs of ranks as threads on a wire of messages."""
    plans, wire = compile_plans(job, job.world_size).plans, Wire()
    outputs: dict[str, np.ndarray] = {}

    def run(rank: int) -> None:
        runtime = Runtime(
            plans[rank],
            MessageLink(rank, WireEnd(rank, wire)),
            on_outputs=lambda step, name, value: outputs.update({name: value}),
        )
        try:
            runtime.prepare()
            for _ in range(STEPS):
                runtime.feed({name: feeds[name] for name in runtime.input_names})
                runtime.run(1)
        finally:
            runtime.close()

    try:
        with ThreadPoolExecutor(len(plans)) as pool:
            list(pool.map(run, plans))
    finally:
        wire.close()
    return outputs


def test_keys_and_values_go_round():
    whole = rings.alone()
    outputs = outputs_of(rings.job_of_all(), rings.feeds_of())
    rings.assert_same(rings.named(outputs), whole[1::2], rings.IN_JOBS)


def test_rows_go_to_experts():
    rows = experts.TOKENS * experts.CHOICES
    alone, _ = spawn(experts.run_eagerly, 1, ALONE, ["B"], rows, 1)[0]
    outputs = outputs_of(experts.job_of(int(experts.WANTED.max())), experts.FEEDS)
    experts.assert_same([outputs[name] for name in "yabcd"], alone)
