"""`plancompiler cancel`: stop a job of a master."""

from __future__ import annotations

import click

from plancompiler.cli.client_options import client_options, job_id_argument
from plancompiler.cli.output import print_json, print_result
from plancompiler.running.client import Client


@click.command("cancel")
@job_id_argument
@client_options
def cancel_command(job: int, client: Client, as_json: bool) -> None:
    """Stop a job, whether it waits or runs. One that has ended stays as it is.

    \b
    Example:
      plancompiler cancel 3 --master 127.0.0.1:50051
    """
    handle = client.job(job)
    cancelled = handle.cancel()
    phase = handle.status().phase
    if as_json:
        print_json({"job": job, "cancelled": cancelled, "phase": str(phase)})
    elif cancelled:
        print_result(f"job {job} is cancelled")
    else:
        print_result(f"job {job} had already ended: {phase}")
