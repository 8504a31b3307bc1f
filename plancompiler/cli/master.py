"""`plancompiler master`: serve jobs to workers."""

from __future__ import annotations

import time

import click

from plancompiler.cli.options import json_option, mode_option, tls_options
from plancompiler.cli.output import print_json, print_note
from plancompiler.cli.signals import stop_on_signals
from plancompiler.cluster.channel import TlsFiles
from plancompiler.master.server import MasterServer


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
    tls: TlsFiles | None,
    insecure: bool,
    as_json: bool,
) -> None:
    """Take jobs from clients, compile them and drive them on the workers, until stopped.

    \b
    Example:
      plancompiler master --listen 127.0.0.1:50051 --ranks 2

    With --json, the address goes to stdout as soon as the master serves.
    """
    begin = time.monotonic()
    with (
        stop_on_signals() as stop,
        MasterServer(listen, ranks, mode=mode, tls=tls, insecure=insecure) as server,
    ):
        print_note(f"master of {ranks} ranks at {server.address}; Ctrl-C stops it")
        if as_json:
            print_json({"address": server.address, "ranks": ranks})
        stop.event.wait()
        print_note(f"stopping after {time.monotonic() - begin:.0f} s")
    context.exit(stop.exit_code)
