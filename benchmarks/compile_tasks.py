"""What a worker's compiler costs per task as its plan grows: gpt of 16 to 1,600 layers on 2 ranks.

The section `tasks` of `python -m benchmarks.compile`. Each plan is compiled from its slice's bytes
in a process of its own, which measures processor time.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from plancompiler.boxing.serde import slice_from_bytes, slice_to_bytes
from plancompiler.boxing.slices import slice_for_rank
from plancompiler.cli.job_file import load_job
from plancompiler.lower.collector import collector_paused
from plancompiler.lower.compile import build_graph
from plancompiler.lower.emit import emit_plan
from plancompiler.lower.rebuild import rebuild_rank_task_graph
from plancompiler.plan.serde import plan_to_bytes
from plancompiler.plan.verify import verify_plan

ROOT = Path(__file__).resolve().parent.parent
GPT = ROOT / "examples" / "gpt.py"
LAYERS = (16, 48, 160, 480, 1600)
"""About 124 tasks each."""
RANKS = 2
RANK = 1
STAGES = ("read", "rebuild", "emit", "verify", "write")

Made = TypeVar("Made")


def task_rows(runs: int) -> Iterator[dict[str, Any]]:
    """A row per number of layers; ratios are to the time per task of the first."""
    base = 0.0
    for layers in LAYERS:
        row = task_row(layers, runs)
        base = base or row["us_per_task"]
        yield {**row, "ratio": round(row["us_per_task"] / base, 3)}


def task_row(layers: int, runs: int) -> dict[str, Any]:
    """Microseconds per task, all together and by stage: medians over the runs."""
    job = load_job(str(GPT), {"preset": "tiny", "layers": layers, "dp": RANKS}, RANKS)
    data = slice_to_bytes(slice_for_rank(build_graph(job, RANKS), RANK))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "slice"
        path.write_bytes(data)
        command = [sys.executable, "-m", "benchmarks.compile_tasks", str(path)]
        profiles = [
            json.loads(subprocess.run(command, capture_output=True, check=True, cwd=ROOT).stdout)
            for _ in range(runs)
        ]
    tasks = int(profiles[0]["tasks"])

    def per_task(seconds: list[float]) -> float:
        return round(statistics.median(seconds) / tasks * 1e6, 2)

    together = [sum(each[stage] for stage in STAGES) for each in profiles]
    return {
        "benchmark": "compile",
        "section": "tasks",
        "layers": layers,
        "tasks": tasks,
        "seconds": round(statistics.median(together), 4),
        "us_per_task": per_task(together),
        **{f"{stage}_us": per_task([each[stage] for each in profiles]) for stage in STAGES},
        "slice_bytes": len(data),
    }


@collector_paused()
def compile_slice(data: bytes) -> dict[str, float]:
    """Processor seconds of every stage from a slice's bytes to a plan's, and the tasks."""
    seconds: dict[str, float] = {}

    def timed(stage: str, make: Callable[[], Made]) -> Made:
        begin = time.process_time()
        made = make()
        seconds[stage] = time.process_time() - begin
        return made

    rank_slice = timed("read", lambda: slice_from_bytes(data))
    graph = timed("rebuild", lambda: rebuild_rank_task_graph(rank_slice, RANK))
    plan = timed("emit", lambda: emit_plan(graph))
    timed("verify", lambda: verify_plan(plan))
    timed("write", lambda: plan_to_bytes(plan))
    return {**seconds, "tasks": len(plan.tasks)}


if __name__ == "__main__":
    print(json.dumps(compile_slice(Path(sys.argv[1]).read_bytes())))
