"""`plancompiler search`: the best layouts of a job, on the best shape of its mesh."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from plancompiler.cli.config_options import configured
from plancompiler.cli.job_file import load_job
from plancompiler.cli.options import (
    Setting,
    amount_option,
    job_argument,
    json_option,
    settings_option,
)
from plancompiler.cli.output import format_bytes, print_json, print_result, print_table
from plancompiler.errors import UsageError
from plancompiler.forecasting.job_forecast import Forecast, forecast
from plancompiler.ir.whole_file import naming_output, write_whole
from plancompiler.passes import run_passes
from plancompiler.search.explanation import Explanation, explain_layout
from plancompiler.search.layout_file import layout_text
from plancompiler.search.layout_search import LayoutSearch, keep_layouts
from plancompiler.search.mesh_search import collectives_per_block, search_meshes
from plancompiler.search.mesh_shapes import placement_of, with_mesh

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _read_bytes(
    _context: click.Context, _parameter: click.Parameter, text: str | None
) -> float | None:
    """`70GiB`, `512MiB` or a number of bytes."""
    if text is None:
        return None
    unit = text.strip().upper().removesuffix("B").removesuffix("I")
    number = unit.rstrip("KMGT")
    try:
        count = float(number) * _UNITS[unit[len(number) :]]
    except (KeyError, ValueError):
        count = 0.0
    if not count > 0:
        raise UsageError("not an amount of memory", got=repr(text), expected="70GiB, or bytes")
    return count


@click.command("search")
@job_argument
@click.option(
    "--devices", type=click.IntRange(min=1), help="How many; by default what the job's mesh has."
)
@click.option("--machine", metavar="MACHINE", help="By whose figures: a name or a file.")
@click.option(
    "--memory",
    metavar="AMOUNT",
    callback=_read_bytes,
    help="What a device may hold of variables and of what backward computation reads: 70GiB.",
)
@amount_option("--top", 10, "How many plans to list.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the best plan's layouts to this file, for `--layout`.",
)
@click.option("--explain", "name", metavar="NAME", help="Why this tensor has its layout.")
@settings_option
@json_option
def search_command(
    target: str,
    devices: int | None,
    machine: str | None,
    memory: float | None,
    top: int,
    out: Path | None,
    name: str | None,
    settings: Mapping[str, Setting],
    as_json: bool,
) -> None:
    """Search for the best layouts of a job, and say how good they are.

    What the job places stays. If it places nothing, all meshes of one and two axes are tried.

    \b
    Example:
      plancompiler search examples/gpt.py -D layout=auto --devices 8 --machine h100-sxm
      plancompiler search examples/mlp.py -D layout=auto --devices 4 --out layout.toml
      plancompiler compile examples/mlp.py -D layout=auto --ranks 4 --layout layout.toml
    """
    begin = time.perf_counter()
    config: dict[str, Any] = {"layout": "auto"}
    if machine is not None:
        config["machine"] = machine
    if memory is not None:
        config["memory_bytes"] = int(memory)
    job = configured(load_job(target, settings, devices), config)
    size = placement_of(job).size
    if devices is not None and size != devices:
        raise UsageError(
            "the job has another number of devices",
            got=f"--devices {devices}",
            expected=f"{size}, or a job whose function takes `ranks`",
        )
    results = search_meshes(run_passes(job)[0], memory)[:top]
    best = results[0]
    forecasts = []
    for each in results:
        keep_layouts(each, config.get("memory_bytes"))
        forecasts.append(forecast(with_mesh(job, placement_of(each.job).hierarchy)))
    explained = None if name is None else explain_layout(best, name, memory)
    seconds = time.perf_counter() - begin
    if out is not None:
        text = layout_text(best.job, best.layouts())
        with naming_output("the layout file", out):
            write_whole(out, [text.encode()])
    if as_json:
        print_json(_summary(results, forecasts, seconds, out, explained))
        return
    print_table(
        ("mesh", "objective", "bound", "step", "memory", "traffic", "searched in"),
        [
            (
                _mesh(each),
                f"{each.objective_seconds:.4g} s",
                f"{each.bound_seconds:.4g} s",
                f"{known.step_seconds:.4g} s",
                format_bytes(known.worst.memory.total),
                format_bytes(known.traffic_bytes),
                f"{each.seconds:.2f} s",
            )
            for each, known in zip(results, forecasts, strict=True)
        ],
    )
    print_result(
        f"\nno layouts on {_mesh(best)} take less than {1 - best.gap:.2%} of the objective"
    )
    blocks = collectives_per_block(best)
    counted = ", ".join(f"{count:g} {kind}" for kind, count in sorted(blocks.counts.items()))
    print_result(f"collectives of each of {blocks.blocks} blocks: {counted or 'none'}")
    if explained is not None:
        print_result("\n".join(["", *explained.lines()]))
    if out is not None:
        print_result(f"\nlayouts written to {out}")


def _mesh(result: LayoutSearch) -> str:
    return " x ".join(map(str, placement_of(result.job).hierarchy))


def _summary(
    results: Sequence[LayoutSearch],
    forecasts: Sequence[Forecast],
    seconds: float,
    out: Path | None,
    explained: Explanation | None,
) -> dict[str, Any]:
    """What `search --json` prints."""
    best = results[0]
    summary: dict[str, Any] = {
        "seconds": seconds,
        "variables": best.variables,
        "objective_seconds": best.objective_seconds,
        "bound_seconds": best.bound_seconds,
        "gap": best.gap,
        "plans": [
            {
                "mesh": list(placement_of(each.job).hierarchy),
                "layout_file": str(out) if out is not None and each is best else None,
                "objective_seconds": each.objective_seconds,
                "step_seconds": known.step_seconds,
                "memory_bytes": known.worst.memory.total,
                "traffic_bytes": known.traffic_bytes,
                "bubble_fraction": known.bubble_fraction,
                "config": str(each.job.config),
            }
            for each, known in zip(results, forecasts, strict=True)
        ],
        "collectives_per_block": dict(collectives_per_block(best).counts),
    }
    if explained is not None:
        summary["explained"] = explained.as_data()
    return summary
