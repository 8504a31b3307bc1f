"""Jobs that end before their time: failures, losses, cancellations, time limits.

Master and worker are pure state machines here, as in `test_states`.
"""

from __future__ import annotations

import pytest

from plancompiler.cluster.messages import (
    Compile,
    Heartbeat,
    JobPhase,
    JobRequest,
    Prepare,
    Run,
    Save,
    WriteIndex,
)
from plancompiler.errors import (
    AbortedError,
    DeadlineError,
    DigestMismatchError,
    JobCancelledError,
    PlanCompilerError,
    TransportError,
    WorkerLostError,
)
from plancompiler.limits.time_limits import DEADLINE, LONGEST_ANSWER
from plancompiler.master.events import (
    Asked,
    CancelAsked,
    FromWorker,
    Limits,
    MasterTick,
    Stopping,
)
from plancompiler.plan.digest import CrossRankFact
from plancompiler.worker import events
from plancompiler.worker.state import MASTER_SILENCES
from tests.cluster.simulated import ALL_GOOD, BROKEN, SimulatedCluster, cluster_of, drop_work, until


def fact(register: int, rank: int, text: str) -> CrossRankFact:
    role = "producer" if rank == 0 else "consumer"
    return CrossRankFact(register, register, "hidden", role, (0, 1), text)


def test_ranks_that_disagree_do_not_start() -> None:
    cluster, workers = cluster_of(2)
    workers[0].facts = (fact(5, 0, "float32[4]"),)
    workers[1].facts = (fact(5, 1, "float32[5]"),)
    job = cluster.submit(JobRequest(1))
    cluster.run()
    error = cluster.error(job)
    assert error is not None
    assert error.code == DigestMismatchError.code
    assert "ranks 0" in error.what
    assert "1" in error.what
    assert "'hidden'" in error.what
    assert JobPhase.PREPARING not in cluster.phases(job)
    assert cluster.busy() == {0: 0, 1: 0}


@pytest.mark.parametrize("work", [Compile, Prepare, Run, Save, WriteIndex])
def test_a_failing_rank_fails_the_job_everywhere(work: type) -> None:
    cluster, workers = cluster_of(3)
    failing = workers[0 if work is WriteIndex else 1]
    failing.fail_at = work
    job = cluster.submit(JobRequest(2, save="folder"))
    cluster.run()
    assert cluster.phases(job)[-1] is JobPhase.FAILED
    assert cluster.error(job) == BROKEN
    assert cluster.busy() == {0: 0, 1: 0, 2: 0}
    failing.fail_at = None
    after = cluster.submit(JobRequest(2))
    cluster.run()
    assert cluster.phases(after) == ALL_GOOD


def test_a_job_that_the_master_cannot_compile_fails() -> None:
    cluster, _ = cluster_of(2)
    cluster.master_fails = True
    job = cluster.submit(JobRequest(2))
    cluster.run()
    assert cluster.error(job) == BROKEN
    assert cluster.busy() == {0: 0, 1: 0}


@pytest.mark.parametrize("phase", [JobPhase.COMPILING, JobPhase.PREPARING, JobPhase.RUNNING])
def test_a_lost_worker_fails_its_job_and_frees_the_others(phase: JobPhase) -> None:
    cluster, workers = cluster_of(3)
    job = cluster.submit(JobRequest(2))
    until(cluster, job, phase)
    cluster.kill(workers[1])
    cluster.run()
    error = cluster.error(job)
    assert error is not None
    assert error.code == WorkerLostError.code
    assert error.rank == 1
    assert str(phase) in error.what
    assert cluster.busy() == {0: 0, 2: 0}
    cluster.add_worker()
    after = cluster.submit(JobRequest(2))
    cluster.run()
    assert cluster.phases(after) == ALL_GOOD


def test_a_silent_worker_is_lost() -> None:
    cluster, workers = cluster_of(2)
    job = cluster.submit(JobRequest(2))
    until(cluster, job, JobPhase.RUNNING)
    workers[1].silent = True
    cluster.pass_time(cluster.limits.silence + 1)
    error = cluster.error(job)
    assert error is not None
    assert error.code == WorkerLostError.code
    assert f"said nothing for {cluster.limits.silence:g} s" in error.what
    assert cluster.busy() == {0: 0}


def test_a_silent_master_is_lost() -> None:
    cluster, workers = cluster_of(1)
    job = cluster.submit(JobRequest(2))
    until(cluster, job, JobPhase.RUNNING)
    worker = workers[0]
    worker.to_worker.clear()
    for _ in range(round(2 * MASTER_SILENCES * cluster.limits.silence)):
        cluster.now += 0.5
        assert not worker.exited
        cluster._tell_worker(worker, events.WorkerTick())
    cluster.now += 1.0
    cluster._tell_worker(worker, events.WorkerTick())
    while worker.work is not None or worker.closing is not None:
        cluster._work_ends(worker) if worker.work is not None else cluster._closes(worker)
    assert worker.exited
    assert worker.exit_error is not None
    assert "the master was lost" in worker.exit_error.what


@pytest.mark.parametrize("consequence", [AbortedError, TransportError])
def test_the_first_cause_wins_over_what_followed_from_it(
    consequence: type[PlanCompilerError],
) -> None:
    cluster, workers = cluster_of(2)
    job = cluster.submit(JobRequest(2))
    until(cluster, job, JobPhase.RUNNING)
    drop_work(cluster, workers[0])
    report = consequence("the other rank is gone").report
    cluster._tell_worker(workers[0], events.WorkFailed(job, report))
    cluster._deliver_to_master(workers[0])
    assert cluster.phases(job)[-1] is JobPhase.RUNNING  # held back
    cluster.kill(workers[1])
    cluster.run()
    error = cluster.error(job)
    assert error is not None
    assert error.code == WorkerLostError.code
    assert cluster.phases(job)[-1] is JobPhase.FAILED


def test_a_cause_that_an_abort_overtakes_is_still_reported() -> None:
    cluster, workers = cluster_of(2)
    job = cluster.submit(JobRequest(2))
    until(cluster, job, JobPhase.RUNNING)
    for worker in workers:
        drop_work(cluster, worker)
    report = AbortedError("stopped because rank 0 failed").report
    cluster._tell_worker(workers[1], events.WorkFailed(job, report))
    cluster._deliver_to_master(workers[1])
    cluster._deliver_to_worker(workers[0])  # the abort, before its own failure is known
    cluster._tell_worker(workers[0], events.WorkFailed(job, BROKEN))
    cluster.run()
    assert cluster.error(job) == BROKEN
    assert cluster.busy() == {0: 0, 1: 0}


def test_a_consequence_without_a_cause_is_reported_in_the_end() -> None:
    cluster, workers = cluster_of(2)
    job = cluster.submit(JobRequest(2))
    until(cluster, job, JobPhase.RUNNING)
    drop_work(cluster, workers[0])
    report = TransportError("no answer").report
    cluster._tell_worker(workers[0], events.WorkFailed(job, report))
    cluster.run()
    assert cluster.error(job) == report
    assert cluster.phases(job)[-1] is JobPhase.FAILED
    assert cluster.busy() == {0: 0, 1: 0}


def test_a_worker_that_does_not_let_go_is_given_up() -> None:
    cluster, workers = cluster_of(2)
    job = cluster.submit(JobRequest(2))
    until(cluster, job, JobPhase.RUNNING)
    cluster.tell_master(CancelAsked(job, "enough"))
    cluster.choices = list  # type: ignore[method-assign]  # nobody does anything
    for worker in workers:
        worker.state._silence = 1e9
    for _ in range(80):
        cluster.now += 0.5
        for worker in workers:
            cluster.tell_master(FromWorker(worker.connection, Heartbeat()))
            cluster.tell_master(MasterTick())
    assert cluster.busy() == {}
    assert cluster.released == [job]


@pytest.mark.parametrize(
    "phase", [JobPhase.QUEUED, JobPhase.COMPILING, JobPhase.PREPARING, JobPhase.RUNNING]
)
def test_cancelling(phase: JobPhase) -> None:
    cluster, _ = cluster_of(2)
    blocker = cluster.submit(JobRequest(1, open=True)) if phase is JobPhase.QUEUED else None
    job = cluster.submit(JobRequest(3))
    until(cluster, job, phase)
    cluster.tell_master(CancelAsked(job, "a client asked for it"))
    cluster.tell_master(CancelAsked(job, "twice"))
    cluster.run()
    error = cluster.error(job)
    assert error is not None
    assert error.code == JobCancelledError.code
    assert cluster.phases(job)[-1] is JobPhase.CANCELLED
    assert cluster.busy() == dict.fromkeys((0, 1), blocker or 0)


@pytest.mark.parametrize("phase", [JobPhase.COMPILING, JobPhase.PREPARING, JobPhase.RUNNING])
def test_a_worker_that_is_stopped_is_named(phase: JobPhase) -> None:
    cluster, workers = cluster_of(2)
    job = cluster.submit(JobRequest(2))
    until(cluster, job, phase)
    cluster.tell_master(FromWorker(workers[1].connection, Heartbeat(stopped=True)))
    error = cluster.error(job)
    assert error is not None
    assert error.code == WorkerLostError.code
    assert error.rank == 1
    assert "in state T, stopped by a signal" in error.what


@pytest.mark.parametrize("phase", [JobPhase.COMPILING, JobPhase.PREPARING, JobPhase.RUNNING])
def test_a_worker_that_works_is_waited_for(phase: JobPhase) -> None:
    """For many limits; and when it does not work any longer, it is named within two of them."""
    cluster = SimulatedCluster(2, Limits(compiling=20, preparing=20, progress=20))
    workers = [cluster.add_worker() for _ in range(2)]
    cluster.run()
    job = cluster.submit(JobRequest(2))
    until(cluster, job, phase)
    if phase is JobPhase.COMPILING:
        cluster._master_compiles()
    cluster.choices = list  # type: ignore[method-assign]  # nobody gets anything done
    used = 0.0

    def pass_time(seconds: int, share: float) -> None:
        nonlocal used
        for _ in range(seconds):
            cluster.now += 1.0
            used += share
            for worker in workers:
                cluster.tell_master(FromWorker(worker.connection, Heartbeat(False, used)))
            cluster.tell_master(MasterTick())

    pass_time(200, 0.05)
    assert cluster.error(job) is None
    pass_time(round(2 * DEADLINE), 0.005)
    error = cluster.error(job)
    assert error is not None
    assert error.code == DeadlineError.code


@pytest.mark.parametrize("doing", [Compile, Save, WriteIndex, Run])
@pytest.mark.parametrize("deadline", [0.0, 20.0])
def test_a_rank_that_stands_still_is_named_after_the_deadline(doing: type, deadline: float) -> None:
    """Long before the limit of what the job does; in what all do for themselves, though another
    one works. A rank that gets on without its processor does not stand still.
    """
    cluster, workers = cluster_of(2)
    late = workers[0 if doing is WriteIndex else 1]
    job = cluster.submit(JobRequest(1, save="folder", deadline=deadline))
    while not isinstance(late.work, doing) or late.fetching:
        cluster.choices()[0]()
    while late.to_master:
        cluster._deliver_to_master(late)
    cluster.choices = list  # type: ignore[method-assign]  # nobody gets anything done
    used = 0.0

    def pass_time(seconds: float, gets_on: bool) -> None:
        nonlocal used
        for _ in range(round(seconds)):
            cluster.now += 1.0
            used += 0.5
            for worker in workers:
                idle = worker is late or doing is Run
                beat = Heartbeat(False, 0.0 if idle else used, gets_on and idle)
                cluster.tell_master(FromWorker(worker.connection, beat))
            cluster.tell_master(MasterTick())

    limit = (deadline or DEADLINE) + (LONGEST_ANSWER if doing is Run else 0)
    pass_time(3 * limit, True)
    pass_time(limit - 1, False)
    assert cluster.error(job) is None
    pass_time(3, False)
    error = cluster.error(job)
    assert error is not None
    assert error.code == DeadlineError.code
    assert "stands still, its processor idle" in error.what
    assert error.rank == late.state.rank


def test_a_rank_that_waits_for_another_while_the_job_runs_is_waited_for() -> None:
    cluster, workers = cluster_of(2)
    job = cluster.submit(JobRequest(1))
    until(cluster, job, JobPhase.RUNNING)
    cluster.choices = list  # type: ignore[method-assign]  # nobody gets anything done
    for second in range(100):
        cluster.now += 1.0
        for worker in workers:
            beat = Heartbeat(False, second * 0.5 if worker is workers[0] else 0.0)
            cluster.tell_master(FromWorker(worker.connection, beat))
        cluster.tell_master(MasterTick())
    assert cluster.error(job) is None


@pytest.mark.parametrize("phase", [JobPhase.COMPILING, JobPhase.PREPARING, JobPhase.RUNNING])
def test_every_phase_has_its_time_limit(phase: JobPhase) -> None:
    cluster = SimulatedCluster(2, Limits(compiling=20, preparing=20, progress=20))
    workers = [cluster.add_worker() for _ in range(2)]
    cluster.run()
    job = cluster.submit(JobRequest(3))
    until(cluster, job, phase)
    if phase is JobPhase.COMPILING:
        cluster.compiling.clear()  # the master's own compilation hangs
    else:
        drop_work(cluster, workers[1])  # it never ends, though the worker lives
    cluster.pass_time(15)
    assert cluster.phases(job)[-1] is phase
    cluster.pass_time(10)
    error = cluster.error(job)
    assert error is not None
    assert error.code == DeadlineError.code
    assert str(phase) in error.what


def test_requests_to_a_failed_job_get_its_error() -> None:
    cluster, workers = cluster_of(1)
    workers[0].fail_at = Run
    job = cluster.submit(JobRequest(0, open=True))
    cluster.run()
    cluster.tell_master(Asked(Run(job, 1, 1, False)))
    cluster.run()
    with pytest.raises(PlanCompilerError, match="the kernel broke"):
        cluster.tell_master(Asked(Run(job, 2, 1, False)))


def test_an_open_job_nobody_uses_ends() -> None:
    cluster = SimulatedCluster(1, Limits(idle=30))
    cluster.add_worker()
    job = cluster.submit(JobRequest(0, open=True))
    cluster.run()
    cluster.pass_time(32)
    assert cluster.phases(job)[-1] is JobPhase.FAILED


def test_stopping_fails_jobs_and_sends_workers_away() -> None:
    cluster, workers = cluster_of(2)
    running, queued = cluster.submit(JobRequest(5)), cluster.submit(JobRequest(5))
    until(cluster, running, JobPhase.RUNNING)
    cluster.tell_master(Stopping())
    cluster.run()
    assert cluster.phases(running)[-1] is cluster.phases(queued)[-1] is JobPhase.FAILED
    assert all(worker.exited for worker in workers)
