"""Forecasts of this machine beside runs on it: step times, and the noise of the runs themselves.

    python -m benchmarks.forecast_here [--machine here.toml] [--only NAME] [--rounds 4] [--force]

Without a machine file it calibrates, its jobs between those that are forecast, so that both see the
machine in the same moods; each job of either kind runs once per round. No configuration is one that
calibration has. Prints a JSON line per configuration, and one with the medians and the worst by
where ranks are: alone, threads or processes. `error` is the forecast over the quickest of the runs,
as the quickest also counts in calibration; `noise` is the quickest of the second half of the rounds
over that of the first. Run it on an idle machine. Where PyTorch and transformers are
installed, imported models are among the configurations.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import plancompiler as pc
from plancompiler.cli.job_file import load_job
from plancompiler.forecasting.calibrate import Calibration
from plancompiler.forecasting.measured_run import (
    held_memory,
    run_steps,
    sent_payload,
    total_memory,
)

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
WORLDS = ("alone", "threads", "processes")


@dataclass
class Configuration:
    """A job to forecast, and what was measured of it."""

    name: str
    job: pc.Job
    backend: str
    seconds: list[float] = field(default_factory=list)
    """Of a step, by round."""
    loads: list[float] = field(default_factory=list)
    """Averages of the machine's load then."""

    @property
    def world(self) -> str:
        return self.backend if self.job.world_size > 1 else "alone"

    def measure(self) -> None:
        """Run it once more."""
        ranks = self.job.world_size
        with pc.run(self.job, ranks, self.backend, cache=False) as session:
            self.seconds.append(run_steps(session))
        self.loads.append(os.getloadavg()[0])

    def row(self, machine: Path) -> dict[str, Any]:
        """What the table says of it."""
        known = pc.forecast(self.job, machine, backend=self.backend)
        half = (len(self.seconds) + 1) // 2
        first, again = min(self.seconds[:half]), min(self.seconds[-half:])
        return {
            "benchmark": "forecast_here",
            "name": self.name,
            "world": self.world,
            "memory_equal": total_memory(known) == held_memory(known),
            "traffic_equal": known.traffic_bytes == sent_payload(known),
            "predicted_ms": known.step_seconds * 1e3,
            "measured_ms": [each * 1e3 for each in self.seconds],
            "error": known.step_seconds / min(first, again) - 1.0,
            "noise": again / first - 1.0,
            "load": statistics.fmean(self.loads),
        }


def configurations() -> Iterator[Configuration]:
    """All of them."""
    for name, example, settings, ranks in _examples():
        job = load_job(str(EXAMPLES / example), settings, ranks if example == "mlp.py" else None)
        yield Configuration(name, job, "threads")
        if ranks > 1 and not name.endswith("48"):
            yield Configuration(name, job, "processes")
    if all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        for dim, batch, ranks in ((96, 4, 1), (160, 6, 1), (160, 8, 2)):
            yield Configuration(f"imported {dim} {batch}", _imported(dim, batch, ranks), "threads")


def _examples() -> Iterator[tuple[str, str, dict[str, Any], int]]:
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


def _imported(dim: int, batch: int, ranks: int) -> pc.Job:
    """A training step of a GPT-2 of transformers, which reads a file."""
    import torch  # noqa: PLC0415  # where they are installed
    import transformers  # noqa: PLC0415  # likewise

    length, vocabulary = 48, 256
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=dim,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    ids = torch.randint(0, vocabulary, (batch, length))
    example = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    mesh = pc.Placement("cpu", np.arange(ranks), ("dp",))
    model = pc.from_torch(transformers.GPT2LMHeadModel(config), example).place(mesh, {})
    text = EXAMPLES / "gpt.py"
    with pc.job("imported") as job:
        tokens, _ = pc.data.TokenFile(text, batch, length, placement=mesh, sbp="S(0)")
        loss = model(input_ids=tokens, labels=tokens).loss
        pc.optim.AdamW(1e-3, betas=(0.9, 0.95), weight_decay=0.01).minimize(loss)
        pc.output("loss", loss)
    return job


def in_turns(*kinds: Sequence[Callable[[], None]]) -> Iterator[Callable[[], None]]:
    """All, those of each kind spread evenly."""
    places = [
        ((number + 0.5) / len(each), run) for each in kinds for number, run in enumerate(each)
    ]
    for _, run in sorted(places, key=lambda place: place[0]):
        yield run


def main() -> None:
    """Calibrate and run in turns, forecast, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--keep", type=Path, help="where to write the machine file")
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--force", action="store_true")
    given = parser.parse_args()
    chosen = [each for each in configurations() if given.only in each.name]
    with tempfile.TemporaryDirectory(prefix="plancompiler-forecast-") as folder:
        calibration = None
        if given.machine is None:
            calibration = Calibration(pc.run, Path(folder), given.force)
        for number in range(given.rounds):
            calibrating = [] if calibration is None else list(calibration.runs())
            for run in in_turns(calibrating, [each.measure for each in chosen]):
                run()
            print(f"round {number + 1} of {given.rounds} done", file=sys.stderr)
        path = given.machine
        if calibration is not None:
            path = given.keep or Path(folder) / "here.toml"
            path.write_text(calibration.text("here"))
        rows = [each.row(path) for each in chosen]
    for row in rows:
        print(json.dumps({key: _rounded(value) for key, value in row.items()}), flush=True)
    for world in WORLDS:
        of_world = [row for row in rows if row["world"] == world]
        if of_world:
            print(json.dumps(_summary(world, of_world)))


def _summary(world: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {"benchmark": "forecast_here", "world": world}
    summary["configurations"] = len(rows)
    for equal in ("memory_equal", "traffic_equal"):
        summary[equal] = all(row[equal] for row in rows)
    for figure in ("error", "noise"):
        sizes = [abs(row[figure]) for row in rows]
        summary[figure] = {
            "median": _rounded(statistics.median(sizes)),
            "worst": _rounded(max(sizes)),
        }
    summary["load"] = _rounded(statistics.fmean(row["load"] for row in rows))
    return summary


def _rounded(value: object) -> object:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
