"""A step of several micro-batches: segments, slots, and the schedules that order them.

A step is cut into *segments*: what is done once before all micro-batches (prologue), the forward,
backward and weight-gradient part of each chunk of the model, and what is done once after them
(epilogue). A *chunk* is a pipeline stage of the model; with `interleaved` a group of ranks has
several. A *slot* is one segment run for one micro-batch. A schedule gives every stage the list of
its slots, which all its ranks and all their streams follow; nothing else knows about schedules.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class SegmentKind(enum.Enum):
    """The part of a step that a segment is."""

    STEP = "step"
    """All of it: a step without micro-batches."""
    PROLOGUE = "prologue"
    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"
    """Gradients of parameters, where the schedule runs them apart (`zero_bubble`)."""
    EPILOGUE = "epilogue"
    FORWARD_BACKWARD = "forward and backward"
    """Both in one, on a rank that always runs the one right after the other."""

    def __str__(self) -> str:
        return self.value

    @property
    def per_microbatch(self) -> bool:
        """Whether it runs once per micro-batch; else once per step."""
        return self not in (SegmentKind.STEP, SegmentKind.PROLOGUE, SegmentKind.EPILOGUE)


@dataclass(frozen=True, slots=True, order=False)
class Segment:
    """A part of a step."""

    kind: SegmentKind
    chunk: int = -1
    """The chunk of the model, for those that run once per micro-batch."""

    def __str__(self) -> str:
        """`prologue`, `forward 2`."""
        return f"{self.kind} {self.chunk}" if self.chunk >= 0 else str(self.kind)


WHOLE_STEP = Segment(SegmentKind.STEP)


class Slot(NamedTuple):
    """One segment run for one micro-batch (0 for those that run once per step)."""

    segment: int
    """Index into a list of segments: the pipeline's, or in a plan the plan's."""
    microbatch: int


@dataclass(frozen=True)
class Pipeline:
    """How the micro-batches of a job are scheduled; the same for all ranks."""

    schedule: str
    """`gpipe`, `1f1b`, `interleaved` or `zero_bubble`."""
    microbatches: int
    stages: int
    """Groups of ranks, one after another."""
    chunks: int
    """Chunks of the model: `stages`, or with `interleaved` a multiple. Chunk c is on stage
    c mod stages."""

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All segments in global order, which is a topological order of the job's data."""
        found = [Segment(SegmentKind.PROLOGUE)]
        found += [Segment(SegmentKind.FORWARD, chunk) for chunk in range(self.chunks)]
        for chunk in reversed(range(self.chunks)):
            found.append(Segment(SegmentKind.BACKWARD, chunk))
            if self.schedule == "zero_bubble":
                found.append(Segment(SegmentKind.WEIGHT, chunk))
        found.append(Segment(SegmentKind.EPILOGUE))
        return tuple(found)

    @cached_property
    def index(self) -> dict[Segment, int]:
        """Segment → its index in `segments`."""
        return {segment: index for index, segment in enumerate(self.segments)}
