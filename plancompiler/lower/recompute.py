"""`recompute=auto`: which calls to compute again so that every device's memory fits a budget.

Per placement the first regions of forward are chosen: theirs is kept the longest. What a layout, a
schedule and the memory planner make of a choice is known only by lowering it. But what a region
would free is known from one lowering without any: the storage of its values. So the job is lowered
once as it is, where a guess by those bytes says that enough is chosen, and beside it to see that
less is not: about three times, however many regions there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from plancompiler.errors import UsageError
from plancompiler.ir import Job, Placement
from plancompiler.lower.offsets import PlacedTasks
from plancompiler.passes import config_of
from plancompiler.passes.recompute import freed_values, regions_of, with_checkpoints


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a job takes on a rank."""

    nbytes: int
    storage_of: Mapping[str, int]
    """Value by its name → the root of its storage."""
    bytes_of: Mapping[int, int]
    """Root → bytes of the storage."""

    def together(self, values: Collection[str]) -> int:
        """Bytes of the storage of some values."""
        roots = {self.storage_of[value] for value in values if value in self.storage_of}
        return sum(self.bytes_of[root] for root in roots)


def memory_of(placed: PlacedTasks) -> RankMemory:
    """The memory of a rank whose storage has offsets."""
    registers, groups = placed.stored.ordered.graph.registers, placed.stored.groups
    return RankMemory(
        sum(block.nbytes for block in placed.blocks),
        {registers[each].name: group.root for group in groups for each in group.members},
        {group.root: group.nbytes for group in groups},
    )


Measure = Callable[[Job], Mapping[int, RankMemory]]
"""What a job takes on each rank."""

_GUESSES = 4
"""So many times the bytes that regions free say where to look next; then the middle does."""


@dataclass(slots=True)
class _Search:
    """How many regions of one placement are to be chosen."""

    placement: Placement
    names: list[str]
    most: int
    """So many are enough, or all that there are."""
    least: int = 0
    """Fewer are not."""
    freed: list[int] = field(default_factory=list)
    """Bytes that the first so many regions free on the fullest rank, as far as is known."""
    taken: dict[int, int] = field(default_factory=dict)
    """Bytes of the fullest rank with so many regions chosen."""

    def next(self, budget: int) -> int:
        """The number of regions to look at next, or to end with."""
        if self.least == self.most and self.most in self.taken:
            return self.most
        highest = self.most - (self.most in self.taken)
        if len(self.taken) > _GUESSES:
            return (self.least + highest) // 2
        seen = max(self.taken)
        enough = (
            count
            for count in range(self.least, highest)
            if self.taken[seen] - self.freed[count] + self.freed[seen] <= budget
        )
        return next(enough, highest)

    def learn(self, count: int, taken: int, budget: int) -> None:
        """Count in what so many regions have come to."""
        self.taken[count] = taken
        if taken <= budget:
            self.most = min(self.most, count)
        else:
            self.least = min(count + 1, len(self.names))
            self.most = max(self.most, self.least)


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
    measured: dict[tuple[int, ...], Mapping[int, RankMemory]] = {}
    counts = {each.placement: 0 for each in searches}
    chosen, memory = job, measure(job)
    values = freed_values(job)
    for each in searches:
        fullest = max(each.placement.rank_list, key=lambda rank: memory[rank].nbytes)
        freed = [memory[fullest].together(values[name]) for name in each.names]
        each.freed = [0, *accumulate(freed)]
    while True:
        measured[tuple(counts.values())] = memory
        for each in searches:
            taken = max(memory[rank].nbytes for rank in each.placement.rank_list)
            each.learn(counts[each.placement], taken, budget)
        wanted = {each.placement: each.next(budget) for each in searches}
        if wanted == counts:
            break
        counts = wanted
        chosen = _chosen(job, counts, searches)
        known = measured.get(tuple(counts.values()))
        memory = measure(chosen) if known is None else known
    _check_enough(job, searches, memory, budget)
    return chosen


def _chosen(job: Job, counts: Mapping[Placement, int], searches: list[_Search]) -> Job:
    return with_checkpoints(
        job, {name for each in searches for name in each.names[: counts[each.placement]]}
    )


def _check_enough(
    job: Job, searches: list[_Search], memory: Mapping[int, RankMemory], budget: int
) -> None:
    """What was chosen, at most everything, is enough for the budget."""
    rank = max(memory, key=lambda each: memory[each].nbytes)
    if memory[rank].nbytes > budget:
        count = sum(len(each.names) for each in searches)
        op = next(op for op in job.ops if rank in op.placement)
        raise UsageError(
            "the job does not fit its budget of memory, whatever is computed again",
            at=op,
            rank=rank,
            got=f"{memory[rank].nbytes} bytes with all {count} regions computed again",
            expected=f"at most memory_bytes={budget}",
            hint="split the job over more devices, use zero, or mark more with pc.checkpoint",
        )
