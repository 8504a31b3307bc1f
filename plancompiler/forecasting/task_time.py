"""What each task of a plan takes on a machine: the cost function of a simulated run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from plancompiler.costs import LinkCost, Machine, link_between, op_seconds, primitive_cost
from plancompiler.costs.measured_tasks import ALONE, Sizes
from plancompiler.costs.op_time import FREE_OPS
from plancompiler.costs.primitive import boxes_seconds
from plancompiler.forecasting.traffic import passed_bytes, whole_bytes
from plancompiler.ir import DType, TensorType
from plancompiler.ir.shard import element_count, lie_apart, region_shape
from plancompiler.ir.task import TaskKind, unpack_id
from plancompiler.ops.registry import flops_of, op_def, pointwise_of
from plancompiler.ops.ring import Round
from plancompiler.plan.plan import (
    CollectiveSpec,
    ComputeSpec,
    CopySpec,
    Plan,
    SliceSpec,
    Stream,
    Task,
    exchanged,
)

COPY, SLICE = "copy", "slice"
"""Kinds of measured tasks beside ops and the primitives of collectives: what is read of another
rank, and what is cut out of a value that is here."""
TURN, STEP, WAKE = "turn", "step", "wake"
"""What is measured beside tasks: from one task of a stream to the next, from one step to the next,
and from what a stream waits for to its going on. They go by what a task of the plan touches on
average, as large kernels leave little of the interpreter's own data in caches."""


class Place(NamedTuple):
    """Where a task stands among those of its kind."""

    kind: str
    dtype: str
    form: str
    sizes: Sizes


class Work(NamedTuple):
    """What a kernel does, as `op_seconds` is asked about it."""

    flops: float
    nbytes: float
    """Read and written."""
    dtype: DType
    pointwise: float
    """Operations in float32 between products."""


class _Touched(NamedTuple):
    """What the tasks of a plan read and write in a step."""

    plan: Plan
    """Held, so that its identity stays its own."""
    sizes: Sizes
    """Bytes of a task on average."""
    since: dict[int, float]
    """Task → bytes that the tasks before it touched since its inputs were last in use, on average
    over the bytes of its inputs, in steps that follow each other."""
    apart: dict[int, tuple[float, float]]
    """Collective → tasks that compute, and their operations, since the one before it: the more they
    are, the later may one of the members be."""


class TaskTimes:
    """Seconds of tasks, by all that they depend on."""

    def __init__(self, machine: Machine, world: str = ALONE) -> None:
        self.machine = machine
        self._world = world
        self._slowdown = 1.0 if world == ALONE else machine.host.slowdown
        """Of kernels, by other ranks that share the host with this one."""
        self._works: dict[Hashable, Work] = {}
        self._touched: dict[int, _Touched] = {}
        """Of plans by identity."""
        self._seconds: dict[Place, float | None] = {}

    def seconds(self, plan: Plan, task: Task) -> float:
        """Seconds of one run of a task."""
        place = self.place(plan, task) if self.machine.tasks else None
        if place is not None:
            if place not in self._seconds:
                self._seconds[place] = self._measured(place)
            seconds = self._seconds[place]
            if seconds is not None:
                return self._turn(plan, task.stream) + seconds
        return self._computed(plan, task)

    def wake(self, plan: Plan, stream: Stream) -> float:
        """Seconds until a stream goes on that waited."""
        return self._beside(WAKE, plan, self.machine.host.wake_seconds, stream)

    def step(self, plan: Plan) -> float:
        """Seconds that a step takes beside its tasks."""
        return self._beside(STEP, plan, self.machine.host.step_seconds)

    def moving_part(self, plan: Plan, task: Task) -> float:
        """The part of a task's time in which it moves bytes between ranks, as its link has it."""
        seconds = self.moving_seconds(plan, task)
        return min(1.0, seconds / self.seconds(plan, task)) if seconds else 0.0

    def moving_seconds(self, plan: Plan, task: Task) -> float:
        """Seconds in which a task moves bytes between ranks, with its link to itself."""
        spec = task.spec
        if isinstance(spec, CollectiveSpec):
            ranks = plan.communicators[spec.communicator].ranks
            cost = primitive_cost(spec.primitive, len(ranks), link_between(self.machine, ranks))
            return cost.per_byte * whole_bytes(plan, task, spec)
        if isinstance(spec, CopySpec):
            link, nbytes = self._copied(plan, task, spec)
            return nbytes * link.per_byte
        return 0.0

    def _copied(self, plan: Plan, task: Task, spec: CopySpec) -> tuple[LinkCost, int]:
        """The link of a copy, and its bytes."""
        remote = plan.remote_register_by_id[task.inputs[0]]
        peer = unpack_id(remote.producer).rank
        nbytes = element_count(region_shape(spec.region)) * remote.dtype.itemsize
        return link_between(self.machine, (plan.rank, peer)), nbytes

    def _turn(self, plan: Plan, stream: Stream) -> float:
        return self._beside(TURN, plan, self.machine.host.task_seconds, stream)

    def _beside(self, kind: str, plan: Plan, default: float, stream: Stream | None = None) -> float:
        if not self.machine.tasks:
            return default
        place = self.beside(kind, plan, stream)
        if place not in self._seconds:
            self._seconds[place] = self._measured(place)
        seconds = self._seconds[place]
        return default if seconds is None else seconds

    def beside(self, kind: str, plan: Plan, stream: Stream | None = None) -> Place:
        """Where `TURN`, `STEP`, or `WAKE` of a stream of a plan stands among those of others. Turns
        of parameters' gathers stand apart: each tells a stream that is busy meanwhile.
        """
        ahead = stream is Stream.PARAMETER
        form = str(stream) if stream is not None and (ahead or kind != TURN) else ""
        return Place(kind, "", form, self._touched_of(plan).sizes)

    def _measured(self, place: Place) -> float | None:
        return self.machine.models.seconds(
            place.kind, place.sizes, self._world, place.dtype, place.form
        )

    def place(self, plan: Plan, task: Task) -> Place | None:
        """Where a task stands among measured ones; None for what no kernel runs for, and for ops
        that exchange pieces with other ranks.
        """
        spec = task.spec
        if isinstance(spec, ComputeSpec):
            if task.kind is TaskKind.OUTPUT:
                told = plan.register_by_id[task.inputs[0]].nbytes
                return Place(spec.kind, "", "", Sizes(1.0, 0.0, 0.0, told, 0.0))
            work = None if spec.lanes else self.work(plan, task, spec)
            if work is None:
                return None
            flops, nbytes, dtype, _ = work
            made = task.outputs or task.inputs
            shape = plan.register_by_id[made[0]].shape
            columns = shape[-1] if shape else 1
            sizes = Sizes(
                element_count(shape) / max(columns, 1),
                columns,
                flops,
                nbytes,
                self._touched_of(plan).since.get(task.id, 0.0),
            )
            return Place(spec.kind, str(dtype), _form(spec), sizes)
        if isinstance(spec, CollectiveSpec):
            members = len(plan.communicators[spec.communicator].ranks)
            tasks, flops = self._touched_of(plan).apart[task.id]
            sizes = Sizes(tasks, members, flops, whole_bytes(plan, task, spec), 0.0)
            form = "apart" if any(_parts_apart(plan, task, spec)) else ""
            return Place(str(spec.primitive), "", form, sizes)
        if isinstance(spec, CopySpec):
            remote = plan.remote_register_by_id[task.inputs[0]]
            nbytes = element_count(region_shape(spec.region)) * remote.dtype.itemsize
            return Place(COPY, "", "", Sizes(1.0, 0.0, 0.0, nbytes, 0.0))
        if isinstance(spec, SliceSpec):
            made = task.outputs
            register = plan.register_by_id[made[0]]
            if spec.pieces and not register.is_view:
                nbytes = element_count(register.shape) * register.dtype.itemsize
                return Place(SLICE, "", "", Sizes(len(spec.pieces), 0.0, 0.0, nbytes, 0.0))
        return None

    def _touched_of(self, plan: Plan) -> _Touched:
        known = self._touched.get(id(plan))
        if known is not None:
            return known
        since: dict[int, float] = {}
        last: dict[int, float] = {}
        apart: dict[int, tuple[float, float]] = {}
        tasks, flops = 0.0, 0.0
        touched = 0.0
        for _ in range(2):  # the second time with what the step before has left
            for task in plan.tasks:
                if isinstance(task.spec, CollectiveSpec):
                    apart[task.id] = tasks, flops
                    tasks, flops = 0.0, 0.0
                elif isinstance(task.spec, ComputeSpec):
                    work = self.work(plan, task, task.spec)
                    if work is not None:
                        tasks, flops = tasks + 1.0, flops + work[0]
                local = [
                    register
                    for each in (*task.inputs, *task.outputs)
                    if (register := plan.register_by_id.get(each)) is not None
                ]
                view = isinstance(task.spec, ComputeSpec) and (
                    task.spec.kind in FREE_OPS or op_def(task.spec.kind).view
                )
                read, weighted = 0.0, 0.0
                for register in local[: len(task.inputs)]:
                    read += register.nbytes
                    weighted += register.nbytes * (touched - last.get(register.id, 0.0))
                since[task.id] = weighted / read if read else 0.0
                if view:
                    before = max((last.get(each, 0.0) for each in task.inputs), default=None)
                    for each in task.outputs:
                        if before is not None:
                            last[each] = before
                    continue
                touched += sum(register.nbytes for register in local)
                for register in local:
                    last[register.id] = touched
        average = touched / 2 / max(1, len(plan.tasks))
        known = self._touched[id(plan)] = _Touched(
            plan, Sizes(0.0, 0.0, 0.0, average, 0.0), since, apart
        )
        return known

    def _computed(self, plan: Plan, task: Task) -> float:
        """Seconds by the machine's rates and links."""
        spec = task.spec
        overhead = self._turn(plan, task.stream)
        if isinstance(spec, ComputeSpec):
            work = self.work(plan, task, spec)
            if work is None:
                return 0.0
            seconds = self._slowdown * op_seconds(self.machine, *work)
            if spec.lanes:  # a piece travels while the one before is worked on
                ranks = plan.communicators[spec.communicator].ranks
                link = link_between(self.machine, ranks)
                passing = op_def(spec.kind).passing
                if isinstance(passing, Round):
                    moving = passed_bytes(plan, task, spec, passing) * link.per_byte
                    seconds = max(seconds, moving)
                else:  # as if every rank sent to all alike, and all that its memory has room for
                    (lane,) = exchanged(spec, task.inputs, task.outputs)
                    register = plan.register_by_id[lane]
                    seconds += (
                        element_count(register.shape) * register.dtype.itemsize * link.per_byte
                    )
                seconds += len(ranks) * link.per_message
            return overhead + seconds
        if isinstance(spec, CollectiveSpec):
            return overhead + self._collective(plan, task, spec)
        if isinstance(spec, CopySpec):
            link, nbytes = self._copied(plan, task, spec)
            return overhead + boxes_seconds(1, nbytes, link)
        if isinstance(spec, SliceSpec):
            return self._slice(plan, task, spec)
        return 0.0

    def work(self, plan: Plan, task: Task, spec: ComputeSpec) -> Work | None:
        """What the kernel of a task does; None where nothing runs."""
        if spec.kind in FREE_OPS or task.kind is not TaskKind.COMPUTE or op_def(spec.kind).view:
            return None
        inputs = _types(plan, task.inputs, spec)
        outputs = _types(plan, task.outputs, spec)
        key = (spec.kind, inputs, outputs, spec.attrs)
        known = self._works.get(key)
        if known is None:
            nbytes = sum(
                element_count(each.shape) * each.dtype.itemsize for each in (*inputs, *outputs)
            )
            typed = spec.kind, inputs, outputs, dict(spec.attrs)
            dtype = (outputs or inputs)[0].dtype
            known = Work(flops_of(*typed), nbytes, dtype, pointwise_of(*typed))
            self._works[key] = known
        return known

    def _collective(self, plan: Plan, task: Task, spec: CollectiveSpec) -> float:
        ranks = plan.communicators[spec.communicator].ranks
        link = link_between(self.machine, ranks)
        cost = primitive_cost(spec.primitive, len(ranks), link, *_parts_apart(plan, task, spec))
        return cost.seconds(whole_bytes(plan, task, spec))

    def _slice(self, plan: Plan, task: Task, spec: SliceSpec) -> float:
        made = plan.register_by_id[task.outputs[0]]
        if not spec.pieces or made.is_view:
            return 0.0
        device = self.machine.device
        nbytes = element_count(made.shape) * made.dtype.itemsize
        return device.launch_seconds + nbytes / device.copy_bytes_per_second


def _parts_apart(plan: Plan, task: Task, spec: CollectiveSpec) -> tuple[bool, bool]:
    """Whether what a member of a collective sends lies apart in its memory, and what it receives.

    All values of one collective are cut and joined along the same axis.
    """
    given, made = (plan.register_by_id[each[-1]] for each in (task.inputs, task.outputs))
    return (
        lie_apart(given.shape, spec.dst_axis, given.dtype.itemsize),
        lie_apart(made.shape, spec.src_axis, made.dtype.itemsize),
    )


def _form(spec: ComputeSpec) -> str:
    """The attributes that choose among a kernel's ways: those that are set, and axes."""
    return ", ".join(
        name if value is True else f"{name} {value}"
        for name, value in spec.attrs
        if value is True or name in ("axis", "axes")
    )


def _types(plan: Plan, registers: tuple[int, ...], spec: ComputeSpec) -> tuple[TensorType, ...]:
    """Local types."""
    known = plan.register_by_id
    return tuple(TensorType(known[each].shape, known[each].dtype) for each in registers)


def cost_of(plans: dict[int, Plan], times: TaskTimes) -> Callable[[int, Task], Any]:
    """The cost function of a simulation of these plans."""
    return lambda rank, task: times.seconds(plans[rank], task)
