"""Simulated pipelines: the bubbles that the papers on their schedules give, by the real actors."""

from __future__ import annotations

import pytest

from plancompiler.ir.pipeline import SCHEDULES, Pipeline, SegmentKind
from plancompiler.ir.task import TaskKind
from plancompiler.plan.plan import Plan, Task
from plancompiler.simulate import Simulation, simulate, slot_cost
from tests.simulate.stage_plans import sending_with_one_slot, stage_plans

SECONDS = {SegmentKind.FORWARD: 1.0, SegmentKind.BACKWARD: 2.0}
SPLIT_SECONDS = {SegmentKind.FORWARD: 1.0, SegmentKind.BACKWARD: 1.0, SegmentKind.WEIGHT: 1.0}


def run(plans: dict[int, Plan], schedule: str, steps: int = 1) -> Simulation:
    """Slots of one second, but two for a backward that has its weight part within."""
    seconds = SPLIT_SECONDS if schedule == "zero_bubble" else SECONDS
    return simulate(plans, slot_cost(plans, seconds), steps=steps)


def ideal(stages: int, microbatches: int, chunks: int, schedule: str) -> float:
    """Idle share of a stage: (p-1)/v slots of 3 seconds, with zero_bubble p-1 of 1 second."""
    work = 3 * microbatches * chunks // stages
    if schedule == "zero_bubble":
        idle = stages - 1 + max(0, stages - microbatches) * (stages > 1)
    else:
        idle = 3 * (stages - 1)
    return idle / (work + idle)


@pytest.mark.slow
@pytest.mark.parametrize("one_slot", [False, True], ids=["", "sends with one slot"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bubbles_of_stages_written_by_hand(schedule: str, one_slot: bool) -> None:
    for stages in range(1, 7):
        for microbatches in (1, 2, 3, 4, 5, 6, 8, 12):
            each = 3 if schedule == "interleaved" else 1
            if schedule == "interleaved" and microbatches % stages:
                continue
            plans = stage_plans(Pipeline(schedule, microbatches, stages, stages * each))
            if one_slot:
                plans = {rank: sending_with_one_slot(plan) for rank, plan in plans.items()}
            simulation = run(plans, schedule)
            expected = ideal(stages, microbatches, stages * each, schedule)
            assert simulation.bubble_fraction() == pytest.approx(expected, abs=1e-12)
            for rank in plans:
                assert simulation.bubble_fraction(ranks=[rank]) == pytest.approx(
                    expected, abs=1e-12
                )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_slots_run_in_the_order_of_the_schedule_step_after_step(schedule: str) -> None:
    pipeline = Pipeline(schedule, 6, 3, 6 if schedule == "interleaved" else 3)
    simulation = run(stage_plans(pipeline), schedule, steps=3)
    for stage in range(3):
        expected = [
            (step, pipeline.segments[segment], microbatch)
            for step in range(3)
            for segment, microbatch in pipeline.slots(stage)
        ]
        ends = [
            (action.step, action.segment, action.microbatch)
            for action in simulation.actions
            if action.rank == stage and action.task.kind is TaskKind.STEP_END
        ]
        assert ends == expected


def test_a_slow_stage_shows_in_its_own_share() -> None:
    plans = stage_plans(Pipeline("1f1b", 4, 2, 2))
    cost = slot_cost(plans, SECONDS)
    simulation = simulate(plans, lambda rank, task: cost(rank, task) * (1 + rank))
    # Rank 1 works 4 * 6 s, after rank 0's first forward of 1 s; rank 0's last backward takes 2 s.
    assert simulation.makespan == 27
    assert simulation.bubble_fraction(ranks=[1]) == pytest.approx(1 - 24 / 27)
    assert simulation.bubble_fraction(ranks=[0]) == pytest.approx(1 - 12 / 27)
    assert simulation.bubble_fraction() == pytest.approx(1 - 36 / 54)


def test_what_runs_once_per_step_is_no_part_of_a_bubble() -> None:
    plans = stage_plans(Pipeline("gpipe", 4, 2, 2))
    cost = slot_cost(plans, SECONDS)

    def with_ends(rank: int, task: Task) -> float:
        once = task.name in ("prologue end", "epilogue end")
        return 7.0 if once else cost(rank, task)

    simulation = simulate(plans, with_ends)
    assert simulation.makespan == run(plans, "gpipe").makespan + 14
    assert simulation.bubble_fraction() == pytest.approx(1 / 5)
