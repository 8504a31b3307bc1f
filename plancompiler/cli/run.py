"""`plancompiler run`: run a job on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

import click
import numpy as np

from plancompiler.cli.job_file import load_job
from plancompiler.cli.options import (
    Setting,
    job_argument,
    json_option,
    mode_option,
    settings_option,
)
from plancompiler.cli.output import print_json, print_note, print_table, progress
from plancompiler.errors import FeedError
from plancompiler.ir import Job
from plancompiler.session import BACKENDS, Outputs, run

DEFAULT_STEPS = 100
LOSS = "loss"
"""The output that is reported as the loss, where a job has several."""


@click.command("run")
@job_argument
@click.option(
    "--ranks", type=click.IntRange(min=1), help="World size; by default what the job needs."
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="threads",
    show_default=True,
    help="threads: ranks in this process. processes: a master and a worker process per rank.",
)
@mode_option
@click.option(
    "--steps", type=click.IntRange(min=1), default=DEFAULT_STEPS, show_default=True, help="Steps."
)
@click.option(
    "--restore",
    type=click.Path(path_type=Path),
    help="Start from this checkpoint, whatever layout it was saved from.",
)
@click.option("--save", type=click.Path(path_type=Path), help="Write a checkpoint at the end.")
@settings_option
@json_option
def run_command(
    target: str,
    ranks: int | None,
    backend: str,
    mode: str | None,
    steps: int,
    restore: Path | None,
    save: Path | None,
    settings: Mapping[str, Setting],
    as_json: bool,
) -> None:
    """Compile a job and run it on this machine, each rank a thread or a process.

    \b
    Example:
      plancompiler run examples/mlp.py --ranks 4 -D layout=dp_tp --steps 50
      plancompiler run examples/gpt.py -D preset=tiny -D dp=2 --backend processes --save model
    """
    job = load_job(target, settings, ranks)
    require_own_data(job)
    losses: list[float] = []
    last: Outputs = {}
    with run(job, ranks, backend=backend, mode=mode, restore=restore) as session:
        print_note(
            f"compiled {job.name} for {session.ranks} ranks in {session.compile_seconds:.2f} s "
            f"({session.mode})"
        )
        with progress("step", steps) as advance:
            for last in session.run(steps):
                loss = loss_of(last)
                if loss is not None:
                    losses.append(loss)
                advance(format_scalars(last))
        if save is not None:
            session.save(save)
            print_note(f"wrote a checkpoint to {save}")
        median = statistics.median(session.step_seconds)
        p90 = float(np.percentile(session.step_seconds, 90))
        report = {
            "ranks": session.ranks,
            "backend": session.backend,
            "mode": session.mode,
            "steps": steps,
            "losses": losses,
            "step_seconds": {"median": median, "p90": p90},
            "compile_seconds": session.compile_seconds,
            "digest": session.digest,
        }
    if as_json:
        print_json(report)
        return
    rows = [
        ("ranks", f"{session.ranks} ({session.backend})"),
        ("mode", session.mode),
        ("compile", f"{session.compile_seconds:.3f} s"),
        ("digest", session.digest),
        ("steps", str(steps)),
        ("step time", f"median {median * 1e3:.2f} ms, p90 {p90 * 1e3:.2f} ms"),
    ]
    if losses:
        rows.append(("loss", f"{losses[0]:.6g} first, {losses[-1]:.6g} last"))
    rows += [
        (name, f"{value:.6g}" if isinstance(value, float) else f"array of shape {value.shape}")
        for name, value in last.items()
        if name != LOSS
    ]
    print_table(("what", "value"), rows)


def require_own_data(job: Job) -> None:
    """A job run from the command line must read its own data; a FeedError names its inputs."""
    if job.inputs:
        raise FeedError(
            "this job wants to be fed each step, which a command cannot do",
            got=f"inputs {', '.join(job.inputs)}",
            hint="read data inside the job (pc.data.Arrays, pc.data.TokenFile), or use pc.run "
            "and session.step(...) from Python",
        )


def loss_of(outputs: Outputs) -> float | None:
    """The output named `loss`, else the first scalar; None where there is none."""
    named = outputs.get(LOSS)
    if isinstance(named, float):
        return named
    return next((value for value in outputs.values() if isinstance(value, float)), None)


def format_scalars(outputs: Outputs) -> str:
    """`loss 0.1234  accuracy 0.98`."""
    return "  ".join(
        f"{name} {value:.5g}" for name, value in outputs.items() if isinstance(value, float)
    )
