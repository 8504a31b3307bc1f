"""Master and worker as pure state machines, together, under many orders of events."""

from __future__ import annotations

import random

import pytest

from plancompiler.cluster.messages import (
    MISSING_SHOWN,
    Collect,
    Compile,
    CompileFinished,
    Finish,
    JobPhase,
    JobRequest,
    OperationDone,
    Outputs,
    PeerAddress,
    PhaseChanged,
    Prepare,
    Prepared,
    RankCompiled,
    RankTimeline,
    Register,
    Run,
    Save,
    SendPlan,
    StepDone,
    StepsFailed,
    TicketDone,
    Waiting,
    Written,
)
from plancompiler.errors import (
    AbortedError,
    ClusterError,
    DeadlineError,
    FeedError,
    NonFiniteError,
    PlanCompilerError,
    RankError,
    RegistrationError,
    VersionError,
)
from plancompiler.limits.time_limits import DEADLINE
from plancompiler.master.events import (
    Asked,
    CancelAsked,
    FromWorker,
    Limits,
)
from tests.cluster.simulated import ALL_GOOD, BROKEN, SimulatedCluster, cluster_of, until

# --- registration ---------------------------------------------------------------------------------


def test_workers_without_rank_get_the_lowest_free_ones() -> None:
    cluster = SimulatedCluster(4)
    workers = [cluster.add_worker(rank) for rank in (1, None, None, 3)]
    cluster.run()
    assert [worker.state.slot for worker in workers] == [1, 0, 2, 3]


@pytest.mark.parametrize(
    ("first", "second", "error", "said"),
    [
        ({"rank": 1}, {"rank": 1}, RegistrationError, "rank 1 is taken"),
        ({}, {"rank": 2}, RankError, "outside the world"),
        ({}, {"version": "1.3.0"}, VersionError, "1.3.0"),
        ({}, {"version": "2.2.3"}, VersionError, "1.2.3"),
        ({}, {"version": "nonsense"}, VersionError, "nonsense"),
    ],
)
def test_refused_workers_leave_with_the_reason(
    first: dict[str, object], second: dict[str, object], error: type, said: str
) -> None:
    cluster = SimulatedCluster(2)
    good, bad = cluster.add_worker(**first), cluster.add_worker(**second)  # type: ignore[arg-type]
    cluster.run()
    assert good.state.slot is not None
    assert bad.exited
    assert bad.exit_error is not None
    assert bad.exit_error.code == error.code
    assert said in bad.exit_error.what
    assert len(cluster.busy()) == 1


def test_a_patch_version_may_differ() -> None:
    cluster = SimulatedCluster(1)
    worker = cluster.add_worker(version="1.2.99")
    cluster.run()
    assert worker.state.slot == 0


def test_one_worker_too_many_is_refused() -> None:
    cluster, _ = cluster_of(2)
    extra = cluster.add_worker()
    cluster.run()
    assert extra.exit_error is not None
    assert extra.exit_error.code == RegistrationError.code


def test_a_rank_is_free_again_when_its_worker_is_gone() -> None:
    cluster, workers = cluster_of(2)
    cluster.kill(workers[1])
    cluster.run()
    again = cluster.add_worker(rank=1)
    cluster.run()
    assert again.state.slot == 1


# --- jobs -----------------------------------------------------------------------------------------


def test_a_job_goes_through_all_phases_and_frees_the_workers() -> None:
    cluster, _ = cluster_of(3)
    job = cluster.submit(JobRequest(steps=5, save="folder"))
    cluster.run()
    assert cluster.phases(job) == ALL_GOOD
    assert [event.step for event in cluster.events[job] if isinstance(event, StepDone)] == [
        0, 1, 2, 3, 4,
    ]  # fmt: skip
    assert cluster.busy() == {0: 0, 1: 0, 2: 0}
    assert cluster.released == [job]


def test_the_wishes_of_a_request_reach_the_workers_and_their_timelines_the_client() -> None:
    cluster, workers = cluster_of(3)
    job = cluster.submit(JobRequest(steps=2, deadline=7.5, record=True))
    cluster.run()
    assert cluster.phases(job) == ALL_GOOD
    for worker in workers:
        assert [(order.deadline, order.record) for order in worker.prepared] == [(7.5, True)]
    recorded = [event for event in cluster.events[job] if isinstance(event, RankTimeline)]
    assert sorted(event.rank for event in recorded) == [0, 1, 2]
    assert isinstance(cluster.events[job][-1], PhaseChanged)
    plain = cluster.submit(JobRequest(steps=2))
    cluster.run()
    assert not any(isinstance(event, RankTimeline) for event in cluster.events[plain])


def steps_done(cluster: SimulatedCluster, job: int) -> int:
    return sum(isinstance(event, StepDone) for event in cluster.events[job])


def test_a_job_that_is_compiled_only_ends_when_all_plans_have_come() -> None:
    cluster, workers = cluster_of(2)
    workers[1].kernels = "others"  # which compute nothing
    job = cluster.submit(JobRequest(0, compile_only=True), inputs=("x",))
    cluster.run()
    assert cluster.phases(job) == [*ALL_GOOD[:3], JobPhase.FINISHED]
    assert cluster.busy() == {0: 0, 1: 0}
    executed = cluster.submit(JobRequest(1))
    cluster.run()
    assert cluster.phases(executed)[-1] is JobPhase.FAILED
    assert not any(worker.prepared for worker in workers)


@pytest.mark.parametrize("fail_at", [Compile, SendPlan])
def test_a_job_that_is_compiled_only_fails_with_the_rank_that_does(fail_at: type) -> None:
    cluster, workers = cluster_of(2)
    workers[1].fail_at = fail_at
    job = cluster.submit(JobRequest(0, compile_only=True))
    cluster.run()
    assert cluster.phases(job)[-1] is JobPhase.FAILED
    assert cluster.error(job) == BROKEN
    assert cluster.busy() == {0: 0, 1: 0}


def test_checkpoints_on_the_way_are_written_beside_the_steps() -> None:
    cluster, workers = cluster_of(3)
    workers[2].slow_disk = True
    job = cluster.submit(JobRequest(steps=8, save="folder", save_every=3))
    cluster.run()
    assert steps_done(cluster, job) == 6, "the second checkpoint waits for the first"
    assert [len(worker.saves) for worker in workers] == [1, 1, 1]
    workers[2].slow_disk = False
    cluster.run()
    assert cluster.phases(job) == ALL_GOOD
    assert steps_done(cluster, job) == 8
    for worker in workers:
        assert [save.background for save in worker.saves] == [True, True, False]
    assert len({save.ticket for save in workers[0].saves}) == 3


def test_the_next_checkpoint_and_the_end_wait_for_the_one_before() -> None:
    cluster, workers = cluster_of(2)
    job = cluster.submit(JobRequest(0, open=True))
    cluster.run()
    workers[0].slow_disk = True
    cluster.tell_master(Asked(Save(job, 1, "a", background=True)))
    cluster.tell_master(Asked(Run(job, 2, 1, False)))
    cluster.run()
    done = [event.ticket for event in cluster.events[job] if isinstance(event, TicketDone)]
    assert done == [1, 2], "the client hears when the values are copied, and steps go on"
    cluster.tell_master(Asked(Save(job, 3, "b")))
    cluster.tell_master(Asked(Finish(job)))
    cluster.run()
    assert [len(worker.saves) for worker in workers] == [1, 1]
    assert cluster.phases(job)[-1] is JobPhase.RUNNING
    workers[0].slow_disk = False
    cluster.run()
    assert [len(worker.saves) for worker in workers] == [2, 2]
    assert cluster.phases(job) == ALL_GOOD


def test_a_checkpoint_that_never_gets_written_is_noticed_at_the_end() -> None:
    cluster, workers = cluster_of(2)
    job = cluster.submit(JobRequest(0, open=True))
    cluster.run()
    workers[1].slow_disk = True
    cluster.tell_master(Asked(Save(job, 1, "a", background=True)))
    cluster.tell_master(Asked(Finish(job)))
    cluster.run()
    cluster.pass_time(DEADLINE + 2)
    error = cluster.error(job)
    assert error is not None
    assert error.rank == 1
    assert "idle: rank 1 on host host" in str(error.got)
    assert cluster.busy() == {0: 0, 1: 0}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_that_cannot_be_written_fails_the_job(rank: int) -> None:
    cluster, workers = cluster_of(2)
    workers[rank].fail_at = Written
    job = cluster.submit(JobRequest(steps=4, save="folder", save_every=3))
    cluster.run()
    assert cluster.phases(job)[-1] is JobPhase.FAILED
    assert cluster.error(job) == BROKEN
    assert cluster.busy() == {0: 0, 1: 0}
    workers[rank].fail_at = None
    after = cluster.submit(JobRequest(steps=4, save="folder", save_every=3))
    cluster.run()
    assert cluster.phases(after) == ALL_GOOD


NOT_FINITE = NonFiniteError("output 'loss' is not finite", rank=0).report
STOPPED = AbortedError("rank 0 failed").report


@pytest.mark.parametrize("rank", [0, 1])
def test_an_open_job_can_be_saved_after_a_value_that_is_not_finite(rank: int) -> None:
    cluster, workers = cluster_of(2)
    job = cluster.submit(JobRequest(0, open=True))
    cluster.run()
    workers[rank].not_finite = NOT_FINITE
    workers[1 - rank].not_finite = STOPPED
    cluster.tell_master(Asked(Run(job, 1, 3, False)))
    cluster.tell_master(Asked(Run(job, 2, 1, False)))  # before the client knows
    cluster.tell_master(Asked(Save(job, 3, "a")))
    cluster.run()
    told = [each for each in cluster.events[job] if isinstance(each, (StepsFailed, TicketDone))]
    assert told == [StepsFailed(1, NOT_FINITE), StepsFailed(2, NOT_FINITE), TicketDone(3)]
    cluster.tell_master(Asked(Collect(job, 4)))
    cluster.run()
    assert all(save.before for worker in workers for save in worker.saves)
    assert all(each.before for worker in workers for each in worker.collected)
    assert [len(worker.saves) + len(worker.collected) for worker in workers] == [2, 2]
    with pytest.raises(NonFiniteError):
        cluster.tell_master(Asked(Run(job, 5, 1, False)))
    cluster.tell_master(Asked(Finish(job)))
    cluster.run()
    assert cluster.phases(job)[-1] is JobPhase.FAILED
    assert cluster.error(job) == NOT_FINITE
    assert cluster.busy() == {0: 0, 1: 0}
    for worker in workers:
        worker.not_finite = None
    after = cluster.submit(JobRequest(1))
    cluster.run()
    assert cluster.phases(after) == ALL_GOOD


def test_a_job_that_nobody_saves_ends_with_what_was_not_finite() -> None:
    cluster, workers = cluster_of(2)
    workers[0].not_finite = NOT_FINITE
    job = cluster.submit(JobRequest(0, open=True))
    cluster.run()
    cluster.tell_master(Asked(Run(job, 1, 1, False)))
    cluster.run()
    assert cluster.phases(job)[-1] is JobPhase.RUNNING
    cluster.tell_master(CancelAsked(job, "its client went away"))
    cluster.run()
    assert cluster.phases(job)[-1] is JobPhase.FAILED
    assert cluster.error(job) == NOT_FINITE


def test_only_a_value_that_is_not_finite_leaves_a_job_open() -> None:
    cluster, workers = cluster_of(2)
    workers[0].not_finite = workers[1].not_finite = STOPPED  # and nobody says by whom
    job = cluster.submit(JobRequest(0, open=True))
    cluster.run()
    cluster.tell_master(Asked(Run(job, 1, 1, False)))
    cluster.run()
    assert cluster.phases(job)[-1] is JobPhase.FAILED
    assert cluster.busy() == {0: 0, 1: 0}


def test_jobs_run_one_after_another() -> None:
    cluster, _ = cluster_of(2)
    first, second = cluster.submit(JobRequest(1)), cluster.submit(JobRequest(1))
    assert cluster.phases(second) == [JobPhase.QUEUED]
    cluster.run()
    assert cluster.phases(first) == cluster.phases(second) == ALL_GOOD


def test_a_job_waits_for_its_workers_and_not_for_ever() -> None:
    cluster = SimulatedCluster(2)
    cluster.add_worker()
    job = cluster.submit(JobRequest(1))
    cluster.run()
    assert cluster.phases(job) == [JobPhase.QUEUED]
    cluster.pass_time(cluster.limits.workers + 1)
    error = cluster.error(job)
    assert error is not None
    assert error.code == DeadlineError.code
    assert "rank 1" in error.what


def test_submissions_that_cannot_run_are_refused() -> None:
    cluster, _ = cluster_of(2)
    with pytest.raises(RankError, match="more ranks than this master has"):
        cluster.submit(JobRequest(1), needs=3)
    with pytest.raises(FeedError, match=r"pc\.data"):
        cluster.submit(JobRequest(1), inputs=("x",))
    assert cluster.master.status(0.0).jobs == ()


def offer(host_id: str, address: str, network: str = "") -> Register:
    local = address.startswith("127.")
    return Register(None, "machine", "cpu", "1.2.3", host_id, address, network, local)


def test_ranks_learn_where_those_on_other_hosts_are() -> None:
    cluster = SimulatedCluster(4)
    for number, host in enumerate("abab"):
        cluster.add_worker(offer=offer(host, f"{host}:{number}"))
    job = cluster.submit(JobRequest(1))
    until(cluster, job, JobPhase.PREPARING)
    cluster.run()
    told = [worker.prepared[0].far for worker in cluster.workers]
    assert told[0] == (PeerAddress(1, "b:1"), PeerAddress(3, "b:3"))
    assert told[1] == (PeerAddress(0, "a:0"), PeerAddress(2, "a:2"))
    assert (told[2], told[3]) == (told[0], told[1])
    assert cluster.phases(job) == ALL_GOOD


def test_one_slice_goes_to_each_host() -> None:
    cluster = SimulatedCluster(4)
    for host in "abab":
        cluster.add_worker(offer=offer(host, f"{host}:1"))
    cluster.submit(JobRequest(1))
    cluster.run()
    assert [worker.told[0].copy is None for worker in cluster.workers] == [True, True, False, False]


@pytest.mark.parametrize(
    ("offers", "unreachable"),
    [
        ([offer("a", "127.0.0.1:1", "a"), offer("b", "127.0.0.1:2", "b")], True),
        ([offer("a", "10.0.0.1:1"), offer("b", "127.0.0.1:2", "b")], True),
        ([offer("a", "10.0.0.1:1"), offer("b", "")], True),
        ([offer("a", "10.0.0.1:1", "a"), offer("b", "10.0.0.2:1", "b")], False),
        ([offer("a", "10.0.0.1:1", "same"), offer("b", "127.0.0.1:1", "same")], False),
        ([offer("a", "127.0.0.1:1", "same"), offer("b", "127.0.0.1:2", "same")], False),
        ([offer("a", "127.0.0.1:1", "a"), offer("a", "127.0.0.1:2", "a")], False),
    ],
)
def test_workers_that_cannot_reach_each_other_run_no_job(
    offers: list[Register], unreachable: bool
) -> None:
    cluster = SimulatedCluster(2)
    for each in offers:
        cluster.add_worker(offer=each)
    job = cluster.submit(JobRequest(1))
    cluster.run()
    error = cluster.error(job)
    assert (error is not None) == unreachable
    if error is not None:
        assert "cannot reach rank" in error.what
        assert error.hint is not None
        assert "--listen" in error.hint
    assert cluster.busy() == {0: 0, 1: 0}


def test_an_open_job_goes_step_by_step() -> None:
    cluster, _ = cluster_of(2)
    job = cluster.submit(JobRequest(0, open=True), inputs=("x",))
    cluster.run()
    assert cluster.phases(job)[-1] is JobPhase.RUNNING
    for ticket, event in enumerate(
        [
            Asked(Run(job, 0, 1, True)),
            Asked(Save(job, 1, "folder")),
            Asked(Collect(job, 2)),
            Asked(Run(job, 3, 4, False)),
        ]
    ):
        cluster.tell_master(event)
        cluster.run()
        assert cluster.events[job][-1] == TicketDone(ticket)
    cluster.tell_master(Asked(Finish(job)))
    cluster.run()
    assert cluster.phases(job) == ALL_GOOD
    with pytest.raises(ClusterError, match="has ended"):
        cluster.tell_master(Asked(Run(job, 4, 1, False)))
    with pytest.raises(ClusterError, match="no such job"):
        cluster.tell_master(Asked(Run(99, 4, 1, False)))


def test_messages_out_of_place_are_harmless() -> None:
    """What a peer with a fault may send does not move a job."""
    cluster, _ = cluster_of(2)
    job = cluster.submit(JobRequest(1))
    until(cluster, job, JobPhase.COMPILING)
    for message in (
        Prepared(job),
        OperationDone(job, 7),
        Outputs(job, 3, b""),
        Prepared(99),
        RankCompiled(99, "", True, ()),
    ):
        cluster.tell_master(FromWorker(1, message))
        cluster.tell_master(FromWorker(77, message))
    assert cluster.phases(job) == [JobPhase.QUEUED, JobPhase.COMPILING]
    cluster.run()
    assert cluster.phases(job) == ALL_GOOD


@pytest.mark.parametrize("seed", range(150))
def test_any_order_of_events_ends_well(seed: int) -> None:
    """Random interleavings with failures, kills, cancellations and newcomers.

    Whatever happens, every job ends exactly once, with phases in order, and afterwards every living
    worker is idle on both sides.
    """
    rng = random.Random(seed)
    cluster = SimulatedCluster(rng.randint(1, 4), Limits(workers=30))
    world = cluster.master.world_size
    for _ in range(world):
        cluster.add_worker()
    jobs: list[int] = []

    def disturb() -> None:
        living = [worker for worker in cluster.workers if not worker.exited]
        match rng.randrange(12):
            case 0 if living:
                cluster.kill(rng.choice(living))
            case 1 if living:
                rng.choice(living).fail_at = rng.choice([Compile, Prepare, Run, Save, Written])
            case 2 if living:
                rng.choice(living).fail_at = None
                rng.choice(living).not_finite = rng.choice([None, NOT_FINITE, STOPPED])
            case 3 if jobs:
                cluster.tell_master(CancelAsked(rng.choice(jobs), "chance"))
            case 4 | 5:
                cluster.add_worker()
            case 6 if len(jobs) < 6:
                every = rng.randint(0, 2)
                request = JobRequest(rng.randint(0, 3), save="f", save_every=every)
                jobs.append(cluster.submit(request))
            case 7 if len(jobs) < 6:
                jobs.append(cluster.submit(JobRequest(0, open=True)))
            case 8 if jobs:
                job, ticket = rng.choice(jobs), rng.randint(1, 99)
                asked = Asked(Run(job, ticket, 1, False)), Asked(Save(job, ticket, "f", True))
                try:
                    cluster.tell_master(rng.choice(asked))
                except PlanCompilerError:
                    return

    for _ in range(400):
        choices = cluster.choices()
        if choices and rng.random() < 0.93:
            rng.choice(choices)()
        else:
            disturb()
    cluster.settle(rng.choice)
    for job in jobs:
        cluster.tell_master(CancelAsked(job, "the end"))
    cluster.settle(rng.choice)
    for job in jobs:
        phases = cluster.phases(job)
        assert phases[-1].is_end, f"seed {seed}, job {job}: {phases}"
        assert sum(phase.is_end for phase in phases) == 1
        assert phases[:-1] == ALL_GOOD[: len(phases) - 1]
        assert (cluster.error(job) is None) == (phases[-1] is JobPhase.FINISHED)
    assert sorted(cluster.released) == sorted(jobs), f"seed {seed}"
    assert set(cluster.busy().values()) <= {0}
    for worker in cluster.workers:
        assert worker.exited or (worker.state.job_id is None and worker.work is None)


# --- waiting --------------------------------------------------------------------------------------


def told(cluster: SimulatedCluster, job: int) -> list[Waiting]:
    return [event for event in cluster.events[job] if isinstance(event, Waiting)]


def test_whoever_waits_hears_at_once_and_again_which_ranks_are_missing() -> None:
    cluster = SimulatedCluster(3)
    cluster.add_worker(1)
    cluster.run()
    first = cluster.submit(JobRequest(1))
    assert [(each.ranks, each.count, each.seconds) for each in told(cluster, first)] == [
        ((0, 2), 2, 0.0)
    ]
    cluster.pass_time(11.0)
    assert len(told(cluster, first)) == 3
    second = cluster.submit(JobRequest(1))
    assert told(cluster, second)[0].ranks == (0, 2)
    cluster.add_worker(0)
    cluster.run()
    assert told(cluster, first)[-1].ranks == told(cluster, second)[-1].ranks == (2,)
    count = len(told(cluster, first))
    cluster.add_worker(2)
    cluster.run()
    cluster.pass_time(20.0)
    assert cluster.phases(first)[-1] is cluster.phases(second)[-1] is JobPhase.FINISHED
    assert len(told(cluster, first)) == count


def test_of_very_many_missing_ranks_the_first_are_told() -> None:
    cluster = SimulatedCluster(1000)
    (waiting,) = told(cluster, cluster.submit(JobRequest(1)))
    assert waiting.ranks == tuple(range(MISSING_SHOWN))
    assert waiting.count == 1000


def test_the_queue_counts_apart_and_a_jobs_time_ends_with_it() -> None:
    cluster, _ = cluster_of(2)
    first, second = (cluster.submit(JobRequest(1)) for _ in range(2))
    until(cluster, first, JobPhase.COMPILING)
    cluster.now += 7.0
    cluster.run()
    ends = {job.job_id: job for job in cluster.master.status(cluster.now).jobs}
    assert ends[first].phase is ends[second].phase is JobPhase.FINISHED
    assert ends[first].queued_seconds == 0.0
    assert ends[first].seconds == ends[second].queued_seconds == 7.0
    cluster.now += 100.0
    assert {job.job_id: job for job in cluster.master.status(cluster.now).jobs} == ends
    compiled = {
        job: next(each for each in cluster.events[job] if isinstance(each, CompileFinished))
        for job in (first, second)
    }
    assert compiled[first].seconds == 7.0
    assert compiled[second].seconds == 0.0
    waiting = cluster.submit(JobRequest(1))
    cluster.master.handle(CancelAsked(waiting, "enough"), cluster.now + 3.0)
    status = next(
        job for job in cluster.master.status(cluster.now + 9.0).jobs if job.job_id == waiting
    )
    assert status.seconds == 3.0
