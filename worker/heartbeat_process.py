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
        """How to reach the master, once the worker has registered."""
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

    def _look(self, status: ProcessStatus, passed: float) -> None:
        self._stopped = self._stopped + passed if status.is_stopped else 0.0
        # Before it is wanted, as others lose patience too. One that lives gives a sign each second.
        if self._introduction is not None and (status.is_stopped or self._quiet > time_limits.SIGN):
            self._open(self._introduction)
        is_known = self._stopped >= time_limits.STOPPED_WORKER
        if is_known and not self._said:
            self._said = True
            sys.stderr.write(f"plancompiler: {status.stopped_text}; {CONTINUE_HINT}\n")
            sys.stderr.flush()
        # Of one that has just been stopped nothing is said: it may be continued at once.
        if self._quiet >= QUIET_SECONDS and status.is_stopped == is_known:
            self._speak(status)

    def _speak(self, status: ProcessStatus) -> None:
        """Tell the master. Where it cannot be reached the worker itself will notice."""
        told = self._introduction
        if told is None:
            return
        import grpc  # noqa: PLC0415  # see the module's text

        from plancompiler.proto import cluster_pb2 as pb  # noqa: PLC0415

        self._open(told)
        heartbeat = pb.Heartbeat(
            stopped=status.is_stopped,
            cpu_seconds=status.cpu_seconds,
            gets_on=waits_for_disk(self._process),
        )
        request = pb.BeatRequest(token=bytes.fromhex(told["token"]), heartbeat=heartbeat)
        try:
            self._stub.Beat(request, timeout=time_limits.BEAT)
        except grpc.RpcError:
            return

    def _open(self, told: dict[str, Any]) -> None:
        if self._stub is not None:
            return
        from plancompiler.cluster.channel import TlsFiles, open_channel  # noqa: PLC0415  # as above
        from plancompiler.proto.cluster_pb2_grpc import WorkerStub  # noqa: PLC0415  # as above

        tls = None if told["tls"] is None else TlsFiles(*map(Path, told["tls"]))
        channel = open_channel(told["master"], tls, bytes.fromhex(told["session"]))
        self._stub = WorkerStub(channel)  # type: ignore[no-untyped-call]  # generated


def main() -> None:
    """Watch the process that has started this one."""
    worker = int(sys.argv[-1])
    # It ends with the worker even while it talks to the master.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == worker:
        HeartbeatProcess(worker).serve()
