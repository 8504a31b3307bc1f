"""Binds a plan's tasks at load time: each becomes one callable with its arrays resolved."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

import plancompiler.ops  # noqa: F401  (fills the op table)
from plancompiler.errors import (
    DeviceError,
    ExecutionError,
    FeedError,
    NonFiniteError,
    TransportError,
)
from plancompiler.executor.comm.collective import bind_collective
from plancompiler.executor.comm.link import Link
from plancompiler.executor.comm.passing import PlanPeers, PlanRing
from plancompiler.executor.comm.reduce import UFUNCS, Move, accumulator, divide, identity_of
from plancompiler.executor.finite_check import checked, says_non_finite
from plancompiler.executor.memory import Array, Memory, read_only, same_memory
from plancompiler.ir import UNKNOWN_SOURCE, DType, Reduction
from plancompiler.ir.shard import Region, piece_region, region_index
from plancompiler.ir.task import TaskKind, format_id, unpack_id
from plancompiler.ops.exchange import Exchange
from plancompiler.ops.kernel import kernel_for
from plancompiler.ops.registry import Kernel, KernelContext, OpDef, op_def
from plancompiler.plan.plan import (
    CollectiveSpec,
    ComputeSpec,
    CopySpec,
    Plan,
    SliceSpec,
    Stream,
    Task,
)

Run = Callable[[int], None]
"""Does a task's work once. Takes the number of the run (`StreamActor.version`): the step, or where
the task runs for every micro-batch step * microbatches + microbatch."""
Rows = list[tuple[Array, ...]]
"""Arrays of registers, by run of a task."""
RegionTable = tuple[tuple[tuple[Region, ...], tuple[Region, ...]], ...]
"""Regions of an op's inputs and outputs by micro-batch."""
Adapt = Callable[[ComputeSpec, Kernel], Kernel]
"""Gives a kernel in place of the one of an op, for who decides seed and step from run to run."""
OnOutput = Callable[[int, str, Array], None]
"""Takes (step, name, value) of an output; the array is the receiver's to keep."""
OnNotFinite = Callable[[int, NonFiniteError, Task], None]
"""Takes (step, error, task) of an output that must be finite and is not."""


class TaskBinder:
    """Makes the callables of one rank's tasks; None for a task without work."""

    def __init__(
        self,
        plan: Plan,
        memory: Memory,
        link: Link,
        feeds: dict[str, deque[Array]],
        on_outputs: OnOutput | None,
    ) -> None:
        self._plan = plan
        self._memory = memory
        self._link = link
        self._feeds = feeds
        self._on_outputs = on_outputs
        self._output_names = {output.task: output.name for output in plan.outputs}
        self._region_tables: dict[object, RegionTable | None] = {}
        self._work: dict[Stream, dict[Hashable, Any]] = {}
        """The work buffers of each stream's kernels."""
        self.adapt: Adapt | None = None
        self.anomaly = False
        """Whether tasks say when they make the first value that is not finite."""
        self.on_not_finite: OnNotFinite | None = None
        """Hears of outputs that are not finite; without it they fail their step at once."""
        self.rates: Callable[[int, int], float | None] | None = None
        """See `KernelContext.rates`."""

    def bind(self, task: Task) -> Run | None:
        """The callable of a task. Raises where the plan does not fit this rank or its peers."""
        run, spec = self._bound(task), task.spec
        if run is None or not self.anomaly or not task.outputs:
            return run
        if isinstance(spec, ComputeSpec) and not says_non_finite(dict(spec.attrs)):
            return checked(run, *self._operands(task), spec.kind)
        if isinstance(spec, CollectiveSpec) and spec.reduction is not None:
            return checked(run, *self._operands(task), str(spec.primitive))
        return run

    def _bound(self, task: Task) -> Run | None:
        kind, spec = task.kind, task.spec
        if kind in (TaskKind.VARIABLE, TaskKind.STEP_END):
            return None
        if kind in (TaskKind.COPY_HD, TaskKind.SEND_RECV):
            raise DeviceError(
                f"{kind} is for devices, and this plan's memory is the host's",
                op=task.name,
                rank=self._plan.rank,
            )
        if isinstance(spec, ComputeSpec):
            if kind is TaskKind.INPUT:
                return self._bind_input(task, spec)
            if kind is TaskKind.OUTPUT:
                return self._bind_output(task, spec)
            return self._bind_compute(task, spec)
        if isinstance(spec, CollectiveSpec):
            return bind_collective(self._plan, task, spec, self._memory, self._link)
        if isinstance(spec, CopySpec):
            return self._bind_copy(task, spec)
        if isinstance(spec, SliceSpec):
            return self._bind_slice(task, spec)
        raise ExecutionError(
            "a task does not say what to do",
            op=task.name,
            rank=self._plan.rank,
            got=f"{kind} without a spec",
        )

    def _bind_compute(self, task: Task, spec: ComputeSpec) -> Run | None:
        definition = op_def(spec.kind)
        inputs, outputs = self._operands(task)
        if not spec.lanes and has_no_work(definition, inputs, outputs):
            return None
        period = len(outputs)
        context = self._context(spec)
        # Tasks of a stream run one after another.
        context.work = self._work.setdefault(task.stream, {})
        kernel = kernel_for(definition, (each.dtype for each in (*inputs[0], *outputs[0])))
        if self.adapt is not None:
            kernel = self.adapt(spec, kernel)
        readable = [tuple(map(read_only, row)) for row in inputs]
        microbatches = self._microbatches(task)
        if spec.lanes:
            where = self._plan, task, spec, self._memory, self._link
            members: PlanPeers | PlanRing
            if isinstance(definition.passing, Exchange):
                members = context.peers = PlanPeers(*where)
            else:
                members = context.ring = PlanRing(*where)
            regions = self._regions(spec)
            work = microbatch_run(kernel, context, readable, outputs, microbatches, regions)
            return with_members(members, work)
        if microbatches > 1:
            return microbatch_run(
                kernel, context, readable, outputs, microbatches, self._regions(spec)
            )
        if period == 1:
            only_inputs, only_outputs = readable[0], outputs[0]

            def run(step: int) -> None:
                context.step = step
                kernel(context, only_inputs, only_outputs)

            return run

        def run_slot(step: int) -> None:
            context.step = step
            slot = step % period
            kernel(context, readable[slot], outputs[slot])

        return run_slot

    def _context(self, spec: ComputeSpec, arrays: Any = np) -> KernelContext:
        return KernelContext(
            op_def(spec.kind).complete(dict(spec.attrs)),
            spec.input_shapes,
            spec.output_shapes,
            spec.input_regions,
            spec.output_regions,
            seed=self._plan.seed,
            arrays=arrays,
            rates=self.rates,
        )

    def _operands(self, task: Task) -> tuple[Rows, Rows]:
        """Inputs and outputs of a task in each of its runs, until their slots repeat."""
        versions = range(self._memory.period(*task.inputs, *task.outputs))
        made = task.outputs
        if isinstance(task.spec, ComputeSpec):  # lanes are no results
            made = made[: len(made) - task.spec.lanes]
        return (
            [_arrays(self._memory, task.inputs, version) for version in versions],
            [_arrays(self._memory, made, version) for version in versions],
        )

    def _microbatches(self, task: Task) -> int:
        """How often a task runs in a step."""
        kind = self._plan.segments[task.segment].kind
        return self._plan.microbatches if kind.per_microbatch else 1

    def _regions(self, spec: ComputeSpec) -> RegionTable | None:
        """Regions by micro-batch, one table for all tasks that have the same."""
        key = spec.input_regions, spec.output_regions, spec.input_pieces, spec.output_pieces
        shapes = spec.input_shapes, spec.output_shapes
        if (key, shapes) not in self._region_tables:
            self._region_tables[key, shapes] = regions_of(spec, self._plan.microbatches)
        return self._region_tables[key, shapes]

    def _bind_input(self, task: Task, spec: ComputeSpec) -> Run:
        return self._input_into(task, spec, self._memory.slots(task.outputs[0]))

    def _input_into(self, task: Task, spec: ComputeSpec, slots: Sequence[Array]) -> Run:
        """Fill slots, one after another, with this rank's part of what was fed."""
        name = str(dict(spec.attrs)["name"])
        waiting = self._feeds[name]
        microbatches = self._microbatches(task)
        table = self._regions(spec)
        boxes = (
            (spec.output_regions[0],) * microbatches
            if table is None
            else tuple(made[0] for _, made in table)
        )
        indices = tuple(map(region_index, boxes))
        count = len(slots)
        last = microbatches - 1

        def run(version: int) -> None:
            step, microbatch = divmod(version, microbatches)
            if not waiting:
                raise FeedError(f"nothing was fed to input {name!r}", got=f"step {step}")
            # The fed array holds all micro-batches of its step.
            np.copyto(slots[version % count], waiting[0][indices[microbatch]])
            if microbatch == last:
                waiting.popleft()

        return run

    def _output_of(self, task: Task, spec: ComputeSpec) -> tuple[str, OnOutput | None, bool]:
        """An output's name, who takes it, and whether it must be finite."""
        if self._microbatches(task) > 1:
            raise ExecutionError(
                "an output is reported once per step, but runs for every micro-batch",
                op=task.name,
                rank=self._plan.rank,
                got=f"segment {self._plan.segments[task.segment]}",
            )
        attrs = dict(spec.attrs)
        finite = bool(attrs.get("finite", False))
        name = self._output_names.get(task.id)
        deliver = self._on_outputs if name is not None else None
        label = name if name is not None else str(attrs.get("name", task.name))
        return label, deliver, finite

    def _bind_output(self, task: Task, spec: ComputeSpec) -> Run | None:
        label, deliver, finite = self._output_of(task, spec)
        if deliver is None and not finite:
            return None
        slots = tuple(map(read_only, self._memory.slots(task.inputs[0])))
        count = len(slots)

        def run(step: int) -> None:
            value = slots[step % count]
            if finite and not np.isfinite(value).all():
                self._not_finite(label, step, value, task)
            elif deliver is not None:
                deliver(step, label, value.copy())

        return run

    def _not_finite(self, label: str, step: int, value: Array, task: Task) -> None:
        error = not_finite(label, step, value)
        if self.on_not_finite is None:
            source = None if task.source == UNKNOWN_SOURCE else task.source
            raise error.at(op=task.name, source=source, rank=self._plan.rank)
        self.on_not_finite(step, error, task)

    def _bind_copy(self, task: Task, spec: CopySpec) -> Run:
        remote = self._plan.remote_register_by_id.get(task.inputs[0])
        if remote is None:
            raise ExecutionError(
                "a copy between ranks reads a register that its plan does not have",
                op=task.name,
                rank=self._plan.rank,
                got=format_id(task.inputs[0]),
            )
        rank = unpack_id(remote.producer).rank
        sources = self._link.peer_slots(rank, remote.id)
        if sources is None or any(
            source.shape != remote.shape or source.dtype != remote.dtype.numpy for source in sources
        ):
            raise TransportError(
                f"rank {rank} does not publish register {remote.name!r} as this rank's plan has it",
                op=task.name,
                rank=self._plan.rank,
                got="nothing" if sources is None else f"{sources[0].dtype}{list(sources[0].shape)}",
                expected=f"{remote.dtype}{list(remote.shape)}",
                hint="compile all ranks' plans from one job",
            )
        index = region_index(spec.region)
        outputs = self._memory.slots(task.outputs[0])
        boxes = tuple(source[index] for source in sources)
        _check_box(task, self._plan.rank, boxes[0].shape, outputs[0].shape)
        readers, writers = len(boxes), len(outputs)

        def run(version: int) -> None:
            np.copyto(outputs[version % writers], boxes[version % readers])

        return run

    def _bind_slice(self, task: Task, spec: SliceSpec) -> Run | None:
        programs = []
        for inputs, (out,) in zip(*self._operands(task), strict=True):
            for piece in spec.pieces:
                source = inputs[piece.input][region_index(piece.source)]
                target = out[region_index(piece.target)]
                _check_box(task, self._plan.rank, source.shape, target.shape)
            reduction = spec.reduction
            if reduction is None and task.kind is TaskKind.BOXING_ZEROS:
                reduction = Reduction.SUM
            dtype = self._plan.register_by_id[task.outputs[0]].dtype
            programs.append(tuple(_slice_moves(spec, inputs, out, reduction, dtype)))
        if not any(programs):
            return None

        period = len(programs)

        def run(version: int) -> None:
            for move in programs[version % period]:
                move()

        return run


def regions_of(spec: ComputeSpec, microbatches: int) -> RegionTable | None:
    """The regions of an op's inputs and outputs by micro-batch; None where all have the same."""
    pieces = (*spec.input_pieces, *spec.output_pieces)
    if all(axis < 0 for axis in pieces):
        return None
    regions = (*spec.input_regions, *spec.output_regions)
    shapes = (*spec.input_shapes, *spec.output_shapes)
    count = len(spec.input_regions)
    rows = [
        tuple(
            piece_region(first, axis, shape[axis] if axis >= 0 else -1, microbatches, number)
            for first, axis, shape in zip(regions, pieces, shapes, strict=True)
        )
        for number in range(microbatches)
    ]
    return tuple((row[:count], row[count:]) for row in rows)


def _arrays(memory: Memory, registers: Sequence[int], version: int) -> tuple[Array, ...]:
    # A register with one version per step has one slot where a step has several micro-batches, so
    # the number of the run finds the slots of both kinds.
    arrays = []
    for register in registers:
        slots = memory.slots(register)
        arrays.append(slots[version % len(slots)])
    return tuple(arrays)


def has_no_work(definition: OpDef, inputs: Rows, outputs: Rows) -> bool:
    """Whether all outputs are empty, or are views that lie in their inputs' memory."""
    made = [array for row in outputs for array in row]
    if not made:
        return False
    views = dict(definition.view)
    return all(array.size == 0 for array in made) or all(
        position in views and same_memory(array, taken[views[position]])
        for row, taken in zip(outputs, inputs, strict=True)
        for position, array in enumerate(row)
    )


class Members(Protocol):
    """The devices among which a task's kernel passes something, told when the task runs."""

    def begin(self, version: int) -> None:
        """Before a run of the task, of this number."""

    def end(self) -> None:
        """After it."""


def with_members(members: Members, work: Callable[[int], object]) -> Run:
    """The callable of an op whose kernel passes something between devices."""

    def run(version: int) -> None:
        members.begin(version)
        work(version)
        members.end()

    return run


def microbatch_run(
    kernel: Kernel,
    context: KernelContext,
    inputs: Sequence[tuple[Array, ...]],
    outputs: Sequence[tuple[Array, ...]],
    microbatches: int,
    regions: RegionTable | None,
) -> Run:
    """The callable of an op that runs for every micro-batch; arrays by slot."""
    period = len(outputs)

    def run(version: int) -> None:
        context.step, context.microbatch = divmod(version, microbatches)
        if regions is not None:
            context.input_regions, context.output_regions = regions[context.microbatch]
        slot = version % period
        kernel(context, inputs[slot], outputs[slot])

    return run


def _check_box(task: Task, rank: int, source: tuple[int, ...], target: tuple[int, ...]) -> None:
    if source != target:
        raise ExecutionError(
            "a box does not fit the place it is copied to",
            op=task.name,
            rank=rank,
            got=str(list(source)),
            expected=str(list(target)),
        )


def not_finite(label: str, step: int, value: Array) -> NonFiniteError:
    wrong = value[~np.isfinite(value)]
    count = "" if value.size == 1 else f" ({wrong.size} of {value.size} elements)"
    return NonFiniteError(
        f"output {label!r} is not finite in step {step}",
        got=f"{wrong.flat[0]}{count}",
        expected="finite numbers",
        hint="a smaller learning rate or other initial values often help",
    )


def _whole(region: Region, shape: tuple[int, ...]) -> bool:
    return all(box == (0, extent) for box, extent in zip(region, shape, strict=True))


def _slice_moves(
    spec: SliceSpec,
    inputs: Sequence[Array],
    out: Array,
    reduction: Reduction | None,
    dtype: DType,
) -> list[Move]:
    """Array operations of a SliceBoxing for one combination of slots."""
    if out.size == 0:
        return []
    pieces = [
        (inputs[piece.input][region_index(piece.source)], piece.target) for piece in spec.pieces
    ]
    if reduction is None:
        return [move for source, target in pieces for move in _copy_moves(out, source, target)]
    starts_whole = bool(pieces) and _whole(pieces[0][1], out.shape)
    combined = pieces[1:] if starts_whole else pieces
    if combined and (
        reduction is Reduction.AVG
        or accumulator(reduction, out.dtype) != out.dtype
        or any(np.may_share_memory(out, source) for source, _ in combined)
    ):
        return [_Accumulation(out, pieces, reduction, dtype)]
    moves: list[Move]
    if starts_whole:
        moves = _copy_moves(out, *pieces[0])
    else:
        moves = [partial(out.fill, identity_of(reduction, dtype))]
    ufunc = UFUNCS[reduction]
    for source, region in combined:
        target = out[region_index(region)]
        moves.append(partial(ufunc, target, source, out=target))
    return moves


def _copy_moves(out: Array, source: Array, region: Region) -> list[Move]:
    target = out[region_index(region)]
    if source.flags.c_contiguous and target.flags.c_contiguous and same_memory(source, target):
        return []
    return [partial(np.copyto, target, source)]


class _Accumulation:
    """Combines pieces in a work array of the reduction's accumulator, then stores the result.

    An average divides each element by the number of pieces that cover it.
    """

    __slots__ = ("_counts", "_identity", "_out", "_pieces", "_ufunc", "_work")

    def __init__(
        self,
        out: Array,
        pieces: Sequence[tuple[Array, Region]],
        reduction: Reduction,
        dtype: DType,
    ) -> None:
        self._out = out
        # `empty_like` and `zeros_like` make arrays where `out` is, on a device too.
        self._work: Array = np.empty_like(out, accumulator(reduction, out.dtype))
        self._identity = identity_of(reduction, dtype)
        self._ufunc = UFUNCS[reduction]
        self._pieces = [(source, self._work[region_index(region)]) for source, region in pieces]
        self._counts: Array | None = None
        if reduction is Reduction.AVG:
            counts = np.zeros_like(out, np.int64)
            for _, region in pieces:
                counts[region_index(region)] += 1
            self._counts = np.maximum(counts, 1).astype(
                self._work.dtype if dtype.is_floating else np.int64
            )

    def __call__(self) -> None:
        self._work.fill(self._identity)
        for source, target in self._pieces:
            self._ufunc(target, source, out=target)
        if self._counts is not None:
            divide(self._work, self._counts)
        np.copyto(self._out, self._work, casting="unsafe")
