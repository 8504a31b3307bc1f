"""The search for layouts: how long it takes, how good its answers are, and what people write.

    python -m benchmarks.search [--machine NAME] [--mesh 8 --mesh 4x8] [--only NAME …]

Prints one JSON line per model and mesh: seconds, columns, objective, bound and gap, the cost of the
layouts that `examples/` has for this mesh (dp on one axis, dp and tp on two) by the same objective,
and the collectives of a repeated block. Goal row 15: a gap of at most 1 %, never dearer than what
is written by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import plancompiler as pc
from plancompiler.boxing.infer_sbp import infer_sbp
from plancompiler.frontend.open_layouts import with_config
from plancompiler.passes import run_passes
from plancompiler.search.layout_search import objective_seconds, search_layouts
from plancompiler.search.linear_program import layout_problem
from plancompiler.search.mesh_search import collectives_per_block
from plancompiler.search.mesh_shapes import with_mesh
from plancompiler.search.tied_ops import tie_ops

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import gpt
import mlp

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


MODELS: dict[str, Build] = {
    "mlp": digits,
    "gpt tiny": of_preset("tiny"),
    "gpt2": of_preset("gpt2"),
    "gpt3-175b": of_preset("gpt3-175b"),
}


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


def opened(job: pc.Job) -> tuple[object, ...]:
    return tuple(replace(op, sbp=None) for op in job.ops)


def measure(name: str, mesh: Mesh, machine: str) -> dict[str, object]:
    build, config = MODELS[name], pc.Config(layout="auto", machine=machine)
    traced = with_config(build(mesh, False), config)
    begin = time.perf_counter()
    job, _ = run_passes(with_mesh(traced, mesh))
    result = search_layouts(job)
    seconds = time.perf_counter() - begin
    return {
        "benchmark": "search",
        "model": name,
        "mesh": list(mesh),
        "machine": machine,
        "seconds": round(seconds, 2),
        "variables": result.variables,
        "classes": result.classes,
        "objective_seconds": result.objective_seconds,
        "bound_seconds": result.bound_seconds,
        "gap": round(result.gap, 5),
        "by_hand_seconds": by_hand(build, mesh, config),
        "collectives_per_block": dict(collectives_per_block(result).counts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", default="h100-sxm")
    parser.add_argument("--mesh", action="append", help="such as 4x8; repeatable")
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    options = parser.parse_args()
    meshes = [tuple(map(int, each.split("x"))) for each in options.mesh or ("8", "4x8")]
    for name in options.only:
        for mesh in meshes:
            print(json.dumps(measure(name, mesh, options.machine)), flush=True)


if __name__ == "__main__":
    main()
