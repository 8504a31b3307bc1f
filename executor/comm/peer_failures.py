"""Ranks that fail or leave while others count on them, and what those others are told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Condition

from plancompiler.errors import (
    AbortedError,
    DeadlineError,
    ErrorReport,
    PlanCompilerError,
    TransportError,
)
from plancompiler.executor.comm.patience import Patience, Progress
from plancompiler.executor.process_status import CONTINUE_HINT, ProcessStatus


class PeerFailures:
    """Who of the ranks that run together has failed or left, as far as is known here."""

    def __init__(self) -> None:
        self.failure: tuple[int, PlanCompilerError] | None = None
        """The first failure, with its rank."""
        self.gone: set[int] = set()
        """Ranks that have closed their run."""

    def abort_error(self) -> AbortedError:
        """A fresh AbortedError that names the first failure."""
        if self.failure is None:
            raise TransportError("no rank has failed")
        rank, error = self.failure
        return aborted_by(rank, error.report)

    def work_of(self, rank: int) -> Progress | None:
        """What a rank has done so far; None where that cannot be seen from here."""
        return None

    def patience(self, deadline: float) -> Patience:
        """For a wait that begins."""
        return Patience(deadline, self.work_of)

    def look_at(self, patience: Patience, ranks: list[int], label: object) -> bool:
        """Whether a wait for ranks that are missing is over; called now and then."""
        return patience.is_over(ranks)

    def await_members(
        self,
        changed: Condition,
        ranks: tuple[int, ...],
        missing: Callable[[], list[int]],
        label: object,
        deadline: float | None,
    ) -> None:
        """Return when none of the members `ranks` is missing; the caller holds `changed`.

        `changed` is notified when somebody comes, fails or leaves. Raises AbortedError where a rank
        has failed, DeadlineError where all that are missing have stood still for `deadline` seconds
        (None: never), TransportError where a missing member has left.
        """

        def is_decided() -> bool:
            absent = missing()
            return not absent or self.failure is not None or not self.gone.isdisjoint(absent)

        if deadline is None:
            came = changed.wait_for(is_decided)
        else:
            patience = self.patience(deadline)
            while not (came := changed.wait_for(is_decided, patience.pause)):
                if self.look_at(patience, missing(), label):
                    deadline = patience.deadline
                    break
        absent = missing()
        if not absent:
            return
        if self.failure is not None:
            raise self.abort_error()
        if deadline is not None and not came:
            raise missed_barrier(label, ranks, absent, deadline)
        raise left_barrier(label, ranks, min(self.gone.intersection(absent)))


def aborted_by(failed_rank: int, report: ErrorReport) -> AbortedError:
    """The error of a rank that was stopped because another one failed."""
    cause = PlanCompilerError.from_report(report)
    if isinstance(cause, AbortedError) and report.rank == failed_rank:
        return cause  # it came by way of a rank that was stopped for the same reason
    error = AbortedError(
        f"the run was stopped because rank {failed_rank} failed", rank=failed_rank, got=str(cause)
    )
    error.__cause__ = cause
    return error


def not_understood(rank: int, error: PlanCompilerError) -> TransportError:
    """The error of a peer that sent nonsense; its own where it is one of the transport."""
    if isinstance(error, TransportError):
        return error
    return TransportError(f"rank {rank} sent what could not be understood", rank=rank, got=error)


def peers_not_ready(
    rank: int,
    peers: tuple[int, ...],
    missing: Iterable[int],
    deadline: float,
    where: str = "",
    hint: str | None = None,
) -> DeadlineError:
    """The error of a rank whose peers were not all ready in time."""
    return DeadlineError(
        f"not all peers were ready within {deadline:g} s",
        rank=rank,
        got=f"missing ranks {list(missing)}{where}",
        expected=f"ranks {list(peers)}",
        hint=hint,
    )


def stopped_rank(label: object, rank: int, status: ProcessStatus) -> DeadlineError:
    """The error of a wait for a rank whose process a signal has stopped."""
    return DeadlineError(
        f"{label}: the process of rank {rank} does not run",
        rank=rank,
        got=status.stopped_text,
        hint=CONTINUE_HINT,
    )


def missed_barrier(
    label: object, ranks: tuple[int, ...], missing: Iterable[int], deadline: float
) -> DeadlineError:
    """The error of a barrier that not all members reached in time."""
    absent = sorted(missing)
    entered = [rank for rank in ranks if rank not in absent]
    return DeadlineError(
        f"{label}: not all ranks of the communicator came within {deadline:g} s, in which they did "
        "not work either",
        got=f"entered: {entered}; not entered: {absent}",
        expected=f"all of ranks {list(ranks)}",
        hint="look at what the missing ranks were doing, or allow more time with a longer deadline",
    )


def left_barrier(label: object, ranks: tuple[int, ...], gone: int) -> TransportError:
    """The error of a barrier with a member that has closed its run."""
    return TransportError(
        f"{label}: rank {gone} has closed its run and will not come",
        rank=gone,
        expected=f"all of ranks {list(ranks)}",
        hint="run the same number of steps on all ranks",
    )
