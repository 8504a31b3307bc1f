"""All time limits of the project, in seconds. docs/time-limits.md says how to change each."""

from __future__ import annotations

BUSY_SHARE = 0.03
"""The share of a processor (no unit) below which a process counts as idle. Waiting, with its pings
and checks of peers, costs a worker less than 0.01; a working process has more, unless more than
thirty share a core.
"""

# --- ranks that make no progress ------------------------------------------------------------------

DEADLINE = 30.0
"""How long a rank may make no progress, with its processor idle, while others wait for it."""
UNSEEN_DEADLINE = 300.0
"""DEADLINE for ranks whose work nobody can see: ranks on devices, and ranks of eager programs that
are alone on their hosts and do not answer because their work holds the interpreter.
"""
START_DEADLINE = 300.0
"""How long ranks wait for each other when they start."""
STOPPED = 3.0
"""How long a process may be stopped by a signal before its launcher or its peers name it."""
STOPPED_WORKER = 2.0
"""How long a worker of a cluster may be stopped by a signal before the process beside it names it;
the time until the master hears of it comes on top.
"""
SHORTEST_ANSWER = 1.0
"""The least time that a rank has to answer what it is doing."""
LONGEST_ANSWER = 10.0
"""The most time that a rank has to answer what it is doing."""
LONGEST_LOOK = 1.0
"""The longest interval between two checks of the ranks that others wait for."""

# --- connections ----------------------------------------------------------------------------------

SILENCE = 10.0
"""How long a master, worker or client may answer no ping, and how long its first answer may take.
"""
SHORTEST_SILENCE = 2.0
"""The shortest silence that ends a connection, even with a smaller `--timeout`."""
CALL = 30.0
"""A call to the master that is not a stream."""
TRANSFER = 600.0
"""One transfer of a job, slice, plan, feeds or variables."""
BEAT = 5.0
"""One call by which the heartbeat process beside a worker reports to the master."""
SIGN = 1.0
"""The interval at which a worker gives signs of life to its heartbeat process."""
QUIET = 1.5
"""How long a worker may give no sign before its heartbeat process speaks for it."""
HELLO = 20.0
"""How long a stream between ranks of several hosts may be open without a greeting."""
RUN_AHEAD = 300.0
"""How long a stream waits whose sender is already in a later run than this process."""
REACH = 5.0
"""The check whether a peer can be reached."""
REACH_INTERVAL = 1.0
"""The interval between two checks of why a peer cannot be reached."""
UNREACHED = 10.0
"""How long a worker of a job may try in vain to connect to another one, which listens."""
UNHEARD = 5.0
"""How long a rank that is there and answers may not have heard of another one that greeted it."""
PROBE = 2.0
"""The check of why a TLS connection fails, and whether a rank that is there answers."""
CHALLENGE = 60.0
"""The answer to a challenge by which a caller proves that it knows a token."""
UPLOAD = 600.0
"""One submission, feed or upload that the master receives."""
TOKEN_LOOK = 1.0
"""The interval at which a master checks whether its token file has changed."""

# --- a master's jobs ------------------------------------------------------------------------------

WORKER_SILENCE = 10.0
"""How long a worker may be silent before it counts as lost; a worker waits three times as long for
its master.
"""
WORKERS = 300.0
"""How long the first job of the queue waits for workers."""
COMPILING = 1800.0
"""The phase "compiling", unless a rank that has not finished still works. A rank that makes no
progress has only DEADLINE, as it has while the job saves.
"""
CHECKING = 60.0
"""The phase "checking", in which the master compares what ranks have compiled."""
PREPARING = 30.0
"""The phase "preparing", unless a rank that has not finished still works."""
PROGRESS = 600.0
"""How long an operation may run while no rank reports anything or works. If all its ranks make no
progress, the limit is DEADLINE and LONGEST_ANSWER together.
"""
IDLE = 3600.0
"""How long an open job waits for its client's next request."""
MASTER_GRACE = 60.0
"""How long workers and clients wait for a master with a journal that was lost, and such a master,
once it was started again, for its workers.
"""
PASSING = 60.0
"""How long a job for which too few workers are free lets smaller ones pass."""
RELEASE = 30.0
"""How long a worker may take to release an ended job."""
STREAM = 30.0
"""How long a stream may be silent whose peer has to send something."""
FIRST_CAUSE = 3.0
"""How long a failure is held back that looks like the consequence of another one."""
TELL = 5.0
"""The interval between two notes on which ranks, or which hosts, are waited for."""

# --- starting and ending --------------------------------------------------------------------------

START = 120.0
"""How long worker processes of `pc.run` may take to start and register."""
GRACE = 3.0
"""How long ranks of `launch` have to end by themselves after a failure, and after SIGTERM."""
PATIENCE = 3.0
"""How long after Ctrl-C or SIGTERM the next ones do nothing; later ones end the program at once."""
WORKER_STOP = 5.0
"""How long a worker process has to end after it was asked to; then it is killed."""
WORKER_LEAVE = 60.0
"""How long a worker that must end waits for its current work."""
AGENT_STOP = 10.0
"""The end of a worker's job and connection."""
HELPER_LEAVE = 0.5
"""How long the heartbeat process beside a worker may go on with what it does when the worker ends.
"""
HELPER_STOP = 5.0
"""The end of the heartbeat process beside a worker, after it was asked to."""
MASTER_STOP = 5.0
"""The end of a master's calls and compilations."""
TASK_LEAVE = 5.0
"""How long a stream may stay in its task after a failure; then it is abandoned."""
STREAM_END = 1.0
"""The end of a stream that is in no task."""
GOODBYE = 5.0
"""How long a rank's last frames may take to reach other hosts."""
FAILED_GOODBYE = 1.0
"""GOODBYE after an error, counted from that error on, and where all others have said it before."""
CHANNEL_END = 2.0
"""The end of a client's connection to its master."""
LINGER = 1.0
"""How long a rank that is done listens for the goodbyes of others."""
THREAD_END = 5.0
"""How long a thread of a stream or a device has to end after it was asked to; then it is
abandoned, and a log line names it.
"""
LAST_CALL = 5.0
"""How long hosts that are enough for a run wait for more of them."""
AGENT_SILENCE = 8.0
"""How long the agent of a rank, or the way to it, may be silent before its ranks are lost."""
MPI_END = 10.0
"""The end of MPI's thread."""
DEVICE_CLOSING = 5.0
"""The end of work that was launched on a device, when its run is closed."""
NCCL_ABORT = 1.0
"""How long NCCL's own calls are waited for before NCCL is aborted."""
REMOVING = 10.0
"""The removal of a temporary folder after the end of the process that made it."""
NOTES = 1.0
"""How long a master's last log lines may take to reach its standard error."""
DOCTOR = 10.0
"""The test of gRPC over loopback in `doctor`."""
HANDSHAKE_END = 1.0
"""How long a master's last lines about refused handshakes may take to reach its standard error."""
STALE = 3600.0
"""How long a half-written file of the plan cache stays after its writer was killed."""


def if_unseen(deadline: float) -> float:
    """The deadline for ranks whose work nobody can see, such as ranks on devices: UNSEEN_DEADLINE,
    unless the user chose a deadline.
    """
    return UNSEEN_DEADLINE if deadline == DEADLINE else deadline


def at_start(deadline: float) -> float:
    """How long ranks wait for each other at the start: START_DEADLINE, unless the user chose a
    deadline.
    """
    return START_DEADLINE if deadline == DEADLINE else deadline
