"""What happens to a master, and what its state machine asks the I/O shell to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plancompiler.cluster.messages import JobEvent, JobRequest, MasterMessage, WorkerMessage
from plancompiler.errors import ErrorReport
from plancompiler.limits import time_limits
from plancompiler.master.saving import Operation


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that things may take."""

    silence: float = time_limits.WORKER_SILENCE
    """A worker that says nothing for so long is lost."""
    workers: float = time_limits.WORKERS
    """The first job of the queue waits so long for its workers."""
    compiling: float = time_limits.COMPILING
    checking: float = time_limits.CHECKING
    preparing: float = time_limits.PREPARING
    """These three: unless some rank that is awaited works, and then until it does not."""
    progress: float = time_limits.PROGRESS
    """While an operation runs, some rank must report something within this, or work."""
    idle: float = time_limits.IDLE
    """An open job waits so long for the client's next request."""
    release: float = time_limits.RELEASE
    """A worker must have let go of an ended job after so long, else it is lost."""
    grace: float = time_limits.MASTER_GRACE
    """The workers of a master that was started again may take so long to come back."""
    stream: float = time_limits.STREAM
    """A stream on which its peer must say something and does not is ended after so long."""
    first_cause: float = time_limits.FIRST_CAUSE
    """A failure that looks like the consequence of another one is held back so long."""


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FromWorker:
    """A message came over a worker's connection."""

    connection: int
    message: WorkerMessage
    number: int = 0
    """Counts the worker's messages; 0 where it does not."""


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker's connection ended."""

    connection: int
    how: str = "its connection ended"


@dataclass(frozen=True, slots=True)
class WorkerBack:
    """A worker of an earlier master has come back to its slot."""

    connection: int
    slot: int


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """A client brought a job. What is wrong with it is raised to it."""

    job_id: int
    name: str
    request: JobRequest
    needs: int
    """Ranks that the job's placements use."""
    inputs: tuple[str, ...]
    """Names of the inputs that a caller must feed."""
    transport_token: str
    """Names the job's shared memory and sockets on the workers' host."""


@dataclass(frozen=True, slots=True)
class MasterCompiled:
    """The master has what the workers fetch: slices or plans."""

    job_id: int
    digests: Mapping[int, bytes]
    """Of what each rank fetches, by rank."""
    cached: bool = False
    """Whether it compiled nothing."""


@dataclass(frozen=True, slots=True)
class MasterFailed:
    """The master could not compile a job."""

    job_id: int
    error: ErrorReport


@dataclass(frozen=True, slots=True)
class Asked:
    """A client asks something of an open job."""

    operation: Operation


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """Somebody wants a job to stop."""

    job_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class MasterTick:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """The master goes away."""


MasterEvent = (
    FromWorker
    | WorkerGone
    | WorkerBack
    | JobSubmitted
    | MasterCompiled
    | MasterFailed
    | Asked
    | CancelAsked
    | MasterTick
    | Stopping
)


# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a worker a message."""

    connection: int
    """0 for one that is yet to come back."""
    message: MasterMessage
    slot: int | None = None
    """The worker's; None for one that has none."""
    place: int = 0
    """Counts the commands that the worker was given, from 1; 0 for what is no command."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """End a worker's connection, after what was told it before."""

    connection: int


@dataclass(frozen=True, slots=True)
class StartCompile:
    """Make what the workers fetch; MasterCompiled or MasterFailed follows."""

    job_id: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell whoever watches the job."""

    job_id: int
    event: JobEvent


@dataclass(frozen=True, slots=True)
class Release:
    """Nobody needs the job's bytes any longer."""

    job_id: int


MasterAction = Tell | Disconnect | StartCompile | Publish | Release
