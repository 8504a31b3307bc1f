"""The worker as a pure state machine: it has one job or none, and does one thing at a time for it.

Whatever ends a job (its finish, a failure here or elsewhere, a lost master, a stop), the worker
first lets the work at hand end, then lets go of the job, and only then tells the master that it is
idle, or exits.
"""

from __future__ import annotations

from plancompiler.cluster.messages import (
    Abort,
    Compile,
    Failed,
    Finish,
    Heartbeat,
    Idle,
    MasterMessage,
    Refused,
    Registered,
    SendFiles,
    WorkerMessage,
    WriteIndex,
)
from plancompiler.errors import (
    AbortedError,
    ClusterError,
    ErrorReport,
    MasterUnreachableError,
)
from plancompiler.limits import time_limits
from plancompiler.worker.events import (
    Close,
    Closed,
    Exit,
    FromMaster,
    Interrupt,
    MasterGone,
    Reconnect,
    SaveFailed,
    SaveWritten,
    Start,
    StartBeside,
    StopAsked,
    TellMaster,
    Work,
    WorkDone,
    WorkerAction,
    WorkerEvent,
    WorkerTick,
    WorkFailed,
)

_BEATS_PER_SILENCE = 5
"""Heartbeats in the time after which silence means death."""
MASTER_SILENCES = 3
"""A worker waits so much longer for its master, whose interpreter may be held while it compiles; a
master that is stopped or gone ends the connection.
"""
LEAVE_SECONDS = time_limits.WORKER_LEAVE
"""A worker that must end waits so long for its work at hand, which may never do so."""


class WorkerState:
    """All that a worker knows, apart from its plan."""

    def __init__(
        self, now: float, silence_seconds: float, grace: float = time_limits.MASTER_GRACE
    ) -> None:
        self.slot: int | None = None
        """Its place in the cluster, once registered."""
        self.rank: int | None = None
        """Its rank in the job that it has."""
        self.job_id: int | None = None
        self._silence = silence_seconds
        self._grace = grace
        self._is_durable = False
        """Whether the master may be started again where it is lost."""
        self._away_until: float | None = None
        """When it is given up that has been lost."""
        self.received = 0
        """How many commands have come."""
        self._last_heard = now
        self._last_beat = now
        self._gets_on = False
        """Whether the process has got on without its processor since the last heartbeat."""
        self._working = False
        self._ending = False
        """The job is over; it is let go of when the work at hand has ended."""
        self._closing = False
        self._exit: Exit | None = None
        """The worker ends when it has no job any longer."""
        self._leave_at = 0.0
        """When it ends in any case."""
        self._actions: list[WorkerAction] = []

    def handle(self, event: WorkerEvent, now: float) -> list[WorkerAction]:
        """What must be done about an event."""
        self._actions = []
        match event:
            case FromMaster(message):
                self._last_heard = now
                self._from_master(message, now)
            case MasterGone(error):
                self._lose_master(error, now)
            case WorkDone(job_id, reply) if job_id == self.job_id:
                self._working = False
                if not self._ending:
                    self._send(reply)
            case WorkFailed(job_id, error) if job_id == self.job_id:
                self._working = False
                # Of an aborted job the master may still look for the first cause.
                if not self._ending or error.code != AbortedError.code:
                    self._send(Failed(job_id, error))
                self._ending = True
            case SaveWritten(job_id, reply) if job_id == self.job_id:
                if not self._ending:
                    self._send(reply)
            case SaveFailed(job_id, error) if job_id == self.job_id:
                # The master ends the job, and with it the work at hand.
                if not self._ending:
                    self._send(Failed(job_id, error))
            case Closed(job_id) if job_id == self.job_id:
                self.job_id = None
                self._ending = self._closing = False
                self._send(Idle(job_id))
            case StopAsked():
                self._leave(Exit(None), now)
            case WorkerTick():
                self._tick(event, now)
        self._move_on()
        return self._actions

    def _from_master(self, message: MasterMessage, now: float) -> None:
        if not isinstance(message, (Registered, Refused, Heartbeat, SendFiles)):
            self.received += 1
        match message:
            case Registered(slot, _, silence):
                self.slot = slot
                self._silence = silence
                self._is_durable = message.is_durable
                self._away_until = None
            case Refused(error):
                self._leave(Exit(error), now)
            case Heartbeat():
                pass
            case Finish(job_id):
                error = ClusterError("the master finished a job in the middle of its work").report
                self._end(job_id, error)
            case Abort(job_id, error):
                self._end(job_id, error)
            case WriteIndex(background=True) if message.job_id == self.job_id:
                if not self._ending:
                    self._actions.append(StartBeside(message))
            case SendFiles():
                self._actions.append(StartBeside(message))
            case _:
                self._start(message)

    def _start(self, work: Work) -> None:
        if self._exit is not None:
            return
        if self.job_id is None:
            self.job_id = work.job_id
        if isinstance(work, Compile):
            self.rank = work.rank
        if work.job_id != self.job_id or self._working:
            error = ClusterError(
                "the master asked for work while this worker has other work",
                rank=self.rank,
                got=f"{type(work).__name__} for job {work.job_id}",
                expected=f"commands for job {self.job_id} one after another",
            )
            self._send(Failed(work.job_id, error.report))
            return
        if not self._ending:
            self._working = True
            self._actions.append(Start(work))

    def _end(self, job_id: int, error: ErrorReport) -> None:
        """The master is done with a job."""
        if job_id != self.job_id:
            self._send(Idle(job_id))
            return
        if not self._ending and self._working:
            self._actions.append(Interrupt(error))
        self._ending = True

    def _lose_master(self, error: ErrorReport, now: float) -> None:
        """Wait for a master that can be started again; the job at hand runs on meanwhile."""
        if not self._is_durable or self._exit is not None:
            self._leave(Exit(error), now)
        else:
            if self._away_until is None:  # else it was lost again before it had answered
                self._away_until = now + self._grace
            self._actions.append(Reconnect())

    def _leave(self, leaving: Exit, now: float) -> None:
        if self._exit is not None:
            return
        self._exit = leaving
        self._leave_at = now + LEAVE_SECONDS
        if self.job_id is not None:
            error = leaving.error or AbortedError("the worker was stopped", rank=self.rank).report
            self._end(self.job_id, error)

    def _move_on(self) -> None:
        if self.job_id is not None:
            if self._ending and not self._working and not self._closing:
                self._closing = True
                self._actions.append(Close(self.job_id))
        elif self._exit is not None:
            self._actions.append(self._exit)

    def _tick(self, tick: WorkerTick, now: float) -> None:
        self._gets_on |= tick.gets_on
        if now - self._last_beat >= self._silence / _BEATS_PER_SILENCE:
            self._last_beat = now
            self._send(Heartbeat(False, tick.cpu_seconds, self._gets_on, self.received))
            self._gets_on = False
        patience = MASTER_SILENCES * self._silence
        if self._away_until is not None:
            if now > self._away_until:
                error = MasterUnreachableError(
                    "the master was lost and did not come back",
                    got=f"no master for {self._grace:g} s",
                    hint="start it again on its journal; --master-grace waits longer",
                )
                self._leave(Exit(error.report), now)
        elif now - self._last_heard > patience:
            error = MasterUnreachableError(
                "the master was lost", got=f"nothing heard for {patience:g} s"
            )
            self._leave(Exit(error.report), now)
        if self._exit is not None and self.job_id is not None and now >= self._leave_at:
            self._actions.append(self._exit)

    def _send(self, message: WorkerMessage) -> None:
        if self._exit is None or isinstance(message, (Failed, Idle)):
            self._actions.append(TellMaster(message))
