"""Binds a device rank's tasks: each becomes a callable that launches its work and returns.

Around the work stand the waits and the event that `EventDependencies` asks for. Tasks of the host's
(copies from other ranks' memory, data from files and feeds) run in the launching thread itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from plancompiler.executor.comm.link import Link
from plancompiler.executor.comm.program import Program
from plancompiler.executor.cuda.clock import RUN_AHEAD, DeviceClock
from plancompiler.executor.cuda.collective import DeviceProgram, bind_collective, launcher_of
from plancompiler.executor.cuda.completions import Completions
from plancompiler.executor.cuda.event_dependencies import DependentTask, EventDependencies
from plancompiler.executor.cuda.interface import (
    Device,
    DeviceArray,
    DeviceCommunicator,
    DeviceEvent,
    DeviceStream,
)
from plancompiler.executor.cuda.memory import DeviceMemory, pinned_like
from plancompiler.executor.cuda.order import LaunchOrder
from plancompiler.executor.cuda.ring import DeviceRing
from plancompiler.executor.memory import Array
from plancompiler.executor.task import (
    OnOutput,
    Run,
    TaskBinder,
    has_no_work,
    microbatch_run,
    with_members,
)
from plancompiler.ir.shard import Region, region_index
from plancompiler.ir.task import TaskKind, unpack_id
from plancompiler.ops.registry import Kernel, op_def
from plancompiler.plan.plan import (
    CollectiveSpec,
    ComputeSpec,
    SliceSpec,
    Task,
    exchanged,
)

Launcher = Callable[[int], object]
"""What a stream is asked to do in a run of a task, by its version."""


_SEND = Program(giver=0, reader=1)
"""From the first of two members to the second."""


class DeviceBinder(TaskBinder):
    """Makes the callables of one device rank's tasks."""

    def __init__(
        self,
        order: LaunchOrder,
        device: Device,
        memory: DeviceMemory,
        link: Link,
        feeds: dict[str, deque[Array]],
        on_outputs: OnOutput | None,
        completions: Completions,
        communicators: dict[object, DeviceCommunicator],
        boxes: dict[int, Region],
        deadline: float,
        clock: DeviceClock | None = None,
    ) -> None:
        """`communicators` by index of a plan's communicator and by channel; `boxes` are what other
        ranks read of the registers that are sent, by the reading task's id. `clock` is there if the
        run is recorded.
        """
        super().__init__(order.plan, memory, link, feeds, on_outputs)
        self._order = order
        self._device = device
        self._device_memory = memory
        self._completions = completions
        self._communicators = communicators
        self._boxes = boxes
        self._deadline = deadline
        self._clock = clock
        self._positions = {task.id: place for place, task in enumerate(order.plan.tasks)}
        self._streams = {
            each: device.stream(str(each)) for each in dict.fromkeys(order.streams.values())
        }
        self._dependencies = event_dependencies_of(order, device.event)
        self.last_event: DeviceEvent | None = None
        """Recorded after the task that was launched last, where it was told elsewhere."""

    def bind(self, task: Task) -> Run | None:
        """See `TaskBinder.bind`."""
        kind, spec = task.kind, task.spec
        if kind is TaskKind.VARIABLE:
            return self._dependent(task, None)
        if kind is TaskKind.STEP_END:
            return self._bind_step_end(task)
        if kind is TaskKind.SEND_RECV:
            return self._launched(task, self._exchange(task))
        if kind is TaskKind.COPY_COMM_NET:
            return self._by_host(task, super().bind(task))
        if isinstance(spec, CollectiveSpec):
            return self._launched(task, self._collective(task, spec))
        if kind is TaskKind.COPY_HD:
            return self._dependent(task, self._upload_or_download(task))
        if isinstance(spec, SliceSpec):
            return self._launched(task, self._bind_slice(task, spec))
        if isinstance(spec, ComputeSpec):
            if kind is TaskKind.OUTPUT:
                return self._dependent(task, self._output(task, spec))
            if kind is TaskKind.INPUT or op_def(spec.kind).source:
                return self._staged(task, spec)
            return self._launched(task, self._compute(task, spec))
        return super().bind(task)

    def _stream(self, task: Task) -> DeviceStream:
        return self._streams[self._order.streams[task.id]]

    # --- around the work ------------------------------------------------------------------------

    def _dependent(
        self, task: Task, launch: Launcher | None, prepare: Launcher | None = None
    ) -> Run | None:
        """`launch` between the waits and the event of the task; `prepare` is for the host alone."""
        place = self._positions[task.id]
        stream = self._stream(task)
        if self._clock is not None:
            launch = self._timed(task, launch, self._clock, stream)
        elif launch is None and not self._dependencies.concerns(place):
            return None
        device, dependencies = self._device, self._dependencies
        if launch is not None and prepare is None and not dependencies.concerns(place):

            def alone(version: int) -> None:
                launch(version)
                self.last_event = None

            return alone

        def run(version: int) -> None:
            if prepare is not None:
                prepare(version)
            for event in dependencies.before(place, version):
                device.wait(stream, event)
            if launch is not None:
                launch(version)
            event = dependencies.after(place, version)
            if event is not None:
                device.record(event, stream)
            self.last_event = event

        return run

    def _timed(
        self, task: Task, launch: Launcher | None, clock: DeviceClock, stream: DeviceStream
    ) -> Launcher:
        """`launch` between the events that say when the device ran it."""
        timed = clock.timed(task, self._microbatches(task), stream)

        def run(version: int) -> None:
            timed.begin(version)
            if launch is not None:
                launch(version)
            timed.end(version)

        return run

    def _launched(self, task: Task, work: Launcher | None) -> Run | None:
        """`work` on the task's stream."""
        if work is None:
            return self._dependent(task, None)
        device, stream = self._device, self._stream(task)
        return self._dependent(task, lambda version: device.launch(stream, partial(work, version)))

    def _by_host(self, task: Task, work: Run | None) -> Run | None:
        """`work` in this thread, when what it overwrites has been read."""
        if work is None:
            return self._dependent(task, None)
        if self._clock is not None:
            work = self._clock.by_host(task, work)
        place = self._positions[task.id]
        device, dependencies = self._device, self._dependencies
        stream = self._stream(task)

        def run(version: int) -> None:
            for event in dependencies.before(place, version):
                device.synchronize(event)
            work(version)
            event = dependencies.after(place, version)
            if event is not None:
                device.record(event, stream)
            self.last_event = event

        return run

    def _bind_step_end(self, task: Task) -> Run:
        """The end of a segment; the last one of a step bounds how far the host is ahead."""
        dependent = self._dependent(task, None)
        device, completions, deadline = self._device, self._completions, self._deadline
        clock = self._clock
        stream = self._stream(task)
        last = self._plan.slots[-1]
        per_microbatch = self._plan.segments[task.segment].kind.per_microbatch
        ends_step = task.segment == last.segment
        microbatches = self._plan.microbatches if per_microbatch else 1
        # One more event than steps under way, so that none is recorded before it was waited for.
        events = [device.event() for _ in range(RUN_AHEAD + 2)]

        def run(version: int) -> None:
            if dependent is not None:
                dependent(version)
            step, microbatch = divmod(version, microbatches)
            if ends_step and microbatch == microbatches - 1:
                event = events[step % len(events)]
                if clock is not None:
                    clock.step_launched(step, stream)
                device.record(event, stream)
                if clock is not None:
                    completions.after(event, partial(clock.read, step))
                completions.step(event, step)
                completions.wait(RUN_AHEAD, deadline)
                for communicator in self._communicators.values():
                    communicator.check()

        return run

    # --- the work -------------------------------------------------------------------------------

    def _compute(self, task: Task, spec: ComputeSpec) -> Launcher | None:
        definition = op_def(spec.kind)
        inputs, outputs = self._operands(task)
        if not spec.lanes and has_no_work(definition, inputs, outputs):
            return None
        registers = self._plan.register_by_id
        kernel = self._device.kernel(
            definition, (registers[each].dtype for each in (*task.inputs, *task.outputs))
        )
        if self.adapt is not None:
            kernel = self.adapt(spec, kernel)
        arrays = self._device.arrays
        if not spec.lanes:
            return self._run_kernel(task, spec, kernel, arrays, inputs, outputs)
        ring = self._ring(task, spec)
        return with_members(
            ring, self._run_kernel(task, spec, kernel, arrays, inputs, outputs, ring)
        )

    def _ring(self, task: Task, spec: ComputeSpec) -> DeviceRing:
        ranks = self._plan.communicators[spec.communicator].ranks
        return DeviceRing(
            self._communicators[spec.communicator],
            self._stream(task),
            ranks.index(self._plan.rank),
            len(ranks),
            [self._memory.slots(each) for each in exchanged(spec, task.inputs, task.outputs)],
        )

    def _run_kernel(
        self,
        task: Task,
        spec: ComputeSpec,
        kernel: Kernel,
        arrays: Any,
        inputs: list[tuple[DeviceArray, ...]],
        outputs: list[tuple[DeviceArray, ...]],
        ring: DeviceRing | None = None,
    ) -> Launcher:
        """A kernel on arrays by slot."""
        context, regions = self._context(spec, arrays), self._regions(spec)
        context.ring = ring
        context.fixed = True
        return microbatch_run(kernel, context, inputs, outputs, self._microbatches(task), regions)

    def _staged(self, task: Task, spec: ComputeSpec) -> Run | None:
        """Data from outside: this thread fills pinned memory, a stream copies it to the device."""
        slots = [self._memory.slots(register) for register in task.outputs]
        # As many as steps can be under way: the host waits for no copy to fill the next.
        depth = max(RUN_AHEAD + 1, *map(len, slots))
        staging = [tuple(self._pinned(each[0]) for each in slots) for _ in range(depth)]
        if task.kind is TaskKind.INPUT:
            fill: Launcher = self._input_into(task, spec, [row[0] for row in staging])
        else:
            kernel = op_def(spec.kind).kernel
            if self.adapt is not None:
                kernel = self.adapt(spec, kernel)
            fill = self._run_kernel(task, spec, kernel, np, [()] * depth, staging)
        device = self._device
        stream = self._stream(task)
        copied = [device.event() for _ in range(depth)]

        def prepare(version: int) -> None:
            device.synchronize(copied[version % depth])
            fill(version)

        def launch(version: int) -> None:
            at = version % depth
            for each, source in zip(slots, staging[at], strict=True):
                if source.size:
                    device.upload(stream, each[version % len(each)], source)
            device.record(copied[at], stream)

        return self._dependent(task, launch, prepare)

    def _output(self, task: Task, spec: ComputeSpec) -> Launcher | None:
        """Copy a value to the host; it is checked and delivered when it is there."""
        label, deliver, finite = self._output_of(task, spec)
        if deliver is None and not finite:
            return None
        slots = self._memory.slots(task.inputs[0])
        device, completions = self._device, self._completions
        stream = self._stream(task)

        # As many as steps can be under way, so that a value was delivered before its memory is
        # filled again.
        depth = RUN_AHEAD + 2
        staging = [self._pinned(slots[0]) for _ in range(depth)]
        events = [device.event() for _ in range(depth)]

        def launch(step: int) -> None:
            target, event = staging[step % depth], events[step % depth]
            if target.size:
                device.download(stream, target, slots[step % len(slots)])
            device.record(event, stream)
            completions.after(event, partial(arrived, step, target))

        def arrived(step: int, value: Array) -> None:
            if finite and not np.isfinite(value).all():
                self._not_finite(label, step, value, task)
            elif deliver is not None:
                deliver(step, label, value.copy())

        return launch

    def _upload_or_download(self, task: Task) -> Launcher | None:
        source, target = (self._memory.slots(each[0]) for each in (task.inputs, task.outputs))
        if source[0].size == 0:
            return None
        device = self._device
        stream = self._stream(task)
        upload = self._device_memory.on_device(self._plan.register_by_id[task.outputs[0]])
        copy = device.upload if upload else device.download

        def run(version: int) -> None:
            copy(stream, target[version % len(target)], source[version % len(source)])

        return run

    def _exchange(self, task: Task) -> Launcher | None:
        """This rank's half of a SendRecv."""
        send = self._order.sends.get(task.id)
        sources = targets = None
        if send is None:
            channel = self._order.receives[task.id]
            targets = self._memory.slots(task.outputs[0])
        else:
            channel = send.channel
            index = region_index(self._boxes[send.task])
            sources = [slot[index] for slot in self._memory.slots(task.inputs[0])]
        own = int(send is None)
        bound = DeviceProgram(self._device.arrays, _SEND, own, 2, sources, targets)
        stream = self._stream(task)
        return launcher_of([bound], self._communicators[channel], stream)

    def _collective(self, task: Task, spec: CollectiveSpec) -> Launcher | None:
        communicator = self._communicators.get(spec.communicator)
        ranks = self._plan.communicators[spec.communicator].ranks
        stream = self._stream(task)
        return bind_collective(
            self._device,
            communicator,
            stream,
            spec,
            ranks.index(self._plan.rank),
            len(ranks),
            [
                (self._memory.slots(source), self._memory.slots(target))
                for source, target in zip(task.inputs, task.outputs, strict=True)
            ],
            self._plan.register_by_id[task.outputs[0]].dtype,
        )

    def _pinned(self, like: DeviceArray) -> Array:
        return pinned_like(self._device, like)


def event_dependencies_of(
    order: LaunchOrder, make_event: Callable[[], DeviceEvent]
) -> EventDependencies:
    """The events for the tasks of a launch order."""
    plan = order.plan
    counts = {register.id: register.register_count for register in plan.registers}
    abroad = {
        register.producer
        for register in plan.registers
        if any(unpack_id(task).rank != plan.rank for task in register.consumers)
    }
    tasks = [
        DependentTask(
            order.streams[task.id],
            tuple(each for each in (*task.inputs, *task.controls_in) if each in counts),
            (*task.outputs, *task.controls_out),
            told_elsewhere=task.id in abroad,
        )
        for task in plan.tasks
    ]
    return EventDependencies.of(tasks, counts, make_event)
