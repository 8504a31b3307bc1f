"""What each task of a plan takes on a machine: the cost function of a simulated run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from plancompiler.costs import Machine, link_between, op_seconds, primitive_cost
from plancompiler.costs.op_time import FREE_OPS
from plancompiler.costs.primitive import boxes_seconds
from plancompiler.forecasting.traffic import passed_bytes, whole_bytes
from plancompiler.ir import DType, TensorType
from plancompiler.ir.shard import element_count, region_shape
from plancompiler.ir.task import TaskKind, unpack_id
from plancompiler.ops.registry import flops_of, op_def
from plancompiler.ops.ring import Round
from plancompiler.plan.plan import (
    CollectiveSpec,
    ComputeSpec,
    CopySpec,
    Plan,
    SliceSpec,
    Task,
    exchanged,
)


class TaskTimes:
    """Seconds of tasks, by all that they depend on."""

    def __init__(self, machine: Machine, slowdown: float = 1.0) -> None:
        self._machine = machine
        self._slowdown = slowdown
        """Of kernels, by other ranks that share the host with this one."""
        self._kernels: dict[Hashable, tuple[float, float, DType]] = {}

    def seconds(self, plan: Plan, task: Task) -> float:
        """Seconds of one run of a task."""
        spec = task.spec
        overhead = self._machine.host.task_seconds
        if isinstance(spec, ComputeSpec):
            work = self.work(plan, task, spec)
            if work is None:
                return 0.0
            seconds = self._slowdown * op_seconds(self._machine, *work, spec.kind)
            if spec.lanes:  # a piece travels while the one before is worked on
                ranks = plan.communicators[spec.communicator].ranks
                link = link_between(self._machine, ranks)
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
            remote = plan.remote_register_by_id[task.inputs[0]]
            peer = unpack_id(remote.producer).rank
            nbytes = element_count(region_shape(spec.region)) * remote.dtype.itemsize
            link = link_between(self._machine, (plan.rank, peer))
            return overhead + boxes_seconds(1, nbytes, link)
        if isinstance(spec, SliceSpec):
            return self._slice(plan, task, spec)
        return 0.0

    def work(self, plan: Plan, task: Task, spec: ComputeSpec) -> tuple[float, float, DType] | None:
        """Operations, bytes that are read and written, and the dtype; None where nothing runs."""
        if spec.kind in FREE_OPS or task.kind is not TaskKind.COMPUTE or op_def(spec.kind).view:
            return None
        inputs = _types(plan, task.inputs, spec)
        outputs = _types(plan, task.outputs, spec)
        key = (spec.kind, inputs, outputs, spec.attrs)
        known = self._kernels.get(key)
        if known is None:
            nbytes = sum(
                element_count(each.shape) * each.dtype.itemsize for each in (*inputs, *outputs)
            )
            flops = flops_of(spec.kind, inputs, outputs, dict(spec.attrs))
            dtype = (outputs or inputs)[0].dtype
            known = self._kernels[key] = (flops, nbytes, dtype)
        return known

    def _collective(self, plan: Plan, task: Task, spec: CollectiveSpec) -> float:
        ranks = plan.communicators[spec.communicator].ranks
        cost = primitive_cost(spec.primitive, len(ranks), link_between(self._machine, ranks))
        return cost.seconds(whole_bytes(plan, task, spec))

    def _slice(self, plan: Plan, task: Task, spec: SliceSpec) -> float:
        made = plan.register_by_id[task.outputs[0]]
        if not spec.pieces or made.is_view:
            return 0.0
        device = self._machine.device
        nbytes = element_count(made.shape) * made.dtype.itemsize
        return device.launch_seconds + nbytes / device.copy_bytes_per_second


def _types(plan: Plan, registers: tuple[int, ...], spec: ComputeSpec) -> tuple[TensorType, ...]:
    """Local types."""
    known = plan.register_by_id
    return tuple(TensorType(known[each].shape, known[each].dtype) for each in registers)


def cost_of(plans: dict[int, Plan], times: TaskTimes) -> Callable[[int, Task], Any]:
    """The cost function of a simulation of these plans."""
    return lambda rank, task: times.seconds(plans[rank], task)
