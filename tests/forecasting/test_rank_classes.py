"""Ranks of one class do alike, and few of them are looked at."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.boxing.graph import BoxingTaskGraph
from plancompiler.boxing.slices import Slicer
from plancompiler.forecasting import rank_classes as classes_module
from plancompiler.forecasting.rank_classes import RankClasses, rank_classes
from plancompiler.ir import Job
from plancompiler.ir.shard import Region, region_shape
from plancompiler.ir.task import TaskKind, unpack_id
from plancompiler.lower.compile import build_graph
from plancompiler.lower.rank_task_graph import RankTask, RankTaskGraph
from plancompiler.lower.rebuild import rebuild_rank_task_graph
from plancompiler.plan.plan import CollectiveSpec, ComputeSpec, CopySpec, SliceSpec, TaskSpec
from tests.examples import gpt
from tests.forecasting.test_exact import ring_job


def two_layers(dp: int, tp: int, width: int, rows: int, **settings: object) -> pc.Job:
    """A job on a mesh of dp × tp ranks whose hidden units are split over tp."""
    mesh = pc.Placement("cpu", np.arange(dp * tp).reshape(dp, tp), ("dp", "tp"))
    with pc.job("layers", config=pc.Config(**settings)) as job:
        x = pc.input("x", (rows, width), "float32", mesh, ["S(0)", "B"])
        one, other = pc.nn.Linear(width, width), pc.nn.Linear(width, width)
        one.place(mesh, {"weight": ["B", "S(0)"], "bias": ["B", "S(0)"]})
        other.place(mesh, {"weight": ["B", "S(1)"]})
        loss = pc.mean(other(pc.relu(one(x))) ** 2)
        pc.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1).minimize(loss)
        pc.output("loss", loss)
    return job


def turned(one: list[str], other: list[str]) -> pc.Job:
    """Blocks go to the same mesh with its axes exchanged: ranks on its diagonal keep theirs."""
    ranks = np.arange(16).reshape(4, 4)
    mesh, turned = (pc.Placement("cpu", each, ("a", "b")) for each in (ranks, ranks.T))
    with pc.job("turned") as job:
        x = pc.input("x", (64,), "float32", mesh, one)
        pc.output("y", pc.exp(pc.exp(x).redistribute(turned, other)).sum())
    return job


@pytest.mark.parametrize("one", [["S(0)", "S(0)"], ["S(0)", "B"]])
@pytest.mark.parametrize("other", [["S(0)", "S(0)"], ["S(0)", "B"]])
def test_ranks_that_keep_what_others_exchange_do_as_such(one: list[str], other: list[str]) -> None:
    check_classes(build_graph(turned(one, other), 16))


@pytest.mark.parametrize(
    "job",
    [
        lambda: gpt(dp=2, tp=3, pp=2, sequence_parallel=1, microbatches=2),
        lambda: gpt(dp=3, zero=3, batch=6, microbatches=2),
        lambda: ring_job(13),
    ],
    ids=["pipeline", "pieces", "ring"],
)
def test_all_ranks_of_a_class_have_its_tasks_whatever_joins_them(job: Callable[[], Job]) -> None:
    known = job()
    check_classes(build_graph(known, known.world_size))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"dp": 8, "tp": 3, "width": 7, "rows": 8}, id="columns"),
        pytest.param({"dp": 6, "tp": 2, "width": 8, "rows": 9}, id="rows"),
        pytest.param({"dp": 5, "tp": 3, "width": 11, "rows": 7, "zero": 1}, id="nested"),
        pytest.param({"dp": 4, "tp": 3, "width": 10, "rows": 4, "zero": 3}, id="zero-3"),
    ],
)
def test_all_ranks_of_a_class_have_its_tasks(layout: dict[str, int]) -> None:
    check_classes(build_graph(two_layers(**layout), layout["dp"] * layout["tp"]))


def form(graph: RankTaskGraph) -> Hashable:
    """All that a rank's plan is made of but for numbers of ranks, places in global tensors, and the
    outputs, which one rank of a placement reports.
    """
    return (
        tuple(
            (*unpack_id(register.id)[1:], register.shape, len(register.remote_consumers))
            for register in graph.registers.values()
        ),
        tuple((*unpack_id(each.id)[1:], each.shape) for each in graph.remote_registers),
        tuple(
            form_of_task(graph, task) for task in graph.tasks if task.kind is not TaskKind.OUTPUT
        ),
    )


def form_of_task(graph: RankTaskGraph, task: RankTask) -> Hashable:
    return (
        *unpack_id(task.id)[1:],
        tuple(unpack_id(register)[1:] for register in task.inputs),
        form_of_spec(graph, task.spec),
    )


def form_of_spec(graph: RankTaskGraph, spec: TaskSpec) -> Hashable:
    if isinstance(spec, ComputeSpec):
        return shapes(spec.input_regions), shapes(spec.output_regions), spec.lanes
    if isinstance(spec, CollectiveSpec):
        return len(graph.communicators[spec.communicator].ranks)
    if isinstance(spec, CopySpec):
        return region_shape(spec.region)
    if isinstance(spec, SliceSpec):
        return tuple((piece.input, region_shape(piece.source)) for piece in spec.pieces)
    return None


def shapes(regions: tuple[Region, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(region_shape, regions))


def check_classes(graph: BoxingTaskGraph) -> None:
    """All ranks of a class have its tasks, and each rank is in one."""
    classes = rank_classes(graph)
    slicer = Slicer(graph)
    for each in classes.classes:
        forms = {form(rebuild_rank_task_graph(slicer.for_rank(rank), rank)) for rank in each.ranks}
        assert len(forms) == 1, each.ranks
    assert sorted(rank for each in classes.classes for rank in each.ranks) == list(
        range(graph.world_size)
    )


def test_more_data_parallel_ranks_are_not_more_work(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []

    class Counted(classes_module._Slice):
        def form(self, rank: int) -> Hashable:
            looked_at.append(rank)
            return super().form(rank)

    monkeypatch.setattr(classes_module, "_Slice", Counted)

    def classes_of(dp: int) -> RankClasses:
        looked_at.clear()
        job = two_layers(dp=dp, tp=4, width=4 * dp + 2, rows=dp, zero=1)
        return rank_classes(build_graph(job, job.world_size))

    def sizes() -> Iterator[tuple[int, int]]:
        for dp in (8, 64):
            yield len(classes_of(dp).classes), len(looked_at)

    (few, looks), (many, more_looks) = sizes()
    assert few == many
    # Each halving of a box is a few looks, and eight times the ranks are three halvings more.
    assert more_looks <= looks + 30
    assert more_looks < 64
