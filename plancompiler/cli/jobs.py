"""`plancompiler jobs`: what a master has to do and has done."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from plancompiler.cli.client_options import client_options
from plancompiler.cli.output import print_json, print_table
from plancompiler.cluster.messages import JobStatus
from plancompiler.running.client import Client


@click.command("jobs")
@client_options
def jobs_command(client: Client, as_json: bool) -> None:
    """List the jobs of a master, the oldest first: those that wait or run, and the last that ended.

    \b
    Example:
      plancompiler jobs --master 127.0.0.1:50051
    """
    jobs = client.jobs()
    if as_json:
        print_json({"jobs": [job_data(job) for job in jobs]})
        return
    print_table(
        (">job", "name", "phase", ">ranks", ">priority", ">steps", ">seconds", ">queued", "owner"),
        (
            (
                job.job_id,
                job.name,
                job.phase,
                job.ranks,
                job.priority,
                steps_text(job),
                f"{job.seconds:.1f}",
                f"{job.queued_seconds:.1f}",
                job.owner,
            )
            for job in jobs
        ),
    )


def job_data(job: JobStatus) -> dict[str, Any]:
    """A job as plain data."""
    data = asdict(job)
    data["job"] = data.pop("job_id")
    data["phase"] = str(job.phase)
    return data


def steps_text(job: JobStatus) -> str:
    """`12 of 100`; of an open job only how many it has done."""
    return str(job.done_steps) if job.open else f"{job.done_steps} of {job.steps}"
