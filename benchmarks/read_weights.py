"""How fast ranks read their shards of a model's weights, beside a plain read of as many bytes.

    python -m benchmarks.read_weights [--tp 4] [--runs 5]

Writes the weights of a layer of an 8B Llama, in several files with an index, into a temporary
folder, and loads them into a module whose matrices are split along `tp`, some along their rows and
some along their columns. What is timed is the read of all variables into a rank's
memory, which has not been touched before, and in turns with it plain reads of the same files, in
pieces of 8 MiB, into memory that has not been touched either, until they have read as many bytes.
The files are in the page cache, so that seconds are the processor's. Prints one JSON line: `ratio`
is the speed of ours in units of the plain read's, of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import plancompiler as pc
from plancompiler import nn
from plancompiler.executor.initial_values import initial_value
from plancompiler.frontend.weights import write_weights
from plancompiler.ir.shard import element_count, region_shape
from plancompiler.lower.compile import compile_plans
from plancompiler.plan.plan import Plan

HIDDEN, INNER, HEADS = 4096, 14336, 1024
PIECE = 8 << 20
FILES = 4
LAYER = {
    "q_proj": (HIDDEN, HIDDEN, 0),
    "k_proj": (HEADS, HIDDEN, 0),
    "v_proj": (HEADS, HIDDEN, 0),
    "o_proj": (HIDDEN, HIDDEN, 1),
    "gate_proj": (INNER, HIDDEN, 0),
    "up_proj": (INNER, HIDDEN, 0),
    "down_proj": (HIDDEN, INNER, 1),
}
"""Matrices of a layer of an 8B Llama: rows, columns, and the axis that is split."""


class Layer(nn.Module):
    """A layer's matrices, and two vectors that are not split."""

    def __init__(self) -> None:
        for name, (rows, columns, _) in LAYER.items():
            setattr(self, name, nn.Linear(columns, rows, bias=False))
        self.input_norm = nn.RMSNorm(HIDDEN)
        self.post_norm = nn.RMSNorm(HIDDEN)

    def forward(self, x: pc.Value) -> pc.Value:
        """Something that reads every weight."""
        total: pc.Value = self.post_norm(self.input_norm(x)).sum()
        for parameter in self.parameters():
            total = total + parameter.value.sum()
        return total


def plans_of(folder: Path, tp: int) -> dict[int, Plan]:
    """The plans of a job whose weights are in a folder."""
    mesh = pc.Placement("cpu", np.arange(tp), axes=("tp",))
    model = Layer()
    pc.load_weights(model, folder)
    model.place(mesh, {f"{name}.weight": [f"S({axis})"] for name, (*_, axis) in LAYER.items()})
    with pc.job("read") as job:
        pc.output("y", model(pc.input("x", (1, HIDDEN), "float32", mesh)))
    return dict(compile_plans(job, tp).plans)


def read_shards(plan: Plan) -> tuple[int, float]:
    """Bytes and seconds of reading a rank's variables."""
    shapes = [region_shape(each.region) for each in plan.variables]
    sizes = [element_count(shape) for shape in shapes]
    memory = np.zeros(sum(sizes), np.float32)  # one block, as a rank has
    ends = np.cumsum(sizes)
    places = [
        memory[end - size : end].reshape(shape)
        for end, size, shape in zip(ends, sizes, shapes, strict=True)
    ]
    begin = time.process_time()
    for variable, place in zip(plan.variables, places, strict=True):
        initial_value(variable, plan.seed, place)
    seconds = time.process_time() - begin
    return memory.nbytes, seconds


def read_plainly(folder: Path, nbytes: int) -> float:
    """Seconds of reading so many bytes of the files."""
    place = np.zeros(nbytes, np.uint8).data
    begin = time.process_time()
    at = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while at < nbytes and (count := file.readinto(place[at : at + PIECE])):
                at += count
    return time.process_time() - begin


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shapes: dict[str, tuple[int, ...]]
        shapes = {f"{name}.weight": (rows, columns) for name, (rows, columns, _) in LAYER.items()}
        shapes |= {"input_norm.weight": (HIDDEN,), "post_norm.weight": (HIDDEN,)}
        arrays = {each: random.random(shape, np.float32) for each, shape in shapes.items()}
        write_weights(folder, arrays, sum(each.nbytes for each in arrays.values()) // FILES)
        del arrays
        plans = plans_of(folder, options.tp)
        total = 0
        ours, plain = [], []
        for _ in range(options.runs):
            read = [read_shards(plan) for plan in plans.values()]
            total = sum(nbytes for nbytes, _ in read)
            ours.append(sum(seconds for _, seconds in read))
            plain.append(sum(read_plainly(folder, nbytes) for nbytes, _ in read))
    row = {
        "benchmark": "read_weights",
        "tp": options.tp,
        "bytes": total,
        "gib_per_second": round(total / 2**30 / statistics.median(ours), 3),
        "plain_gib_per_second": round(total / 2**30 / statistics.median(plain), 3),
        "ratio": round(statistics.median(plain) / statistics.median(ours), 3),
        "load_average": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
