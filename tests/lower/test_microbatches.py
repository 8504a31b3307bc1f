"""Steps of several micro-batches: slots, slots of registers, memory, and what does not grow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plancompiler.boxing.serde import graph_from_bytes, graph_to_bytes, slice_from_bytes
from plancompiler.errors import DeadlockError
from plancompiler.ir.pipeline import Pipeline, SegmentKind
from plancompiler.lower.compile import MODES, build_graph, compile_plans
from plancompiler.lower.step_check import check_step
from plancompiler.passes import Config
from plancompiler.plan.plan import Plan
from tests.examples import gpt, mlp

SETTINGS = {
    "accumulation": {"microbatches": 4},
    "dp": {"dp": 2, "microbatches": 2},
    "gpipe": {"pp": 2, "microbatches": 4, "schedule": "gpipe"},
    "1f1b": {"pp": 2, "tp": 2, "microbatches": 4, "schedule": "1f1b"},
    "interleaved": {
        "pp": 2,
        "layers": 4,
        "chunks": 2,
        "microbatches": 4,
        "schedule": "interleaved",
    },
    "zero_bubble": {"pp": 2, "dp": 2, "microbatches": 4, "schedule": "zero_bubble"},
}


@pytest.mark.processes
@pytest.mark.parametrize("name", SETTINGS)
def test_all_modes_give_the_same_plans(name: str) -> None:
    job = gpt(**SETTINGS[name])
    reference = compile_plans(job, job.world_size, "naive")
    for mode in MODES:
        compiled = compile_plans(job, job.world_size, mode)
        assert compiled.texts == reference.texts, mode


def test_graphs_and_slices_come_back_from_bytes() -> None:
    job = gpt(**SETTINGS["zero_bubble"])
    graph = build_graph(job, job.world_size)
    assert graph_from_bytes(graph_to_bytes(graph)) == graph
    compiled = compile_plans(job, job.world_size)
    for data in set(compiled.slices.values()):
        assert slice_from_bytes(data).pipeline == graph.pipeline


def carried(plan: Plan) -> dict[str, int]:
    """Slots of the registers that this rank's forward makes for its backward."""
    kind = {task.id: plan.segments[task.segment].kind for task in plan.tasks}
    return {
        register.name: register.register_count
        for register in plan.registers
        if not register.is_control
        and kind[register.producer] is SegmentKind.FORWARD
        and any(kind.get(task) is SegmentKind.BACKWARD for task in register.consumers)
    }


@pytest.mark.parametrize(("microbatches", "expected"), [(2, [2, 2, 2]), (8, [4, 3, 2])])
def test_1f1b_keeps_as_many_activations_as_stages_follow(
    microbatches: int, expected: list[int]
) -> None:
    job = gpt(layers=4, pp=4, batch=16, microbatches=microbatches, schedule="1f1b")
    plans = compile_plans(job, 4).plans
    for stage, most in enumerate(expected):
        counts = carried(plans[stage])
        assert counts
        # Batches are read, and values of other ranks copied, one micro-batch ahead.
        ahead = {name for name in counts if name.startswith("token_batch") or ":copy" in name}
        assert {count for name, count in counts.items() if name not in ahead} == {most}
    # The last stage goes back at once: nothing is carried, and memory is shared by lifetime.
    assert [segment.kind for segment in plans[3].segments] == [
        SegmentKind.PROLOGUE,
        SegmentKind.FORWARD_BACKWARD,
        SegmentKind.EPILOGUE,
    ]


def test_gpipe_keeps_the_activations_of_all_micro_batches() -> None:
    job = gpt(layers=2, pp=2, microbatches=4, schedule="gpipe")
    assert set(carried(compile_plans(job, 2).plans[0]).values()) == {4}


def test_neither_graph_nor_slices_grow_with_micro_batches() -> None:
    sizes = []
    tasks = []
    for microbatches in (8, 64):
        job = gpt(batch=64, pp=2, microbatches=microbatches, schedule="1f1b")
        compiled = compile_plans(job, 2)
        sizes.append((compiled.graph_bytes, [len(data) for data in compiled.slices.values()]))
        tasks.append([len(plan.tasks) for plan in compiled.plans.values()])
    assert tasks[0] == tasks[1]
    (few, few_slices), (many, many_slices) = sizes
    # Smaller extents take fewer digits; nothing else differs.
    assert abs(many - few) <= 16
    assert all(abs(a - b) <= 16 for a, b in zip(few_slices, many_slices, strict=True))


def test_accumulation_takes_less_memory_than_the_whole_batch() -> None:
    whole = compile_plans(gpt(batch=32), 1).plans[0]
    pieces = compile_plans(gpt(batch=32, microbatches=8), 1).plans[0]
    assert pieces.arena_bytes < whole.arena_bytes / 3


@pytest.mark.slow
def test_arenas_are_as_small_as_what_is_alive() -> None:
    for settings in SETTINGS.values():
        job = gpt(**settings)
        for plan in compile_plans(job, job.world_size).plans.values():
            assert plan.arena_bytes <= plan.peak_live_bytes * 1.03


def test_ranks_without_work_per_micro_batch_have_their_own_slots() -> None:
    job = replace(mlp(layout="dp", ranks=2), config=Config(microbatches=3))
    plan = compile_plans(job, 3).plans[2]
    assert [str(segment) for segment in plan.segments] == ["epilogue"]


def test_a_step_that_cannot_end_is_refused_by_the_master() -> None:
    job = gpt(pp=2, microbatches=4, schedule="1f1b")
    graph = build_graph(job, 2)
    check_step(graph)
    pipeline = graph.pipeline
    assert pipeline is not None
    # Stages that swap their places follow each other's slots: each waits for the other's data.
    backward = next(
        number
        for number, segment in enumerate(pipeline.segments)
        if segment.kind is SegmentKind.BACKWARD
    )
    crossed = replace(
        graph,
        families=tuple(
            replace(family, segment=1) if family.segment == backward + 1 else family
            for family in graph.families
        ),
    )
    with pytest.raises(DeadlockError, match="pipeline stages wait for each other") as caught:
        check_step(crossed)
    assert "forward 0 of micro-batch 0" in str(caught.value)


def test_a_pipeline_knows_its_segments() -> None:
    pipeline = Pipeline("zero_bubble", 4, 2, 2)
    assert [str(segment) for segment in pipeline.segments] == [
        "prologue",
        "forward 0",
        "forward 1",
        "backward 1",
        "weight 1",
        "backward 0",
        "weight 0",
        "epilogue",
    ]
