"""Compile times as ranks grow, beside JAX's.

    python -m benchmarks.compile [--runs 3] [--jax-python PATH] [--only SECTION ...]
        [--write] [--lines FILE]

Prints one JSON line per row, in sections:

    peer      gpt tiny with 8 heads on 8, 64, 512 ranks, tensor-parallel by 8 and fully sharded:
              our compiler beside JAX's lower + compile of the same training step, run in turns
    growth    GPT-3 175B, tp 8, pp 16, from 128 to 16,384 ranks and on to 100,096: plain, with ZeRO,
              with micro-batches, and with nothing that divides
    modes     gpt tiny, all ranks compiled, 8 to 256 ranks: the mode `naive` beside
              `rank_per_process`, which must give the same digest
    tasks     one worker alone, processor time per task, from 2,000 to 200,000 tasks

What is counted. Ours: the master from the traced job to the slices' bytes (passes, SBP inference,
boxing, serialising) and the slowest of the compiled ranks' workers, from its slice's bytes to its
verified plan's; both without starting Python. JAX: `lower` and `compile` of the traced step,
without tracing. Each run is a process of its own, so that nothing is cached. Times are medians over
the runs.

JAX is needed by this benchmark alone: `pip install -r benchmarks/peers/requirements.txt` in an
environment of its own, whose interpreter `--jax-python` or PLANCOMPILER_JAX_PYTHON names. Without
it the rows of `peer` have our part alone, which a note on standard error says.

`--write` puts the figures of all sections that ran into docs/compile.md, and draws docs/compile.svg
from the first three. Sections that did not run are taken from `--lines FILE`, a file of lines that
were printed before.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.compile_tasks import STAGES, task_rows
from benchmarks.line_chart import Line, line_chart
from plancompiler.cli.job_file import load_job

ROOT = Path(__file__).resolve().parent.parent
GPT = ROOT / "examples" / "gpt.py"
JAX_GPT = ROOT / "benchmarks" / "peers" / "jax_gpt.py"
PAGE, PICTURE = ROOT / "docs" / "compile.md", ROOT / "docs" / "compile.svg"
JAX_VARIABLE = "PLANCOMPILER_JAX_PYTHON"

Report = dict[str, Any]


def compiled(settings: dict[str, Any], *options: str, ranks: tuple[int, ...] = ()) -> Report:
    """What `compile --json --profile` of examples/gpt.py says, for some ranks or all."""
    command = [sys.executable, "-m", "plancompiler", "compile", str(GPT), "--json", "--profile"]
    for name, value in settings.items():
        command += ["-D", f"{name}={value}"]
    for rank in ranks:
        command += ["--rank", str(rank)]
    return child([*command, *options])


def child(command: list[str], **environment: str) -> Report:
    """The JSON line that a command prints last; its own messages where it fails."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
        cwd=ROOT,
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    report: Report = json.loads(done.stdout.splitlines()[-1])
    return report


def master_seconds(report: Report) -> float:
    """The master's part, from the traced job."""
    spent = report["master_seconds"]
    return float(spent["total"] - spent["trace"])


def median(values: list[float]) -> float:
    return round(statistics.median(values), 4)


def load_average() -> float:
    """That of the last minute, to judge times by."""
    return round(os.getloadavg()[0], 1)


# --- beside JAX -----------------------------------------------------------------------------------

PEER_RANKS = (8, 64, 512)
ALONE_RANKS = (4096, 16384)
LAYOUTS = {"dp_tp": "dp × tp 8", "fsdp": "fully sharded"}


def peer_settings(layout: str, ranks: int) -> dict[str, Any]:
    """gpt tiny; 8 heads, so that tp 8 divides them; a batch that divides over 512 ranks."""
    model = {"preset": "tiny", "heads": 8, "batch": max(512, ranks)}
    if layout == "dp_tp":
        return {**model, "tp": 8, "dp": ranks // 8}
    return {**model, "zero": 3, "dp": ranks}


@lru_cache
def parameters_of(layout: str, ranks: int) -> int:
    """Elements of the model's parameters: both sides must have the same."""
    job = load_job(str(GPT), peer_settings(layout, ranks))
    return sum(
        int(np.prod(op.outputs[0].shape))
        for op in job.ops
        if op.kind == "variable" and op.attr("trainable")
    )


def peer_rows(runs: int, jax_python: str | None) -> Iterator[Report]:
    """Rows of both layouts; beyond 512 ranks ours alone."""
    for layout in LAYOUTS:
        for ranks in (*PEER_RANKS, *ALONE_RANKS):
            with_jax = jax_python is not None and ranks in PEER_RANKS
            ours, theirs = [], []
            for _ in range(runs):
                settings = peer_settings(layout, ranks)
                ours.append(compiled(settings, "--mode", "rank_per_process", ranks=(0,)))
                if jax_python is not None and with_jax:
                    theirs.append(jax_once(jax_python, layout, ranks))
            row: Report = {
                "benchmark": "compile",
                "section": "peer",
                "layout": layout,
                "ranks": ranks,
                "master_seconds": median([master_seconds(each) for each in ours]),
                "worker_seconds": median([each["rank_seconds"]["max"] for each in ours]),
                "seconds": median(
                    [master_seconds(each) + each["rank_seconds"]["max"] for each in ours]
                ),
            }
            if theirs:
                if theirs[0]["parameters"] != parameters_of(layout, ranks):
                    sys.exit(f"JAX's model has {theirs[0]['parameters']} parameters, not ours")
                lower, compiling = (
                    median([each[name] for each in theirs])
                    for name in ("lower_seconds", "compile_seconds")
                )
                both = median([each["lower_seconds"] + each["compile_seconds"] for each in theirs])
                row |= {
                    "jax": theirs[0]["version"],
                    "jax_lower_seconds": lower,
                    "jax_compile_seconds": compiling,
                    "jax_seconds": both,
                    "jax_collectives": theirs[0]["collectives"],
                    "ratio": round(row["seconds"] / both, 3),
                }
            yield {**row, "load_average": load_average()}


def jax_once(python: str, layout: str, ranks: int) -> Report:
    """One compilation by JAX, in a process with that many devices."""
    options = ("--layout", layout, "--devices", str(ranks), "--batch", "512")
    return child(
        [python, str(JAX_GPT), *options],
        XLA_FLAGS=f"--xla_force_host_platform_device_count={ranks}",
        JAX_PLATFORMS="cpu",
    )


# --- growth ---------------------------------------------------------------------------------------

GPT3 = {"preset": "gpt3-175b", "tp": 8, "pp": 16}
BASE = 1024
PLAIN = "plain"
UNEVEN = {"layers": 100, "vocabulary": 50257, "split_vocabulary": "true"}
FEW = (1024, 4096, 16384)
VARIANTS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    PLAIN: ({}, (128, 1024, 4096, 16384, 100096)),
    "ZeRO 1": ({"zero": 1}, FEW),
    "8 micro-batches": ({"microbatches": 8, "schedule": "1f1b"}, FEW),
    "64 micro-batches": ({"microbatches": 64, "schedule": "1f1b"}, FEW),
    "ZeRO 1, 64 micro-batches": ({"zero": 1, "microbatches": 64, "schedule": "1f1b"}, FEW),
    # 100 layers on 16 stages, 50257 rows of the vocabulary on 8 ranks, 1537 sequences.
    "uneven": ({**UNEVEN, "batch": 1537}, FEW),
    # 1544 sequences in pieces of 193, which no power of two divides.
    "uneven, 8 micro-batches": (
        {**UNEVEN, "batch": 1544, "microbatches": 8, "schedule": "1f1b"},
        FEW,
    ),
}


def growth_rows(runs: int) -> Iterator[Report]:
    """Rows of every variant; ratios are to its own figures at 1,024 ranks."""
    for variant, (settings, numbers) in VARIANTS.items():
        reports: dict[int, list[Report]] = {ranks: [] for ranks in numbers}
        # In turns, because what else the machine does changes from minute to minute.
        for _ in range(runs):
            for ranks in numbers:
                # First, middle and last rank.
                some = (0, ranks // 2 - 1, ranks - 1)
                given = {**GPT3, **settings, "dp": ranks // 128}
                reports[ranks].append(compiled(given, "--mode", "rank_per_process", ranks=some))
        rows = {ranks: growth_row(variant, ranks, reports[ranks]) for ranks in numbers}
        base = rows[BASE]
        for row in rows.values():
            for part in ("master", "worker"):
                ratio = row[f"{part}_seconds"] / base[f"{part}_seconds"]
                row[f"{part}_ratio"] = round(ratio, 3)
            yield row


def growth_row(variant: str, ranks: int, reports: list[Report]) -> Report:
    """Medians for one number of ranks."""
    return {
        "benchmark": "compile",
        "section": "growth",
        "variant": variant,
        "ranks": ranks,
        "trace_seconds": median([each["master_seconds"]["trace"] for each in reports]),
        "master_seconds": median([each["master_seconds"]["total"] for each in reports]),
        "worker_seconds": median([each["rank_seconds"]["max"] for each in reports]),
        "tasks": reports[0]["tasks_per_rank"]["max"],
        "slice_bytes": reports[0]["slice_bytes"]["max"],
        "boxing_graph_bytes": reports[0]["boxing_graph_bytes"],
        "master_rss_mib": round(max(each["peak_rss_mib"] for each in reports)),
        "load_average": load_average(),
    }


# --- modes ----------------------------------------------------------------------------------------

MODE_RANKS = (8, 16, 32, 64, 128, 256)


def mode_rows(runs: int) -> Iterator[Report]:
    """The reference beside the mode of clusters; plans of all ranks in both."""
    for ranks in MODE_RANKS:
        settings = {"preset": "tiny", "tp": 2, "pp": 2, "dp": ranks // 4}
        row: Report = {"benchmark": "compile", "section": "modes", "ranks": ranks}
        digests = set()
        for mode in ("naive", "rank_per_process"):
            reports = [compiled(settings, "--mode", mode) for _ in range(runs)]
            digests |= {each["digest"] for each in reports}
            row[f"{mode}_seconds"] = median([on_master(mode, each) for each in reports])
            row[f"{mode}_ranks_seconds"] = median([ranks_seconds(each) for each in reports])
            row[f"{mode}_worker_seconds"] = median(
                [each["rank_seconds"]["max"] for each in reports]
            )
            row[f"{mode}_rss_mib"] = round(max(each["peak_rss_mib"] for each in reports))
        if len(digests) != 1:
            sys.exit(f"the modes gave different plans at {ranks} ranks")
        yield {**row, "digest": digests.pop(), "load_average": load_average()}


def ranks_seconds(report: Report) -> float:
    """What is done for ranks one by one, added up over all of them."""
    together = "verify together"
    seconds: list[float] = [
        each["seconds"]
        for each in report["profile"]
        if each["part"] == "ranks" and each["stage"] != together
    ]
    return sum(seconds)


def on_master(mode: str, report: Report) -> float:
    """Until all plans are there: the master's work, with `naive` that for the ranks too, otherwise
    the slowest worker's, as if each had a machine of its own.
    """
    ranks = ranks_seconds(report) if mode == "naive" else report["rank_seconds"]["max"]
    return master_seconds(report) + float(ranks)


# --- the page -------------------------------------------------------------------------------------


def table(heads: list[str], lines: list[list[object]]) -> str:
    """A table in Markdown."""
    rows = [heads, ["---"] * len(heads), *([str(cell) for cell in line] for line in lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def peer_table(rows: list[Report]) -> str:
    """Rows of `peer`."""
    return table(
        ["layout", "ranks", "master, s", "worker, s", "together, s", "JAX, s", "ratio"],
        [
            [
                LAYOUTS[row["layout"]],
                f"{row['ranks']:,}",
                f"{row['master_seconds']:.3f}",
                f"{row['worker_seconds']:.3f}",
                f"{row['seconds']:.3f}",
                f"{row['jax_seconds']:.2f}" if "jax_seconds" in row else "not run",
                f"{row['ratio']:.3f}" if "ratio" in row else "",
            ]
            for row in rows
        ],
    )


def growth_table(rows: list[Report]) -> str:
    """Rows of `growth`."""
    return table(
        [
            *("", "ranks", "master, s", "ratio", "worker, s", "ratio"),
            *("tasks a rank", "slice, KiB", "graph, KiB", "master RSS, MiB"),
        ],
        [
            [
                row["variant"],
                f"{row['ranks']:,}",
                f"{row['master_seconds']:.2f}",
                f"{row['master_ratio']:.2f}",
                f"{row['worker_seconds']:.3f}",
                f"{row['worker_ratio']:.2f}",
                row["tasks"],
                f"{row['slice_bytes'] / 1024:.0f}",
                f"{row['boxing_graph_bytes'] / 1024:.0f}",
                row["master_rss_mib"],
            ]
            for row in rows
        ],
    )


def mode_table(rows: list[Report]) -> str:
    """Rows of `modes`."""
    return table(
        [
            *("ranks", "naive: until all plans, s", "RSS, MiB"),
            *("rank_per_process: master + slowest worker, s", "RSS, MiB", "digest"),
        ],
        [
            [
                row["ranks"],
                f"{row['naive_seconds']:.2f}",
                row["naive_rss_mib"],
                f"{row['rank_per_process_seconds']:.2f}",
                row["rank_per_process_rss_mib"],
                f"equal, `{row['digest'][:8]}`",
            ]
            for row in rows
        ],
    )


def task_table(rows: list[Report]) -> str:
    """Rows of `tasks`."""
    return table(
        ["layers", "tasks", "seconds", "µs a task", "ratio", *STAGES],
        [
            [
                f"{row['layers']:,}",
                f"{row['tasks']:,}",
                f"{row['seconds']:.2f}",
                f"{row['us_per_task']:.1f}",
                f"{row['ratio']:.2f}",
                *(f"{row[f'{stage}_us']:.1f}" for stage in STAGES),
            ]
            for row in rows
        ],
    )


def picture(sections: dict[str, list[Report]]) -> str:
    """Seconds over ranks of all sections."""

    def points(section: str, name: str, **only: Any) -> list[tuple[float, float]]:
        return [
            (row["ranks"], row[name])
            for row in sections[section]
            if name in row and all(row[key] == value for key, value in only.items())
        ]

    lines = [
        Line(
            "gpt tiny, all ranks: naive, one process", "#a50f15", points("modes", "naive_seconds")
        ),
        Line("gpt tiny, dp × tp: JAX", "#e6550d", points("peer", "jax_seconds", layout="dp_tp")),
        Line(
            "gpt tiny, fully sharded: JAX", "#fd8d3c", points("peer", "jax_seconds", layout="fsdp")
        ),
        Line(
            "gpt tiny, dp × tp: master + worker",
            "#08519c",
            points("peer", "seconds", layout="dp_tp"),
        ),
        Line(
            "gpt tiny, fully sharded: master + worker",
            "#6baed6",
            points("peer", "seconds", layout="fsdp"),
        ),
        Line("GPT-3 175B: master", "#006d2c", points("growth", "master_seconds", variant=PLAIN)),
        Line(
            "GPT-3 175B: one worker", "#74c476", points("growth", "worker_seconds", variant=PLAIN)
        ),
        Line(
            "GPT-3 175B, 64 micro-batches: master",
            "#006d2c",
            points("growth", "master_seconds", variant="64 micro-batches"),
            dashed=True,
        ),
        Line(
            "GPT-3 175B, uneven: master",
            "#54278f",
            points("growth", "master_seconds", variant="uneven"),
            dashed=True,
        ),
    ]
    return line_chart([line for line in lines if line.points], "ranks", "seconds")


PICTURED = ("peer", "growth", "modes")
"""Sections that the picture shows."""

TABLES: dict[str, Callable[[list[Report]], str]] = {
    "peer": peer_table,
    "growth": growth_table,
    "modes": mode_table,
    "tasks": task_table,
}


def write(sections: dict[str, list[Report]]) -> None:
    """Put tables between their marks on the page, and draw the picture if all it shows is there."""
    text = PAGE.read_text()
    for section, rows in sections.items():
        loads = [row["load_average"] for row in rows]
        note = f"Load average of the machine, 2 cores, meanwhile: {min(loads)} to {max(loads)}."
        inside = f"<!-- {section} -->\n{TABLES[section](rows)}\n\n{note}\n<!-- end -->"
        pattern = rf"<!-- {section} -->.*?<!-- end -->"
        marked = re.search(pattern, text, flags=re.S)
        if marked is None:
            sys.exit(f"{PAGE} has no place for the section {section}")
        text = text[: marked.start()] + inside + text[marked.end() :]
    PAGE.write_text(text)
    if set(PICTURED) <= set(sections):
        PICTURE.write_text(picture(sections))


def earlier(file: Path, but: Sequence[str]) -> dict[str, list[Report]]:
    """Rows of the sections in a file, without some; of equal rows the last."""
    rows: dict[str, dict[tuple[Any, ...], Report]] = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        if row.get("benchmark") == "compile" and row["section"] not in but:
            key = (row.get("layout"), row.get("variant"), row["ranks"])
            rows.setdefault(row["section"], {})[key] = row
    return {section: list(latest.values()) for section, latest in rows.items()}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--jax-python", default=os.environ.get(JAX_VARIABLE))
    parser.add_argument("--only", nargs="*", choices=TABLES, default=list(TABLES))
    parser.add_argument("--write", action="store_true", help="write docs/compile.md and .svg")
    parser.add_argument("--lines", type=Path, help="earlier lines, for the sections not run")
    options = parser.parse_args()
    if "peer" in options.only and options.jax_python is None:
        print(
            "no JAX: rows of `peer` have our part alone. Name an interpreter that has it with "
            f"--jax-python or {JAX_VARIABLE}.",
            file=sys.stderr,
        )
    measure: dict[str, Callable[[], Iterator[Report]]] = {
        "peer": lambda: peer_rows(options.runs, options.jax_python),
        "growth": lambda: growth_rows(options.runs),
        "modes": lambda: mode_rows(options.runs),
        "tasks": lambda: (
            {**row, "load_average": load_average()} for row in task_rows(options.runs)
        ),
    }
    sections = {} if options.lines is None else earlier(options.lines, options.only)
    for section in options.only:
        for row in measure[section]():
            print(json.dumps(row, ensure_ascii=False), flush=True)
            sections.setdefault(section, []).append(row)
    if options.write:
        write(sections)


if __name__ == "__main__":
    main()
