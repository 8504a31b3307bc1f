"""Workers that an engine has started, one per rank."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from plancompiler.cluster.address import is_loopback
from plancompiler.engines.control import tls_files
from plancompiler.engines.launch_variables import INSECURE
from plancompiler.engines.launcher import RANK_WORD, SECRET_WORD, Launcher, Program
from plancompiler.engines.supervise import end_ranks
from plancompiler.errors import WorkerLostError
from plancompiler.executor.process_status import CONTINUE_HINT
from plancompiler.limits import time_limits
from plancompiler.running.worker_processes import worker_environment

_log = logging.getLogger(__name__)


class EngineWorkers:
    """`plancompiler worker` for each of `count` ranks of the master at `address`, started by a
    launcher; like `WorkerProcesses`, which starts them here.

    `secret` is the master's; no other process is shown it, and it is in no file.
    """

    def __init__(
        self,
        launcher: Launcher,
        address: str,
        secret: str,
        count: int,
        allow_ops: Sequence[str] = (),
        record: Path | None = None,
        deadline: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        command = [sys.executable, "-m", "plancompiler", "worker", "--any-path"]
        command += ["--master", address, "--rank", RANK_WORD, "--token-file", SECRET_WORD]
        command += [word for module in allow_ops for word in ("--allow-ops", module)]
        command += [] if record is None else ["--record", str(record)]
        command += [] if deadline is None else ["--deadline", str(deadline)]
        command += _exposure(address)
        wanted = worker_environment(allow_ops) | dict(environment or {})
        own = {name: text for name, text in wanted.items() if os.environ.get(name) != text}
        self._launcher = launcher
        program = Program(tuple(command), own, secret, handles_signals=False)
        self._started = launcher.start(program, count, _log.debug, threading.Event())

    def check(self) -> None:
        """Raise WorkerLostError where one has ended, with what it said, or does not run."""
        self._launcher.look()
        for each in self._started:
            if each.ended.is_set():
                raise WorkerLostError(
                    f"a worker that the engine {self._launcher.name} has started ended",
                    rank=each.rank,
                    got=f"{each.how}; it said: {each.last_words or 'nothing'}",
                )
            if each.trouble is not None:
                raise WorkerLostError(
                    "a worker process does not run",
                    rank=each.rank,
                    got=each.trouble,
                    expected="all workers running",
                    hint=CONTINUE_HINT,
                )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Log what ended workers have said when the block fails."""
        try:
            yield
        except Exception:
            for each in self._started:
                if each.ended.is_set() and each.last_words:
                    _log.error("rank %d said: %s", each.rank, each.last_words)
            raise

    def close(self) -> None:
        """Stop all workers and wait until they have ended."""
        end_ranks(self._started, time_limits.WORKER_STOP)
        self._launcher.close()


def _exposure(address: str) -> list[str]:
    """How workers listen for each other: beyond their own hosts if the master does."""
    if is_loopback(address.rpartition(":")[0].strip("[]")):
        return []
    files = tls_files()
    options = [
        word
        for option, name in zip(("--tls-ca", "--tls-cert", "--tls-key"), files, strict=False)
        for word in (option, files[name])
    ]
    if not files and os.environ.get(INSECURE, "0") != "0":
        options = ["--insecure"]
    return ["--listen", "0.0.0.0:0", *options]
