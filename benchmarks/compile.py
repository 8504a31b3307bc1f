"""Compile time of GPT-3 175B (tp 8, pp 16) as data parallelism grows from 8 to 16,384 ranks.

    python benchmarks/compile.py [--runs 3]

Prints one JSON line per number of ranks: the master's seconds, the slowest of three workers'
(first, middle, last rank, each compiled from its slice's bytes in another process), sizes, and the
ratios to the figures at 1,024 ranks. Times are medians over the runs.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

GPT = Path(__file__).resolve().parent.parent / "examples" / "gpt.py"
BASE = 1024
MODEL = ("-D", "preset=gpt3-175b", "-D", "tp=8", "-D", "pp=16")


def compile_once(dp: int) -> dict[str, Any]:
    """What `compile --json` says, in a process of its own so that nothing is cached."""
    ranks = 128 * dp
    command = [sys.executable, "-m", "plancompiler", "compile", str(GPT), *MODEL, "-D", f"dp={dp}"]
    command += ["--ranks", str(ranks), "--mode", "rank_per_process", "--json"]
    for rank in (0, ranks // 2 - 1, ranks - 1):
        command += ["--rank", str(rank)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(dp: int, runs: int) -> dict[str, Any]:
    """Medians over the runs for one number of ranks."""
    results = [compile_once(dp) for _ in range(runs)]
    return {
        "ranks": 128 * dp,
        "master_seconds": statistics.median(r["master_seconds"]["total"] for r in results),
        "worker_seconds": statistics.median(r["rank_seconds"]["max"] for r in results),
        "slice_bytes": results[0]["slice_bytes"]["max"],
        "boxing_graph_bytes": results[0]["boxing_graph_bytes"],
        "master_rss_mib": max(r["peak_rss_mib"] for r in results),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    base = measure(BASE // 128, runs)
    for dp in (1, 8, 32, 128):
        row = base if dp * 128 == BASE else measure(dp, runs)
        row["master_ratio"] = round(row["master_seconds"] / base["master_seconds"], 3)
        row["worker_ratio"] = round(row["worker_seconds"] / base["worker_seconds"], 3)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
