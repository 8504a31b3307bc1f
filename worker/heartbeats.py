"""A worker's signs of life to the process beside it, which speaks for it while it is silent."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from plancompiler.cluster.channel import TlsFiles
from plancompiler.limits import time_limits
from plancompiler.worker.heartbeat_process import SIGN

_SIGN_SECONDS = time_limits.SIGN
_CLOSE_SECONDS = time_limits.HELPER_STOP
# Without what the interpreter does at its start for programs: it has to be small and quick.
_PROGRAM = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from plancompiler.worker.heartbeat_process import main
main()
"""


class Heartbeats:
    """Starts the process beside this one, and tells it now and then that all is well."""

    def __init__(self) -> None:
        package = str(Path(time_limits.__file__).parents[2])
        words = [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps([package, *sys.path])]
        self._process = subprocess.Popen(
            [*words, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        self._next = 0.0

    def announce(
        self,
        master: str,
        tls: TlsFiles | None,
        token_file: Path | None,
        rank: int | None,
        host: str,
    ) -> None:
        """Let it say where this worker is stopped before it has registered."""
        file = None if token_file is None else str(token_file.absolute())
        wanted = -1 if rank is None else rank
        self._reach(master, tls, {"token_file": file, "rank": wanted, "host": host})

    def introduce(self, master: str, tls: TlsFiles | None, session: bytes, token: bytes) -> None:
        """Let it speak for this worker, which has registered."""
        self._reach(master, tls, {"session": session.hex(), "token": token.hex()})

    def _reach(self, master: str, tls: TlsFiles | None, told: Mapping[str, object]) -> None:
        files = () if tls is None else (tls.ca, tls.cert, tls.key)
        names = [str(each.absolute()) for each in files] or None
        self._tell(json.dumps({"master": master, "tls": names, **told}).encode() + SIGN)

    def sign(self) -> None:
        """All is well; may be called as often as one likes."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SIGN_SECONDS
            self._tell(SIGN)

    def _tell(self, data: bytes) -> None:
        # Where it is gone, or has not read for long, the worker goes on without it.
        with contextlib.suppress(OSError):
            os.write(self._pipe, data)

    def close(self) -> None:
        """End it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
