"""`naive` mode: the master expands all ranks in one graph and cuts it. The reference for the
others.

It looks at no slice and does no arithmetic on remote ends: every rank's tasks are made from the
whole graph, and a register's remote readers are the CopyCommNet tasks that were really made to
read it.
"""

from __future__ import annotations

from plancompiler.boxing.graph import BoxingTaskGraph, FamilyOutput, RankSlice
from plancompiler.ir.task import CROSSING, pack_register_id
from plancompiler.lower.rank_task_graph import RankTaskGraph
from plancompiler.lower.rebuild import build_rank_task_graph


def expand_all_ranks(graph: BoxingTaskGraph) -> dict[int, RankTaskGraph]:
    """Every rank's task graph, cut from one graph of all ranks."""
    cuts = {rank: _members_of(graph, rank) for rank in range(graph.world_size)}
    readers: dict[int, list[int]] = {}
    for rank, cut in cuts.items():
        for task in build_rank_task_graph(cut, rank, _no_readers).tasks:
            if task.kind in CROSSING:
                readers.setdefault(task.inputs[0], []).append(task.id)
    edges = {register: tuple(sorted(tasks)) for register, tasks in readers.items()}

    def remote_readers(output: FamilyOutput, rank: int) -> tuple[int, ...]:
        return edges.get(pack_register_id(rank, output.family, 0, output.slot), ())

    return {rank: build_rank_task_graph(cut, rank, remote_readers) for rank, cut in cuts.items()}


def _no_readers(_output: FamilyOutput, _rank: int) -> tuple[int, ...]:
    return ()


def _members_of(graph: BoxingTaskGraph, rank: int) -> RankSlice:
    """The whole graph's families, with the ops of one rank."""
    return RankSlice(
        job_name=graph.job_name,
        seed=graph.seed,
        world_size=graph.world_size,
        ops=tuple(placed for placed in graph.ops if rank in placed.op.placement),
        families=graph.families,
        pipeline=graph.pipeline,
    )
