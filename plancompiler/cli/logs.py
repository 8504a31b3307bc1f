"""`plancompiler logs`: what the ranks of a job printed."""

from __future__ import annotations

import time
from dataclasses import asdict

import click

from plancompiler.cli.client_options import client_options, job_id_argument
from plancompiler.cli.output import plain, print_json, print_result
from plancompiler.cluster.messages import RankLine
from plancompiler.running.client import Client


@click.command("logs")
@job_id_argument
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank; else all of them.")
@click.option("--follow", is_flag=True, help="Go on until the job has ended.")
@client_options
def logs_command(job: int, rank: int | None, follow: bool, client: Client, as_json: bool) -> None:
    """Show what the ranks of JOB printed and raised, while it runs and after its end.

    \b
    Example:
      plancompiler logs 3 --master 127.0.0.1:50051 --follow

    With --json, one object per line.
    """
    for line in client.logs(job, rank, follow=follow):
        if as_json:
            print_json(asdict(line))
        else:
            print_result(_shown(line))


def _shown(line: RankLine) -> str:
    """A line for a terminal, which obeys nothing that a rank has printed."""
    if line.dropped:
        return f"[rank {line.rank}] ({line.dropped} lines are gone)"
    clock = time.strftime("%H:%M:%S", time.localtime(line.time))
    mark = "!" if line.stream == "stderr" else " "
    return f"[rank {line.rank} {clock}]{mark}{plain(line.text)}"
