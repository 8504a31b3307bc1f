"""On real CUDA devices: skipped, with the reason, where there are none."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from plancompiler.eager.world import current_world
from plancompiler.errors import TransportError
from plancompiler.executor.cuda import device as device_module
from plancompiler.executor.cuda import memory
from plancompiler.executor.cuda.collective import bind_collective
from plancompiler.executor.cuda.device import CudaDevice
from plancompiler.executor.cuda.interface import CallKind, abort_all, grouped
from plancompiler.executor.cuda.kernels.products import gemm_of, product
from plancompiler.executor.local_run import LocalWorld
from plancompiler.executor.trace import Recording
from plancompiler.ir import DType, Reduction
from plancompiler.ir.task import Primitive
from plancompiler.lower.compile import compile_plans
from plancompiler.ops import op_def
from plancompiler.ops.registry import KernelContext
from plancompiler.plan.plan import CollectiveSpec
from tests.examples import gpt, mlp
from tests.executor.cuda.jobs import moved
from tests.executor.cuda.processes import in_processes
from tests.executor.cuda.real import COUNT, on_real_devices, several, several_devices
from tests.executor.cuda.test_collective import part
from tests.executor.cuda.test_kernels import BOUNDS, HOST_ONLY
from tests.ops.samples import samples
from tests.ops.samples_linalg import FREE_SIGNS
from tests.ops.sharding import run_dense
from tests.ops.test_kernels import context_of

pytestmark = on_real_devices
RANKS = 2


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
    device, wrong = CudaDevice(0), []
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
        bound = max(BOUNDS[dtype], 1e-6)
        try:
            with np.errstate(all="ignore"):
                device.kernel(definition, dtypes)(context, inputs, outputs)
            for actual, right in zip(outputs, expected, strict=True):
                got = device.arrays.asnumpy(actual)
                if sample.kind in FREE_SIGNS:
                    got, right = np.abs(got), np.abs(right)
                np.testing.assert_allclose(got.astype(float), right.astype(float), bound, bound)
        except Exception as error:  # one run on a GPU tells of all kinds
            wrong.append(f"{sample}: {error!r}")
    assert not wrong, "\n".join(wrong)


@several_devices
@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_two_devices_train_to_the_hosts_losses(layout):
    job = gpt(**layout)
    np.testing.assert_allclose(losses(moved(job)), losses(job), rtol=1e-3)


def moves(extent, own):
    """Specs with a member's source, target and expected result; sums of members' numbers."""
    whole = np.arange(extent * 3, dtype=np.float32).reshape(-1, 3)
    total = RANKS * whole + sum(range(RANKS))
    mine = part(whole, 0, RANKS, own)
    for axis in (0, 1):
        piece = part(whole, axis, RANKS, own)
        yield CollectiveSpec(Primitive.ALL_GATHER, 0, src_axis=axis), piece, whole, whole
        scatter = CollectiveSpec(Primitive.REDUCE_SCATTER, 0, Reduction.SUM, dst_axis=axis)
        yield scatter, whole + own, piece, part(total, axis, RANKS, own)
    yield CollectiveSpec(Primitive.ALL_REDUCE, 0, Reduction.SUM), whole + own, whole, total
    columns = part(whole, 1, RANKS, own)
    yield CollectiveSpec(Primitive.ALL_TO_ALL, 0, src_axis=0, dst_axis=1), mine, columns, columns


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_halves_train(precision):
    """In halves, with loss scaling for float16: losses fall as on the host, in fewer digits."""
    if precision == "bfloat16":
        pytest.importorskip("ml_dtypes")
    job = gpt(precision=precision)
    np.testing.assert_allclose(losses(moved(job)), losses(job), rtol=3e-2)


def test_a_timeline_holds_the_devices_times():
    plans = compile_plans(moved(gpt()), 1).plans
    with Recording() as recording:
        with LocalWorld(plans, deadline=120, record=recording.folder) as world:
            world.run(6)
        (timeline,) = recording.timelines()
    assert timeline.begins.all()
    assert (timeline.ends >= timeline.begins).all()
    for stream in {task.stream for task in timeline.tasks}:
        spans = timeline.spans(lambda task, stream=stream: task.stream == stream)
        # Events are read to half a microsecond.
        assert (spans[1:, 0] >= spans[:-1, 1] - 1000).all()


def test_variables_go_to_the_device_and_back(monkeypatch):
    """In several pieces, and the zeros of an allocation do not come later than they."""
    monkeypatch.setattr(memory, "PASSAGE_BYTES", 256)
    plans = compile_plans(moved(gpt()), 1).plans
    on_host = compile_plans(gpt(), 1).plans
    with LocalWorld(plans) as opened, LocalWorld(on_host) as expected:
        for name, value in expected.variables(0).items():
            np.testing.assert_array_equal(opened.variables(0)[name], value, err_msg=name)


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32], ids=str)
def test_stacks_of_matrices(dtype):
    device = CudaDevice(0)
    if dtype is DType.BFLOAT16:
        pytest.importorskip("ml_dtypes")
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((3, 33, 33)).astype(dtype.numpy) for _ in range(2))
    context = KernelContext({}, (), (), (), (), arrays=device.arrays)
    for left in (lambda x: x, lambda x: x.swapaxes(1, 2)):
        given = left(device.arrays.asarray(a)), device.arrays.asarray(b)
        assert gemm_of(*given, device.arrays.empty_like(given[1])) is not None
        actual = device.arrays.asnumpy(product(context, *given)).astype(np.float32)
        right = np.matmul(left(a).astype(np.float32), b.astype(np.float32))
        bound = 1e-5 if dtype is DType.FLOAT32 else 4e-2
        np.testing.assert_allclose(actual, right, bound, bound)


@several
@pytest.mark.processes
@pytest.mark.parametrize("extra", [0, 1], ids=["even", "uneven"])
def test_nccl_collectives(extra, tmp_path):
    unique_id = CudaDevice(0).unique_id()
    assert in_processes(tmp_path, collectives_of, RANKS, unique_id, extra) == [None] * RANKS


def collectives_of(unique_id, extra):
    """Compares what this member gets with what it should."""
    own = current_world().rank
    device = CudaDevice(own % COUNT)
    communicator = device.communicator(unique_id, RANKS, own)
    stream, event = device.stream("test"), device.event()
    for spec, source, like, expected in moves(4 * RANKS + extra, own):
        taken = device.arrays.asarray(np.array(source, order="C"))
        target = device.arrays.zeros(like.shape, np.float32)
        device.settle()
        values = [((taken,), (target,))]
        work = bind_collective(
            device, communicator, stream, spec, own, RANKS, values, DType.FLOAT32
        )
        device.launch(stream, lambda work=work: work(0))
        device.record(event, stream)
        device.synchronize(event)
        actual = device.arrays.asnumpy(target)
        np.testing.assert_allclose(actual, expected, rtol=1e-6, err_msg=str(spec))
    communicator.close()


# --- communicators that end -----------------------------------------------------------------------


class Member:
    """One of two members of a communicator, which has reduced something already: all kernels are
    loaded. The two are threads, and may share a device as long as they load no others."""

    def __init__(self, own, unique_id):
        self.own = own
        self.device = CudaDevice(own % COUNT)
        self.communicator = self.device.communicator(unique_id, RANKS, own)
        self.stream, self.event = self.device.stream("test"), self.device.event()
        self.array = self.device.arrays.asarray(np.ones(1000, np.float32))
        self.device.settle()
        self.reduce()
        self.wait()

    def reduce(self):
        def call():
            self.communicator.call(
                CallKind.ALL_REDUCE, self.stream, self.array, self.array, Reduction.SUM
            )

        self.device.launch(self.stream, call)
        self.device.record(self.event, self.stream)

    def wait(self):
        self.device.synchronize(self.event)


def of_members(body):
    """What a function gives of each member."""
    unique_id = CudaDevice(0).unique_id()
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(lambda own: body(Member(own, unique_id)), range(RANKS)))


@several
def test_an_abort_ends_what_the_device_waits_for():
    over = threading.Event()

    def body(member):
        if member.own == 1:
            over.wait(30)
            member.communicator.abort()
            return True
        member.reduce()
        assert not member.device.has_come(member.event)
        left = abort_all([member.communicator])
        member.wait()
        over.set()
        return left == []

    assert of_members(body) == [True, True]


@several
def test_an_abort_frees_a_host_that_nccl_holds(monkeypatch):
    """The first send to a member waits on the host until that one receives, if it ever does."""
    monkeypatch.setattr(device_module, "ABORT_SECONDS", 0.5)
    over = threading.Event()

    def body(member):
        communicator = member.communicator
        if member.own == 1:
            over.wait(30)
            communicator.abort()
            return True
        timer = threading.Timer(0.5, communicator.abort)
        timer.start()
        try:
            with grouped(communicator):
                communicator.call(CallKind.SEND, member.stream, member.array, None, peer=1)
            member.device.record(member.event, member.stream)
            member.wait()  # where NCCL did not wait for the other one
        except TransportError:
            pass
        timer.join()
        over.set()
        return True

    assert of_members(body) == [True, True]


@several
def test_members_close_at_different_times():
    first_closed = threading.Event()

    def body(member):
        if member.own == 1:
            assert first_closed.wait(30)
        member.communicator.close()
        first_closed.set()
        return float(member.array[0].get())

    assert of_members(body) == [2.0, 2.0]
