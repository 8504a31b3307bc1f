"""`Runtime`: one rank's plan, prepared and run step by step."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from plancompiler.errors import (
    AbortedError,
    DeviceError,
    ExecutionError,
    FeedError,
    PlanCompilerError,
    UsageError,
)
from plancompiler.executor.actor_loader import load_actors
from plancompiler.executor.backend import Backend
from plancompiler.executor.comm.link import Group, GroupKey, Link
from plancompiler.executor.comm.publication import communicator_keys
from plancompiler.executor.cuda.interface import Device
from plancompiler.executor.external_storage import ExternalStorage
from plancompiler.executor.fed_rates import FedRates, Rates
from plancompiler.executor.feeds import check_feed, check_feed_names, input_specs
from plancompiler.executor.finite_check import anomaly_wanted
from plancompiler.executor.initial_values import SharedReads, initial_value
from plancompiler.executor.memory import Array, Memory
from plancompiler.executor.stream import SIGNAL_CHECK, WAKE, StreamRunner
from plancompiler.executor.task import Adapt, OnOutput, TaskBinder
from plancompiler.executor.token_queue import TokenQueue, token_queues
from plancompiler.executor.trace import Recorder
from plancompiler.executor.watchdog import Sight, Watchdog
from plancompiler.ir import UNKNOWN_SOURCE
from plancompiler.ir.closing import Closing
from plancompiler.limits import time_limits
from plancompiler.limits.time_limits import DEADLINE, at_start, if_unseen
from plancompiler.plan.plan import Plan, Task, communicator_of

LEAVE_SECONDS = time_limits.TASK_LEAVE
"""How long after a failure a stream may still be in its task; then it is left behind."""
_END_SECONDS = time_limits.STREAM_END
"""How long a stream may take to end that is in no task."""


class Runtime(Closing):
    """Runs one rank's plan.

        with Runtime(plan, transport, on_outputs=report) as runtime:
            runtime.prepare()
            runtime.feed({"x": batch})
            runtime.run(1)

    `variables` are this rank's shards by variable name; a variable that is not among them is
    initialised from the job's seed. `first_step` is the number of the first step, for a run that
    goes on from a checkpoint. `on_outputs(step, name, value)` is called from the stream's thread
    for every output that this rank reports; the array belongs to the receiver. `deadline` (seconds)
    is how long a rank may stand still while others wait for it (see `watchdog`). `record` is a
    folder in which the rank's timeline is recorded (see `trace`). `device` is the local device of a
    plan for devices: `cuda:1`, say, or one that is open. `adapt` gives other kernels for ops. With
    `anomaly` (default: as PLANCOMPILER_ANOMALY says) every op on the host is checked, and the one
    that makes the first value that is not finite fails the step. A DeviceError refuses it on
    devices.

    With `keep` the variables can be saved after a NonFiniteError (see `state`). An output that is
    not finite then does not stop the run, so that all ranks are at the same step when it raises.
    With `anomaly` too, every run copies the variables before it begins.

    `run`, `feed`, `prepare` and `variables` belong to one thread; `abort` may come from any.
    After a failure `run` raises it again, and only `close` makes sense, and `state` where
    `can_be_saved` says so.
    """

    def __init__(
        self,
        plan: Plan,
        link: Link,
        *,
        variables: Mapping[str, Array] | None = None,
        first_step: int = 0,
        on_outputs: OnOutput | None = None,
        deadline: float = DEADLINE,
        record: Path | None = None,
        device: Device | str | None = None,
        adapt: Adapt | None = None,
        anomaly: bool | None = None,
        keep: bool = False,
    ) -> None:
        if link.rank != plan.rank:
            raise UsageError(
                "a plan was given the link of another rank",
                got=f"rank {link.rank}",
                expected=f"rank {plan.rank}",
            )
        self.plan = plan
        self._link = link
        self._given = dict(variables) if variables is not None else {}
        self._on_outputs = on_outputs
        self._start_deadline = at_start(deadline)
        self._record = record
        self._adapt = adapt
        self._anomaly = anomaly_wanted() if anomaly is None else anomaly
        self._keep = keep
        self._before: tuple[dict[str, Array], int] | None = None
        """The variables before the latest run, and how many steps were done then."""
        self._ended_well = True
        """Whether no run is under way, nor has failed."""
        self._not_finite: PlanCompilerError | None = None
        """What the run raises when it has reached its end."""
        self.finite_until = sys.maxsize
        """The first step of which an output is known not to be finite."""
        self._rates = FedRates()
        self._recorder: Recorder | None = None
        self._first_step = first_step
        self._steps_done = first_step
        self._memory: Memory | None = None
        self._runners: tuple[StreamRunner, ...] = ()
        self._queues: tuple[TokenQueue, ...] = ()
        self._going = 0
        """Streams that have not ended the run at hand."""
        self._end: SimpleQueue[None] = SimpleQueue()
        """Of that run, once all streams have ended it."""
        self._failure: PlanCompilerError | None = None
        self._leave_at = 0.0
        """When streams are left behind that are in a task since before the failure."""
        self._watchdog: Watchdog | None = None
        self._external_storage: ExternalStorage | None = None
        self._binder: TaskBinder | None = None
        self._groups: dict[int, Group] = {}
        """Of collective tasks."""
        self._state = threading.RLock()
        self._closed = False
        self._inputs = input_specs(plan)
        self._feeds: dict[str, deque[Array]] = {name: deque() for name in self._inputs}
        self._backend = _backend_of(plan, device, self._launched_failed)
        self._deadline = deadline if self._backend.plan.device == "cpu" else if_unseen(deadline)
        self._actors = load_actors(self._backend.plan, first_step)
        if self._anomaly and self._backend.plan.device != "cpu":
            raise DeviceError(
                "anomaly detection looks at what ops leave in the memory of the host",
                rank=plan.rank,
                got=f"a plan for {self._backend.plan.device}",
                expected="a plan for CPUs",
                hint="run the job on CPUs to find the op, or without anomaly detection",
            )

    # --- life -----------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Take memory, initialise variables and meet the other ranks."""
        if self._memory is not None or self._closed:
            raise UsageError("a runtime can be prepared once", rank=self.plan.rank)
        try:
            with np.errstate(all="ignore"):
                self._memory = memory = self._backend.memory(self._link)
                reads = SharedReads(self._backend.plan, self._link, self._given)
                self._set_variables(memory, reads.names)
                actors = self._actors.actors
                self._queues = token_queues(len(actors))
                if self._record is not None:
                    self._recorder = self._backend.recorder(self._record, self._first_step)
                publication = reads.published(self._backend.publication(self._first_step))
                self._link.connect(publication, self, self._start_deadline)
                reads.read(memory, publication.peers)
                binder = self._backend.binder(
                    memory, self._link, self._feeds, self._on_outputs, self._deadline
                )
                binder.adapt, binder.rates = self._adapt, self._rates
                binder.anomaly = self._anomaly
                if self._keep:
                    binder.on_not_finite = self._output_not_finite
                self._binder = binder
                notify = self._backend.notifier(self._link)
                self._runners = tuple(
                    StreamRunner(
                        actor,
                        tasks,
                        [self._bind(binder, task) for task in tasks],
                        self._queues,
                        index,
                        notify,
                        self,
                        # Which step kernels that were adapted are in is not known ahead.
                        reads_ahead=self._adapt is None,
                    )
                    for index, (actor, tasks) in enumerate(
                        zip(actors, self._actors.tasks, strict=True)
                    )
                )
        except BaseException as error:
            self._fail(error, None)
            failure = self._raised()
            if error is failure or not isinstance(error, Exception):
                raise
            raise failure from failure.__cause__
        if publication.peers:
            self._watch()
        if len(self._runners) > 1:
            for runner in self._runners:
                runner.start(f"plancompiler-{self.plan.rank}-{runner.actor.stream}")

    def _watch(self) -> None:
        plan = self._backend.plan
        if plan.device == "cpu":  # devices' collectives have their own communicators
            keys = [GroupKey(*each, "") for each in communicator_keys(plan)]
            self._groups = {
                task.id: self._link.group(keys[used]._replace(stream=str(task.stream)))
                for task in plan.tasks
                if (used := communicator_of(task.spec)) is not None
            }
        self._watchdog = Watchdog(
            plan.rank,
            self._deadline,
            self._look,
            self._link.tell,
            self.abort,
            self._link.process_of,
        )
        self._link.watch(self._watchdog.note)
        self._watchdog.start()

    def _look(self) -> list[Sight]:
        """Where the streams stand; for the watchdog."""
        return [runner.sight(self._groups) for runner in self._runners]

    def _bind(self, binder: TaskBinder, task: Task) -> Any:
        try:
            run = binder.bind(task)
        except PlanCompilerError as error:
            raise error.at(op=task.name, source=_source(task), rank=self.plan.rank) from None
        return run if self._recorder is None else self._backend.recorded(self._recorder, task, run)

    def close(self) -> None:
        """Stop all streams, join their threads, leave the other ranks and free the memory."""
        with self._state:
            if self._closed:
                return
            self._closed = True
        if self.running:
            self.abort(AbortedError("the run was closed in the middle of a step"))
        self._leave_at = self._leave_at or time.monotonic() + LEAVE_SECONDS
        for runner in self._runners:
            runner.close(max(self._leave_at - time.monotonic(), _END_SECONDS))
        if self._watchdog is not None:
            self._watchdog.close()
        self._backend.close()
        self._link.close()
        self._runners = ()
        self._groups.clear()
        if self._recorder is not None:
            self._recorder.close()
        if self._memory is not None:
            self._memory.close()
        self._feeds.clear()
        self._before = None
        self._external_storage = self._binder = None
        # The frames in a failure's traceback hold arrays, and with them the memory.
        error: BaseException | None = self._failure
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__

    # --- steps ----------------------------------------------------------------------------------

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs that this rank takes a part of."""
        return tuple(self._inputs)

    @property
    def steps_done(self) -> int:
        """Number of the next step to run."""
        return self._steps_done

    @property
    def running(self) -> bool:
        """Whether a stream is in the middle of a run."""
        return any(runner.actor.step < runner.actor.limit for runner in self._runners)

    def feed(self, step_feeds: Mapping[str, object]) -> None:
        """Queue the inputs of one step: for each input of this rank the whole global array.

        Shape and dtype must be exactly the input's; only a Python bool, int or float is converted,
        for an input of shape (). Arrays are read when the step runs and must not change until then.
        Raises FeedError for a missing or unknown name and for a value that does not fit.
        """
        check_feed_names(step_feeds, self._inputs)
        checked = {
            name: check_feed(name, step_feeds[name], shape, dtype)
            for name, (shape, dtype) in self._inputs.items()
        }
        for name, array in checked.items():
            self._feeds[name].append(array)

    def run(self, steps: int, rates: Rates | None = None) -> None:
        """Run `steps` more steps and return when this rank has done them.

        `rates` are learning rates in place of the plan's own.

        Raises the first failure, with op, source line and rank; or AbortedError where another rank
        failed first.
        """
        if self._keep and self._anomaly and self._ended_well:
            # Before all else: another rank may have failed before this one begins.
            self._before = self.variables(), self._steps_done
        self._check_ready(steps)
        self._rates.feed({} if rates is None else rates, self._steps_done, steps)
        self._ended_well = False
        target = self._steps_done + steps
        try:
            with self._state:
                if self._failure is None:
                    for runner in self._runners:
                        runner.actor.limit = target
            if len(self._runners) == 1:
                self._run_here(self._runners[0])
            elif self._runners and steps > 0:
                self._going = len(self._runners)
                for runner in self._runners:
                    runner.go_on()
                self._wait_for_the_end()
        except BaseException:
            # Ctrl-C while waiting: stop the streams before anything else happens.
            self.abort(AbortedError("the run was interrupted", rank=self.plan.rank))
            for runner in self._runners:
                runner.close(LEAVE_SECONDS)
            raise
        if self._failure is not None:
            raise self._raised()
        self._steps_done = target
        if self._not_finite is not None:
            raise self._not_finite
        self._ended_well = True

    def _wait_for_the_end(self) -> None:
        """Until all streams have ended the run, or are left behind after a failure."""
        while self._failure is None or time.monotonic() < self._leave_at:
            try:
                self._end.get(timeout=SIGNAL_CHECK)
            except Empty:
                continue
            return

    def _stream_ended(self) -> None:
        """Only the last one wakes who waits: each waking takes as long as a small task."""
        with self._state:
            self._going -= 1
            is_last = not self._going
        if is_last:
            self._end.put(None)

    def _run_here(self, runner: StreamRunner) -> None:
        try:
            self._backend.begin()
            runner.run_here()
        except Exception as error:
            self._task_failed(error, runner.current_task(), runner.actor.step_position)
            return
        try:
            self._backend.finish()
        except Exception as error:
            self._fail(error, None)

    def _prepared(self) -> Memory:
        if self._memory is None or self._closed:
            raise UsageError("a runtime must be prepared and not closed", rank=self.plan.rank)
        return self._memory

    def _check_ready(self, steps: int) -> None:
        if self._failure is not None:
            raise self._raised()
        if self._not_finite is not None:
            raise self._not_finite
        self._prepared()
        if steps < 0:
            raise UsageError("the number of steps is negative", got=steps)
        for name, waiting in self._feeds.items():
            if len(waiting) < steps:
                raise FeedError(
                    f"input {name!r} was not fed for all steps",
                    rank=self.plan.rank,
                    got=f"{len(waiting)} steps fed",
                    expected=f"{steps} steps",
                )

    def variables(self, names: Collection[str] | None = None) -> dict[str, Array]:
        """Copies of this rank's shards of variables, by name: of all, or of these; between runs."""
        memory = self._prepared()
        self._backend.begin()
        return {
            variable.name: memory.read(variable.register)
            for variable in self.plan.variables
            if names is None or variable.name in names
        }

    @property
    def can_be_saved(self) -> bool:
        """Whether the variables are those of a whole number of steps, now or before the latest
        run: so it is unless a run has failed in the middle.
        """
        return self._failure is None or self._before is not None

    def state(
        self, names: Collection[str] | None = None, before: bool = False
    ) -> tuple[dict[str, Array], int]:
        """Copies of these variables, and after how many steps they are that. With `before` as they
        were before the latest run, if they were kept. Raises the failure of a run that has left
        them in the middle of a step.
        """
        if before and self._before is not None:
            kept, steps = self._before
            return {name: kept[name] for name in kept if names is None or name in names}, steps
        if self._failure is not None:
            raise self._raised()
        return self.variables(names), self._steps_done

    def shards(self) -> dict[str, Array]:
        """The arrays themselves that hold this rank's shards on the CPU, by variable name. They may
        be read and written between runs, when no peer is in the middle of one.
        """
        memory = self._prepared()
        return {
            variable.name: memory.slots(variable.register)[0] for variable in self.plan.variables
        }

    def assign(self, arrays: Mapping[str, Array]) -> None:
        """Write shards of variables; between runs, when no peer is in the middle of one."""
        memory = self._prepared()
        for variable in self.plan.variables:
            if variable.name in arrays:
                memory.write(variable.register, arrays[variable.name])

    @property
    def movable(self) -> Collection[str]:
        """Names of the variables that `place` can give other memory: those of the CPU that no peer
        reads.
        """
        memory = self._prepared()
        if self._backend.plan.device != "cpu":
            return ()
        if self._external_storage is None:
            publication = self._backend.publication(self._first_step)
            self._external_storage = ExternalStorage(self.plan, memory, publication)
        return self._external_storage.movable

    def place(self, arrays: Mapping[str, Array | None]) -> None:
        """Let variables that are `movable` lie in these arrays from now on, and be read and written
        there; None for the plan's own memory. Nothing is copied. Between runs; the arrays are
        contiguous and writable, of the shard's shape and dtype.
        """
        fixed = sorted(arrays.keys() - set(self.movable))
        if fixed or self._external_storage is None or self._binder is None:
            raise UsageError(
                "variables cannot lie in other memory: others read them, or the plan has none such",
                rank=self.plan.rank,
                got=", ".join(map(repr, fixed)),
            )
        touched = self._external_storage.place(arrays)
        for runner, tasks in zip(self._runners, self._actors.tasks, strict=True):
            for position, task in enumerate(tasks):
                if task.id in touched:
                    runner.exchange(position, self._bind(self._binder, task))

    def _set_variables(self, memory: Memory, shared: Collection[str]) -> None:
        """Give variables their initial values, but for those that are read together with others."""
        names = {variable.name for variable in self.plan.variables}
        unknown = sorted(self._given.keys() - names)
        if unknown:
            raise FeedError(
                "a value was given for a variable that this rank does not have",
                rank=self.plan.rank,
                got=", ".join(map(repr, unknown)),
                expected=", ".join(map(repr, sorted(names))) or "no variables",
            )
        fresh = self._backend.plan.device == "cpu"  # its memory is all zeros
        for variable in self.plan.variables:
            if variable.name in shared:
                continue
            target = memory.slots(variable.register)[0]
            given = self._given.get(variable.name)
            if given is None and fresh and dict(variable.attrs)["init"] == "zeros":
                continue  # pages that nobody touches cost nothing
            if given is None:
                value = initial_value(variable, self.plan.seed, target if fresh else None)
                if value is not target:
                    memory.write(variable.register, value)
            elif given.shape != target.shape or given.dtype != target.dtype:
                raise FeedError(
                    f"the value given for variable {variable.name!r} does not fit its shard",
                    rank=self.plan.rank,
                    got=f"{given.dtype}{list(given.shape)}",
                    expected=f"{target.dtype}{list(target.shape)}",
                )
            else:
                memory.write(variable.register, given)
        self._given.clear()

    # --- failure --------------------------------------------------------------------------------

    def abort(self, error: PlanCompilerError) -> None:
        """Stop this rank and tell the others; from any thread. The first failure counts."""
        self._fail(error, None)

    def _task_failed(self, error: BaseException, task: Task | None, step_position: str) -> None:
        if self.plan.microbatches > 1:
            error = _as_error(error, task, self.plan.rank)
            report = error.report
            if not isinstance(error, AbortedError) and step_position not in str(error):
                error.report = replace(report, what=f"{report.what} ({step_position})")
        self._fail(error, task)

    def _fail(
        self, error: BaseException, task: Task | None, failed_rank: int | None = None
    ) -> None:
        known = _as_error(error, task, self.plan.rank)
        with self._state:
            if self._failure is None:
                self._leave_at = time.monotonic() + LEAVE_SECONDS
                self._failure = known
            # Streams look at the limit before every task, so this stops them at the next one.
            for actor in self._actors.actors:
                actor.limit = -1
        self._link.abort(self.plan.rank if failed_rank is None else failed_rank, known)
        self._backend.abort(known)
        for queue in self._queues:
            queue.put(WAKE)

    def _raised(self) -> PlanCompilerError:
        failure = self._failure
        return failure if failure is not None else ExecutionError("the run failed")

    def _output_not_finite(self, step: int, error: PlanCompilerError, task: Task) -> None:
        """The run goes on to its end, and raises this there. See `task.OnNotFinite`."""
        with self._state:
            if step < self.finite_until:
                self.finite_until = step
                self._not_finite = _as_error(error, task, self.plan.rank)

    def _launched_failed(self, error: BaseException) -> None:
        """Work that was launched on the device has failed."""
        self._fail(error, None)

    # --- called by streams and by the transport ---------------------------------------------------

    def stream_failed(self, error: BaseException, task: Task | None, step_position: str) -> None:
        """See `stream.StreamOwner`."""
        self._task_failed(error, task, step_position)
        self._stream_ended()

    def stream_reached_limit(self) -> None:
        """See `stream.StreamOwner`."""
        self._stream_ended()

    def notice(self, kind: int, register: int, task: int) -> None:
        """See `comm.base.Sink`."""
        try:
            stream, token = self._actors.find_remote(kind, register, task)
        except ExecutionError as error:
            self._fail(error, None)
        else:
            self._queues[stream].put(token)

    def peer_failed(self, error: PlanCompilerError) -> None:
        """See `comm.base.Sink`."""
        self._fail(error, None, error.report.rank)


def _source(task: Task) -> object | None:
    return None if task.source == UNKNOWN_SOURCE else task.source


def _as_error(error: BaseException, task: Task | None, rank: int) -> PlanCompilerError:
    """A failure with its place filled in; what is not one of our errors is wrapped."""
    if isinstance(error, AbortedError):
        return error
    if not isinstance(error, PlanCompilerError):
        wrapped = ExecutionError(f"{type(error).__name__}: {error}")
        wrapped.__cause__ = error
        error = wrapped
    if task is None:
        return error.at(rank=rank)
    return error.at(op=task.name, source=_source(task), rank=rank)


def _backend_of(
    plan: Plan, device: Device | str | None, failed: Callable[[BaseException], None]
) -> Backend:
    """The backend for a plan's device type. `failed` is called with failures of work that was
    launched before.
    """
    if plan.device == "cpu":
        return Backend(plan)
    # It takes long to load, and ranks on CPUs have no use for it.
    from plancompiler.executor.cuda.backend import DeviceBackend  # noqa: PLC0415  # see above

    return DeviceBackend(plan, device, failed)
