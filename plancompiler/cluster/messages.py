"""The messages of client, master and workers, as frozen data.

`cluster.serde` gives these their wire form; the state machines of master and worker know only
these.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from plancompiler.errors import ErrorReport
from plancompiler.plan.digest import CrossRankFact


class JobPhase(enum.Enum):
    """Where a job is. The last three are ends."""

    QUEUED = "queued"
    COMPILING = "compiling"
    CHECKING = "checking"
    PREPARING = "preparing"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        return self in (JobPhase.FINISHED, JobPhase.FAILED, JobPhase.CANCELLED)

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True)
class JobRequest:
    """How a submitted job is to be run."""

    steps: int
    """Steps of the run; an open job is asked for each step instead."""
    mode: str = ""
    """Compile mode; empty for the master's default."""
    open: bool = False
    """The client asks for each step, and the job ends when the client goes."""
    restore: str = ""
    """Checkpoint directory to start from, on the workers' host."""
    save: str = ""
    """Checkpoint directory to write at the end, on the workers' host."""
    cache: bool = True
    """Whether plans may come from the plan caches of master and workers, and go there."""
    save_every: int = 0
    """Steps between checkpoints in `save` before the end; 0: none."""
    deadline: float = 0.0
    """Seconds that a rank may make no progress while others wait for it; 0: the workers' own."""
    record: bool = False
    """Whether workers record timelines, for the client at the end. Not of an open job."""
    anomaly: bool = False
    """Whether every op is checked, so that an error names the first with a non-finite value."""
    restored: tuple[str, ...] = ()
    """The job's variables, where the checkpoint to start from may hold no others."""
    ranks: int = 0
    """How many ranks the job runs on; 0: as many as its placements use."""
    priority: int = 0
    """Of jobs that wait, those with a higher one come first."""
    name: str = ""
    """What to call the job; empty: as it was traced."""
    compile_only: bool = False
    """Whether plans are made and kept, and nothing is executed."""
    key: str = ""
    """Drawn by the client: a job with the same one, of the same owner, is the same submission."""


# --- worker to master -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """A worker offers itself."""

    slot: int | None
    """Its place in the cluster: the rank that it is in jobs over all workers. None for any."""
    host: str
    device: str
    version: str
    host_id: str = ""
    """Workers with the same one share memory; empty: those of the same `host` do."""
    peer_address: str = ""
    """HOST:PORT at which workers of other hosts reach this one; empty where they need none."""
    network: str = ""
    """Workers with the same one reach each other's loopback addresses."""
    is_loopback: bool = False
    """Whether `peer_address` is one."""
    deadline: float = 0.0
    """Seconds that a rank may make no progress, in jobs that do not set it; 0: the default."""
    token: bytes = b""
    """Of a worker that comes back to a master which was started again: what it was given before."""
    received: int = 0
    """Of such a worker: how many commands it has."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The sender is alive. Goes both ways."""

    stopped: bool = False
    """Whether a signal has stopped the worker's process, as the process beside it says."""
    cpu_seconds: float = 0.0
    """CPU time that the worker's process has used."""
    gets_on: bool = False
    """Whether it makes progress without its processor: it waits for its disk, or transfers."""
    received: int = 0
    """How many messages of the other side the sender has for good; heartbeats do not count."""


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """Where a worker holds bytes in memory that other workers of its host need too."""

    process: int
    descriptor: int
    """Under which that process has them open."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A rank has its slice or plan."""

    job_id: int
    copy: LocalCopy | None = None
    """For the other workers of its host; None where it has none to offer."""


@dataclass(frozen=True, slots=True)
class RankCompiled:
    """A rank has its plan."""

    job_id: int
    digest: str
    """Of the plan's text."""
    reports: bool
    """Whether this rank has outputs to report after each step."""
    facts: tuple[CrossRankFact, ...]
    cached: bool = False
    """Whether the rank compiled nothing."""
    kernels: str = ""
    """Its numeric kernels (`numeric_kernels`); empty for a rank without tasks."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A rank has its buffers and its connections to other ranks."""

    job_id: int


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a rank reports after a step."""

    job_id: int
    step: int
    arrays: bytes
    """`arrays_to_bytes` of the outputs by name."""


@dataclass(frozen=True, slots=True)
class TimelineRecorded:
    """What a rank recorded of a job, as it was asked."""

    job_id: int
    timeline: bytes
    """`timeline_to_bytes` of it, which only its reader looks into."""


@dataclass(frozen=True, slots=True)
class OperationDone:
    """A rank has done what a command asked for."""

    job_id: int
    ticket: int


@dataclass(frozen=True, slots=True)
class RunFailed:
    """In place of OperationDone: the run of an open job has ended on a rank with a value that is
    not finite, on this rank or, where the error is an AbortedError, on another one. Its variables
    can still be read.
    """

    job_id: int
    ticket: int
    error: ErrorReport


@dataclass(frozen=True, slots=True)
class Written:
    """What a save in the background asked of a rank is on disk: its shards, or the index."""

    job_id: int
    ticket: int


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that a worker printed."""

    time: float
    """Unix time, by the worker's clock."""
    stream: str
    """`stdout` or `stderr`."""
    text: str


@dataclass(frozen=True, slots=True)
class LogLines:
    """What a worker printed while it worked for a job."""

    job_id: int
    lines: tuple[LogLine, ...]
    dropped: int = 0
    """Lines before these that were too many to send."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank cannot go on."""

    job_id: int
    error: ErrorReport


@dataclass(frozen=True, slots=True)
class Idle:
    """A rank has released a job and can take the next."""

    job_id: int


WorkerMessage = (
    Register
    | Heartbeat
    | Fetched
    | RankCompiled
    | Prepared
    | Outputs
    | TimelineRecorded
    | OperationDone
    | RunFailed
    | Written
    | LogLines
    | Failed
    | Idle
)


# --- master to worker -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Registered:
    """The worker is accepted."""

    slot: int
    world_size: int
    silence_seconds: float
    """Either side counts as lost after so long a silence."""
    token: bytes
    """Names the worker in its other calls."""
    peer_key: bytes = b""
    """What all workers of the master have in common, to know each other by."""
    is_durable: bool = False
    """The master has a journal: where it is lost, wait for it to be started again."""
    received: int = 0
    """How many messages of the worker the master has."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker is not accepted, or not any longer."""

    error: ErrorReport


@dataclass(frozen=True, slots=True)
class Compile:
    """Fetch a slice or plan and make a plan of it."""

    job_id: int
    mode: str
    rank: int
    """Which rank of the job the worker is."""
    world_size: int
    """How many ranks the job has."""
    cache: bool = True
    """Whether the plan may come from the worker's plan cache, and goes there."""
    digest: bytes = b""
    """SHA-256 of the rank's slice or plan."""
    share: bool = False
    """Other workers of this host need the same bytes: keep a copy for them."""
    copy: LocalCopy | None = None
    """Where another worker of this host has the bytes; None: fetch them from the master."""
    chunk: bytes = b""
    """The bytes themselves as a serialised chunk, where they are few and no other worker has them.
    """


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a rank on another host is reached."""

    rank: int
    address: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """Allocate buffers and meet the other ranks."""

    job_id: int
    transport_token: str
    restore: str
    far: tuple[PeerAddress, ...] = ()
    """The ranks on other hosts."""
    save: str = ""
    """A checkpoint directory that must be writable."""
    deadline: float = 0.0
    """Seconds that a rank may make no progress while others wait for it; 0: the worker's own."""
    record: bool = False
    """Record a timeline."""
    open: bool = False
    """The job can be saved after a value that is not finite."""
    anomaly: bool = False
    """Check what every op makes."""
    restored: tuple[str, ...] = ()
    """The variables of all ranks, where this one is to see that the checkpoint holds no others."""


@dataclass(frozen=True, slots=True)
class Run:
    """Run steps."""

    job_id: int
    ticket: int
    steps: int
    fed: bool
    """The step has feeds."""
    feeds: bytes = b""
    """`arrays_to_bytes` of the feeds where they are small; else they are fetched by the ticket."""


@dataclass(frozen=True, slots=True)
class Save:
    """Write this rank's shards of the variables."""

    job_id: int
    ticket: int
    directory: str
    background: bool = False
    """Done when the values are copied; `Written` follows when they are on disk."""
    before: bool = False
    """As they were before a run that failed, where they were kept; else as they are."""


@dataclass(frozen=True, slots=True)
class WriteIndex:
    """All shards are written: write the checkpoint's index."""

    job_id: int
    ticket: int
    directory: str
    background: bool = False
    """Beside other work; `Written` follows."""


@dataclass(frozen=True, slots=True)
class Collect:
    """Upload this rank's shards of the variables."""

    job_id: int
    ticket: int
    before: bool = False
    """See `Save`."""


@dataclass(frozen=True, slots=True)
class SendTimeline:
    """Send what was recorded so far."""

    job_id: int
    ticket: int


@dataclass(frozen=True, slots=True)
class SendPlan:
    """Upload this rank's plan."""

    job_id: int
    ticket: int


@dataclass(frozen=True, slots=True)
class SendFiles:
    """Upload the files of a checkpoint, beside whatever else the worker does."""

    ticket: int
    directory: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is over: release it."""

    job_id: int


@dataclass(frozen=True, slots=True)
class Abort:
    """The job is over before its end: stop and release it."""

    job_id: int
    error: ErrorReport


MasterMessage = (
    Registered
    | Refused
    | Heartbeat
    | Compile
    | Prepare
    | Run
    | Save
    | WriteIndex
    | Collect
    | SendTimeline
    | SendPlan
    | SendFiles
    | Finish
    | Abort
)


MISSING_SHOWN = 64


# --- master to client -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    """A job entered a phase."""

    phase: JobPhase
    seconds: float
    """Since its submission."""
    error: ErrorReport | None = None
    """Why it failed or was cancelled."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job cannot begin, because ranks have no worker."""

    ranks: tuple[int, ...]
    """The first of them, at most `MISSING_SHOWN`."""
    count: int
    """Of all of them."""
    seconds: float
    """Since its submission."""
    stopped: tuple[str, ...] = ()
    """Which workers are stopped that would come, in words."""


@dataclass(frozen=True, slots=True)
class CompileFinished:
    """All ranks have plans, and these agree."""

    digest: str
    seconds: float
    """Since the job's turn came."""
    cached: bool = False
    """Whether nobody compiled anything."""


@dataclass(frozen=True, slots=True)
class Shipped:
    """So many ranks have their slice or plan."""

    ranks: int
    world_size: int
    sent_bytes: int = 0
    """What the master has sent for this job."""


@dataclass(frozen=True, slots=True)
class RankOutputs:
    """One rank's outputs of one step."""

    step: int
    rank: int
    arrays: bytes


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """What one rank recorded, as `TimelineRecorded` has it."""

    rank: int
    timeline: bytes


@dataclass(frozen=True, slots=True)
class StepDone:
    """All ranks' outputs of a step were sent."""

    step: int


@dataclass(frozen=True, slots=True)
class TicketDone:
    """An operation that the client asked for is done on all ranks."""

    ticket: int


@dataclass(frozen=True, slots=True)
class StepsFailed:
    """In place of TicketDone: a value of the steps that the client asked for is not finite. The
    job takes no more steps, and can still be saved.
    """

    ticket: int
    error: ErrorReport


@dataclass(frozen=True, slots=True)
class StepsDropped:
    """The reader was too slow: the outputs of so many steps are gone."""

    count: int


@dataclass(frozen=True, slots=True)
class StepsSkipped:
    """So many steps came before the one from which the reader wants them."""

    count: int


JobEvent = (
    PhaseChanged
    | Waiting
    | CompileFinished
    | Shipped
    | RankOutputs
    | RankTimeline
    | StepDone
    | TicketDone
    | StepsFailed
    | StepsDropped
    | StepsSkipped
)


@dataclass(frozen=True, slots=True)
class RankLine:
    """A line of a job's log, or how many are missing at this place."""

    rank: int
    time: float
    """Unix time, by the worker's clock."""
    stream: str
    """`stdout` or `stderr`; empty where lines are missing."""
    text: str
    dropped: int = 0
    """So many lines of this rank were too many to keep."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One registered worker."""

    slot: int
    host: str
    device: str
    version: str
    job_id: int
    """The job it works on; 0 while idle."""
    rank: int = 0
    """Which rank of the job it is."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One job."""

    job_id: int
    name: str
    phase: JobPhase
    seconds: float
    """From its submission to its end, or until now."""
    error: ErrorReport | None
    fetched_ranks: int = 0
    """Ranks that have their slice or plan."""
    sent_bytes: int = 0
    """What the master has sent of slices, plans and feeds."""
    queued_seconds: float = 0.0
    """The part of `seconds` before its turn came."""
    ranks: int = 0
    """How many it has."""
    priority: int = 0
    """See `JobRequest`."""
    steps: int = 0
    """It was asked to do; 0 of an open job."""
    done_steps: int = 0
    """Whose outputs have all come; a job without outputs says nothing of its steps."""
    outputs: tuple[str, ...] = ()
    """Of each step, by name."""
    owner: str = ""
    """Who submitted it."""
    open: bool = False
    """Whether its client asks for each step."""
    is_durable: bool = False
    """Whether it outlives its master, which has a journal."""


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """A master, its workers and its latest jobs."""

    version: str
    world_size: int
    workers: tuple[WorkerStatus, ...]
    jobs: tuple[JobStatus, ...]
