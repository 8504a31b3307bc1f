"""A worker's whole compiler, from its slice to its verified plan."""

from __future__ import annotations

import logging

from plancompiler.boxing.graph import RankSlice
from plancompiler.boxing.serde import slice_from_bytes
from plancompiler.boxing.verify import verify_boxing_graph
from plancompiler.cache.plan_cache import PlanCache
from plancompiler.lower.collector import collector_paused
from plancompiler.lower.emit import emit_plan
from plancompiler.lower.profile import timed
from plancompiler.lower.rank_task_graph import RankTaskGraph
from plancompiler.lower.rebuild import rebuild_rank_task_graph
from plancompiler.plan.plan import Plan
from plancompiler.plan.verify import verify_plan

_log = logging.getLogger(__name__)


@collector_paused()
def compile_rank(rank_slice: RankSlice, rank: int, seconds: dict[str, float] | None = None) -> Plan:
    """The rank's plan from its slice alone, verified. `seconds` receives the time per stage."""
    seconds = {} if seconds is None else seconds
    with timed(seconds, "rebuild"):
        graph = rebuild_rank_task_graph(rank_slice, rank)
    return plan_of_tasks(graph, seconds)


@collector_paused()
def plan_of_tasks(graph: RankTaskGraph, seconds: dict[str, float] | None = None) -> Plan:
    """The rank's plan from its tasks, verified. `seconds` receives the time per stage."""
    seconds = {} if seconds is None else seconds
    with timed(seconds, "emit"):
        plan = emit_plan(graph)
    with timed(seconds, "verify"):
        verify_plan(plan)
    return plan


@collector_paused()
def plan_of_slice(data: bytes, rank: int, cache: PlanCache | None = None) -> tuple[Plan, bool]:
    """The rank's plan from its slice's wire form, compiled unless the cache has it; and whether it
    had.
    """
    plan = None if cache is None else cache.plan(data, rank)
    if plan is not None:
        _log.info("plan of rank %d: cached", rank)
        return plan, True
    rank_slice = slice_from_bytes(data)
    verify_boxing_graph(rank_slice)
    plan = compile_rank(rank_slice, rank)
    if cache is not None:
        cache.keep_plan(data, plan)
    _log.info("plan of rank %d: compiled", rank)
    return plan, False
