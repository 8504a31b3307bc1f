"""Communicators of devices: the suite of all communicators, on arrays of simulated devices."""

from __future__ import annotations

import importlib.util
import json
import threading

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.eager.world import current_world
from plancompiler.errors import (
    AbortedError,
    DeadlineError,
    DeviceError,
    PlanCompilerError,
    ShapeError,
    TransportError,
)
from plancompiler.executor.comm.context import CHECK
from plancompiler.executor.comm.flight_recorder import DONE, LAUNCHED
from tests.comm import suite
from tests.executor.cuda.devices import CURRENT, WHERE, EagerDevice, spawn_on, spawn_on_devices


class OnDevices:
    """A communicator, or what makes them, that takes and gives host arrays by way of a device."""

    def __init__(self, inner, space):
        self._inner, self._space = inner, space

    def _put(self, value):
        if isinstance(value, np.ndarray):
            if value.ndim and not value.flags.c_contiguous:
                return self._space.put(np.repeat(value, 2, axis=0))[::2]
            return self._space.put(value)
        if isinstance(value, (list, tuple)):
            return [self._put(each) for each in value]
        return value

    def _get(self, value, given=()):
        if isinstance(value, self._space.arrays.ndarray):
            for host, device in given:
                if device is value:
                    host[...] = self._space.get(value)
                    return host
            return self._space.get(value)
        if isinstance(value, list):
            return [self._get(each) for each in value]
        if hasattr(value, "wait"):
            return LaterOnDevices(self, value, given)
        return value

    def context(self, ranks, on_compute_stream=True):
        context = self._inner.context(tuple(ranks), on_compute_stream, "cuda")
        key = "adapted", id(context)
        return self._space.__dict__.setdefault(key, OnDevices(context, self._space))

    def group(self):
        return Grouped(self, self._inner.group())

    def __getattr__(self, name):
        actual = getattr(self._inner, name)
        if not callable(actual):
            return actual

        def call(*args):
            taken = [self._put(each) for each in args]
            if name == "partial_recv" and not args[0].dtype.isnative:
                taken[0] = args[0]  # no device has such arrays: it is the host's
            return self._get(actual(*taken), list(zip(args, taken, strict=True)))

        return call

    def __setattr__(self, name, value):
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._inner, name, value)


class Grouped:
    def __init__(self, adapter, inner):
        self._adapter, self._inner = adapter, inner

    def __enter__(self):
        return OnDevices(self._inner.__enter__(), self._adapter._space)

    def __exit__(self, *error):
        return self._inner.__exit__(*error)


class LaterOnDevices:
    def __init__(self, adapter, work, given):
        self._adapter, self._work, self._given = adapter, work, given

    def wait(self):
        return self._adapter._get(self._work.wait(), self._given)

    def __getattr__(self, name):
        return getattr(self._work, name)


def device_context(ranks, **options):
    world = current_world()
    return world.comm.context(tuple(range(ranks)), device_type="cuda", **options)


def put(*values):
    return current_world().space("cuda").put(np.array(values, np.float32))


def get(array):
    return current_world().space("cuda").get(array).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
def test_every_operation_gives_what_it_gives_on_the_host(where, record_property):
    def rank():
        world = current_world()
        return suite.run(OnDevices(world.comm, world.space("cuda")))

    counts = spawn_on(where, rank, suite.RANKS)
    record_property(f"results_of_communicators_proved,_ranks_on_{where}_devices", sum(counts))
    assert min(counts) > 800


def test_arrays_of_the_host_are_exchanged_by_the_host():
    def rank():
        group = device_context(2)
        assert group.all_reduce(np.ones(2)).tolist() == [2.0, 2.0]
        with pytest.raises(TransportError, match=r"different calls.*on devices"):
            group.all_reduce(np.ones(2, np.float32) if group.rank else put(1, 1))
        return get(group.all_reduce(put(1, 2)))

    assert spawn_on_devices(rank, 2) == [[2.0, 4.0]] * 2


def test_calls_are_compared_before_nccl_is_asked(monkeypatch):
    monkeypatch.setenv(CHECK, "1")

    def rank():
        group = device_context(2)
        with pytest.raises(TransportError, match=r"all_reduce sum on devices float32\[2\] at .*py"):
            group.all_reduce(put(1, 2) if group.rank else put(1, 2, 3))
        return get(group.all_reduce(put(1, 2)))

    assert spawn_on_devices(rank, 2) == [[2.0, 4.0]] * 2


def test_operations_beside_computation_wait_for_what_they_read_and_are_waited_for():
    class Logged(EagerDevice):
        def note(self, what, stream):
            self.log.append((what, "current" if stream == CURRENT else "beside"))

        def launch(self, stream, work):
            self.note("launch", stream)
            super().launch(stream, work)

        def record(self, event, stream):
            self.note("record", stream)
            super().record(event, stream)

        def wait(self, stream, event):
            self.note("wait", stream)
            super().wait(stream, event)

    def rank():
        stream = device_context(2, on_compute_stream=False)
        device = current_world().space("cuda").device
        work = stream.all_reduce(put(1, 2))
        assert device.log == [
            ("record", "current"),
            ("wait", "beside"),
            ("launch", "beside"),
            ("record", "beside"),
        ]
        actual = work.wait()
        assert device.log[-1] == ("wait", "current")
        return get(actual)

    assert spawn_on_devices(rank, 2, make=Logged) == [[2.0, 4.0]] * 2


def test_records_say_what_is_launched_and_what_has_ended(tmp_path):
    def rank():
        comm = current_world().comm
        stream = device_context(2, on_compute_stream=False)
        device = current_world().space("cuda").device
        gate = threading.Event()
        # What the stream has to do before holds it up.
        side = comm.context((0, 1), on_compute_stream=False, device_type="cuda")
        stream.all_reduce(put(0)).wait()
        device.launch(side._context._beside, gate.wait)
        work = stream.all_reduce(put(1, 2))
        record = comm.recorder.records()[-1]
        assert (record.state, work.done) == (LAUNCHED, False)
        path = tmp_path / f"{comm.rank}.json"
        comm.dump(path)
        gate.set()
        assert get(work.wait()) == [2.0, 4.0]
        current_world().space("cuda").watch.drain()
        assert (record.state, work.done) == (DONE, True)
        last = json.loads(path.read_text())["operations"][-1]
        return last["state"], last["call"], last["stream"], last["end"]

    expected = ("launched", "all_reduce sum on devices", "communicator", None)
    assert spawn_on_devices(rank, 2) == [expected] * 2


class Hanging(EagerDevice):
    """Once told so, nothing that it is given ends, until communicators are aborted."""

    def __init__(self, world):
        super().__init__(world)
        self.hangs = False
        self.aborted = threading.Event()

    def record(self, event, stream):
        if not self.hangs:
            super().record(event, stream)
        else:
            event.recorded += 1

    def communicator(self, *args):
        communicator = super().communicator(*args)
        abort = communicator.abort

        def aborting():
            self.aborted.set()
            abort()

        communicator.abort = aborting
        return communicator


def test_what_a_device_does_not_end_ends_by_its_deadline():
    def rank():
        world = current_world()
        group = device_context(2)
        assert get(group.all_reduce(put(1))) == [2.0]
        world.comm.deadline = 0.2
        device = world.space("cuda").device
        device.hangs = world.rank == 1
        actual = group.all_reduce(put(1))
        assert device.aborted.wait(30)
        with pytest.raises(PlanCompilerError) as caught:
            get(actual)
        with pytest.raises(PlanCompilerError):
            group.all_reduce(put(1))
        raise caught.value

    with pytest.raises(DeadlineError) as caught:
        spawn_on_devices(rank, 2, make=Hanging)
    text = str(caught.value)
    assert "all_reduce sum on devices of 4 bytes (operation 1 of ranks [0, 1])" in text
    assert "did not end on the device within 0.2 s" in text
    assert "all ranks [0, 1] have met for it" in text
    assert "test_context.py" in text


class Stuck(EagerDevice):
    """Once told so, NCCL does not come back to the host until it is aborted."""

    def __init__(self, world):
        super().__init__(world)
        self.stuck = False

    def communicator(self, *args):
        communicator = super().communicator(*args)
        abort, group_end = communicator.abort, communicator.group_end
        aborted = threading.Event()

        def aborting():
            aborted.set()
            abort()

        def ending():
            if self.stuck:
                assert aborted.wait(30)
                raise TransportError("NCCL's groupEnd failed")
            group_end()

        communicator.abort, communicator.group_end = aborting, ending
        return communicator


def test_a_host_that_nccl_does_not_let_go_is_freed_by_the_deadline():
    def rank():
        world = current_world()
        group = device_context(2)
        assert get(group.all_reduce(put(1))) == [2.0]
        world.comm.deadline = 0.2
        world.space("cuda").device.stuck = True
        group.all_reduce(put(1))

    with pytest.raises(DeadlineError, match=r"operation 1 of ranks \[0, 1\]\) was not launched"):
        spawn_on_devices(rank, 2, make=Stuck)


class Broken(EagerDevice):
    """Once told so, its events say that the device has failed."""

    broken = False

    def has_come(self, event):
        if self.broken:
            raise RuntimeError("cudaErrorIllegalAddress")
        return super().has_come(event)


def test_a_device_that_fails_is_found_and_said():
    def rank():
        world = current_world()
        group = device_context(2)
        get(group.all_reduce(put(1)))
        space = world.space("cuda")
        space.watch.drain()
        space.device.broken = world.rank == 1
        actual = group.all_reduce(put(1))
        if world.rank == 1:
            space.watch.drain()
            get(actual)
        group.barrier()

    with pytest.raises(DeviceError, match=r"has failed before all_reduce.*IllegalAddress"):
        spawn_on_devices(rank, 2, make=Broken)


def test_what_fits_on_some_members_only_is_launched_by_none():
    def rank():
        group = device_context(2)
        mine = put(*range(2 + group.rank)).reshape(-1, 1)
        # Cut in two, rows fit on the second member, and not on the first.
        with pytest.raises(ShapeError, match="cannot be joined"):
            group.all_to_all(mine, 0, 1)
        space = current_world().space("cuda")
        out = space.empty((4,), np.dtype(np.int64 if group.rank else np.float32))
        with pytest.raises(TransportError, match=r"different calls.*float32.*int64"):
            group.partial_recv(out, 0, 2, 1) if group.rank else group.partial_send(out, 1, 2, 1)
        return get(group.all_reduce(put(1)))

    assert spawn_on_devices(rank, 2, deadline=20) == [[2.0]] * 2


class Pinned(EagerDevice):
    """Whose host arrays are all pinned: copies are made when somebody waits for them."""

    def __init__(self, world):
        super().__init__(world)
        self.settles = 0

    def is_pinned(self, array):
        return True

    def settle(self):
        self.settles += 1
        super().settle()


def test_what_is_taken_from_pinned_memory_is_there_before_that_changes():
    def rank():
        device = current_world().space("cuda").device
        before = device.settles
        put(1, 2)
        return device.settles - before

    assert spawn_on_devices(rank, 1, make=Pinned) == [1]


def test_a_rank_that_fails_ends_what_others_wait_for():
    def rank():
        group = device_context(2)
        get(group.all_reduce(put(1)))
        if group.rank == 1:
            raise ValueError("this rank gives up")
        with pytest.raises(AbortedError, match="gives up"):
            group.all_reduce(put(1))

    with pytest.raises(ValueError, match="gives up"):
        spawn_on_devices(rank, 2)


def test_a_rank_that_does_not_come_is_named():
    def rank():
        group = device_context(2)
        if group.rank == 0:
            group.all_reduce(put(1))
        else:
            barrier = current_world().comm.context((0, 1))
            barrier.deadline = 60.0  # it is the other one's that expires
            barrier.barrier()

    with pytest.raises(DeadlineError, match=r"all_reduce sum on devices.*"):
        spawn_on_devices(rank, 2, deadline=0.3)


def test_without_cupy_a_placement_on_devices_is_refused():
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("CuPy is installed")
    with pytest.raises(DeviceError, match="needs CuPy"):
        spawn(lambda: pc.tensor(np.ones(3), pc.Placement("cuda", [0])), 1)
