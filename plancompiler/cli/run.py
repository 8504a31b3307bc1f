"""`plancompiler run`: run a job on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from plancompiler.cli.config_options import config_options, configured
from plancompiler.cli.job_file import job_folder_on_path, load_job
from plancompiler.cli.options import (
    Setting,
    allow_ops_option,
    anomaly_option,
    cache_option,
    deadline_option,
    job_argument,
    json_option,
    mode_option,
    save_options,
    settings_option,
    steps_option,
    strict_restore_option,
    timeline_options,
)
from plancompiler.cli.output import print_note, progress
from plancompiler.cli.record import Record, require_own_data
from plancompiler.executor.checkpoint import make_folder
from plancompiler.running.session import BACKENDS, run


@click.command("run")
@job_argument
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
@cache_option
@deadline_option
@allow_ops_option
@config_options
@settings_option
@json_option
def run_command(
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
    cache: bool,
    deadline: float,
    allow_ops: tuple[str, ...],
    config: Mapping[str, Any],
    settings: Mapping[str, Setting],
    as_json: bool,
) -> None:
    """Compile a job and run it on this machine, each rank a thread or a process.

    \b
    Example:
      plancompiler run examples/mlp.py --ranks 4 -D layout=dp_tp --steps 50
      plancompiler run examples/gpt.py -D preset=tiny -D dp=2 --backend processes --save model
      plancompiler run examples/mlp.py --ranks 2 --steps 20 --trace run.json --profile
    """
    job = configured(load_job(target, settings, ranks), config)
    require_own_data(job)
    if save is not None:
        make_folder(save)  # now, and not only when everything is compiled
    record = Record()
    with (
        job_folder_on_path(target),
        run(
            job,
            ranks,
            backend=backend,
            mode=mode,
            restore=restore,
            allow_ops=allow_ops,
            trace=trace,
            record=profile,
            cache=cache,
            deadline=deadline,
            check_restore=check_restore,
            strict_restore=strict_restore,
            anomaly=anomaly,
        ) as session,
    ):
        print_note(
            f"{'read' if session.cached else 'compiled'} the plans of {job.name} for "
            f"{session.ranks} ranks in {session.compile_seconds:.2f} s "
            f"({'cached' if session.cached else session.mode})"
        )
        with progress("step", steps) as advance:
            for outputs in session.run(steps, save=save, save_every=save_every):
                advance(record.add(outputs))
        if save is not None:
            print_note(f"wrote a checkpoint to {save}")
        timelines = session.timelines() if profile else None
    if trace is not None:
        print_note(f"wrote the timeline to {trace}")
    record.report(
        ranks=session.ranks,
        backend=backend,
        mode=session.mode,
        steps=steps,
        step_seconds=session.step_seconds,
        compile_seconds=session.compile_seconds,
        cached=session.cached,
        digest=session.digest,
        timelines=timelines,
        as_json=as_json,
    )
