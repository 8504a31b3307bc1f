"""On real CUDA devices: skipped, with the reason, where there are none."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from plancompiler.errors import DeviceError
from plancompiler.executor.cuda.collective import bind_collective
from plancompiler.executor.cuda.device import CudaDevice, device_count
from plancompiler.executor.local_run import LocalWorld
from plancompiler.ir import DType, Reduction
from plancompiler.ir.task import Primitive
from plancompiler.lower.compile import compile_plans
from plancompiler.ops import op_def
from plancompiler.plan.plan import CollectiveSpec
from tests.examples import gpt, mlp
from tests.executor.cuda.jobs import moved
from tests.executor.cuda.test_collective import part
from tests.executor.cuda.test_kernels import BOUNDS, HOST_ONLY
from tests.ops.samples import samples
from tests.ops.sharding import run_dense
from tests.ops.test_kernels import context_of


def _devices():
    try:
        return device_count(), "no CUDA device"
    except DeviceError as error:
        return 0, str(error)


COUNT, REASON = _devices()
pytestmark = pytest.mark.skipif(COUNT == 0, reason=REASON)
several = pytest.mark.skipif(COUNT < 2, reason="needs two CUDA devices")


def losses(job, steps=20):
    plans = compile_plans(job, job.world_size).plans
    with LocalWorld(plans, deadline=120) as world:
        return [float(each["loss"]) for each in world.run(steps)]


@pytest.mark.parametrize("make", [mlp, gpt], ids=["mlp", "gpt"])
def test_one_device_trains_to_the_hosts_losses(make):
    job = make(ranks=1) if make is mlp else make()
    np.testing.assert_allclose(losses(moved(job)), losses(job), rtol=1e-3)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_every_op_gives_the_hosts_results(dtype, tmp_path):
    device = CudaDevice(0)
    for sample in samples(tmp_path, dtype):
        definition = op_def(sample.kind)
        if sample.kind in HOST_ONLY or definition.source:
            continue
        expected = run_dense(sample.kind, sample.inputs, sample.attrs)
        context = context_of(sample)
        context.arrays = device.arrays
        dtypes = [DType.parse(each.dtype) for each in (*sample.inputs, *expected)]
        inputs = [device.arrays.asarray(each) for each in sample.inputs]
        outputs = [device.arrays.zeros(each.shape, each.dtype) for each in expected]
        device.kernel(definition, dtypes)(context, inputs, outputs)
        for found, right in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(
                device.arrays.asnumpy(found).astype(float),
                right.astype(float),
                max(BOUNDS[dtype], 1e-6),
                max(BOUNDS[dtype], 1e-6),
                err_msg=str(sample),
            )


@several
@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_two_devices_train_to_the_hosts_losses(layout):
    job = gpt(**layout)
    np.testing.assert_allclose(losses(moved(job)), losses(job), rtol=1e-3)


def moves(extent, own):
    """Specs with a member's source, target and expected result; sums of members' numbers."""
    whole = np.arange(extent * 3, dtype=np.float32).reshape(-1, 3)
    total = COUNT * whole + sum(range(COUNT))
    mine = part(whole, 0, COUNT, own)
    for axis in (0, 1):
        piece = part(whole, axis, COUNT, own)
        yield CollectiveSpec(Primitive.ALL_GATHER, 0, src_axis=axis), piece, whole, whole
        scatter = CollectiveSpec(Primitive.REDUCE_SCATTER, 0, Reduction.SUM, dst_axis=axis)
        yield scatter, whole + own, piece, part(total, axis, COUNT, own)
    yield CollectiveSpec(Primitive.ALL_REDUCE, 0, Reduction.SUM), whole + own, whole, total
    columns = part(whole, 1, COUNT, own)
    yield CollectiveSpec(Primitive.ALL_TO_ALL, 0, src_axis=0, dst_axis=1), mine, columns, columns


@several
@pytest.mark.parametrize("extra", [0, 1], ids=["even", "uneven"])
def test_nccl_collectives(extra):
    unique_id = CudaDevice(0).unique_id()
    failures = []

    def member(own):
        try:
            device = CudaDevice(own)
            communicator = device.communicator(unique_id, COUNT, own)
            stream, event = device.stream("test"), device.event()
            for spec, source, like, expected in moves(4 * COUNT + extra, own):
                taken = device.arrays.asarray(np.array(source, order="C"))
                target = device.arrays.zeros(like.shape, np.float32)
                device.arrays.cuda.Device(own).synchronize()
                values = [((taken,), (target,))]
                work = bind_collective(
                    device, communicator, stream, spec, own, COUNT, values, DType.FLOAT32
                )
                device.launch(stream, lambda work=work: work(0))
                device.record(event, stream)
                device.synchronize(event)
                found = device.arrays.asnumpy(target)
                np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=str(spec))
            communicator.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=member, args=(own,)) for own in range(COUNT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
