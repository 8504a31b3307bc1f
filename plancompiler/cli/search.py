"""`plancompiler search`: the best layouts of a job, on the best shape of its mesh."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    output_option,
    settings_option,
)
from plancompiler.cli.output import format_bytes, print_json, print_note, print_result, print_table
from plancompiler.costs import machine_of_job
from plancompiler.errors import UsageError
from plancompiler.forecasting.job_forecast import Forecast
from plancompiler.forecasting.plan_search import Plan, search_plans
from plancompiler.ir.whole_file import named_file, naming_output
from plancompiler.passes import Config, run_passes
from plancompiler.search.explanation import Explanation, explain_layout, tensor_of
from plancompiler.search.layout_search import LayoutSearch, search_layouts
from plancompiler.search.mesh_search import collectives_per_block

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
    help="What a device may hold, such as 70GiB; by default what the machine's devices do.",
)
@amount_option("--top", 10, "How many plans to list.")
@output_option("--out", "the layout file", "Write the best plan to this file, for `--layout`.")
@click.option("--explain", "name", metavar="NAME", help="Why this tensor has its layout.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    help="Begin no forecast later than this, once a plan fits; by default what is forecast "
    "depends on the job alone.",
)
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
    seconds: float | None,
    settings: Mapping[str, Setting],
    as_json: bool,
) -> None:
    """Search for the best plans of a job: layouts, mesh, pipeline stages, micro-batches, ZeRO and
    recomputation.

    What the job places stays, and so do settings that it changes. Each plan that is listed fits by
    its forecast.

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
    size = job.world_size
    if devices is not None and size != devices:
        raise UsageError(
            "the job has another number of devices",
            got=f"--devices {devices}",
            expected=f"{size}, or a job whose function takes `ranks`",
        )
    machine_of_job(job).check_devices(size)
    if name is not None:
        tensor_of(run_passes(job)[0], name)  # a search may take long
    plans = search_plans(job, memory, top, print_note, seconds)
    best = plans[0]
    proven = best.search
    if best.estimate is not None:
        proven = search_layouts(
            proven.job, split_parameters=proven.split_parameters, whole=proven.whole
        )
    explained = None if name is None else explain_layout(proven, name, memory)
    taken = time.perf_counter() - begin
    if out is not None:
        with naming_output("the layout file", out), named_file(out) as file:
            file.write(best.file_text().encode())
    if as_json:
        print_json(_summary(plans, proven, taken, out, explained))
        return
    print_table(
        ("stages", "mesh", "settings", ">step", ">memory", ">bubble", ">traffic"),
        [
            (
                str(each.stages),
                _mesh(each),
                _settings(each),
                f"{each.forecast.step_seconds:.4g} s",
                format_bytes(each.forecast.worst.memory.total),
                _bubble(each.forecast),
                format_bytes(each.forecast.traffic_bytes),
            )
            for each in plans
        ],
    )
    what = "these layouts" if best.estimate is None else "the layouts of one stage's tensor axis"
    print_result(
        f"\nobjective of {what}: {proven.objective_seconds:.4g} s, and none take less than "
        f"{proven.bound_seconds:.4g} s ({1 - proven.gap:.2%})"
    )
    blocks = collectives_per_block(proven)
    counted = ", ".join(f"{count:g} {kind}" for kind, count in sorted(blocks.counts.items()))
    print_result(f"collectives of each of {blocks.blocks} blocks: {counted or 'none'}")
    if explained is not None:
        print_result("\n".join(["", *explained.lines()]))
    if out is not None:
        print_result(f"\nthe first plan is written to {out}")


def _mesh(plan: Plan) -> str:
    return " x ".join(map(str, plan.mesh))


def _settings(plan: Plan) -> str:
    changed = replace(Config(), **plan.settings).changes()
    said = {
        name: value for name, value in changed.items() if name not in ("layout", "memory_bytes")
    }
    if plan.estimate is not None and plan.estimate.chunks > plan.stages:
        said["chunks"] = plan.estimate.chunks
    return " ".join(f"{name}={value}" for name, value in said.items()) or "-"


def _bubble(known: Forecast) -> str:
    return "-" if known.bubble_fraction is None else f"{known.bubble_fraction:.1%}"


def _summary(
    plans: Sequence[Plan],
    proven: LayoutSearch,
    seconds: float,
    out: Path | None,
    explained: Explanation | None,
) -> dict[str, Any]:
    """What `search --json` prints."""
    summary: dict[str, Any] = {
        "seconds": seconds,
        "variables": proven.variables,
        "objective_seconds": proven.objective_seconds,
        "bound_seconds": proven.bound_seconds,
        "gap": proven.gap,
        "plans": [
            {
                "mesh": list(each.mesh),
                "stages": each.stages,
                "chunks": each.stages if each.estimate is None else each.estimate.chunks,
                "layout_file": str(out) if out is not None and each is plans[0] else None,
                "step_seconds": each.forecast.step_seconds,
                "memory_bytes": each.forecast.worst.memory.total,
                "traffic_bytes": each.forecast.traffic_bytes,
                "bubble_fraction": each.forecast.bubble_fraction,
                "config": str(each.forecast.job.config),
            }
            for each in plans
        ],
        "collectives_per_block": dict(collectives_per_block(proven).counts),
    }
    if explained is not None:
        summary["explained"] = explained.as_data()
    return summary
