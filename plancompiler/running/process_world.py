"""A session's ranks as processes: a master in this process, and one worker process per rank."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from plancompiler.cluster.channel import TlsFiles
from plancompiler.cluster.chunks import Array
from plancompiler.engines.control import tls_files
from plancompiler.engines.launch_variables import INSECURE
from plancompiler.engines.launcher import Launcher
from plancompiler.engines.local import LocalLauncher, secret_file
from plancompiler.errors import CheckpointError, DeadlineError, NonFiniteError, PlanCompilerError
from plancompiler.executor.checkpoint import CHECK_VARIABLE
from plancompiler.executor.finite_check import anomaly_wanted
from plancompiler.executor.trace import Recording
from plancompiler.ir import Job
from plancompiler.ir.arguments import absolute_path
from plancompiler.limits import time_limits
from plancompiler.master.server import MasterServer
from plancompiler.plan.plan import Plan
from plancompiler.running.client import Client
from plancompiler.running.evaluation import Boxes, whole_boxes
from plancompiler.running.worker_processes import WorkerProcesses

START_SECONDS = time_limits.START
"""How long worker processes may take to start and register."""
POLL_SECONDS = 0.05

_log = logging.getLogger(__name__)


class ProcessWorld:
    """A master in this process and one worker process per rank."""

    def __init__(
        self,
        job: Job,
        world_size: int,
        mode: str | None,
        restore: Path | None,
        allow_ops: Sequence[str],
        recording: Recording | None,
        cache: bool,
        deadline: float,
        check_restore: bool,
        strict_restore: bool,
        anomaly: bool,
        launcher: Launcher | None,
        plans: Mapping[int, Plan] | None = None,
    ) -> None:
        if plans is not None:
            mode = "rank_per_iter"  # one in which the master sends plans

        self._parts = ExitStack()
        self._busy = True
        try:
            if recording is not None:
                self._parts.enter_context(recording)
            if launcher is None:
                launcher = LocalLauncher(os.environ, subprocess.DEVNULL)
            secret = secrets.token_hex(32)
            token_file = self._token_file(secret)
            server = self._parts.enter_context(
                MasterServer(
                    f"{launcher.host}:0",
                    world_size,
                    mode=mode,
                    tls=tls_of_environment(),
                    insecure=is_insecure(),
                    token_file=token_file,
                    plans=plans,
                )
            )
            workers = WorkerProcesses(
                launcher,
                server.address,
                secret,
                world_size,
                allow_ops,
                None if recording is None else recording.folder,
                deadline,
                {} if check_restore else {CHECK_VARIABLE: "0"},
            )
            self._parts.callback(workers.close)
            client = self._parts.enter_context(
                Client(
                    server.address, timeout=None, tls=tls_of_environment(), token_file=token_file
                )
            )
            with workers.explained():
                _await_workers(client, workers, world_size)
                self._remote = client.open(
                    job,
                    ranks=world_size,
                    mode=mode,
                    restore=None if restore is None else _whole_path(restore),
                    strict_restore=strict_restore,
                    cache=cache,
                    anomaly=anomaly or anomaly_wanted(),
                )
        except BaseException:
            self._parts.close()
            raise
        self._parts.callback(self._let_go)
        self._workers = workers
        self._busy = False
        self.compile_seconds = self._remote.compile_seconds or 0.0
        self.cached = bool(self._remote.cached)
        digest = self._remote.digest or ""
        self.hash_plans = lambda: digest
        self.rates = self._remote.rates

    def _token_file(self, secret: str) -> Path:
        """For the master and the client in this process."""
        descriptor = secret_file(secret)
        self._parts.callback(os.close, descriptor)
        return Path(f"/proc/self/fd/{descriptor}")

    def step(self, feeds: Mapping[str, Any]) -> Mapping[str, Array]:
        with self._asking():
            return self._remote.step(**feeds)

    def run(self, steps: int) -> Sequence[Mapping[str, Array]]:
        with self._asking():
            return list(self._remote.run_together(steps))

    def save(self, folder: Path, wait: bool) -> None:
        with self._asking():
            self._remote.save(_whole_path(folder), wait=wait)

    def check_saved(self) -> None:
        """The workers fail the job where they cannot write, so whatever is asked next raises."""

    def variables(self) -> dict[str, Array]:
        with self._asking():
            return self._remote.variables()

    def boxes(self, names: Collection[str]) -> Boxes:
        return whole_boxes(self.variables(), names)

    def close(self) -> None:
        self._parts.close()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Remember whether the job was left in the middle of something."""
        self._busy = True
        with self._workers.explained():
            try:
                yield
            except NonFiniteError:  # the job waits to be saved, or has ended
                self._busy = False
                raise
        self._busy = False

    def _let_go(self) -> None:
        """Finish the job, or stop it where it was interrupted; closing goes on in any case."""
        try:
            if self._busy:
                self._remote.cancel()
            else:
                self._remote.close()
        except CheckpointError:
            raise
        except PlanCompilerError as error:
            _log.debug("the job did not end cleanly: %s", error)


def _whole_path(folder: Path) -> Path:
    """A checkpoint's folder as the workers find it."""
    return absolute_path("the folder of a checkpoint", folder).resolve()


def _await_workers(client: Client, workers: WorkerProcesses, count: int) -> None:
    """Return when all workers have registered; raise where one ends or they take too long."""
    deadline = time.monotonic() + START_SECONDS
    while len(client.status().workers) < count:
        workers.check()
        if time.monotonic() > deadline:
            raise DeadlineError(
                "the worker processes did not register in time",
                got=f"{len(client.status().workers)} of {count} after {START_SECONDS:.0f} s",
            )
        time.sleep(POLL_SECONDS)  # neither a process's end nor a registration would end a wait


def tls_of_environment() -> TlsFiles | None:
    """The user's files for TLS between the ranks of a run, if there are any."""
    files = tls_files()
    return TlsFiles(*map(Path, files.values())) if files else None


def is_insecure() -> bool:
    """Whether the user trusts the network between the ranks of a run."""
    return os.environ.get(INSECURE, "0") != "0"
