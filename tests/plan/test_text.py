"""The text form and the digests over it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from plancompiler.ir import DType, SourceLine
from plancompiler.ir.pipeline import WHOLE_STEP, Segment, SegmentKind, Slot
from plancompiler.plan.digest import combine_digests, digest_of_plans, plan_digest, text_digest
from plancompiler.plan.plan import Communicator, Plan, Stream
from plancompiler.plan.text import format_bytes, format_name, format_plan, format_slot
from tests.plan.builder import (
    edit_register,
    edit_remote,
    edit_spec,
    edit_task,
    pair_plan,
    pair_plans,
    register_named,
    task_named,
)
from tests.plan.pipelines import first_stage, stage_plans

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.mark.parametrize("rank", [0, 1])
def test_text_is_as_recorded(rank: int) -> None:
    """Set PLANCOMPILER_UPDATE_GOLDEN=1 to record anew."""
    path = GOLDEN / f"plan_pair_rank_{rank}.txt"
    text = format_plan(pair_plan(rank))
    if os.environ.get("PLANCOMPILER_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_text_of_several_micro_batches_is_as_recorded(rank: int) -> None:
    """Set PLANCOMPILER_UPDATE_GOLDEN=1 to record anew."""
    path = GOLDEN / f"plan_1f1b_rank_{rank}.txt"
    text = format_plan(stage_plans("1f1b")[rank])
    if os.environ.get("PLANCOMPILER_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def variable_edit(**changes: object) -> Callable[[Plan], Plan]:
    return lambda p: replace(p, variables=(replace(p.variables[0], **changes),))  # type: ignore[arg-type]


EDITS: list[Callable[[Plan], Plan]] = [
    lambda p: replace(p, job="other"),
    lambda p: replace(p, world_size=3),
    lambda p: replace(p, seed=8),
    lambda p: replace(p, peak_live_bytes=5),
    lambda p: replace(p, tasks=p.tasks[::-1]),
    lambda p: replace(p, tasks=p.tasks[:-1]),
    lambda p: replace(p, blocks=p.blocks[:1]),
    lambda p: replace(p, blocks=(replace(p.blocks[0], shared=False), p.blocks[1])),
    lambda p: replace(p, blocks=(replace(p.blocks[0], nbytes=1024), p.blocks[1])),
    lambda p: replace(p, communicators=(Communicator((1, 0), (6, 8)),)),
    lambda p: replace(p, communicators=(Communicator((0, 1), (8, 6)),)),
    lambda p: replace(p, communicators=(Communicator((0, 1), (6, 8), Stream.GRADIENT),)),
    lambda p: replace(p, outputs=()),
    lambda p: replace(p, outputs=(replace(p.outputs[0], register=0),)),
    lambda p: replace(p, remote_registers=()),
    lambda p: edit_remote(p, dtype=DType.INT32),
    lambda p: edit_remote(p, sync_id=3),
    lambda p: edit_remote(p, consumers=()),
    variable_edit(attrs=()),
    variable_edit(region=((0, 4), (0, 4))),
    variable_edit(dtype=DType.FLOAT64),
    lambda p: edit_task(p, "relu", name="gelu"),
    lambda p: edit_task(p, "relu", stream=Stream.COPY),
    lambda p: edit_task(p, "relu", inputs=()),
    lambda p: edit_task(p, "relu", spec=None),
    lambda p: edit_task(p, "relu", source=SourceLine("job.py", 99)),
    lambda p: edit_task(p, "relu", id=task_named(p, "relu").id + 32),
    lambda p: edit_task(p, "step_end", controls_in=(register_named(p, "s").id,)),
    lambda p: edit_spec(p, "relu", kind="gelu"),
    lambda p: edit_spec(p, "relu", input_shapes=((4, 4),)),
    lambda p: edit_spec(p, "scale", attrs=(("scalar", 1),)),
    lambda p: edit_spec(p, "g all_reduce", communicator=1),
    lambda p: edit_spec(p, "g all_reduce", reduction=None),
    lambda p: edit_spec(p, "g all_reduce", src_axis=1),
    lambda p: edit_spec(p, "g all_reduce", dst_axis=1),
    lambda p: edit_spec(p, "b from rank 1", region=((0, 2), (0, 3))),
    lambda p: edit_spec(p, "b put together", pieces=()),
    lambda p: edit_register(p, "g", name="h"),
    lambda p: edit_register(p, "g", offset=64),
    lambda p: edit_register(p, "g", block=1),
    lambda p: edit_register(p, "g", nbytes=64),
    lambda p: edit_register(p, "g", register_count=2),
    lambda p: edit_register(p, "g", consumers=()),
    lambda p: edit_register(p, "g", producer=0),
    lambda p: edit_register(p, "g", shape=(4, 8)),
    lambda p: edit_register(p, "g", dtype=DType.INT32),
    lambda p: edit_register(p, "g", sbp=register_named(p, "h").sbp),
    lambda p: edit_register(p, "g", sync_id=5),
    lambda p: edit_register(p, "a", inplace_of=-1),
    lambda p: edit_register(p, "a", is_view=True),
    lambda p: edit_register(p, "g", is_view=True),
    lambda p: replace(p, registers=p.registers[1:]),
    lambda p: replace(p, registers=(*p.registers, replace(p.registers[0], id=12345))),
]


def test_every_part_of_a_plan_is_in_its_text() -> None:
    plan = pair_plan(0)
    texts = [format_plan(plan), *(format_plan(edit(plan)) for edit in EDITS)]
    assert len(set(texts)) == len(texts)


STAGE_EDITS: list[Callable[[Plan], Plan]] = [
    lambda p: replace(p, schedule="gpipe"),
    lambda p: replace(p, microbatches=4),
    lambda p: replace(p, segments=(WHOLE_STEP, *p.segments[1:])),
    lambda p: replace(p, segments=p.segments[:3]),
    lambda p: replace(p, slots=p.slots[1:]),
    lambda p: replace(p, slots=p.slots[::-1]),
    lambda p: edit_task(p, "relu", segment=2),
    lambda p: edit_register(p, "u", per_microbatch=False),
    lambda p: edit_register(p, "w", per_microbatch=True),
    lambda p: edit_remote(p, per_microbatch=False),
    lambda p: edit_spec(p, "relu", input_pieces=()),
    lambda p: edit_spec(p, "relu", input_pieces=(-1,)),
    lambda p: edit_spec(p, "relu", input_pieces=(1,)),
    lambda p: edit_spec(p, "relu", input_pieces=(1, 1)),
    lambda p: edit_spec(p, "relu", output_pieces=(-1,)),
]


def test_every_part_of_a_schedule_is_in_the_text() -> None:
    plan = first_stage("1f1b")
    texts = [format_plan(plan), *(format_plan(edit(plan)) for edit in STAGE_EDITS)]
    assert len(set(texts)) == len(texts)


def test_slots_are_short() -> None:
    segments = [Segment(kind, 2 if kind.per_microbatch else -1) for kind in SegmentKind]
    names = [format_slot(segments, Slot(at, 0)) for at in range(len(segments))]
    assert names == ["S", "P", "F2(0)", "B2(0)", "W2(0)", "E", "FB2(0)"]
    assert format_slot(segments, Slot(3, 11)) == "B2(11)"
    assert format_slot(segments, Slot(7, 1)) == "?7(1)"


def test_text_does_not_depend_on_how_the_plan_was_made() -> None:
    assert format_plan(pair_plan(0)) == format_plan(pair_plan(0))
    assert plan_digest(pair_plan(0)) == plan_digest(pair_plan(0))
    assert plan_digest(pair_plan(0)) != plan_digest(pair_plan(1))


def test_the_digest_of_a_plan_leaves_out_source_lines_and_nothing_else() -> None:
    plan = pair_plan(0)
    moved = edit_task(plan, "relu", source=SourceLine("elsewhere/job.py", 99))
    assert plan_digest(moved) == plan_digest(plan)
    assert format_plan(moved) != format_plan(plan)
    lines = format_plan(plan).splitlines()
    bare = [line.split("  # ")[0] for line in lines]
    assert bare == format_plan(plan, sources=False).splitlines() != lines
    assert plan_digest(plan) == text_digest("\n".join([*bare, ""]))
    digests = {plan_digest(edit(plan)) for edit in EDITS}
    assert len(digests) == len(EDITS)
    assert plan_digest(plan) in digests  # one of the edits is of a source line


def test_the_digest_of_plans_is_over_ranks_in_order() -> None:
    plans = pair_plans()
    digest = digest_of_plans(plans)
    assert digest == digest_of_plans(dict(reversed(plans.items())))
    assert digest == combine_digests({rank: plan_digest(plan) for rank, plan in plans.items()})
    assert digest != digest_of_plans({0: plans[1], 1: plans[0]})
    assert len(digest) == 64


def test_names_and_sizes_are_easy_to_read() -> None:
    assert format_name("0.weight") == "0.weight"
    assert format_name("a b") == '"a b"'
    assert format_name('quo"te\n') == '"quo\\"te\\n"'
    assert format_name("") == '""'
    assert format_bytes(0) == "0 bytes"
    assert format_bytes(1023) == "1023 bytes"
    assert format_bytes(1536) == "1536 bytes (1.5 KiB)"
    assert format_bytes(3 << 40) == "3298534883328 bytes (3.0 TiB)"
