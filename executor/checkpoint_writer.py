"""Writes checkpoints in a thread of its own, while steps go on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from plancompiler.errors import AbortedError, CheckpointError, PlanCompilerError
from plancompiler.executor.checkpoint import KeepGoing
from plancompiler.executor.stream import SIGNAL_CHECK


class CheckpointWriter:
    """Writes one checkpoint at a time, of values that were copied when its step ended.

    A failure is kept until somebody asks (`check`, `wait`, `start`), and is raised once. All
    methods belong to one thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._given_up = threading.Event()

    def start(self, write: Callable[[KeepGoing], None]) -> None:
        """Begin to write, after what was begun before. Raises what that failed with.

        `write` calls what it is given between pieces of its files.
        """
        self.wait()
        self._given_up.clear()
        self._thread = threading.Thread(target=self._run, args=(write,), name=self._name)
        self._thread.start()

    def check(self) -> None:
        """Raise what a finished write failed with."""
        if self._thread is None or self._thread.is_alive():
            return
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is None:
            return
        if isinstance(failure, PlanCompilerError):
            raise failure
        raise CheckpointError(
            "a checkpoint could not be written", got=f"{type(failure).__name__}: {failure}"
        ) from failure

    def wait(self) -> None:
        """Return when everything is written; raises what failed."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(SIGNAL_CHECK)
        self.check()

    def stop(self) -> None:
        """Give up what is not written yet; what is half done leaves no trace."""
        self._given_up.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        self._failure = None

    def _run(self, write: Callable[[KeepGoing], None]) -> None:
        try:
            write(self._keep_going)
        except BaseException as error:
            self._failure = error

    def _keep_going(self) -> None:
        if self._given_up.is_set():
            raise AbortedError("the checkpoint is not wanted any more")
