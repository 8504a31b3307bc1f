"""A job of a master as its client sees it: its stream of events, and calls about it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc

from plancompiler.cluster.channel import (
    CALL_SECONDS,
    call_error,
)
from plancompiler.cluster.checked import Received, Sent
from plancompiler.cluster.chunks import (
    Array,
    arrays_from_bytes,
)
from plancompiler.cluster.codec import decode
from plancompiler.cluster.messages import (
    CompileFinished,
    JobEvent,
    JobPhase,
    JobStatus,
    PhaseChanged,
    RankLine,
    RankOutputs,
    RankTimeline,
    StepDone,
    StepsDropped,
    StepsSkipped,
    Waiting,
)
from plancompiler.cluster.serde import JOB_EVENTS, Reader
from plancompiler.errors import (
    ClusterError,
    MasterUnreachableError,
    PlanCompilerError,
)
from plancompiler.ir.arguments import whole_number
from plancompiler.ir.closing import Closing
from plancompiler.limits import time_limits
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.proto.cluster_pb2_grpc import ClientStub
from plancompiler.running.job_log import read_log
from plancompiler.running.step_count import StepCount

OnPhase = Callable[[JobPhase, float], None]
"""Called with each phase that a job enters, and the seconds since its submission."""
OnWaiting = Callable[[Waiting], None]
"""Called with the ranks that a job waits for: at once, and then every few seconds."""

_REPEATED = (PhaseChanged, CompileFinished, RankTimeline)
_RECONNECT_SECONDS = 0.2
"""Between two attempts to reach a master that was lost."""

_log = logging.getLogger(__name__)


class WatchedJob(Closing):
    """A job seen through its stream of events. `names` are the outputs of its steps."""

    def __init__(
        self,
        stub: ClientStub,
        address: str,
        job_id: int,
        on_phase: OnPhase | None,
        on_waiting: OnWaiting | None,
        names: Collection[str],
        *,
        since: int = 0,
        beside: bool = False,
    ) -> None:
        """Of steps before `since` only the number is heard. An open job ends when it is watched no
        longer, unless that was `beside` whoever steps it.
        """
        self.job_id = job_id
        self.phase = JobPhase.QUEUED
        self.digest: str | None = None
        """One hash over the text form of all plans, once they are compiled."""
        self.compile_seconds: float | None = None
        """From the job's turn to checked plans on all ranks."""
        self.queued_seconds: float | None = None
        """From the submission to the job's turn, once that has come."""
        self.missing_ranks: tuple[int, ...] = ()
        """Ranks that no worker has come for, as last heard, while the job waits for them; of very
        many the first ones.
        """
        self.cached: bool | None = None
        """Whether all plans came from plan caches, once they are there."""
        self.dropped_steps = 0
        """Steps whose outputs the master no longer had when they were asked for."""
        self._stub = stub
        self._address = address
        self._on_phase = on_phase
        self._on_waiting = on_waiting
        self._error: PlanCompilerError | None = None
        self._outputs: dict[int, dict[str, Array]] = {}
        """Step -> outputs of the ranks heard so far."""
        self._recorded: list[bytes] = []
        """Timelines of ranks."""
        self._reader = Reader(JOB_EVENTS)
        self._received = Received("the master")
        self._unread: deque[pb.JobEvent] = deque()
        """Events that came together with the latest one."""
        self._names = tuple(names)
        self._steps = StepCount(names)
        self._watched = pb.JobRequest(job_id=job_id, since=since, beside=beside)
        self._stream: Any = None
        """Of events, once it is watched."""
        self.sign_in: Callable[[], None] | None = None
        """Signs in at a master that was started again; None where that would not know the job."""
        self._are_counted = False
        """Whether the steps before those that the stream begins with were counted as they came."""
        self._heard = 0
        """Events that a master which was started again repeats,"""
        self._repeated = 0
        """and how many of them it has yet to repeat."""

    def watch(self) -> None:
        """Begin to hear of the job; the first look for an event does it too."""
        if self._stream is None:
            self._stream = self._stub.Watch(Sent()(self._watched))

    def _next_event(self) -> JobEvent | None:
        """The next event; None when the job has finished. Raises the job's error."""
        while True:
            if self._error is not None:
                raise self._error
            if self.phase.is_end:
                return None
            event = self._read()
            if isinstance(event, _REPEATED):
                if self._repeated:
                    self._repeated -= 1
                    continue
                self._heard += 1
            if isinstance(event, PhaseChanged):
                self._entered(event)
            elif isinstance(event, Waiting):
                self.missing_ranks = event.ranks
                if self._on_waiting is not None:
                    self._on_waiting(event)
                continue
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
            elif isinstance(event, StepsSkipped):
                if not self._are_counted:
                    self._steps.passed(event.count)
                continue
            elif isinstance(event, (StepDone, StepsDropped)):
                self._count(event)
            return event

    def _count(self, event: StepDone | StepsDropped) -> None:
        if isinstance(event, StepsDropped):
            _log.warning("outputs of %d steps were not read in time", event.count)
            self.dropped_steps += event.count
            self._steps.passed(event.count)
            return
        with self._ending_on_loss():
            self._steps.came(event.step, self._outputs.get(event.step, ()))

    @contextmanager
    def _ending_on_loss(self) -> Iterator[None]:
        """An error within the block is the job's, as far as it can be seen from here."""
        try:
            yield
        except PlanCompilerError as error:
            self._stream.cancel()
            self._error = error
            raise

    def _read(self) -> JobEvent:
        while True:
            with self._ending_on_loss():
                while self._unread:
                    event = self._reader.read(self._unread.popleft())
                    if event is not None:
                        return event
            self.watch()
            try:
                message = next(self._stream, None)
            except grpc.RpcError as failure:
                error = call_error(failure, self._address)
                if isinstance(error, MasterUnreachableError) and self._rejoin():
                    continue
                self._error = error
                raise error from failure
            with self._ending_on_loss():
                if message is None:
                    raise ClusterError("the master went away before the job ended")
                self._unread.extend(self._received(message).events)

    def _rejoin(self) -> bool:
        """Wait for a lost master to be started again, and go on where its stream broke off; whether
        that can be.
        """
        if self.sign_in is None or not await_restart(self.sign_in):
            return False
        if self._steps.next is not None:
            self._watched.since = self._steps.next
            self._are_counted = True
        self._outputs.clear()
        self._reader, self._received = Reader(JOB_EVENTS), Received("the master")
        self._repeated, self._stream = self._heard, None
        return True

    def _entered(self, event: PhaseChanged) -> None:
        self.phase = event.phase
        self.missing_ranks = ()
        if event.phase is JobPhase.COMPILING:
            self.queued_seconds = event.seconds
        if event.error is not None:
            self._error = PlanCompilerError.from_report(event.error)
        if self._on_phase is not None:
            self._on_phase(event.phase, event.seconds)

    def _take_outputs(self, step: int) -> dict[str, Array]:
        outputs = self._outputs.pop(step, {})
        for older in [each for each in self._outputs if each < step]:
            del self._outputs[older]
        # In the job's order, and not that in which its ranks have come.
        return {name: outputs[name] for name in self._names if name in outputs} | outputs

    def cancel(self) -> bool:
        """Stop the job; False where it had already ended."""
        return cancel_job(self._stub, self._address, self.job_id)

    def give_up(self, error: BaseException) -> None:
        """Stop the job because of an error of who follows it; fails in nothing itself. A master
        that could not be reached is not asked: it would be waited for once more.
        """
        if not isinstance(error, MasterUnreachableError):
            with suppress(PlanCompilerError):
                self.cancel()

    def logs(self, rank: int | None = None, *, follow: bool = False) -> Iterator[RankLine]:
        """What the job's ranks printed: see `read_log`."""
        return read_log(self._stub, self._address, self.job_id, rank, follow)

    def _stop_watching(self) -> None:
        if self._stream is not None:
            self._stream.cancel()


def await_restart(sign_in: Callable[[], None]) -> bool:
    """Wait for a lost master to be started again; whether it was."""
    until = time.monotonic() + time_limits.MASTER_GRACE
    while time.monotonic() < until:
        time.sleep(_RECONNECT_SECONDS)  # nobody tells when a master is started again
        with suppress(PlanCompilerError):
            sign_in()
            return True
    return False


def call(
    address: str, method: Callable[..., Any], request: object, timeout: float = CALL_SECONDS
) -> Any:
    """One call to the master, within a deadline."""
    try:
        reply = method(request, timeout=timeout)
    except grpc.RpcError as error:
        raise call_error(error, address) from error
    return Received("the master")(reply)


def job_request(job_id: int) -> pb.JobRequest:
    return Sent()(pb.JobRequest(job_id=job_id))


def describe_job(stub: ClientStub, address: str, job_id: int) -> JobStatus:
    """A job as the master sees it now."""
    if not 0 < whole_number("the id of a job", job_id) < 1 << 63:
        raise ClusterError("no job has this id", got=job_id, expected="1 or more")
    return decode(JobStatus, call(address, stub.Describe, job_request(job_id)).job)


def cancel_job(stub: ClientStub, address: str, job_id: int) -> bool:
    reply = call(address, stub.Cancel, job_request(job_id))
    return bool(reply.cancelled)
