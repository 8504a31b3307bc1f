"""`compile_rank`: the whole work of one worker's compiler, from its slice to its verified plan."""

from __future__ import annotations

from plancompiler.boxing.graph import RankSlice
from plancompiler.lower.emit import emit_plan
from plancompiler.lower.rank_task_graph import rebuild_rank_task_graph
from plancompiler.plan.plan import Plan
from plancompiler.plan.verify import verify_plan


def compile_rank(rank_slice: RankSlice, rank: int) -> Plan:
    """The rank's plan from its slice alone, verified."""
    plan = emit_plan(rebuild_rank_task_graph(rank_slice, rank))
    verify_plan(plan)
    return plan
