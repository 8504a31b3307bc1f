"""The master's half of compiling a job: what its ranks fetch, made in a thread of the master."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from plancompiler.boxing.graph import BoxingTaskGraph
from plancompiler.boxing.serde import graph_to_bytes
from plancompiler.cache.plan_cache import JobSlices, PlanCache
from plancompiler.cluster.chunks import Parcel, pack
from plancompiler.cluster.messages import JobRequest
from plancompiler.ir import Job
from plancompiler.lower.cached import graph_and_slices, plans_of_job, slices_of_job
from plancompiler.lower.compile import compile_plans
from plancompiler.plan.job_serde import job_from_bytes
from plancompiler.plan.plan import Plan
from plancompiler.plan.serde import plan_to_bytes

SLICES_MODE = "rank_per_process"
"""In it ranks fetch slices; in the others, plans."""


class MastersHalf(NamedTuple):
    """What the master makes of a job."""

    parcels: Mapping[int, Parcel]
    """The slice or plan of each rank; ranks with equal slices share one parcel."""
    cached: bool
    """Whether nothing was compiled."""
    graph: Parcel | None = None
    """The boxing task graph, of a job that is compiled only."""


def masters_half(
    job: Job | bytes,
    request: JobRequest,
    cache: PlanCache | None,
    plans: Mapping[int, Plan] | None = None,
) -> MastersHalf:
    """Compile a job as far as its request's mode leaves it to the master; nothing, where its
    `plans` are there.
    """
    if plans is not None:
        return MastersHalf(_parcels_of_plans(plans), True)
    if isinstance(job, bytes):
        job = job_from_bytes(job)
    world_size = request.ranks or job.world_size
    if request.compile_only:  # the graph is asked for too, so nothing comes from a cache
        return _made_anew(job, world_size, request.mode)
    kept = cache if request.cache else None
    if request.mode != SLICES_MODE:
        made = plans_of_job(job, world_size, request.mode, kept)
        return MastersHalf(_parcels_of_plans(made.plans), made.cached)
    slices, cached = slices_of_job(job, world_size, kept)
    return MastersHalf(_parcels_of_slices(slices), cached)


def _made_anew(job: Job, world_size: int, mode: str) -> MastersHalf:
    graph: BoxingTaskGraph
    if mode == SLICES_MODE:
        graph, slices = graph_and_slices(job, world_size)
        parcels = _parcels_of_slices(slices)
    else:
        compilation = compile_plans(job, world_size, mode)
        graph, parcels = compilation.graph, _parcels_of_plans(compilation.plans)
    return MastersHalf(parcels, False, pack(graph_to_bytes(graph), compress=True))


def _parcels_of_plans(plans: Mapping[int, Plan]) -> dict[int, Parcel]:
    return {
        rank: pack(plan_to_bytes(plan), compress=True, checked=True) for rank, plan in plans.items()
    }


def _parcels_of_slices(slices: JobSlices) -> dict[int, Parcel]:
    distinct = [pack(data, compress=True, checked=True) for data in slices.distinct]
    return {rank: distinct[number] for rank, number in enumerate(slices.of_rank)}
