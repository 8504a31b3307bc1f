"""The process beside a worker that speaks for it while it says nothing itself.

What holds the worker's interpreter, or stops its process, silences the worker. This program sees
the worker's process (/proc) and hears a sign of life from it each second, through its standard
input, which ends with the worker. It imports gRPC only when it has something to say, so that it
costs next to nothing while all is well.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from plancompiler.executor.process_status import (
    CONTINUE_HINT,
    ProcessStatus,
    process_status,
    waits_for_disk,
)
from plancompiler.limits import time_limits

LOOK_SECONDS = 0.5
"""Between two looks at the worker's process."""
QUIET_SECONDS = time_limits.QUIET
"""A worker that gave no sign for so long is spoken for."""
SIGN = b"\n"
_PR_SET_PDEATHSIG = 1


class HeartbeatProcess:
    """Watches the worker `process`, until that ends."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._heard = b""
        self._quiet = 0.0
        self._stopped = 0.0
        """Seconds, of those in which this process itself ran."""
        self._said = False
        """Whether standard error has it that the worker is stopped."""
        self._introduction: dict[str, Any] | None = None
        """How to reach the master; with a token once the worker has registered."""
        self._stub: Any = None

    def serve(self) -> None:
        """Look and listen until the worker has ended."""
        before = time.monotonic()
        while True:
            readable, _, _ = select.select([0], [], [], LOOK_SECONDS)
            now = time.monotonic()
            passed, before = min(now - before, 2 * LOOK_SECONDS), now
            if readable:
                heard = os.read(0, 1 << 16)
                if not heard:
                    return
                self._hear(heard)
                self._quiet = 0.0
            else:
                self._quiet += passed
            status = process_status(self._process)
            if status is None:
                return
            self._look(status, passed)

    def _hear(self, heard: bytes) -> None:
        *lines, self._heard = (self._heard + heard).split(SIGN)
        for line in lines:
            if line:
                self._introduction = json.loads(line)
                self._stub = None

    def _look(self, status: ProcessStatus, passed: float) -> None:
        self._stopped = self._stopped + passed if status.is_stopped else 0.0
        # Before it is wanted, as others lose patience too. One that lives gives a sign each second.
        told = self._introduction
        has_registered = told is not None and "token" in told
        if has_registered and (status.is_stopped or self._quiet > time_limits.SIGN):
            self._open()
        is_known = self._stopped >= time_limits.STOPPED_WORKER
        if is_known and not self._said:
            self._said = True
            sys.stderr.write(f"plancompiler: {status.stopped_text}; {CONTINUE_HINT}\n")
            sys.stderr.flush()
        # Of one that has just been stopped nothing is said: it may be continued at once.
        # Nor of one that has not registered and only is slow: nobody misses it.
        is_worth_telling = is_known or (has_registered and not status.is_stopped)
        if self._quiet >= QUIET_SECONDS and is_worth_telling:
            self._speak(status)

    def _speak(self, status: ProcessStatus) -> None:
        """Tell the master. Where it cannot be reached the worker itself will notice."""
        told = self._introduction
        if told is None:
            return
        import grpc  # noqa: PLC0415  # see the module's text

        from plancompiler.cluster.checked import Sent  # noqa: PLC0415  # as above
        from plancompiler.errors import PlanCompilerError  # noqa: PLC0415  # as above
        from plancompiler.proto import cluster_pb2 as pb  # noqa: PLC0415

        heartbeat = pb.Heartbeat(
            stopped=status.is_stopped,
            cpu_seconds=status.cpu_seconds,
            gets_on=waits_for_disk(self._process),
        )
        request = pb.BeatRequest(
            token=bytes.fromhex(told.get("token", "")),
            heartbeat=heartbeat,
            rank=told.get("rank", -1),
            host=told.get("host", ""),
        )
        try:
            self._open()
            self._stub.Beat(Sent()(request), timeout=time_limits.BEAT)
        except (grpc.RpcError, PlanCompilerError):
            return

    def _open(self) -> None:
        told = self._introduction
        if self._stub is not None or told is None:
            return
        from plancompiler.cluster.channel import (  # noqa: PLC0415  # as above
            TlsFiles,
            connect_master,
            open_channel,
        )
        from plancompiler.proto.cluster_pb2_grpc import WorkerStub  # noqa: PLC0415  # as above

        tls = None if told["tls"] is None else TlsFiles(*map(Path, told["tls"]))
        if "token" in told:
            channel = open_channel(told["master"], tls, bytes.fromhex(told["session"]))
        else:
            file = None if told["token_file"] is None else Path(told["token_file"])
            channel = connect_master(told["master"], tls, file, time_limits.BEAT)
        self._stub = WorkerStub(channel)  # type: ignore[no-untyped-call]  # generated


def main() -> None:
    """Watch the process that has started this one."""
    worker = int(sys.argv[-1])
    # It ends with the worker even while it talks to the master.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == worker:
        HeartbeatProcess(worker).serve()
