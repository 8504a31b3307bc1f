"""`plancompiler calibrate`: a machine file of this host, by measuring it."""

from __future__ import annotations

import platform
from pathlib import Path

import click

from plancompiler.cli.options import json_option
from plancompiler.cli.output import print_json, print_note
from plancompiler.costs import chosen_machine
from plancompiler.errors import UsageError
from plancompiler.forecasting.calibrate import calibrate, learn
from plancompiler.ir.whole_file import check_writable, named_file, naming_output
from plancompiler.running.session import run


@click.command("calibrate")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write the machine file.",
)
@click.option(
    "--from",
    "trace",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Learn from this timeline, which `run --trace` has written, instead of running jobs.",
)
@click.option(
    "--onto",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The machine file to which --from adds; --out has the result instead where it is given.",
)
@click.option("--force", is_flag=True, help="Measure although others keep the machine busy.")
@json_option
def calibrate_command(
    out: Path | None, trace: Path | None, onto: Path | None, force: bool, as_json: bool
) -> None:
    """Measure this machine: kernels by kind and size, memory, and what goes between ranks.

    Small jobs run on one rank, on two threads and on two processes, for a few minutes together. A
    machine that is busy with something else is refused. With --from and --onto nothing runs: what a
    recorded run shows is added to a machine file.

    \b
    Example:
      plancompiler calibrate --out here.toml
      plancompiler forecast examples/mlp.py --ranks 2 --machine here.toml --check
      plancompiler run examples/mlp.py --ranks 2 --trace timeline.json
      plancompiler calibrate --from timeline.json --onto here.toml
    """
    if (trace is None) != (onto is None):
        raise UsageError(
            "--from and --onto belong together: a timeline is added to a machine file",
            got="--onto" if trace is None else "--from",
        )
    out = out or onto
    if out is None:
        raise UsageError(
            "calibrate needs a place for its machine file", expected="--out, or --from and --onto"
        )
    check_writable(out, "the machine file")
    if trace is None or onto is None:
        text = calibrate(platform.node() or "here", run, force)
    else:
        text = learn(onto, trace)
    with naming_output("a machine file", out), named_file(out) as file:
        file.write(text.encode())
    print_note(f"wrote {out}")
    if as_json:
        machine = chosen_machine(out)
        print_json(
            {
                "machine": machine.name,
                "figures": {each.field: each.value for each in machine.sources},
                "measured_figures": list(machine.measured),
                "kinds": len(machine.tasks),
            }
        )
