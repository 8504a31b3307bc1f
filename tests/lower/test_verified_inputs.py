"""Jobs and slices that come from elsewhere are held against the op table and against themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import plancompiler as pc
from plancompiler.boxing.graph import BoxingTaskGraph, FamilyOutput
from plancompiler.boxing.slices import slice_for_rank
from plancompiler.boxing.verify import verify_boxing_graph
from plancompiler.errors import JobError, PlanCompilerError, VerifyError
from plancompiler.ir import Job, NdSbp, Op
from plancompiler.ir.task import CROSSING, TaskKind
from plancompiler.lower.compile import build_graph, compile_plans
from plancompiler.lower.rebuild import rebuild_rank_task_graph
from plancompiler.ops.registry import op_def
from plancompiler.ops.verify_types import verify_types
from plancompiler.passes import run_passes
from tests.damaged_formats import small_job

Change = Callable[[Op], Op]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return small_job(tmp_path_factory.mktemp("rows"), microbatches=2)


@pytest.fixture(scope="module")
def graph(job: Job) -> BoxingTaskGraph:
    return build_graph(job, 2)


def test_jobs_are_what_the_op_table_makes_of_them(job: Job) -> None:
    verify_types(job)
    verify_types(run_passes(replace(job, config=pc.Config()))[0])


def first(job: Job, kind: str) -> Op:
    return next(op for op in job.ops if op.kind == kind)


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("matmul", lambda op: replace(op, inputs=op.inputs[:1]), "input"),
        ("matmul", lambda op: replace(op, kind="relu"), "input"),
        ("relu", lambda op: replace(op, kind="no_such_op"), "op"),
        (
            "relu",
            lambda op: replace(op, outputs=(replace(op.outputs[0], shape=(1, 2)),)),
            "something else than it says",
        ),
        (
            "relu",
            lambda op: replace(op, inputs=(replace(op.inputs[0], shape=(8, 7)),)),
            "as something else than was made",
        ),
        ("variable", lambda op: replace(op, sbp=NdSbp.of(["B"])), "does not fit its mesh"),
        ("variable", lambda op: replace(op, sbp=NdSbp.of(["S(9)", "B"])), "splits an axis"),
    ],
)
def test_a_changed_op_is_refused(job: Job, kind: str, change: Change, said: str) -> None:
    odd = first(job, kind)
    changed = replace(job, ops=tuple(change(op) if op is odd else op for op in job.ops))
    with pytest.raises(PlanCompilerError, match=said) as caught:
        verify_types(changed)
    assert caught.value.report.op == odd.name


def test_what_is_changed_in_place_lies_where_it_is_changed(job: Job) -> None:
    """A copy of it on other ranks would be changed, and it would not."""
    update = next(op for op in job.ops if op_def(op.kind).mutates)
    name = update.inputs[op_def(update.kind).mutates[0][1]].name
    placement = pc.Placement("cpu", [1, 0])
    moved = {}
    ops = []
    for op in job.ops:
        inputs = tuple(moved.get(each.name, each) for each in op.inputs)
        op = replace(op, inputs=inputs)
        if any(each.name == name for each in op.outputs):
            op = replace(
                op, outputs=tuple(replace(each, placement=placement) for each in op.outputs)
            )
            moved |= {each.name: each for each in op.outputs}
        ops.append(op)
    with pytest.raises(JobError, match="changes a value in place elsewhere"):
        verify_types(replace(job, ops=tuple(ops)))


def test_tensors_larger_than_any_memory_are_refused() -> None:
    mesh = pc.Placement("cpu", [0])
    with pc.job("huge") as job:
        x = pc.ones((1 << 61,), "float32", mesh)
        pc.output("y", (x * x).sum())
    with pytest.raises(JobError, match="larger than any memory"):
        verify_types(job)
    with pytest.raises(VerifyError, match="larger than any memory"):
        compile_plans(job, 1)


def test_graphs_and_slices_of_ours_hold_together(graph: BoxingTaskGraph) -> None:
    verify_boxing_graph(graph)
    for rank in range(2):
        verify_boxing_graph(slice_for_rank(graph, rank))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda graph: replace(graph, world_size=1), "ranks outside the world"),
        (lambda graph: replace(graph, ops=graph.ops[::-1]), "ascending order"),
        (lambda graph: replace(graph, ops=graph.ops[-1:]), "no output of an earlier op"),
        (
            lambda graph: replace(
                graph,
                ops=(
                    *graph.ops[:-1],
                    replace(
                        graph.ops[-1],
                        inputs=(FamilyOutput(0, 99),) * len(graph.ops[-1].inputs),
                    ),
                ),
            ),
            "no output of an earlier op",
        ),
        (
            lambda graph: replace(
                graph,
                ops=(
                    *graph.ops[:-1],
                    replace(
                        graph.ops[-1],
                        signature=replace(graph.ops[-1].signature, inputs=()),
                    ),
                ),
            ),
            "do not fit its signature",
        ),
        (
            lambda graph: replace(
                graph, families=tuple(replace(each, transfer=None) for each in graph.families)
            ),
            "no transfer",
        ),
    ],
)
def test_a_graph_that_does_not_hold_together_is_refused(
    graph: BoxingTaskGraph, change: Callable[[BoxingTaskGraph], BoxingTaskGraph], said: str
) -> None:
    with pytest.raises(VerifyError, match=said):
        verify_boxing_graph(change(graph))


def test_a_slice_that_lacks_what_makes_an_input_is_refused(tmp_path: Path) -> None:
    whole = slice_for_rank(build_graph(small_job(tmp_path), 2), 0)
    made = {placed.family for placed in whole.ops} | {each.number for each in whole.families}
    absent = next(number for number in range(max(made)) if number not in made)
    readers = [
        family
        for family in whole.families
        if family.number > absent and family.transfer is not None and family.kind not in CROSSING
    ]
    assert {TaskKind.SLICE_BOXING, TaskKind.COLLECTIVE_BOXING} <= {each.kind for each in readers}
    for reader in readers:
        odd = replace(reader, inputs=(FamilyOutput(absent, 0),) * len(reader.inputs))
        families = tuple(odd if each is reader else each for each in whole.families)
        damaged = replace(whole, families=families)
        verify_boxing_graph(damaged)  # it may be another rank's
        with pytest.raises(VerifyError, match="lacks what makes an input") as caught:
            rebuild_rank_task_graph(damaged, 0)
        assert caught.value.report.op == reader.name
        assert caught.value.report.rank == 0


def test_examples_hold_together(tmp_path: Path) -> None:
    """Fused reductions, exchanges between stages, and ops that passes made."""
    first_half, second_half = pc.Placement("cpu", [0, 1]), pc.Placement("cpu", [2, 3])
    with pc.job("stages", config=pc.Config(microbatches=2)) as job:
        x = pc.input("x", (8, 4), "float32", first_half, "S(0)")
        first_layer = pc.nn.Linear(4, 6).place(first_half)
        second_layer = pc.nn.Linear(6, 3).place(second_half)
        hidden = first_layer(x).relu().redistribute(second_half, "S(0)")
        loss = second_layer(hidden).sum()
        pc.optim.Adam(lr=0.1).minimize(loss)
        pc.output("loss", loss)
    verify_types(job)
    built = build_graph(job, 4)
    verify_boxing_graph(built)
    for rank in range(4):
        verify_boxing_graph(slice_for_rank(built, rank))
