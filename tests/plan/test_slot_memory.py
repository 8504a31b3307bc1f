"""What the verifier lets pass in steps of several micro-batches runs, whatever the interleaving."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plancompiler.errors import VerifyError
from plancompiler.plan.index import PlanIndex
from plancompiler.plan.plan import Plan
from plancompiler.plan.rules_memory import check_aliased_inputs, check_overwriting
from plancompiler.plan.rules_overlap import check_overlap
from plancompiler.plan.rules_registers import check_consumers, check_plan_order, check_producers
from plancompiler.plan.rules_segments import (
    check_rates,
    check_register_counts,
    check_segment_ends,
    check_segments,
    check_slots,
)
from tests.plan.slot_plans import OverwrittenError, PlanRun, random_plan

STRUCTURE = (
    check_segments,
    check_slots,
    check_producers,
    check_plan_order,
    check_consumers,
    check_rates,
    check_segment_ends,
    check_register_counts,
    check_aliased_inputs,
)


def passes(plan: Plan) -> bool:
    """Whether the verifier finds memory in order; all else is by construction."""
    index = PlanIndex(plan)
    for check in STRUCTURE:
        check(index)
    try:
        check_overwriting(index)
        check_overlap(index)
    except VerifyError:
        return False
    return True


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 30))
def test_what_the_verifier_lets_pass_runs(seed: int) -> None:
    plan = random_plan(seed)
    if passes(plan):
        for turn in range(3):
            PlanRun(plan, seed + turn).run()


def sharing(plan: Plan) -> bool:
    """Whether registers of different segments share bytes."""
    segment = {task.id: task.segment for task in plan.tasks}
    segments_at: dict[int, set[int]] = {}
    for register in plan.registers:
        if not register.is_control:
            segments_at.setdefault(register.offset, set()).add(segment[register.producer])
    return any(len(each) > 1 for each in segments_at.values())


def test_many_random_plans_pass_and_many_do_not() -> None:
    """So that the test above says something."""
    plans = [random_plan(seed) for seed in range(200)]
    passed = [plan for plan in plans if passes(plan)]
    assert 30 < len(passed) < 150
    assert any(map(sharing, passed))


def test_the_oracle_finds_what_the_verifier_refuses() -> None:
    """Not every refused plan goes wrong, but some interleaving of many does."""
    count = 0
    for seed in range(200):
        plan = random_plan(seed)
        if passes(plan):
            continue
        try:
            for turn in range(5):
                PlanRun(plan, turn).run()
        except OverwrittenError:
            count += 1
    assert count > 20
