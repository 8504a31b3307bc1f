"""Launching: event dependencies, the order of one thread, run-ahead, how a run ends badly."""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from itertools import count

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import DeadlineError, DeviceError, NonFiniteError, PlacementError
from plancompiler.executor.comm.local import LocalHub
from plancompiler.executor.comm.publication import communicator_keys
from plancompiler.executor.cuda.completions import Completions
from plancompiler.executor.cuda.device import load_cupy, local_device
from plancompiler.executor.cuda.event_dependencies import DependentTask, EventDependencies
from plancompiler.executor.cuda.order import Channel, launch_order
from plancompiler.executor.cuda.task import RUN_AHEAD
from plancompiler.executor.runtime import Runtime
from plancompiler.ir.task import TaskKind, unpack_id
from plancompiler.lower.compile import compile_plans
from plancompiler.plan.plan import CollectiveSpec
from tests.examples import gpt, mlp
from tests.executor.cuda.devices import LateDevice
from tests.executor.cuda.jobs import moved, rotated


def dependencies(tasks, counts):
    numbers = count()
    return EventDependencies.of(tasks, counts, lambda: next(numbers))


def test_a_reader_on_another_stream_waits_for_the_writer():
    actual = dependencies([DependentTask("a", (), (1,)), DependentTask("b", (1,), ())], {1: 1})
    assert actual.before(0, 0) == []
    made = actual.after(0, 0)
    assert actual.before(1, 0) == [made]


def test_a_writer_waits_for_the_last_readers_of_the_slot_it_fills():
    tasks = [DependentTask("a", (), (1,)), DependentTask("b", (1,), ())]
    actual = dependencies(tasks, {1: 2})
    read = []
    for version in range(2):
        assert actual.before(0, version) == []
        actual.after(0, version)
        actual.before(1, version)
        read.append(actual.after(1, version))
    assert actual.before(0, 2) == [read[0]]


def test_one_stream_needs_no_events():
    actual = dependencies([DependentTask("a", (), (1,)), DependentTask("a", (1,), ())], {1: 1})
    assert not actual.concerns(0)
    assert actual.after(0, 0) is None
    assert actual.before(1, 0) == []


def test_what_an_earlier_wait_implies_is_left_out():
    tasks = [
        DependentTask("a", (), (1,)),
        DependentTask("b", (1,), (2,)),
        DependentTask("c", (2,), ()),
        DependentTask("c", (1,), ()),
    ]
    actual = dependencies(tasks, {1: 1, 2: 1})
    events = []
    for task in range(3):
        events.append(actual.before(task, 0))
        actual.after(task, 0)
    assert [len(each) for each in events] == [0, 1, 1]
    # Stream c waited for b, which had waited for a.
    assert actual.before(3, 0) == []


def test_a_launch_order_is_plan_order_with_sends():
    plans = compile_plans(moved(gpt(pp=2)), 2).plans
    sender, receiver = launch_order(plans[0]), launch_order(plans[1])
    (send,) = [each for each in sender.sends.values() if each.channel == Channel(0, 1, -1)]
    (received,) = [task for task, each in receiver.receives.items() if each == send.channel]
    assert send.task == received
    places = {task.id: place for place, task in enumerate(sender.plan.tasks)}
    for register in sender.plan.registers:
        for consumer in register.consumers:
            assert places[register.producer] < places[consumer]
    families = [unpack_id(task.id).family for task in sender.plan.tasks]
    assert families == sorted(families)
    assert not sender.plan.remote_registers


def first_calls(plan):
    """Who is in what a rank calls of NCCL, in the order of first calls."""
    order, groups = launch_order(plan), communicator_keys(plan)
    calls = {}
    for task in order.plan.tasks:
        if isinstance(task.spec, CollectiveSpec):
            group = groups[task.spec.communicator]
            calls[group] = group[0]
        elif task.id in order.sends or task.id in order.receives:
            send = order.sends.get(task.id)
            channel = order.receives[task.id] if send is None else send.channel
            calls[channel] = channel[:2]
    return deque(calls.items())


JOBS = {
    "rows go round": partial(rotated, 4),
    "rows change places": partial(rotated, 2),
    "rows go round in micro-batches": partial(rotated, 3, microbatches=2),
    "grid": partial(gpt, dp=2, tp=2),
    "stages": partial(gpt, pp=2, tp=2, microbatches=4, schedule="1f1b"),
    "stages of two ranks": partial(gpt, pp=2, dp=2, microbatches=2, schedule="zero_bubble"),
}


@pytest.mark.parametrize("name", JOBS)
def test_hosts_that_nccl_holds_do_not_wait_in_a_circle(name):
    """NCCL may hold the host in a first call until all members make it."""
    job = moved(JOBS[name]())
    plans = compile_plans(job, job.world_size).plans
    waiting = {rank: first_calls(plan) for rank, plan in plans.items()}
    while any(waiting.values()):
        heads = {rank: calls[0] for rank, calls in waiting.items() if calls}
        met = [call for call in heads.values() if all(heads.get(each) == call for each in call[1])]
        assert met, f"a circle: {heads}"
        for rank in met[0][1]:
            waiting[rank].popleft()


def test_with_micro_batches_each_value_has_a_channel():
    plans = compile_plans(moved(gpt(pp=2, microbatches=2, schedule="1f1b")), 2).plans
    assert launch_order(plans[0]).channels == launch_order(plans[1]).channels
    assert all(each.family >= 0 for each in launch_order(plans[0]).channels)


def test_kinds_of_copies_follow_the_devices():
    def kinds(devices):
        plans = compile_plans(moved(gpt(pp=2), lambda rank: devices[rank]), 2).plans
        copies = (TaskKind.COPY_COMM_NET, TaskKind.COPY_HD, TaskKind.SEND_RECV)
        return [[str(t.kind) for t in plans[r].tasks if t.kind in copies] for r in (0, 1)]

    assert kinds(["cuda", "cuda"]) == [["SendRecv"], ["SendRecv"]]
    assert kinds(["cuda", "cpu"]) == [["CopyHd", "CopyCommNet", "CopyHd"], ["CopyCommNet"]]
    assert kinds(["cpu", "cpu"]) == [["CopyCommNet"], ["CopyCommNet"]]


def test_a_rank_has_one_device():
    with pc.job("two devices") as job:
        x = pc.input("x", (4,), "float32", placement=pc.Placement("cpu", [0]))
        pc.output("y", (x + 1.0).redistribute(pc.Placement("cuda", [0]), "B") * 2.0)
    with pytest.raises(PlacementError, match="rank 0 is on two devices"):
        compile_plans(job, 1)


def runtime(plan, device, **options):
    return Runtime(plan, LocalHub().link(0), device=device, **options)


def test_the_host_runs_ahead_of_the_device_by_a_bounded_number_of_steps():
    plan = compile_plans(moved(mlp(ranks=1)), 1).plans[0]
    ended, ahead = [], []

    class Watched(LateDevice):
        def launch(self, stream, work):
            ahead.append(self.launched_step - len(ended))
            super().launch(stream, work)

    device = Watched()
    device.launched_step = 0
    with runtime(plan, device, on_outputs=lambda step, name, value: None) as run:
        run.prepare()
        completions = run._backend._completions
        step, ended_one = completions.step, completions._step_ended

        def launched(event, number):
            device.launched_step = number + 1
            step(event, number)

        def has_ended():
            ended.append(len(ended))
            ended_one()

        completions.step, completions._step_ended = launched, has_ended
        run.run(8)
    assert len(ended) == 8
    assert max(ahead) <= RUN_AHEAD


def test_outputs_are_those_of_their_step_and_variables_come_back():
    job = mlp(ranks=1)
    plan = compile_plans(job, 1).plans[0]
    moved_plan = compile_plans(moved(job), 1).plans[0]
    seen = {"cpu": {}, "cuda": {}}
    variables = {}
    for one, device in ((plan, None), (moved_plan, LateDevice(5))):
        record = seen[one.device]
        with runtime(
            one, device, on_outputs=lambda s, n, v, r=record: r.setdefault((s, n), v)
        ) as run:
            run.prepare()
            run.run(2)
            run.run(3)
            variables[one.device] = run.variables()
    assert seen["cpu"].keys() == seen["cuda"].keys()
    for key, value in seen["cpu"].items():
        np.testing.assert_allclose(seen["cuda"][key], value, rtol=1e-3, err_msg=str(key))
    for name, value in variables["cpu"].items():
        np.testing.assert_allclose(variables["cuda"][name], value, rtol=1e-2, atol=1e-5)


def not_finite():
    with pc.job("not finite") as job:
        x = pc.input("x", (2,), "float32", placement=pc.Placement("cuda", [0]))
        pc.output("loss", (x / 0.0).sum(), finite=True)
    return compile_plans(job, 1).plans[0]


def test_after_an_output_that_is_not_finite_a_device_can_be_saved():
    with pc.job("roots") as job:
        x = pc.input("x", (2,), "float32", placement=pc.Placement("cuda", [0]))
        w = pc.nn.Parameter((2,), init="ones", name="w").place(pc.Placement("cuda", [0])).value
        pc.optim.SGD(lr=0.5).minimize((x * w).sum())
        pc.output("loss", (x * w).sum() / 0.0)
    with runtime(compile_plans(job, 1).plans[0], LateDevice(3), keep=True) as run:
        run.prepare()
        run.feed({"x": np.ones(2, np.float32)})
        with pytest.raises(NonFiniteError, match="'loss' is not finite in step 0") as caught:
            run.run(1)
        assert "test_order.py" in caught.value.report.source
        assert run.can_be_saved
        (values,), steps = [*run.state()[0].values()], run.state()[1]
        np.testing.assert_array_equal(values, [0.5, 0.5])
        assert steps == 1
        with pytest.raises(NonFiniteError):
            run.run(1)


def test_anomaly_detection_is_refused_on_devices():
    with pytest.raises(DeviceError, match="memory of the host"):
        runtime(not_finite(), LateDevice(), anomaly=True)


def test_an_output_that_is_not_finite_fails_the_run():
    with runtime(not_finite(), LateDevice()) as run:
        run.prepare()
        run.feed({"x": np.ones(2, np.float32)})
        with pytest.raises(NonFiniteError, match="'loss' is not finite in step 0"):
            run.run(1)


def test_a_failing_kernel_names_its_op():
    plan = compile_plans(moved(mlp(ranks=1)), 1).plans[0]

    class Broken(LateDevice):
        def kernel(self, definition, dtypes):
            if definition.kind == "cross_entropy":
                raise DeviceError("no such kernel")
            return super().kernel(definition, dtypes)

    with runtime(plan, Broken()) as run, pytest.raises(DeviceError) as failure:
        run.prepare()
    assert failure.value.report.op is not None


def test_a_device_that_never_ends_a_step():
    device = LateDevice()
    stuck = threading.Event()
    device.synchronize = lambda event: stuck.wait()
    completions = Completions(device, "test", lambda error: None)
    completions.step(device.event(), 7)
    with pytest.raises(DeadlineError, match="has not finished step 7"):
        completions.wait(0, 0.01)
    stuck.set()
    completions.close(5.0)


def test_without_cupy_the_error_says_what_to_install(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(DeviceError, match="needs CuPy") as failure:
        load_cupy()
    assert "cuda12" in str(failure.value)


def test_local_devices(monkeypatch):
    monkeypatch.setattr("plancompiler.executor.cuda.device.device_count", lambda: 4)
    monkeypatch.delenv("PLANCOMPILER_DEVICE", raising=False)
    assert [local_device(rank) for rank in range(6)] == [0, 1, 2, 3, 0, 1]
    assert local_device(0, "cuda:3") == 3
    monkeypatch.setenv("PLANCOMPILER_DEVICE", "cuda:2")
    assert local_device(0) == 2
    for wrong in ("cuda:4", "cuda", "tpu:0", "cuda:x"):
        with pytest.raises(DeviceError):
            local_device(0, wrong)


@pytest.mark.parametrize("wrong", ["abacus", "tpu:0", "cuda:", "cuda:x", "cuda:²"])
def test_a_misspelt_device_is_not_for_want_of_cupy(wrong):
    """With CuPy or without: the name is what is wrong."""
    with pytest.raises(DeviceError, match="no such device") as failure:
        local_device(0, wrong)
    assert failure.value.report.got == repr(wrong)
