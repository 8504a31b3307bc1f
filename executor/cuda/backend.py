"""`DeviceBackend`: how a `Runtime` runs a plan on a device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from plancompiler.errors import ExecutionError, PlanCompilerError
from plancompiler.executor.actor import ARRIVED, Notice
from plancompiler.executor.backend import Backend, Feeds
from plancompiler.executor.comm.link import Link, Publication
from plancompiler.executor.cuda.bootstrap import Bootstrap, bootstrap_of, make_communicators
from plancompiler.executor.cuda.clock import DeviceClock
from plancompiler.executor.cuda.completions import Completions
from plancompiler.executor.cuda.device import CudaDevice, local_device
from plancompiler.executor.cuda.interface import Device, DeviceCommunicator, abort_all, close_all
from plancompiler.executor.cuda.memory import DeviceMemory
from plancompiler.executor.cuda.order import launch_order
from plancompiler.executor.cuda.task import DeviceBinder
from plancompiler.executor.memory import Memory
from plancompiler.executor.task import OnOutput, Run
from plancompiler.executor.threads import await_threads
from plancompiler.executor.trace import Recorder
from plancompiler.limits import time_limits
from plancompiler.plan.plan import Plan, Task

CLOSING_SECONDS = time_limits.DEVICE_CLOSING
"""How long the end of a run waits for the thread that calls back."""


class DeviceBackend(Backend):
    """One device's rank: a launching thread (the caller's), and one that calls back.

    `device` is an opened device, or its name (`cuda:1`); by default the rank's place on its host
    decides.
    """

    def __init__(
        self, plan: Plan, device: Device | str | None, failed: Callable[[BaseException], None]
    ) -> None:
        self._wanted = device
        self._failed = failed
        self._order = launch_order(plan)
        self._given = plan
        super().__init__(self._order.plan)
        self._device: Device | None = None
        self._memory: DeviceMemory | None = None
        self._bootstrap: Bootstrap | None = None
        self._completions: Completions | None = None
        self._aborting: list[threading.Thread] = []
        self._binder: DeviceBinder | None = None
        self._clock: DeviceClock | None = None
        self._communicators: dict[object, DeviceCommunicator] = {}
        self._deadline = 0.0

    def begin(self) -> None:
        """See `Backend.begin`."""
        device = self._opened()
        device.use()
        device.settle()

    def _opened(self) -> Device:
        if self._device is None:
            wanted = self._wanted
            if wanted is None or isinstance(wanted, str):
                wanted = CudaDevice(local_device(self.plan.rank, wanted))
            self._device = wanted
        return self._device

    def memory(self, link: Link) -> Memory:
        """See `Backend.memory`."""
        device = self._opened()
        device.use()
        self._memory = DeviceMemory(self.plan, device, link)
        return self._memory

    def recorder(self, folder: Path, first_step: int) -> Recorder:
        """See `Backend.recorder`."""
        streams = {task: str(stream) for task, stream in self._order.streams.items()}
        recorder = Recorder(self.plan, folder, first_step, streams)
        self._clock = DeviceClock(self._opened(), recorder)
        return recorder

    def recorded(self, recorder: Recorder, task: Task, run: Run | None) -> Run | None:
        """See `Backend.recorded`: `DeviceBinder` asks the clock, inside of the task's waits."""
        return run

    def publication(self, first_step: int) -> Publication:
        """See `Backend.publication`."""
        device = self._opened()
        self._bootstrap = bootstrap_of(self._given, self._order, first_step, device)
        return self._bootstrap.publication

    def binder(
        self,
        memory: Memory,
        link: Link,
        feeds: Feeds,
        on_outputs: OnOutput | None,
        deadline: float,
    ) -> DeviceBinder:
        """See `Backend.binder`."""
        device, bootstrap = self._opened(), self._bootstrap
        if not isinstance(memory, DeviceMemory) or bootstrap is None:
            raise ExecutionError("a device's tasks were bound before its ranks have met")
        self._deadline = deadline
        self._communicators, boxes = make_communicators(bootstrap, link, device, deadline)
        name = f"plancompiler-completions-{self.plan.rank}"
        self._completions = Completions(device, name, self._failed)
        self._binder = DeviceBinder(
            self._order,
            device,
            memory,
            link,
            feeds,
            on_outputs,
            self._completions,
            self._communicators,
            boxes,
            deadline,
            self._clock,
        )
        return self._binder

    def notifier(self, link: Link) -> Callable[[Notice], None]:
        """See `Backend.notifier`."""
        return partial(self._notify, link)

    def _notify(self, link: Link, notice: Notice) -> None:
        """Tell another rank of a register: that it arrived, when the device has made it."""
        binder, completions = self._binder, self._completions
        event = None if binder is None else binder.last_event
        if notice.kind == ARRIVED and event is not None and completions is not None:
            completions.after(event, partial(link.notify, notice))
        else:
            link.notify(notice)

    def finish(self) -> None:
        """See `Backend.finish`."""
        if self._completions is not None:
            self._completions.wait(0, self._deadline)

    def abort(self, error: PlanCompilerError) -> None:
        """See `Backend.abort`."""
        if self._completions is not None:
            self._completions.stop()
        self._aborting += abort_all(tuple(self._communicators.values()))

    def close(self) -> None:
        """See `Backend.close`."""
        if self._device is not None:
            self._device.use()  # programs end in a thread of their own
        if self._completions is not None:
            self._completions.close(CLOSING_SECONDS)
        await_threads(self._aborting, CLOSING_SECONDS)
        close_all(self._communicators.values())
        self._communicators.clear()
        if self._memory is not None:
            with contextlib.suppress(Exception):
                self._memory.unpin()
        self._binder = None
        self._memory = None
