"""`build_boxing_task_graph`: number all families along one global order and box every edge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from plancompiler.boxing.exchange import BoxingPlan, plan_boxing
from plancompiler.boxing.graph import (
    BoxingTaskGraph,
    FamilyOutput,
    OpGraph,
    PlacedOp,
    TaskFamily,
    TensorLayout,
    Transfer,
    task_kind_of,
)
from plancompiler.boxing.planner import BoxingStep
from plancompiler.costs import Machine, machine_of_job
from plancompiler.errors import IdOverflowError, JobError, PlacementError, RankError
from plancompiler.ir import Job, NdSbp, Op, Placement, Split, Value
from plancompiler.ir.pipeline import WHOLE_STEP, Pipeline
from plancompiler.ir.shard import piece_shape
from plancompiler.ir.task import CONTROL_SLOT, Primitive, TaskKind
from plancompiler.ops.registry import op_def
from plancompiler.ops.rule import NdSignature

HOST = "cpu"
"""Device type of the placements that compute in host memory."""

Target = tuple[Placement, NdSbp]
"""Where a consumer wants a value."""


def build_boxing_task_graph(graph: OpGraph, world_size: int) -> BoxingTaskGraph:
    """Families of all boxing edges, numbered along one topological order of the job with its
    boxing.

    A boxing stands right after its value's producer, so that reductions of gradients start early,
    unless a redistribute asks for a late one. Ops that update variables stand after everything
    that reads the old values. With several micro-batches, families are numbered segment by segment.
    """
    job = graph.job
    if job.world_size > world_size:
        op = next(op for op in job.ops if max(op.placement.rank_list) >= world_size)
        raise RankError(
            "the job uses a rank outside the world",
            at=op,
            got=f"rank {max(op.placement.rank_list)}",
            expected=f"ranks below {world_size}",
            hint=f"run on {job.world_size} ranks, or change the job's placements",
        )
    _check_devices(job)
    ordered = _updates_last(tuple(zip(job.ops, graph.signatures, strict=True)))
    builder = _FamilyBuilder(ordered, job.pipeline, machine_of_job(job))
    for op, signature in ordered:
        builder.add(op, signature)
    return BoxingTaskGraph(
        job_name=job.name,
        seed=job.seed,
        world_size=world_size,
        ops=tuple(builder.placed),
        families=tuple(builder.boundary_families()),
        pipeline=job.pipeline,
    )


def _check_devices(job: Job) -> None:
    """A rank is one process with one device."""
    placements = dict.fromkeys(op.placement for op in job.ops)
    by_device: dict[str, set[int]] = {}
    for placement in placements:
        by_device.setdefault(placement.device_type, set()).update(placement.rank_list)
    if len(by_device) < 2:
        return
    both = set.intersection(*by_device.values())
    for op in job.ops:
        if not both.isdisjoint(op.placement.rank_list) and op.placement.device_type != HOST:
            rank = min(both.intersection(op.placement.rank_list))
            raise PlacementError(
                f"rank {rank} is on two devices",
                at=op,
                got=" and ".join(sorted(by_device)),
                expected="one device for each rank",
                hint="give what runs on the other device to other ranks",
            )


PlacedPair = tuple[Op, NdSignature]


def _updates_last(ops: tuple[PlacedPair, ...]) -> tuple[PlacedPair, ...]:
    """The job's order with updates, and what depends on them, after all other ops.

    Updates overwrite their variable, so every reader of the old value must come before.
    """
    updated: set[str] = set()
    first, last = [], []
    for op, signature in ops:
        if op_def(op.kind).mutates or any(value.name in updated for value in op.inputs):
            updated.update(value.name for value in op.outputs)
            last.append((op, signature))
        else:
            first.append((op, signature))
    return (*first, *_readers_before_writers(last))


def _readers_before_writers(ops: list[PlacedPair]) -> list[PlacedPair]:
    """The order nearest to the given one in which no op reads a value that was overwritten."""
    maker = {value.name: place for place, (op, _) in enumerate(ops) for value in op.outputs}
    writer = {
        op.inputs[source].name: place
        for place, (op, _) in enumerate(ops)
        for _, source in op_def(op.kind).mutates
    }
    waits: list[set[int]] = [set() for _ in ops]
    for place, (op, _) in enumerate(ops):
        for value in op.inputs:
            if value.name in maker:
                waits[place].add(maker[value.name])
            overwriter = writer.get(value.name, place)
            if overwriter != place:
                waits[overwriter].add(place)
    followers: list[list[int]] = [[] for _ in ops]
    for place, before in enumerate(waits):
        for other in before:
            followers[other].append(place)
    missing = [len(before) for before in waits]
    ready = [place for place, count in enumerate(missing) if not count]
    heapify(ready)
    ordered = []
    while ready:
        place = heappop(ready)
        ordered.append(ops[place])
        for follower in followers[place]:
            missing[follower] -= 1
            if not missing[follower]:
                heappush(ready, follower)
    if len(ordered) < len(ops):
        op, value = next(
            (op, value)
            for place, (op, _) in enumerate(ops)
            if missing[place]
            for value in op.inputs
            if writer.get(value.name, place) != place
        )
        raise JobError(
            "an op reads a variable's old value after its update",
            at=op,
            got=f"%{value.name}, which {ops[writer[value.name]][0].name} overwrites before",
            hint="read the updated value only, or keep the old one in an op of its own before it: "
            "value.redistribute(sbp=...)",
        )
    return ordered


def _late_boxings(
    ops: Sequence[tuple[Op, NdSignature]],
) -> dict[str, list[tuple[Op, NdSignature]]]:
    """Late redistributes, by the op before which their boxing stands.

    That is the one they name if it lies between their value's producer and themselves; passes may
    have moved it or merged it into another.
    """
    place = {op.name: number for number, (op, _) in enumerate(ops)}
    made = {value.name: number for number, (op, _) in enumerate(ops) for value in op.outputs}
    late: dict[str, list[tuple[Op, NdSignature]]] = {}
    for op, signature in ops:
        named = op.attr("late") if op.kind == "redistribute" else None
        if isinstance(named, str):
            start = place.get(named, -1)
            fits = made[op.inputs[0].name] < start <= place[op.name]
            late.setdefault(named if fits else op.name, []).append((op, signature))
    return late


class _Boxing(NamedTuple):
    """A value that is wanted in another layout than it was made in."""

    op: Op
    value: Value
    """As it is there for one micro-batch."""
    sbp: NdSbp
    made: FamilyOutput
    target: Target


def _segment_of(op: Op) -> int:
    return 0 if op.micro is None else op.micro.segment


class _FamilyBuilder:
    def __init__(
        self, ops: Sequence[tuple[Op, NdSignature]], pipeline: Pipeline | None, machine: Machine
    ) -> None:
        self._machine = machine
        self.placed: list[PlacedOp] = []
        self._segments = (WHOLE_STEP,) if pipeline is None else pipeline.segments
        self._microbatches = 1 if pipeline is None else pipeline.microbatches
        self._segment = 0
        self._waiting: dict[int, list[_Boxing]] = {}
        """Boxings whose segment is still to come, by segment."""
        self._reader_segment: dict[tuple[str, Target], int] = {}
        """The first segment that wants a value at a target."""
        self._families: dict[int, TaskFamily] = {}
        self._transport: set[int] = set()
        self._next = 0
        self._located: dict[tuple[str, Target], FamilyOutput] = {}
        self._targets: dict[str, dict[Target, None]] = {}
        self._made: dict[str, tuple[Op, Value, NdSbp, FamilyOutput]] = {}
        self._late: dict[str, FamilyOutput] = {}
        self._in_host_memory: dict[tuple[str, str, NdSbp], FamilyOutput] = {}
        self._late_before = _late_boxings(ops)
        late = {op.name for boxings in self._late_before.values() for op, _ in boxings}
        for op, signature in ops:
            if op.name not in late:
                for value, sbp in zip(op.inputs, signature.inputs, strict=True):
                    target = (op.placement, sbp)
                    self._targets.setdefault(value.name, {})[target] = None
                    self._reader_segment.setdefault((value.name, target), _segment_of(op))

    def add(self, op: Op, signature: NdSignature) -> None:
        """Number the late boxings that start here, the op's family, then those that box its
        outputs.
        """
        self._enter(_segment_of(op))
        for reader, wanted in self._late_before.get(op.name, ()):
            maker, value, sbp, made = self._made[reader.inputs[0].name]
            target = (reader.placement, wanted.inputs[0])
            self._late[reader.name] = self._box(maker, value, sbp, made, target, late=True)
        if op.name in self._late:
            inputs: tuple[FamilyOutput, ...] = (self._late[op.name],)
        else:
            inputs = tuple(
                self._located[value.name, (op.placement, sbp)]
                for value, sbp in zip(op.inputs, signature.inputs, strict=True)
            )
        if len(op.outputs) > CONTROL_SLOT:
            raise IdOverflowError(
                "the op has more outputs than the slots of an id",
                at=op,
                got=len(op.outputs),
                expected=f"at most {CONTROL_SLOT}",
            )
        number = self._number()
        pieces = self._pieces(op)
        self.placed.append(PlacedOp(op, signature, number, inputs))
        self._families[number] = TaskFamily(
            number=number,
            kind=task_kind_of(op.kind),
            name=op.name,
            placement=op.placement,
            inputs=inputs,
            outputs=tuple(
                TensorLayout(value.shape, value.dtype, sbp)
                for value, sbp in zip(pieces, signature.outputs, strict=True)
            ),
            source=op.source,
            segment=self._segment,
            per_microbatch=self._per_microbatch and not op_def(op.kind).collects,
        )
        for slot, (value, sbp) in enumerate(zip(pieces, signature.outputs, strict=True)):
            made = FamilyOutput(number, slot)
            self._located[value.name, (op.placement, sbp)] = made
            self._made[value.name] = (op, value, sbp, made)
            for target in self._targets.get(value.name, ()):
                if target != (op.placement, sbp):
                    boxing = _Boxing(op, value, sbp, made, target)
                    segment = self._boxing_segment(boxing)
                    if segment == self._segment:
                        self._place(boxing)
                    else:
                        if not op_def(op.kind).collects:
                            # What the producer's ranks do to it is work of their own stage.
                            self._steps_before(boxing)
                        self._waiting.setdefault(segment, []).append(boxing)

    @property
    def _per_microbatch(self) -> bool:
        return self._segments[self._segment].kind.per_microbatch

    def _enter(self, segment: int) -> None:
        """Go on to a segment; boxings that belong there, such as receives, are its first tasks."""
        while self._segment < segment:
            self._segment += 1
            for boxing in self._waiting.pop(self._segment, ()):
                self._place(boxing)

    def _place(self, boxing: _Boxing) -> None:
        op, value, sbp, made, target = boxing
        self._located[value.name, target] = self._box(op, value, sbp, made, target)

    def _steps_before(self, boxing: _Boxing) -> FamilyOutput:
        """The value after what is done on its own placement before it is exchanged."""
        op, value, sbp, made, target = boxing
        placement, _ = target
        plan = self._plan(op, value, sbp, target)
        for step in plan.before:
            shared = (value.name, (op.placement, step.after))
            made = self._located.get(shared) or self._step(op, value, made, step)
            self._located[shared] = made
        return made if plan.exchange is None else self._in_reach(op, value, made, placement)

    def _boxing_segment(self, boxing: _Boxing) -> int:
        """Where a boxing runs: with its producer; where the values of all micro-batches are
        collected first, or ranks of another stage take part, with its first reader.
        """
        op, value, _, _, target = boxing
        if op_def(op.kind).collects or (self._per_microbatch and target[0] != op.placement):
            return self._reader_segment[value.name, target]
        return self._segment

    def _pieces(self, op: Op) -> tuple[Value, ...]:
        """The op's outputs as they are there for one micro-batch."""
        if op.micro is None or not self._per_microbatch:
            return op.outputs
        return tuple(
            replace(value, shape=piece_shape(value.shape, over.axis, self._microbatches))
            if isinstance(over, Split)
            else value
            for value, over in zip(op.outputs, op.micro.outputs, strict=True)
        )

    def boundary_families(self) -> list[TaskFamily]:
        """Transport families and the compute families they touch, in global order."""
        kept = set(self._transport)
        for number in self._transport:
            kept.update(source.family for source in self._families[number].inputs)
        for placed in self.placed:
            if any(source.family in self._transport for source in placed.inputs):
                kept.add(placed.family)
        return [self._families[number] for number in sorted(kept)]

    def _plan(self, op: Op, value: Value, sbp: NdSbp, target: Target) -> BoxingPlan:
        return plan_boxing(op.placement, sbp, *target, value.shape, value.dtype, self._machine)

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    def _box(
        self,
        op: Op,
        value: Value,
        sbp: NdSbp,
        made: FamilyOutput,
        target: Target,
        late: bool = False,
    ) -> FamilyOutput:
        placement, _ = target
        plan = self._plan(op, value, sbp, target)
        if late:
            for step in plan.before:
                made = self._step(op, value, made, step, late)
            if plan.exchange is not None:
                made = self._in_reach(op, value, made, placement)
        else:
            made = self._steps_before(_Boxing(op, value, sbp, made, target))
        if plan.exchange is None:
            return made
        if op.kind == "variable" and self._families[made.family].kind is TaskKind.VARIABLE:
            # Readers on other ranks must not see the variable being updated.
            made = self._copied(op, value, made, TaskKind.BOXING_IDENTITY, "copy")
        exchange = plan.exchange
        source, device = exchange.src_placement.device_type, placement.device_type
        transfer = Transfer(
            primitive=Primitive.EXCHANGE,
            reduction=exchange.reduction,
            src_placement=exchange.src_placement,
            src_sbp=exchange.src_sbp,
            late=late,
        )
        layout = TensorLayout(value.shape, value.dtype, exchange.dst_sbp)
        copy = TaskKind.SEND_RECV if source == device != HOST else TaskKind.COPY_COMM_NET
        copied = self._transport_family(
            copy, f"{value.name}:copy", placement, (made,), layout, transfer, op
        )
        if source != device and device != HOST:
            copied = self._transport_family(
                TaskKind.COPY_HD,
                f"{value.name}:to {device}",
                placement,
                (copied,),
                layout,
                transfer,
                op,
            )
        return self._transport_family(
            TaskKind.SLICE_BOXING,
            f"{value.name}:assemble",
            placement,
            (made, copied),
            layout,
            transfer,
            op,
        )

    def _step(
        self, op: Op, value: Value, made: FamilyOutput, step: BoxingStep, late: bool = False
    ) -> FamilyOutput:
        return self._transport_family(
            step.kind,
            f"{value.name}:{step.primitive}",
            op.placement,
            (made,),
            TensorLayout(value.shape, value.dtype, step.after),
            Transfer(
                primitive=step.primitive,
                mesh_axes=step.mesh_axes,
                reduction=step.reduction,
                src_axis=step.src_axis,
                dst_axis=step.dst_axis,
                src_sbp=step.before,
                late=late,
            ),
            op,
        )

    def _copied(
        self, op: Op, value: Value, made: FamilyOutput, kind: TaskKind, name: str
    ) -> FamilyOutput:
        layout = self._families[made.family].outputs[made.slot]
        return self._transport_family(
            kind,
            f"{value.name}:{name}",
            op.placement,
            (made,),
            layout,
            Transfer(primitive=Primitive.COPY, src_sbp=layout.sbp),
            op,
        )

    def _in_reach(
        self, op: Op, value: Value, made: FamilyOutput, target: Placement
    ) -> FamilyOutput:
        """The value where ranks on the target's devices can read it: for devices of another type
        a copy in host memory.
        """
        if op.placement.device_type in (HOST, target.device_type):
            return made
        layout = self._families[made.family].outputs[made.slot]
        shared = (value.name, HOST, layout.sbp)
        if shared not in self._in_host_memory:
            self._in_host_memory[shared] = self._copied(
                op, value, made, TaskKind.COPY_HD, "to host"
            )
        return self._in_host_memory[shared]

    def _transport_family(
        self,
        kind: TaskKind,
        name: str,
        placement: Placement,
        inputs: tuple[FamilyOutput, ...],
        output: TensorLayout,
        transfer: Transfer,
        op: Op,
    ) -> FamilyOutput:
        number = self._number()
        self._transport.add(number)
        self._families[number] = TaskFamily(
            number=number,
            kind=kind,
            name=name,
            placement=placement,
            inputs=inputs,
            outputs=(output,),
            transfer=transfer,
            source=op.source,
            segment=self._segment,
            per_microbatch=self._per_microbatch,
        )
        return FamilyOutput(number, 0)
