"""All time limits of the project, in seconds. docs/time-limits.md says of each how to change it."""

from __future__ import annotations

BUSY_SHARE = 0.03
"""Who uses less of a processor than this (no unit) stands still. Waiting itself, with its pings and
looks at peers, costs a worker less than 0.01; one that works has more, unless thirty share a core.
"""

# --- ranks that stand still -----------------------------------------------------------------------

DEADLINE = 30.0
"""A rank stands still, its processor idle, while others wait for it."""
UNSEEN_DEADLINE = 300.0
"""The same where nobody can see whether it works: on devices; and of ranks of eager programs that
are alone on their hosts and do not answer, as their work holds the interpreter.
"""
START_DEADLINE = 300.0
"""Ranks wait for each other when they start."""
STOPPED = 3.0
"""A process is stopped by a signal before its launcher or its peers name it."""
STOPPED_WORKER = 2.0
"""The same for a worker of a cluster, of which the master still has to be told."""
SHORTEST_ANSWER = 1.0
"""A rank has at least this for its answer where it stands."""
LONGEST_ANSWER = 10.0
"""And at most this."""
LONGEST_LOOK = 1.0
"""Between two looks at ranks that others wait for, at most."""

# --- connections ----------------------------------------------------------------------------------

SILENCE = 10.0
"""Master, worker or client answers no ping, or makes its first answer."""
SHORTEST_SILENCE = 2.0
"""The least that a `--timeout` means for pings."""
CALL = 30.0
"""A call to the master that is no stream."""
TRANSFER = 600.0
"""One transfer of a job, slice, plan, feeds or variables."""
BEAT = 5.0
"""The process beside a worker tells the master of it."""
SIGN = 1.0
"""Between a worker's signs of life to the process beside it."""
QUIET = 1.5
"""A worker gave no sign before it is spoken for."""
HELLO = 20.0
"""A stream between ranks of several hosts is open without a greeting."""
RUN_AHEAD = 300.0
"""A peer on another host is ahead of this process with a run."""
REACH = 5.0
"""Finding out whether a peer can be reached."""
REFUSAL = 1.0
"""Between two looks at why a peer cannot be reached."""
PROBE = 2.0
"""Finding out why TLS does not come about."""
CHALLENGE = 60.0
"""Answering a challenge to prove that one knows a token."""
UPLOAD = 600.0
"""One submission, feed or upload as the master takes it."""

# --- a master's jobs ------------------------------------------------------------------------------

WORKER_SILENCE = 10.0
"""A worker says nothing before it is lost; a worker waits three times as long for its master."""
WORKERS = 300.0
"""The first job of the queue waits for workers."""
COMPILING = 1800.0
"""Compiling, unless a rank that is awaited works. One that stands still has DEADLINE, as it has
while the job saves."""
CHECKING = 60.0
"""Comparing what ranks have compiled."""
PREPARING = 30.0
"""Preparing, unless a rank that is awaited works."""
PROGRESS = 600.0
"""An operation runs and no rank reports anything or works. Where all that run stand still: DEADLINE
and LONGEST_ANSWER."""
IDLE = 3600.0
"""An open job waits for its client's next request."""
RELEASE = 30.0
"""A worker lets go of an ended job."""
STREAM = 30.0
"""A stream whose peer must say something is silent."""
FIRST_CAUSE = 3.0
"""A failure that looks like the consequence of another one is held back."""
TELL = 5.0
"""Between two notes on which ranks a job waits for."""

# --- starting and ending --------------------------------------------------------------------------

START = 120.0
"""Worker processes of `pc.run` start and register."""
GRACE = 3.0
"""Ranks of `launch` end by themselves after a failure, and after SIGTERM."""
WORKER_STOP = 5.0
"""A worker process ends after it was asked to; then it is killed."""
WORKER_LEAVE = 60.0
"""A worker that must end waits for its work at hand."""
AGENT_STOP = 10.0
"""A worker's job and connection end."""
HELPER_STOP = 5.0
"""The process beside a worker ends."""
MASTER_STOP = 5.0
"""A master's calls and compilations end."""
COMMAND_STOP = 10.0
"""A command that serves ends after Ctrl-C."""
TASK_LEAVE = 5.0
"""After a failure a stream is still in its task; then it is left behind."""
STREAM_END = 1.0
"""A stream ends that is in no task."""
GOODBYE = 5.0
"""A rank's last frames reach other hosts."""
LINGER = 1.0
"""A rank that is done listens for the goodbyes of others."""
THREAD_END = 5.0
"""A thread of a stream or a device ends after it was asked to; then it is left behind."""
MPI_END = 10.0
"""MPI's thread ends."""
DEVICE_CLOSING = 5.0
"""Work that was launched on a device ends when its run is closed."""
NCCL_ABORT = 1.0
"""NCCL's own calls are waited for before it is aborted."""
REMOVING = 10.0
"""A temporary folder is removed after the end of the process that made it."""
NOTES = 1.0
"""A master's last lines reach its standard error."""
DOCTOR = 10.0
"""`doctor` talks to itself over loopback."""
HANDSHAKE_END = 1.0
"""A master's last lines about refused handshakes reach its standard error."""
STALE = 3600.0
"""A file that the plan cache is writing stays when its writer was killed."""


def if_unseen(deadline: float) -> float:
    """The deadline where nobody sees whether a rank works, as on devices: longer, unless the user
    chose.
    """
    return UNSEEN_DEADLINE if deadline == DEADLINE else deadline


def at_start(deadline: float) -> float:
    """The deadline for meeting others, who may come late: longer, unless the user chose."""
    return START_DEADLINE if deadline == DEADLINE else deadline
