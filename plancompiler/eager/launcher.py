"""`init`: this process's rank, from what its launcher says."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import TracebackType

import numpy as np

from plancompiler.blas.loaded_library import numeric_kernels
from plancompiler.eager.spawn import reported
from plancompiler.eager.world import World, process_world, set_process_world
from plancompiler.engines.launch_variables import PIPE, read_launcher
from plancompiler.errors import MixedKernelsError, UsageError
from plancompiler.executor.comm.manager import CommContextManager
from plancompiler.executor.comm.rendezvous import WorldLink
from plancompiler.limits.time_limits import START_DEADLINE
from plancompiler.plan.digest import check_kernels


def init(
    deadline: float | None = None,
    transport: str | None = None,
    *,
    start_deadline: float = START_DEADLINE,
    allow_mixed_kernels: bool | None = None,
) -> World:
    """Join the world that this process was started in, and return it. May be called again.

    Rank and size are read from the variables of `plancompiler launch`, torchrun-like launchers,
    MPI and Slurm; without any, the world has one rank. `transport` is "host" (the default: all
    processes on one host, shared memory), "grpc" or "mpi"; see docs/communicators.md.
    `start_deadline` (seconds) bounds the wait for the other ranks to join. In every later wait,
    `deadline` (seconds) bounds how long another rank may make no progress: by default 30, and 300
    for ranks whose work cannot be seen from here, over gRPC and MPI. Raises UsageError for
    inconsistent variables and after `world.close()`, DeadlineError if other ranks do not join, and
    MixedKernelsError if they compute with other kernels of NumPy or its BLAS; with
    `allow_mixed_kernels` (by default PLANCOMPILER_ALLOW_MIXED_KERNELS) this is only a warning.
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
    launched = read_launcher(os.environ)
    rank, size = launched.rank, launched.size
    comm = None
    if size > 1:
        # gRPC takes long to load, and a program of one rank has no use for it.
        from plancompiler.eager.transports import open_world  # noqa: PLC0415

        link = open_world(transport, launched, deadline, start_deadline, os.environ)
        comm = CommContextManager(link)
        try:
            _compare_kernels(link, size, allow_mixed_kernels)
        except BaseException as error:
            if not isinstance(error, MixedKernelsError):  # which all ranks raise by themselves
                comm.abort(reported(error))
            comm.close()
            raise
    world = World(rank, size, comm)
    set_process_world(world)
    if PIPE in os.environ:
        _end_with_launcher(int(os.environ[PIPE]))
    if comm is not None:
        _close_with_program(world)
        _tell_of_failure(comm)
    return world


def _compare_kernels(link: WorldLink, size: int, allowed: bool | None) -> None:
    """All ranks compare their numeric kernels. They use a rendezvous of their own, so that the
    world's communicators and their records are left to the program."""
    rendezvous = link.rendezvous(tuple(range(size)), "kernels")
    label = "comparing kernels in pc.init()"
    text = np.frombuffer(numeric_kernels().encode(), np.uint8)
    shown = rendezvous.publish("kernels", (text,), label)
    texts = [bytes(arrays[0]).decode(errors="replace") for _, arrays in shown]
    rendezvous.release(label)
    check_kernels(dict(enumerate(texts)), allowed)


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
