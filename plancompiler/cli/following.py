"""A command on a host that follows the one that leads the run."""

from __future__ import annotations

from contextlib import nullcontext

import click

from plancompiler.cli.output import print_note
from plancompiler.cli.program import EXIT_FAILED
from plancompiler.cli.signals import StopRequest, stop_after_saving, stop_on_signals
from plancompiler.engines.launcher import Program
from plancompiler.engines.nodes import Nodes, follow
from plancompiler.engines.supervise import Signals


def exit_if_stopped(context: click.Context, stop: StopRequest) -> None:
    """End the command where it was interrupted."""
    if stop.event.is_set():
        print_note("plancompiler: interrupted; everything it started has been stopped.")
        context.exit(stop.exit_code)


def follow_leader(
    context: click.Context,
    nodes: Nodes,
    program: Program | None,
    ranks: int,
    stop: StopRequest,
    signals: Signals,
) -> None:
    """Run this host's ranks as the leading one says; see `nodes.follow`."""
    error = follow(nodes, program, ranks, signals, print_note)
    exit_if_stopped(context, stop)
    if error is not None:
        print_note(f"plancompiler: the run has failed, as its leading host says: {error}")
        context.exit(EXIT_FAILED)


def follow_job(context: click.Context, place: Nodes, *, saves: bool) -> None:
    """Be a rank of a job that the first process runs. Where that one saves, signals that mean to
    save are passed on to it.
    """
    signals = Signals()
    with (
        stop_on_signals() as stop,
        stop_after_saving(signals.forwarded.append)
        if saves
        else nullcontext(StopRequest()) as saving,
    ):
        signals.stop = stop.event
        follow_leader(context, place, None, 1, stop, signals)
        context.exit(saving.exit_code)
