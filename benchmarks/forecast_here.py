"""Forecasts of this machine beside runs on it: step times, and the noise of the runs themselves.

    python benchmarks/forecast_here.py [--machine here.toml] [--only NAME] [--force]

Without a machine file it calibrates first. Each configuration is one that the calibration has not
seen; it is run, and run again after all others. Prints a JSON line per configuration, and one with
the medians and the worst by number of ranks. Ranks are threads. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plancompiler.cli.job_file import load_job
from plancompiler.costs import Machine, chosen_machine
from plancompiler.forecasting import Forecast, forecast
from plancompiler.forecasting.calibrate import calibrate
from plancompiler.forecasting.measured_run import run_measured, total_memory

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
STEPS = 15


def configurations() -> Iterator[tuple[str, str, dict[str, Any], int]]:
    """(name, example, its settings, ranks)"""
    for ranks in (1, 2):
        for hidden in (96, 200, 384, 768, 1536):
            for batch in (48, 160, 400):
                yield f"mlp {hidden} {batch}", "mlp.py", {"hidden": hidden, "batch": batch}, ranks
    small = {"layers": 2, "length": 48}
    for dim in (48, 96, 192):
        for batch in (4, 12):
            sizes = {**small, "dim": dim, "heads": 4, "batch": batch}
            yield f"gpt {dim} {batch}", "gpt.py", {**sizes, "dp": 1}, 1
            yield f"gpt {dim} {batch} dp", "gpt.py", {**sizes, "dp": 2}, 2
            yield f"gpt {dim} {batch} tp", "gpt.py", {**sizes, "dp": 1, "tp": 2}, 2
    sizes = {**small, "dim": 96, "heads": 4, "batch": 8}
    yield "gpt zero 1", "gpt.py", {**sizes, "dp": 2, "zero": 1}, 2
    yield "gpt zero 3", "gpt.py", {**sizes, "dp": 2, "zero": 3}, 2
    yield "gpt recomputed", "gpt.py", {**sizes, "dp": 1, "recompute": "auto"}, 1
    for schedule in ("gpipe", "1f1b", "zero_bubble"):
        pipeline = {"dp": 1, "pp": 2, "microbatches": 4, "schedule": schedule}
        yield f"gpt {schedule}", "gpt.py", {**sizes, **pipeline}, 2


def main() -> None:
    """Forecast, run, run again, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--force", action="store_true")
    given = parser.parse_args()
    path = given.machine
    if path is None:
        path = Path("here.toml")
        path.write_text(calibrate("here", given.force))
    machine: Machine = chosen_machine(path)
    rows: list[tuple[dict[str, Any], Forecast]] = []
    for name, example, settings, ranks in configurations():
        if given.only not in name:
            continue
        asked = ranks if example == "mlp.py" else None
        known = forecast(load_job(str(EXAMPLES / example), settings, asked), machine)
        measured = run_measured(known, STEPS)
        row: dict[str, Any] = {"benchmark": "forecast_here", "name": name, "ranks": known.ranks}
        row["memory_equal"] = total_memory(known) == measured.memory_bytes
        row["predicted_ms"] = known.step_seconds * 1e3
        row["measured_ms"] = measured.step_seconds * 1e3
        rows.append((row, known))
    for row, known in rows:
        row["repeated_ms"] = run_measured(known, STEPS).step_seconds * 1e3
        row["error"] = row["predicted_ms"] / row["measured_ms"] - 1.0
        row["noise"] = row["repeated_ms"] / row["measured_ms"] - 1.0
        print(json.dumps({key: _rounded(value) for key, value in row.items()}), flush=True)
    for ranks in (1, 2):
        chosen = [row for row, _ in rows if row["ranks"] == ranks]
        if chosen:
            summary: dict[str, Any] = {"benchmark": "forecast_here", "ranks": ranks}
            summary["configurations"] = len(chosen)
            summary["memory_equal"] = all(row["memory_equal"] for row in chosen)
            for figure in ("error", "noise"):
                sizes = [abs(row[figure]) for row in chosen]
                summary[figure] = {
                    "median": _rounded(statistics.median(sizes)),
                    "worst": _rounded(max(sizes)),
                }
            print(json.dumps(summary))


def _rounded(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
