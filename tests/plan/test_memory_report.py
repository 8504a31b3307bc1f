"""The memory report over several micro-batches; over one it is tested with the command."""

from __future__ import annotations

import pytest

from plancompiler.cli.plan_view import plain_data, plans_to_dot
from plancompiler.plan.memory_report import memory_report
from tests.plan.builder import register_named, task_named
from tests.plan.pipelines import first_stage, stage_plans


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_nothing_is_alive_outside_the_arena(schedule: str) -> None:
    for plan in stage_plans(schedule).values():
        report = memory_report(plan)
        assert 0 < max(report.live) <= report.arena_bytes
        assert sum(each.nbytes for each in report.at_peak) == max(report.live)


def test_what_segments_carry_counts_with_all_slots() -> None:
    """%x has 3 slots and %t 2, from forward's first task to backward's last."""
    plan = first_stage("1f1b")
    report = memory_report(plan)
    places = {task.name: place for place, task in enumerate(plan.tasks)}
    carried = sum(
        register_named(plan, name).nbytes * register_named(plan, name).register_count
        for name in ("x", "t")
    )
    assert report.live[places["x"]] == carried
    assert report.live[places["relu"]] == carried + register_named(plan, "u").nbytes
    kept = register_named(plan, "g").nbytes
    assert report.live[places["backward 0 end"]] == carried + kept
    assert report.live[places["epilogue end"]] == kept
    (t,) = (each for each in report.at_peak if each.name == "t")
    assert (t.first, t.last) == (places["relu"], places["relu_grad"])


def test_views_show_segments_and_slots() -> None:
    plan = first_stage("1f1b")
    data = plain_data(plan)
    assert data["segments"][1] == {"kind": "forward", "chunk": 0}
    assert data["slots"][:3] == [[0, 0], [1, 0], [1, 1]]
    relu = task_named(plan, "relu")
    assert f"relu\\nforward 0\\n{relu.source}" in plans_to_dot([plan])
