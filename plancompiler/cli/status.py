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
    found = client.job(job).status()
    if as_json:
        print_json(job_data(found))
        return
    rows = [
        ("job", str(found.job_id)),
        ("name", found.name),
        ("phase", str(found.phase)),
        ("owner", found.owner),
        ("ranks", str(found.ranks)),
        ("priority", str(found.priority)),
        ("steps", steps_text(found)),
        ("outputs", ", ".join(found.outputs)),
        ("seconds", f"{found.seconds:.1f}, of which queued {found.queued_seconds:.1f}"),
    ]
    if found.error is not None:
        rows.append(("error", str(PlanCompilerError.from_report(found.error))))
    print_table(("what", "value"), rows)
