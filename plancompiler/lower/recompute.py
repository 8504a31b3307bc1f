"""`recompute=auto`: which calls to compute again so that every device's memory fits a budget.

What a layout, a schedule and the memory planner make of a choice is known only by compiling it, so
that is done. Per placement the first regions of forward are chosen: theirs is kept the longest. How
many it takes is found by bisection, for all placements at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from plancompiler.errors import UsageError
from plancompiler.ir import Job, Placement
from plancompiler.passes import config_of
from plancompiler.passes.recompute import regions_of, with_checkpoints

Measure = Callable[[Job], Mapping[int, int]]
"""Bytes of memory per rank that a job takes."""


@dataclass(slots=True)
class _Search:
    """How many regions of one placement are to be chosen."""

    placement: Placement
    names: list[str]
    most: int
    """So many are enough."""
    least: int = 0
    """Fewer are not."""

    @property
    def middle(self) -> int:
        return (self.least + self.most) // 2


def choose_regions(job: Job, measure: Measure) -> Job:
    """The job with regions checkpointed until each rank takes at most `config.memory_bytes`.

    With a budget of 0 all regions that can be are. Raises UsageError where that is not enough.
    """
    candidates: dict[Placement, list[str]] = {}
    for name, region in regions_of(job).items():
        if not region.checkpoint and region.effect is None:
            candidates.setdefault(region.ops[0].placement, []).append(name)
    searches = [_Search(placement, names, len(names)) for placement, names in candidates.items()]
    budget = config_of(job).memory_bytes
    if not budget:
        return _chosen(job, {each.placement: each.most for each in searches}, searches)
    _check_enough(job, searches, measure, budget)
    while any(each.least < each.most for each in searches):
        counts = {each.placement: each.middle for each in searches}
        taken = measure(_chosen(job, counts, searches))
        for each in searches:
            fits = all(taken[rank] <= budget for rank in each.placement.rank_list)
            if fits:
                each.most = each.middle
            elif each.least < each.most:
                each.least = each.middle + 1
    return _chosen(job, {each.placement: each.most for each in searches}, searches)


def _chosen(job: Job, counts: Mapping[Placement, int], searches: list[_Search]) -> Job:
    return with_checkpoints(
        job, {name for each in searches for name in each.names[: counts[each.placement]]}
    )


def _check_enough(job: Job, searches: list[_Search], measure: Measure, budget: int) -> None:
    """Computing everything again is enough for the budget."""
    taken = measure(_chosen(job, {each.placement: each.most for each in searches}, searches))
    rank = max(taken, key=lambda each: taken[each])
    if taken[rank] > budget:
        count = sum(len(each.names) for each in searches)
        op = next(op for op in job.ops if rank in op.placement)
        raise UsageError(
            "the job does not fit its budget of memory, whatever is computed again",
            op=op.name,
            source=op.source,
            rank=rank,
            got=f"{taken[rank]} bytes with all {count} regions computed again",
            expected=f"at most memory_bytes={budget}",
            hint="split the job over more devices, use zero, or mark more with pc.checkpoint",
        )
