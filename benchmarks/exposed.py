"""Exposed communication of gpt tiny by simulation: what streams and buckets hide of a slow network.

    python benchmarks/exposed.py

Ops and transport take their estimated times, transport along `dp` and `tp` a multiple of them.
Prints a JSON line per layout and multiples: in ms, the time of a step, and how much longer it is
than what a rank computes, for each setting. No clock is read, so load does not matter.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from plancompiler.boxing.report import boxing_costs
from plancompiler.boxing.step_time import placed_op_seconds
from plancompiler.cli.job_file import load_job
from plancompiler.ir.task import family_of
from plancompiler.lower.compile import compile_plans
from plancompiler.passes import config_of
from plancompiler.plan.plan import CollectiveSpec, Task
from plancompiler.simulate import simulate

GPT = Path(__file__).resolve().parent.parent / "examples" / "gpt.py"
STEPS = 2
SETTINGS: dict[str, dict[str, Any]] = {
    "one stream, 32 MiB": {"streams": "one", "fuse_bytes": 32 << 20},
    "one stream, auto": {"streams": "one"},
    "default": {},
}
MULTIPLES = ((1, 1), (10, 1), (40, 1), (40, 10), (100, 10))
"""Of transport along `dp`, and along other axes alone."""


def exposed(
    layout: dict[str, int], settings: dict[str, Any], along_dp: float, along_others: float
) -> tuple[float, float]:
    """Seconds of a step, and those in which rank 0 computes nothing."""
    job = load_job(str(GPT), {"preset": "tiny", **layout})
    job = replace(job, config=replace(config_of(job), **settings))
    compiled = compile_plans(job, job.world_size, "rank_per_iter")
    seconds = {placed.family: placed_op_seconds(placed) for placed in compiled.graph.ops}
    for each in boxing_costs(compiled.graph):
        transfer = compiled.graph.family_by_number[each.family].transfer
        axes = () if transfer is None else transfer.mesh_axes
        seconds[each.family] = each.seconds * (along_dp if 0 in axes else along_others)

    def cost(rank: int, task: Task) -> float:
        return seconds.get(family_of(task.id), 0.0)

    tasks = compiled.plans[0].tasks
    computed = sum(cost(0, task) for task in tasks if not isinstance(task.spec, CollectiveSpec))
    step = simulate(compiled.plans, cost, steps=STEPS).makespan / STEPS
    return step, step - computed


def main() -> None:
    """Simulate and print."""
    for layout in ({"dp": 2}, {"dp": 2, "tp": 2}):
        for along_dp, along_others in MULTIPLES:
            line: dict[str, object] = {"benchmark": "exposed", "layout": layout}
            line |= {"along_dp": along_dp, "along_others": along_others}
            for name, settings in SETTINGS.items():
                step, bare = exposed(layout, settings, along_dp, along_others)
                line[name] = {"step_ms": round(step * 1e3, 1), "exposed_ms": round(bare * 1e3, 2)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
