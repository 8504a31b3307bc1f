"""Memory of a device's rank: variables there and back, and host memory that is pinned meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from plancompiler.executor.cuda import memory
from plancompiler.executor.local_run import LocalWorld
from plancompiler.lower.compile import compile_plans
from tests.examples import gpt
from tests.executor.cuda.devices import LateDevice
from tests.executor.cuda.jobs import moved


@pytest.mark.parametrize("passage", [64, 100, memory.PASSAGE_BYTES])
def test_variables_go_there_and_back_in_pieces(passage, monkeypatch):
    monkeypatch.setattr(memory, "PASSAGE_BYTES", passage)
    plans, on_host = (compile_plans(job, 1).plans for job in (moved(gpt()), gpt()))
    with (
        LocalWorld(plans, devices={0: LateDevice()}) as opened,
        LocalWorld(on_host) as expected,
    ):
        values = expected.variables(0)
        read = opened.variables(0)
        assert read.keys() == values.keys()
        for name, value in values.items():
            np.testing.assert_array_equal(read[name], value, err_msg=name)
            assert read[name].dtype == value.dtype


def test_memory_that_others_read_is_pinned_while_the_rank_is_there():
    mixed = moved(gpt(pp=2), lambda rank: "cuda" if rank == 0 else "cpu")
    plans = compile_plans(mixed, 2).plans
    staging = [block for block in plans[0].blocks if block.device == "cpu"]
    assert staging
    device = LateDevice()
    with LocalWorld(plans, devices={0: device}, deadline=60) as world:
        assert device.pins == len(staging)
        world.run(1)
    assert device.pins == 0
