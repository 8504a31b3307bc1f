"""Steps of searched layouts beside those of the layouts that people write, on two ranks here.

    python -m benchmarks.search_measured [--machine here.toml] [--only NAME …] [--force]
                                         [--backend threads|processes] [--starts 3] [--rounds 3]

Without a machine file it calibrates first. The layouts of a job are all started; then they take
turns, some steps at a time, so that what disturbs the machine disturbs all of them. All that is
done several times, as the same job may be faster or slower by a tenth each time that it is started.
Layouts that compile to the same plans are run once. Prints a JSON line per job: of each layout the
median over turns of the median step, and the ratio of the chosen layout's step to that of the
fastest written by hand, the median over turns. Which one is the fastest is told by the other
starts: the least of several medians would be too low by chance. The last line has the median and
the worst of these ratios. Goal: 1.03 and 1.10. Losses of a job must be the same in all layouts.
`cpu_ms` is what ranks that are threads spend on the CPU per step, all together and without waiting:
a machine that is busy changes it little.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import plancompiler as pc
from plancompiler.costs import chosen_machine
from plancompiler.forecasting.calibrate import calibrate
from plancompiler.lower.compile import compile_plans
from plancompiler.passes import run_passes
from plancompiler.plan.digest import digest_of_plans
from plancompiler.search.layout_search import search_layouts

RANKS = 2
AXIS = "x"
"""Of the mesh."""
TURN_SECONDS = 0.15
"""Of steps of one layout before the next has its turn."""
WARM_STEPS = 3
LOSSES = 1e-3
"""Relative difference of losses that are the same: sums are added up in other orders."""

Layouts = Mapping[str, Mapping[str, str]]
"""Per way of writing, the layouts of parameters, and of `inputs`."""
Write = Callable[[pc.Placement, Mapping[str, str] | None], Any]
"""Write the model on a mesh, in these layouts (None: leave them open), and return its loss."""


def perceptron(width: int, batch: int, inputs: int = 64, classes: int = 16) -> Write:
    """Two hidden layers."""

    def write(mesh: pc.Placement, layouts: Mapping[str, str] | None) -> Any:
        x, y = fed(mesh, layouts, {"x": (batch, inputs), "y": (batch,)})
        net = pc.nn.Sequential(
            pc.nn.Linear(inputs, width),
            pc.nn.ReLU(),
            pc.nn.Linear(width, width),
            pc.nn.ReLU(),
            pc.nn.Linear(width, classes),
        )
        return pc.cross_entropy(placed(net, mesh, layouts)(x), y, ignore_index=None)

    return write


def transformer(
    dim: int, layers: int, batch: int, length: int, vocabulary: int, heads: int = 4
) -> Write:
    """A causal language model."""

    def write(mesh: pc.Placement, layouts: Mapping[str, str] | None) -> Any:
        x, y = fed(mesh, layouts, {"tokens": (batch, length), "targets": (batch, length)})
        net = pc.nn.Sequential(
            pc.nn.Embedding(vocabulary, dim, std=0.02),
            *(pc.nn.TransformerBlock(dim, heads, std=0.02) for _ in range(layers)),
            pc.nn.LayerNorm(dim),
            pc.nn.Linear(dim, vocabulary, bias=False, std=0.02),
        )
        return pc.cross_entropy(placed(net, mesh, layouts)(x), y, ignore_index=None)

    return write


def vision_transformer(dim: int, layers: int, batch: int, side: int, patch: int) -> Write:
    """Patches of pictures through transformer blocks."""

    def write(mesh: pc.Placement, layouts: Mapping[str, str] | None) -> Any:
        x, y = fed(mesh, layouts, {"x": (batch, 3, side, side), "y": (batch,)})
        cells = (side // patch) ** 2
        net = pc.nn.ModuleDict(
            {
                "patches": pc.nn.Conv2d(3, dim, patch, stride=patch),
                "blocks": pc.nn.Sequential(
                    *(pc.nn.TransformerBlock(dim, 4, std=0.02) for _ in range(layers))
                ),
                "head": pc.nn.Linear(dim, 16),
            }
        )
        placed(net, mesh, layouts)
        seen = net["patches"](x).reshape(batch, dim, cells).transpose(1, 2)
        return pc.cross_entropy(net["head"](pc.mean(net["blocks"](seen), 1)), y, ignore_index=None)

    return write


def convolutions(channels: int, blocks: int, batch: int, side: int) -> Write:
    """Residual blocks of two convolutions."""

    def write(mesh: pc.Placement, layouts: Mapping[str, str] | None) -> Any:
        x, y = fed(mesh, layouts, {"x": (batch, 3, side, side), "y": (batch,)})
        net = pc.nn.ModuleDict(
            {
                "stem": pc.nn.Conv2d(3, channels, 3, padding=1),
                "blocks": pc.nn.ModuleList(
                    pc.nn.Sequential(
                        pc.nn.Conv2d(channels, channels, 3, padding=1),
                        pc.nn.ReLU(),
                        pc.nn.Conv2d(channels, channels, 3, padding=1),
                    )
                    for _ in range(blocks)
                ),
                "head": pc.nn.Linear(channels, 16),
            }
        )
        placed(net, mesh, layouts)
        seen = pc.relu(net["stem"](x))
        for block in net["blocks"]:
            seen = pc.relu(seen + block(seen))
        return pc.cross_entropy(net["head"](pc.mean(seen, (2, 3))), y, ignore_index=None)

    return write


def recommender(rows: int, dim: int, batch: int) -> Write:
    """A large table of users, read by a small network."""

    def write(mesh: pc.Placement, layouts: Mapping[str, str] | None) -> Any:
        x, y = fed(mesh, layouts, {"users": (batch,), "y": (batch,)})
        net = pc.nn.Sequential(
            pc.nn.Embedding(rows, dim, std=0.1),
            pc.nn.Linear(dim, 4 * dim),
            pc.nn.ReLU(),
            pc.nn.Linear(4 * dim, 16),
        )
        return pc.cross_entropy(placed(net, mesh, layouts)(x), y, ignore_index=None)

    return write


def experts(dim: int, hidden: int, count: int, batch: int) -> Write:
    """All experts compute all rows, weighed by a router (a dense mixture)."""

    def write(mesh: pc.Placement, layouts: Mapping[str, str] | None) -> Any:
        x, y = fed(mesh, layouts, {"x": (batch, dim), "y": (batch,)})
        net = _Experts(dim, hidden, count)
        return pc.cross_entropy(placed(net, mesh, layouts)(x), y, ignore_index=None)

    return write


class _Experts(pc.nn.Module):
    def __init__(self, dim: int, hidden: int, count: int) -> None:
        self.router = pc.nn.Linear(dim, count)
        self.first = pc.nn.Parameter((count, dim, hidden), init="normal", init_args=(0, 0.05))
        self.second = pc.nn.Parameter((count, hidden, 16), init="normal", init_args=(0, 0.05))

    def forward(self, x: pc.Value) -> Any:
        weight = pc.softmax(self.router(x), -1)
        made = pc.relu(pc.einsum("bd,edh->ebh", x, self.first.value))
        scores = pc.einsum("ebh,ehc->ebc", made, self.second.value)
        return pc.einsum("ebc,be->bc", scores, weight)


def fed(
    mesh: pc.Placement, layouts: Mapping[str, str] | None, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[pc.Value, ...]:
    """Inputs: `x` holds floats, all others whole numbers below 16."""
    sbp = None if layouts is None else layouts.get("inputs", "B")
    return tuple(
        pc.input(name, shape, "float32" if name == "x" else "int64", mesh, sbp)
        for name, shape in shapes.items()
    )


def placed(
    net: pc.nn.Module, mesh: pc.Placement, layouts: Mapping[str, str] | None
) -> pc.nn.Module:
    """The module on the mesh; parameters whose names end as one of the layouts', in that."""
    of_names = (
        {}
        if layouts is None
        else {
            name: sbp
            for name, _ in net.named_parameters()
            for ending, sbp in layouts.items()
            if name.endswith(ending)
        }
    )
    return net.place(mesh, of_names)


DATA_PARALLEL = {"dp": {"inputs": "S(0)"}}
MEGATRON = {
    **dict.fromkeys(
        (f"{name}.{kind}" for name in ("query", "key", "value") for kind in ("weight", "bias")),
        "S(0)",
    ),
    "projection.weight": "S(1)",
    "fc1.weight": "S(0)",
    "fc1.bias": "S(0)",
    "fc2.weight": "S(1)",
}
OF_PERCEPTRONS: Layouts = {
    **DATA_PARALLEL,
    "tp": {"0.weight": "S(0)", "0.bias": "S(0)", "2.weight": "S(1)"},
    "tp of the last": {"2.weight": "S(0)", "2.bias": "S(0)", "4.weight": "S(1)"},
}
OF_TRANSFORMERS: Layouts = {**DATA_PARALLEL, "tp": MEGATRON}
OF_CONVOLUTIONS: Layouts = {
    **DATA_PARALLEL,
    "tp": {f"{n}.0.weight": "S(0)" for n in range(4)}
    | {f"{n}.0.bias": "S(0)" for n in range(4)}
    | {f"{n}.2.weight": "S(1)" for n in range(4)},
}
OF_RECOMMENDERS: Layouts = {
    **DATA_PARALLEL,
    "rows": {"0.weight": "S(0)", "inputs": "B"},
    "rows and dp": {"0.weight": "S(0)", "inputs": "S(0)"},
    "columns": {"0.weight": "S(1)", "1.weight": "S(1)"},
}
OF_EXPERTS: Layouts = {
    **DATA_PARALLEL,
    "experts": {"first": "S(0)", "second": "S(0)"},
    "tp": {"first": "S(2)", "second": "S(1)"},
}


def of_words(blocks: int) -> Layouts:
    """Transformers whose output layer, after so many blocks, has a large vocabulary."""
    words = {"0.weight": "S(0)", f"{blocks + 2}.weight": "S(0)"}
    return {**OF_TRANSFORMERS, "tp of words": {**MEGATRON, **words}}


JOBS: dict[str, tuple[Write, Layouts]] = {
    "mlp 256 x 64": (perceptron(256, 64), OF_PERCEPTRONS),
    "mlp 1024 x 32": (perceptron(1024, 32), OF_PERCEPTRONS),
    "mlp 1024 x 1024": (perceptron(1024, 1024), OF_PERCEPTRONS),
    "mlp 2048 x 256": (perceptron(2048, 256), OF_PERCEPTRONS),
    "mlp 512 x 4096": (perceptron(512, 4096), OF_PERCEPTRONS),
    "mlp wide inputs": (perceptron(128, 32, inputs=16384), OF_PERCEPTRONS),
    "gpt 256": (transformer(256, 2, 8, 128, 256), OF_TRANSFORMERS),
    "gpt 128": (transformer(128, 4, 16, 64, 256), OF_TRANSFORMERS),
    "gpt 512 x 2": (transformer(512, 2, 2, 64, 256), OF_TRANSFORMERS),
    "gpt words": (transformer(128, 2, 4, 64, 8192), of_words(2)),
    "vit": (vision_transformer(128, 2, 16, 32, 4), OF_TRANSFORMERS),
    "resnet": (convolutions(16, 2, 16, 16), OF_CONVOLUTIONS),
    "recommender": (recommender(60000, 32, 512), OF_RECOMMENDERS),
    "experts": (experts(128, 256, 8, 128), OF_EXPERTS),
}
HOWS: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "zero 1": {"zero": 1, "dp_axes": (AXIS,)},
    "zero 3": {"zero": 3, "dp_axes": (AXIS,)},
    "sequence": {"sequence_parallel": True, "tp_axes": (AXIS,)},
}
"""Settings that are tried with layouts: ZeRO with dp, sequences with tp of transformers."""


def traced(write: Write, layouts: Mapping[str, str] | None, config: pc.Config) -> pc.Job:
    """The training job."""
    mesh = pc.Placement("cpu", list(range(RANKS)), (AXIS,))
    with pc.job("measured", seed=1, config=config) as job:
        loss = write(mesh, layouts)
        pc.optim.AdamW(1e-3).minimize(loss)
        pc.output("loss", loss)
    return job


def ways_of(name: str, machine: str) -> dict[str, pc.Job]:
    """The job in all layouts tried; the searched one is `auto`."""
    write, layouts = JOBS[name]
    ways = {"auto": traced(write, None, pc.Config(layout="auto", machine=machine))}
    for kind, of_names in layouts.items():
        for how, settings in HOWS.items():
            if (how.startswith("zero") and kind != "dp") or (
                how == "sequence" and not (kind == "tp" and layouts is OF_TRANSFORMERS)
            ):
                continue
            config = pc.Config(machine=machine, **settings)
            ways[f"{kind} {how}".strip()] = traced(write, of_names, config)
    return ways


@dataclass
class Measured:
    """What was measured of a job in one layout."""

    losses: list[float]
    """Of the first steps."""
    seconds: list[list[float]] = field(default_factory=list)
    """Medians of a step, by start and turn."""
    cpu: list[float] = field(default_factory=list)
    """Seconds per step on the CPU, by turn."""

    def all_turns(self) -> list[float]:
        return [each for of_start in self.seconds for each in of_start]

    def median(self, without: int | None = None) -> float:
        """Seconds of a step, over all turns, or without those of one start."""
        starts = [each for start, each in enumerate(self.seconds) if start != without]
        return statistics.median(each for of_start in starts for each in of_start)


def run_in_turns(
    jobs: Mapping[str, pc.Job], feeds: Mapping[str, Any], backend: str, options: argparse.Namespace
) -> dict[str, Measured]:
    """Start all jobs, several times, and let them take turns."""
    known: dict[str, Measured] = {}
    for _ in range(options.starts):
        with ExitStack() as stack:
            sessions = {
                way: stack.enter_context(pc.run(job, RANKS, backend)) for way, job in jobs.items()
            }
            steps: dict[str, int] = {}
            for way, session in sessions.items():
                losses = [float(session.step(**feeds)["loss"]) for _ in range(WARM_STEPS)]
                known.setdefault(way, Measured(losses)).seconds.append([])
                begin = time.perf_counter()
                session.step(**feeds)
                steps[way] = max(2, int(TURN_SECONDS / (time.perf_counter() - begin)))
            gc.collect()
            for turn in range(options.rounds):
                order = list(sessions)
                for way in order if turn % 2 else reversed(order):
                    sessions[way].step(**feeds)
                    spent, before = [], time.process_time()
                    for _ in range(steps[way]):
                        begin = time.perf_counter()
                        sessions[way].step(**feeds)
                        spent.append(time.perf_counter() - begin)
                    known[way].cpu.append((time.process_time() - before) / steps[way])
                    known[way].seconds[-1].append(statistics.median(spent))
    return known


def measure(name: str, machine: str, backend: str, options: argparse.Namespace) -> dict[str, Any]:
    """All layouts of a job."""
    ways = ways_of(name, machine)
    searched = search_layouts(run_passes(ways["auto"])[0])
    rng = np.random.default_rng(3)
    feeds = {}
    for op in ways["auto"].ops:
        if op.kind == "input":
            shape = op.outputs[0].shape
            floats = op.attr("name") == "x"
            feeds[str(op.attr("name"))] = (
                rng.normal(size=shape).astype(np.float32) if floats else rng.integers(0, 16, shape)
            )
    way_of: dict[str, str] = {}
    same = {
        way: way_of.setdefault(digest_of_plans(compile_plans(job, RANKS).plans), way)
        for way, job in ways.items()
    }
    known = run_in_turns({way: ways[way] for way in way_of.values()}, feeds, backend, options)
    chosen = known["auto"]
    by_hand = {way: known[run] for way, run in same.items() if way != "auto"}
    ratios = []
    for start in range(options.starts):
        # Without this start, unless it is the only one.
        without = start if options.starts > 1 else None
        fastest = min(by_hand.values(), key=lambda each: each.median(without))
        ratios += [
            one / other
            for one, other in zip(chosen.seconds[start], fastest.seconds[start], strict=True)
        ]
    medians = {way: known[run].median() for way, run in same.items()}
    return {
        "benchmark": "search_measured",
        "job": name,
        "backend": backend,
        "ms": _milliseconds(medians),
        "cpu_ms": _milliseconds({way: statistics.median(each.cpu) for way, each in known.items()})
        if backend == "threads"
        else None,
        "best_by_hand": min(by_hand, key=medians.__getitem__),
        "ratio": round(statistics.median(ratios), 3),
        "noise": round(
            statistics.median(abs(each / medians["auto"] - 1) for each in chosen.all_turns()), 3
        ),
        "objective_ms": round(searched.objective_seconds * 1e3, 3),
        "gap": round(searched.gap, 5),
        "inputs": {
            str(op.attr("name")): str(signature.outputs[0])
            for op, signature in zip(searched.job.ops, searched.signatures, strict=True)
            if op.kind in ("input", "variable") and not str(op.attr("name")).count("moment")
        },
        "equal_losses": all(
            np.allclose(each.losses, chosen.losses, rtol=LOSSES) for each in known.values()
        ),
        "load": round(os.getloadavg()[0], 1),
    }


def _milliseconds(seconds: Mapping[str, float]) -> dict[str, float]:
    return {way: round(each * 1e3, 3) for way, each in seconds.items()}


def main() -> None:
    """Measure, print, and summarise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--only", nargs="*", default=list(JOBS))
    parser.add_argument("--starts", type=int, default=3, help="of each layout of a job")
    parser.add_argument("--rounds", type=int, default=3, help="turns of a layout after each start")
    parser.add_argument("--backend", nargs="*", default=["threads", "processes"])
    parser.add_argument("--force", action="store_true", help="calibrate on a busy machine, too")
    options = parser.parse_args()
    path = options.machine
    if path is None:
        path = Path("here.toml")
        path.write_text(calibrate("here", pc.run, options.force))
    machine = chosen_machine(path).text
    ratios, equal = [], True
    for backend in options.backend:
        for name in options.only:
            row = measure(name, machine, backend, options)
            print(json.dumps(row), flush=True)
            ratios.append(row["ratio"])
            equal &= row["equal_losses"]
    summary = {"median": statistics.median(ratios), "worst": max(ratios), "jobs": len(ratios)}
    print(json.dumps({"benchmark": "search_measured", **summary, "equal_losses": equal}))
    sys.exit(not equal)


if __name__ == "__main__":
    main()
