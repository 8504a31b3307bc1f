"""Whether searched layouts are the best ones: against all others, and against random ones.

    python -m benchmarks.search_proof [--jobs 200] [--layouts 1000] [--mesh 4x8] [--only NAME …]

Random small jobs on meshes (2), (3) and (2, 2), until so many have at most 20,000 combinations of
legal layouts: the search must find the least cost of all combinations, and its bound may not be
above it. Jobs with more combinations on the way are compared with dynamic programming where that
can be done. Jobs whose values have at most a million elements are also run in their layouts, and
must give what one rank gives.

Models (those of `benchmarks.search`): so many random legal layouts, and as many that differ from
the best ones in a few ops, may not cost less than the bound. Prints a JSON line for each mesh and
each model; ends with status 1 where something was wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from itertools import count

import numpy as np

from benchmarks.search import MODELS, open_job
from plancompiler.passes import run_passes
from plancompiler.search.layout_search import search_layouts
from plancompiler.search.linear_program import layout_problem
from plancompiler.search.tied_ops import tie_ops
from tests.search.least_cost import combinations_of, least_by_elimination, least_of_all
from tests.search.many_layouts import neighbours, random_choices, seconds_of_many
from tests.search.open_jobs import whole_problem
from tests.search.random_jobs import outputs_of, random_job

MOST = 20_000
"""Combinations that are all looked at."""
MOST_ELEMENTS = 1_000_000
"""Of a value, in jobs that are run."""
MOST_LAYOUTS = 6
"""Of a value that are counted: all layers of a Llama read one table of rotations."""
MESHES = ((2,), (3,), (2, 2))
EQUAL = 1e-6
"""Relative difference of costs that are the same: they are added up in another order."""


def compare_job(seed: int, hierarchy: tuple[int, ...]) -> tuple[str, list[str]]:
    """How a random job was compared, and what was wrong."""
    # A mesh of two axes has the square of the combinations.
    job = random_job(seed, hierarchy, 1 + seed % (5 if len(hierarchy) == 1 else 2))
    problem = whole_problem(job)
    few = combinations_of(problem) <= MOST
    least = least_of_all(problem) if few else least_by_elimination(problem)
    if least is None:
        return "too large", []
    result, wrong = search_layouts(run_passes(job)[0]), []
    if abs(result.objective_seconds - least) > EQUAL * least:
        wrong.append(f"{result.objective_seconds} s, though {least} s is possible")
    if result.bound_seconds > least * (1 + EQUAL):
        wrong.append(f"a bound of {result.bound_seconds} s, though {least} s is possible")
    small = max(math.prod(value.shape) for op in job.ops for value in op.outputs) <= MOST_ELEMENTS
    alone = outputs_of(job, seed, alone=True) if small else {}
    for name, value in outputs_of(job, seed).items() if small else ():
        if not np.allclose(value, alone[name], rtol=1e-4, atol=1e-5, equal_nan=True):
            wrong.append(f"output {name} is {value}, on one rank {alone[name]}")
    how = "all" if few else "dynamic programming"
    return how, [f"seed {seed}: {each}" for each in wrong]


def compare_jobs(hierarchy: tuple[int, ...], jobs: int) -> dict[str, object]:
    """Random jobs until so many could be compared with all combinations."""
    compared: Counter[str] = Counter()
    wrong = []
    for seed in count():
        if compared["all"] >= jobs:
            break
        how, differences = compare_job(seed, hierarchy)
        compared[how] += 1
        wrong += differences
    return {"mesh": list(hierarchy), "compared": dict(compared), "wrong": wrong}


def compare_model(
    name: str, mesh: tuple[int, ...], machine: str, layouts: int
) -> dict[str, object]:
    """Random layouts of a model beside the bound."""
    job, _ = run_passes(open_job(name, mesh, machine))
    result = search_layouts(job)
    problem = layout_problem(tie_ops(job, 2), with_dominated=True)
    rng = np.random.default_rng(19)
    least = {}
    for kind, choices in {
        "random": random_choices(problem, layouts, rng),
        "near": neighbours(problem, result.signatures, layouts, rng),
    }.items():
        seconds = seconds_of_many(problem, choices, MOST_LAYOUTS)
        legal = seconds[np.isfinite(seconds)]
        least[kind] = {
            "legal": len(legal),
            "least_over_bound": float(legal.min()) / result.bound_seconds,
        }
    return {
        "model": name,
        "mesh": list(mesh),
        "machine": machine,
        "objective_over_bound": result.objective_seconds / result.bound_seconds,
        **least,
        "wrong": [kind for kind, each in least.items() if each["least_over_bound"] < 1 - EQUAL],
    }


def main() -> None:
    """Compare all, print, and end with status 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200, help="of all meshes together")
    parser.add_argument("--layouts", type=int, default=1000, help="of each kind and model")
    parser.add_argument("--mesh", default="4x8", help="of the models")
    parser.add_argument("--machine", default="h100-sxm", help="of the models")
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    options = parser.parse_args()
    mesh = tuple(map(int, options.mesh.split("x")))
    rows = []
    for hierarchy in MESHES if options.jobs else ():
        row = compare_jobs(hierarchy, -(-options.jobs // len(MESHES)))
        print(json.dumps({"benchmark": "search_proof", **row}), flush=True)
        rows.append(row)
    for name in options.only:
        row = compare_model(name, mesh, options.machine, options.layouts)
        print(json.dumps({"benchmark": "search_proof", **row}), flush=True)
        rows.append(row)
    sys.exit(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    main()
