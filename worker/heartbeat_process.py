"""The process beside a worker that speaks for it while it says nothing itself.

What holds the worker's interpreter, or stops its process, silences the worker. This program sees
the worker's process (/proc) and hears a sign of life from it each second, through its standard
input, which ends with the worker. It imports gRPC only when it has something to say, so that it
costs next to nothing while all is well; a master that soon loses patience leaves no time for that,
and is spoken to at once.
"""

from __future__ import annotations

import contextlib
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

_LOOKS_PER_SIGN = 2
"""Looks at the worker's process in the time between two signs of life."""
_QUIET_SIGNS = time_limits.QUIET / time_limits.SIGN
"""A worker that gave no sign for so many times what is between two is spoken for."""
SIGN = b"\n"
_PR_SET_PDEATHSIG = 1
_LAST_WORDS = 2
"""Seconds in which what a crashed worker printed last must be written out."""


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
        self._sign = time_limits.SIGN
        """Seconds between two signs of life."""
        self._must_be_ready = False
        """Whether the worker waits to hear that this process has spoken to the master."""

    def serve(self) -> None:
        """Look and listen until the worker has ended."""
        before = time.monotonic()
        while True:
            look = self._sign / _LOOKS_PER_SIGN
            readable, _, _ = select.select([0], [], [], look)
            now = time.monotonic()
            passed, before = min(now - before, 2 * look), now
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
            if self._must_be_ready:
                self._must_be_ready = False
                self._speak(status)
                with contextlib.suppress(OSError):  # the worker has ended
                    os.write(1, SIGN)
            self._look(status, passed)

    def _hear(self, heard: bytes) -> None:
        *lines, self._heard = (self._heard + heard).split(SIGN)
        for line in lines:
            if line:
                told = self._introduction = json.loads(line)
                self._stub = None
                self._sign = told.get("sign", time_limits.SIGN)
                self._must_be_ready = self._sign < time_limits.SIGN

    def _look(self, status: ProcessStatus, passed: float) -> None:
        self._stopped = self._stopped + passed if status.is_stopped else 0.0
        # Before it is wanted, as others lose patience too. One that lives gives its signs.
        told = self._introduction
        has_registered = told is not None and "token" in told
        if has_registered and (status.is_stopped or self._quiet > self._sign):
            self._open()
        is_known = self._stopped >= time_limits.STOPPED_WORKER
        if is_known and not self._said:
            self._said = True
            sys.stderr.write(f"plancompiler: {status.stopped_text}; {CONTINUE_HINT}\n")
            sys.stderr.flush()
        # Of one that has just been stopped nothing is said: it may be continued at once.
        # Nor of one that has not registered and only is slow: nobody misses it.
        is_worth_telling = is_known or (has_registered and not status.is_stopped)
        if self._quiet >= _QUIET_SIGNS * self._sign and is_worth_telling:
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
            channel = connect_master(told["master"], tls, file, time_limits.BEAT, is_worker=True)
        self._stub = WorkerStub(channel)  # type: ignore[no-untyped-call]  # generated


def main() -> None:
    """Watch the process that has started this one."""
    pipes, worker = json.loads(sys.argv[-2]), int(sys.argv[-1])
    # It ends with the worker even while it talks to the master, and not by an exception, which
    # would be raised inside of gRPC and printed there.
    signal.signal(signal.SIGTERM, lambda *_: _end(pipes))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM if pipes else signal.SIGKILL)
    try:
        if os.getppid() == worker:
            HeartbeatProcess(worker).serve()
    finally:
        _pass_on(pipes)


def _end(pipes: list[tuple[int, int]]) -> None:
    _pass_on(pipes)
    os._exit(0)


def _pass_on(pipes: list[tuple[int, int]]) -> None:
    """Write out what a worker that has crashed printed last, and has not passed on itself."""
    signal.alarm(_LAST_WORDS)  # its end, where nobody takes what is written
    for source, target in pipes:
        os.set_blocking(source, False)
        with contextlib.suppress(OSError):  # there is no more, or nobody reads it
            while data := os.read(source, 1 << 16):
                os.write(target, data)
