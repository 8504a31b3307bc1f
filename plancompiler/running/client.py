"""`Client`: submit jobs to a master, follow them, or run them step by step."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Self

import grpc

from plancompiler.cluster.channel import (
    SILENCE_SECONDS,
    TlsFiles,
    call_error,
    connect_master,
    sign_in,
)
from plancompiler.cluster.checked import Sent
from plancompiler.cluster.chunks import (
    MAX_ARRAYS_BYTES,
    Array,
    arrays_to_bytes,
    to_chunks,
    transfers,
)
from plancompiler.cluster.codec import decode, encode
from plancompiler.cluster.messages import (
    ClusterStatus,
    JobPhase,
    JobRequest,
    JobStatus,
    RankLine,
    StepDone,
    StepsFailed,
    TicketDone,
)
from plancompiler.errors import (
    ClusterError,
    FeedError,
    MasterUnreachableError,
    NonFiniteError,
    PlanCompilerError,
    UsageError,
)
from plancompiler.executor.checkpoint import assemble, read_index
from plancompiler.executor.fed_rates import rates_to_feeds
from plancompiler.executor.feeds import check_feeds
from plancompiler.executor.timeline import Timeline
from plancompiler.executor.trace import timelines_from_bytes
from plancompiler.frontend.optim.schedule import Rate
from plancompiler.frontend.trace import as_job
from plancompiler.ir import Job
from plancompiler.ir.arguments import (
    folder_path,
    job_name,
    positive_number,
    save_interval,
    step_count,
    whole_number,
)
from plancompiler.ir.closing import Closing
from plancompiler.limits import time_limits
from plancompiler.plan.compiled_plans import CompiledPlans
from plancompiler.plan.job_serde import job_to_bytes
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.proto.cluster_pb2_grpc import ClientStub
from plancompiler.running.evaluation import Outputs, Programs, whole_boxes
from plancompiler.running.fetched_files import fetch_checkpoint
from plancompiler.running.fetched_plans import FetchedPlans
from plancompiler.running.job_log import read_log
from plancompiler.running.pace import Pace
from plancompiler.running.session_rates import SessionRates, with_listed_rates
from plancompiler.running.step_stream import StepStream
from plancompiler.running.watched_job import (
    OnPhase,
    OnWaiting,
    WatchedJob,
    await_restart,
    call,
    cancel_job,
    describe_job,
    job_request,
)
from plancompiler.version import VERSION

Folder = str | PathLike[str]
_TRANSFER_SECONDS = time_limits.TRANSFER

_MODE = "rank_per_iter"
"""How programs beside a session's job are compiled, which run in this process."""
_REQUESTS = 2
"""Requests for steps that `RemoteSession.run` keeps in progress."""


class Client(Closing):
    """A connection to a master.

    `timeout` (seconds) bounds the wait for the master's first answer, and later how long it may
    answer no ping (at least 2 s); then a MasterUnreachableError is raised. None is for a master in
    this process, which stops when its client does. `token_file` holds the secret of this client, by
    default that of a master of the same user on this machine; SecurityError if there is no secret
    or the master does not know it. Use the client as a context manager, or close it.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: float | None = SILENCE_SECONDS,
        tls: TlsFiles | None = None,
        token_file: Folder | None = None,
    ) -> None:
        self.address = address
        token = None if token_file is None else Path(token_file)
        seconds = timeout or SILENCE_SECONDS
        self._channel = connect_master(address, tls, token, seconds, silence=timeout)
        self._sign_in = partial(sign_in, self._channel, address, tls, token, seconds)
        self._stub = ClientStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    def submit(
        self,
        job: Job,
        steps: int,
        *,
        ranks: int | None = None,
        priority: int = 0,
        mode: str | None = None,
        restore: Folder | None = None,
        strict_restore: bool = True,
        save: Folder | None = None,
        save_every: int = 0,
        cache: bool = True,
        deadline: float | None = None,
        record: bool = False,
        anomaly: bool = False,
        name: str = "",
        on_phase: OnPhase | None = None,
        on_waiting: OnWaiting | None = None,
    ) -> Handle:
        """Queue a job that reads its own data, for `steps` steps.

        It runs on so many `ranks`, by default as many as its placements use, and beside other jobs
        if the cluster has workers enough. Of the jobs that wait, those with a higher `priority` (an
        integer) come first.

        `restore` and `save` are checkpoint folders on the workers' host: the job starts from the
        first and writes the second at the end, and with `save_every` also after every so many
        steps, while steps go on. A variable of the checkpoint that the job does not have is an
        error unless `strict_restore` is False. Without `cache`, or with a `mode`, everything is
        compiled, and the plan cache is neither read nor written. `deadline` (seconds) is how long a
        rank may make no progress while others wait for it; by default the workers' option holds.
        `record` records timelines for `Handle.timelines`. With `anomaly` every op is checked, and a
        NonFiniteError names the first op that makes a value that is not finite (slow, for
        debugging; only on CPUs). A NonFiniteError ends the job; its earlier checkpoints stay.
        Learning rates that are functions are evaluated here, for all steps; with `restore`, the
        number of the first step is read here too. Raises FeedError for a job with inputs, RankError
        for a job that does not fit the cluster. `name` is what the master calls
        the job, by default its own. The job runs on if the client ends, and `Client.job` finds it.
        """
        steps = step_count(steps)
        every = save_interval(save_every, save)
        job = as_job(job)
        if job.inputs:
            raise FeedError(
                f"job {job.name!r} has inputs that nobody would feed",
                got=", ".join(map(repr, job.inputs)),
                hint="read the data inside the job with pc.data, or run it step by step with "
                "Client.open or pc.run",
            )
        if job.rates:
            job = with_listed_rates(job, _step_of(restore), steps)
        request = _request(
            *(steps, ranks, priority, mode, deadline),
            restore=_folder(restore),
            restored=_restored(job, restore, strict_restore),
            save=_folder(save),
            cache=cache,
            save_every=every,
            record=record,
            anomaly=anomaly,
            name=job_name(name),
        )
        with self._submitted(job, request) as job_id:
            handle = Handle(
                self._stub, self.address, job_id, on_phase, on_waiting, job.outputs, steps
            )
            handle.watch()
        return self._surviving(handle, self._channel.is_durable)

    def submit_compilation(
        self,
        job: Job,
        *,
        ranks: int | None = None,
        priority: int = 0,
        mode: str | None = None,
        name: str = "",
        on_phase: OnPhase | None = None,
        on_waiting: OnWaiting | None = None,
    ) -> Handle:
        """Queue a job that is compiled by the master and its workers and not executed;
        `Handle.plans` has what came of it. Parameters as for `submit`.
        """
        job = as_job(job)
        request = _request(0, ranks, priority, mode, name=job_name(name), compile_only=True)
        with self._submitted(job, request) as job_id:
            return Handle(self._stub, self.address, job_id, on_phase, on_waiting, job.outputs, 0)

    def compile(
        self,
        job: Job,
        *,
        ranks: int | None = None,
        priority: int = 0,
        mode: str | None = None,
        name: str = "",
        on_phase: OnPhase | None = None,
        on_waiting: OnWaiting | None = None,
    ) -> CompiledPlans:
        """Let the master and its workers compile a job, and execute nothing; the plans of all
        ranks, the same that compiling it here gives. Parameters as for `submit`.
        """
        handle = self.submit_compilation(
            job,
            ranks=ranks,
            priority=priority,
            mode=mode,
            name=name,
            on_phase=on_phase,
            on_waiting=on_waiting,
        )
        plans = FetchedPlans(self._stub, self.address, handle.job_id)
        try:
            handle.result()
            try:
                return plans.receive()
            except MasterUnreachableError:  # it was started again meanwhile, as the job's end says
                return handle.plans()
        except BaseException as error:
            handle.give_up(error)
            raise
        finally:
            plans.cancel()
            handle.close()

    def open(
        self,
        job: Job,
        *,
        ranks: int | None = None,
        priority: int = 0,
        mode: str | None = None,
        restore: Folder | None = None,
        strict_restore: bool = True,
        cache: bool = True,
        deadline: float | None = None,
        anomaly: bool = False,
        on_phase: OnPhase | None = None,
        on_waiting: OnWaiting | None = None,
        programs: Mapping[str, Job] | None = None,
    ) -> RemoteSession:
        """Compile a job and prepare it on all ranks, to be run step by step.

        Returns when the first step can run, or raises the job's error. The job ends with the
        session. `programs` are other jobs, by name, that read the variables of this one: see
        `RemoteSession.evaluate`. The other arguments are those of `submit`.
        """
        job = as_job(job)
        beside = Programs(
            programs, job, ranks or job.world_size, _MODE, cache, time_limits.DEADLINE
        )
        request = _request(
            *(0, ranks, priority, mode, deadline),
            open=True,
            restore=_folder(restore),
            restored=_restored(job, restore, strict_restore),
            cache=cache,
            anomaly=anomaly,
        )
        first_step = partial(_step_of, restore)
        with self._submitted(job, request) as job_id:
            return RemoteSession(
                *(self._stub, self.address, job_id, job, on_phase, on_waiting, first_step),
                *(beside, anomaly),
            )

    def status(self) -> ClusterStatus:
        """The master's version, its workers and its latest jobs."""
        reply = call(self.address, self._stub.Status, Sent()(pb.StatusRequest()))
        return decode(ClusterStatus, reply)

    def jobs(self) -> tuple[JobStatus, ...]:
        """The master's jobs, the oldest first: those that wait or run, and the latest that ended.
        Whose token has not the role operate sees its own.
        """
        return self.status().jobs

    def job(
        self,
        job_id: int,
        *,
        since: int = 0,
        on_phase: OnPhase | None = None,
        on_waiting: OnWaiting | None = None,
    ) -> Handle:
        """A job that was submitted before, by whatever client; iterating gives its steps from
        number `since` on. ClusterError where the master knows no such job, SecurityError where it
        is somebody else's.
        """
        since = _step_number(since)
        described = describe_job(self._stub, self.address, job_id)
        steps = None if described.open else described.steps
        handle = Handle(
            self._stub, self.address, job_id, on_phase, on_waiting, described.outputs, steps, since
        )
        return self._surviving(handle, described.is_durable)

    def cancel(self, job_id: int) -> bool:
        """Stop a job; False where it had already ended."""
        return cancel_job(self._stub, self.address, job_id)

    def logs(
        self, job_id: int, rank: int | None = None, *, follow: bool = False
    ) -> Iterator[RankLine]:
        """What the ranks of a job printed: see `read_log`."""
        return read_log(self._stub, self.address, job_id, rank, follow)

    def fetch_checkpoint(self, job_id: int, folder: Folder) -> list[Path]:
        """Bring the checkpoint that a job has written last into a folder here: see
        `running.fetched_files.fetch_checkpoint`.
        """
        return fetch_checkpoint(self._stub, self.address, job_id, Path(folder))

    def close(self) -> None:
        """Close the connection. Safe to call again."""
        self._channel.close()

    def _surviving(self, handle: Handle, is_durable: bool) -> Handle:
        """Let a job's reader go on when its master was started again, where the job does."""
        if is_durable:
            handle.sign_in = self._sign_in
        return handle

    @contextmanager
    def _submitted(self, job: Job, request: JobRequest) -> Iterator[int]:
        """Queue a job, whose id the block makes a handle of.

        Who interrupts that has no handle, and could not say which job to cancel: it is cancelled.
        """
        key = secrets.token_hex(16)
        try:
            yield self._submit(job, request, key)
        except Exception:
            raise
        except BaseException:
            with suppress(PlanCompilerError):
                call(self.address, self._stub.Cancel, Sent()(pb.JobRequest(key=key)))
            raise

    def _submit(self, job: Job, request: JobRequest, key: str) -> int:
        header = encode(pb.SubmitHeader, request)
        header.version = VERSION
        header.key = key
        chunks = to_chunks(job_to_bytes(job), compress=True)

        def messages() -> Iterator[pb.SubmitRequest]:
            sent = Sent()
            yield sent(pb.SubmitRequest(header=header))
            for chunk in chunks:
                yield sent(pb.SubmitRequest(chunk=chunk))

        while True:
            try:
                reply = call(self.address, self._stub.Submit, messages(), timeout=_TRANSFER_SECONDS)
            except MasterUnreachableError:
                # Whether it has the job or not: with the same key it does not take it twice.
                if self._channel.is_durable and await_restart(self._sign_in):
                    continue
                raise
            return int(reply.job_id)


class Handle(WatchedJob):
    """A submitted job. Iterating gives one dict per step: `{"step": 0, "loss": 2.3, …}`.

    Scalars are floats, other outputs arrays. The iteration begins with the first step whose outputs
    the master has kept, and ends with the job, or raises its error. `steps` None is of an open job,
    whose client asks for each step.
    """

    def __init__(
        self,
        stub: ClientStub,
        address: str,
        job_id: int,
        on_phase: OnPhase | None,
        on_waiting: OnWaiting | None,
        names: Collection[str],
        steps: int | None,
        since: int = 0,
    ) -> None:
        super().__init__(
            stub, address, job_id, on_phase, on_waiting, names, since=since, beside=True
        )
        self._asked = steps
        self._last: dict[str, Any] = {}

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
        while (event := self._next_event()) is not None:
            if isinstance(event, StepDone):
                outputs = self._take_outputs(event.step)
                self._last = {"step": event.step} | {
                    name: float(value) if value.ndim == 0 else value
                    for name, value in outputs.items()
                }
                return self._last
        if self._asked is not None:
            with self._ending_on_loss():
                self._steps.expect(self._asked)
        raise StopIteration

    def outputs(self, since: int = 0) -> Iterator[dict[str, Any]]:
        """The steps from number `since` on, as iterating gives them, to the job's end; they may be
        asked for again and again. The master keeps the outputs of the latest steps: a warning says
        how many of those that were asked for are gone, and `dropped_steps` counts them.
        """
        return self._outputs_since(_step_number(since))

    def _outputs_since(self, since: int) -> Iterator[dict[str, Any]]:
        with Handle(
            self._stub, self._address, self.job_id, None, None, self._names, self._asked, since
        ) as again:
            yield from again
            self.dropped_steps += again.dropped_steps

    def plans(self) -> CompiledPlans:
        """What the job was compiled into, verified; waits until it is. ClusterError where the
        master no longer keeps it: it does as long as outputs.
        """
        return FetchedPlans(self._stub, self._address, self.job_id).receive()

    def status(self) -> JobStatus:
        """The job as the master sees it now."""
        return describe_job(self._stub, self._address, self.job_id)

    def result(self) -> dict[str, Any]:
        """Wait for the job's end; the last step's outputs, or its error raised."""
        for _ in self:
            pass
        return self._last

    def fetch_checkpoint(self, folder: Folder) -> list[Path]:
        """Bring the checkpoint that the job has written last into a folder here: see
        `running.fetched_files.fetch_checkpoint`.
        """
        return fetch_checkpoint(self._stub, self._address, self.job_id, Path(folder))

    def timelines(self) -> tuple[Timeline, ...]:
        """What each rank did and when, once a job that was submitted with `record` has finished."""
        if not self._recorded:
            raise UsageError(
                "no timelines of this job have come",
                got=f"phase {self.phase}",
                expected="a job that has finished, submitted with record=True (`submit --record`)",
            )
        return timelines_from_bytes(self._recorded)

    def close(self) -> None:
        """Stop following the job, which runs on."""
        self._stop_watching()


class _Asked(NamedTuple):
    """A request of an open job."""

    ticket: int
    steps: int
    total: int
    """Steps of all requests up to this one."""


class RemoteSession(WatchedJob):
    """An open job: it runs the steps that it is asked for, and ends with `close`.

    After a NonFiniteError it makes no more steps, but can be saved until it is closed: see
    `Session.step`. After any other error of the job it has ended.
    """

    def __init__(
        self,
        stub: ClientStub,
        address: str,
        job_id: int,
        job: Job,
        on_phase: OnPhase | None,
        on_waiting: OnWaiting | None,
        first_step: Callable[[], int],
        programs: Programs,
        anomaly: bool = False,
    ) -> None:
        super().__init__(stub, address, job_id, on_phase, on_waiting, job.outputs)
        self.watch()
        self._job = job
        self._programs = programs
        self._anomaly = anomaly
        self._not_finite: PlanCompilerError | None = None
        """Why there are no more steps."""
        self._request_error: PlanCompilerError | None = None
        """Why the last request failed that did."""
        self._asked = 0
        """Steps, in all requests so far."""
        self._step_stream = StepStream(stub, address, job_id)
        self._pace = Pace(job)
        self.rates = SessionRates(job, first_step)
        """The learning rates of its steps."""
        self._closed = False
        try:
            while self.phase is not JobPhase.RUNNING:
                if self._next_event() is None:
                    raise ClusterError("the job ended before its first step")
        except BaseException:
            self._stop_watching()
            raise

    @property
    def lr(self) -> float | tuple[float, ...]:
        """See `Session.lr`."""
        return self.rates.lr

    @lr.setter
    def lr(self, rate: Rate | Sequence[Rate]) -> None:
        self.rates.lr = rate

    def step(self, /, **feeds: Any) -> dict[str, Array]:
        """Run one step with every input fed by name as a whole global array; its outputs."""
        arrays = check_feeds(self._job, feeds)
        outputs = list(self._made(1, arrays))
        return outputs[-1] if outputs else {}

    def run(self, steps: int) -> Iterator[dict[str, Array]]:
        """Run steps that need no feeds, a second or two ahead of the reader; their outputs.

        If a value is not finite, the NonFiniteError is raised when the ranks have completed the
        steps that they were ahead, so that all are at the same step.
        """
        steps = step_count(steps)
        check_feeds(self._job, {})
        asked: deque[_Asked] = deque()
        begin = time.perf_counter()
        while steps or asked:
            # The ranks have the next request before they have done the one that is read. How long
            # a step takes must be known before: the first request of a session is alone.
            while steps and len(asked) < (_REQUESTS if self._pace.is_known else 1):
                count = 1 if self._anomaly else min(self._pace.steps, steps)
                asked.append(self._ask_steps(count, {}))
                steps -= count
            request = asked.popleft()
            yield from self._steps_until(request)
            now = time.perf_counter()
            self._pace.took(request.steps, now - begin)
            begin = now

    def run_together(self, steps: int) -> Iterator[dict[str, Array]]:
        """Run steps that need no feeds, asked for in one request: see `run`."""
        if self._anomaly:  # variables are kept as they were before each
            for _ in range(steps):
                yield from self._made(1, {})
        elif steps:
            yield from self._made(steps, {})

    def evaluate(self, program: str, /, **feeds: Any) -> Outputs:
        """The outputs of another program (`client.open(job, programs={name: program})`) with the
        values that the variables have now, and these feeds: see `Session.evaluate`.

        Its ranks are threads of this process. The variables are fetched from the cluster for it, if
        steps were made since the last time: all of them, so they must fit this host's memory.
        """
        self._check_open()
        return self._programs.evaluate(
            program, feeds, self._asked, lambda names: whole_boxes(self.variables(), names)
        )

    def save(self, directory: Folder, *, wait: bool = True) -> None:
        """Write a checkpoint into a folder on the workers' host.

        Without `wait` it returns when the ranks have copied the values; they write the copies while
        steps go on. The next save and `close` wait for that; the job fails if writing fails.
        """
        request = Sent()(
            pb.SaveRequest(job_id=self.job_id, directory=_folder(directory), background=not wait)
        )
        with self._requesting():
            reply = call(self._address, self._stub.Save, request, timeout=_TRANSFER_SECONDS)
        for _ in self._steps_until(_Asked(reply.ticket, 0, self._asked)):
            pass

    def variables(self) -> dict[str, Array]:
        """Parameters and optimizer state as global arrays by name."""
        self._check_open()
        try:
            chunks = self._stub.FetchVariables(job_request(self.job_id), timeout=_TRANSFER_SECONDS)
            return assemble(transfers(chunks, "a rank's variables", MAX_ARRAYS_BYTES))
        except grpc.RpcError as error:
            raise self._first_cause(call_error(error, self._address)) from error

    def close(self) -> None:
        """End the job and release its ranks. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._error is None and not self.phase.is_end:
                call(self._address, self._stub.Finish, job_request(self.job_id))
                while self._next_event() is not None:
                    pass
        except NonFiniteError:  # the caller knows
            if self._not_finite is None:
                raise
        except PlanCompilerError as error:
            if self._request_error is None or error.report != self._request_error.report:
                raise
        finally:
            self._programs.close()
            self._stop_watching()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:  # what the block raised matters, not what closing says about it
            self._closed = True
            self._programs.close()
            self._stop_watching()
        self.close()

    def _made(self, steps: int, feeds: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
        yield from self._steps_until(self._ask_steps(steps, feeds))

    def _ask_steps(self, steps: int, feeds: Mapping[str, Array]) -> _Asked:
        if self._not_finite is not None:
            raise self._not_finite
        arrays = {**feeds, **rates_to_feeds(self.rates.of_next(steps))}
        chunks = to_chunks(arrays_to_bytes(arrays)) if arrays else []
        with self._requesting():
            ticket = self._step_stream.ask(steps, chunks)
        self._asked += steps
        self.rates.advance(steps)
        return _Asked(ticket, steps, self._asked)

    def _steps_until(self, request: _Asked) -> Iterator[dict[str, Array]]:
        """Outputs of a request's steps, until it is done.

        Outputs of earlier requests whose reader has stopped early are dropped.
        """
        while (event := self._next_event()) is not None:
            if isinstance(event, StepDone):
                outputs = self._take_outputs(event.step)
                if self._steps.count > request.total - request.steps:
                    yield outputs
            elif isinstance(event, TicketDone) and event.ticket == request.ticket:
                with self._ending_on_loss():
                    if self._not_finite is None:
                        self._steps.expect(request.total)
                return
            elif isinstance(event, StepsFailed):
                if self._not_finite is None:
                    self._not_finite = PlanCompilerError.from_report(event.error)
                if event.ticket == request.ticket:
                    raise self._not_finite
        raise ClusterError("the job ended before it did what was asked")

    @contextmanager
    def _requesting(self) -> Iterator[None]:
        """An error within the block is one of a request, unless it has another cause."""
        self._check_open()
        try:
            yield
        except PlanCompilerError as error:
            self._request_error = self._first_cause(error)
            raise self._request_error from error

    def _stop_watching(self) -> None:
        self._step_stream.close()
        super()._stop_watching()

    def _first_cause(self, error: PlanCompilerError) -> PlanCompilerError:
        """The job's error, if the job's end made a request fail."""
        return error if self._error is None else self._error

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise UsageError(
                "the session is closed",
                expected="a session that is open",
                hint="open a new one with Client.open(job)",
            )


def _step_of(restore: Folder | None) -> int:
    """The number of the first step after a checkpoint."""
    return 0 if restore is None else int(read_index(folder_path("restore", restore))["step"])


def _restored(job: Job, restore: Folder | None, strict: bool) -> tuple[str, ...]:
    """See `JobRequest.restored`. Never empty where it counts: "" is the name of no variable."""
    return ("", *job.variables) if strict and restore is not None else ()


def _folder(directory: Folder | None) -> str:
    return "" if directory is None else str(folder_path("the folder of a checkpoint", directory))


def _request(
    steps: int,
    ranks: int | None,
    priority: int,
    mode: str | None,
    deadline: float | None = None,
    **others: Any,
) -> JobRequest:
    """What a client asks for: what every job has, and other fields of the request."""
    return JobRequest(
        steps,
        mode or "",
        ranks=_ranks(ranks),
        priority=whole_number("the priority", priority),
        deadline=0.0 if deadline is None else positive_number("the deadline", deadline),
        **others,
    )


def _ranks(ranks: int | None) -> int:
    if ranks is None:
        return 0
    count = whole_number("the number of ranks", ranks)
    if count < 1:
        raise UsageError("the number of ranks is not positive", got=ranks, expected="1 or more")
    return count


def _step_number(since: int) -> int:
    step = whole_number("the first step to read", since)
    if not 0 <= step < 1 << 40:
        raise UsageError("the first step to read is not one", got=since, expected="0 or more")
    return step
