"""The compiler behind the plan cache: nothing is made that an earlier compilation has left.

Functions take `cache`, None to do without, and say whether all came out of it. Entries do not name
the mode that made them, as all give the same plans; who chose a mode does without the cache
(`lower.compile.is_mode_chosen`). A worker's part is `lower.rank.plan_of_slice`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from plancompiler.boxing.graph import BoxingTaskGraph
from plancompiler.boxing.serde import slices_by_rank
from plancompiler.cache.keys import slice_key
from plancompiler.cache.plan_cache import JobSlices, PlanCache
from plancompiler.errors import PlanCompilerError
from plancompiler.ir import Job
from plancompiler.lower.collector import collector_paused
from plancompiler.lower.compile import DUMP_VARIABLE, build_graph, compile_plans
from plancompiler.plan.digest import digest_of_plans
from plancompiler.plan.plan import Plan
from plancompiler.plan.verify import verify_plans

_log = logging.getLogger(__name__)


@dataclass
class JobPlans:
    """Verified plans of all ranks."""

    plans: Mapping[int, Plan]
    cached: bool
    """Whether nothing was compiled."""

    @cached_property
    def digest(self) -> str:
        """One hash over the text form of all plans."""
        return digest_of_plans(self.plans)


def plans_of_job(
    job: Job, world_size: int, mode: str | None = None, cache: PlanCache | None = None
) -> JobPlans:
    """The plans of all ranks, compiled in this process unless they are kept."""
    key = None if cache is None else cache.key(job, world_size)
    if cache is None or key is None:
        return JobPlans(compile_plans(job, world_size, mode).plans, cached=False)
    # What is dumped must be made.
    if not os.environ.get(DUMP_VARIABLE):
        plans = _kept_plans(cache, key, world_size)
        if plans is not None and _agree(plans):
            _log.info("plans of job %s for %d ranks: cached", job.name, world_size)
            return JobPlans(plans, cached=True)
    compilation = compile_plans(job, world_size, mode)
    slices = JobSlices.of(compilation.slices)
    cache.keep_slices(key, job.name, slices)
    keys = [slice_key(data) for data in slices.distinct]
    for rank, plan in compilation.plans.items():
        plan_key = keys[slices.of_rank[rank]]
        if plan_key is not None:
            cache.keep_plan_by_key(plan_key, plan)
    _log.info("plans of job %s for %d ranks: compiled", job.name, world_size)
    return JobPlans(compilation.plans, cached=False)


def _agree(plans: Mapping[int, Plan]) -> bool:
    """Whether kept plans fit together: they may have been made one by one."""
    try:
        verify_plans(plans)
    except PlanCompilerError as error:
        _log.warning("plans of the plan cache do not agree, compiling again: %s", error)
        return False
    return True


def _kept_plans(cache: PlanCache, key: str, world_size: int) -> dict[int, Plan] | None:
    """The plans of all ranks; None where one is missing."""
    slices = cache.slices(key, world_size)
    if slices is None:
        return None
    keys = [slice_key(data) for data in slices.distinct]
    plans = {}
    for rank, number in enumerate(slices.of_rank):
        plan_key = keys[number]
        plan = None if plan_key is None else cache.plan_by_key(plan_key, rank)
        if plan is None:
            return None
        plans[rank] = plan
    return plans


@collector_paused()
def graph_and_slices(job: Job, world_size: int) -> tuple[BoxingTaskGraph, JobSlices]:
    """The boxing task graph of a job, and what of it each rank needs."""
    dump = os.environ.get(DUMP_VARIABLE)
    graph = build_graph(job, world_size, dump=Path(dump) if dump else None)
    return graph, JobSlices.of(slices_by_rank(graph, range(world_size))[1])


@collector_paused()
def slices_of_job(
    job: Job, world_size: int, cache: PlanCache | None = None
) -> tuple[JobSlices, bool]:
    """The slices of all ranks: a master's half of the compiler. And whether they were kept."""
    dump = os.environ.get(DUMP_VARIABLE)
    key = None if cache is None else cache.key(job, world_size)
    if cache is not None and key is not None and not dump:
        kept = cache.slices(key, world_size)
        if kept is not None:
            _log.info("slices of job %s for %d ranks: cached", job.name, world_size)
            return kept, True
    _, slices = graph_and_slices(job, world_size)
    if cache is not None and key is not None:
        cache.keep_slices(key, job.name, slices)
    _log.info("slices of job %s for %d ranks: compiled", job.name, world_size)
    return slices, False
