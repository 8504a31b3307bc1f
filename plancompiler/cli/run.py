"""`plancompiler run`: run a job on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click

from plancompiler.cli.config_options import config_options, configured
from plancompiler.cli.engine_options import (
    EngineOptions,
    Rendezvous,
    engine_options,
    max_restarts_option,
    rendezvous_options,
    say,
)
from plancompiler.cli.following import follow_job
from plancompiler.cli.job_file import job_folder_on_path, load_job
from plancompiler.cli.options import (
    Setting,
    allow_ops_option,
    anomaly_option,
    cache_option,
    deadline_option,
    job_or_plans_argument,
    json_option,
    mode_option,
    save_options,
    settings_option,
    steps_option,
    strict_restore_option,
    timeline_options,
)
from plancompiler.cli.output import print_note, progress
from plancompiler.cli.plan_folder import is_plan_folder, load_plans
from plancompiler.cli.record import Record, require_own_data
from plancompiler.cli.signals import StopRequest, stop_after_saving
from plancompiler.engines.joined import JobLeader, place_of
from plancompiler.engines.nodes import Nodes
from plancompiler.errors import PlanCompilerError, UsageError
from plancompiler.executor.checkpoint import make_folder
from plancompiler.executor.timeline import Timeline
from plancompiler.ir import Job
from plancompiler.ir.whole_file import check_writable
from plancompiler.plan.compiled_plans import CompiledPlans
from plancompiler.running.restarts import run_with_restarts
from plancompiler.running.session import BACKENDS, Session, run


@click.command("run")
@job_or_plans_argument
@click.option(
    "--ranks", type=click.IntRange(min=1), help="World size; by default what the job needs."
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="threads",
    show_default=True,
    help="threads: ranks in this process. processes: a master and a worker process per rank.",
)
@mode_option
@steps_option
@click.option(
    "--restore",
    type=click.Path(path_type=Path),
    help="Start from this checkpoint, whatever layout it was saved from.",
)
@click.option(
    "--no-check-restore",
    "check_restore",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Do not hold the bytes of the checkpoint against their digests.",
)
@strict_restore_option
@anomaly_option
@save_options
@timeline_options
@max_restarts_option(
    "Where ranks fail, start them again up to R times, from the last checkpoint of --save."
)
@engine_options
@rendezvous_options
@cache_option
@deadline_option
@allow_ops_option
@config_options
@settings_option
@json_option
@click.pass_context
def run_command(
    context: click.Context,
    target: str,
    ranks: int | None,
    backend: str,
    mode: str | None,
    steps: int,
    restore: Path | None,
    check_restore: bool,
    strict_restore: bool,
    anomaly: bool,
    save: Path | None,
    save_every: int,
    trace: Path | None,
    profile: bool,
    max_restarts: int,
    engine: EngineOptions,
    rendezvous: Rendezvous,
    cache: bool,
    deadline: float,
    allow_ops: tuple[str, ...],
    config: Mapping[str, Any],
    settings: Mapping[str, Setting],
    as_json: bool,
) -> None:
    """Compile a job and run it, each rank a thread or a process, of this machine or elsewhere.

    A folder of plans, which `compile --out` or `submit --compile-only --out` wrote, is run as it
    is.

    \b
    Example:
      plancompiler run examples/mlp.py --ranks 4 -D layout=dp_tp --steps 50
      plancompiler run examples/gpt.py -D preset=tiny -D dp=2 --backend processes --save model
      plancompiler run examples/mlp.py --ranks 2 --steps 20 --trace run.json --profile
      plancompiler run examples/mlp.py --ranks 2 --engine mpi --save model --max-restarts 2
      plancompiler run plans --steps 20

    With --save, SIGTERM and SIGUSR1 mean: save now, then end.

    Where another launcher has started this command once for each rank, and its variables (RANK,
    WORLD_SIZE, MASTER_ADDR, MASTER_PORT, or JOB_COMPLETION_INDEX for RANK) say so, these processes
    run the job together, and the first one reports.
    """
    place = None
    if engine.name is None:
        place = place_of(os.environ, rendezvous.endpoint, rendezvous.secret)
    if place is not None:
        if ranks not in (None, place.maximum):
            raise UsageError(
                "--ranks contradicts the launcher that has started this process",
                got=f"--ranks {ranks}, {place.maximum} processes",
                expected="a process for each rank",
                hint="leave out --ranks",
            )
        if not place.leads():
            follow_job(context, place, saves=save is not None)
        ranks = place.maximum
    # Now, and not only when everything is compiled.
    check_writable(trace, "the trace file")
    if save is not None:
        make_folder(save)
    job: Job | CompiledPlans
    folder: AbstractContextManager[None]
    if is_plan_folder(target):
        job = load_plans(target, settings, config, allow_ops)
        name, folder = job.job.name, nullcontext()
        require_own_data(job.job)
    else:
        job = configured(load_job(target, settings, ranks), config)
        name, folder = job.name, job_folder_on_path(target)
        require_own_data(job)
    record = Record()
    ended: list[Session] = []
    timelines: list[Sequence[Timeline]] = []

    def open_session(source: Path | None) -> Session:
        launcher = leader if engine.name is None else engine.launcher(engine.name)
        session = run(
            job,
            ranks,
            backend=backend if launcher is None else "processes",
            mode=mode,
            restore=source,
            allow_ops=allow_ops,
            trace=trace,
            record=profile,
            cache=cache,
            deadline=deadline,
            check_restore=check_restore,
            strict_restore=strict_restore,
            anomaly=anomaly,
            launcher=launcher,
        )
        print_note(
            f"{'read' if session.cached else 'compiled'} the plans of {name} for "
            f"{session.ranks} ranks in {session.compile_seconds:.2f} s "
            f"({'cached' if session.cached else session.mode})"
        )
        return session

    def at_end(session: Session) -> None:
        ended.append(session)
        if profile:
            timelines.append(session.timelines())

    def on_restart(restart: int, done: int, error: PlanCompilerError) -> None:
        print_note(f"restart {restart} of {max_restarts} after step {done}: {error}")

    with (
        folder,
        stop_after_saving() if save is not None else nullcontext(StopRequest()) as stop,
        leading(place, max_restarts, None if save is None else stop) as leader,
        progress("step", steps) as advance,
    ):
        for outputs in run_with_restarts(
            open_session,
            steps,
            save=save,
            save_every=save_every,
            restore=restore,
            max_restarts=max_restarts,
            stop=stop.event,
            on_restart=on_restart,
            at_end=at_end,
        ):
            advance(record.add(outputs))
    session = ended[0]
    if save is not None:
        print_note(f"wrote a checkpoint to {save}")
    if stop.exit_code:
        print_note(f"plancompiler: stopped after step {record.steps} of {steps}, as it was told to")
        context.exit(stop.exit_code)
    if trace is not None:
        print_note(f"wrote the timeline to {trace}")
    record.report(
        ranks=session.ranks,
        backend=engine.name or (backend if place is None else "processes"),
        mode=session.mode,
        steps=steps,
        step_seconds=session.step_seconds,
        compile_seconds=session.compile_seconds,
        cached=session.cached,
        digest=session.digest,
        timelines=timelines[0] if profile else None,
        as_json=as_json,
    )


@contextmanager
def leading(
    place: Nodes | None, restarts: int, saving: StopRequest | None
) -> Iterator[JobLeader | None]:
    """The launcher of the first of several processes that somebody else has started; None where
    there is one only. The others are told at the end why it has ended.
    """
    if place is None:
        yield None
        return
    ask = None if saving is None else lambda number: saving.ask(128 + number)
    leader = JobLeader(place, say, restarts, ask)
    try:
        yield leader
    except BaseException as error:
        leader.finish(str(error) or type(error).__name__)
        raise
    leader.finish(None)
