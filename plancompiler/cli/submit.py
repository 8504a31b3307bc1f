"""`plancompiler submit`: run a job on a cluster."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from plancompiler.cli.job_file import load_job
from plancompiler.cli.options import (
    Setting,
    cache_option,
    config_options,
    configured,
    job_argument,
    json_option,
    mode_option,
    save_options,
    settings_option,
    steps_option,
    tls_options,
)
from plancompiler.cli.output import print_note, progress
from plancompiler.cli.record import Record, require_own_data
from plancompiler.client import Client
from plancompiler.cluster.channel import TlsFiles
from plancompiler.cluster.messages import Phase
from plancompiler.errors import PlanCompilerError
from plancompiler.lower.compile import MODE_VARIABLE, resolve_mode


@click.command("submit")
@job_argument
@click.option("--master", metavar="HOST:PORT", required=True, help="Where the master listens.")
@steps_option
@mode_option
@click.option("--restore", type=click.Path(path_type=Path), help="Checkpoint folder to start from.")
@save_options
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="Seconds to wait for the master's first answer.",
)
@cache_option
@tls_options
@config_options
@settings_option
@json_option
def submit_command(
    target: str,
    master: str,
    steps: int,
    mode: str | None,
    restore: Path | None,
    save: Path | None,
    save_every: int,
    timeout: float,
    cache: bool,
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
    """
    # Without a wish of the client, the master's own default counts.
    wished = resolve_mode(mode) if mode or os.environ.get(MODE_VARIABLE) else None
    record = Record()
    seconds: list[float] = []
    with Client(master, timeout=timeout, tls=tls) as client:
        ranks = client.status().world_size
        job = configured(load_job(target, settings, ranks), config)
        require_own_data(job)
        handle = client.submit(
            job,
            steps,
            mode=wished,
            restore=restore,
            save=save,
            save_every=save_every,
            cache=cache,
            on_phase=_say_phase,
        )
        print_note(f"job {handle.job_id}")
        try:
            begin = time.perf_counter()
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
    record.report(
        ranks=ranks,
        backend="cluster",
        mode=wished,
        steps=steps,
        step_seconds=seconds,
        compile_seconds=handle.compile_seconds or 0.0,
        cached=bool(handle.cached),
        digest=handle.digest or "",
        as_json=as_json,
    )


def _say_phase(phase: Phase, seconds: float) -> None:
    print_note(f"{phase} after {seconds:.2f} s")
