"""A step of several micro-batches: segments, slots, and the schedules that order them.

A step is cut into *segments*: what is done once before all micro-batches (prologue), the forward,
backward and weight-gradient part of each chunk of the model, and what is done once after them
(epilogue). A *chunk* is a pipeline stage of the model; with `interleaved` a group of ranks has
several. A *slot* is one segment run for one micro-batch. A schedule gives every stage the list of
its slots, which all its ranks and all their streams follow; nothing else knows about schedules.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from plancompiler.errors import UsageError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


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
MOST = 1 << 14
"""Micro-batches, stages or chunks at most: slots are written out, numbers may come from afar."""


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

    def __str__(self) -> str:
        """`1f1b microbatches=4 stages=2 chunks=2`."""
        return (
            f"{self.schedule} microbatches={self.microbatches} stages={self.stages} "
            f"chunks={self.chunks}"
        )

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All segments in global order, which is a topological order of the job's data."""
        segments = [Segment(SegmentKind.PROLOGUE)]
        segments += [Segment(SegmentKind.FORWARD, chunk) for chunk in range(self.chunks)]
        for chunk in reversed(range(self.chunks)):
            segments.append(Segment(SegmentKind.BACKWARD, chunk))
            if self.schedule == "zero_bubble":
                segments.append(Segment(SegmentKind.WEIGHT, chunk))
        segments.append(Segment(SegmentKind.EPILOGUE))
        return tuple(segments)

    @cached_property
    def index(self) -> dict[Segment, int]:
        """Segment → its index in `segments`."""
        return {segment: index for index, segment in enumerate(self.segments)}

    def check(self) -> None:
        """A UsageError for numbers or a schedule that cannot mean anything."""
        if self.schedule not in SCHEDULES:
            raise UsageError(
                "there is no such pipeline schedule",
                got=repr(self.schedule),
                expected=f"one of {', '.join(SCHEDULES)}",
            )
        for name in ("microbatches", "stages", "chunks"):
            if not 1 <= getattr(self, name) <= MOST:
                raise UsageError(
                    f"a pipeline cannot have that many {name}",
                    got=f"{name}={getattr(self, name)}",
                    expected=f"1 to {MOST}",
                )
        interleaved = self.schedule == "interleaved"
        if self.chunks % self.stages:
            raise UsageError(
                "the chunks of a model do not divide evenly among the stages of its pipeline",
                got=f"{self.chunks} chunks on {self.stages} stages",
                expected="a multiple of the stages",
            )
        if self.chunks != self.stages and not interleaved:
            raise UsageError(
                f"with schedule {self.schedule} every stage of a pipeline has one chunk of the "
                "model",
                got=f"{self.chunks} chunks on {self.stages} stages",
                expected=f"{self.stages} chunks",
                hint="several chunks on a stage are what schedule=interleaved is for",
            )
        if interleaved and self.microbatches % self.stages:
            raise UsageError(
                "schedule interleaved takes micro-batches in groups of as many as there are stages",
                got=f"{self.microbatches} micro-batches on {self.stages} stages",
                expected=f"a multiple of {self.stages}",
                hint="change microbatches, or choose the schedule 1f1b",
            )

    def slots(self, stage: int) -> tuple[Slot, ...]:
        """What the ranks of a stage run in a step, as indices into `segments`: the prologue, the
        micro-batches as the schedule orders them, the epilogue. Stage -1 is that of ranks without
        work per micro-batch. A UsageError for a stage that there is not, or where `check` fails.
        """
        if not -1 <= stage < self.stages:
            raise UsageError(
                "a pipeline has no such stage", got=stage, expected=f"-1 to {self.stages - 1}"
            )
        known = self._known_slots
        if stage not in known:
            index = self.index
            known[stage] = (
                Slot(0, 0),
                *(Slot(index[segment], m) for segment, m in self._work(stage)),
                Slot(len(self.segments) - 1, 0),
            )
        return known[stage]

    def activations(self, stage: int) -> int:
        """The most pairs of chunk and micro-batch that a stage has begun forward and not finished,
        which is when the last segment of that chunk ends: what its memory must hold at once."""
        last = SegmentKind.WEIGHT if self.schedule == "zero_bubble" else SegmentKind.BACKWARD
        alive = most = 0
        for slot in self.slots(stage):
            kind = self.segments[slot.segment].kind
            alive += kind is SegmentKind.FORWARD
            most = max(most, alive)
            alive -= kind is last
        return most

    @cached_property
    def _known_slots(self) -> dict[int, tuple[Slot, ...]]:
        self.check()
        return {}

    def _work(self, stage: int) -> list[_Work]:
        """Segments of a stage with their micro-batches, in order."""
        if stage < 0:
            return []
        chunks = range(stage, self.chunks, self.stages)
        if self.stages == 1:
            return _accumulation(chunks, self.microbatches, self.schedule == "zero_bubble")
        if self.schedule == "gpipe":
            return _one_forward_one_backward(stage, self.microbatches, self.microbatches)
        if self.schedule == "zero_bubble":
            return _zero_bubble(stage, self.stages, self.microbatches)
        if len(chunks) == 1:
            return _one_forward_one_backward(stage, self.stages - 1 - stage, self.microbatches)
        return _interleaved(stage, self.stages, chunks, self.microbatches)


def in_flight(slots: Sequence[Slot], first: int, last: int) -> int:
    """The most micro-batches whose slot of segment `first` has begun and whose slot of segment
    `last` has not finished: how many versions there are at once of what is made in the one and
    last read in the other. 1 where both are the same segment; 0 where `first` has no slot.

    Both are segments that run once per micro-batch, `last` not before `first`.
    """
    alive = most = 0
    for slot in slots:
        alive += slot.segment == first
        most = max(most, alive)
        alive -= slot.segment == last
    return most


_Work = tuple[Segment, int]
"""A segment and a micro-batch."""


def _forward(chunk: int, microbatch: int) -> _Work:
    return Segment(SegmentKind.FORWARD, chunk), microbatch


def _backward(chunk: int, microbatch: int) -> _Work:
    return Segment(SegmentKind.BACKWARD, chunk), microbatch


def _weight(chunk: int, microbatch: int) -> _Work:
    return Segment(SegmentKind.WEIGHT, chunk), microbatch


def _accumulation(chunks: Sequence[int], microbatches: int, weights: bool) -> list[_Work]:
    """One stage waits for nobody: it finishes each micro-batch before the next."""
    order: list[_Work] = []
    for microbatch in range(microbatches):
        order += [_forward(chunk, microbatch) for chunk in chunks]
        for chunk in reversed(chunks):
            order.append(_backward(chunk, microbatch))
            if weights:
                order.append(_weight(chunk, microbatch))
    return order


def _one_forward_one_backward(chunk: int, warm_up: int, microbatches: int) -> list[_Work]:
    """Some forwards, then a forward and a backward in turn, then the backwards that are left.

    With as many forwards first as stages follow this is 1F1B (Narayanan et al. 2019, PipeDream);
    with all of them first, GPipe (Huang et al. 2019).
    """
    order = [_forward(chunk, microbatch) for microbatch in range(min(warm_up, microbatches))]
    for microbatch in range(microbatches):
        if microbatch + warm_up < microbatches:
            order.append(_forward(chunk, microbatch + warm_up))
        order.append(_backward(chunk, microbatch))
    return order


def _interleaved(stage: int, stages: int, chunks: Sequence[int], microbatches: int) -> list[_Work]:
    """1F1B over several chunks a stage (Narayanan et al. 2021, section 2.2).

    Micro-batches go in groups of `stages`: a stage takes a group through its first chunk, then
    through its next one, and so on; backward the same from its last chunk. The warm-up is long
    enough for the first micro-batch to come back through the last chunk: two slots for each stage
    that follows, and a group for each chunk but one.
    """
    forward: list[_Work] = []
    backward: list[_Work] = []
    for first in range(0, microbatches, stages):
        group = range(first, first + stages)
        forward += [_forward(chunk, m) for chunk in chunks for m in group]
        backward += [_backward(chunk, m) for chunk in reversed(chunks) for m in group]
    warm_up = 2 * (stages - 1 - stage) + (len(chunks) - 1) * stages
    order = forward[:warm_up]
    for index, each in enumerate(backward):
        order += forward[warm_up + index : warm_up + index + 1]
        order.append(each)
    return order


def _zero_bubble(stage: int, stages: int, microbatches: int) -> list[_Work]:
    """ZB-H1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.2).

    1F1B, whose backward now ends with the gradient that the stage before waits for. Gradients of
    parameters are put off by as many micro-batches as stages came before, so that a stage that
    started late has them left to fill its end. Every stage then has at most `stages` micro-batches
    with a forward and no weight slot, as many as the first stage has with 1F1B.

    With forward, backward and weight slots of one time unit each and at least as many micro-batches
    as stages, a stage idles stages - 1 units of a step, where 1F1B idles three times as many.
    """
    order: list[_Work] = []
    put_off = 0
    for each in _one_forward_one_backward(stage, stages - 1 - stage, microbatches):
        order.append(each)
        if each[0].kind is SegmentKind.BACKWARD and each[1] >= stage:
            order.append(_weight(stage, put_off))
            put_off += 1
    return order + [_weight(stage, microbatch) for microbatch in range(put_off, microbatches)]
