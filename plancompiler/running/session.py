"""`run(job)`: compile a job and run it on this machine, rank by rank as threads or as processes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from plancompiler.blas.loaded_library import faster_kernels
from plancompiler.blas.threads import one_blas_thread
from plancompiler.cache.plan_cache import open_cache
from plancompiler.engines.launcher import Launcher
from plancompiler.errors import (
    FeedError,
    NonFiniteError,
    PlanCompilerError,
    RankError,
    UsageError,
)
from plancompiler.executor.checkpoint import (
    KeepGoing,
    assemble,
    check_no_others,
    load_shards,
    make_folder,
    save_shards,
    saved_names,
    shards_to_bytes,
    write_index,
)
from plancompiler.executor.checkpoint_writer import CheckpointWriter
from plancompiler.executor.local_run import LocalWorld
from plancompiler.executor.timeline import Timeline
from plancompiler.executor.trace import Recording, about_run
from plancompiler.frontend.nn.module import Module
from plancompiler.frontend.open_layouts import with_config
from plancompiler.frontend.optim.schedule import Rate
from plancompiler.frontend.trace import as_job
from plancompiler.frontend.weights import beside_weights, initial_value, write_weights
from plancompiler.ir import Job, Phase
from plancompiler.ir.arguments import (
    folder_path,
    positive_number,
    save_interval,
    step_count,
    whole_number,
)
from plancompiler.ir.settings import Settings
from plancompiler.ir.shard import Region
from plancompiler.limits.time_limits import DEADLINE
from plancompiler.lower.cached import JobPlans, plans_of_job
from plancompiler.lower.compile import is_mode_chosen, resolve_mode
from plancompiler.plan.compiled_plans import CompiledPlans
from plancompiler.plan.plan import Plan
from plancompiler.running.evaluation import (
    Boxes,
    Outputs,
    Programs,
    check_whole,
    plain_outputs,
)
from plancompiler.running.session_rates import SessionRates
from plancompiler.running.world_size import world_size_of

Array = np.ndarray[Any, np.dtype[Any]]
Folder = str | PathLike[str]

BACKENDS = ("threads", "processes")
DEFAULT_MODES = {"threads": "rank_per_iter", "processes": "rank_per_process"}

_log = logging.getLogger(__name__)

AHEAD_SECONDS = 0.1
"""Steps run ahead of the reader for about so long, so that ranks need not wait for it."""


class RunningRanks(Protocol):
    """All ranks of a running job, however they run."""

    compile_seconds: float
    cached: bool
    hash_plans: Callable[[], str]
    rates: SessionRates

    def step(self, feeds: Mapping[str, Any]) -> Mapping[str, Array]:
        """Run one step; global outputs by name. After a FeedError, more steps can follow."""

    def run(self, steps: int) -> Sequence[Mapping[str, Array]]:
        """Run steps that need no feeds; the outputs of each. A FeedError as for `step`."""

    def save(self, folder: Path, wait: bool) -> None:
        """Write a checkpoint; without `wait` return once the values are copied."""

    def check_saved(self) -> None:
        """Raise the error of a background checkpoint that has failed."""

    def variables(self) -> dict[str, Array]:
        """Global variables by name."""

    def boxes(self, names: Collection[str]) -> Boxes:
        """Copies of these variables, in boxes."""

    def close(self) -> None:
        """Stop every rank, once checkpoints are written; raises where one is not. Safe to call
        again.
        """


def _check_compiled(compiled: CompiledPlans, ranks: int | None, mode: str | None) -> None:
    """Refuse what plans that are compiled already leave no choice about."""
    if ranks is not None and ranks != compiled.world_size:
        raise RankError(
            "the plans are compiled for another number of ranks",
            got=f"{ranks} ranks",
            expected=f"{compiled.world_size} ranks",
            hint="compile the job for so many ranks",
        )
    if mode is not None:
        raise UsageError(
            "compiled plans are run as they are", got=f"mode {mode}", expected="no compile mode"
        )


def run(
    job: Job | CompiledPlans,
    ranks: int | None = None,
    backend: str = "threads",
    mode: str | None = None,
    restore: Folder | None = None,
    allow_ops: Sequence[str] = (),
    trace: Folder | None = None,
    record: bool = False,
    cache: bool = True,
    deadline: float = DEADLINE,
    check_restore: bool = True,
    strict_restore: bool = True,
    anomaly: bool = False,
    launcher: Launcher | None = None,
    config: Settings | None = None,
    programs: Mapping[str, Job] | None = None,
) -> Session:
    """Compile `job` and start its ranks on this machine; what is compiled already is run as it is.

    `backend` is `threads` (ranks in this process) or `processes` (a master here and one worker
    process per rank, which share memory). `mode` is one of the four compile modes; by default the
    environment's PLANCOMPILER_COMPILE_MODE, else `rank_per_iter` with threads and
    `rank_per_process` with processes. `restore` is a checkpoint folder of any layout and number of
    ranks. Its bytes are checked against their digests unless `check_restore` is False; a variable
    of the checkpoint that the job does not have is an error unless `strict_restore` is False.
    `allow_ops` names the top-level modules from which worker processes may import custom ops; they
    find them where this process does. `trace` names a file: when the session closes, the timeline
    of the run is written to it as a Chrome trace (JSON), for Perfetto or chrome://tracing. `record`
    records without a file, for `Session.timelines`. Plans of an unchanged job come from the plan
    cache; without `cache`, or with a `mode`, everything is compiled, and the cache is neither read
    nor written. `deadline` (seconds) is how long a rank may make no progress while others wait for
    it; then a DeadlineError names it. With `anomaly` every op on CPUs is checked in every step: a
    NonFiniteError names the first op that makes an infinite value or a NaN, its source line and its
    rank (slow; for debugging). `launcher` starts the worker processes, of ranks elsewhere too, as
    `plancompiler.engines.choice.open_launcher` makes one. `config` stands in place of the job's own
    (`pc.Config(layout="auto")`). `programs` are other jobs, by name, that read the variables of
    this one and change none: see `Session.evaluate`. While a session is open, BLAS uses one
    thread per rank unless the environment says otherwise. Use the session as a context manager, or
    close it.
    """
    if backend not in BACKENDS:
        raise UsageError("unknown backend", got=repr(backend), expected=" or ".join(BACKENDS))
    chosen = resolve_mode(mode, default=DEFAULT_MODES[backend])
    cache = cache and not is_mode_chosen(mode)
    deadline = positive_number("the deadline", deadline)
    plans = None
    if isinstance(job, CompiledPlans):
        _check_compiled(job, ranks, mode)
        if config is not None:
            raise UsageError("plans are compiled already", got="config", hint="give the job")
        ranks, plans, job = job.world_size, job.plans, job.job
    elif config is not None:
        job = with_config(as_job(job), config)
    world_size = world_size_of(as_job(job), ranks)
    folder = None if restore is None else folder_path("restore", restore)
    recording = None
    if trace is not None or record:
        path = None if trace is None else folder_path("trace", trace)
        recording = Recording(path, None if path is None else about_run(job, backend))
    beside = Programs(programs, job, world_size, chosen, cache, deadline)
    world: RunningRanks
    if backend == "threads":
        world = _ThreadWorld(
            job,
            world_size,
            chosen,
            folder,
            recording,
            cache,
            deadline,
            check_restore,
            strict_restore,
            anomaly,
            plans,
        )
    else:
        # It brings gRPC and the master, which ranks as threads do without.
        from plancompiler.running.process_world import ProcessWorld  # noqa: PLC0415

        world = ProcessWorld(
            job,
            world_size,
            mode,
            folder,
            allow_ops,
            recording,
            cache,
            deadline,
            check_restore,
            strict_restore,
            anomaly,
            launcher,
            plans,
        )
    return Session(job, world_size, backend, chosen, world, recording, cache, plans, beside)


class Session:
    """A job that is ready to step. Made by `run`."""

    def __init__(
        self,
        job: Job,
        ranks: int,
        backend: str,
        mode: str,
        world: RunningRanks,
        recording: Recording | None,
        cache: bool,
        plans: Mapping[int, Plan] | None,
        programs: Programs,
    ) -> None:
        self.job = job
        self._programs = programs
        self._given = plans
        self.ranks = ranks
        self.backend = backend
        self.mode = mode
        self._world: RunningRanks | None = world
        self._recording = recording
        self._cache = cache
        self._turn = threading.Lock()
        """Ranks do one thing at a time; callers from several threads take turns."""
        self.compile_seconds: float = world.compile_seconds
        """Wall time from the job to verified plans on all ranks."""
        self.cached: bool = world.cached
        """Whether all plans came from the plan cache."""
        self._hash_plans = world.hash_plans
        self.step_seconds: list[float] = []
        """Wall time of every step so far; steps that ran ahead together share their time evenly."""
        _open_worlds.add(world)

    @cached_property
    def digest(self) -> str:
        """One hash over the text form of all plans; equal in all modes and with both backends."""
        return self._hash_plans()

    @cached_property
    def plans(self) -> dict[int, Plan]:
        """Every rank's plan. With processes they are in the workers and made again here."""
        if isinstance(self._world, _ThreadWorld):
            return self._world.plans
        if self._given is not None:
            return dict(self._given)
        cache = open_cache() if self._cache else None
        return dict(plans_of_job(self.job, self.ranks, "rank_per_iter", cache).plans)

    def step(self, /, **feeds: Any) -> Outputs:
        """Run one step with every input of the job fed by name; the step's outputs by name.

        Feeds are global arrays of exactly the input's shape and dtype. A FeedError names an input
        that is missing, unknown or does not fit; the session can go on after it. After a
        NonFiniteError the session raises the same error for every further step, but `save` and
        `variables` work until it is closed: they give the variables after the failing step (with
        `run`, after the steps that ran ahead with it) or, in a session with `anomaly`, before the
        failing step. After any other error the session is closed.
        """
        with self._turn:
            world = self._open()
            begin = time.perf_counter()
            with self._closing_on_failure():
                outputs = plain_outputs(self.job, world.step(feeds))
            self.step_seconds.append(time.perf_counter() - begin)
            return outputs

    def run(
        self,
        steps: int,
        *,
        save: Folder | None = None,
        save_every: int = 0,
        stop: threading.Event | None = None,
    ) -> Iterator[Outputs]:
        """Run `steps` steps of a job that reads its own data; each step's outputs by name.

        `save` is a folder for a checkpoint at the end, and with `save_every` after each so many
        steps too, written while steps go on (see `save`). A folder that cannot be written raises a
        CheckpointError at once. Once `stop` is set no more steps are begun; the checkpoint at the
        end is written all the same.

        Ranks run ahead of the reader for about a tenth of a second, so a reader that stops early
        may find more steps done than it has seen. After an error the session is closed, except
        after a NonFiniteError: see `step`.
        """
        steps = step_count(steps)
        every = save_interval(save_every, save)
        folder = None if save is None else folder_path("save", save)
        if folder is not None:
            make_folder(folder)
        return self._steps(steps, folder, every, stop or threading.Event())

    def _steps(
        self, steps: int, folder: Path | None, every: int, stop: threading.Event
    ) -> Iterator[Outputs]:
        count, until_save = 1, every
        while steps and not stop.is_set():
            count = min(count, steps, until_save or steps)
            with self._turn:
                world = self._open()
                begin = time.perf_counter()
                with self._closing_on_failure():
                    done = world.run(count)
                seconds = (time.perf_counter() - begin) / count
                self.step_seconds += [seconds] * count
                steps -= count
                until_save -= count if every else 0
                if folder is not None and every and steps and not until_save:
                    until_save = every
                    world.save(folder, wait=False)
            for outputs in done:
                yield plain_outputs(self.job, outputs)
            count = max(1, min(2 * count, int(AHEAD_SECONDS / seconds)))
        if folder is not None:
            self.save(folder)

    def evaluate(self, program: str, /, **feeds: Any) -> Outputs:
        """The outputs of another program (`pc.run(job, programs={name: program})`) with the values
        that the variables have now, and these feeds. It changes nothing, here or in later steps.

        Its ranks are threads of this process, with copies of the variables that it reads, whatever
        backend the session has. UsageError for a program that the session does not have. After an
        error the session goes on as if the program had not been run.
        """
        with self._turn:
            world = self._open()
            return self._programs.evaluate(program, feeds, world.rates.next_step, world.boxes)

    @property
    def lr(self) -> float | tuple[float, ...]:
        """The learning rate of the next step; of a job with several optimizers those of each, in
        the order in which they were first used. Set it to a number, a schedule or a function of the
        step, or to one for each optimizer: it holds from the next step on, and nothing is compiled
        again. A session that starts from a checkpoint has the job's own rates again.
        """
        with self._turn:
            return self._open().rates.lr

    @lr.setter
    def lr(self, rate: Rate | Sequence[Rate]) -> None:
        with self._turn:
            self._open().rates.lr = rate

    @property
    def next_step(self) -> int:
        """The number of the next step: a session that starts from a checkpoint counts on from it.
        `loader.seek(session.next_step)` lets a `pc.data.DataLoader` continue there.
        """
        with self._turn:
            return self._open().rates.next_step

    def save(self, folder: Folder, *, wait: bool = True) -> None:
        """Write the variables as safetensors shards with an index, loadable on any layout.

        Without `wait` it returns as soon as the values are copied, and they are written while
        steps go on. The next save and `close` wait for that. If writing fails, the next call on the
        session raises a CheckpointError.
        """
        path = folder_path("the folder of a checkpoint", folder)
        with self._turn:
            self._open().save(path, wait)

    def variables(self) -> dict[str, Array]:
        """Parameters and optimizer state as global arrays by name."""
        with self._turn:
            return self._open().variables()

    def export_weights(
        self, folder: Folder, model: Module | None = None, *, max_file_bytes: int = 5_000_000_000
    ) -> None:
        """Write the model's parameters and buffers, without the optimizer's state, as safetensors
        files: `model.safetensors`, or several of at most `max_file_bytes` with an index, under the
        names that `pc.load_weights` reads. Tied weights are written once.

        With `model`, a module of the job, parameters that the job does not use are written too,
        with their initial values. So is the configuration of a model of transformers; without
        `model` that is copied from the folder that the weights were loaded from. Then
        `from_pretrained(folder)` loads them.

        Raises OutputError where they cannot be written, DataError for a parameter of `model` that
        has no value.
        """
        path = folder_path("the folder of weights", folder)
        limit = whole_number("max_file_bytes", max_file_bytes)
        variables = [op for op in self.job.ops if op.kind == "variable"]
        own = [op for op in variables if op.origin.phase is Phase.FORWARD]
        values = self.variables()
        arrays = {}
        for op in own:
            name, shape = str(op.attr("name")), op.attr("file_shape")
            own_shape = tuple(map(int, shape)) if isinstance(shape, tuple) else ()
            arrays[name] = values[name].reshape(own_shape) if own_shape else values[name]
        beside = beside_weights(str(file) for op in own if (file := op.attr("file")))
        if model is not None:
            arrays |= {
                name: initial_value(name, parameter, self.job.seed)
                for name, parameter in model.named_parameters()
                if name not in arrays
            }
            beside |= getattr(model, "configurations", {})
        write_weights(path, arrays, limit, beside)

    def timelines(self) -> tuple[Timeline, ...]:
        """What each rank did and when, so far; for an open session with `trace` or `record`."""
        with self._turn:
            self._open()
            if self._recording is None:
                raise UsageError(
                    "the session records nothing", hint="open it with pc.run(job, record=True)"
                )
            return self._recording.timelines()

    def close(self) -> None:
        """Stop every rank and everything that was started for them. Safe to call again.

        Waits until a checkpoint that was begun with `save(..., wait=False)` is written; if that
        fails, everything is stopped and a CheckpointError is raised.
        """
        world, self._world = self._world, None
        self._programs.close()
        if world is not None:
            try:
                world.close()
            finally:
                _open_worlds.discard(world)

    @contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        """After an error within the block the session is closed; a FeedError leaves it open, and so
        does a NonFiniteError, so that it can be saved.
        """
        try:
            yield
        except (FeedError, NonFiniteError):
            raise
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Close after a failure, whose error is raised rather than errors of closing."""
        try:
            self.close()
        except PlanCompilerError as error:
            _log.error("%s", error)

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._abandon()

    def _open(self) -> RunningRanks:
        if self._world is None:
            raise UsageError(
                "the session is closed",
                expected="a session that is open",
                hint="open a new one with pc.run(job)",
            )
        self._world.check_saved()
        return self._world


_open_worlds: set[RunningRanks] = set()


def _close_open_worlds() -> None:
    """Close the sessions that a program has left open, so that it can end."""
    for world in list(_open_worlds):
        try:
            world.close()
        except PlanCompilerError as error:
            _log.error("%s", error)


# Python joins all threads before it calls `atexit`, so that would be too late for ranks as threads.
# This is where concurrent.futures registers its own end; what comes later is called first.
threading._register_atexit(_close_open_worlds)  # type: ignore[attr-defined]  # noqa: SLF001


class _ThreadWorld:
    """Ranks as threads of this process."""

    def __init__(
        self,
        job: Job,
        world_size: int,
        mode: str,
        restore: Path | None,
        recording: Recording | None,
        cache: bool,
        deadline: float,
        check_restore: bool,
        strict_restore: bool,
        anomaly: bool,
        plans: Mapping[int, Plan] | None = None,
    ) -> None:
        self._parts = ExitStack()
        self._writer = CheckpointWriter("plancompiler-checkpoint")
        try:
            if recording is not None:
                self._parts.enter_context(recording)
            begin = time.perf_counter()
            if plans is not None:
                made = JobPlans(plans, cached=True)
            else:
                made = plans_of_job(job, world_size, mode, open_cache() if cache else None)
            self.compile_seconds = time.perf_counter() - begin
            self.cached = made.cached
            self.plans = dict(made.plans)
            self.hash_plans = lambda: made.digest
            first_step = 0
            variables = None
            if restore is not None:
                if strict_restore:
                    check_no_others(restore, job.variables.keys())
                # None leaves it to the environment.
                check = None if check_restore else False
                loaded = {
                    rank: load_shards(restore, plan, check) for rank, plan in self.plans.items()
                }
                variables = {rank: arrays for rank, (arrays, _) in loaded.items()}
                first_step = loaded[0][1]
            self.rates = SessionRates(job, lambda: first_step)
            self._parts.enter_context(one_blas_thread())
            advice = faster_kernels()
            if advice is not None:
                _log.info("%s", advice)
            self._local = self._parts.enter_context(
                LocalWorld(
                    self.plans,
                    variables=variables,
                    first_step=first_step,
                    deadline=deadline,
                    record=None if recording is None else recording.folder,
                    anomaly=anomaly or None,  # None leaves it to the environment
                    keep=True,
                )
            )
            self._parts.callback(self._writer.wait)
        except BaseException:
            self._parts.close()
            raise

    def step(self, feeds: Mapping[str, Any]) -> Mapping[str, Array]:
        outputs = self._local.step(feeds, self.rates.of_next(1))
        self.rates.advance(1)
        return outputs

    def run(self, steps: int) -> Sequence[Mapping[str, Array]]:
        outputs = self._local.run(steps, self.rates.of_next(steps))
        self.rates.advance(steps)
        return outputs

    def save(self, folder: Path, wait: bool) -> None:
        self._writer.wait()
        # Steps change the variables, so what is written in the meantime are copies.
        kept = {
            rank: self._local.variables(rank, saved_names(plan))
            for rank, plan in self.plans.items()
        }
        self._writer.start(partial(self._write, folder, kept, self._local.steps_done))
        if wait:
            self._writer.wait()

    def _write(
        self,
        folder: Path,
        kept: dict[int, dict[str, Array]],
        step: int,
        keep_going: KeepGoing,
    ) -> None:
        for rank, plan in self.plans.items():
            save_shards(folder, plan, kept.pop(rank), step, keep_going=keep_going)
        write_index(folder, len(self.plans), step)

    def check_saved(self) -> None:
        self._writer.check()

    def variables(self) -> dict[str, Array]:
        steps = self._local.steps_done
        return assemble(
            shards_to_bytes(plan, self._local.variables(rank, saved_names(plan)), steps)
            for rank, plan in self.plans.items()
        )

    def boxes(self, names: Collection[str]) -> Boxes:
        boxes: dict[str, list[tuple[Region, Array]]] = {}
        for rank, plan in self.plans.items():
            held = self._local.variables(rank, names)
            for variable in plan.variables:
                if variable.name in held:
                    check_whole(variable)
                    boxes.setdefault(variable.name, []).append(
                        (variable.region, held[variable.name])
                    )
        return boxes

    def close(self) -> None:
        self._parts.close()
