"""Rules about plans of several ranks, each broken by one edit, and circles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest

from plancompiler.errors import DeadlockError, DigestMismatchError, VerifyError
from plancompiler.ir import DType, Placement, Reduction
from plancompiler.ir.task import Primitive, TaskKind, pack_register_id, pack_task_id
from plancompiler.plan.digest import CrossRankFact, check_cross_rank_facts, cross_rank_facts
from plancompiler.plan.plan import (
    CollectiveSpec,
    Communicator,
    CopySpec,
    Plan,
    RemoteRegister,
    Stream,
    VariableDesc,
)
from plancompiler.plan.verify import PLANS_RULES, verify_plan, verify_plans
from tests.plan.builder import (
    VARIABLES,
    WHOLE,
    PlanBuilder,
    edit_register,
    edit_remote,
    edit_spec,
    pair_plans,
    register_named,
    task_named,
    whole,
    without_task,
)

Plans = dict[int, Plan]


def on(rank: int, edit: Callable[[Plan], Plan]) -> Callable[[Plans], Plans]:
    """An edit of one rank's plan."""
    return lambda plans: {**plans, rank: edit(plans[rank])}


def swap_collectives(plan: Plan) -> Plan:
    """The two collectives in the other order, in the plan and in its communicator."""
    tasks = list(plan.tasks)
    first, second = (
        tasks.index(task_named(plan, name)) for name in ("g all_reduce", "s all_reduce")
    )
    tasks.insert(second, tasks.pop(first))
    return replace(plan, tasks=tuple(tasks), communicators=(Communicator((0, 1), (8, 6)),))


class Broken(NamedTuple):
    """An edit that breaks a rule, and what the error must say."""

    rule: str
    edit: Callable[[Plans], Plans]
    words: tuple[str, ...]


CASES = [
    Broken(
        "plans are of one job",
        on(1, lambda p: replace(p, seed=8)),
        ("ranks 0 and 1", "seed 8", "seed 7"),
    ),
    Broken(
        "plans are of one job",
        lambda plans: {0: plans[1], 1: plans[0]},
        ("plan of rank 1", "plan of rank 0"),
    ),
    Broken(
        "every receive has its send",
        on(0, lambda p: edit_register(p, "b", consumers=(), sync_id=-1)),
        ("receive without send", "'b from rank 0'", "rank 0", "1.10.0.0"),
    ),
    Broken(
        "every receive has its send",
        on(1, lambda p: edit_remote(p, shape=(3, 4))),
        ("ranks 0 and 1", "'b'", "[3, 4]", "[2, 4]"),
    ),
    Broken(
        "every receive has its send",
        on(1, lambda p: edit_remote(p, sync_id=pack_register_id(1, 10, 0, 2))),
        ("ranks 0 and 1", "1.10.0.2", "1.10.0.1"),
    ),
    Broken(
        "every receive has its send",
        on(
            0,
            lambda p: edit_register(
                p,
                "b",
                consumers=(*register_named(p, "b").consumers, pack_task_id(1, 11)),
            ),
        ),
        ("'b'", "1.10.0.0", "1.11.0.0"),
    ),
    Broken(
        "every send has its receive",
        on(
            0,
            lambda p: edit_register(
                p,
                "s",
                consumers=(*register_named(p, "s").consumers, pack_task_id(1, 99)),
                sync_id=pack_register_id(1, 99, 0, 1),
            ),
        ),
        ("send without receive", "'s'", "rank 1", "1.99.0.0 does not exist"),
    ),
    Broken(
        "every send has its receive",
        on(
            0,
            lambda p: edit_register(
                p,
                "s",
                consumers=(*register_named(p, "s").consumers, pack_task_id(1, 7)),
                sync_id=pack_register_id(1, 7, 0, 1),
            ),
        ),
        ("send without receive", "'s'", "1.7.0.0 is 'sum'"),
    ),
    Broken(
        "members run collectives in one order",
        on(1, swap_collectives),
        (
            "ranks 0 and 1",
            "rank 1 runs family 8 ('s all_reduce')",
            "family 6 ('g all_reduce'), as rank 0 does",
        ),
    ),
    Broken(
        "members run collectives in one order",
        on(
            1,
            lambda p: replace(
                without_task(p, "s all_reduce"), communicators=(Communicator((0, 1), (6,)),)
            ),
        ),
        ("ranks 0 and 1", "number 1 rank 1 runs no collective", "family 8 ('s all_reduce')"),
    ),
    Broken(
        "members agree about each collective",
        on(1, lambda p: edit_spec(p, "g all_reduce", reduction=Reduction.MAX)),
        ("ranks 0 and 1", "all_reduce max of float32[8, 4]", "all_reduce sum of float32[8, 4]"),
    ),
    Broken(
        "members agree about each collective",
        on(1, lambda p: edit_register(p, "g", shape=(4, 8))),
        ("'g all_reduce'", "float32[4, 8]", "float32[8, 4]"),
    ),
]


def test_the_plans_keep_all_rules() -> None:
    verify_plans(pair_plans())
    verify_plans({})


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{at}-{case.rule.replace(' ', '_')}" for at, case in enumerate(CASES)]
)
def test_a_broken_rule_is_found_and_named(case: Broken) -> None:
    with pytest.raises(VerifyError) as caught:
        verify_plans(case.edit(pair_plans()))
    message = str(caught.value)
    assert repr(case.rule) in message
    for word in case.words:
        assert word in message


def test_every_rule_is_broken_by_some_test() -> None:
    elsewhere = {
        "nothing waits in a circle",
        "remote readers come before overwriting",
        "readers on other ranks run as often",  # these two: test_schedule.py
        "the step runs to its end",
        "collectives of all streams come in one order",
    }
    assert {case.rule for case in CASES} | elsewhere == {rule.says for rule in PLANS_RULES}


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_are_missing_are_not_asked(rank: int) -> None:
    verify_plans({rank: pair_plans()[rank]})


def test_a_removed_receive_is_a_send_without_receive() -> None:
    """Removing the task alone breaks the plan by itself; seen from the sender it is this."""
    plans = pair_plans()
    tasks = tuple(task for task in plans[1].tasks if task.name != "b from rank 0")
    with pytest.raises(VerifyError, match="send without receive: 'b' is sent to rank 1"):
        verify_plans({**plans, 1: replace(plans[1], tasks=tasks)})


def test_a_plan_that_is_broken_by_itself_is_told_as_such() -> None:
    plans = pair_plans()
    with pytest.raises(VerifyError, match="'communicators list their collectives in plan order'"):
        verify_plans({**plans, 1: replace(plans[1], communicators=())})


def exchange(copy_first: bool) -> Plans:
    """Each rank sends %y and receives the other's; on one stream, in one order or the other."""
    plans = {}
    for rank in (0, 1):
        other = 1 - rank
        build = PlanBuilder(rank)
        reader, here = pack_task_id(other, 2, rank), pack_task_id(rank, 2, other)

        def make(build: PlanBuilder = build, reader: int = reader) -> None:
            y = build.register(1, "y", (4,), remote_consumers=(reader,), sync_id=reader + 1)
            build.compute(1, "make", (), (y,))

        away = RemoteRegister(
            pack_register_id(other, 1), here + 1, "y", (4,), DType.FLOAT32,
            pack_task_id(other, 1), (here,),
        )  # fmt: skip
        build.remote_registers.append(away)
        if not copy_first:
            make()
        z = build.register(2, "z", (4,), lane=other)
        build.task(
            2, TaskKind.COPY_COMM_NET, "copy", (away.id,), (z,), CopySpec(whole((4,))), lane=other
        )
        if copy_first:
            make()
        plans[rank] = build.build()
        verify_plan(plans[rank])
    return plans


def test_a_circle_over_ranks_and_streams_is_printed_task_by_task() -> None:
    verify_plans(exchange(copy_first=False))
    with pytest.raises(DeadlockError) as caught:
        verify_plans(exchange(copy_first=True))
    message = str(caught.value)
    assert "4 tasks wait for each other" in message
    for rank, other in ((0, 1), (1, 0)):
        assert (
            f"Compute 'make' ({rank}.1.0.0) on rank {rank} waits for CopyCommNet 'copy' "
            f"({rank}.2.{other}.0) on rank {rank} (the order of stream compute of rank {rank})"
        ) in message
        assert (
            f"CopyCommNet 'copy' ({rank}.2.{other}.0) on rank {rank} waits for Compute 'make' "
            f"({other}.1.0.0) on rank {other} (%y)"
        ) in message


def test_collectives_of_different_groups_can_wait_in_a_circle() -> None:
    """Ranks 0, 1, 2 meet in pairs; each takes its two meetings in an order that closes a circle."""

    def plans(orders: dict[int, list[tuple[int, int]]]) -> Plans:
        plans = {}
        for rank, pairs in orders.items():
            build = PlanBuilder(rank, world_size=3)
            build.communicators = tuple(
                Communicator(pair, (10 + sum(pair),)) for pair in orders[rank]
            )
            x = build.register(0, "x", (4,))
            build.compute(0, "x", (), (x,))
            for at, pair in enumerate(pairs):
                family = 10 + sum(pair)
                y = build.register(family, f"y{sum(pair)}", (4,))
                build.task(
                    family,
                    TaskKind.COLLECTIVE_BOXING,
                    f"meet{pair[0]}{pair[1]}",
                    (x,),
                    (y,),
                    CollectiveSpec(Primitive.ALL_REDUCE, at, Reduction.SUM),
                    stream=Stream.COLLECTIVE,
                )
            plans[rank] = build.build()
            verify_plan(plans[rank])
        return plans

    verify_plans(plans({0: [(0, 1), (0, 2)], 1: [(0, 1), (1, 2)], 2: [(0, 2), (1, 2)]}))
    with pytest.raises(DeadlockError) as caught:
        verify_plans(plans({0: [(0, 1), (0, 2)], 1: [(1, 2), (0, 1)], 2: [(0, 2), (1, 2)]}))
    message = str(caught.value)
    assert "3 tasks wait for each other" in message
    assert "'meet01' (0.11.0.0) on ranks 0, 1 waits for CollectiveBoxing 'meet12'" in message
    assert "the order of stream collective of rank 2" in message


def two_streams(order: tuple[Stream, Stream]) -> Plan:
    """A rank of a pair that reduces one value on two streams, in this plan order."""
    rank = 0 if order[0] is Stream.COLLECTIVE else 1
    build = PlanBuilder(rank, world_size=2)
    families = {Stream.COLLECTIVE: 10, Stream.GRADIENT: 11}
    build.communicators = tuple(
        Communicator((0, 1), (family,), stream) for stream, family in families.items()
    )
    x = build.register(0, "x", (4,))
    build.compute(0, "x", (), (x,))
    for stream in order:
        family = families[stream]
        build.task(
            family,
            TaskKind.COLLECTIVE_BOXING,
            f"on {stream}",
            (x,),
            (build.register(family, str(stream), (4,)),),
            CollectiveSpec(Primitive.ALL_REDUCE, list(families).index(stream), Reduction.SUM),
            stream=stream,
        )
    return build.build()


def test_collectives_on_several_streams_come_in_one_order_on_all_ranks() -> None:
    """Threads would come through, but one thread that launches both on a device may not."""
    first = two_streams((Stream.COLLECTIVE, Stream.GRADIENT))
    other = two_streams((Stream.GRADIENT, Stream.COLLECTIVE))
    for plan in (first, other):
        verify_plan(plan)
    verify_plans({0: first})
    with pytest.raises(DeadlockError) as caught:
        verify_plans({0: first, 1: other})
    message = str(caught.value)
    assert "'collectives of all streams come in one order'" in message
    assert "rank 0 comes to family 10 before family 11" in message
    assert "rank 1 comes to family 11 before family 10" in message


@pytest.mark.parametrize("answered", [True, False])
def test_a_variable_is_overwritten_after_other_ranks_have_read_it(answered: bool) -> None:
    """The update of rank 0 must wait for rank 1's read; data that comes back from there says so."""
    copy, back = pack_task_id(1, 1), pack_task_id(0, 3)
    zero, one = PlanBuilder(0), PlanBuilder(1)
    w = zero.register(0, "w", (4,), block=VARIABLES, remote_consumers=(copy,), sync_id=copy + 1)
    zero.compute(0, "w", (), (w,), kind=TaskKind.VARIABLE)
    zero.variables.append(
        VariableDesc("w", w, (4,), DType.FLOAT32, Placement("cpu", [0]), WHOLE, whole((4,)), ())
    )
    one.remote_registers.append(
        RemoteRegister(w, copy + 1, "w", (4,), DType.FLOAT32, pack_task_id(0, 0), (copy,))
    )
    c = one.register(1, "w:copy", (4,))
    spec = CopySpec(whole((4,)))
    one.task(1, TaskKind.COPY_COMM_NET, "copy w", (one.remote_registers[0].id,), (c,), spec)
    inputs: tuple[int, ...] = (w,)
    if answered:
        g = one.register(2, "g", (4,), remote_consumers=(back,), sync_id=back + 1)
        one.compute(2, "gradient", (c,), (g,))
        zero.remote_registers.append(
            RemoteRegister(g, back + 1, "g", (4,), DType.FLOAT32, pack_task_id(1, 2), (back,))
        )
        received = zero.register(3, "g:copy", (4,))
        zero.task(3, TaskKind.COPY_COMM_NET, "copy g", (g,), (received,), spec, stream=Stream.COPY)
        inputs = (w, received)
    n = zero.register(4, "w:next", (4,), block=VARIABLES, inplace_of=w)
    zero.compute(4, "update", inputs, (n,))
    plans = {0: zero.build(), 1: one.build()}
    for plan in plans.values():
        verify_plan(plan)
    if answered:
        verify_plans(plans)
    else:
        with pytest.raises(VerifyError) as caught:
            verify_plans(plans)
        message = str(caught.value)
        assert "'remote readers come before overwriting'" in message
        assert "'update' (0.4.0.0) on rank 0 overwrites 'w' while CopyCommNet 'copy w'" in message


def facts(plans: Plans) -> dict[int, tuple[CrossRankFact, ...]]:
    return {rank: cross_rank_facts(plan) for rank, plan in plans.items()}


def test_facts_of_equal_plans_agree() -> None:
    plans = pair_plans()
    check_cross_rank_facts(facts(plans))
    check_cross_rank_facts({1: cross_rank_facts(plans[1])})
    assert [(fact.name, fact.role) for fact in cross_rank_facts(plans[0])] == [
        ("b", "consumer"),
        ("b", "producer"),
        ("communicator of ranks 0, 1 on stream collective", "member"),
    ]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            on(1, lambda p: edit_remote(p, shape=(3, 4))),
            ("ranks 0 (producer) and 1 (consumer)", "'b'", "float32[3, 4]", "float32[2, 4]"),
        ),
        (
            on(1, lambda p: edit_remote(p, sync_id=pack_register_id(1, 10, 0, 2))),
            ("ranks 0 (producer) and 1 (consumer)", "sync 1.10.0.2", "sync 1.10.0.1"),
        ),
        (
            on(0, lambda p: edit_register(p, "b", consumers=(), sync_id=-1)),
            ("rank 1 (consumer) counts on rank 0 for 'b'", "register 0.9.0.0"),
        ),
        (
            on(1, lambda p: replace(p, remote_registers=())),
            ("rank 0 (producer) counts on rank 1 for 'b'", "register 0.9.0.0"),
        ),
        (
            on(1, lambda p: edit_remote(p, consumers=(pack_task_id(0, 10),))),
            ("'b'", "consumers 1.10.0.0"),
        ),
        (
            on(1, swap_collectives),
            ("communicator of ranks 0, 1", "families 8, 6", "families 6, 8"),
        ),
        (
            on(1, lambda p: replace(p, communicators=())),
            ("rank 0 (member) counts on rank 1", "communicator of ranks 0, 1"),
        ),
        (
            on(
                0,
                lambda p: edit_register(p, "b", sync_id=p.remote_registers[0].sync_id),
            ),
            ("'b'", "sync 0.10.1.1", "sync 1.10.0.1"),
        ),
    ],
)
def test_facts_that_differ_name_both_ranks(
    edit: Callable[[Plans], Plans], words: tuple[str, ...]
) -> None:
    with pytest.raises(DigestMismatchError) as caught:
        check_cross_rank_facts(facts(edit(pair_plans())))
    for word in words:
        assert word in str(caught.value)


def test_one_sync_id_for_two_registers_is_found() -> None:
    """Both ranks agree about each of two registers, but both are known by one id."""

    def fact(register: int, role: str) -> CrossRankFact:
        text = f"register {register}"
        return CrossRankFact(5, register, f"value {register}", role, (0, 1), text)

    with pytest.raises(DigestMismatchError, match="disagree about 'value 3'"):
        check_cross_rank_facts(
            {
                0: [fact(3, "producer"), fact(4, "producer")],
                1: [fact(3, "consumer"), fact(4, "consumer")],
            }
        )
