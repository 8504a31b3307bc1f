"""The arrays that a kernel of the host makes, found by running it dry: on arrays without elements,
so that it takes microseconds and no memory, whatever the sizes (`forecasting.dry_arrays`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from plancompiler.executor.task import RegionTable, regions_of
from plancompiler.forecasting.dry_arrays import DryArray, DryNamespace, Tally, given, is_uncounted
from plancompiler.ir import TensorType
from plancompiler.ops.exchange import Exchange
from plancompiler.ops.kernel import kernel_for
from plancompiler.ops.registry import KernelContext, op_def
from plancompiler.plan.plan import ComputeSpec, Plan, RegisterDesc, Task

Operand = tuple[TensorType, int, int]
"""The type of an array, the first of the operands in whose memory it lies, and how many bytes
behind that one's start."""


@dataclass(frozen=True, slots=True)
class KernelArrays:
    """Bytes of the arrays that a kernel makes."""

    work: tuple[tuple[Hashable, int], ...]
    """Work buffers (`KernelContext.work`), which the tasks of a stream share."""
    kept: int
    """Others that it keeps from its first runs on."""
    passing: int
    """The most that there are at a time while it runs, beside these."""


def kernel_arrays(plan: Plan, task: Task, spec: ComputeSpec) -> KernelArrays | None:
    """The arrays that the kernel of a plan's task makes; None where its elements would tell."""
    ranks = plan.communicators[spec.communicator].ranks if spec.lanes else ()
    microbatches = 1
    if plan.segments[task.segment].kind.per_microbatch:
        microbatches = plan.microbatches
    member = ranks.index(plan.rank) if ranks else 0
    return run_dry(spec, operands_of(plan, task), microbatches, member, len(ranks))


def operands_of(plan: Plan, task: Task) -> tuple[Operand, ...]:
    """What a task's kernel is given: inputs, then outputs."""
    registers = [plan.register_by_id[each] for each in (*task.inputs, *task.outputs)]
    return tuple(_operand(registers, place) for place in range(len(registers)))


def _operand(registers: Sequence[RegisterDesc], place: int) -> Operand:
    own = registers[place]
    for number, other in enumerate(registers[:place]):
        start = own.offset - other.offset
        if own.block == other.block >= 0 and -own.nbytes < start < other.nbytes:
            return TensorType(own.shape, own.dtype), number, start
    return TensorType(own.shape, own.dtype), place, 0


@lru_cache(maxsize=4096)
def run_dry(
    spec: ComputeSpec,
    operands: tuple[Operand, ...],
    microbatches: int = 1,
    member: int = 0,
    members: int = 0,
) -> KernelArrays | None:
    """The arrays that an op's kernel makes; None where its elements would tell. Where it passes
    something between devices, it is one of so many `members`.
    """
    definition, count = op_def(spec.kind), len(spec.input_shapes)
    tally = Tally()
    arrays: list[DryArray] = []
    for (shape, dtype), first, start in operands:
        at = None if first == len(arrays) else arrays[first].address + start
        arrays.append(given(tally, shape, dtype.numpy, at))
    inputs, outputs = tuple(arrays[:count]), tuple(arrays[count : len(arrays) - spec.lanes])
    views = dict(definition.view)
    if outputs and all(
        not each.size or (place in views and operands[count + place][1:] == (views[place], 0))
        for place, each in enumerate(outputs)
    ):
        return KernelArrays((), 0, 0)
    context = KernelContext(
        definition.complete(dict(spec.attrs)),
        spec.input_shapes,
        spec.output_shapes,
        spec.input_regions,
        spec.output_regions,
        arrays=DryNamespace(tally),
    )
    if members:
        passed: Any = _DryMembers(tally, member, members, arrays[len(arrays) - spec.lanes :])
        if isinstance(definition.passing, Exchange):
            context.peers = passed
        else:
            context.ring = passed
    kernel: Any = kernel_for(definition, (each.dtype for each in (*inputs, *outputs)))
    regions: RegionTable | None = None
    if microbatches > 1:
        regions = regions_of(spec, microbatches)

    def run(step: int, microbatch: int) -> int:
        """Bytes that passed in a run."""
        context.step, context.microbatch = step, microbatch
        if regions is not None:
            context.input_regions, context.output_regions = regions[microbatch]
        held = tally.most = tally.held
        kernel(context, inputs, outputs)
        return tally.most - held

    try:
        with np.errstate(all="ignore"):
            passing = run(0, 0)
            if tally.held:
                held = tally.held
                for microbatch in range(1, microbatches):
                    run(0, microbatch)
                    if tally.held == held:
                        break  # as it does for all others
                passing = max(run(1, each) for each in range(min(2, microbatches)))
    except Exception:  # of a kernel, which may be a user's: whatever it needs, it is not there
        return None
    if _has_uncounted(context.state):
        return None
    shared = {**context.work, **context.arrays.files}
    work = tuple((key, _nbytes(each)) for key, each in shared.items())
    kept = tally.held - sum(nbytes for _, nbytes in work)
    return KernelArrays(work, kept, passing)


def _nbytes(buffers: Any) -> int:
    return sum(map(_nbytes, buffers)) if isinstance(buffers, list) else int(buffers.taken)


def _has_uncounted(state: Any) -> bool:
    """Whether an array of NumPy is among what a kernel keeps."""
    if isinstance(state, dict):
        state = tuple(state.values())
    if isinstance(state, tuple | list):
        return any(map(_has_uncounted, state))
    return is_uncounted(state)


class _DryMembers:
    """Stands for the devices with which a kernel passes something (`ops.ring`, `ops.exchange`):
    what it is given of them lies in their memory.
    """

    def __init__(self, tally: Tally, member: int, size: int, lanes: Sequence[DryArray]) -> None:
        self.member = member
        self.size = size
        self._tally = tally
        self._lanes = lanes

    def give(self, lane: int, array: Any) -> None:
        """See `Ring.give`."""

    def turn(self) -> None:
        """See `Ring.turn`."""

    def take(self, lane: int, shape: tuple[int, ...]) -> DryArray:
        """See `Ring.take`."""
        return given(self._tally, shape, self._lanes[lane].dtype)

    def exchange(self, rows: Sequence[Any], coming: Sequence[range]) -> list[DryArray]:
        """See `Peers.exchange`."""
        return [
            given(self._tally, (len(part), *rows[0].shape[1:]), rows[0].dtype) for part in coming
        ]
