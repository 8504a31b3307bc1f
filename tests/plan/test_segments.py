"""Rules about steps of several micro-batches, each broken by one edit, and a plan that keeps them.

Slots are shown as in the text form: `F0(2)` is forward of chunk 0 for micro-batch 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest

from plancompiler.errors import MemoryOverlapError, VerifyError
from plancompiler.ir.pipeline import WHOLE_STEP, Segment, SegmentKind, Slot
from plancompiler.ir.task import pack_register_id
from plancompiler.plan.plan import Plan
from plancompiler.plan.rules_segments import last_done
from plancompiler.plan.verify import PLAN_RULES, verify_plan
from tests.plan.builder import (
    CONTROL_SLOT,
    edit_register,
    edit_spec,
    edit_task,
    moved_task,
    register_named,
    task_named,
    without_task,
)
from tests.plan.pipelines import first_stage, last_stage, stage_plans

Edit = Callable[[Plan], Plan]
FIRST = first_stage("1f1b")
LAST = last_stage("gpipe")


def with_slots(text: str) -> Edit:
    """The plan with other slots, such as `P F0(0)`; a digit alone is an unknown segment."""
    names = {"P": 0, "F": 1, "B": 2, "E": 3}

    def edit(plan: Plan) -> Plan:
        slots = []
        for word in text.split():
            head, _, tail = word.partition("(")
            segment = names[head[0]] if head[0] in names else int(head)
            slots.append(Slot(segment, int(tail.rstrip(")") or 0)))
        return replace(plan, slots=tuple(slots))

    return edit


def reading(plan: Plan, task: str, register: str) -> Plan:
    """The plan with one more input of a task that has a box; its consumers in plan order."""
    actual = register_named(plan, register)
    spec = task_named(plan, task).spec
    shape = actual.shape
    whole = tuple((0, extent) for extent in shape)
    assert spec is not None
    plan = edit_task(plan, task, inputs=(*task_named(plan, task).inputs, actual.id))
    plan = edit_spec(
        plan,
        task,
        input_shapes=(*spec.input_shapes, shape),  # type: ignore[union-attr]
        input_regions=(*spec.input_regions, whole),  # type: ignore[union-attr]
        input_pieces=(*spec.input_pieces, -1) if spec.input_pieces else (),  # type: ignore[union-attr]
    )
    here = [each.id for each in plan.tasks if actual.id in each.inputs]
    away = [key for key in actual.consumers if key not in plan.task_by_id]
    return edit_register(plan, register, consumers=(*here, *away))


def overwriting(plan: Plan, register: str, old: str) -> Plan:
    """The plan with a register written over another one."""
    overwritten = register_named(plan, old)
    return edit_register(
        plan,
        register,
        inplace_of=overwritten.id,
        offset=overwritten.offset,
        block=overwritten.block,
        nbytes=overwritten.nbytes,
        register_count=overwritten.register_count,
    )


def unread_copy(plan: Plan) -> Plan:
    """The backward segment's end no longer waits for its copy, nor does any task."""
    t = register_named(plan, "t").id
    plan = edit_task(plan, "relu_grad", inputs=(t,))
    spec = task_named(plan, "relu_grad").spec
    plan = edit_spec(
        plan,
        "relu_grad",
        input_shapes=spec.input_shapes[:1],  # type: ignore[union-attr]
        input_regions=spec.input_regions[:1],  # type: ignore[union-attr]
        input_pieces=(0,),
    )
    plan = edit_register(plan, "d:copy", consumers=())
    plan = edit_register(plan, "d from rank 1:control", consumers=())
    return edit_task(plan, "backward 0 end", controls_in=())


def over_the_copy(plan: Plan, *, held: bool) -> Plan:
    """What backward reads is written over the copy that forward begins with.

    The copy waits for credits alone: those of its own reader, which is done in forward already,
    and if it is held, those of a control register that backward reads last.
    """
    v = register_named(plan, "v")
    plan = edit_task(plan, "contract", inputs=(v.id, v.id))
    plan = edit_register(plan, "t:copy", consumers=(task_named(plan, "matmul").id,))
    plan = overwriting(plan, "y", "t:copy")
    plan = overwriting(plan, "v", "y")
    if held:
        control = register_named(plan, "t from rank 0:control")
        plan = edit_task(plan, "contract", controls_in=(control.id,))
        end, contract = (task_named(plan, name).id for name in ("forward 1 end", "contract"))
        plan = edit_register(plan, control.name, consumers=(end, contract), register_count=3)
    return plan


def over_the_gradient(plan: Plan) -> Plan:
    """%e is written over the copy of the gradient, and forward's relu signals to that copy.

    What relu knows of the step before, it does not know of the micro-batch before: with 1F1B the
    next forward runs before backward.
    """
    plan = overwriting(plan, "e", "d:copy")
    plan = edit_register(plan, "d from rank 1:control", register_count=2)  # no credit of the end
    relu, copy = task_named(plan, "relu"), task_named(plan, "d from rank 1")
    control = replace(
        register_named(plan, "d from rank 1:control"),
        id=pack_register_id(0, 12, 0, CONTROL_SLOT),
        name="relu:control",
        producer=relu.id,
        consumers=(copy.id,),
        register_count=2,
    )
    plan = edit_task(plan, "relu", controls_out=(control.id,))
    plan = edit_task(plan, copy.name, controls_in=(control.id,))
    return replace(plan, registers=(*plan.registers, control))


def swapped(plan: Plan, one: str, two: str) -> Plan:
    """The plan with two registers in each other's place."""
    first, second = register_named(plan, one).offset, register_named(plan, two).offset
    return edit_register(edit_register(plan, one, offset=second), two, offset=first)


class Broken(NamedTuple):
    """An edit that breaks a rule, and what the error must say."""

    rule: str
    edit: Edit
    words: tuple[str, ...]
    plan: Plan = FIRST
    error: type[VerifyError] = VerifyError


SEGMENTS = "plan order is segment by segment"
SLOTS = "slots run micro-batch after micro-batch"
RATES = "what is read has been made as often"
PIECES = "micro-batches take equal pieces"
ENDS = "segments end when all their streams do"
COUNTS = "slots suffice for the micro-batches in between"
CONTROL = "t from rank 0:control"
SEVENTH = (*FIRST.slots, Slot(4, 0), Slot(4, 1), Slot(4, 2))
DISJOINT = "registers alive at once are disjoint"

CASES = [
    Broken(SEGMENTS, lambda p: replace(p, schedule=""), ("schedule ''", "3 micro-batches")),
    Broken(SEGMENTS, lambda p: replace(p, microbatches=0), ("0 micro-batches",)),
    Broken(
        SEGMENTS,
        lambda p: replace(p, segments=(WHOLE_STEP, *p.segments[1:])),
        ("one whole", "step, forward 0"),
    ),
    Broken(
        SEGMENTS,
        lambda p: replace(p, segments=(p.segments[0], p.segments[1], *p.segments[1:3])),
        ("listed twice", "prologue, forward 0, forward 0, backward 0"),
    ),
    Broken(
        SEGMENTS,
        lambda p: replace(p, segments=(Segment(SegmentKind.PROLOGUE, 0), *p.segments[1:])),
        ("'prologue 0'", "chunk 0"),
    ),
    Broken(SEGMENTS, lambda p: edit_task(p, "relu", segment=0), ("'relu'", "segment 0 after")),
    Broken(SEGMENTS, lambda p: edit_task(p, "sgd", segment=4), ("'sgd'", "segment 4", "of 4")),
    Broken(
        SEGMENTS, lambda p: moved_task(p, "relu_grad", "relu"), ("'relu'", "segment 1 after seg")
    ),
    Broken(
        SLOTS,
        with_slots("P F(0) F(1) B(0) F(2) B(1) B(2) 7 E"),
        ("slot ?7(0)", "one of 4 segments"),
    ),
    Broken(
        SLOTS,
        with_slots("P F(0) F(2) B(0) F(1) B(1) B(2) E"),
        ("'forward 0'", "slot F0(2)", "slot F0(1)"),
    ),
    Broken(
        SLOTS,
        with_slots("P F(0) F(1) B(0) F(2) B(1) B(2) B(3) E"),
        ("'backward 0'", "slot B0(3)", "no more slots"),
    ),
    Broken(
        SLOTS,
        with_slots("P F(0) F(1) B(0) F(2) B(1) B(1) E"),
        ("'backward 0'", "slot B0(1)", "slot B0(2)"),
    ),
    Broken(
        SLOTS,
        with_slots("P F(0) B(0) B(1) F(1) F(2) B(2) E"),
        ("'backward 0' runs before", "slot B0(1)", "slot F0(1) first"),
    ),
    Broken(
        SLOTS,
        with_slots("F(0) P F(1) B(0) F(2) B(1) B(2) E"),
        ("'forward 0' runs before", "slot F0(0)", "slot P first"),
    ),
    Broken(
        SLOTS,
        with_slots("P F(0) F(1) B(0) F(2) B(1) E B(2)"),
        ("'epilogue' runs before", "slot E", "slot B0(2) first"),
    ),
    Broken(
        SLOTS,
        with_slots("P F(0) F(1) F(2) B(0) B(1) B(2)"),
        ("'epilogue' does not run as often", "1 slots of it in a step, not 0"),
    ),
    Broken(
        SLOTS,
        lambda p: replace(p, microbatches=(1 << 32) - 1),
        ("'epilogue' runs before", "slot B0(4294967294) first"),
    ),
    Broken(SLOTS, with_slots("P E E"), ("'epilogue' runs before", "slot B0(2) first")),
    Broken(
        RATES,
        lambda p: edit_register(p, "g", per_microbatch=True),
        ("'all_reduce'", "reads %g", "once per step, in segment 'epilogue'"),
    ),
    Broken(
        RATES,
        lambda p: edit_register(p, "w", per_microbatch=True),
        ("'w'", "makes %w", "once per step, in segment 'prologue'"),
    ),
    Broken(
        RATES,
        lambda p: edit_register(p, "t", per_microbatch=False),
        ("'relu_grad'", "reads %t", "once per micro-batch, in segment 'backward 0'"),
    ),
    Broken(
        RATES,
        lambda p: edit_register(p, "g", register_count=2),
        ("'g' has one version per step", "2 slots"),
    ),
    Broken(
        PIECES,
        lambda p: edit_spec(p, "relu", input_pieces=(0, 0)),
        ("'relu'", "2 axes for 1 operands"),
    ),
    Broken(
        PIECES,
        lambda p: edit_spec(p, "sgd", input_pieces=(-1, -1)),
        ("'sgd'", "runs only once", "2 axes for 2 operands"),
    ),
    Broken(PIECES, lambda p: edit_spec(p, "relu", input_pieces=(2,)), ("%u", "axis 2 of [6, 4]")),
    Broken(
        PIECES,
        lambda p: edit_spec(p, "relu", input_pieces=(1,)),
        ("%u", "axis 1 of [6, 4]", "3 equal pieces"),
    ),
    Broken(
        PIECES,
        lambda p: edit_spec(p, "accumulate", output_shapes=((12, 4),), output_pieces=(0,)),
        ("%g", "axis 0 of [12, 4]", "a register with a version for each"),
    ),
    Broken(
        PIECES,
        lambda p: edit_spec(p, "relu", input_regions=(((2, 4), (0, 4)),)),
        ("%u", "[2:4, 0:4]", "at most 2 along axis 0"),
    ),
    Broken(
        ENDS,
        lambda p: without_task(p, "forward 0 end"),
        ("'forward 0' has no end", "'relu'", "a StepEnd"),
    ),
    Broken(
        ENDS,
        lambda p: replace(p, segments=(*p.segments, Segment(SegmentKind.WEIGHT, 7)), slots=SEVENTH),
        ("'weight 7' has no end", "no task of the compute stream"),
    ),
    Broken(
        ENDS,
        unread_copy,
        ("end of segment 'backward 0'", "'d from rank 1' (0.40.1.0) is done", "no order"),
    ),
    Broken(
        COUNTS,
        lambda p: edit_register(p, "t", register_count=1),
        ("'t' has too few slots", "'relu_grad'", "1 slots", "2, the micro-batches", "'backward 0'"),
    ),
    Broken(
        COUNTS,
        lambda p: edit_register(over_the_copy(p, held=True), CONTROL, register_count=2),
        (f"{CONTROL!r} has too few slots", "'contract'", "2 slots", "3, the micro-batches"),
        LAST,
    ),
    Broken(
        "memory is aliased from an input",
        lambda p: edit_register(p, "v", register_count=2),
        ("'v'", "2 slots", "3 slots"),
        LAST,
    ),
    Broken(
        "memory is aliased from an input",
        lambda p: overwriting(p, "g", "part"),
        ("'g' takes the memory of 'part'", "per step on one version per micro-batch"),
    ),
    Broken(
        "only dead values are overwritten",
        lambda p: reading(p, "matmul_grad", "y"),
        ("'relu' (1.15.0.0) overwrites 'y'", "'matmul_grad' (1.32.0.0) may still use it"),
        LAST,
    ),
    Broken(
        "only dead values are overwritten",
        lambda p: over_the_copy(p, held=False),
        (
            "'t from rank 0' (1.20.0.0) for a later micro-batch may start while",
            "still uses the bytes of 't:copy'",
            "across micro-batches",
        ),
        LAST,
    ),
    Broken(
        "only dead values are overwritten",
        lambda p: edit_register(over_the_copy(p, held=True), CONTROL, register_count=4),
        ("'t from rank 0' (1.20.0.0) for a later micro-batch may start while",),
        LAST,
    ),
    Broken(
        "only dead values are overwritten",
        over_the_gradient,
        ("'d from rank 1' (0.40.1.0) for a later", "'contract' (0.34.0.0) still uses"),
    ),
    Broken(
        DISJOINT,
        lambda p: edit_register(p, "g", offset=0),
        ("'g' and 'u'", "'g' is carried from segment to segment"),
        error=MemoryOverlapError,
    ),
    Broken(
        DISJOINT,
        lambda p: edit_register(p, "t", offset=register_named(p, "x").offset),
        ("'x' and 't'", "'x' has several slots"),
        error=MemoryOverlapError,
    ),
    Broken(
        DISJOINT,
        lambda p: edit_register(p, "part", offset=0),
        ("'contract' (0.34.0.0) may still use 'e' when 'contract' (0.34.0.0) writes 'part'",),
        error=MemoryOverlapError,
    ),
    Broken(
        DISJOINT,
        lambda p: swapped(p, "d:copy", "e"),
        ("'u' and 'd:copy'", "'d:copy' may be in use outside the slots of segment 'backward 0'"),
        error=MemoryOverlapError,
    ),
    Broken(
        DISJOINT,
        lambda p: edit_register(p, "r", offset=0),
        ("'r'", "may be in use outside the slots of segment 'epilogue'"),
        error=MemoryOverlapError,
    ),
]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
def test_the_plans_keep_all_rules(schedule: str, microbatches: int) -> None:
    for plan in stage_plans(schedule, microbatches).values():
        verify_plan(plan)


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{at}-{case.rule.replace(' ', '_')}" for at, case in enumerate(CASES)]
)
def test_a_broken_rule_is_found_and_named(case: Broken) -> None:
    with pytest.raises(case.error) as caught:
        verify_plan(case.edit(case.plan))
    message = str(caught.value)
    assert repr(case.rule) in message
    for word in case.words:
        assert word in message


def test_each_rule_about_segments_is_broken_by_some_case() -> None:
    assert {SEGMENTS, SLOTS, RATES, PIECES, ENDS, COUNTS, DISJOINT} <= {
        case.rule for case in CASES
    } & {rule.says for rule in PLAN_RULES}


def test_segments_share_bytes_of_what_stays_in_them() -> None:
    """%u of forward and %e of backward lie on the same bytes; so may %part instead of %e."""
    assert register_named(FIRST, "u").offset == register_named(FIRST, "e").offset
    verify_plan(swapped(FIRST, "part", "e"))


def test_a_copy_held_by_backward_may_be_written_over() -> None:
    verify_plan(over_the_copy(LAST, held=True))


def test_slots_that_come_back_late_need_more_of_them() -> None:
    """GPipe runs all forwards first, 1F1B as many as stages follow and one more."""
    counts = {
        schedule: register_named(first_stage(schedule, 5), "t").register_count
        for schedule in ("gpipe", "1f1b")
    }
    assert counts == {"gpipe": 5, "1f1b": 2}


def test_what_is_done_when_a_slot_starts() -> None:
    assert last_done(FIRST, 1, 1) == 1  # F0(1) comes before B0(0)
    assert last_done(FIRST, 1, 2) == 2
    assert last_done(FIRST, 1, 3) == 3  # always in the next step
    assert last_done(LAST, 1, 2) == 1
    assert last_done(LAST, 0, 1) == 3
