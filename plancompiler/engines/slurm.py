"""The engine `slurm`: `srun` starts an agent per rank, in an allocation or with one of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence

from plancompiler.engines.engine_command import EngineCommand
from plancompiler.engines.hosted import Engine
from plancompiler.errors import EngineError


class Slurm(Engine):
    """`srun --ntasks RANKS`."""

    name = "slurm"
    gives_ranks = True

    def __init__(self, words: Sequence[str], say: Callable[[str], None]) -> None:
        """`words` are options of the user's for `srun`."""
        path = shutil.which("srun")
        if path is None:
            raise EngineError(
                "the engine slurm is not installed",
                got="no srun on the path",
                hint="start it on a node of Slurm's cluster, where srun is",
            )
        self._srun = path
        self._words = list(words)
        self._say = say
        self._command: EngineCommand | None = None

    def start(
        self, ranks: int, command: Sequence[str], variables: Sequence[Mapping[str, str]]
    ) -> None:
        self._check(ranks)
        # A rank that ends is the launcher's affair, not srun's: it says whose end was the first.
        options = ["--export=ALL", "--kill-on-bad-exit=0", "--input=none", "--unbuffered"]
        words = [self._srun, f"--ntasks={ranks}", *options, *self._words, *command]
        self._command = EngineCommand(words, variables[0], self._say)

    def _check(self, ranks: int) -> None:
        """EngineError where the cluster never has a processor for each rank: srun would wait."""
        if self._words or "SLURM_JOB_ID" in os.environ:
            return  # the user, or the allocation, says what there is
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%C"], capture_output=True, text=True, check=False
        )
        # Of each partition: processors allocated, idle, other, and their total.
        totals = [int(each.split("/")[3]) for each in done.stdout.split() if each.count("/") == 3]
        if totals and max(totals) < ranks:
            raise EngineError(
                "no partition of Slurm's can ever start so many ranks",
                got=f"{ranks} ranks, {max(totals)} processors",
                expected="a processor for each rank",
                hint="start fewer ranks, or say with --engine-arg=--overcommit that they may share",
            )

    def ended(self) -> str | None:
        return None if self._command is None else self._command.ended()

    def end(self) -> None:
        if self._command is not None:
            self._command.end()
