"""Pure: which submissions a master refuses at once."""

from __future__ import annotations

from plancompiler.errors import FeedError, RankError, UsageError
from plancompiler.master.events import JobSubmitted


def check_submission(event: JobSubmitted, world_size: int) -> None:
    """RankError for a job that does not fit the world, FeedError for one that nobody would feed,
    UsageError for one that is to be compiled only, and executed nevertheless.
    """
    wanted = max(event.needs, event.request.ranks)
    if wanted > world_size:
        raise RankError(
            f"job {event.name!r} uses more ranks than this master has",
            got=f"rank {wanted - 1}",
            expected=f"ranks 0 to {world_size - 1}",
            hint=f"start the master with --ranks {wanted} or place the job on fewer",
        )
    if 0 < event.request.ranks < event.needs:
        raise RankError(
            f"job {event.name!r} is to run on fewer ranks than it is placed on",
            got=f"{event.request.ranks} ranks",
            expected=f"{event.needs} or more",
            hint="ask for more ranks, or place the job on fewer",
        )
    request = event.request
    if request.compile_only:
        if request.steps or request.open or request.restore or request.save or request.record:
            raise UsageError(
                f"job {event.name!r} is to be compiled only, and executed nevertheless",
                expected="a job without steps, checkpoints and timelines",
            )
        return
    if event.inputs and not event.request.open:
        raise FeedError(
            f"job {event.name!r} has inputs that nobody would feed",
            got=", ".join(map(repr, event.inputs)),
            hint="read the data inside the job with pc.data, or feed it step by step in a session",
        )
