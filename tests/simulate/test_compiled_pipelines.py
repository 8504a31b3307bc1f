"""Simulations of compiled pipelines: their bubbles are those of the papers on their schedules."""

from __future__ import annotations

import pytest

from plancompiler.ir.pipeline import Pipeline, Segment, SegmentKind
from plancompiler.ir.task import TaskKind
from plancompiler.lower.compile import compile_plans
from plancompiler.plan.plan import Plan
from plancompiler.simulate import simulate, slot_cost
from tests.examples import gpt
from tests.simulate.test_pipelines import run


def compiled(stages: int, schedule: str, microbatches: int, **more: object) -> dict[int, Plan]:
    settings = {"pp": stages, "layers": stages, "batch": 24, **more}
    job = gpt(schedule=schedule, microbatches=microbatches, **settings)
    return compile_plans(job, job.world_size).plans


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_bubble_of_a_compiled_pipeline(schedule: str, stages: int, microbatches: int) -> None:
    plans = compiled(stages, schedule, microbatches)
    simulation = run(plans, schedule)
    expected = (stages - 1) / (microbatches + stages - 1)
    assert simulation.bubble_fraction() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("stages", [2, 4])
def test_zero_bubble_of_a_compiled_pipeline_is_under_half_of_1f1b(stages: int) -> None:
    ours = run(compiled(stages, "zero_bubble", 8), "zero_bubble").bubble_fraction()
    other = run(compiled(stages, "1f1b", 8), "1f1b").bubble_fraction()
    assert ours == pytest.approx((stages - 1) / (3 * 8 + stages - 1), abs=1e-9)
    assert ours < other / 2


def test_interleaving_halves_the_bubble_of_a_compiled_pipeline() -> None:
    seconds = {SegmentKind.FORWARD: 0.5, SegmentKind.BACKWARD: 1.0}
    plans = compiled(2, "interleaved", 4, layers=4, chunks=2)
    simulation = simulate(plans, slot_cost(plans, seconds))
    assert simulation.bubble_fraction() == pytest.approx(1.5 / (12 + 1.5), abs=1e-9)


def test_accumulation_on_one_stage_has_no_bubble() -> None:
    plans = compiled(1, "1f1b", 4)
    assert [str(each) for each in plans[0].segments][1:-1] == ["forward and backward 0"]
    assert run(plans, "1f1b").bubble_fraction() == pytest.approx(0, abs=1e-12)


def test_bubble_of_a_compiled_pipeline_with_collectives_in_its_stages() -> None:
    simulation = run(compiled(2, "1f1b", 4, dp=2), "1f1b", steps=2)
    for step in range(2):
        assert simulation.bubble_fraction(step) == pytest.approx(1 / 5, abs=1e-9)


def test_compiled_streams_follow_the_slots_of_their_stage() -> None:
    plans = compiled(2, "1f1b", 4)
    simulation = run(plans, "1f1b")
    pipeline = Pipeline("1f1b", 4, 2, 2)
    begun = [
        (action.segment, action.microbatch)
        for action in simulation.actions
        if action.rank == 0 and action.task.kind is TaskKind.STEP_END
    ]
    expected = [(pipeline.segments[each.segment], each.microbatch) for each in pipeline.slots(0)]
    assert begun == expected
    merged = Segment(SegmentKind.FORWARD_BACKWARD, 1)
    assert merged in plans[1].segments
