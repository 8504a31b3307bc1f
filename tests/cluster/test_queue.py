"""Several jobs at once on disjoint slots of one master: state machines, and the queue's rules."""

from __future__ import annotations

import asyncio
import cProfile
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plancompiler.cluster.chunks import Reservation, UploadBudget
from plancompiler.cluster.messages import JobPhase, JobRequest, Register, Run
from plancompiler.errors import RankError
from plancompiler.limits.time_limits import PASSING
from plancompiler.master.events import CancelAsked, FromWorker, Limits
from plancompiler.master.io_shell import MasterShell
from plancompiler.master.job_queue import JobQueue
from plancompiler.master.records import JobRecord, Worker
from plancompiler.master.slot_choice import choose_slots
from plancompiler.plan.job_serde import job_to_bytes
from plancompiler.version import VERSION
from tests.cluster.simulated import ALL_GOOD, Choice, SimulatedCluster, cluster_of, drop_work, until
from tests.examples import mlp


def record(job_id: int, ranks: int, priority: int = 0) -> JobRecord:
    request = JobRequest(1, priority=priority)
    return JobRecord(job_id, f"job{job_id}", request, "token", ranks, 0.0)


def queue_of(*sizes: int) -> JobQueue:
    queue = JobQueue()
    for job_id, ranks in enumerate(sizes, 1):
        queue.add(record(job_id, ranks))
    return queue


def taken(queue: JobQueue, free: int, now: float) -> int | None:
    job = queue.take(free, now) if queue else None
    return None if job is None else job.id


# --- the queue ------------------------------------------------------------------------------------


def test_the_first_job_that_came_is_the_first() -> None:
    queue = queue_of(1, 1, 2)
    assert [taken(queue, 4, 0.0) for _ in range(4)] == [1, 2, 3, None]


def test_a_higher_priority_comes_before_and_equal_ones_in_order() -> None:
    queue = JobQueue()
    for job_id, priority in enumerate((0, 5, 0, 5, -1), 1):
        queue.add(record(job_id, 1, priority))
    assert [taken(queue, 1, 0.0) for _ in range(5)] == [2, 4, 1, 3, 5]


def test_small_jobs_pass_a_large_one_for_a_time_and_then_slots_are_kept_for_it() -> None:
    queue = queue_of(3, 1, 1, 1)
    assert taken(queue, 2, 10.0) == 2
    assert taken(queue, 1, 10.0 + PASSING - 0.1) == 3
    assert taken(queue, 2, 10.0 + PASSING) is None
    assert taken(queue, 3, 10.0 + PASSING) == 1
    assert taken(queue, 1, 10.0 + PASSING) == 4


@given(
    sizes=st.lists(st.integers(1, 4), max_size=8),
    moves=st.lists(st.tuples(st.integers(0, 4), st.floats(0.0, 30.0)), max_size=30),
)
def test_every_job_has_its_turn_and_only_one_that_fits(
    sizes: list[int], moves: list[tuple[int, float]]
) -> None:
    queue, now, seen = queue_of(*sizes), 0.0, []
    for free, seconds in [*moves, *[(4, 1.0)] * len(sizes)]:
        now += seconds
        job = queue.take(free, now) if queue else None
        if job is not None:
            assert job.world_size <= free
            seen.append(job.id)
    assert sorted(seen) == list(range(1, len(sizes) + 1))


# --- which slots ----------------------------------------------------------------------------------


def free_on(hosts: str) -> list[Worker]:
    """A free worker per letter, on the host of that letter, in the order of slots."""
    return [
        Worker(slot, Register(slot, host, "cpu", "1"), 0.0, slot) for slot, host in enumerate(hosts)
    ]


@pytest.mark.parametrize(
    ("hosts", "count", "slots"),
    [
        ("aaaa", 4, (0, 1, 2, 3)),
        ("aaaa", 2, (0, 1)),
        ("aaab", 1, (3,)),  # the tightest host
        ("abab", 2, (0, 2)),  # one host
        ("aabbb", 3, (2, 3, 4)),
        ("aabbb", 4, (0, 2, 3, 4)),  # as few hosts as can be, the largest first
    ],
)
def test_slots_lie_on_as_few_hosts_as_can_be(
    hosts: str, count: int, slots: tuple[int, ...]
) -> None:
    workers = free_on(hosts)
    random.Random(3).shuffle(workers)
    assert choose_slots(workers, count) == slots


# --- jobs beside each other -----------------------------------------------------------------------


def test_three_jobs_run_at_once_and_a_fourth_when_two_slots_are_free() -> None:
    cluster, _ = cluster_of(4)
    first = cluster.submit(JobRequest(steps=5, open=True), needs=1)
    second = cluster.submit(JobRequest(steps=5, open=True), needs=1)
    third = cluster.submit(JobRequest(steps=5, open=True), needs=2)
    fourth = cluster.submit(JobRequest(steps=5), needs=2)
    cluster.run()
    assert [cluster.phases(job)[-1] for job in (first, second, third)] == [JobPhase.RUNNING] * 3
    assert cluster.phases(fourth) == [JobPhase.QUEUED]
    assert cluster.busy() == {0: first, 1: second, 2: third, 3: third}
    cluster.tell_master(CancelAsked(first, "enough"))
    cluster.run()
    assert cluster.phases(fourth) == [JobPhase.QUEUED]
    cluster.tell_master(CancelAsked(second, "enough"))
    cluster.run()
    assert cluster.phases(fourth) == ALL_GOOD
    assert cluster.phases(third)[-1] is JobPhase.RUNNING


def test_the_ranks_of_a_job_count_from_zero_wherever_its_workers_are() -> None:
    cluster, workers = cluster_of(3)
    cluster.submit(JobRequest(steps=1, open=True), needs=1)
    job = cluster.submit(JobRequest(steps=2), needs=2)
    cluster.run()
    assert cluster.phases(job) == ALL_GOOD
    assert [(each.told[-1].rank, each.told[-1].world_size) for each in workers] == [
        (0, 1),
        (0, 2),
        (1, 2),
    ]


def test_the_failure_of_one_job_never_touches_another() -> None:
    cluster, workers = cluster_of(4)
    good = cluster.submit(JobRequest(steps=5), needs=2)
    bad = cluster.submit(JobRequest(steps=5), needs=2)
    workers[3].fail_at = Run
    until(cluster, good, JobPhase.RUNNING)
    cluster.run()
    assert cluster.phases(bad)[-1] is JobPhase.FAILED
    assert cluster.phases(good) == ALL_GOOD
    error = cluster.error(bad)
    assert error is not None
    assert error.op == "matmul"


def test_a_lost_worker_fails_its_own_job_by_its_rank_in_it() -> None:
    cluster, workers = cluster_of(4)
    jobs = [cluster.submit(JobRequest(steps=1, open=True), needs=2) for _ in range(2)]
    cluster.run()
    cluster.kill(workers[3])
    cluster.run()
    error = cluster.error(jobs[1])
    assert error is not None
    assert error.rank == 1
    assert cluster.phases(jobs[0])[-1] is JobPhase.RUNNING


def test_a_job_that_stands_still_times_out_and_the_other_goes_on() -> None:
    cluster, workers = cluster_of(2)
    stuck = cluster.submit(JobRequest(steps=1), needs=1)
    cluster.choices()[0]()  # the master compiles it
    drop_work(cluster, workers[0])
    other = cluster.submit(JobRequest(steps=1, open=True), needs=1)
    cluster.pass_time(cluster.limits.compiling)
    assert cluster.phases(stuck)[-1] is JobPhase.FAILED
    assert cluster.phases(other)[-1] is JobPhase.RUNNING


@pytest.mark.parametrize("ranks", [3, 1])
def test_a_job_that_never_fits_is_refused_at_once(ranks: int) -> None:
    cluster = SimulatedCluster(2)
    with pytest.raises(RankError):
        cluster.submit(JobRequest(steps=1, ranks=ranks), needs=2)


@pytest.mark.parametrize("seed", range(40))
def test_jobs_of_all_sizes_end_in_every_interleaving(seed: int) -> None:
    chance = random.Random(seed)
    cluster, workers = cluster_of(4)
    jobs = [
        cluster.submit(
            JobRequest(steps=3, priority=chance.randrange(2)), needs=chance.randint(1, 4)
        )
        for _ in range(6)
    ]
    cancelled = chance.choice(jobs)
    steps = 0

    def choose(choices: list[Choice]) -> Choice:
        nonlocal steps
        steps += 1
        if steps == seed:
            return lambda: cluster.tell_master(CancelAsked(cancelled, "enough"))
        return chance.choice(choices)

    cluster.settle(choose)
    assert cluster.busy() == dict.fromkeys(range(4), 0)
    assert sorted(cluster.released) == jobs
    for job in jobs:
        if job != cancelled:
            assert cluster.phases(job) == ALL_GOOD
    assert not any(worker.exited for worker in workers)


# --- what a submission costs ----------------------------------------------------------------------


def test_a_submission_costs_the_same_however_many_jobs_wait() -> None:
    job = mlp(ranks=1)
    data = job_to_bytes(job)

    async def calls_of_submissions() -> list[int]:
        shell = MasterShell(1, VERSION, Limits(), None)
        shell.start()
        connection = shell.connect()
        register = Register(0, "host", "cpu", VERSION)
        shell.from_worker(connection, FromWorker(connection.number, register))
        calls = []
        for number in range(400):
            request = JobRequest(1, key=str(number))
            reservation = Reservation(UploadBudget(1 << 30))
            profiler = cProfile.Profile()
            profiler.runcall(shell.submit, job, data, request, "somebody", reservation)
            calls.append(sum(entry.callcount for entry in profiler.getstats()))
        await shell.finish()
        return calls

    calls = asyncio.run(calls_of_submissions())
    assert calls[-1] <= calls[10]
