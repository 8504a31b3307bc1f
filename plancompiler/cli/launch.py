"""`plancompiler launch`: run a script as several ranks of one SPMD program."""

from __future__ import annotations

import secrets
import sys
import time
from dataclasses import replace
from pathlib import Path

import click

from plancompiler.blas.threads import one_thread_environment
from plancompiler.cli.engine_options import (
    EngineOptions,
    engine_options,
    max_restarts_option,
    nodes_launcher,
    nodes_options,
    say,
)
from plancompiler.cli.following import exit_if_stopped, follow_leader
from plancompiler.cli.options import allow_mixed_kernels_option, json_option
from plancompiler.cli.output import print_json, print_note
from plancompiler.cli.signals import stop_on_signals
from plancompiler.engines.choice import LOCAL
from plancompiler.engines.launch_variables import RESTART, TOKEN
from plancompiler.engines.launcher import Program
from plancompiler.engines.nodes import Nodes
from plancompiler.engines.supervise import Attempt, Signals, forwarding
from plancompiler.plan.digest import ALLOW_MIXED_KERNELS


@click.command("launch", context_settings={"ignore_unknown_options": True})
@click.option(
    "-n",
    "--ranks",
    "--nproc-per-node",
    type=click.IntRange(min=1),
    required=True,
    help="How many ranks to start; with --nnodes, on this host.",
)
@nodes_options
@max_restarts_option("Where a rank fails, start all again up to R times; SCRIPT resumes by itself.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@engine_options
@allow_mixed_kernels_option
@json_option
@click.pass_context
def launch_command(
    context: click.Context,
    ranks: int,
    script: Path,
    arguments: tuple[str, ...],
    engine: EngineOptions,
    nodes: Nodes | None,
    max_restarts: int,
    allow_mixed_kernels: bool,
    as_json: bool,
) -> None:
    """Start SCRIPT as several ranks of one SPMD program; it calls pc.init() to join.

    \b
    Example:
      plancompiler launch -n 2 train.py --epochs 3
      plancompiler launch --engine mpi -n 2 train.py
      plancompiler launch --nnodes 2 --rdzv-endpoint node0:29400 --token-file token -n 4 train.py

    What follows SCRIPT is passed to it. Where a rank fails all are ended, and the traceback of the
    first failure is shown first. SIGUSR1 is passed on to all ranks. With --json the ranks' standard
    output goes to standard error.
    """
    begin = time.monotonic()
    environment = {**one_thread_environment(), TOKEN: secrets.token_hex(16)}
    if allow_mixed_kernels:
        environment[ALLOW_MIXED_KERNELS] = "1"
    program = Program((sys.executable, str(script), *arguments), environment)
    signals = Signals()
    with stop_on_signals() as stop, forwarding(signals):
        signals.stop = stop.event
        if nodes is not None and not nodes.leads():
            follow_leader(context, nodes, program, ranks, stop, signals)
            return
        if nodes is not None:
            launcher = nodes_launcher(nodes, engine, ranks, as_json, signals.forwarded.append)
            ranks = nodes.maximum
        else:
            launcher = engine.launcher(LOCAL, output_to_error=as_json)
        for restart in range(max_restarts + 1):
            numbered = replace(program, environment={**environment, RESTART: str(restart)})
            attempt = Attempt(launcher, numbered, ranks, say)
            if not attempt.run(signals, may_restart=restart < max_restarts):
                break
            attempt.show_failures(False)
            print_note(f"restart {restart + 1} of {max_restarts}: {attempt.error()}")
    attempt.show_failures(stop.event.is_set())
    if as_json:
        codes = [each.code for each in attempt.started]
        seconds = time.monotonic() - begin
        print_json({"ranks": len(codes), "exit_codes": codes, "seconds": seconds})
    exit_if_stopped(context, stop)
    failure = attempt.error()
    if failure is not None:
        raise failure
