"""`init`: this process's rank, from what its launcher says."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from plancompiler.eager.spawn import reported
from plancompiler.eager.world import World, process_world, set_process_world
from plancompiler.errors import UsageError
from plancompiler.executor.comm.manager import CommContextManager

RANK = "PLANCOMPILER_RANK"
WORLD_SIZE = "PLANCOMPILER_WORLD_SIZE"
TOKEN = "PLANCOMPILER_WORLD_TOKEN"  # the name of a variable
PIPE = "PLANCOMPILER_LAUNCH_PIPE"
"""A descriptor that reads to its end when the launcher is gone."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """The variables in which a launcher says who a process is."""

    name: str
    rank: str
    size: str
    run: tuple[str, ...]
    """What tells apart runs on one host."""


LAUNCHERS = (
    Launcher("plancompiler launch", RANK, WORLD_SIZE, (TOKEN,)),
    Launcher("torchrun", "RANK", "WORLD_SIZE", ("TORCHELASTIC_RUN_ID", "MASTER_PORT")),
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
    ),
    Launcher("MPI (PMI)", "PMI_RANK", "PMI_SIZE", ("PMI_PORT", "PMI_JOBID", "PMI_FD")),
    Launcher("Slurm", "SLURM_PROCID", "SLURM_NTASKS", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)
"""In the order in which they are looked for: a launcher may run inside another."""


def init(deadline: float = 300.0, transport: str | None = None) -> World:
    """Join the world that this process was started in, and return it. May be called again.

    Rank and size are read from the variables of `plancompiler launch`, torchrun-like launchers,
    MPI and Slurm; without any, the world has one rank. `transport` is "host" (the default: all
    processes on one host, shared memory), "grpc" or "mpi"; see docs/communicators.md. `deadline`
    (seconds) holds for meeting the others and for every later wait. Raises UsageError for variables
    that make no sense and after `world.close()`, DeadlineError where others do not come.
    """
    world = process_world()
    if world is not None and world.closed:
        raise UsageError(
            "this process has closed its world",
            op="init",
            got="another pc.init()",
            expected="one world for each process that a launcher starts",
            hint="keep it open; pc.eager.spawn makes worlds of threads one after another",
        )
    if world is not None:
        return world
    rank, size, token = read_launcher(os.environ)
    comm = None
    if size > 1:
        # gRPC takes long to load, and a program of one rank has no use for it.
        from plancompiler.eager.transports import open_boards  # noqa: PLC0415

        boards = open_boards(transport, rank, size, token, deadline, os.environ)
        comm = CommContextManager(boards)
    world = World(rank, size, comm)
    set_process_world(world)
    if PIPE in os.environ:
        _end_with_launcher(int(os.environ[PIPE]))
    if comm is not None:
        _close_with_program(world)
        _tell_of_failure(comm)
    return world


def read_launcher(environment: Mapping[str, str]) -> tuple[int, int, str]:
    """Rank, number of ranks and the run's name, as the first launcher that speaks says."""
    for launcher in LAUNCHERS:
        if launcher.rank in environment and launcher.size in environment:
            rank, size = (
                _number(environment, name, launcher) for name in (launcher.rank, launcher.size)
            )
            if not 0 <= rank < size:
                raise UsageError(
                    f"{launcher.name} says a rank outside its world",
                    got=f"{launcher.rank}={rank}, {launcher.size}={size}",
                )
            named = [f"{name}={environment.get(name, '')}" for name in launcher.run]
            text = "\n".join([launcher.name, str(os.getuid()), *named])
            return rank, size, hashlib.sha256(text.encode()).hexdigest()
    return 0, 1, ""


def _number(environment: Mapping[str, str], name: str, launcher: Launcher) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise UsageError(
            f"a variable of {launcher.name} is no whole number",
            got=f"{name}={environment[name]}",
        ) from None


def _close_with_program(world: World) -> None:
    """Say goodbye when the main thread ends. The transport's thread ends then, and not before, so
    that what the interpreter runs at its exit would come too late.
    """

    def wait() -> None:
        threading.main_thread().join()
        world.close()

    threading.Thread(target=wait, name="plancompiler-close").start()


def _end_with_launcher(descriptor: int) -> None:
    """End this process when its launcher is gone, however that ended."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(descriptor, 1):
                pass
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="plancompiler-launcher", daemon=True).start()


def _tell_of_failure(comm: CommContextManager) -> None:
    """Wake the other ranks with the error by which this process ends."""
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        before(kind, error, traceback)
        comm.abort(reported(error))

    sys.excepthook = hook
