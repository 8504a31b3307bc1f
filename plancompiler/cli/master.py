"""`plancompiler master`: serve jobs to workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import click

from plancompiler.cli.options import allow_ops_option, json_option, mode_option, tls_options
from plancompiler.cli.output import format_bytes, print_json, print_note
from plancompiler.cli.signals import stop_on_signals
from plancompiler.cluster.channel import TlsFiles
from plancompiler.cluster.messages import JobEvent, PhaseChanged, Shipped
from plancompiler.master.server import MasterServer
from plancompiler.ops.registry import allow_custom_ops

_NOTE_SECONDS = 1.0
"""How long the last lines may take at the end."""


@click.command("master")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:50051",
    show_default=True,
    help="Where to listen; port 0 takes any free one.",
)
@click.option("--ranks", type=click.IntRange(min=1), required=True, help="World size.")
@mode_option
@allow_ops_option
@tls_options
@click.option(
    "--insecure",
    is_flag=True,
    help="Serve an address beyond this machine without TLS: anyone who reaches it can run jobs.",
)
@json_option
@click.pass_context
def master_command(
    context: click.Context,
    listen: str,
    ranks: int,
    mode: str | None,
    allow_ops: tuple[str, ...],
    tls: TlsFiles | None,
    insecure: bool,
    as_json: bool,
) -> None:
    """Take jobs from clients, compile them and drive them on the workers, until stopped.

    \b
    Example:
      plancompiler master --listen 127.0.0.1:50051 --ranks 2

    With --json, the address goes to stdout as soon as the master serves. What happens to jobs, and
    how many ranks have their slices or plans, goes to stderr.
    """
    allow_custom_ops(*allow_ops)
    begin = time.monotonic()
    with (
        stop_on_signals() as stop,
        _notes() as note,
        MasterServer(listen, ranks, mode=mode, tls=tls, insecure=insecure, observe=note) as server,
    ):
        print_note(f"master of {ranks} ranks at {server.address}; Ctrl-C stops it")
        if as_json:
            print_json({"address": server.address, "ranks": ranks})
        stop.event.wait()
        print_note(f"stopping after {time.monotonic() - begin:.0f} s")
    context.exit(stop.exit_code)


@contextmanager
def _notes() -> Iterator[Callable[[int, JobEvent], None]]:
    """Takes events of jobs and prints them in a thread: the master must not wait for stderr."""
    lines: SimpleQueue[str | None] = SimpleQueue()

    def note(job_id: int, event: JobEvent) -> None:
        if isinstance(event, PhaseChanged):
            reason = "" if event.error is None else f": {event.error.what}"
            lines.put(f"job {job_id}: {event.phase} after {event.seconds:.2f} s{reason}")
        elif isinstance(event, Shipped):
            sent = format_bytes(event.sent_bytes)
            lines.put(
                f"job {job_id}: {event.ranks} of {event.world_size} ranks have their slice or "
                f"plan, {sent} sent"
            )

    def write() -> None:
        while (line := lines.get()) is not None:
            print_note(line)

    writer = threading.Thread(target=write, name="plancompiler-notes", daemon=True)
    writer.start()
    try:
        yield note
    finally:
        lines.put(None)
        writer.join(_NOTE_SECONDS)
