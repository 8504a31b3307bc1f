"""What happens to a worker, and what its state machine asks the I/O shell to do about it."""

from __future__ import annotations

from dataclasses import dataclass

from plancompiler.cluster.messages import (
    Collect,
    Compile,
    MasterMessage,
    Prepare,
    Run,
    Save,
    SendFiles,
    SendPlan,
    SendTimeline,
    WorkerMessage,
    WriteIndex,
    Written,
)
from plancompiler.errors import ErrorReport

# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FromMaster:
    """A message came from the master."""

    message: MasterMessage


@dataclass(frozen=True, slots=True)
class MasterGone:
    """The connection to the master ended."""

    error: ErrorReport


@dataclass(frozen=True, slots=True)
class WorkDone:
    """The work at hand is done; `reply` says what came of it."""

    job_id: int
    reply: WorkerMessage


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """The work at hand failed."""

    job_id: int
    error: ErrorReport


@dataclass(frozen=True, slots=True)
class SaveWritten:
    """What was to be written beside other work is on disk."""

    job_id: int
    reply: Written


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """What was to be written beside other work could not be."""

    job_id: int
    error: ErrorReport


@dataclass(frozen=True, slots=True)
class Closed:
    """Nothing is left of a job."""

    job_id: int


@dataclass(frozen=True, slots=True)
class WorkerTick:
    """Time passed; the process has used so much CPU time."""

    cpu_seconds: float = 0.0
    gets_on: bool = False
    """Whether it has got on without its processor since the last tick."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Whoever started the worker wants it to end."""


WorkerEvent = (
    FromMaster
    | MasterGone
    | WorkDone
    | WorkFailed
    | SaveWritten
    | SaveFailed
    | Closed
    | WorkerTick
    | StopAsked
)


# --- actions --------------------------------------------------------------------------------------

Work = Compile | Prepare | Run | Save | WriteIndex | Collect | SendTimeline | SendPlan
"""Commands of the master that take time."""


@dataclass(frozen=True, slots=True)
class TellMaster:
    """Tell the master."""

    message: WorkerMessage


@dataclass(frozen=True, slots=True)
class Start:
    """Begin work; WorkDone or WorkFailed follows."""

    work: Work


@dataclass(frozen=True, slots=True)
class StartBeside:
    """Do something beside other work. Of the index of a checkpoint, SaveWritten or SaveFailed
    follows, unless the job is let go of first; of files, whoever asked for them hears all.
    """

    order: WriteIndex | SendFiles


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Make the work at hand end soon; WorkDone or WorkFailed still follows."""

    error: ErrorReport


@dataclass(frozen=True, slots=True)
class Close:
    """Let go of a job's plan, buffers and connections; Closed follows."""

    job_id: int


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Connect to the master again, as soon as it is there."""


@dataclass(frozen=True, slots=True)
class Exit:
    """The worker's life is over; `error` says why where it was not asked for."""

    error: ErrorReport | None


WorkerAction = TellMaster | Start | StartBeside | Interrupt | Close | Reconnect | Exit
