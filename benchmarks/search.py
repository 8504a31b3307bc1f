"""The search for layouts: how long it takes, how good its answers are, and what people write.

    python -m benchmarks.search [--machine NAME] [--mesh 4x8 …] [--only NAME …] [--memory SHARE]

Prints one JSON line per model and mesh: seconds and seconds of CPU, columns, objective, bound and
gap, the cost of the layouts that `examples/` has for this mesh (dp on one axis, dp and tp on two)
by the same objective, and the collectives of a repeated block. The Llamas are imported, which
needs PyTorch and transformers. Goal row 15: a gap of at most 1 %,
never dearer than what is written by hand. `--memory` searches once more, with this share of the
memory that the best layouts hold.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace

import plancompiler as pc
from benchmarks import import_llama
from benchmarks.search_measured import Write, convolutions, experts, vision_transformer
from examples import gpt, mlp
from plancompiler.boxing.infer_sbp import infer_sbp
from plancompiler.frontend.open_layouts import with_config
from plancompiler.ir.value import Op
from plancompiler.lower.collector import collector_paused
from plancompiler.passes import run_passes
from plancompiler.search.layout_search import objective_seconds, search_layouts
from plancompiler.search.linear_program import layout_problem
from plancompiler.search.mesh_search import collectives_per_block
from plancompiler.search.mesh_shapes import with_mesh
from plancompiler.search.tied_ops import tie_ops

Mesh = tuple[int, ...]
Build = Callable[[Mesh, bool], pc.Job]


def digits(mesh: Mesh, placed: bool) -> pc.Job:
    layout = ("dp" if len(mesh) == 1 else "dp_tp") if placed else "auto"
    return mlp.build(layout, ranks=size(mesh), hidden=2048, batch=512, evaluate=False)


def of_preset(preset: str) -> Build:
    def build(mesh: Mesh, placed: bool) -> pc.Job:
        if not placed:
            return gpt.build(preset, dp=size(mesh), layout="auto")
        return gpt.build(preset, dp=mesh[0], tp=mesh[1] if len(mesh) > 1 else 1)

    return build


def written(write: Write) -> Build:
    """A model that nobody places by hand, or with its batch split over all devices."""

    def build(mesh: Mesh, placed: bool) -> pc.Job:
        devices = pc.Placement("cpu", list(range(size(mesh))), ("dp",))
        with pc.job("written") as job:
            loss = write(devices, {"inputs": "S(0)"} if placed else None)
            pc.optim.AdamW(1e-3).minimize(loss)
            pc.output("loss", loss)
        return job

    return build


def llama(name: str) -> Build:
    """Imported from its configuration; by hand its batch is split over all devices."""

    def build(mesh: Mesh, placed: bool) -> pc.Job:
        batch = size(mesh)
        model, _, _ = import_llama.imported(name, batch)
        devices = pc.Placement("cpu", list(range(batch)), ("dp",))
        model.place(devices)
        with pc.job("llama") as job:
            ids, labels = (
                pc.input(each, (batch, import_llama.LENGTH), "int64", devices, sbp)
                for each in ("input_ids", "labels")
                for sbp in (["S(0)"] if placed else None,)
            )
            loss = model(input_ids=ids, labels=labels).loss
            pc.optim.AdamW(1e-4).minimize(loss)
            pc.output("loss", loss)
        return job

    return build


MODELS: dict[str, Build] = {
    "mlp": digits,
    "gpt tiny": of_preset("tiny"),
    "gpt2": of_preset("gpt2"),
    "gpt3-175b": of_preset("gpt3-175b"),
    "vit": written(vision_transformer(1024, 24, 256, 224, 16)),
    "resnet": written(convolutions(256, 16, 256, 56)),
    "moe": written(experts(1024, 4096, 64, 4096)),
}
IMPORTED: dict[str, Build] = {"llama-8b": llama("8b"), "llama-70b": llama("70b")}


def size(mesh: Mesh) -> int:
    count = 1
    for extent in mesh:
        count *= extent
    return count


def by_hand(build: Build, mesh: Mesh, config: pc.Config) -> float | None:
    """The objective of the layouts that people write; None where the example has no such mesh."""
    job, _ = run_passes(replace(build(mesh, True), config=replace(config, layout="given")))
    placement = job.ops[0].placement
    shape = tuple(extent for extent in placement.hierarchy if extent > 1)
    if shape != tuple(extent for extent in mesh if extent > 1):
        return None
    problem = layout_problem(tie_ops(replace(job, ops=opened(job)), 2), with_dominated=True)
    return objective_seconds(problem, infer_sbp(job).signatures)


def opened(job: pc.Job) -> tuple[Op, ...]:
    return tuple(replace(op, sbp=None) for op in job.ops)


def measure(name: str, mesh: Mesh, machine: str, memory: float | None) -> list[dict[str, object]]:
    """A row, and one with less memory where that is asked for."""
    build, config = (MODELS | IMPORTED)[name], pc.Config(layout="auto", machine=machine)
    traced = with_config(build(mesh, False), config)
    hand = by_hand(build, mesh, config) if len(mesh) < 3 else None
    rows: list[dict[str, object]] = []
    limit: float | None = None
    while True:
        begin, worked = time.perf_counter(), time.process_time()
        with collector_paused():  # as compilation does
            job, _ = run_passes(with_mesh(traced, mesh))
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
                "by_hand_seconds": hand,
                "collectives_per_block": dict(collectives_per_block(result).counts),
            }
        )
        if memory is None or limit is not None:
            return rows
        limit = memory * result.held_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", default="h100-sxm")
    parser.add_argument("--mesh", action="append", help="such as 4x8; repeatable")
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    parser.add_argument("--memory", type=float, help="a share, such as 0.5")
    options = parser.parse_args()
    meshes = [tuple(map(int, each.split("x"))) for each in options.mesh or ("8", "4x8", "2x4x8")]
    for name in options.only:
        for mesh in meshes:
            for row in measure(name, mesh, options.machine, options.memory):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
