"""`plancompiler submit`: run a job on a cluster."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from plancompiler.cli.config_options import config_options, configured
from plancompiler.cli.job_file import load_job
from plancompiler.cli.options import (
    Setting,
    anomaly_option,
    cache_option,
    job_argument,
    json_option,
    mode_option,
    save_options,
    settings_option,
    steps_option,
    strict_restore_option,
    timeline_options,
    tls_options,
    token_option,
)
from plancompiler.cli.output import print_note, progress
from plancompiler.cli.record import Record, require_own_data
from plancompiler.cluster.channel import SILENCE_SECONDS, TlsFiles
from plancompiler.cluster.messages import JobPhase, Waiting
from plancompiler.errors import PlanCompilerError
from plancompiler.executor.trace import check_trace, write_trace
from plancompiler.lower.compile import MODE_VARIABLE, resolve_mode
from plancompiler.running.client import Client


@click.command("submit")
@job_argument
@click.option("--master", metavar="HOST:PORT", required=True, help="Where the master listens.")
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
@steps_option
@mode_option
@click.option("--restore", type=click.Path(path_type=Path), help="Checkpoint folder to start from.")
@strict_restore_option
@save_options
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=SILENCE_SECONDS,
    show_default=True,
    help="Seconds to wait for the master's first answer, and later for a sign of it (2 or more).",
)
@timeline_options
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
    steps: int,
    mode: str | None,
    restore: Path | None,
    strict_restore: bool,
    save: Path | None,
    save_every: int,
    timeout: float,
    trace: Path | None,
    profile: bool,
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

    Files and checkpoint folders are those of the workers' host.

    \b
    Example:
      plancompiler submit examples/mlp.py --master 127.0.0.1:50051 --steps 100
      plancompiler submit examples/mlp.py --master 127.0.0.1:50051 --steps 20 --trace run.json
    """
    # Without a wish of the client, the master's own default counts.
    wished = resolve_mode(mode) if mode or os.environ.get(MODE_VARIABLE) else None
    record = Record()
    seconds: list[float] = []
    begin = 0.0

    def entered(phase: JobPhase, since: float) -> None:
        """Steps are timed from when the first one could begin: not the queue, nor compiling."""
        nonlocal begin
        begin = time.perf_counter()
        print_note(f"{phase} after {since:.2f} s")

    if trace is not None:
        check_trace(trace)
    with Client(master, timeout=timeout, tls=tls, token_file=token_file) as client:
        ranks = ranks or client.status().world_size
        job = configured(load_job(target, settings, ranks), config)
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
            record=profile or trace is not None,
            anomaly=anomaly,
            on_phase=entered,
            on_waiting=_say_waiting,
        )
        print_note(f"job {handle.job_id}")
        try:
            with progress("step", steps) as advance:
                for outputs in handle:
                    now = time.perf_counter()
                    seconds.append(now - begin)
                    begin = now
                    advance(
                        record.add({name: outputs[name] for name in job.outputs if name in outputs})
                    )
        except BaseException:
            # After a failure there is nothing left to cancel, or nobody to ask.
            with contextlib.suppress(PlanCompilerError):
                handle.cancel()
            raise
        timelines = handle.timelines() if profile or trace is not None else None
        if trace is not None and timelines is not None:
            write_trace(trace, timelines)
            print_note(f"wrote the timeline to {trace}")
    record.report(
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


def _say_waiting(waiting: Waiting) -> None:
    ranks = ", ".join(map(str, waiting.ranks))
    more = waiting.count - len(waiting.ranks)
    print_note(
        f"waiting for a worker of rank {ranks}{f' and {more} more' if more else ''} "
        f"({waiting.seconds:.0f} s)"
    )
    for text in waiting.stopped:
        print_note(text)
