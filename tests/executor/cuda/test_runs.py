"""Plans for devices, run on devices that use every freedom that streams and events leave."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from plancompiler.executor.local_run import LocalWorld
from plancompiler.lower.compile import compile_plans
from tests.examples import gpt, mlp
from tests.executor.cuda.devices import LateDevice, ThreadedDevice, World
from tests.executor.cuda.jobs import moved, rotated

STEPS = 4


def losses(plans, devices=None):
    with LocalWorld(plans, devices=devices, deadline=60) as world:
        return [float(each["loss"]) for each in world.run(STEPS)]


@cache
def on_hosts(make, **layout):
    """The job, and the losses that it has on hosts."""
    job = make(**layout)
    return job, losses(compile_plans(job, job.world_size).plans)


@cache
def on_one_device(make, **layout):
    """The job's plan for a device."""
    return compile_plans(moved(on_hosts(make, **layout)[0]), 1).plans


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("make", [mlp, gpt], ids=["mlp", "gpt"])
def test_one_device_trains_to_the_hosts_losses(make, seed):
    layout = {"ranks": 1} if make is mlp else {}
    on_devices = losses(on_one_device(make, **layout), {0: LateDevice(seed)})
    np.testing.assert_allclose(on_devices, on_hosts(make, **layout)[1], rtol=1e-3)


@pytest.mark.parametrize("seed", range(2))
def test_micro_batches_on_one_device(seed):
    on_devices = losses(on_one_device(gpt, microbatches=4), {0: LateDevice(seed)})
    np.testing.assert_allclose(on_devices, on_hosts(gpt, microbatches=4)[1], rtol=1e-3)


def devices_of(ranks):
    world = World()
    return {rank: ThreadedDevice(world) for rank in ranks}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2},
        {"tp": 2},
        {"dp": 3, "batch": 7},
        {"dp": 2, "zero": 3},
        {"pp": 2},
        {"pp": 2, "microbatches": 4, "schedule": "1f1b"},
        {"pp": 2, "dp": 2, "microbatches": 2, "schedule": "zero_bubble"},
        {"tp": 2, "pp": 2, "microbatches": 4, "schedule": "gpipe"},
    ],
    ids=str,
)
def test_several_devices_train_to_the_hosts_losses(layout):
    job, wanted = on_hosts(gpt, **layout)
    devices = devices_of(range(job.world_size))
    on_devices = losses(compile_plans(moved(job), job.world_size).plans, devices)
    np.testing.assert_allclose(on_devices, wanted, rtol=1e-3)
    for device in devices.values():
        device.close()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_devices_exchange_values(microbatches):
    job = rotated(3, microbatches=microbatches)
    feeds = [{"x": np.full((8, 4), step, np.float32)} for step in range(STEPS)]

    def losses(job, devices=None):
        plans = compile_plans(job, job.world_size).plans
        with LocalWorld(plans, devices=devices, deadline=60) as world:
            return [float(world.step(each)["loss"]) for each in feeds]

    devices = devices_of(range(3))
    np.testing.assert_allclose(losses(moved(job), devices), losses(job), rtol=1e-3)
    for device in devices.values():
        device.close()


@pytest.mark.parametrize("on_device", [{0}, {1}], ids=["first stage", "last stage"])
@pytest.mark.parametrize(
    "layout", [{"pp": 2}, {"pp": 2, "microbatches": 4, "schedule": "1f1b"}], ids=str
)
def test_devices_and_hosts_exchange_values(layout, on_device):
    job, wanted = on_hosts(gpt, **layout)
    mixed = moved(job, lambda rank: "cuda" if rank in on_device else "cpu")
    plans = compile_plans(mixed, 2).plans
    on_devices = losses(plans, {rank: LateDevice(3) for rank in on_device})
    np.testing.assert_allclose(on_devices, wanted, rtol=1e-3)
