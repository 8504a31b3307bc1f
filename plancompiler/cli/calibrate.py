"""`plancompiler calibrate`: a machine file of this host, by measuring it."""

from __future__ import annotations

import platform
from pathlib import Path

import click

from plancompiler.cli.options import json_option
from plancompiler.cli.output import print_json, print_note
from plancompiler.costs import chosen_machine
from plancompiler.forecasting.calibrate import calibrate
from plancompiler.ir.whole_file import naming_output, write_whole


@click.command("calibrate")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="Where to write the machine file.",
)
@click.option("--force", is_flag=True, help="Measure although others keep the machine busy.")
@json_option
def calibrate_command(out: Path, force: bool, as_json: bool) -> None:
    """Measure this machine: kernels by kind and size, memory, and what goes between ranks.

    Small jobs run on one rank and on two. A machine that is busy with something else is refused.

    \b
    Example:
      plancompiler calibrate --out here.toml
      plancompiler forecast examples/mlp.py --ranks 2 --machine here.toml --check
    """
    text = calibrate(platform.node() or "here", force)
    with naming_output("a machine file", out):
        write_whole(out, (text.encode(),))
    print_note(f"wrote {out}")
    if as_json:
        machine = chosen_machine(out)
        print_json(
            {
                "machine": machine.name,
                "figures": {each.field: each.value for each in machine.sources},
                "measured_figures": list(machine.measured),
                "curves": len(machine.device.kernels),
            }
        )
