"""Worker processes, one per rank, which end when the starting process ends."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from plancompiler.blas.loaded_library import kernel_environment
from plancompiler.blas.threads import one_thread_environment
from plancompiler.cluster.address import is_loopback, split_address
from plancompiler.engines.control import tls_files
from plancompiler.engines.launch_variables import INSECURE
from plancompiler.engines.launcher import RANK_WORD, SECRET_WORD, Launcher, Program
from plancompiler.engines.supervise import end_ranks
from plancompiler.errors import UsageError, WorkerLostError
from plancompiler.executor.process_status import CONTINUE_HINT
from plancompiler.ir.arguments import absolute_path
from plancompiler.limits import time_limits
from plancompiler.ops.registry import check_top_level

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
        files = list(spec.submodule_search_locations)
    else:
        files = [spec.origin] if spec.has_location and spec.origin else []
    return [absolute_path(f"the module {module}", file).parent for file in files]


class WorkerProcesses:
    """`plancompiler worker` for each of `count` ranks of the master at `address`, started by a
    launcher.

    Workers may access files with the rights of this process's user, without further restriction,
    and import custom ops of the top-level modules `allow_ops`, which they find where this process
    does. They record timelines in the folder `record`. `deadline` is theirs (see
    `worker.agent.run_worker`), and so is what `environment` adds to this process's. `secret` is the
    master's; no other process is shown it, and it is in no file. Without it they find the one that
    the master has left for its user.
    """

    def __init__(
        self,
        launcher: Launcher,
        address: str,
        secret: str | None,
        count: int,
        allow_ops: Sequence[str] = (),
        record: Path | None = None,
        deadline: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        command = [sys.executable, "-m", "plancompiler", "worker", "--any-path"]
        command += ["--master", address, "--rank", RANK_WORD]
        command += [] if secret is None else ["--token-file", SECRET_WORD]
        command += [word for module in allow_ops for word in ("--allow-ops", module)]
        command += [] if record is None else ["--record", str(record)]
        command += [] if deadline is None else ["--deadline", str(deadline)]
        command += _exposure(address)
        wanted = worker_environment(allow_ops) | dict(environment or {})
        own = {name: text for name, text in wanted.items() if os.environ.get(name) != text}
        self._launcher = launcher
        self._failure: str | None = None
        program = Program(tuple(command), own, secret, handles_signals=False)
        try:
            self.started = launcher.start(program, count, _log.debug, threading.Event())
        except BaseException as error:
            launcher.close(str(error))
            raise

    def check(self) -> None:
        """Raise WorkerLostError where one has ended, with what it said, or does not run."""
        self._launcher.look()
        for each in self.started:
            if each.ended.is_set():
                raise WorkerLostError(
                    f"a worker process of the engine {self._launcher.name} ended",
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
        """Log what ended workers have said when the block fails. The first failure is what the
        ranks are told when they are ended.
        """
        try:
            yield
        except BaseException as error:
            if self._failure is None:
                self._failure = str(error) or type(error).__name__
            for each in self.started:
                if each.ended.is_set() and each.last_words:
                    _log.error("rank %d said: %s", each.rank, each.last_words)
            raise

    def close(self) -> None:
        """Stop all workers and wait until they have ended."""
        try:
            end_ranks(self.started, time_limits.WORKER_STOP)
        finally:
            self._launcher.close(self._failure)


def _exposure(address: str) -> list[str]:
    """How workers listen for each other: beyond their own hosts if the master does."""
    if is_loopback(split_address(address)[0]):
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
