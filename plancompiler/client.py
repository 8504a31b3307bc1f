"""`Client`: submit jobs to a master, follow them, or run them step by step."""

from __future__ import annotations

from plancompiler import blas_kernels  # noqa: F401  # before NumPy

# isort: split
import logging
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np

from plancompiler.cluster.channel import (
    CALL_SECONDS,
    TlsFiles,
    await_master,
    call_error,
    open_channel,
    software_version,
)
from plancompiler.cluster.chunks import (
    MAX_ARRAYS_BYTES,
    Array,
    arrays_from_bytes,
    arrays_to_bytes,
    to_chunks,
    transfers,
)
from plancompiler.cluster.messages import (
    ClusterStatus,
    CompileFinished,
    JobEvent,
    JobRequest,
    Phase,
    PhaseChanged,
    RankOutputs,
    RankTimeline,
    StepDone,
    StepsDropped,
    TicketDone,
)
from plancompiler.cluster.serde import EventReader, status_from_proto
from plancompiler.errors import (
    ClusterError,
    FeedError,
    PlanCompilerError,
    UsageError,
)
from plancompiler.executor.checkpoint import assemble
from plancompiler.executor.timeline import Timeline
from plancompiler.executor.trace import timelines_from_bytes
from plancompiler.frontend.trace import as_job
from plancompiler.ir import Job
from plancompiler.ir.arguments import (
    folder_path,
    positive_number,
    save_interval,
    whole_number,
)
from plancompiler.plan.job_serde import job_to_bytes
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.proto.cluster_pb2_grpc import ClientStub

Folder = str | PathLike[str]
OnPhase = Callable[[Phase, float], None]
"""Takes a phase that a job entered and the seconds since its submission."""

_TRANSFER_SECONDS = 600.0

_log = logging.getLogger(__name__)


class Client:
    """A connection to a master.

    `timeout` (seconds) bounds the wait for its first answer: MasterUnreachableError. Use it as a
    context manager, or close it.
    """

    def __init__(self, address: str, *, timeout: float = 10.0, tls: TlsFiles | None = None) -> None:
        self.address = address
        self._channel = open_channel(address, tls)
        try:
            await_master(self._channel, address, timeout)
        except BaseException:
            self._channel.close()
            raise
        self._stub = ClientStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    def submit(
        self,
        job: Job,
        steps: int,
        *,
        mode: str | None = None,
        restore: Folder | None = None,
        save: Folder | None = None,
        save_every: int = 0,
        cache: bool = True,
        deadline: float | None = None,
        record: bool = False,
        on_phase: OnPhase | None = None,
    ) -> Handle:
        """Queue a job that reads its own data, for `steps` steps.

        `restore` and `save` are checkpoint folders on the workers' host, to start from and to write
        at the end; with `save_every` also after each so many steps, while steps go on. Without
        `cache` everything is compiled, and kept nowhere. `deadline` (seconds) is how long a rank
        may stand still while others wait for it, by default as the workers were told. `record`
        records for `Handle.timelines`. Raises FeedError for a job with inputs, RankError for one
        that does not fit the cluster. The job goes on if the client goes away.
        """
        steps = whole_number("the number of steps", steps)
        if steps < 0:
            raise UsageError("the number of steps is negative", got=steps)
        every = save_interval(save_every, save)
        job = as_job(job)
        if job.inputs:
            raise FeedError(
                f"job {job.name!r} has inputs that nobody would feed",
                got=", ".join(map(repr, job.inputs)),
                hint="read the data inside the job with pc.data, or run it step by step with "
                "Client.open or pc.run",
            )
        request = JobRequest(
            steps,
            mode or "",
            restore=_folder(restore),
            save=_folder(save),
            cache=cache,
            save_every=every,
            deadline=_deadline(deadline),
            record=record,
        )
        job_id = self._submit(job, request)
        return Handle(self._stub, self.address, job_id, on_phase)

    def open(
        self,
        job: Job,
        *,
        mode: str | None = None,
        restore: Folder | None = None,
        cache: bool = True,
        deadline: float | None = None,
        on_phase: OnPhase | None = None,
    ) -> RemoteSession:
        """Compile a job and prepare it on all ranks, to be run step by step.

        Returns when the first step can run; raises what went wrong. The job ends with the session.
        Without `cache` everything is compiled, and kept nowhere. `deadline` as for `submit`.
        """
        job = as_job(job)
        request = JobRequest(
            0, mode or "", True, _folder(restore), cache=cache, deadline=_deadline(deadline)
        )
        job_id = self._submit(job, request)
        return RemoteSession(self._stub, self.address, job_id, job, on_phase)

    def status(self) -> ClusterStatus:
        """The master's version, its workers and its latest jobs."""
        reply = _call(self.address, self._stub.Status, pb.StatusRequest())
        return status_from_proto(reply)

    def cancel(self, job_id: int) -> bool:
        """Stop a job; False where it had already ended."""
        return _cancel(self._stub, self.address, job_id)

    def close(self) -> None:
        """Close the connection. Safe to call again."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _submit(self, job: Job, request: JobRequest) -> int:
        header = pb.SubmitHeader(
            version=software_version(),
            steps=request.steps,
            mode=request.mode,
            open=request.open,
            restore=request.restore,
            save=request.save,
            cache=request.cache,
            save_every=request.save_every,
            deadline=request.deadline,
            record=request.record,
        )
        chunks = to_chunks(job_to_bytes(job), compress=True)

        def messages() -> Iterator[pb.SubmitRequest]:
            yield pb.SubmitRequest(header=header)
            for chunk in chunks:
                yield pb.SubmitRequest(chunk=chunk)

        reply = _call(self.address, self._stub.Submit, messages(), timeout=_TRANSFER_SECONDS)
        return int(reply.job_id)


class _Watched:
    """A job seen through its stream of events."""

    def __init__(
        self, stub: ClientStub, address: str, job_id: int, on_phase: OnPhase | None
    ) -> None:
        self.job_id = job_id
        self.phase = Phase.QUEUED
        self.digest: str | None = None
        """One hash over the text form of all plans, once they are compiled."""
        self.compile_seconds: float | None = None
        """From the submission to checked plans on all ranks, queueing included."""
        self.cached: bool | None = None
        """Whether all plans came from plan caches, once they are there."""
        self._stub = stub
        self._address = address
        self._on_phase = on_phase
        self._error: PlanCompilerError | None = None
        self._outputs: dict[int, dict[str, Array]] = {}
        """Step -> outputs of the ranks heard so far."""
        self._recorded: list[bytes] = []
        """Timelines of ranks."""
        self._reader = EventReader()
        self._stream: Any = stub.Watch(pb.JobRequest(job_id=job_id))

    def _next_event(self) -> JobEvent | None:
        """The next event; None when the job has finished. Raises the job's error."""
        while True:
            if self._error is not None:
                raise self._error
            if self.phase.is_end:
                return None
            event = self._read()
            if isinstance(event, PhaseChanged):
                self._entered(event)
            elif isinstance(event, CompileFinished):
                self.digest, self.compile_seconds = event.digest, event.seconds
                self.cached = event.cached
            elif isinstance(event, RankOutputs):
                outputs = self._outputs.setdefault(event.step, {})
                outputs.update(arrays_from_bytes(event.arrays))
                continue
            elif isinstance(event, RankTimeline):
                self._recorded.append(event.timeline)
                continue
            elif isinstance(event, StepsDropped):
                _log.warning("outputs of %d steps were not read in time", event.count)
            return event

    def _read(self) -> JobEvent:
        try:
            for message in self._stream:
                event = self._reader.read(message)
                if event is not None:
                    return event
        except grpc.RpcError as error:
            self._error = call_error(error, self._address)
        else:
            self._error = ClusterError("the master went away before the job ended")
        raise self._error

    def _entered(self, event: PhaseChanged) -> None:
        self.phase = event.phase
        if event.error is not None:
            self._error = PlanCompilerError.from_report(event.error)
        if self._on_phase is not None:
            self._on_phase(event.phase, event.seconds)

    def _take_outputs(self, step: int) -> dict[str, Array]:
        outputs = self._outputs.pop(step, {})
        for older in [each for each in self._outputs if each < step]:
            del self._outputs[older]
        return outputs

    def cancel(self) -> bool:
        """Stop the job; False where it had already ended."""
        return _cancel(self._stub, self._address, self.job_id)

    def _stop_watching(self) -> None:
        self._stream.cancel()


class Handle(_Watched):
    """A submitted job. Iterating gives one dict per step: `{"step": 0, "loss": 2.3, …}`.

    Scalars are floats, other outputs arrays. The iteration ends with the job, or raises its error.
    """

    def __init__(
        self, stub: ClientStub, address: str, job_id: int, on_phase: OnPhase | None
    ) -> None:
        super().__init__(stub, address, job_id, on_phase)
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
        raise StopIteration

    def result(self) -> dict[str, Any]:
        """Wait for the job's end; the last step's outputs, or its error raised."""
        for _ in self:
            pass
        return self._last

    def timelines(self) -> tuple[Timeline, ...]:
        """What each rank did and when, once a job that was submitted with `record` has finished."""
        if not self._recorded:
            raise UsageError(
                "no timelines of this job have come",
                got=f"phase {self.phase}",
                expected="a job that has finished, submitted with record=True",
            )
        return timelines_from_bytes(self._recorded)

    def close(self) -> None:
        """Follow the job no longer; it goes on."""
        self._stop_watching()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class RemoteSession(_Watched):
    """An open job: it runs the steps that it is asked for, and ends with `close`."""

    def __init__(
        self, stub: ClientStub, address: str, job_id: int, job: Job, on_phase: OnPhase | None
    ) -> None:
        super().__init__(stub, address, job_id, on_phase)
        self._job = job
        self._closed = False
        try:
            while self.phase is not Phase.RUNNING:
                if self._next_event() is None:
                    raise ClusterError("the job ended before its first step")
        except BaseException:
            self._stop_watching()
            raise

    def step(self, /, **feeds: Any) -> dict[str, Array]:
        """Run one step with every input fed by name as a whole global array; its outputs."""
        arrays = check_feeds(self._job, feeds)
        outputs = list(self._ask_steps(1, arrays))
        return outputs[-1] if outputs else {}

    def run(self, steps: int) -> Iterator[dict[str, Array]]:
        """Run steps that need no feeds, ahead of the reader; each step's outputs."""
        steps = whole_number("the number of steps", steps)
        if steps < 0:
            raise UsageError("the number of steps is negative", got=steps)
        check_feeds(self._job, {})
        if steps:
            yield from self._ask_steps(steps, {})

    def save(self, directory: Folder, *, wait: bool = True) -> None:
        """Write a checkpoint into a folder on the workers' host.

        Without `wait` it returns when the ranks have copied the values; they write them while
        steps go on. The next save and `close` wait for that; the job fails where it cannot be done.
        """
        request = pb.SaveRequest(
            job_id=self.job_id, directory=_folder(directory), background=not wait
        )
        reply = self._request(self._stub.Save, request)
        for _ in self._steps_until(reply.ticket):
            pass

    def variables(self) -> dict[str, Array]:
        """Parameters and optimizer state as global arrays by name."""
        self._check_open()
        try:
            chunks = self._stub.FetchVariables(
                pb.JobRequest(job_id=self.job_id), timeout=_TRANSFER_SECONDS
            )
            return assemble(transfers(chunks, "a rank's variables", MAX_ARRAYS_BYTES))
        except grpc.RpcError as error:
            raise self._first_cause(call_error(error, self._address)) from error

    def close(self) -> None:
        """Let the ranks go. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._error is None and not self.phase.is_end:
                _call(self._address, self._stub.Finish, pb.JobRequest(job_id=self.job_id))
                while self._next_event() is not None:
                    pass
        finally:
            self._stop_watching()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:  # what the block raised matters, not what closing says about it
            self._closed = True
            self._stop_watching()
        self.close()

    def _ask_steps(self, steps: int, arrays: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
        chunks = to_chunks(arrays_to_bytes(arrays)) if arrays else []

        def messages() -> Iterator[pb.StepRequest]:
            yield pb.StepRequest(job_id=self.job_id, steps=steps)
            for chunk in chunks:
                yield pb.StepRequest(chunk=chunk)

        reply = self._request(self._stub.Step, messages())
        yield from self._steps_until(reply.ticket)

    def _steps_until(self, ticket: int) -> Iterator[dict[str, Array]]:
        """Outputs of the steps that are done before an operation is."""
        while (event := self._next_event()) is not None:
            if isinstance(event, StepDone):
                yield self._take_outputs(event.step)
            elif isinstance(event, TicketDone) and event.ticket == ticket:
                return
        raise ClusterError("the job ended before it did what was asked")

    def _request(self, method: Callable[..., Any], request: object) -> Any:
        self._check_open()
        try:
            return _call(self._address, method, request, timeout=_TRANSFER_SECONDS)
        except PlanCompilerError as error:
            raise self._first_cause(error) from error

    def _first_cause(self, error: PlanCompilerError) -> PlanCompilerError:
        """Why the job ended where that is why a request failed."""
        return error if self._error is None else self._error

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise UsageError("the session is closed", hint="open a new one with Client.open(job)")


def check_feeds(job: Job, feeds: Mapping[str, object]) -> dict[str, Array]:
    """The feeds as arrays, one per input of the job; FeedError where one does not fit."""
    missing = sorted(job.inputs.keys() - feeds.keys())
    unknown = sorted(feeds.keys() - job.inputs.keys())
    if missing or unknown:
        parts = [f"input {name!r} is not fed" for name in missing]
        parts += [f"{name!r} is no input" for name in unknown]
        raise FeedError(
            f"the feeds do not fit job {job.name!r}: {'; '.join(parts)}",
            got=", ".join(map(repr, sorted(feeds))) or "nothing",
            expected=", ".join(map(repr, sorted(job.inputs))) or "nothing",
        )
    arrays = {}
    for name, value in job.inputs.items():
        given = feeds[name]
        dtype = value.dtype.numpy
        is_number = type(given) in (bool, int, float) and value.shape == ()
        array = np.asarray(given, dtype) if is_number else np.asarray(given)
        if array.shape != value.shape or array.dtype != dtype:
            raise FeedError(
                f"the array fed to input {name!r} has a wrong shape or dtype",
                got=f"{array.dtype}{list(array.shape)}",
                expected=f"{value.dtype}{list(value.shape)}",
                hint="feed the whole global array, in the input's dtype",
            )
        arrays[name] = array
    return arrays


def _folder(directory: Folder | None) -> str:
    return "" if directory is None else str(folder_path("the folder of a checkpoint", directory))


def _deadline(seconds: float | None) -> float:
    return 0.0 if seconds is None else positive_number("the deadline", seconds)


def _call(
    address: str, method: Callable[..., Any], request: object, timeout: float = CALL_SECONDS
) -> Any:
    """One call to the master, within a deadline."""
    try:
        return method(request, timeout=timeout)
    except grpc.RpcError as error:
        raise call_error(error, address) from error


def _cancel(stub: ClientStub, address: str, job_id: int) -> bool:
    reply = _call(address, stub.Cancel, pb.JobRequest(job_id=job_id))
    return bool(reply.cancelled)
