"""Losses of gpt tiny in every layout and under every setting, compared with those of one rank.

    python -m benchmarks.layouts [--steps 30] [--only WORD ...]

Trains `examples/gpt.py` (preset tiny, 8 sequences of 128 bytes, the same in all rows) as threads
and prints one JSON line per row. Without --only, docs/layouts.md is written. Ends with 1 if a row
fails or its losses differ by more than its tolerance; settings that the compiler refuses for a
layout are a row with its message.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import plancompiler as pc
from plancompiler.cli.job_file import load_job
from plancompiler.errors import MicrobatchError, PlanCompilerError, UsageError
from plancompiler.ir import Job
from plancompiler.ir.task import TaskKind
from plancompiler.passes import Config
from plancompiler.plan.plan import CollectiveSpec, Plan

ROOT = Path(__file__).resolve().parent.parent
GPT = ROOT / "examples" / "gpt.py"
TABLE = ROOT / "docs" / "layouts.md"
STEPS = 30
MIB = 1 << 20

TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-2}
SCHEDULES = ("gpipe", "1f1b", "zero_bubble")
HALVES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Row:
    """One way to train the model."""

    layout: dict[str, int]
    """dp, tp, pp and, for the interleaved schedule, chunks."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Those of pc.Config."""

    def __str__(self) -> str:
        """`dp 2 × tp 2, zero 3`: what --only searches."""
        return ", ".join(part for part in (self.layout_text, self.settings_text) if part)

    @property
    def layout_text(self) -> str:
        axes = [f"{axis} {self.layout[axis]}" for axis in ("dp", "tp", "pp") if axis in self.layout]
        return " × ".join(axes) or "1 rank"

    @property
    def settings_text(self) -> str:
        settings = {**self.settings}
        if "chunks" in self.layout:
            settings["chunks"] = self.layout["chunks"]
        return ", ".join(
            name.replace("_", " ") if value is True else f"{name} {value}"
            for name, value in settings.items()
        )

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.settings.get("precision", "float32")]


ONE_RANK = Row({})


def rows() -> Iterator[Row]:
    """The whole table: plain layouts first, then one setting after another."""
    dp4, tp4, pp4, all8 = {"dp": 4}, {"tp": 4}, {"pp": 4}, {"dp": 2, "tp": 2, "pp": 2}
    dp_tp, dp_pp, tp_pp = {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}, {"tp": 2, "pp": 2}
    yield ONE_RANK
    for layout in (dp4, tp4, pp4, dp_tp, dp_pp, tp_pp):
        yield Row(layout)
    for layout in ({"dp": 8}, {"tp": 8}, {"dp": 2, "tp": 4}, {"tp": 2, "pp": 4}, all8):
        yield Row(layout)
    for zero in (1, 2, 3):
        for layout in (dp4, all8):
            yield Row(layout, {"zero": zero})
    for layout in (ONE_RANK.layout, dp4, tp4, dp_tp):
        yield Row(layout, {"microbatches": 2})
    for schedule in SCHEDULES:
        yield Row(pp4, {"microbatches": 8, "schedule": schedule})
        yield Row(all8, {"microbatches": 4, "schedule": schedule})
    for layout in (tp_pp, all8):
        yield Row({**layout, "chunks": 2}, {"microbatches": 4, "schedule": "interleaved"})
    for layout in (dp4, all8):
        yield Row(layout, {"recompute": "auto"})
    yield Row(all8, {"recompute": "auto", "microbatches": 4, "schedule": "1f1b"})
    for layout in (tp4, dp_tp, all8):
        yield Row(layout, {"sequence_parallel": True})
    for precision in HALVES:
        yield Row(dp4, {"precision": precision})
    yield Row(all8, {"precision": "float16"})
    everything = {
        "zero": 2,
        "microbatches": 4,
        "schedule": "1f1b",
        "recompute": "auto",
        "sequence_parallel": True,
    }
    yield Row(all8, everything)
    for precision in HALVES:
        yield Row(all8, {**everything, "precision": precision})


def job_of(row: Row, steps: int) -> Job:
    """The training job of a row; a UsageError for a setting that does not exist."""
    given: dict[str, Any] = {"preset": "tiny", "total": steps, **row.layout}
    if "chunks" in row.layout:
        given["schedule"] = row.settings["schedule"]
    return replace(load_job(str(GPT), given), config=Config.of(row.settings))


def transports(plan: Plan) -> Counter[str]:
    """Collectives by kind, and copies from other ranks, that a rank runs in a step."""
    runs = Counter(slot.segment for slot in plan.slots)
    counts: Counter[str] = Counter()
    for task in plan.tasks:
        if isinstance(task.spec, CollectiveSpec):
            counts[str(task.spec.primitive)] += runs[task.segment]
        elif task.kind is TaskKind.COPY_COMM_NET:
            counts["copy"] += runs[task.segment]
    return counts


def measure(row: Row, steps: int) -> dict[str, Any]:
    """Train; losses, transport and memory, or why the compiler refuses, or what failed."""
    try:
        session = pc.run(job_of(row, steps))
    except (UsageError, MicrobatchError) as error:
        report = error.report
        return {"refused": report.what + (f" ({report.got})" if report.got else "")}
    except PlanCompilerError as error:
        return {"failed": str(error)}
    with session:
        plans = session.plans.values()
        wanted = row.settings.get("microbatches", 1)
        if any(plan.microbatches != wanted for plan in plans):
            return {"failed": f"the plans do not run {wanted} micro-batches"}
        begin = time.perf_counter()
        try:
            losses = [float(outputs["loss"]) for outputs in session.run(steps)]
        except PlanCompilerError as error:
            return {"failed": str(error)}
        seconds = time.perf_counter() - begin
    largest = max(plans, key=lambda plan: sum(block.nbytes for block in plan.blocks))
    busiest = max(map(transports, plans), key=Counter.total)
    memory = Counter[str]()
    for block in largest.blocks:
        memory[block.purpose] += block.nbytes
    return {
        "ranks": len(plans),
        "losses": losses,
        "transports": dict(sorted(busiest.items())),
        "variables_mib": round(memory["variables"] / MIB, 1),
        "arena_mib": round(memory["arena"] / MIB, 1),
        "step_seconds": round(seconds / steps, 3),
    }


def compare(row: Row, measured: dict[str, Any], reference: list[float]) -> dict[str, Any]:
    """What was measured, with the largest relative difference of any loss instead of all losses."""
    if "losses" not in measured:
        return measured
    expected = np.array(reference)
    # NumPy's maximum, unlike Python's, is no number where any loss is none.
    difference = float(np.max(np.abs(np.array(measured["losses"]) - expected) / np.abs(expected)))
    return {
        **{name: value for name, value in measured.items() if name != "losses"},
        "difference": difference,
        "final_loss": measured["losses"][-1],
        "within_tolerance": difference <= row.tolerance,
    }


def line(row: Row, measured: dict[str, Any]) -> str:
    """A row of the table in Markdown."""
    start = f"| {row.layout_text} | {row.settings_text} |"
    for name in ("refused", "failed"):
        if name in measured:
            message = measured[name].replace("|", "\\|")
            return f"{start} | {name}: {message} | | | |"
    counts = ", ".join(f"{count} {kind}" for kind, count in measured["transports"].items())
    verdict = "" if measured["within_tolerance"] else " (too far)"
    return (
        f"{start} {measured['ranks']} | {measured['difference']:.1e}{verdict} | "
        f"{measured['final_loss']:.4f} | {counts.replace('_', '-') or 'none'} | "
        f"{measured['variables_mib']} + {measured['arena_mib']} |"
    )


HEAD = """\
# Losses in every layout

`python -m benchmarks.layouts` writes this page. It trains `examples/gpt.py`, preset tiny (4 layers
of width 256), for {steps} steps in every layout, always on the same batches of 8 sequences of 128
bytes. Each rank is a thread.

- The settings are those of `pc.Config` (see [passes](passes.md)); a setting that is not named has
  its default.
- The difference is the largest relative difference of one of the {steps} losses from that of one
  rank in float32. It may be at most 1e-4, or 2e-2 with a 16-bit precision.
- Collectives and copies are counted on the rank that runs the most of them in a step; a copy
  fetches a value from another rank.
- MiB: the variables and the arena of the rank that needs the most memory.

| layout | settings | ranks | difference | last loss | collectives and copies per step | MiB |
|---|---|---|---|---|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="only rows whose text has all of them"
    )
    options = parser.parse_args()
    lines, good, reference = [], True, list[float]()
    for row in rows():
        if row is not ONE_RANK and not all(word in str(row) for word in options.only):
            continue
        measured = measure(row, options.steps)
        if row is ONE_RANK:
            reference = measured["losses"]
        compared = compare(row, measured, reference)
        print(json.dumps({"row": str(row), **compared}, ensure_ascii=False), flush=True)
        good = good and "failed" not in compared and compared.get("within_tolerance", True)
        lines.append(line(row, compared))
    if not options.only:
        TABLE.write_text(HEAD.format(steps=options.steps) + "\n".join(lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
