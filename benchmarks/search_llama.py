"""Llama 8B from its configuration to plans with searched layouts: import, search, compile.

    python -m benchmarks.search_llama [--mesh 64x8] [--machine h100-sxm]

Prints one JSON line: seconds of the import without `torch.export`, of tracing, and of searching and
compiling, and what they took of the CPU all together. One sequence per device, AdamW; the plans of
the first, a middle and the last rank are made. Goal: 10 s for 512 ranks. It needs PyTorch and
transformers, as `scripts/test --importers` installs them.
"""

from __future__ import annotations

import argparse
import json
import math
import time

import numpy as np

import plancompiler as pc
from benchmarks.import_llama import LENGTH, imported
from plancompiler.lower.compile import compile_plans


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="64x8")
    parser.add_argument("--machine", default="h100-sxm")
    options = parser.parse_args()
    mesh = tuple(map(int, options.mesh.split("x")))
    ranks = math.prod(mesh)
    model, _, took = imported("8b", ranks)
    begin, worked = time.perf_counter(), time.process_time()
    devices = pc.Placement("cpu", np.arange(ranks).reshape(mesh))
    model.place(devices)
    with pc.job("llama", config=pc.Config(layout="auto", machine=options.machine)) as job:
        ids, labels = (
            pc.input(name, (ranks, LENGTH), "int64", devices) for name in ("input_ids", "labels")
        )
        loss = model(input_ids=ids, labels=labels).loss
        pc.optim.AdamW(1e-4).minimize(loss)
        pc.output("loss", loss)
    traced = time.perf_counter()
    compile_plans(job, ranks, "rank_per_process", (0, ranks // 2 - 1, ranks - 1))
    seconds = {
        "import": took["import_seconds"],
        "trace": traced - begin,
        "search and compile": time.perf_counter() - traced,
    }
    print(
        json.dumps(
            {
                "benchmark": "search_llama",
                "mesh": list(mesh),
                "export_seconds": round(took["export_seconds"], 2),
                "seconds": {name: round(value, 2) for name, value in seconds.items()},
                "total_seconds": round(sum(seconds.values()), 2),
                "cpu_seconds_after_import": round(time.process_time() - worked, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
