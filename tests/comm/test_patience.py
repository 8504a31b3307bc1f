"""How long a rank waits for others: by a clock that is set, and for threads that really work."""

from __future__ import annotations

import math
import threading
import time
from functools import partial

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager.world import current_world
from plancompiler.errors import DeadlineError
from plancompiler.executor.comm import peer_failures
from plancompiler.executor.comm.patience import Patience, Progress
from plancompiler.limits.time_limits import BUSY_SHARE


class Ranks:
    """Ranks whose use of their processors is set, as the time is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.used: dict[int, float | None] = {1: 0.0, 2: 0.0}
        self.moved = 0
        """What rank 2 has sent and received."""
        self.said_at = math.inf
        """When that was seen; by default always now."""

    def patience(self, deadline: float, unseen: float | None = None) -> Patience:
        return Patience(deadline, self.work_of, lambda: self.now, unseen)

    def work_of(self, rank: int) -> Progress | None:
        used = self.used[rank]
        return None if used is None else Progress(used, self.moved * (rank == 2), at=self.said_at)

    def waits(self, patience: Patience, seconds: float, share: float = 0.0) -> bool:
        """Whether the wait is over within some seconds, in which rank 2 works a share."""
        end = self.now + seconds
        while self.now < end:
            self.now += patience.pause
            if self.used[2] is not None:
                self.used[2] += share * patience.pause
            if patience.is_over([1, 2]):
                return True
        return False


def test_ranks_that_stand_still_have_the_deadline() -> None:
    ranks = Ranks()
    patience = ranks.patience(30.0)
    assert not ranks.waits(patience, 29.0)
    assert ranks.waits(patience, 1.5)


def test_ranks_that_cannot_be_seen_have_the_deadline() -> None:
    ranks = Ranks()
    ranks.used = {1: None, 2: None}
    patience = ranks.patience(30.0)
    assert not ranks.waits(patience, 29.0)
    assert ranks.waits(patience, 1.5)


def test_ranks_that_cannot_be_seen_may_have_longer() -> None:
    """As long as one of them cannot; and what was seen before the deadline says nothing."""
    ranks = Ranks()
    ranks.used[2] = None
    assert not ranks.waits(ranks.patience(30.0, 300.0), 299.0)
    ranks.used[2] = 0.0
    patience = ranks.patience(30.0, 300.0)
    ranks.said_at = ranks.now + 29.0
    assert not ranks.waits(patience, 200.0)
    assert patience.deadline == 300.0
    ranks.said_at = ranks.now
    assert ranks.waits(patience, 1.0)
    assert patience.deadline == 30.0


def test_one_that_sends_or_receives_is_waited_for() -> None:
    ranks = Ranks()
    patience = ranks.patience(30.0)
    for _ in range(10):
        assert not ranks.waits(patience, 20.0)
        ranks.moved += 1
    assert ranks.waits(patience, 31.0)


def test_one_that_works_is_waited_for_and_what_it_did_before_counts_no_longer() -> None:
    ranks = Ranks()
    patience = ranks.patience(30.0)
    assert not ranks.waits(patience, 3000.0, 2 * BUSY_SHARE)
    assert not ranks.waits(patience, 28.0)
    assert ranks.waits(patience, 2.5)


def test_waiting_costs_less_than_work() -> None:
    ranks = Ranks()
    assert ranks.waits(ranks.patience(30.0), 31.0, BUSY_SHARE / 2)


def test_time_without_looks_does_not_count() -> None:
    """As when the process that waits was itself stopped."""
    ranks = Ranks()
    patience = ranks.patience(30.0)
    ranks.now += 1000.0
    assert not patience.is_over([1, 2])


def test_a_thread_that_works_for_longer_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the processor time of both ranks: on a busy machine the one that works may stand still for
    a while, and no time passes then.
    """
    monkeypatch.setattr(peer_failures, "Patience", partial(Patience, clock=time.process_time))
    deadline = 0.2

    def program() -> float:
        world = current_world()
        group = world.comm.context([0, 1])
        group.barrier()
        if world.rank == 1:
            end = time.thread_time() + 3 * deadline
            numbers = np.ones(1 << 16, np.float32)
            while time.thread_time() < end:
                numbers.sum()
        return float(group.all_reduce(np.ones(1))[0])

    assert pc.eager.spawn(program, 2, deadline=deadline) == [2.0, 2.0]


def test_a_thread_that_stands_still_for_longer() -> None:
    ended = threading.Event()

    def program() -> None:
        world = current_world()
        group = world.comm.context([0, 1])
        group.barrier()
        if world.rank == 1:
            ended.wait()
        else:
            world.comm.deadline = 0.2  # until here a busy machine may need longer
        try:
            group.barrier()
        finally:
            ended.set()

    with pytest.raises(DeadlineError, match=r"did not work either.*not entered: \[1\]"):
        pc.eager.spawn(program, 2, deadline=60.0)
