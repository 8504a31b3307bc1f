"""The segments of one rank's step, and the slots in which its streams run them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from plancompiler.errors import VerifyError
from plancompiler.ir.pipeline import (
    WHOLE_STEP,
    Pipeline,
    Segment,
    SegmentKind,
    Slot,
    in_flight,
)
from plancompiler.lower.rank_task_graph import RankTaskGraph


@dataclass(frozen=True)
class RankSegments:
    """A rank's part of the pipeline; segments are numbered in plan order."""

    segments: tuple[Segment, ...] = (WHOLE_STEP,)
    slots: tuple[Slot, ...] = (Slot(0, 0),)
    number: tuple[int, ...] = (0,)
    """Per segment of the pipeline, its number here; -1 where the rank has no part in it."""
    schedule: str = ""
    microbatches: int = 1

    def in_flight(self, first: int, last: int) -> int:
        """The most micro-batches between the start of one segment and the end of a later one."""
        known = self._in_flight.get((first, last))
        if known is None:
            known = self._in_flight[first, last] = in_flight(self.slots, first, last)
        return known

    @cached_property
    def _in_flight(self) -> dict[tuple[int, int], int]:
        return {}


def segments_of(graph: RankTaskGraph) -> RankSegments:
    """The segments in which the rank has tasks, and the schedule of its stage."""
    pipeline = graph.rank_slice.pipeline
    if pipeline is None:
        return RankSegments()
    present = sorted({task.segment for task in graph.tasks}) or [len(pipeline.segments) - 1]
    stage = _stage_of(graph, pipeline, present)
    slots = [slot for slot in pipeline.slots(stage) if slot.segment in present]
    merged = _merged(pipeline, present, slots)
    segments: list[Segment] = []
    number = [-1] * len(pipeline.segments)
    for segment in present:
        if segment in merged.values():
            number[segment] = len(segments) - 1
            continue
        number[segment] = len(segments)
        named = pipeline.segments[segment]
        if segment in merged:
            named = Segment(SegmentKind.FORWARD_BACKWARD, named.chunk)
        segments.append(named)
    return RankSegments(
        segments=tuple(segments),
        slots=tuple(
            Slot(number[slot.segment], slot.microbatch)
            for slot in slots
            if slot.segment not in merged.values()
        ),
        number=tuple(number),
        schedule=pipeline.schedule,
        microbatches=pipeline.microbatches,
    )


def _stage_of(graph: RankTaskGraph, pipeline: Pipeline, present: list[int]) -> int:
    """The stage that the rank belongs to; -1 for one without work per micro-batch."""
    stages = {
        pipeline.segments[segment].chunk % pipeline.stages
        for segment in present
        if pipeline.segments[segment].kind.per_microbatch
    }
    if len(stages) > 1:
        raise VerifyError(
            "a rank belongs to more than one pipeline stage",
            rank=graph.rank,
            got=f"stages {', '.join(map(str, sorted(stages)))}",
            expected="one stage",
        )
    return stages.pop() if stages else -1


def _merged(pipeline: Pipeline, present: list[int], slots: list[Slot]) -> dict[int, int]:
    """Forward segments → backward segments that always follow them directly.

    Run as one segment they share memory by lifetime, as a step without micro-batches does.
    """
    follower: dict[int, set[Slot | None]] = {}
    for slot, after in zip(slots, [*slots[1:], None], strict=True):
        same = after is not None and after.microbatch == slot.microbatch
        follower.setdefault(slot.segment, set()).add(
            Slot(after.segment, 0) if after is not None and same else None
        )
    merged = {}
    for first, last in pairwise(present):
        kinds = pipeline.segments[first].kind, pipeline.segments[last].kind
        if kinds == (SegmentKind.FORWARD, SegmentKind.BACKWARD) and follower[first] == {
            Slot(last, 0)
        }:
            merged[first] = last
    return merged
