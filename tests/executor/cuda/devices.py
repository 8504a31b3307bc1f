"""Devices that run what is launched on host memory, in orders that streams and events allow."""

from __future__ import annotations

import random
import threading
from collections import deque
from queue import SimpleQueue
from time import monotonic_ns

import numpy as np
import pytest

from plancompiler.eager import spawn
from plancompiler.eager.world import current_world
from plancompiler.executor.comm.reduce import UFUNCS
from plancompiler.executor.cuda.device import CudaDevice
from plancompiler.executor.cuda.interface import CallKind
from plancompiler.executor.cuda.kernels import kernel_on
from tests.executor.cuda.processes import spawn_again
from tests.executor.cuda.real import ALONE, COUNT, RANKS, on_real_devices
from tests.executor.cuda.strict import StrictArray, StrictNamespace

WORK_NANOSECONDS = 1000
"""How long every work lasts on the clock of a `LateDevice`."""


class Event:
    """Counts how often it was recorded, and how often that has come."""

    def __init__(self):
        self.recorded = 0
        self.come = 0
        self.time = 0
        """When it came last, in nanoseconds of the device's clock."""


class HostDevice:
    """What both devices share: memory and kernels of the host."""

    def __init__(self, world=None):
        self.arrays = StrictNamespace()
        self.world = world
        self.log = []
        """What was launched, recorded and waited for, for tests that look at orders."""
        self.settled = True
        """Whether what kernels made when they were bound is there."""
        self.pins = 0
        """Buffers of others that are pinned now."""

    def use(self):
        pass

    def allocate(self, nbytes):
        return StrictArray(np.zeros(nbytes, np.uint8))

    def pinned(self, nbytes):
        return np.full(nbytes, 0xA5, np.uint8)

    def pin(self, buffer):
        assert buffer.nbytes
        self.pins += 1
        return self._unpin

    def is_pinned(self, array):
        return False

    def _unpin(self):
        self.pins -= 1

    def settle(self):
        self.settled = True

    def event(self):
        return Event()

    def timer(self):
        return Event()

    def elapsed(self, begin, end):
        assert begin.come == begin.recorded
        assert end.come == end.recorded
        return end.time - begin.time

    def upload(self, stream, target, source):
        assert target.shape == source.shape
        self.launch(stream, lambda: np.copyto(target.host, source))

    def download(self, stream, target, source):
        assert target.shape == source.shape
        self.launch(stream, lambda: np.copyto(target, source.host))

    def kernel(self, definition, dtypes):
        self.settled = False
        return kernel_on(self.arrays, definition, dtypes)

    def unique_id(self):
        return self.world.unique_id()

    def communicator(self, unique_id, members, member):
        return HostCommunicator(self.world.group(unique_id, members), member)


class LateDevice(HostDevice):
    """Runs nothing until somebody waits, and then streams in an order drawn by chance."""

    def __init__(self, seed=0):
        super().__init__()
        self._random = random.Random(seed)
        self._streams = {}
        self._lock = threading.RLock()
        self._now = 0

    def stream(self, name):
        with self._lock:
            key = f"{name}#{len(self._streams)}"
            self._streams[key] = deque()
            return key

    def launch(self, stream, work):
        assert self.settled
        with self._lock:
            self._streams[stream].append(("run", work, 0))

    def record(self, event, stream):
        with self._lock:
            event.recorded += 1
            self._streams[stream].append(("record", event, event.recorded))

    def wait(self, stream, event):
        with self._lock:
            self._streams[stream].append(("wait", event, event.recorded))

    def synchronize(self, event):
        with self._lock:
            wanted = event.recorded
            while event.come < wanted:
                ready = [queue for queue in self._streams.values() if self._ready(queue)]
                assert ready, "streams wait for each other in a circle"
                self._step(self._random.choice(ready))

    def pending(self):
        """Works that were launched and have not run."""
        with self._lock:
            return sum(kind == "run" for queue in self._streams.values() for kind, *_ in queue)

    @staticmethod
    def _ready(queue):
        return bool(queue) and (queue[0][0] != "wait" or queue[0][1].come >= queue[0][2])

    def _step(self, queue):
        kind, what, number = queue.popleft()
        if kind == "run":
            self._now += WORK_NANOSECONDS
            with np.errstate(all="ignore"):
                what()
        elif kind == "record":
            what.come = max(what.come, number)
            what.time = self._now


class ThreadedDevice(HostDevice):
    """Streams are threads, so that collectives of several devices can wait for each other."""

    def __init__(self, world):
        super().__init__(world)
        self._changed = threading.Condition()
        self._queues = []

    def stream(self, name):
        queue = SimpleQueue()
        self._queues.append(queue)
        threading.Thread(target=self._serve, args=(queue,), daemon=True).start()
        return queue

    def launch(self, stream, work):
        assert self.settled
        stream.put(work)

    def record(self, event, stream):
        event.recorded += 1
        number = event.recorded
        stream.put(lambda: self._came(event, number))

    def wait(self, stream, event):
        number = event.recorded
        stream.put(lambda: self._await(event, number))

    def synchronize(self, event):
        self._await(event, event.recorded)

    def close(self):
        for queue in self._queues:
            queue.put(None)

    def _serve(self, queue):
        with np.errstate(all="ignore"):
            while (work := queue.get()) is not None:
                try:
                    work()
                except threading.BrokenBarrierError:
                    continue

    def _came(self, event, number):
        with self._changed:
            event.come = max(event.come, number)
            event.time = monotonic_ns()
            self._changed.notify_all()

    def _await(self, event, number):
        with self._changed:
            self._changed.wait_for(lambda: event.come >= number)


CURRENT = "current"
"""The stream of a thread's own calls."""


class EagerDevice(ThreadedDevice):
    """What a thread asks of arrays is done at once; other streams are threads."""

    def kernel(self, definition, dtypes):
        return kernel_on(self.arrays, definition, dtypes)

    def current(self):
        return CURRENT

    def launch(self, stream, work):
        if stream == CURRENT:
            with np.errstate(all="ignore"):
                work()
        else:
            super().launch(stream, work)

    def record(self, event, stream):
        if stream == CURRENT:
            event.recorded += 1
            self._came(event, event.recorded)
        else:
            super().record(event, stream)

    def wait(self, stream, event):
        if stream == CURRENT:
            self.synchronize(event)
        else:
            super().wait(stream, event)

    def has_come(self, event):
        return event.come >= event.recorded


WHERE = [
    "simulated",
    # Ranks that share a device are processes.
    pytest.param("real", marks=[on_real_devices, pytest.mark.processes]),
]


def spawn_on(where, function, ranks):
    """The same on simulated devices, or on real ones if they are enough."""
    if where == "simulated":
        return spawn_on_devices(function, ranks)
    if ranks > RANKS:
        pytest.skip(ALONE or f"needs {ranks} CUDA devices")
    if ranks > COUNT:
        return spawn_again(function, ranks)
    return spawn_on_devices(function, ranks, lambda world: CudaDevice(current_world().rank % COUNT))


def spawn_on_devices(function, ranks, make=EagerDevice, deadline=60.0):
    """`pc.eager.spawn` of ranks that have a device each."""
    world = World()
    devices = []

    def run():
        device = make(world)
        devices.append(device)
        current_world().use_device(device)
        return function()

    try:
        return spawn(run, ranks, deadline=deadline)
    finally:
        for device in devices:
            if isinstance(device, HostDevice):
                device.close()


class World:
    """Where communicators of several devices meet."""

    def __init__(self):
        self._lock = threading.Lock()
        self._groups = {}

    def unique_id(self):
        with self._lock:
            return len(self._groups).to_bytes(64, "little") + random.randbytes(64)

    def group(self, unique_id, members):
        with self._lock:
            return self._groups.setdefault(unique_id, Group(members))


class Group:
    def __init__(self, members):
        self.barrier = threading.Barrier(members)
        self.calls = [None] * members


class HostCommunicator:
    """Calls of a group, made together when the group ends."""

    def __init__(self, group, member):
        self._group, self._member = group, member
        self._calls, self._grouped = [], False
        self.aborted = False
        group.barrier.wait(30)

    def group_start(self):
        self._grouped = True

    def group_end(self):
        self._grouped = False
        self._make()

    def call(self, kind, stream, source, target, how=None, peer=-1):
        self._calls.append((kind, source, target, how, peer))
        if not self._grouped:
            self._make()

    def _make(self):
        calls, self._calls = self._calls, []
        group, own = self._group, self._member
        group.calls[own] = [
            (kind, None if source is None else source.host.copy(), how, peer)
            for kind, source, _, how, peer in calls
        ]
        group.barrier.wait()
        everyone = list(group.calls)
        group.barrier.wait()
        sent = {
            member: deque(
                source for kind, source, _, peer in made if kind is CallKind.SEND and peer == own
            )
            for member, made in enumerate(everyone)
        }
        collective = [
            [call for call in made if call[0] not in (CallKind.SEND, CallKind.RECEIVE)]
            for made in everyone
        ]
        place = 0
        for kind, _, target, how, peer in calls:
            if kind is CallKind.RECEIVE:
                actual = sent[peer].popleft()
            elif kind is CallKind.SEND:
                continue
            else:
                of_all = [made[place] for made in collective]
                place += 1
                assert {call[0] for call in of_all} == {kind}, of_all
                assert {(call[2], call[3]) for call in of_all} == {(how, peer)}
                sources = [call[1] for call in of_all]
                if kind is CallKind.BROADCAST:
                    actual = sources[peer]
                elif kind is CallKind.ALL_GATHER:
                    actual = np.concatenate([each.reshape(-1) for each in sources])
                else:
                    actual = sources[0].copy()
                    for each in sources[1:]:
                        UFUNCS[how](actual, each, out=actual)
                    if kind is CallKind.REDUCE_SCATTER:
                        size = target.size
                        actual = actual.reshape(-1)[own * size : (own + 1) * size]
                    if kind is CallKind.REDUCE and peer != own:
                        continue
            assert target.flags.c_contiguous
            assert actual.size == target.size
            np.copyto(target.host, actual.reshape(target.shape))

    def check(self):
        pass

    def abort(self):
        self.aborted = True
        self._group.barrier.abort()

    def close(self):
        pass
