"""`plancompiler attach`: follow a job that was submitted before."""

from __future__ import annotations

import click

from plancompiler.cli.client_options import client_options, job_id_argument
from plancompiler.cli.output import print_json, print_note, print_table, progress
from plancompiler.cli.record import Record
from plancompiler.cli.waiting import say_waiting
from plancompiler.running.client import Client


@click.command("attach")
@job_id_argument
@click.option(
    "--since",
    type=click.IntRange(0, (1 << 40) - 1),
    default=0,
    metavar="STEP",
    help="The first step to report; by default the first one that the master has kept.",
)
@client_options
def attach_command(job: int, since: int, client: Client, as_json: bool) -> None:
    """Follow a job to its end, from its first step on. Ctrl-C leaves it running.

    A job that has ended gives its outputs or its error. The master keeps the outputs of the latest
    steps; how many of those asked for are gone is said.

    \b
    Example:
      plancompiler attach 3 --master 127.0.0.1:50051
      plancompiler attach 3 --master 127.0.0.1:50051 --since 500
    """
    handle = client.job(
        job,
        on_phase=lambda phase, seconds: print_note(f"{phase} after {seconds:.2f} s"),
        on_waiting=say_waiting,
        since=since,
    )
    status = handle.status()
    record, first, last = Record(), None, None
    with progress("step", max(0, status.steps - since)) as advance:
        for outputs in handle:
            last = outputs.pop("step")
            first = last if first is None else first
            advance(record.add(outputs))
    if as_json:
        print_json(
            {
                "job": job,
                "name": status.name,
                "phase": str(handle.phase),
                "first_step": first,
                "last_step": last,
                "dropped_steps": handle.dropped_steps,
                "losses": record.losses,
                "queued_seconds": handle.queued_seconds,
                "compile_seconds": handle.compile_seconds,
                "digest": handle.digest,
                "cached": handle.cached,
            }
        )
        return
    rows = [
        ("job", f"{job} ({status.name})"),
        ("phase", str(handle.phase)),
        ("digest", handle.digest or ""),
        ("steps", "none" if first is None else f"{first} to {last}"),
    ]
    if handle.dropped_steps:
        rows.append(("steps no longer kept", str(handle.dropped_steps)))
    print_table(("what", "value"), [*rows, *record.rows()])
