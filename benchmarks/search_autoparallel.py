"""The search for layouts beside PyTorch's AutoParallel, which solves an integer program.

    python -m benchmarks.search_autoparallel --peer-python PATH
        [--layers 2,8,32] [--mesh 8] [--runs 3] [--machine h100-sxm]

Prints one JSON line per number of layers of a Llama 8B, in bfloat16 and with one sequence per
device: medians of seconds, of both in turns and each in a process of its own, from PyTorch's module
to layouts. Ours are those of `torch.export`, of the rest of the import, of tracing the job, and of
passes and search. Of both, batches are given split along the first axis alone, and parameters are
in as many pieces as can be, as AutoParallel's examples ask for; of ours only large ones. Its
program has forward and backward computation; our job has the updates of AdamW, too. Objectives are
not of one machine: each counts by its own figures of H100s.

Rows after the first have the collectives that one more layer adds to a step, before any of them are
joined in buckets. benchmarks/peers/torch_autoparallel.py says how the peer is installed. Here
PyTorch and transformers are needed as `scripts/test --importers` installs them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import plancompiler as pc
from benchmarks.import_llama import LENGTH, MODELS, imported, median_row
from plancompiler.lower.collector import collector_paused
from plancompiler.passes import run_passes
from plancompiler.search.layout_search import search_layouts
from plancompiler.search.mesh_search import collectives

PEER = Path(__file__).resolve().parent / "peers" / "torch_autoparallel.py"
MODEL = "8b"
DTYPE = "bfloat16"

Row = dict[str, Any]


def searched(layers: int, mesh: tuple[int, ...], machine: str) -> Row:
    """One search of ours."""
    batch = math.prod(mesh)
    model, _, took = imported(MODEL, batch, num_hidden_layers=layers, dtype=DTYPE)
    begin = time.perf_counter()
    devices = pc.Placement("cpu", np.arange(batch).reshape(mesh))
    model.place(devices)
    split = ["S(0)", *["B"] * (len(mesh) - 1)]
    with pc.job("llama", config=pc.Config(layout="auto", machine=machine)) as traced:
        ids, labels = (
            pc.input(name, (batch, LENGTH), "int64", devices, split)
            for name in ("input_ids", "labels")
        )
        loss = model(input_ids=ids, labels=labels).loss
        pc.optim.AdamW(1e-4).minimize(loss)
        pc.output("loss", loss)
    tracing = time.perf_counter() - begin
    with collector_paused():  # as compilation does
        job, _ = run_passes(traced)
        result = search_layouts(job, split_parameters=True)
    parts = {
        "export": took["export_seconds"],
        "import": took["import_seconds"],
        "trace": tracing,
        "search": time.perf_counter() - begin - tracing,
    }
    return {
        "seconds": sum(parts.values()),
        "parts": parts,
        "variables": result.variables,
        "objective_seconds": result.objective_seconds,
        "gap": result.gap,
        "collectives": sum(collectives(result).values(), Counter()),
    }


def run(command: list[str]) -> Row:
    """The JSON line that a command prints last."""
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def their_command(python: str, layers: int, mesh: str) -> list[str]:
    config = MODELS[MODEL] | {"num_hidden_layers": layers, "dtype": DTYPE}
    batch = math.prod(map(int, mesh.split("x")))
    options = ["--batch", str(batch), "--length", str(LENGTH), "--mesh", mesh]
    return [python, str(PEER), "--config", json.dumps(config), *options]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python")
    parser.add_argument("--layers", default="2,8,32")
    parser.add_argument("--mesh", default="8", help="such as 4x8")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--machine", default="h100-sxm")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        mesh = tuple(map(int, options.mesh.split("x")))
        print(json.dumps(searched(int(options.layers), mesh, options.machine)))
        return
    if options.peer_python is None:
        parser.error("--peer-python names the interpreter that has AutoParallel")
    fewer: tuple[int, list[Row]] | None = None
    for layers in map(int, options.layers.split(",")):
        child = [sys.executable, "-m", "benchmarks.search_autoparallel", "--child"]
        child += ["--layers", str(layers), "--mesh", options.mesh, "--machine", options.machine]
        rows = [
            (run(child), run(their_command(options.peer_python, layers, options.mesh)))
            for _ in range(options.runs)
        ]
        ours, theirs = (median_row(list(each)) for each in zip(*rows, strict=True))
        counts = [each.pop("collectives") for each in (ours, theirs)]
        if fewer is not None:
            before, known = fewer
            for each, more, less in zip((ours, theirs), counts, known, strict=True):
                each["collectives_per_layer"] = {
                    kind: round((more.get(kind, 0) - less.get(kind, 0)) / (layers - before), 2)
                    for kind in sorted(more | less)
                }
        fewer = layers, counts
        head = {"benchmark": "search_autoparallel", "layers": layers, "mesh": options.mesh}
        ratio = round(ours["seconds"] / theirs["seconds"], 3)
        load = round(os.getloadavg()[0], 1)
        row = {**head, "runs": options.runs, "ratio": ratio, "ours": ours, "autoparallel": theirs}
        print(json.dumps({**row, "load_average": load}), flush=True)


if __name__ == "__main__":
    main()
