"""How many ranks run a job."""

from __future__ import annotations

from plancompiler.errors import RankError
from plancompiler.ir import Job
from plancompiler.ir.arguments import whole_number


def world_size_of(job: Job, ranks: int | None = None) -> int:
    """The number of ranks asked for, by default what the job needs; fewer is a RankError."""
    needed = job.world_size
    if ranks is None:
        return needed
    ranks = whole_number("the number of ranks", ranks)
    if ranks < needed:
        op = next(op for op in job.ops if needed - 1 in op.placement.rank_list)
        raise RankError(
            "the job places an op outside the world",
            at=op,
            rank=needed - 1,
            got=f"{ranks} ranks",
            expected=f"at least {needed} ranks",
            hint="give more ranks, or change the job's placements",
        )
    return ranks
