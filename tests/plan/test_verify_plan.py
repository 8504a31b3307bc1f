"""Each rule about one plan, broken by one edit; the error names the rule and both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest

from plancompiler.errors import MemoryOverlapError, VerifyError
from plancompiler.ir import DType, NdSbp, Placement, Reduction, Split
from plancompiler.ir.task import CONTROL_SLOT, TaskKind, pack_register_id
from plancompiler.plan.plan import Communicator, Plan, RegisterDesc, Stream, VariableDesc
from plancompiler.plan.verify import PLAN_RULES, verify_plan
from tests.plan.builder import (
    WHOLE,
    PlanBuilder,
    edit_register,
    edit_remote,
    edit_spec,
    edit_task,
    moved_task,
    pair_plan,
    register_named,
    task_named,
    without_task,
)


def register_id(name: str) -> int:
    return register_named(PLAN, name).id


def task_id(name: str) -> int:
    return task_named(PLAN, name).id


def with_variable(plan: Plan, **changes: object) -> Plan:
    return replace(plan, variables=(replace(plan.variables[0], **changes),))  # type: ignore[arg-type]


def with_output(plan: Plan, **changes: object) -> Plan:
    return replace(plan, outputs=(replace(plan.outputs[0], **changes),))  # type: ignore[arg-type]


def with_piece(plan: Plan, at: int, **changes: object) -> Plan:
    pieces = list(task_named(plan, "b put together").spec.pieces)  # type: ignore[union-attr]
    pieces[at] = replace(pieces[at], **changes)
    return edit_spec(plan, "b put together", pieces=tuple(pieces))


def read_late(plan: Plan) -> Plan:
    """`sum` also reads the bytes that `relu` overwrote: it reads %h after %a took its place."""
    plan = edit_task(plan, "sum", inputs=(register_id("h"),))
    plan = edit_register(plan, "h", consumers=(task_id("relu"), task_id("sum")))
    plan = edit_register(plan, "v", consumers=(task_id("gradient"),))
    return edit_task(
        plan,
        "sum",
        spec=replace(
            task_named(plan, "sum").spec,  # type: ignore[type-var]
            input_shapes=((2, 4),),
            input_regions=(((0, 2), (0, 4)),),
        ),
    )


def late_collective_reader(plan: Plan) -> Plan:
    """The collective stream reads the weight that `sgd` overwrites, and nothing makes sgd wait."""
    plan = edit_task(plan, "s all_reduce", inputs=(register_id("w"),), outputs=plan_loss(plan))
    plan = edit_register(plan, "loss", shape=(8, 4), nbytes=128)
    plan = edit_register(
        plan, "w", consumers=(task_id("matmul"), task_id("s all_reduce"), task_id("sgd"))
    )
    plan = edit_register(plan, "s", consumers=())
    return edit_spec(
        plan,
        "out",
        input_shapes=((8, 4),),
        input_regions=(((0, 8), (0, 4)),),
    )


def with_control(plan: Plan, **changes: object) -> Plan:
    """`sgd` also waits for the collective by a control register."""
    control = task_id("g all_reduce") + CONTROL_SLOT
    plan = edit_task(plan, "g all_reduce", controls_out=(control,))
    plan = edit_task(plan, "sgd", controls_in=(control,))
    added = RegisterDesc(
        id=control,
        name="g all_reduce:control",
        shape=(),
        dtype=DType.UINT8,
        sbp=NdSbp(()),
        producer=task_id("g all_reduce"),
        consumers=(task_id("sgd"),),
        block=-1,
    )
    return replace(plan, registers=(*plan.registers, replace(added, **changes)))  # type: ignore[arg-type]


def plan_loss(plan: Plan) -> tuple[int, ...]:
    return task_named(plan, "s all_reduce").outputs


class Broken(NamedTuple):
    """An edit that breaks a rule, and what the error must say."""

    rule: str
    edit: Callable[[Plan], Plan]
    words: tuple[str, ...]
    error: type[VerifyError] = VerifyError


PLAN = pair_plan(0)
A = "ids are unique and of their rank"
CASES = [
    Broken(A, lambda p: edit_task(p, "relu", id=task_id("matmul")), ("'matmul'", "'relu'")),
    Broken(
        A,
        lambda p: edit_register(p, "a", id=register_id("h")),
        ("registers 'h' and 'a'", "0.2.0.0"),
    ),
    Broken(A, lambda p: edit_task(p, "relu", id=pack_register_id(1, 3)), ("'relu'", "1.3.0.0")),
    Broken(A, lambda p: edit_remote(p, id=register_id("b")), ("remote register 'b'",)),
    Broken(A, lambda p: replace(p, remote_registers=p.remote_registers * 2), ("1.9.0.0, 1.9.0.0",)),
    Broken(A, lambda p: replace(p, blocks=p.blocks[::-1]), ("block 1", "block 0")),
    Broken(
        "all that is named exists",
        lambda p: edit_task(p, "relu", inputs=(pack_register_id(0, 77),)),
        ("'relu'", "0.77.0.0"),
    ),
    Broken(
        "all that is named exists",
        lambda p: edit_task(p, "b from rank 1", inputs=(register_id("b"),)),
        ("'b from rank 1'", "0.9.0.0", "remote register"),
    ),
    Broken(
        "all that is named exists",
        lambda p: edit_task(p, "relu", controls_out=(pack_register_id(0, 77),)),
        ("'relu'", "0.77.0.0"),
    ),
    Broken(
        "all that is named exists",
        lambda p: edit_register(p, "a", producer=pack_register_id(0, 77)),
        ("'a'", "0.77.0.0"),
    ),
    Broken(
        "all that is named exists",
        lambda p: edit_register(p, "a", consumers=(pack_register_id(0, 77),)),
        ("'a'", "0.77.0.0"),
    ),
    Broken(
        "all that is named exists", lambda p: edit_register(p, "a", block=5), ("'a'", "block 5")
    ),
    Broken(
        "a register has one producer",
        lambda p: edit_task(p, "scale", outputs=(register_id("s"),)),
        ("'sum' and 'scale'", "%s"),
    ),
    Broken(
        "a register has one producer",
        lambda p: edit_register(p, "s", producer=task_id("scale")),
        ("'s'", "'sum'", "'scale'"),
    ),
    Broken(
        "a register has one producer",
        lambda p: edit_task(p, "sum", outputs=(register_id("s"),) * 2),
        ("'sum' makes a register twice",),
    ),
    Broken(
        "a register lists exactly its readers",
        lambda p: edit_register(p, "a", consumers=(task_id("flatten"), task_id("scale"))),
        ("'a'", "'gradient'"),
    ),
    Broken(
        "a register lists exactly its readers",
        lambda p: edit_register(p, "s", consumers=(task_id("s all_reduce"), task_id("out"))),
        ("'s'", "'out'"),
    ),
    Broken(
        "a register lists exactly its readers",
        lambda p: edit_register(p, "b", consumers=register_named(p, "b").consumers[::-1]),
        ("'b'", "1.10.0.0"),
    ),
    Broken(
        "a register lists exactly its readers",
        lambda p: edit_remote(p, consumers=(pack_register_id(2, 10),)),
        ("'b'", "'b from rank 1'", "rank 2"),
    ),
    Broken(
        "control registers carry no data",
        lambda p: edit_register(p, "s", block=-1),
        ("'sum'", "%s", "block -1"),
    ),
    Broken(
        "producers come before readers",
        lambda p: moved_task(p, "sum", "relu"),
        ("'sum' reads %v", "'flatten'"),
    ),
    Broken(
        "registers that cross ranks have their sync id",
        lambda p: edit_register(p, "b", sync_id=-1),
        ("'b'", "1.10.0.0"),
    ),
    Broken(
        "registers that cross ranks have their sync id",
        lambda p: edit_register(p, "a", sync_id=pack_register_id(1, 10)),
        ("'a'", "1.10.0.0"),
    ),
    Broken(
        "registers that cross ranks have their sync id",
        lambda p: edit_remote(p, sync_id=pack_register_id(0, 11)),
        ("'b'", "0.11.0.0", "0.10.1.0"),
    ),
    Broken(
        "a task has the spec of its kind",
        lambda p: edit_task(p, "relu", kind=TaskKind.SLICE_BOXING),
        ("'relu'", "ComputeSpec", "SliceSpec"),
    ),
    Broken(
        "a task has the spec of its kind",
        lambda p: edit_register(
            edit_register(
                edit_task(p, "g all_reduce", inputs=(register_id("g"), register_id("w"))),
                "w",
                consumers=(task_id("matmul"), task_id("g all_reduce"), task_id("sgd")),
            ),
            "g",
            consumers=(task_id("g all_reduce"),),
        ),
        ("'g all_reduce'", "2 inputs"),
    ),
    Broken(
        "ops compute on their registers' boxes",
        lambda p: edit_spec(p, "scale", output_regions=(((0, 2), (0, 5)),)),
        ("'scale'", "%b", "[2, 4]", "[0:2, 0:5]"),
    ),
    Broken(
        "ops compute on their registers' boxes",
        lambda p: edit_spec(p, "scale", input_shapes=()),
        ("'scale'", "1 registers"),
    ),
    Broken(
        "collectives fit their registers",
        lambda p: edit_spec(
            edit_register(p, "g:all_reduce", shape=(4, 8)),
            "sgd",
            input_shapes=((8, 4), (4, 8), (4, 3)),
            input_regions=(((0, 8), (0, 4)), ((0, 4), (0, 8)), ((0, 4), (0, 3))),
        ),
        ("'g all_reduce'", "[8, 4]", "[4, 8]", "all_reduce among 2 ranks"),
    ),
    Broken(
        "communicators list their collectives in plan order",
        lambda p: edit_spec(p, "g all_reduce", communicator=3),
        ("'g all_reduce'", "communicator 3"),
    ),
    Broken(
        "communicators list their collectives in plan order",
        lambda p: edit_task(p, "s all_reduce", stream=Stream.COPY),
        ("'s all_reduce'", "stream copy", "stream collective, on which all collectives of"),
    ),
    Broken(
        "collectives fit their registers",
        lambda p: edit_spec(p, "g all_reduce", reduction=None),
        ("'g all_reduce'", "reduction None"),
    ),
    Broken(
        "communicators list their collectives in plan order",
        lambda p: replace(p, communicators=(Communicator((0, 1), (8, 6)),)),
        ("families 8, 6", "families 6, 8"),
    ),
    Broken(
        "communicators list their collectives in plan order",
        lambda p: replace(p, communicators=(Communicator((1, 2), (6, 8)),)),
        ("ranks 1, 2", "with 0 among them"),
    ),
    Broken(
        "slices cover their output once",
        lambda p: with_piece(p, 0, target=((1, 3), (0, 3))),
        ("'b put together'", "[1:3, 0:3]", "[2:4, 0:3]"),
    ),
    Broken(
        "slices cover their output once",
        lambda p: with_piece(p, 0, source=((0, 1), (1, 4)), target=((0, 1), (0, 3))),
        ("'b put together'", "9 elements", "12 elements"),
    ),
    Broken(
        "slices cover their output once",
        lambda p: with_piece(p, 0, source=((0, 2), (2, 5))),
        ("'b put together'", "[0:2, 2:5]", "[2, 4]"),
    ),
    Broken(
        "slices cover their output once",
        lambda p: with_piece(p, 0, input=2),
        ("'b put together'", "input 2"),
    ),
    Broken(
        "copies read inside the remote register",
        lambda p: edit_spec(p, "b from rank 1", region=((0, 2), (2, 5))),
        ("'b from rank 1'", "[0:2, 2:5]", "[2, 4]"),
    ),
    Broken(
        "copies read inside the remote register",
        lambda p: edit_remote(p, dtype=DType.INT32),
        ("'b from rank 1'", "int32", "float32"),
    ),
    Broken(
        "outputs are read by output tasks",
        lambda p: with_output(p, register=register_id("s")),
        ("'loss'", "%s", "'out'"),
    ),
    Broken(
        "outputs are read by output tasks",
        lambda p: replace(p, outputs=p.outputs * 2),
        ("'loss'", "a second time"),
    ),
    Broken(
        "registers fit their block",
        lambda p: edit_register(p, "g", nbytes=64),
        ("'g'", "64 bytes", "128 bytes"),
    ),
    Broken("registers fit their block", lambda p: edit_register(p, "g", offset=8), ("'g'", "8")),
    Broken(
        "registers fit their block",
        lambda p: edit_register(p, "g", offset=p.blocks[0].nbytes - 64),
        ("'g'", "block 0", "768 bytes"),
    ),
    Broken(
        "slots suffice for the micro-batches in between",
        lambda p: edit_register(p, "g", register_count=0),
        ("'g' has no slot", "0 slots", "1 slot or more"),
    ),
    Broken(
        "slots suffice for the micro-batches in between",
        lambda p: with_control(p, register_count=0),
        ("'g all_reduce:control' has no slot", "0 slots", "1 slot or more"),
    ),
    Broken(
        "registers fit their block",
        lambda p: replace(p, peak_live_bytes=p.arena_bytes + 1),
        ("769 bytes alive", "768 bytes"),
    ),
    Broken(
        "variables are their shard and are kept",
        lambda p: with_variable(p, region=((0, 4), (0, 4))),
        ("'w'", "[0:4, 0:4]", "[0:8, 0:4]"),
    ),
    Broken(
        "variables are their shard and are kept",
        lambda p: with_variable(p, sbp=NdSbp((Split(0),))),
        ("'w'", "[0:4, 0:4]"),
    ),
    Broken(
        "variables are their shard and are kept",
        lambda p: with_variable(p, placement=Placement("cpu", [1, 2])),
        ("'w'", "rank 0"),
    ),
    Broken(
        "variables are their shard and are kept",
        lambda p: with_variable(p, register=register_id("g")),
        ("'w'", "'gradient'", "arena"),
    ),
    Broken("variables are their shard and are kept", lambda p: replace(p, variables=()), ("'w'",)),
    Broken(
        "variables are their shard and are kept",
        lambda p: replace(p, variables=p.variables * 2),
        ("'w' is listed twice",),
    ),
    Broken(
        "memory is aliased from an input",
        lambda p: edit_register(p, "b", inplace_of=register_id("h"), offset=128),
        ("'b'", "%h", "0.3.0.0"),
    ),
    Broken(
        "memory is aliased from an input",
        lambda p: edit_register(p, "a", offset=512),
        ("'a'", "'h'", "512", "128"),
    ),
    Broken(
        "memory is aliased from an input",
        lambda p: edit_register(p, "b", is_view=True),
        ("'b'", "view of no register"),
    ),
    Broken(
        "only dead values are overwritten",
        lambda p: edit_register(p, "v", is_view=False),
        ("'flatten' (0.4.0.0) overwrites 'a'", "'gradient'"),
    ),
    Broken("only dead values are overwritten", read_late, ("'relu'", "'h'", "'sum'")),
    Broken(
        "only dead values are overwritten",
        lambda p: edit_register(
            edit_register(p, "b", inplace_of=register_id("a"), offset=128), "v", is_view=False
        ),
        ("'b' overwrites a value that 'v' has overwritten",),
    ),
    Broken(
        "only dead values are overwritten",
        late_collective_reader,
        ("'sgd'", "'w'", "'s all_reduce'"),
    ),
    Broken(
        "only dead values are overwritten",
        lambda p: edit_register(p, "b", inplace_of=register_id("a"), is_view=True, offset=128),
        ("another rank may still read 'b'", "1.10.0.0"),
    ),
    Broken(
        "registers alive at once are disjoint",
        lambda p: edit_register(p, "g", offset=register_named(p, "h").offset),
        ("'h'", "'g'", "alive at once", "'gradient'"),
        MemoryOverlapError,
    ),
    Broken(
        "registers alive at once are disjoint",
        lambda p: edit_register(p, "b:moved", offset=register_named(p, "loss").offset),
        ("'loss'", "'b:moved'", "'s all_reduce'", "'b put together'"),
        MemoryOverlapError,
    ),
    Broken(
        "registers alive at once are disjoint",
        lambda p: edit_register(p, "b:moved", offset=register_named(p, "b").offset),
        ("'b'", "'b:moved'", "read by other ranks"),
        MemoryOverlapError,
    ),
    Broken(
        "registers alive at once are disjoint",
        lambda p: edit_register(p, "g", offset=0, consumers=register_named(p, "g").consumers),
        ("'x'", "'g'", "several slots"),
        MemoryOverlapError,
    ),
]


def test_the_plan_keeps_all_rules() -> None:
    for rank in (0, 1):
        verify_plan(pair_plan(rank))


def test_control_registers_keep_all_rules() -> None:
    verify_plan(with_control(pair_plan(0)))
    verify_plan(with_control(pair_plan(0), register_count=2))


def test_every_rule_is_broken_by_some_case() -> None:
    segments = {  # test_segments.py
        "plan order is segment by segment",
        "slots run micro-batch after micro-batch",
        "what is read has been made as often",
        "segments end when all their streams do",
        "slots suffice for the micro-batches in between",
        "micro-batches take equal pieces",
    }
    assert {case.rule for case in CASES} | segments == {rule.says for rule in PLAN_RULES}
    assert len({rule.says for rule in PLAN_RULES}) == len(PLAN_RULES)


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{at}-{case.rule.replace(' ', '_')}" for at, case in enumerate(CASES)]
)
def test_a_broken_rule_is_found_and_named(case: Broken) -> None:
    with pytest.raises(VerifyError) as caught:
        verify_plan(case.edit(PLAN))
    message = str(caught.value)
    assert type(caught.value) is case.error
    assert repr(case.rule) in message
    for word in case.words:
        assert word in message
    assert caught.value.report.rank == 0
    assert caught.value.report.got
    assert caught.value.report.expected


def test_an_error_shows_the_neighbours() -> None:
    with pytest.raises(VerifyError) as caught:
        verify_plan(edit_spec(PLAN, "scale", input_shapes=()))
    assert caught.value.report.op == "scale"
    assert caught.value.report.source == "job.py:19"
    assert (
        "on stream compute after 'sum' and before 'b put together'; reads %a of 'relu' (0.3.0.0); "
        "feeds 'b put together' (0.11.0.0) with %b, 1.10.0.0 on rank 1 with %b"
    ) in str(caught.value)


def test_bytes_are_used_again_when_their_readers_are_done() -> None:
    build = PlanBuilder(0, 1)
    x = build.register(0, "x", (4,))
    build.compute(0, "first", (), (x,))
    y = build.register(1, "y", (4,))
    build.compute(1, "second", (x,), (y,))
    z = build.register(2, "z", (4,), offset=0)
    build.compute(2, "third", (y,), (z,))
    build.compute(3, "fourth", (z,), ())
    verify_plan(build.build())


def test_sharing_needs_the_reverse_order_across_the_step() -> None:
    """A reader on another stream that no one waits for is not done when the next step begins."""

    def plan(reader: Stream) -> Plan:
        build = PlanBuilder(0, 1)
        x = build.register(0, "x", (4,))
        build.compute(0, "first", (), (x,))
        build.compute(1, "second", (x,), ())
        y = build.register(2, "y", (4,), offset=0)
        build.compute(2, "third", (), (y,))
        build.compute(3, "reader", (y,), (), stream=reader)
        return build.build()

    verify_plan(plan(Stream.COMPUTE))
    with pytest.raises(MemoryOverlapError) as caught:
        verify_plan(plan(Stream.COPY))
    assert "'reader' (0.3.0.0) may still use 'y' when 'first' (0.0.0.0) of the next step" in str(
        caught.value
    )


def test_a_views_readers_must_be_done_before_the_next_step_fills_it() -> None:
    """The producer's credit comes back when the view is made, before the view is read."""

    def plan(*, held: bool) -> Plan:
        build = PlanBuilder(0, 1)
        x = build.register(0, "x", (4,))
        control = (build.control(0, "x:control"),) if held else ()
        build.compute(0, "fill", (), (x,), stream=Stream.DATA, controls_out=control)
        v = build.register(1, "v", (2, 2), inplace_of=x, is_view=True)
        build.compute(1, "view", (x,), (v,))
        build.compute(2, "reader", (v,), (), controls_in=control)
        return build.build()

    verify_plan(plan(held=True))
    with pytest.raises(VerifyError) as caught:
        verify_plan(plan(held=False))
    assert "'fill' (0.0.0.0) of the next step may start while 'reader' (0.2.0.0)" in str(
        caught.value
    )


def test_the_next_step_reads_a_variable_after_its_update() -> None:
    """By credit, as the update reads the variable; an update that reads only a view gives none."""

    def plan(*, view: bool) -> Plan:
        build = PlanBuilder(0, 1)
        w = build.register(0, "w", (4,), block=1)
        build.compute(0, "w", (), (w,), kind=TaskKind.VARIABLE)
        here = Placement("cpu", [0])
        box = ((0, 4),)
        build.variables.append(VariableDesc("w", w, (4,), DType.FLOAT32, here, WHOLE, box, ()))
        v = build.register(1, "v", (4,), block=1, inplace_of=w, is_view=True)
        build.compute(1, "view", (w,), (v,))
        old = v if view else w
        n = build.register(2, "next", (4,), block=1, inplace_of=old)
        build.compute(2, "update", (old,) if view else (w, v), (n,), stream=Stream.COPY)
        return build.build()

    verify_plan(plan(view=False))
    with pytest.raises(VerifyError) as caught:
        verify_plan(plan(view=True))
    assert "'w' (0.0.0.0) of the next step may start while 'update' (0.2.0.0)" in str(caught.value)


def test_a_missing_task_leaves_its_readers_without_a_register() -> None:
    with pytest.raises(VerifyError, match="all that is named exists"):
        verify_plan(without_task(PLAN, "sum"))


def test_added_pieces_need_not_cover_the_output() -> None:
    plan = edit_spec(PLAN, "b put together", reduction=Reduction.MAX)
    pieces = task_named(plan, "b put together").spec.pieces  # type: ignore[union-attr]
    verify_plan(edit_spec(plan, "b put together", pieces=pieces[:1]))
