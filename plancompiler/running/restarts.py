"""A job that is started again where its ranks fail, from its last checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from plancompiler.errors import (
    CheckpointError,
    EngineError,
    FeedError,
    NonFiniteError,
    PlanCompilerError,
)
from plancompiler.executor.checkpoint import read_index
from plancompiler.executor.checkpoint_index import INDEX
from plancompiler.running.evaluation import Outputs
from plancompiler.running.session import Session

_REPEATED = (CheckpointError, EngineError, FeedError, NonFiniteError)
"""Failures that another start would meet again."""


def run_with_restarts(
    open_session: Callable[[Path | None], Session],
    steps: int,
    *,
    save: Path | None,
    save_every: int,
    restore: Path | None,
    max_restarts: int,
    stop: threading.Event,
    on_restart: Callable[[int, int, PlanCompilerError], None],
    at_end: Callable[[Session], None],
) -> Iterator[Outputs]:
    """Each step's outputs, once and in order. `at_end` is given the last session, still open.

    `open_session` opens a session from a checkpoint. Where one fails, the next goes on from the
    last checkpoint that this run has written into `save`, with its data and learning rates; steps
    that were done since then are made again, and give the same. `on_restart` hears which restart it
    is, how many steps are done, and why.
    """
    first = _saved_step(restore) if restore is not None else 0
    before = _identity(save)
    seen = 0
    """Steps whose outputs the caller has."""
    for restart in range(max_restarts + 1):
        source, done = restore, 0
        if save is not None and _identity(save) != before:
            source, done = save, _saved_step(save) - first
        try:
            with open_session(source) as session:
                outputs = session.run(steps - done, save=save, save_every=save_every, stop=stop)
                for number, each in enumerate(outputs, done):
                    if number >= seen:
                        seen += 1
                        yield each
                at_end(session)
        except _REPEATED:
            raise
        except PlanCompilerError as error:
            if restart == max_restarts or error.exit_code == 2 or stop.is_set():
                raise
            on_restart(restart + 1, seen, error)
        else:
            return


def _identity(folder: Path | None) -> tuple[int, int] | None:
    """Tells one checkpoint of a folder from another; None where there is none."""
    if folder is None or not (folder / INDEX).exists():
        return None
    about = (folder / INDEX).stat()
    return about.st_ino, about.st_mtime_ns


def _saved_step(folder: Path) -> int:
    return int(read_index(folder)["step"])
