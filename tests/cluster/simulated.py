"""A cluster without threads or sockets: both state machines, and a scheduler that picks events.

Messages between master and workers stay in order per connection; everything else may interleave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from plancompiler.cluster.messages import (
    Collect,
    Compile,
    Fetched,
    JobEvent,
    JobPhase,
    JobRequest,
    LocalCopy,
    MasterMessage,
    OperationDone,
    Outputs,
    PhaseChanged,
    Prepare,
    Prepared,
    RankCompiled,
    Register,
    Run,
    RunFailed,
    Save,
    SendPlan,
    SendTimeline,
    TimelineRecorded,
    WorkerMessage,
    WriteIndex,
    Written,
)
from plancompiler.errors import AbortedError, ErrorReport, ExecutionError
from plancompiler.master.events import (
    Disconnect,
    FromWorker,
    JobSubmitted,
    Limits,
    MasterAction,
    MasterCompiled,
    MasterEvent,
    MasterFailed,
    MasterTick,
    Publish,
    Release,
    StartCompile,
    Tell,
    WorkerBack,
    WorkerGone,
)
from plancompiler.master.journal import FORGOTTEN
from plancompiler.master.record_json import from_json, to_json
from plancompiler.master.records import JobRecord, Worker
from plancompiler.master.state import MasterState
from plancompiler.plan.digest import CrossRankFact
from plancompiler.worker import events as worker_events
from plancompiler.worker.state import WorkerState

VERSION = "1.2.3"
BROKEN = ExecutionError("the kernel broke", op="matmul").report
ALL_GOOD = [
    JobPhase.QUEUED,
    JobPhase.COMPILING,
    JobPhase.CHECKING,
    JobPhase.PREPARING,
    JobPhase.RUNNING,
    JobPhase.FINISHED,
]
"""The phases of a job that ends well."""


@dataclass
class SimulatedWorker:
    """One worker process and its connection."""

    connection: int
    state: WorkerState
    to_master: deque[WorkerMessage] = field(default_factory=deque)
    to_worker: deque[MasterMessage] = field(default_factory=deque)
    disconnecting: bool = False
    """The master ends the connection once `to_worker` is empty."""
    work: worker_events.Work | None = None
    fetching: bool = False
    """It compiles, and has not yet said that it has its slice."""
    told: list[Compile] = field(default_factory=list)
    """The commands to compile that it has begun with."""
    prepared: list[Prepare] = field(default_factory=list)
    """The commands to prepare that it has begun with."""
    says_fetched: bool = True
    """False for one that only says so by having compiled."""
    beside: Save | WriteIndex | None = None
    """What it writes beside other work."""
    slow_disk: bool = False
    """That takes forever."""
    saves: list[Save] = field(default_factory=list)
    """The commands to save that it has begun with."""
    interrupted: ErrorReport | None = None
    closing: int | None = None
    exited: bool = False
    exit_error: ErrorReport | None = None
    silent: bool = False
    """Hangs: neither reads nor writes nor works."""
    facts: tuple[CrossRankFact, ...] = ()
    kernels: str = "kernels"
    steps_done: dict[int, int] = field(default_factory=dict)
    """By job."""
    reported: int | None = None
    """How many steps it reports of each run, where that is another number than it should."""
    fail_at: type | None = None
    """The work at which this worker fails; Written: writing beside other work."""
    not_finite: ErrorReport | None = None
    """What it says of its runs, in place of reporting their steps."""
    collected: list[Collect] = field(default_factory=list)
    """The commands to upload that it has begun with."""


Choice = Callable[[], None]
"""Lets an event happen."""


class SimulatedCluster:
    """A master with workers, driven event by event."""

    def __init__(self, world_size: int, limits: Limits | None = None) -> None:
        self.now = 100.0
        self.limits = limits or Limits()
        self.master = MasterState(world_size, VERSION, self.limits)
        self.workers: list[SimulatedWorker] = []
        self.compiling: deque[int] = deque()
        self.master_fails = False
        self.digests: dict[int, bytes] = {}
        """Of the slices of ranks; the same one for all others."""
        self.events: dict[int, list[JobEvent]] = {}
        self.released: list[int] = []
        self._next_job = 1

    # --- what the outside does ------------------------------------------------------------------

    def add_worker(
        self,
        rank: int | None = None,
        version: str = VERSION,
        offer: Register | None = None,
    ) -> SimulatedWorker:
        """A worker that wants to register."""
        worker = SimulatedWorker(len(self.workers) + 1, WorkerState(self.now, 10.0))
        worker.to_master.append(offer or Register(rank, "host", "cpu", version))
        self.workers.append(worker)
        return worker

    def submit(
        self, request: JobRequest, needs: int | None = None, inputs: tuple[str, ...] = ()
    ) -> int:
        """A job that is placed on so many ranks, by default on all; its id."""
        needs = needs or self.master.world_size
        job_id, self._next_job = self._next_job, self._next_job + 1
        self.events[job_id] = []
        self.tell_master(JobSubmitted(job_id, f"job{job_id}", request, needs, inputs, "token"))
        return job_id

    def kill(self, worker: SimulatedWorker) -> None:
        """SIGKILL: what was sent may still arrive, nothing else does."""
        worker.exited = True
        worker.fetching = False
        worker.work = worker.closing = worker.beside = None

    def tell_master(self, event: MasterEvent) -> None:
        """Hand an event to the master and do what it asks for."""
        self._perform(self.master.handle(event, self.now))

    def restart_master(self) -> None:
        """Kill the master, and start another one that knows what a journal would have kept. All
        workers that are there come back to it.
        """
        workers = [from_json(Worker, to_json(each)) for each in self.master._workers.values()]
        jobs = [from_json(JobRecord, to_json(job, FORGOTTEN)) for job in self.master._jobs.values()]
        self.master = MasterState(self.master.world_size, VERSION, self.limits)
        self.compiling.clear()
        self._perform(self.master.restore(workers, jobs, self.now))
        for worker in self.workers:
            known = worker.state.slot is not None and self.master.worker(worker.state.slot)
            if known and not worker.exited and not worker.disconnecting:
                self.tell_master(WorkerBack(worker.connection, known.slot))

    def _perform(self, actions: Iterable[MasterAction]) -> None:
        for action in actions:
            match action:
                case Tell(0, message, slot):  # the journal has it for when the worker is back
                    for worker in self.workers:
                        if worker.state.slot == slot and not worker.exited:
                            worker.to_worker.append(message)
                case Tell(connection, message):
                    self.workers[connection - 1].to_worker.append(message)
                case Disconnect(connection):
                    self.workers[connection - 1].disconnecting = True
                case StartCompile(job_id):
                    self.compiling.append(job_id)
                case Publish(job_id, event):
                    self.events[job_id].append(event)
                case Release(job_id):
                    self.released.append(job_id)

    # --- what may happen next -------------------------------------------------------------------

    def choices(self) -> list[Choice]:
        """All events that may come next, time apart."""
        choices: list[Choice] = []
        if self.compiling:
            choices.append(self._master_compiles)
        for worker in self.workers:
            if worker.to_master:
                choices.append(lambda worker=worker: self._deliver_to_master(worker))
            elif worker.exited and self.master.slot_of(worker.connection) is not None:
                choices.append(lambda worker=worker: self._connection_breaks(worker))
            if worker.exited or worker.silent:
                continue
            if worker.to_worker:
                choices.append(lambda worker=worker: self._deliver_to_worker(worker))
            elif worker.disconnecting:
                choices.append(lambda worker=worker: self._master_hangs_up(worker))
            if worker.fetching and worker.interrupted is None:
                choices.append(lambda worker=worker: self._fetches(worker))
            elif worker.work is not None:
                choices.append(lambda worker=worker: self._work_ends(worker))
            elif worker.closing is not None:
                choices.append(lambda worker=worker: self._closes(worker))
            if worker.beside is not None and not worker.slow_disk:
                choices.append(lambda worker=worker: self._writes(worker))
        return choices

    def settle(self, choose: Callable[[list[Choice]], Choice]) -> None:
        """Let things happen until nothing can, time standing still; a ceiling means a livelock."""
        for _ in range(20_000):
            choices = self.choices()
            if not choices:
                return
            choose(choices)()
        raise AssertionError("the cluster does not come to rest")

    def run(self) -> None:
        """Let things happen, first come first served."""
        self.settle(lambda choices: choices[0])

    def pass_time(self, seconds: float) -> None:
        """Let time pass in small steps; all clocks tick and all messages go through."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            self.tell_master(MasterTick())
            for worker in self.workers:
                if not worker.exited and not worker.silent:
                    self._tell_worker(worker, worker_events.WorkerTick())
            self.run()

    def _master_compiles(self) -> None:
        job_id = self.compiling.popleft()
        if self.master_fails:
            self.tell_master(MasterFailed(job_id, BROKEN))
        else:
            world = range(self.master.ranks_of(job_id))
            digests = {rank: self.digests.get(rank, b"slice") for rank in world}
            self.tell_master(MasterCompiled(job_id, digests))

    def _deliver_to_master(self, worker: SimulatedWorker) -> None:
        self.tell_master(FromWorker(worker.connection, worker.to_master.popleft()))

    def _connection_breaks(self, worker: SimulatedWorker) -> None:
        self.tell_master(WorkerGone(worker.connection))

    def _deliver_to_worker(self, worker: SimulatedWorker) -> None:
        self._tell_worker(worker, worker_events.FromMaster(worker.to_worker.popleft()))

    def _master_hangs_up(self, worker: SimulatedWorker) -> None:
        worker.disconnecting = False
        report = ExecutionError("the connection ended").report
        self._tell_worker(worker, worker_events.MasterGone(report))

    def _tell_worker(self, worker: SimulatedWorker, event: worker_events.WorkerEvent) -> None:
        for action in worker.state.handle(event, self.now):
            match action:
                case worker_events.TellMaster(message):
                    worker.to_master.append(message)
                case worker_events.Start(work):
                    assert worker.work is None, "two works at a time"
                    worker.work, worker.interrupted = work, None
                    worker.fetching = isinstance(work, Compile) and worker.says_fetched
                    if isinstance(work, Compile):
                        worker.told.append(work)
                    elif isinstance(work, Prepare):
                        worker.prepared.append(work)
                    elif isinstance(work, Save):
                        assert worker.beside is None, "two checkpoints at a time"
                        worker.saves.append(work)
                    elif isinstance(work, Collect):
                        worker.collected.append(work)
                case worker_events.StartBeside(order):
                    assert worker.beside is None, "an index before its shards"
                    worker.beside = order
                case worker_events.Interrupt(error):
                    worker.interrupted = error
                case worker_events.Close(job_id):
                    assert worker.work is None, "closed in the middle of work"
                    worker.closing = job_id
                case worker_events.Exit(error):
                    worker.exited, worker.exit_error = True, error

    def _closes(self, worker: SimulatedWorker) -> None:
        job_id, worker.closing, worker.beside = worker.closing, None, None
        assert job_id is not None
        self._tell_worker(worker, worker_events.Closed(job_id))

    def _fetches(self, worker: SimulatedWorker) -> None:
        assert worker.work is not None
        worker.fetching = False
        copy = LocalCopy(worker.connection, 7) if worker.told[-1].share else None
        worker.to_master.append(Fetched(worker.work.job_id, copy))

    def _writes(self, worker: SimulatedWorker) -> None:
        order, worker.beside = worker.beside, None
        assert order is not None
        if worker.fail_at is Written:
            self._tell_worker(worker, worker_events.SaveFailed(order.job_id, BROKEN))
        else:
            written = Written(order.job_id, order.ticket)
            self._tell_worker(worker, worker_events.SaveWritten(order.job_id, written))

    def _work_ends(self, worker: SimulatedWorker) -> None:
        worker.fetching = False
        work, worker.work = worker.work, None
        assert work is not None
        if worker.interrupted is not None:
            error = AbortedError("stopped").report
            self._tell_worker(worker, worker_events.WorkFailed(work.job_id, error))
        elif isinstance(work, Run) and worker.not_finite is not None:
            failed = RunFailed(work.job_id, work.ticket, worker.not_finite)
            self._tell_worker(worker, worker_events.WorkDone(work.job_id, failed))
        elif worker.fail_at is type(work):
            self._tell_worker(worker, worker_events.WorkFailed(work.job_id, BROKEN))
        else:
            if isinstance(work, Run) and worker.state.rank == 0:
                first = worker.steps_done.get(work.job_id, 0)
                worker.steps_done[work.job_id] = first + work.steps
                reported = work.steps if worker.reported is None else worker.reported
                for step in range(first, first + reported):
                    worker.to_master.append(Outputs(work.job_id, step, b""))
            if isinstance(work, SendTimeline):
                worker.to_master.append(TimelineRecorded(work.job_id, b"times"))
            if isinstance(work, Save) and work.background:
                worker.beside = work
            self._tell_worker(
                worker, worker_events.WorkDone(work.job_id, self._reply(worker, work))
            )

    def _reply(self, worker: SimulatedWorker, work: worker_events.Work) -> WorkerMessage:
        match work:
            case Compile(job_id):
                reports = worker.state.rank == 0
                return RankCompiled(job_id, "digest", reports, worker.facts, kernels=worker.kernels)
            case Prepare(job_id):
                return Prepared(job_id)
            case Run(job_id, ticket) | Save(job_id, ticket) | WriteIndex(job_id, ticket):
                return OperationDone(job_id, ticket)
            case Collect() | SendTimeline() | SendPlan():
                job_id, ticket = work.job_id, work.ticket
                return OperationDone(job_id, ticket)

    # --- what is seen ---------------------------------------------------------------------------

    def phases(self, job_id: int) -> list[JobPhase]:
        """The phases that a job went through."""
        return [event.phase for event in self.events[job_id] if isinstance(event, PhaseChanged)]

    def error(self, job_id: int) -> ErrorReport | None:
        """Why a job failed or was cancelled."""
        return self.master.status(self.now).jobs[job_id - 1].error

    def busy(self) -> dict[int, int]:
        """Slot → job, as the master sees it."""
        return {each.slot: each.job_id for each in self.master.status(self.now).workers}


def cluster_of(count: int) -> tuple[SimulatedCluster, list[SimulatedWorker]]:
    """A cluster with all its workers registered."""
    cluster = SimulatedCluster(count)
    workers = [cluster.add_worker() for _ in range(count)]
    cluster.run()
    return cluster, workers


def until(cluster: SimulatedCluster, job: int, phase: JobPhase) -> None:
    """First come, first served, until a job is in a phase."""
    while cluster.phases(job)[-1] is not phase:
        cluster.choices()[0]()


def drop_work(cluster: SimulatedCluster, worker: SimulatedWorker) -> None:
    """Let a worker get its next work, which nobody does."""
    while worker.work is None:
        cluster._deliver_to_worker(worker)
    worker.work, worker.fetching = None, False
