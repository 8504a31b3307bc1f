"""The mode `naive` is a second compiler: a bug planted in the first shows as another plan."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest

import plancompiler as pc
from plancompiler.boxing import slices
from plancompiler.boxing.graph import BoxingTaskGraph
from plancompiler.boxing.slices import Slicer
from plancompiler.lower import (
    control,
    memory,
    naive,
    naive_plan,
    offsets,
    order,
    rebuild,
    storage,
)
from plancompiler.lower import segments as rank_segments
from plancompiler.lower.compile import build_graph
from plancompiler.lower.emit import emit_plan
from plancompiler.lower.naive import WholeGraph
from plancompiler.lower.naive_plan import plan_of_part
from plancompiler.lower.rebuild import rebuild_rank_task_graph
from plancompiler.plan.digest import plan_digest
from plancompiler.plan.plan import Plan, Stream
from tests.examples import gpt, mlp


def partial_values() -> pc.Job:
    """From broadcast to partial, and from there to another placement."""
    mesh, other = pc.Placement("cpu", [[0, 1], [2, 3]]), pc.Placement("cpu", [3, 1, 4])
    with pc.job("partial") as job:
        x = pc.input("x", (5, 7), "float32", mesh, ["B", "S(0)"])
        y = (x * 2.0).redistribute(sbp=["P", "S(0)"]).redistribute(other, ["S(1)"])
        pc.output("y", y.redistribute(mesh, ["S(0)", "S(0)"]) + x)
    return job


JOBS: dict[str, Callable[[], pc.Job]] = {
    "mesh": lambda: mlp(layout="dp_tp", ranks=4, hidden=30, batch=30),
    "partial": partial_values,
    "stages": lambda: gpt(pp=2),
    "zero": lambda: gpt(dp=2, zero=3),
    "pipeline": lambda: gpt(dp=2, pp=2, schedule="1f1b", microbatches=4, batch=8),
}


@cache
def graph_of(name: str) -> BoxingTaskGraph:
    job = JOBS[name]()
    return build_graph(job, job.world_size)


@cache
def reference(name: str) -> dict[int, str]:
    """Digests of the plans that `naive` makes, by rank."""
    graph = graph_of(name)
    whole = WholeGraph(graph)
    return {rank: plan_digest(plan_of_part(whole.part(rank))) for rank in range(graph.world_size)}


def digests(name: str) -> dict[int, str]:
    """The same of the compiler that all other modes use; unverified, as bugs are planted in it."""
    graph = graph_of(name)
    slicer = Slicer(graph)

    def plan(rank: int) -> Plan:
        return emit_plan(rebuild_rank_task_graph(slicer.for_rank(rank), rank))

    return {rank: plan_digest(plan(rank)) for rank in range(graph.world_size)}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_two_compilers_make_the_same_plans(name: str) -> None:
    assert digests(name) == reference(name)


class Bug(NamedTuple):
    """A part of the compiler, and what stands in its place: a function of the right one."""

    where: Any
    name: str
    job: str
    wrong: Callable[[Any], Any]


def nothing(_right: Any) -> Callable[..., Any]:
    return lambda *_args: ()


def less_one(right: Any) -> Callable[..., Any]:
    return lambda *args: right(*args)[:-1]


BUGS = {
    "a box is that of the mesh's first device": Bug(
        rebuild,
        "shard_region",
        "mesh",
        lambda right: lambda shape, mesh, sbp, at: right(shape, mesh, sbp, (0,) * len(at)),
    ),
    "the last box of an exchange is not read": Bug(
        rebuild, "exchange_sources", "pipeline", less_one
    ),
    "a reader on another rank is not known": Bug(rebuild, "exchange_readers", "pipeline", less_one),
    "the sync id is the least candidate": Bug(
        rebuild, "sync_id_of", "pipeline", lambda _: lambda readers: min(readers, default=-1)
    ),
    "every rank keeps the value of a partial one": Bug(
        rebuild._RankGraphBuilder, "_keeps_value", "partial", lambda _: lambda _self, _family: True
    ),
    "all groups of ranks are one communicator": Bug(
        pc.Placement, "group", "mesh", lambda _: lambda self, _rank, _axes: self.rank_list
    ),
    "a slice leaves out what happens on other ranks": Bug(
        slices.Slicer,
        "_cut",
        "pipeline",
        lambda right: (
            lambda self, rank: replace(
                cut := right(self, rank),
                families=tuple(
                    one for one in cut.families if one.transfer is None or rank in one.placement
                ),
            )
        ),
    ),
    "a control edge goes to one task only": Bug(
        control, "late_edges", "zero", lambda right: lambda *args: tuple(dict(right(*args)).items())
    ),
    "updates do not wait": Bug(control, "update_edges", "zero", nothing),
    "segments end early": Bug(control, "end_edges", "mesh", nothing),
    "bytes are filled again early": Bug(storage, "hold_edges", "stages", nothing),
    "late transport is not held": Bug(control, "late_edges", "zero", nothing),
    "collectives run on the compute stream": Bug(
        order, "stream_of", "mesh", lambda _: lambda _task: Stream.COMPUTE
    ),
    "forward and backward stay apart": Bug(
        rank_segments, "_merged", "pipeline", lambda _: lambda *_args: {}
    ),
    "registers have one slot": Bug(storage, "slots_of", "pipeline", lambda _: lambda *_args: 1),
    "nothing is written in place": Bug(
        storage, "aliases_in_place", "mesh", lambda _: lambda _ordered, views, _order: views
    ),
    "what other ranks read is private": Bug(
        storage, "shared_registers", "mesh", lambda _: lambda *_args: frozenset()
    ),
    "bytes are used one task too long": Bug(
        memory,
        "storage_windows",
        "mesh",
        lambda right: (
            lambda *args: [None if one is None else (one[0], one[1] + 2) for one in right(*args)]
        ),
    ),
    "variables lie on each other": Bug(
        offsets,
        "place_in_a_row",
        "mesh",
        lambda right: lambda groups: (dict.fromkeys(right(groups)[0], 0), right(groups)[1]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_another_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = BUGS[name]
    expected = reference(bug.job)
    monkeypatch.setattr(bug.where, bug.name, bug.wrong(getattr(bug.where, bug.name)))
    assert digests(bug.job) != expected


def test_the_reference_imports_nothing_that_it_checks() -> None:
    imported: dict[str, set[str]] = {}
    for module in (naive, naive_plan):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            assert not isinstance(node, ast.Import)
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("plancompiler"):
                names = {alias.name for alias in node.names}
                imported.setdefault(str(node.module), set()).update(names)
    assert imported.pop("plancompiler.lower.naive_plan") == {"HOST", "RankPart"}
    assert imported.pop("plancompiler.lower.memory") == {"place_windows"}
    assert imported.pop("plancompiler.ir.shard") == {"Region"}
    assert sorted(imported) == [
        "plancompiler.boxing.graph",
        "plancompiler.errors",
        "plancompiler.ir",
        "plancompiler.ir.halo",
        "plancompiler.ir.pipeline",
        "plancompiler.ir.task",
        "plancompiler.ops.registry",
        "plancompiler.plan.plan",
    ]
