"""Worlds of threads: `spawn` runs one function on several ranks of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from plancompiler.blas.threads import one_blas_thread
from plancompiler.eager.world import World, set_thread_world
from plancompiler.errors import AbortedError, ExecutionError, PlanCompilerError, UsageError
from plancompiler.executor.comm.local import LocalHub
from plancompiler.executor.comm.local_rendezvous import LocalWorldLink
from plancompiler.executor.comm.manager import CommContextManager
from plancompiler.limits.time_limits import DEADLINE


def spawn(
    function: Callable[..., Any], ranks: int, *args: Any, deadline: float = DEADLINE
) -> list[Any]:
    """Run `function(*args)` as `ranks` ranks, each a thread; returns what they return, by rank.

    If one raises, the others are woken and end, and its error is raised here. `deadline` (seconds)
    bounds, in every wait, how long the other ranks may make no progress.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise UsageError("spawn needs a number of ranks", got=repr(ranks), expected="1 or more")
    if not callable(function):
        raise UsageError(
            "spawn takes a function that every rank calls",
            op="spawn",
            got=type(function).__name__,
            expected="pc.eager.spawn(function, ranks, *args)",
        )
    hub = LocalHub()
    results: list[Any] = [None] * ranks
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        comm = CommContextManager(LocalWorldLink(hub.link(rank), deadline))
        world = World(rank, ranks, comm)
        set_thread_world(world)
        try:
            results[rank] = function(*args)
        except BaseException as error:
            failures.append((rank, error))
            comm.abort(reported(error))
        finally:
            world.close()
            set_thread_world(None)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(ranks)
    ]
    with one_blas_thread():  # or the ranks fight over cores
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        _, error = next(
            (failure for failure in failures if not isinstance(failure[1], AbortedError)),
            failures[0],
        )
        raise error
    return results


def reported(error: BaseException) -> PlanCompilerError:
    """Any error in a form that other ranks can show."""
    if isinstance(error, PlanCompilerError):
        return error
    return ExecutionError("a rank raised an error", got=f"{type(error).__name__}: {error}")
