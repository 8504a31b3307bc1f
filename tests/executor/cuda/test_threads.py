"""The threads of a device end with what they serve; those that hang are left behind by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import numpy as np
import pytest

from plancompiler.eager.world import current_world
from plancompiler.errors import AbortedError, DeadlineError
from plancompiler.executor import threads
from plancompiler.executor.cuda import interface
from plancompiler.executor.cuda.bootstrap import join
from plancompiler.executor.cuda.completions import Completions
from plancompiler.executor.cuda.launched import LaunchedGroup, LaunchWatch
from plancompiler.executor.cuda.rank_device import RankDevice
from tests.executor.cuda.devices import EagerDevice, HostDevice, spawn_on_devices
from tests.executor.host_world import own_threads

SECONDS = 0.05


class Hanging(HostDevice):
    """Whatever waits for it hangs, until it is told to go on."""

    def __init__(self):
        super().__init__()
        self.entered, self.goes_on = SimpleQueue(), threading.Event()

    def hang(self, *given):
        self.entered.put(given)
        assert self.goes_on.wait(30)
        return True

    synchronize = has_come = communicator = hang


class Communicator:
    """Its abort hangs with its device."""

    def __init__(self, device):
        self.abort = device.hang

    def close(self):
        pass


def calling_back(device: Hanging) -> Callable[[], None]:
    completions = Completions(device, "plancompiler-completions-0", lambda error: None)
    completions.after(device.event(), lambda: None)
    device.entered.get(timeout=30)
    return partial(completions.close, SECONDS)


def watching(device: Hanging) -> Callable[[], None]:
    watch = LaunchWatch(device, "plancompiler-launched-0")
    watch.add(LaunchedGroup([], Communicator(device), 30.0, lambda error: None, device.event()))
    device.entered.get(timeout=30)
    return watch.close


def aborting(device: Hanging) -> Callable[[], None]:
    device_of_rank = RankDevice(device, 0)
    device_of_rank.communicators.append(Communicator(device))
    device_of_rank.abort(AbortedError("another rank failed"))
    return device_of_rank.close


def joining(device: Hanging) -> Callable[[], None]:
    def join_late() -> None:
        with pytest.raises(DeadlineError, match="was not made within"):
            join(device, b"", 2, 0, "a group", SECONDS)

    return join_late


@pytest.mark.parametrize(
    ("begin", "name"),
    [
        (calling_back, "plancompiler-completions-0"),
        (watching, "plancompiler-launched-0"),
        (aborting, "plancompiler-abort"),
        (joining, "plancompiler-nccl"),
    ],
)
def test_a_thread_that_hangs_in_a_device(begin, name, monkeypatch, caplog) -> None:
    monkeypatch.setattr(threads, "THREAD_SECONDS", SECONDS)
    monkeypatch.setattr(interface, "ABORT_PATIENCE", 0.01)
    device = Hanging()
    begin(device)()
    (note,) = caplog.messages
    assert f"the thread {name} did not end within {SECONDS:g} s and is left behind, at " in note
    device.goes_on.set()
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(30)
    assert own_threads() == []


def test_a_world_of_devices_leaves_no_thread() -> None:
    def rank() -> list[str]:
        world = current_world()
        space = world.space("cuda")
        context = world.comm.context((0, 1), True, "cuda")
        space.get(context.all_reduce(space.put(np.ones(2, np.float32))))
        return own_threads()

    before = set(threading.enumerate())
    during = spawn_on_devices(rank, 2, make=EagerDevice)
    assert {"plancompiler-launched-0", "plancompiler-launched-1"} <= set(during[0] + during[1])
    after = [each.name for each in threading.enumerate() if each not in before]
    assert not [name for name in after if name.startswith("plancompiler")]
