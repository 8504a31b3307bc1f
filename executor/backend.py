"""What of a rank's run depends on its device: memory, binding of tasks, order of launching."""

from __future__ import annotations

from collections import deque
from functools import partial
from pathlib import Path
from typing import Protocol

from plancompiler.errors import PlanCompilerError
from plancompiler.executor.comm.link import Link, Publication
from plancompiler.executor.comm.publication import allocated, publication_of
from plancompiler.executor.memory import Array, Memory
from plancompiler.executor.stream import Notifier
from plancompiler.executor.task import OnOutput, Run, TaskBinder
from plancompiler.executor.trace import Recorder
from plancompiler.plan.plan import Plan, Task

Feeds = dict[str, deque[Array]]


class Binder(Protocol):
    """Makes the callables of one rank's tasks."""

    def bind(self, task: Task) -> Run | None:
        """The callable of a task, None where it has no work."""


class Backend(Protocol):
    """How one rank's plan is run on its device; used by one `Runtime`."""

    plan: Plan
    """The plan as its streams run it."""

    def memory(self, link: Link) -> Memory:
        """Take the rank's memory."""

    def recorder(self, folder: Path, first_step: int) -> Recorder:
        """What records the rank's timeline into a folder; asked for before `binder`, if at all."""

    def recorded(self, recorder: Recorder, task: Task, run: Run | None) -> Run | None:
        """A bound task's callable, recorded."""

    def publication(self, first_step: int) -> Publication:
        """What the rank lets its peers see."""

    def binder(
        self,
        memory: Memory,
        link: Link,
        feeds: Feeds,
        on_outputs: OnOutput | None,
        deadline: float,
    ) -> Binder:
        """What binds the rank's tasks; called once the ranks have met."""

    def notifier(self, link: Link) -> Notifier:
        """By whom streams tell other ranks of registers."""

    def begin(self) -> None:
        """The calling thread is about to run steps."""

    def finish(self) -> None:
        """Return when everything that ran is done."""

    def abort(self, error: PlanCompilerError) -> None:
        """Let go of everyone who waits for the device; from any thread, perhaps several times."""

    def close(self) -> None:
        """Let go of the device."""


class HostBackend:
    """Tasks run on the CPU, in the thread of their stream."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def memory(self, link: Link) -> Memory:
        """See `Backend.memory`."""
        return Memory(self.plan, partial(allocated, link))

    def recorder(self, folder: Path, first_step: int) -> Recorder:
        """See `Backend.recorder`."""
        return Recorder(self.plan, folder, first_step)

    def recorded(self, recorder: Recorder, task: Task, run: Run | None) -> Run | None:
        """See `Backend.recorded`."""
        return recorder.wrap(task, run)

    def publication(self, first_step: int) -> Publication:
        """See `Backend.publication`."""
        return publication_of(self.plan, first_step)

    def binder(
        self,
        memory: Memory,
        link: Link,
        feeds: Feeds,
        on_outputs: OnOutput | None,
        deadline: float,
    ) -> Binder:
        """See `Backend.binder`."""
        return TaskBinder(self.plan, memory, link, feeds, on_outputs)

    def notifier(self, link: Link) -> Notifier:
        """See `Backend.notifier`."""
        return link

    def begin(self) -> None:
        """See `Backend.begin`."""

    def finish(self) -> None:
        """See `Backend.finish`."""

    def abort(self, error: PlanCompilerError) -> None:
        """See `Backend.abort`."""

    def close(self) -> None:
        """See `Backend.close`."""
