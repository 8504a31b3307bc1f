"""`plancompiler status`: one job of a master."""

from __future__ import annotations

import click

from plancompiler.cli.client_options import client_options, job_id_argument
from plancompiler.cli.jobs import job_data, steps_text
from plancompiler.cli.output import print_json, print_table
from plancompiler.errors import PlanCompilerError
from plancompiler.running.client import Client


@click.command("status")
@job_id_argument
@client_options
def status_command(job: int, client: Client, as_json: bool) -> None:
    """Show where a job is.

    \b
    Example:
      plancompiler status 3 --master 127.0.0.1:50051
    """
    described = client.job(job).status()
    if as_json:
        print_json(job_data(described))
        return
    rows = [
        ("job", str(described.job_id)),
        ("name", described.name),
        ("phase", str(described.phase)),
        ("owner", described.owner),
        ("ranks", str(described.ranks)),
        ("priority", str(described.priority)),
        ("steps", steps_text(described)),
        ("outputs", ", ".join(described.outputs)),
        ("seconds", f"{described.seconds:.1f}, of which queued {described.queued_seconds:.1f}"),
    ]
    if described.error is not None:
        rows.append(("error", str(PlanCompilerError.from_report(described.error))))
    print_table(("what", "value"), rows)
