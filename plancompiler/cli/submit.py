"""`plancompiler submit`: run a job on a cluster."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import click

from plancompiler.cli.job_file import load_job
from plancompiler.cli.options import (
    Setting,
    job_argument,
    json_option,
    mode_option,
    settings_option,
    steps_option,
    tls_options,
)
from plancompiler.cli.output import print_note, progress
from plancompiler.cli.training import Record, require_own_data
from plancompiler.client import Client
from plancompiler.cluster.channel import TlsFiles
from plancompiler.cluster.messages import Phase


@click.command("submit")
@job_argument
@click.option("--master", metavar="HOST:PORT", required=True, help="Where the master listens.")
@steps_option
@mode_option
@click.option("--restore", type=click.Path(path_type=Path), help="Checkpoint folder to start from.")
@click.option("--save", type=click.Path(path_type=Path), help="Checkpoint folder to write.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="Seconds to wait for the master's first answer.",
)
@tls_options
@settings_option
@json_option
def submit_command(
    target: str,
    master: str,
    steps: int,
    mode: str | None,
    restore: Path | None,
    save: Path | None,
    timeout: float,
    tls: TlsFiles | None,
    settings: Mapping[str, Setting],
    as_json: bool,
) -> None:
    """Send a job to a master and follow it to its end. Ctrl-C cancels the job.

    Files and checkpoint folders are those of the workers' host.

    \b
    Example:
      plancompiler submit examples/mlp.py --master 127.0.0.1:50051 --steps 100
    """
