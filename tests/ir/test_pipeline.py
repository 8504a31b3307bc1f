"""Schedules by brute force: every stage's slots, and all stages run together in virtual time."""

from __future__ import annotations

from fractions import Fraction

import pytest

from plancompiler.errors import UsageError
from plancompiler.ir.pipeline import SCHEDULES, Pipeline, Segment, SegmentKind, Slot, in_flight

FORWARD, BACKWARD, WEIGHT = SegmentKind.FORWARD, SegmentKind.BACKWARD, SegmentKind.WEIGHT
STAGES = range(1, 9)
MICROBATCHES = range(1, 21)

Work = tuple[Segment, int]


def pipelines(schedule: str) -> list[Pipeline]:
    """All pipelines of a schedule in the tested range."""
    return [
        Pipeline(schedule, microbatches, stages, stages * each)
        for stages in STAGES
        for microbatches in MICROBATCHES
        for each in ((1, 2, 3) if schedule == "interleaved" else (1,))
        if schedule != "interleaved" or microbatches % stages == 0
    ]


def work(pipeline: Pipeline, stage: int) -> list[Work]:
    """The slots of a stage that belong to micro-batches."""
    slots = pipeline.slots(stage)
    return [(pipeline.segments[segment], m) for segment, m in slots[1:-1]]


def needs(pipeline: Pipeline, segment: Segment, microbatch: int) -> list[Work]:
    """What must have finished before a slot may begin."""
    kind, chunk = segment.kind, segment.chunk
    needs: list[Work] = []
    if kind is FORWARD and chunk > 0:
        needs.append((Segment(FORWARD, chunk - 1), microbatch))
    if kind is BACKWARD:
        needs.append((Segment(FORWARD, chunk), microbatch))
        if chunk < pipeline.chunks - 1:
            needs.append((Segment(BACKWARD, chunk + 1), microbatch))
    if kind is WEIGHT:
        needs.append((Segment(BACKWARD, chunk), microbatch))
    return needs


def run(pipeline: Pipeline, seconds: dict[SegmentKind, int]) -> tuple[int, list[int]]:
    """All stages run their slots in order, each as soon as its data is there: the end of the last
    slot, and the busy time of each stage. Fails where a slot never gets its data."""
    orders = [work(pipeline, stage) for stage in range(pipeline.stages)]
    position = [0] * pipeline.stages
    free = [0] * pipeline.stages
    ended: dict[Work, int] = {}
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                segment, microbatch = order[position[stage]]
                waits = needs(pipeline, segment, microbatch)
                if any(each not in ended for each in waits):
                    break
                begin = max([free[stage], *(ended[each] for each in waits)])
                free[stage] = ended[segment, microbatch] = begin + seconds[segment.kind]
                position[stage] += 1
                moved = True
    stuck = [order[at] for order, at in zip(orders, position, strict=True) if at < len(order)]
    assert not stuck, f"{pipeline} waits at {stuck}"
    busy = [sum(seconds[segment.kind] for segment, _ in order) for order in orders]
    return max(free), busy


def bubble(pipeline: Pipeline, seconds: dict[SegmentKind, int]) -> Fraction:
    """The share of all stages' time, first begin to last end, in which they idle."""
    span, busy = run(pipeline, seconds)
    return 1 - Fraction(sum(busy), span * pipeline.stages)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_slot_runs_once_in_order_of_microbatches(schedule: str) -> None:
    for pipeline in pipelines(schedule):
        for stage in range(pipeline.stages):
            slots = pipeline.slots(stage)
            assert slots[0] == Slot(0, 0)
            assert slots[-1] == Slot(len(pipeline.segments) - 1, 0)
            order = work(pipeline, stage)
            by_segment: dict[Segment, list[int]] = {}
            for segment, microbatch in order:
                by_segment.setdefault(segment, []).append(microbatch)
            assert set(by_segment) == {
                segment
                for segment in pipeline.segments
                if segment.chunk >= 0 and segment.chunk % pipeline.stages == stage
            }
            for microbatches in by_segment.values():
                assert microbatches == list(range(pipeline.microbatches))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_never_wait_in_a_circle(schedule: str) -> None:
    for pipeline in pipelines(schedule):
        span, _ = run(pipeline, {FORWARD: 3, BACKWARD: 4, WEIGHT: 2})
        assert span > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_runs_forward_then_backward_then_weight(schedule: str) -> None:
    rank = {FORWARD: 0, BACKWARD: 1, WEIGHT: 2}
    for pipeline in pipelines(schedule):
        for stage in range(pipeline.stages):
            seen: dict[tuple[int, int], int] = {}
            for segment, microbatch in work(pipeline, stage):
                key = segment.chunk, microbatch
                assert rank[segment.kind] == seen.get(key, 0)
                seen[key] = rank[segment.kind] + 1


def test_ranks_without_microbatches_run_what_is_once_per_step() -> None:
    pipeline = Pipeline("1f1b", 4, 2, 2)
    assert pipeline.slots(-1) == (Slot(0, 0), Slot(len(pipeline.segments) - 1, 0))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_stage_finishes_each_microbatch_before_the_next(schedule: str) -> None:
    pipeline = Pipeline(schedule, 3, 1, 1)
    kinds = (FORWARD, BACKWARD, WEIGHT) if schedule == "zero_bubble" else (FORWARD, BACKWARD)
    assert work(pipeline, 0) == [(Segment(kind, 0), m) for m in range(3) for kind in kinds]
    assert pipeline.activations(0) == 1


def test_gpipe_runs_all_forwards_first() -> None:
    for pipeline in pipelines("gpipe"):
        for stage in range(pipeline.stages if pipeline.stages > 1 else 0):
            kinds = [segment.kind for segment, _ in work(pipeline, stage)]
            assert kinds == [FORWARD] * pipeline.microbatches + [BACKWARD] * pipeline.microbatches
            assert pipeline.activations(stage) == pipeline.microbatches


def test_1f1b_keeps_as_many_microbatches_as_stages_are_left() -> None:
    for pipeline in pipelines("1f1b"):
        index = pipeline.index
        for stage in range(pipeline.stages):
            forward, backward = index[Segment(FORWARD, stage)], index[Segment(BACKWARD, stage)]
            expected = min(pipeline.microbatches, pipeline.stages - stage)
            assert in_flight(pipeline.slots(stage), forward, backward) == expected
            assert pipeline.activations(stage) == expected


def test_1f1b_in_letters() -> None:
    pipeline = Pipeline("1f1b", 4, 2, 2)
    letters = [f"{segment.kind.name[0]}{m}" for segment, m in work(pipeline, 0)]
    assert letters == ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]
    letters = [f"{segment.kind.name[0]}{m}" for segment, m in work(pipeline, 1)]
    assert letters == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(schedule: str) -> None:
    for pipeline in pipelines(schedule):
        stages, microbatches = pipeline.stages, pipeline.microbatches
        expected = Fraction(stages - 1, microbatches + stages - 1)
        assert bubble(pipeline, {FORWARD: 1, BACKWARD: 1}) == expected
        assert bubble(pipeline, {FORWARD: 1, BACKWARD: 2}) == expected


def test_interleaving_divides_the_bubble_by_the_chunks_of_a_stage() -> None:
    for pipeline in pipelines("interleaved"):
        stages, each = pipeline.stages, pipeline.chunks // pipeline.stages
        span, busy = run(pipeline, {FORWARD: 1, BACKWARD: 2})
        assert span - busy[0] == 3 * (stages - 1)
        assert busy == [3 * each * pipeline.microbatches] * stages


def test_interleaved_in_letters() -> None:
    """Two stages of two chunks, four micro-batches: figure 4 of Narayanan et al. 2021, smaller."""
    order = [
        f"{segment.kind.name[0]}{segment.chunk}.{m}"
        for segment, m in work(Pipeline("interleaved", 4, 2, 4), 1)
    ]
    forward = ["F1.0", "F1.1", "F3.0", "F3.1", "F1.2", "F1.3", "F3.2", "F3.3"]
    backward = ["B3.0", "B3.1", "B1.0", "B1.1", "B3.2", "B3.3", "B1.2", "B1.3"]
    expected = forward[:2]
    for f, b in zip(forward[2:], backward, strict=False):
        expected += [f, b]
    assert order == expected + backward[6:]


def test_zero_bubble_keeps_as_many_activations_as_the_first_stage_of_1f1b() -> None:
    for pipeline in pipelines("zero_bubble"):
        index, stages = pipeline.index, pipeline.stages
        for stage in range(stages):
            slots = pipeline.slots(stage)
            forward, backward = index[Segment(FORWARD, stage)], index[Segment(BACKWARD, stage)]
            weight = index[Segment(WEIGHT, stage)]
            expected = min(pipeline.microbatches, stages - stage)
            assert in_flight(slots, forward, backward) == expected
            assert in_flight(slots, forward, weight) <= stages
            assert pipeline.activations(stage) == in_flight(slots, forward, weight)


def test_zero_bubble_idles_a_third_of_1f1b() -> None:
    for pipeline in pipelines("zero_bubble"):
        stages, microbatches = pipeline.stages, pipeline.microbatches
        span, _ = run(pipeline, {FORWARD: 1, BACKWARD: 1, WEIGHT: 1})
        idle = stages - 1 + max(0, stages - microbatches)
        assert span == 3 * microbatches + idle
        if 1 < stages <= microbatches:
            other = Pipeline("1f1b", microbatches, stages, stages)
            ours = bubble(pipeline, {FORWARD: 1, BACKWARD: 1, WEIGHT: 1})
            assert 2 * ours < bubble(other, {FORWARD: 1, BACKWARD: 2})


def test_in_flight_counts_from_begin_to_end() -> None:
    slots = [Slot(*each) for each in ((0, 0), (1, 0), (1, 1), (2, 0), (1, 2), (2, 1), (2, 2))]
    assert in_flight(slots, 1, 2) == 2
    assert in_flight(slots, 1, 1) == 1
    assert in_flight(slots, 2, 2) == 1
    assert in_flight(slots, 3, 3) == 0


@pytest.mark.parametrize(
    ("pipeline", "says"),
    [
        (Pipeline("1f1b", 4, 0, 0), "stages=0"),
        (Pipeline("1f1b", 0, 2, 2), "microbatches=0"),
        (Pipeline("1f1b", 4, 2, 3), "3 chunks on 2 stages"),
        (Pipeline("1f1b", 4, 2, 0), "chunks=0"),
        (Pipeline("gpipe", 4, 2, 4), "schedule=interleaved"),
        (Pipeline("interleaved", 3, 2, 4), "a multiple of 2"),
        (Pipeline("chimera", 4, 2, 2), "'chimera'"),
    ],
)
def test_nonsense_is_refused(pipeline: Pipeline, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        pipeline.check()
    assert says in str(caught.value)
    with pytest.raises(UsageError):
        pipeline.slots(-1)


def test_a_stage_that_there_is_not_is_refused() -> None:
    pipeline = Pipeline("1f1b", 4, 2, 2)
    for stage in (-2, 2):
        with pytest.raises(UsageError, match="no such stage"):
            pipeline.slots(stage)


def test_slots_are_made_once_and_do_not_change_what_a_pipeline_is() -> None:
    pipeline = Pipeline("interleaved", 4, 2, 4)
    fresh = Pipeline("interleaved", 4, 2, 4)
    assert pipeline.slots(1) is pipeline.slots(1)
    assert pipeline == fresh
    assert hash(pipeline) == hash(fresh)
