"""`plancompiler submit`: run a job on a cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from plancompiler.cli.client_options import master_option, timeout_option
from plancompiler.cli.config_options import config_options, configured
from plancompiler.cli.job_file import load_job
from plancompiler.cli.options import (
    Setting,
    anomaly_option,
    cache_option,
    job_argument,
    json_option,
    mode_option,
    output_option,
    save_options,
    settings_option,
    steps_option,
    strict_restore_option,
    timeline_options,
    tls_options,
    token_option,
)
from plancompiler.cli.output import print_json, print_note, print_result, print_table, progress
from plancompiler.cli.record import Record, require_own_data
from plancompiler.cli.waiting import say_waiting
from plancompiler.cluster.channel import TlsFiles
from plancompiler.cluster.messages import JobPhase
from plancompiler.errors import UsageError
from plancompiler.executor.trace import about_run, write_trace
from plancompiler.ir import Job
from plancompiler.ir.whole_file import check_writable
from plancompiler.lower.compile import MODE_VARIABLE, resolve_mode
from plancompiler.running.client import Client, Handle


@click.command("submit")
@job_argument
@master_option
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="How many ranks the job runs on; by default all of the cluster.",
)
@click.option(
    "--priority",
    type=int,
    default=0,
    show_default=True,
    help="Of jobs that wait, those with a higher one come first.",
)
@click.option("--name", default="", help="What to call the job; by default as its file does.")
@click.option(
    "--compile-only", is_flag=True, help="Make plans on the cluster, and execute nothing."
)
@output_option(
    "--out",
    "the folder of plans",
    "With --compile-only: folder for the plans, as `compile --out` writes them.",
    folder=True,
)
@click.option("--detach", is_flag=True, help="Print the job's id and leave it to the master.")
@steps_option
@mode_option
@click.option("--restore", type=click.Path(path_type=Path), help="Checkpoint folder to start from.")
@strict_restore_option
@save_options
@timeout_option
@timeline_options
@click.option(
    "--record",
    is_flag=True,
    help="Record the job's timeline, for `fetch --what timeline`; also with --detach.",
)
@cache_option
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="How long a rank may stand still while others wait for it; else as the workers were told.",
)
@anomaly_option
@token_option
@tls_options
@config_options
@settings_option
@json_option
def submit_command(
    target: str,
    master: str,
    ranks: int | None,
    priority: int,
    name: str,
    compile_only: bool,
    out: Path | None,
    detach: bool,
    steps: int,
    mode: str | None,
    restore: Path | None,
    strict_restore: bool,
    save: Path | None,
    save_every: int,
    timeout: float,
    trace: Path | None,
    profile: bool,
    record: bool,
    cache: bool,
    deadline: float | None,
    anomaly: bool,
    token_file: Path | None,
    tls: TlsFiles | None,
    config: Mapping[str, Any],
    settings: Mapping[str, Setting],
    as_json: bool,
) -> None:
    """Send a job to a master and follow it to its end. Ctrl-C cancels the job.

    With --detach the job's id goes to stdout and the command ends; `jobs`, `status`, `attach` and
    `cancel` take it from there.

    Files and checkpoint folders are those of the workers' host.

    \b
    Example:
      plancompiler submit examples/mlp.py --master 127.0.0.1:50051 --steps 100
      plancompiler submit examples/mlp.py --master 127.0.0.1:50051 --steps 20 --trace run.json
      plancompiler submit examples/mlp.py --master 127.0.0.1:50051 --detach --name night
      plancompiler submit examples/mlp.py --master 127.0.0.1:50051 --compile-only --out plans
    """
    # Without a wish of the client, the master's own default counts.
    wished = resolve_mode(mode) if mode or os.environ.get(MODE_VARIABLE) else None
    shown = Record()
    seconds: list[float] = []
    begin = 0.0

    def entered(phase: JobPhase, since: float) -> None:
        """Steps are timed from when the first one could begin: not the queue, nor compiling."""
        nonlocal begin
        begin = time.perf_counter()
        print_note(f"{phase} after {since:.2f} s")

    if compile_only:
        _check_compile_only(click.get_current_context())
    if compile_only != (out is not None) and not (compile_only and detach):
        raise UsageError(
            "plans that are made on the cluster are written into a folder",
            got="--compile-only without --out" if compile_only else "--out without --compile-only",
            expected="--compile-only --out DIR",
        )
    if detach and out is not None:
        raise UsageError(
            "plans are written by whoever waits for them",
            got="--detach with --out",
            expected="one of them",
        )
    if detach and (trace is not None or profile):
        raise UsageError(
            "a timeline is written by whoever follows the job to its end",
            got="--detach with --trace or --profile",
            expected="one of them",
            hint="--detach --record, and later `plancompiler fetch JOB --what timeline`",
        )
    check_writable(trace, "the trace file")
    with Client(master, timeout=timeout, tls=tls, token_file=token_file) as client:
        ranks = ranks or client.status().world_size
        job = configured(load_job(target, settings, ranks), config)
        if compile_only:
            _compile_only(client, job, ranks, priority, wished, name, out, as_json)
            return
        require_own_data(job)
        handle = client.submit(
            job,
            steps,
            ranks=ranks,
            priority=priority,
            mode=wished,
            restore=restore,
            strict_restore=strict_restore,
            save=save,
            save_every=save_every,
            cache=cache,
            deadline=deadline,
            record=record or profile or trace is not None,
            anomaly=anomaly,
            name=name,
            on_phase=entered,
            on_waiting=say_waiting,
        )
        if detach:
            _print_id(handle, ranks, as_json)
            return
        try:
            print_note(f"job {handle.job_id}")
            with progress("step", steps) as advance:
                for outputs in handle:
                    now = time.perf_counter()
                    seconds.append(now - begin)
                    begin = now
                    advance(
                        shown.add({name: outputs[name] for name in job.outputs if name in outputs})
                    )
        except BaseException as error:
            handle.give_up(error)
            raise
        timelines = handle.timelines() if profile or trace is not None else None
        if trace is not None and timelines is not None:
            write_trace(trace, timelines, about_run(job, "processes"))
            print_note(f"wrote the timeline to {trace}")
    shown.report(
        ranks=ranks,
        backend="cluster",
        mode=wished,
        steps=steps,
        step_seconds=seconds,
        compile_seconds=handle.compile_seconds or 0.0,
        queued_seconds=handle.queued_seconds,
        cached=bool(handle.cached),
        digest=handle.digest or "",
        timelines=timelines if profile else None,
        as_json=as_json,
    )


_EXECUTING = {
    "steps": "--steps",
    "restore": "--restore",
    "save": "--save",
    "save_every": "--save-every",
    "trace": "--trace",
    "profile": "--profile",
    "record": "--record",
    "deadline": "--deadline",
    "anomaly": "--anomaly",
    "strict_restore": "--no-strict-restore",
    "cache": "--no-cache",
}
"""Options that say how a job is executed or where its plans come from."""


def _check_compile_only(context: click.Context) -> None:
    """Refuse what has no meaning for a job that is not executed."""
    given = [
        option
        for name, option in _EXECUTING.items()
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise UsageError(
            "a job that is compiled only is not executed, and its plans come from no cache",
            got=f"--compile-only with {', '.join(given)}",
            expected="--compile-only without them",
        )


def _compile_only(
    client: Client,
    job: Job,
    ranks: int,
    priority: int,
    mode: str | None,
    name: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Have a job compiled, and write its plans; without a folder leave it to the master."""

    def entered(phase: JobPhase, since: float) -> None:
        print_note(f"{phase} after {since:.2f} s")

    wishes: dict[str, Any] = {"ranks": ranks, "priority": priority, "mode": mode, "name": name}
    if out is None:
        with client.submit_compilation(job, **wishes) as handle:
            _print_id(handle, ranks, as_json)
        return
    begin = time.perf_counter()
    plans = client.compile(job, **wishes, on_phase=entered, on_waiting=say_waiting)
    seconds = time.perf_counter() - begin
    plans.save(out)
    if as_json:
        print_json(
            {
                "ranks": ranks,
                "mode": mode,
                "seconds": seconds,
                "digest": plans.digest,
                "out": str(out),
            }
        )
        return
    rows = [("ranks", str(ranks)), ("compile", f"{seconds:.3f} s"), ("digest", plans.digest)]
    print_table(("what", "value"), [*rows, ("plans", str(out))])


def _print_id(handle: Handle, ranks: int, as_json: bool) -> None:
    if as_json:
        print_json({"job": handle.job_id, "ranks": ranks})
    else:
        print_result(f"{handle.job_id}")
