"""A worker's signs of life to the process beside it, which speaks for it while it is silent."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from plancompiler.cluster.channel import TlsFiles
from plancompiler.ir.arguments import absolute_path
from plancompiler.limits import time_limits
from plancompiler.worker.heartbeat_process import SIGN

_SIGNS_PER_SILENCE = 10
"""Signs of life in the time after which a master gives a silent worker up, or more seldom."""
_LEAVE_SECONDS, _CLOSE_SECONDS = time_limits.HELPER_LEAVE, time_limits.HELPER_STOP
# Without what the interpreter does at its start for programs: it has to be small and quick.
_PROGRAM = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from plancompiler.worker.heartbeat_process import main
main()
"""


class Heartbeats:
    """Starts the process beside this one, and tells it now and then that all is well. It writes to
    the descriptor `stderr`, by default this process's standard error. Of `pipes` (where to read,
    where that goes) it passes on what this process leaves unread when it crashes.
    """

    def __init__(self, stderr: int | None = None, pipes: Sequence[tuple[int, int]] = ()) -> None:
        package = str(Path(time_limits.__file__).parents[2])
        words = [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps([package, *sys.path])]
        self._process = subprocess.Popen(
            [*words, json.dumps(pipes), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            pass_fds=[descriptor for pipe in pipes for descriptor in pipe],
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._answer = self._process.stdout.fileno()
        self.pid = self._process.pid
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        self._next = 0.0
        self._sign = time_limits.SIGN

    def announce(
        self,
        master: str,
        tls: TlsFiles | None,
        token_file: Path | None,
        rank: int | None,
        host: str,
    ) -> None:
        """Let it say where this worker is stopped before it has registered."""
        file = None if token_file is None else str(absolute_path("the token file", token_file))
        wanted = -1 if rank is None else rank
        self._reach(master, tls, {"token_file": file, "rank": wanted, "host": host})

    def introduce(
        self, master: str, tls: TlsFiles | None, session: bytes, token: bytes, silence: float
    ) -> None:
        """Let it speak for this worker, which has registered; a silence of `silence` seconds would
        be its end.
        """
        self._sign = min(time_limits.SIGN, silence / _SIGNS_PER_SILENCE)
        told = {"session": session.hex(), "token": token.hex(), "sign": self._sign}
        self._reach(master, tls, told)

    def await_ready(self) -> None:
        """Return when it can speak at once, where the master's patience is too short for less."""
        if self._sign < time_limits.SIGN:
            select.select([self._answer], [], [], time_limits.SILENCE)

    def _reach(self, master: str, tls: TlsFiles | None, told: Mapping[str, object]) -> None:
        files = () if tls is None else (tls.ca, tls.cert, tls.key)
        names = [str(absolute_path("a TLS file", each)) for each in files] or None
        self._tell(json.dumps({"master": master, "tls": names, **told}).encode() + SIGN)

    def sign(self) -> None:
        """All is well; may be called as often as one likes."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._sign
            self._tell(SIGN)

    def _tell(self, data: bytes) -> None:
        # Where it is gone, or has not read for long, the worker goes on without it.
        with contextlib.suppress(OSError):
            os.write(self._pipe, data)

    def close(self) -> None:
        """End it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        # It leaves by itself, unless a call to a master that is silent keeps it.
        process = self._process
        for seconds, end in ((_LEAVE_SECONDS, process.terminate), (_CLOSE_SECONDS, process.kill)):
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                end()
            else:
                return
        process.wait()
