"""Whether the whole step of all ranks comes to its end, from the shared graph alone.

Where each worker compiles its own plan nobody has all plans, so the master asks before it sends
anything: stages, their slots, and the copies between stages are all that matters, and their number
does not grow with the ranks.
"""

from __future__ import annotations

from plancompiler.boxing.graph import BoxingTaskGraph
from plancompiler.errors import DeadlockError
from plancompiler.ir.pipeline import Pipeline
from plancompiler.ir.task import CROSSING
from plancompiler.lower.aliases import CROSSING_SLOTS
from plancompiler.plan.rules_schedule import (
    Gang,
    Link,
    PartRun,
    StepModel,
    describe_circle,
    slot_name,
)


def check_step(graph: BoxingTaskGraph) -> None:
    """Raise DeadlockError, with the stages that wait for each other, where a step cannot end.

    A part of the model is a segment; a gang is a stage. Registers between stages are taken to have
    the fewest slots that lowering gives them.
    """
    pipeline = graph.pipeline
    if pipeline is None:
        return
    model = step_model_of(graph, pipeline)
    circle = model.run().circle()
    if circle:
        raise DeadlockError(
            f"with schedule {pipeline.schedule}, {len(circle)} pipeline stages wait for each other",
            rank=model.gangs[circle[0].gang].ranks[0],
            got=describe_circle(model, circle),
            expected="data between stages that follow the order of the schedule",
        )


def step_model_of(graph: BoxingTaskGraph, pipeline: Pipeline) -> StepModel:
    """The step of a graph: one gang per stage, named by its first rank."""
    first_rank: dict[int, int] = {}
    for placed in graph.ops:
        micro = placed.op.micro
        if micro is not None and pipeline.segments[micro.segment].kind.per_microbatch:
            stage = pipeline.segments[micro.segment].chunk % pipeline.stages
            first_rank.setdefault(stage, placed.op.placement.rank_list[0])
    gangs = []
    for stage, rank in sorted(first_rank.items()):
        slots = pipeline.slots(stage)
        gangs.append(
            Gang(
                (rank,),
                tuple(PartRun(slot.segment, slot.microbatch) for slot in slots),
                tuple(slot_name(pipeline.segments, slot) for slot in slots),
            )
        )
    links = []
    for family in graph.families:
        if family.kind in CROSSING:
            producer = graph.family_by_number[family.inputs[0].family]
            links.append(
                Link(
                    producer.name,
                    producer.segment,
                    family.segment,
                    min(CROSSING_SLOTS, pipeline.microbatches),
                    producer.per_microbatch,
                )
            )
    return StepModel(tuple(gangs), tuple(links))
