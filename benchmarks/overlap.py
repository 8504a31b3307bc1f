"""Gradient reductions beside backward: two data-parallel processes, recorded and measured.

    python benchmarks/overlap.py [--picture FILE]

Four ways to run each job take turns, a few steps at a time:

    overlap     the compiler's plan: gradients on a stream of their own, in buckets that it chose
    recorded    the same, with its timeline recorded
    serial      the same with its collectives on the compute stream
    one bucket  all gradients reduced in one collective, which only the end of backward can start,
                recorded too

Prints one JSON line per job: median step times in ms, median ratios of step times within a round
of turns, and from the recorded steps of both ranks: which share of the time of gradient reductions
was spent at work, that is after both ranks had entered; and which share of that work lies under
running compute tasks of the same rank, and under backward tasks alone. `exposed_ms` is the time of
a step in which a rank is in a reduction, waiting or working, and computes nothing;
`exposed_work_ms` counts from when both ranks have entered it. `load_average` is that of the last
minute: two ranks alone come to about 2. `--picture` draws one recorded step of the last job as SVG.
Every rank has one BLAS thread.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from operator import truediv
from pathlib import Path
from typing import Any

import numpy as np

import plancompiler as pc
from plancompiler.blas.threads import one_thread_environment
from plancompiler.cli.job_file import load_job
from plancompiler.executor.comm.host import HostLink
from plancompiler.executor.runtime import Runtime
from plancompiler.executor.timeline import TaskLabel, Timeline, Times, common, length, merged
from plancompiler.executor.trace import Recording
from plancompiler.ir import Phase
from plancompiler.ir.task import TaskKind
from plancompiler.lower.compile import compile_plans
from plancompiler.passes import run_passes
from plancompiler.plan.plan import Stream

RANKS = 2
WARM_UP = 3
ROUNDS = 20
STEPS = 2
"""Steps of one way in one round."""
WAYS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "recorded": {},
    "serial": {"streams": "compute"},
    "one bucket": {"streams": "one", "fuse_bytes": 1 << 30},
}
"""The settings of each way."""
RECORDED = ("recorded", "one bucket")
GPT = Path(__file__).resolve().parent.parent / "examples" / "gpt.py"


def mlp(folder: Path, **settings: Any) -> pc.Job:
    """Four layers of 2048, 16 MiB of gradient each, on 64 random rows."""
    rows = folder / "rows.npz"
    if not rows.exists():
        random = np.random.default_rng(0)
        images = random.normal(size=(64, 2048)).astype(np.float32)
        np.savez(rows, x=images, y=random.integers(0, 10, 64))
    config = pc.Config(**settings)
    mesh = pc.Placement("cpu", list(range(RANKS)), ("dp",))
    with pc.job("mlp", config=config) as job:
        layers: list[pc.nn.Module] = []
        for _ in range(4):
            layers += [pc.nn.Linear(2048, 2048), pc.nn.ReLU()]
        model = pc.nn.Sequential(*layers, pc.nn.Linear(2048, 10)).place(mesh)
        x, y = pc.data.Arrays(rows, ("x", "y"), batch=64, placement=mesh, sbp=["S(0)"])
        loss = pc.cross_entropy(model(x), y)
        pc.optim.SGD(lr=1e-3).minimize(loss)
        pc.output("loss", loss)
    return job


def gpt(folder: Path, **settings: Any) -> pc.Job:
    """examples/gpt.py, preset tiny: 12.6 MiB of gradients."""
    return load_job(str(GPT), {"preset": "tiny", "dp": RANKS, **settings})


JOBS: dict[str, Callable[..., pc.Job]] = {"mlp": mlp, "gpt": gpt}


def measure(
    name: str,
    rank: int,
    tokens: dict[str, str],
    folders: dict[str, Path],
    rounds: int,
    end: Connection,
) -> None:
    """A rank's process: seconds per step, by way and round."""
    runtimes = {}
    for way, settings in WAYS.items():
        job = JOBS[name](folders["recorded"], **settings)
        plan = compile_plans(job, RANKS, "rank_per_iter").plans[rank]
        runtimes[way] = Runtime(plan, HostLink(tokens[way], rank), record=folders.get(way))
    for runtime in runtimes.values():
        runtime.prepare()
        runtime.run(WARM_UP)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds):
        # The same random order on both ranks, so that no way always follows the same one.
        for way in np.random.default_rng(number).permutation(list(WAYS)).tolist():
            begin = time.perf_counter()
            runtimes[way].run(STEPS)
            seconds[way].append((time.perf_counter() - begin) / STEPS)
    for runtime in runtimes.values():
        runtime.close()
    end.send(seconds)
    end.close()


Timelines = tuple[Timeline, ...]
"""Of all ranks."""


def recorded_run(
    name: str, rounds: int
) -> tuple[dict[str, list[float]], dict[str, Timelines], dict[str, str]]:
    """Step times of rank 0 by way, timelines by recorded way, and each op's phase."""
    context = multiprocessing.get_context("spawn")
    tokens = {way: secrets.token_hex(16) for way in WAYS}
    with Recording() as first, Recording() as second:
        recordings = dict(zip(RECORDED, (first, second), strict=True))
        folders = {way: recording.folder for way, recording in recordings.items()}
        job, _ = run_passes(JOBS[name](first.folder))
        phases = {op.name: str(op.origin.phase) for op in job.ops}
        ranks, ends = [], []
        for rank in range(RANKS):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=measure, args=(name, rank, tokens, folders, rounds, there)
            )
            process.start()
            there.close()
            ranks.append(process)
            ends.append(here)
        seconds, *_ = [end.recv() for end in ends]
        for process in ranks:
            process.join()
        timelines = {
            way: tuple(map(without_warm_up, recording.timelines()))
            for way, recording in recordings.items()
        }
        return seconds, timelines, phases


def without_warm_up(timeline: Timeline) -> Timeline:
    """The steps that were measured. After the last one there may be a batch read ahead."""
    measured = slice(WARM_UP, int(timeline.ends.all(axis=1).sum()))
    return replace(timeline, begins=timeline.begins[measured], ends=timeline.ends[measured])


def is_reduction(task: TaskLabel) -> bool:
    """Whether a task reduces gradients (or, once per step, the loss)."""
    return task.kind == str(TaskKind.COLLECTIVE_BOXING) and task.op == "all_reduce"


def entered(timelines: Timelines) -> dict[str, Times]:
    """When the last rank entered each reduction, by its name: [steps]."""
    last_entries: dict[str, Times] = {}
    for timeline in timelines:
        for position, task in enumerate(timeline.tasks):
            if is_reduction(task):
                begins = timeline.begins[:, timeline.first_column[position]]
                last_entries[task.name] = np.maximum(last_entries.get(task.name, begins), begins)
    return last_entries


def at_work(timelines: Timelines) -> Timelines:
    """The same, where reductions begin when the last rank has entered."""
    last = entered(timelines)
    shifted = []
    for timeline in timelines:
        begins = timeline.begins.copy()
        for position, task in enumerate(timeline.tasks):
            if is_reduction(task):
                begins[:, timeline.first_column[position]] = last[task.name]
        shifted.append(replace(timeline, begins=begins))
    return tuple(shifted)


def reduction_time(timelines: Timelines) -> int:
    """Nanoseconds in reductions, over all ranks."""
    return sum(length(merged(timeline.spans(is_reduction))) for timeline in timelines)


def share_under(timelines: Timelines, phases: dict[str, str] | None) -> float:
    """Share of the time of reductions under compute tasks of the same rank; with the phases of ops,
    only those of backward.
    """

    def below(task: TaskLabel) -> bool:
        chosen = phases is None or phases.get(task.name) == str(Phase.BACKWARD)
        return chosen and task.stream == str(Stream.COMPUTE)

    covered = sum(
        common(merged(timeline.spans(is_reduction)), merged(timeline.spans(below)))
        for timeline in timelines
    )
    return covered / reduction_time(timelines)


def exposed_milliseconds(timelines: Timelines) -> float:
    """Of a step and a rank, the time in reductions under which it computes nothing."""

    def computes(task: TaskLabel) -> bool:
        return task.stream == str(Stream.COMPUTE) and not is_reduction(task)

    exposed = 0
    for timeline in timelines:
        reducing = merged(timeline.spans(is_reduction))
        exposed += length(reducing) - common(reducing, merged(timeline.spans(computes)))
    return exposed / sum(len(timeline.begins) for timeline in timelines) / 1e6


# --- the picture ----------------------------------------------------------------------------------

COLOURS = {
    "forward": "#9ecae1",
    "backward": "#3182bd",
    "update": "#74c476",
    "reduction at work": "#e6550d",
    "reduction, waiting for the other rank": "#fdd0a2",
    "other": "#bdbdbd",
}
WORKING, WAITING = "reduction at work", "reduction, waiting for the other rank"
LEFT, TOP, WIDTH, ROW, GAP = 130, 30, 900, 26, 8


def picture(timelines: Timelines, phases: dict[str, str], step: int) -> str:
    """One step as SVG: a row for each rank's compute and gradient stream."""
    columns = [
        (timeline, column, timeline.tasks[position])
        for timeline in timelines
        for column, (position, _) in enumerate(timeline.columns)
        if timeline.tasks[position].stream in ("compute", "gradient")
    ]
    origin = min(timeline.begins[step, column] for timeline, column, _ in columns)
    last = max(timeline.ends[step, column] for timeline, column, _ in columns)
    scale = WIDTH / (last - origin)
    rows: dict[tuple[int, str], list[tuple[float, float, str]]] = {}
    last_entered = entered(timelines)
    for timeline, column, task in columns:
        begin = (timeline.begins[step, column] - origin) * scale
        end = (timeline.ends[step, column] - origin) * scale
        row = rows.setdefault((timeline.rank, task.stream), [])
        if is_reduction(task):
            middle = (last_entered[task.name][step] - origin) * scale
            row.append((begin, middle, WAITING))
            row.append((middle, end, WORKING))
            continue
        colour = phases.get(task.name, "other")
        # Tasks are often thinner than a line, and neighbours of one colour are one box.
        if row and row[-1][2] == colour and begin - row[-1][1] < 0.3:
            row[-1] = (row[-1][0], end, colour)
        else:
            row.append((begin, end, colour))
    height = TOP + len(rows) * (ROW + GAP) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}">',
        "<style>text { font: 12px sans-serif }</style>",
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, ((rank, stream), boxes) in enumerate(sorted(rows.items(), key=_row_order)):
        y = TOP + number * (ROW + GAP)
        parts.append(f'<text x="8" y="{y + 17}">rank {rank} {stream}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{ROW}" fill="#f4f4f4"/>')
        parts += [
            f'<rect x="{LEFT + begin:.2f}" y="{y}" width="{max(end - begin, 0.3):.2f}" '
            f'height="{ROW}" fill="{COLOURS[colour]}"/>'
            for begin, end, colour in boxes
            if colour != WAITING or end - begin > 0.1
        ]
    bottom = TOP + len(rows) * (ROW + GAP)
    milliseconds = (last - origin) / 1e6
    tick = next(each for each in (1, 2, 5, 10, 20, 50, 100, 200, 500) if milliseconds / each <= 12)
    for mark in range(0, int(milliseconds) + 1, tick):
        x = LEFT + mark * 1e6 * scale
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#ccc"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{mark} ms</text>')
    shown = {colour for boxes in rows.values() for _, _, colour in boxes}
    x = float(LEFT)
    for label, colour in COLOURS.items():
        if label in shown:
            box = f'<rect x="{x}" y="{bottom + 30}" width="14" height="14" fill="{colour}"/>'
            parts += [box, f'<text x="{x + 20}" y="{bottom + 42}">{label}</text>']
            x += 50 + 7 * len(label)
    return "\n".join([*parts, "</svg>", ""])


def _row_order(row: tuple[tuple[int, str], object]) -> tuple[int, bool]:
    (rank, stream), _ = row
    return rank, stream != "compute"


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description="Gradient reductions beside backward.")
    parser.add_argument("--picture", type=Path, help="SVG file of one step of the last job")
    parser.add_argument("--job", action="append", choices=JOBS, help="only this job; repeatable")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of turns")
    options = parser.parse_args()
    os.environ.update(one_thread_environment())
    for name in options.job or JOBS:
        seconds, recorded, phases = recorded_run(name, options.rounds)
        timelines = recorded["recorded"]
        median = {way: statistics.median(times) * 1e3 for way, times in seconds.items()}
        result: dict[str, object] = {"benchmark": "overlap", "job": f"{name}, dp {RANKS}"}
        result["reductions"] = sum(map(is_reduction, timelines[0].tasks))
        result |= {f"{way.replace(' ', '_')}_ms": round(median[way], 2) for way in WAYS}
        working = at_work(timelines)
        result["at_work"] = round(reduction_time(working) / reduction_time(timelines), 3)
        result["work_under_compute"] = round(share_under(working, None), 3)
        result["work_under_backward"] = round(share_under(working, phases), 3)
        result["exposed_ms"] = {
            way: round(exposed_milliseconds(each), 2) for way, each in recorded.items()
        }
        result["exposed_work_ms"] = {
            way: round(exposed_milliseconds(at_work(each)), 2) for way, each in recorded.items()
        }
        for way in list(WAYS)[1:]:
            # By round, because what else the machine does changes from round to round.
            ratios = map(truediv, seconds[way], seconds["overlap"])
            result[f"{way.replace(' ', '_')}_over_overlap"] = round(statistics.median(ratios), 3)
        result["load_average"] = round(os.getloadavg()[0], 1)
        print(json.dumps(result), flush=True)
        if options.picture is not None and name == list(options.job or JOBS)[-1]:
            lengths = timelines[0].ends.max(axis=1) - timelines[0].begins.min(axis=1)
            middle = int(np.argsort(lengths)[len(lengths) // 2])
            options.picture.write_text(picture(timelines, phases, middle))


if __name__ == "__main__":
    main()
