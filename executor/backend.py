"""What of a rank's run depends on its device: memory, binding of tasks, order of launching."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from plancompiler.errors import PlanCompilerError
from plancompiler.executor.actor import Notice
from plancompiler.executor.comm.link import Link, Publication
from plancompiler.executor.comm.publication import allocated, publication_of
from plancompiler.executor.memory import Array, Memory
from plancompiler.executor.task import OnOutput, Run, TaskBinder
from plancompiler.executor.trace import Recorder
from plancompiler.plan.plan import Plan, Task

Feeds = dict[str, deque[Array]]


class Backend:
    """How one rank's plan is run, used by one `Runtime`: here on the CPU, in its streams' threads.

    `plan` is the plan as its streams run it.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def memory(self, link: Link) -> Memory:
        """Take the rank's memory."""
        return Memory(self.plan, partial(allocated, link))

    def recorder(self, folder: Path, first_step: int) -> Recorder:
        """What records the rank's timeline into a folder; asked for before `binder`, if at all."""
        return Recorder(self.plan, folder, first_step)

    def recorded(self, recorder: Recorder, task: Task, run: Run | None) -> Run | None:
        """A bound task's callable, recorded."""
        return recorder.wrap(task, run)

    def publication(self, first_step: int) -> Publication:
        """What the rank lets its peers see."""
        return publication_of(self.plan, first_step)

    def binder(
        self,
        memory: Memory,
        link: Link,
        feeds: Feeds,
        on_outputs: OnOutput | None,
        deadline: float,
    ) -> TaskBinder:
        """What binds the rank's tasks; called once the ranks have met."""
        return TaskBinder(self.plan, memory, link, feeds, on_outputs)

    def notifier(self, link: Link) -> Callable[[Notice], None]:
        """What tells other ranks of registers."""
        return link.notify

    def begin(self) -> None:
        """The calling thread is about to run steps."""

    def finish(self) -> None:
        """Return when everything that ran is done."""

    def abort(self, error: PlanCompilerError) -> None:
        """Let go of everyone who waits for the device; from any thread, perhaps several times."""

    def close(self) -> None:
        """Let go of the device."""
