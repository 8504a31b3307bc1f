"""Pure: what a master says of a job that took too long."""

from __future__ import annotations

from collections.abc import Collection

from plancompiler.cluster.messages import Phase
from plancompiler.errors import DeadlineError


def too_few_workers(present: Collection[int], world_size: int, seconds: float) -> DeadlineError:
    """Nobody came for some ranks. `present` are the ranks with a worker."""
    missing = [rank for rank in range(world_size) if rank not in present]
    return DeadlineError(
        f"no worker came for rank {', '.join(map(str, missing))}, which the job needs",
        got=f"{len(present)} workers after {seconds:g} s",
        expected=f"{world_size} workers",
        hint="start more workers with `plancompiler worker --master`",
    )


def nothing_asked(seconds: float) -> DeadlineError:
    """The client is there, and asks for nothing."""
    return DeadlineError(
        "the client of an open job asked for nothing within the time limit",
        expected=f"a request within {seconds:g} s",
    )


def no_progress(phase: Phase, awaited: Collection[int]) -> DeadlineError:
    """Some ranks have not done what they were asked for."""
    late = ", ".join(map(str, sorted(awaited))) or "none; the master itself is late"
    return DeadlineError(
        f"the job did not get on within the time limit while it was {phase}",
        got=f"ranks still awaited: {late}",
    )
