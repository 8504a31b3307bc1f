"""From the name of an engine to its launcher."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import cast

from plancompiler.engines.hosted import LOOPBACK, Engine, HostedLauncher
from plancompiler.engines.launcher import Launcher
from plancompiler.engines.local import LocalLauncher
from plancompiler.errors import UsageError

LOCAL = "local"
ENGINES = {LOCAL: "", "mpi": "Mpi", "slurm": "Slurm", "ray": "Ray", "dask": "Dask"}
"""Engine to its class, in the module with its name; that of `local` starts no agents."""


def open_launcher(
    engine: str,
    say: Callable[[str], None],
    *,
    words: Sequence[str] = (),
    address: str = LOOPBACK,
    output_to_error: bool = False,
) -> Launcher:
    """A launcher. Lines of the engine itself go to `say`; `words` are options for it.

    With `output_to_error` the ranks' standard output goes to this process's standard error.
    EngineError where the engine is not installed.
    """
    if engine not in ENGINES:
        raise UsageError("unknown engine", got=repr(engine), expected=" or ".join(ENGINES))
    if engine == LOCAL:
        if words:
            raise UsageError("the engine local takes no options", got=" ".join(words))
        return LocalLauncher(os.environ, sys.stderr.fileno() if output_to_error else None)

    module = importlib.import_module(f"plancompiler.engines.{engine}")
    make = cast("Callable[..., Engine]", getattr(module, ENGINES[engine]))
    return HostedLauncher(make(words, say), output_to(error=output_to_error), say, address)


def output_to(*, error: bool) -> Callable[[int, str], None]:
    """What passes on lines of ranks' standard output to this process's, or to standard error."""
    stream = sys.stderr if error else sys.stdout

    def output(_rank: int, line: str) -> None:
        stream.write(line)
        stream.flush()

    return output
