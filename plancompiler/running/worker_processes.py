"""Worker processes on this machine, one per rank, which end when the starting process ends."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from plancompiler.blas.loaded_library import kernel_environment
from plancompiler.blas.threads import one_thread_environment
from plancompiler.errors import UsageError, WorkerLostError
from plancompiler.executor.process_status import CONTINUE_HINT, StoppedProcesses
from plancompiler.ir.whole_file import naming_output
from plancompiler.limits import time_limits
from plancompiler.ops.registry import check_top_level

STOP_SECONDS = time_limits.WORKER_STOP
"""How long a worker may take to end after it was asked to; then it is killed."""
SHOWN_BYTES = 4000
"""How much of a lost worker's standard error is shown."""
_log = logging.getLogger(__name__)


def worker_environment(allow_ops: Sequence[str] = ()) -> dict[str, str]:
    """The environment of a worker: this process's BLAS kernels, so that ranks as threads and as
    processes agree to the last bit; one BLAS thread unless the user chose; and on the import path
    the folders of the modules `allow_ops`, and no others.

    Raises AttributeValueError for a name with dots, UsageError for a module that is not there.
    """
    check_top_level(allow_ops)
    environment = {**one_thread_environment(), **kernel_environment()}
    installed = {Path(folder) for folder in sysconfig.get_paths().values()}
    folders = [
        str(folder)
        for folder in dict.fromkeys(each for name in allow_ops for each in _folders_of(name))
        if folder not in installed
    ]
    if folders:
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([*folders, before] if before else folders)
    return environment


def _folders_of(module: str) -> list[Path]:
    """The folders on this process's import path in which it finds a top-level module."""
    spec = None
    # What is `__main__` here is another module in a worker, however this process was started. Of a
    # module that is loaded, but not from an import path, ValueError says so.
    if module != "__main__":
        with suppress(ValueError):
            spec = importlib.util.find_spec(module)
    if spec is None:
        raise UsageError(
            "a module whose custom ops are allowed cannot be found",
            got=repr(module),
            hint="name the module in which the ops are defined, and put it on the import path",
        )
    if spec.submodule_search_locations is not None:
        return [Path(each).absolute().parent for each in spec.submodule_search_locations]
    return [Path(spec.origin).absolute().parent] if spec.has_location and spec.origin else []


class WorkerProcesses:
    """`plancompiler worker` for each of `count` ranks of the master at `address`.

    Each worker holds the reading end of a pipe from this process and stops when the pipe closes, so
    it stops even if this process is killed. It has its own process group, so that Ctrl-C in a
    terminal reaches it only through this process.

    Workers may import custom ops of the top-level modules `allow_ops`, which they find where this
    process does. They record timelines in the folder `record`. `deadline` is theirs (see
    `worker.agent.run_worker`), and so is what `environment` adds to this process's.
    """

    def __init__(
        self,
        address: str,
        count: int,
        allow_ops: Sequence[str] = (),
        record: Path | None = None,
        deadline: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        # They access files with the rights of this process's user, without further restriction.
        self._options = ["--any-path"]
        self._options += [word for module in allow_ops for word in ("--allow-ops", module)]
        if record is not None:
            self._options += ["--record", str(record)]
        if deadline is not None:
            self._options += ["--deadline", str(deadline)]
        self._environment = worker_environment(allow_ops) | dict(environment or {})
        self._children: list[subprocess.Popen[bytes]] = []
        self._errors: list[IO[bytes]] = []
        self._watch = StoppedProcesses()
        try:
            for rank in range(count):
                self._start(address, rank)
        except BaseException:
            self.close()
            raise

    def _start(self, address: str, rank: int) -> None:
        with naming_output("what a worker says", "the temporary folder"):
            errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the workers
        self._errors.append(errors)
        command = [sys.executable, "-m", "plancompiler", "worker", "--stop-with-stdin"]
        command += ["--master", address, "--rank", str(rank), *self._options]
        self._children.append(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=self._environment,
                start_new_session=True,
            )
        )

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [child.pid for child in self._children]

    def check(self) -> None:
        """Raise WorkerLostError if a worker has ended, with its last output, or if a signal has
        stopped it for some time.
        """
        for rank, child in enumerate(self._children):
            code = child.poll()
            if code is not None:
                raise WorkerLostError(
                    "a worker process ended",
                    rank=rank,
                    got=f"exit code {code}; it said: {self._last_words(rank) or 'nothing'}",
                )

        status = self._watch.look(self.pids)
        if status is not None:
            raise WorkerLostError(
                "a worker process has been stopped",
                rank=self.pids.index(status.pid),
                got=status.stopped_text,
                expected="all workers running",
                hint=CONTINUE_HINT,
            )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Log the last output of ended workers if the block fails."""
        try:
            yield
        except Exception:
            for rank, child in enumerate(self._children):
                words = self._last_words(rank)
                if child.poll() is not None and words:
                    _log.error("rank %d said: %s", rank, words)
            raise

    def close(self) -> None:
        """Stop all workers and wait until they have ended."""
        for child in self._children:
            if child.stdin is not None:
                child.stdin.close()
            child.terminate()
            child.send_signal(signal.SIGCONT)  # a stopped one would not hear it
        for child in self._children:
            try:
                child.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for rank, errors in enumerate(self._errors):
            if errors.closed:
                continue
            for line in self._last_words(rank).splitlines():
                _log.debug("rank %d: %s", rank, line)
            errors.close()

    def _last_words(self, rank: int) -> str:
        descriptor = self._errors[rank].fileno()
        size = os.fstat(descriptor).st_size
        # pread leaves the offset alone, which the worker shares.
        tail = os.pread(descriptor, SHOWN_BYTES, max(0, size - SHOWN_BYTES))
        return tail.decode(errors="replace").strip()
