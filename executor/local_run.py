"""`LocalWorld`: all ranks of a job in this process, a thread per rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import TypeVar

from plancompiler.errors import AbortedError, NonFiniteError, PlanCompilerError, RankError
from plancompiler.executor.comm.local import LocalHub
from plancompiler.executor.cuda.interface import Device
from plancompiler.executor.fed_rates import Rates
from plancompiler.executor.feeds import check_feed_names
from plancompiler.executor.finite_check import anomaly_wanted
from plancompiler.executor.memory import Array
from plancompiler.executor.runtime import LEAVE_SECONDS, Runtime
from plancompiler.executor.stream import SIGNAL_CHECK
from plancompiler.executor.threads import WorkThread, settle
from plancompiler.ir.closing import Closing
from plancompiler.limits.time_limits import DEADLINE
from plancompiler.plan.plan import Plan

T = TypeVar("T")


class LocalWorld(Closing):
    """Runs the plans of all ranks with the `local` link.

        with LocalWorld(plans) as world:
            print(world.step({"x": batch})["loss"])

    `variables` are shards by rank and variable name, `devices` the devices of ranks that have one;
    see `Runtime` for the other arguments. The
    first failure of any rank stops all and is raised; afterwards only `close` makes sense, unless
    it was a NonFiniteError and `keep` is set: then there are no more steps, but `variables`. A rank
    that is then in a task that does not end is left behind. One that has nothing to do gets no
    thread.
    """

    def __init__(
        self,
        plans: Mapping[int, Plan],
        *,
        variables: Mapping[int, Mapping[str, Array]] | None = None,
        first_step: int = 0,
        deadline: float = DEADLINE,
        record: Path | None = None,
        devices: Mapping[int, Device | str] | None = None,
        anomaly: bool | None = None,
        keep: bool = False,
    ) -> None:
        self._hub = LocalHub()
        self._outputs: dict[int, dict[str, Array]] = {}
        self._outputs_lock = threading.Lock()
        given = variables if variables is not None else {}
        self._anomaly = anomaly_wanted() if anomaly is None else anomaly
        self._keep = keep
        self._not_finite: NonFiniteError | None = None
        """Why there are no more steps."""
        self._runtimes = {
            rank: Runtime(
                plan,
                self._hub.link(rank),
                variables=given.get(rank),
                first_step=first_step,
                on_outputs=self._collect,
                deadline=deadline,
                record=record,
                device=None if devices is None else devices.get(rank),
                anomaly=self._anomaly,
                keep=keep,
            )
            for rank, plan in plans.items()
            if not plan.is_idle
        }
        self._idle = plans.keys() - self._runtimes.keys()
        self._inputs = {
            name: None for runtime in self._runtimes.values() for name in runtime.input_names
        }
        self._step = first_step
        self._closed = False
        self._left = False
        """Whether a rank is left behind in its task."""
        self._threads = {rank: WorkThread(f"plancompiler-rank-{rank}") for rank in self._runtimes}
        try:
            self._on_all(lambda runtime: runtime.prepare())
        except BaseException:
            self.close()
            raise

    def step(
        self, feeds: Mapping[str, object] | None = None, rates: Rates | None = None
    ) -> dict[str, Array]:
        """Run one step on all ranks with these global arrays; its outputs by name. `rates` as in
        `Runtime.run`.
        """
        if self._not_finite is not None:
            raise self._not_finite
        given = feeds if feeds is not None else {}
        check_feed_names(given, self._inputs)
        # Feeding checks the arrays, so all ranks are fed before any of them starts.
        for runtime in self._runtimes.values():
            runtime.feed({name: given[name] for name in runtime.input_names})
        return self._run(1, rates)[0]

    def run(self, steps: int, rates: Rates | None = None) -> list[dict[str, Array]]:
        """Run steps of a job without inputs; the outputs of each step."""
        if steps > 0:
            check_feed_names({}, self._inputs)
        if self._not_finite is not None:
            raise self._not_finite
        if not (self._keep and self._anomaly):
            return self._run(steps, rates)
        # Variables are kept as they were before each step.
        return [
            self._run(1, {name: rate[at : at + 1] for name, rate in (rates or {}).items()})[0]
            for at in range(steps)
        ]

    def _run(self, steps: int, rates: Rates | None) -> list[dict[str, Array]]:
        try:
            self._on_all(partial(Runtime.run, steps=steps, rates=rates))
        except NonFiniteError as error:
            if self._keep:
                self._not_finite = error
                self._outputs.clear()
                if not self._anomaly:
                    self._step += steps
            raise
        first = self._step
        self._step += steps
        return [self._outputs.pop(step, {}) for step in range(first, self._step)]

    def _collect(self, step: int, name: str, value: Array) -> None:
        with self._outputs_lock:
            self._outputs.setdefault(step, {})[name] = value

    def _on_all(self, work: Callable[[Runtime], T]) -> list[T]:
        """Do something on all ranks at once; raises the first cause where any fails."""
        futures: list[Future[T]] = []
        try:
            for rank, runtime in self._runtimes.items():
                future: Future[T] = Future()
                self._threads[rank].put(partial(settle, future, partial(work, runtime)))
                futures.append(future)
            while wait(futures, SIGNAL_CHECK).not_done and self._hub.failure is None:
                pass
        except BaseException:
            self.abort(AbortedError("the run was interrupted"))
            wait(futures, LEAVE_SECONDS)
            raise
        left = wait(futures, LEAVE_SECONDS).not_done
        errors = [
            error
            for future in futures
            if future not in left and (error := future.exception()) is not None
        ]
        failure = self._hub.failure
        if errors or left:
            self._left = bool(left)
            raise failure[1] if failure is not None else errors[0]
        return [future.result() for future in futures]

    @property
    def steps_done(self) -> int:
        """After how many steps the variables are what `variables` gives."""
        return self._step

    def variables(self, rank: int, names: Collection[str] | None = None) -> dict[str, Array]:
        """Copies of a rank's shards of variables, by name: of all, or of these. After a
        NonFiniteError (with `keep`) those after the run that failed, or before it with `anomaly`.
        """
        if rank in self._idle:
            return {}
        try:
            runtime = self._runtimes[rank]
        except KeyError:
            raise RankError(
                "no such rank",
                got=rank,
                expected=f"one of {sorted({*self._runtimes, *self._idle})}",
            ) from None
        if self._not_finite is not None:
            return runtime.state(names, before=True)[0]
        return runtime.variables(names)

    def assign(self, shards: Mapping[int, Mapping[str, Array]]) -> None:
        """Write shards of variables, by rank and name; between steps."""
        for rank, runtime in self._runtimes.items():
            runtime.assign(shards.get(rank, {}))

    def abort(self, error: PlanCompilerError) -> None:
        """Stop all ranks; from any thread."""
        for runtime in self._runtimes.values():
            runtime.abort(error)

    def close(self) -> None:
        """Stop all ranks, join all threads and free the memory. May be called again."""
        if self._closed:
            return
        self._closed = True
        # Of those that are left behind, nobody waits a second time.
        seconds = 0.1 if self._left else LEAVE_SECONDS
        for runtime in self._runtimes.values():
            runtime.close()
        for thread in self._threads.values():
            thread.close(seconds)
