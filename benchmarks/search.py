"""The search for layouts: how long it takes, how good its answers are, and what people write.

    python -m benchmarks.search [--machine NAME] [--mesh 4x8 …] [--only NAME …] [--memory PART]
    python -m benchmarks.search --table < ROWS

Prints two JSON lines per model and mesh, the second with a memory limit: seconds and seconds of
CPU, columns, objective, bound and gap, what layouts that people write cost by the same objective,
and the collectives of a repeated block. The limit leaves this part, by default half, of what the
best layouts hold beyond the least that any hold. People split batches along all axes, with whole
parameters or as FSDP does (ZeRO-3), or the last axis as Megatron does, with or without split
sequences, experts or channels. The Llamas are imported, which needs PyTorch and transformers; they
are among the models where they are named. `--table` makes the table of docs/search.md of rows.
Goal row 15: a gap of at most 1 %, never dearer than what is written by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import plancompiler as pc
from benchmarks import import_llama
from benchmarks.search_measured import (
    MEGATRON,
    Write,
    convolutions,
    experts,
    vision_transformer,
)
from examples import gpt, mlp
from plancompiler.boxing.infer_sbp import infer_sbp
from plancompiler.errors import PlanCompilerError
from plancompiler.frontend.open_layouts import with_config
from plancompiler.ir import NdSbp
from plancompiler.lower.collector import collector_paused
from plancompiler.passes import config_of, run_passes
from plancompiler.search.layout_file import is_placed, name_of, with_layouts
from plancompiler.search.layout_search import (
    LayoutSearch,
    least_bytes,
    objective_seconds,
    search_layouts,
)
from plancompiler.search.linear_program import layout_problem
from plancompiler.search.mesh_search import collectives_per_block
from plancompiler.search.mesh_shapes import with_mesh
from plancompiler.search.tied_ops import tie_ops

Mesh = tuple[int, ...]
Build = Callable[[Mesh], pc.Job]
"""A job without layouts, for as many devices as the mesh has."""


def digits(mesh: Mesh) -> pc.Job:
    return mlp.build("auto", ranks=prod(mesh), hidden=2048, batch=512, evaluate=False)


def of_preset(preset: str) -> Build:
    return lambda mesh: gpt.build(preset, dp=prod(mesh), layout="auto")


def written(write: Write) -> Build:
    def build(mesh: Mesh) -> pc.Job:
        devices = pc.Placement("cpu", list(range(prod(mesh))), ("dp",))
        with pc.job("written") as job:
            loss = write(devices, None)
            pc.optim.AdamW(1e-3).minimize(loss)
            pc.output("loss", loss)
        return job

    return build


def llama(name: str) -> Build:
    """Imported from its configuration."""

    def build(mesh: Mesh) -> pc.Job:
        batch = prod(mesh)
        model, _, _ = import_llama.imported(name, batch)
        devices = pc.Placement("cpu", list(range(batch)), ("dp",))
        model.place(devices)
        with pc.job("llama") as job:
            ids, labels = (
                pc.input(each, (batch, import_llama.LENGTH), "int64", devices)
                for each in ("input_ids", "labels")
            )
            loss = model(input_ids=ids, labels=labels).loss
            pc.optim.AdamW(1e-4).minimize(loss)
            pc.output("loss", loss)
        return job

    return build


OF_LLAMA = {
    **dict.fromkeys((f"{name}_proj.weight" for name in ("q", "k", "v", "gate", "up")), "S(0)"),
    **dict.fromkeys((f"{name}_proj.weight" for name in ("o", "down")), "S(1)"),
}
OF_PERCEPTRON = {"0.weight": "S(0)", "0.bias": "S(0)", "2.weight": "S(1)"}
OF_CONVOLUTIONS = {".0.weight": "S(0)", ".0.bias": "S(0)", ".2.weight": "S(1)"}
OF_EXPERTS = {"first": "S(0)", "second": "S(0)"}
MODELS: dict[str, tuple[Build, Mapping[str, str]]] = {
    "mlp": (digits, OF_PERCEPTRON),
    "gpt tiny": (of_preset("tiny"), MEGATRON),
    "gpt2": (of_preset("gpt2"), MEGATRON),
    "gpt3-175b": (of_preset("gpt3-175b"), MEGATRON),
    "vit": (written(vision_transformer(1024, 24, 256, 224, 16)), MEGATRON),
    "resnet": (written(convolutions(256, 16, 256, 56)), OF_CONVOLUTIONS),
    "moe": (written(experts(1024, 4096, 64, 4096)), OF_EXPERTS),
}
"""How to build it, and how parameters whose names end so are split along the last axis."""
IMPORTED: dict[str, tuple[Build, Mapping[str, str]]] = {
    "llama-8b": (llama("8b"), OF_LLAMA),
    "llama-70b": (llama("70b"), OF_LLAMA),
}


def open_job(name: str, mesh: Mesh, machine: str) -> pc.Job:
    """A model without layouts on a mesh of this shape."""
    build, _ = (MODELS | IMPORTED)[name]
    return with_mesh(with_config(build(mesh), pc.Config(layout="auto", machine=machine)), mesh)


def by_hand(name: str, job: pc.Job) -> dict[str, float]:
    """The objective of each way that people lay it out which the job can have."""
    _, split = (MODELS | IMPORTED)[name]
    axes = len(job.ops[0].placement.hierarchy)
    inner = [name for name in ("dp", "tp") if axes > 1 or name == "tp"]
    ways: dict[str, tuple[int, Mapping[str, str], Mapping[str, Any]]] = {
        "dp": (axes, {}, {}),
        "fsdp": (axes, {}, {"zero": 3}),
        " x ".join(inner): (axes - 1, split, {}),
        " x ".join([*inner, "sequences"]): (axes - 1, split, {"sequence_parallel": True}),
    }
    costs = {}
    for way, (rows, endings, settings) in ways.items():
        whole = ["B"] * axes
        placed = {}
        for op in job.ops:
            if not is_placed(op):
                continue
            layout = list(whole)
            if op.kind == "variable":
                ending = next((each for each in endings if name_of(op).endswith(each)), None)
                layout[-1] = "B" if ending is None else endings[ending]
            else:
                layout[:rows] = ["S(0)"] * rows
            placed[name_of(op)] = NdSbp.of(layout)
        config = replace(config_of(job), layout="given", **settings)
        try:
            passed, _ = run_passes(replace(with_layouts(job, placed), config=config))
        except PlanCompilerError:
            continue  # no sequences, or nothing for ZeRO to split
        opened = tuple(replace(op, sbp=None) for op in passed.ops)
        problem = layout_problem(tie_ops(replace(passed, ops=opened), 2), with_dominated=True)
        costs[way] = objective_seconds(problem, infer_sbp(passed).signatures)
    return costs


def measure(name: str, mesh: Mesh, machine: str, part: float) -> list[dict[str, object]]:
    """A row, and one with less memory."""
    traced = open_job(name, mesh, machine)
    hand = by_hand(name, traced)
    rows: list[dict[str, object]] = []
    limit: float | None = None
    while True:
        begin, worked = time.perf_counter(), time.process_time()
        with collector_paused():  # as compilation does
            job, _ = run_passes(traced)
            result = search_layouts(job, limit)
        rows.append(
            {
                "benchmark": "search",
                "model": name,
                "mesh": list(mesh),
                "machine": machine,
                "memory_bytes": limit,
                "seconds": round(time.perf_counter() - begin, 2),
                "cpu_seconds": round(time.process_time() - worked, 2),
                "variables": result.variables,
                "classes": result.classes,
                "objective_seconds": result.objective_seconds,
                "bound_seconds": result.bound_seconds,
                "gap": round(result.gap, 5),
                "held_bytes": result.held_bytes,
                "by_hand_seconds": None if limit else hand,
                "collectives_per_block": dict(collectives_per_block(result).counts),
            }
        )
        if limit is not None:
            return rows
        limit = limit_of(result, part)


def limit_of(free: LayoutSearch, part: float) -> float:
    """Memory that leaves this part of what the best layouts hold beyond the least."""
    least = least_bytes(layout_problem(tie_ops(free.job, 2)))
    return least + part * (free.held_bytes - least)


def table(lines: Iterable[str]) -> Iterator[str]:
    """Rows as docs/search.md has them."""
    yield "| model | mesh | memory | CPU seconds | variables | objective | gap | by hand | block |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for line in lines:
        row = json.loads(line)
        hand = row["by_hand_seconds"] or {}
        best = min(hand, key=hand.__getitem__, default=None)
        limit = row["memory_bytes"]
        cells = [
            row["model"],
            " x ".join(map(str, row["mesh"])),
            "any" if limit is None else f"{limit / 2**30:.3g} GiB",
            f"{row['cpu_seconds']:.1f}",
            f"{row['variables']:,}",
            _time(row["objective_seconds"]),
            f"{row['gap']:.2%}" if row["gap"] >= 5e-5 else "0",
            "" if best is None else f"{best}: {_time(hand[best])}",
            ", ".join(f"{n:g} {kind}" for kind, n in row["collectives_per_block"].items()),
        ]
        yield "| " + " | ".join(cells) + " |"


def _time(seconds: float) -> str:
    return f"{seconds:,.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", default="h100-sxm")
    parser.add_argument("--mesh", action="append", help="such as 4x8; repeatable")
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    parser.add_argument("--memory", type=float, default=0.5, help="a part, such as 0.5")
    parser.add_argument("--table", action="store_true", help="of rows from stdin")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(sys.stdin)))
        return
    meshes = [tuple(map(int, each.split("x"))) for each in options.mesh or ("8", "4x8", "2x4x8")]
    for name in options.only:
        for mesh in meshes:
            for row in measure(name, mesh, options.machine, options.memory):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
