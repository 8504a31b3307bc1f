"""The part of benchmarks/eager.py that every process can do only once: ops that it has never seen.

    python -m benchmarks.eager_new 1d|2d

Each case is another kind of op on other layouts, shapes and dtypes, as one of 2 or of 2 x 2 ranks;
none needs a collective, so that one rank can run alone. What is timed is the call, all of it: type
inference, pricing of signatures, the plan, and the kernel itself, which takes a few microseconds.
benchmarks/peers/torch_dtensor.py has the same cases. Prints one JSON line, in microseconds: the
first op of the process, and then every case.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import plancompiler as pc
from plancompiler.eager.world import World, set_process_world

MESHES: dict[str, list[Any]] = {"1d": [0, 1], "2d": [[0, 1], [2, 3]]}
LAYOUTS = {
    "1d": {"rows": ["S(0)"], "columns": ["S(1)"], "whole": ["B"]},
    "2d": {"rows": ["S(0)", "B"], "columns": ["S(1)", "S(1)"], "whole": ["B", "B"]},
}
CASES: list[tuple[str, Callable[..., object], str, list[str]]] = [
    ("sin", pc.sin, "float32", ["rows"]),
    ("add", pc.add, "float64", ["columns", "columns"]),
    ("matmul", pc.matmul, "float32", ["rows", "whole"]),
    ("sum", lambda x: pc.sum(x, 1), "float64", ["rows"]),
    ("softmax", pc.softmax, "float32", ["rows"]),
    ("transpose", pc.transpose, "float64", ["columns"]),
    ("maximum", pc.maximum, "float32", ["rows", "rows"]),
    ("concat", lambda x, y: pc.concat([x, y]), "float64", ["columns", "columns"]),
    ("cumsum", lambda x: pc.cumsum(x, 0), "float32", ["columns"]),
    ("max", pc.max, "float64", ["rows"]),
]


def timed(function: Callable[..., object], *tensors: Any) -> float:
    begin = time.perf_counter()
    function(*tensors)
    return round((time.perf_counter() - begin) * 1e6, 1)


def main() -> None:
    """Time each case once."""
    (name,) = sys.argv[1:]
    set_process_world(World(0, 4))
    mesh = pc.Placement("cpu", MESHES[name])
    layouts = LAYOUTS[name]
    times = {"first_op": timed(pc.neg, pc.tensor(np.ones((8, 8), np.float32), mesh))}
    for number, (kind, function, dtype, chosen) in enumerate(CASES):
        extent = 12 + 4 * number
        given = [
            pc.tensor(np.ones((extent, extent), dtype), mesh, layouts[each]) for each in chosen
        ]
        times[kind] = timed(function, *given)
    print(json.dumps(times))


if __name__ == "__main__":
    main()
