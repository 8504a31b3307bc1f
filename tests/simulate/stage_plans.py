"""Plans of a pipeline with one rank a stage and one compute task a segment, written by hand.

A forward or backward segment of a chunk copies what the segment before it made on another rank and
makes what the next one wants. Registers have as few slots as the slots of the rank allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from plancompiler.ir import DType, NdSbp
from plancompiler.ir.pipeline import Pipeline, Segment, SegmentKind, Slot, in_flight
from plancompiler.ir.task import (
    CONTROL_SLOT,
    TaskKind,
    family_of,
    pack_register_id,
    pack_task_id,
    rank_of,
)
from plancompiler.plan.plan import CopySpec, Plan, RegisterDesc, RemoteRegister, Stream, Task

END_FAMILY = 1000
WORK, COPY = 1, 0
"""Families of segment i are 2 * i and this."""


def stage_plans(pipeline: Pipeline) -> dict[int, Plan]:
    """The plans of all stages, by rank."""
    return {stage: _StagePlan(pipeline, stage).build() for stage in range(pipeline.stages)}


def _before(pipeline: Pipeline, segment: Segment) -> Segment | None:
    """The segment of the neighbouring chunk whose result a segment reads."""
    if segment.kind is SegmentKind.FORWARD and segment.chunk > 0:
        return Segment(SegmentKind.FORWARD, segment.chunk - 1)
    if segment.kind is SegmentKind.BACKWARD and segment.chunk < pipeline.chunks - 1:
        return Segment(SegmentKind.BACKWARD, segment.chunk + 1)
    return None


def _kept(segment: Segment) -> Segment | None:
    """The segment of the same chunk whose result a segment reads."""
    if segment.kind is SegmentKind.BACKWARD:
        return Segment(SegmentKind.FORWARD, segment.chunk)
    if segment.kind is SegmentKind.WEIGHT:
        return Segment(SegmentKind.BACKWARD, segment.chunk)
    return None


class _StagePlan:
    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        self.pipeline = pipeline
        self.stage = stage
        slots = pipeline.slots(stage)
        self.here = sorted({slot.segment for slot in slots})
        """Segments of this rank, as indices into the pipeline's."""
        self.slots = [Slot(self.here.index(slot.segment), slot.microbatch) for slot in slots]
        self.registers: list[RegisterDesc] = []
        self.remote: list[RemoteRegister] = []

    def build(self) -> Plan:
        return Plan(
            job="stages",
            rank=self.stage,
            world_size=self.pipeline.stages,
            seed=0,
            tasks=tuple(task for number in range(len(self.here)) for task in self.tasks(number)),
            registers=tuple(self.registers),
            remote_registers=tuple(self.remote),
            blocks=(),
            communicators=(),
            variables=(),
            outputs=(),
            schedule=self.pipeline.schedule,
            microbatches=self.pipeline.microbatches,
            segments=tuple(self.pipeline.segments[index] for index in self.here),
            slots=tuple(self.slots),
        )

    def tasks(self, number: int) -> Iterator[Task]:
        """Receive, work, end."""
        index = self.here[number]
        segment = self.pipeline.segments[index]
        end = pack_task_id(self.stage, END_FAMILY, number)
        controls: list[int] = []
        if segment.kind.per_microbatch:
            inputs = []
            for source in (_before(self.pipeline, segment), _kept(segment)):
                if source is None:
                    continue
                origin, rank = self.pipeline.index[source], source.chunk % self.pipeline.stages
                made = pack_register_id(rank, 2 * origin + WORK)
                if rank == self.stage:
                    inputs.append(made)
                    continue
                copy = pack_task_id(self.stage, 2 * index + COPY)
                copied = pack_register_id(self.stage, 2 * index + COPY)
                controls = [pack_register_id(self.stage, 2 * index + COPY, 0, CONTROL_SLOT)]
                self.remote.append(
                    RemoteRegister(
                        made, copied, str(source), (1,), DType.FLOAT32, made, (copy,), True
                    )
                )
                work = pack_task_id(self.stage, 2 * index + WORK)
                self.add_register(copied, f"received {source}", copy, [work])
                self.add_register(controls[0], f"{source} is here", copy, [end])
                inputs.append(copied)
                yield Task(
                    copy,
                    TaskKind.COPY_COMM_NET,
                    Stream.COPY,
                    f"receive {source}",
                    (made,),
                    (copied,),
                    CopySpec(((0, 1),)),
                    controls_out=tuple(controls),
                    segment=number,
                )
            yield Task(
                pack_task_id(self.stage, 2 * index + WORK),
                TaskKind.COMPUTE,
                Stream.COMPUTE,
                str(segment),
                tuple(inputs),
                (self.result_of(index),),
                None,
                segment=number,
            )
        yield Task(
            end,
            TaskKind.STEP_END,
            Stream.COMPUTE,
            f"{segment} end",
            (),
            (),
            None,
            controls_in=tuple(controls),
            segment=number,
        )

    def result_of(self, index: int) -> int:
        """The register of what a segment makes, with its readers here and elsewhere."""
        segment = self.pipeline.segments[index]
        near, far, copied = [], [], -1
        count = 1
        for reader, other in enumerate(self.pipeline.segments):
            if segment not in (_before(self.pipeline, other), _kept(other)):
                continue
            rank = other.chunk % self.pipeline.stages
            if rank == self.stage:
                near.append(pack_task_id(rank, 2 * reader + WORK))
                made, read = self.here.index(index), self.here.index(reader)
                count = max(count, in_flight(self.slots, made, read))
            else:
                far.append(pack_task_id(rank, 2 * reader + COPY))
                copied = pack_register_id(rank, 2 * reader + COPY)
        register = pack_register_id(self.stage, 2 * index + WORK)
        producer = pack_task_id(self.stage, 2 * index + WORK)
        self.add_register(register, str(segment), producer, [*near, *far], count, copied)
        return register

    def add_register(
        self,
        register: int,
        name: str,
        producer: int,
        consumers: Sequence[int],
        count: int = 1,
        sync_id: int = -1,
    ) -> None:
        self.registers.append(
            RegisterDesc(
                register,
                name,
                (1,),
                DType.FLOAT32,
                NdSbp(()),
                producer,
                tuple(consumers),
                0,
                register_count=count,
                sync_id=sync_id,
                per_microbatch=True,
            )
        )


def sending_with_one_slot(plan: Plan) -> Plan:
    """The plan with what is sent in registers of their own that have a single slot."""
    registers, sent_as = [], {}
    for register in plan.registers:
        near = tuple(task for task in register.consumers if rank_of(task) == plan.rank)
        far = tuple(task for task in register.consumers if rank_of(task) != plan.rank)
        if near and far:
            kept = pack_register_id(plan.rank, family_of(register.id), 0, 1)
            sent_as[register.id] = kept
            registers.append(replace(register, id=kept, consumers=near, sync_id=-1))
            register = replace(register, consumers=far)
        registers.append(replace(register, register_count=1) if far else register)
    tasks = tuple(
        replace(
            task,
            inputs=tuple(sent_as.get(each, each) for each in task.inputs),
            outputs=(*task.outputs, *(sent_as[each] for each in task.outputs if each in sent_as)),
        )
        for task in plan.tasks
    )
    return replace(plan, tasks=tasks, registers=tuple(registers))
