"""Eager overhead: what an op on DistTensors costs beyond the NumPy kernel alone, in microseconds.

    python -m benchmarks.eager [--torch-python PYTHON]

Goals rows 3 and 4. Tiny arrays, so that only the overhead is seen: one process with one rank, and
for what needs a collective two (benchmarks/eager_ranks.py). Each figure is the difference between
an eager call and the same NumPy calls and collectives, timed in turn, each by its quickest round:
others who use the machine only ever add time. Ops that a process has never seen are timed whole, in
several processes (benchmarks/eager_new.py): the mean of ten kinds, each by its quickest process,
and the very first op. With `--torch-python` that interpreter, which must
have PyTorch, times DTensor in the same way (benchmarks/peers/torch_dtensor.py). Prints one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import plancompiler as pc
from plancompiler import nn

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 300
PROCESSES = 5


def per_call(function: Callable[[], object], number: int) -> float:
    begin = time.perf_counter()
    for _ in range(number):
        function()
    return (time.perf_counter() - begin) / number * 1e6


def beyond(
    ours: Callable[[], object],
    bare: Callable[[], object],
    number: int = 200,
    rounds: int = ROUNDS,
) -> float:
    """Microseconds that `ours` takes beyond `bare`."""
    ours()
    bare()
    times = [(per_call(ours, number), per_call(bare, number)) for _ in range(rounds)]
    return round(min(one for one, _ in times) - min(one for _, one in times), 3)


def ops(name: str, mesh: pc.Placement) -> dict[str, float]:
    a = np.ones((8, 8), np.float32)
    x, y = pc.tensor(a, mesh), pc.tensor(a, mesh)
    w = pc.tensor(a, mesh, requires_grad=True)
    return {
        f"add_{name}": beyond(lambda: x + y, lambda: np.add(a, a)),
        f"mul_{name}": beyond(lambda: x * y, lambda: np.multiply(a, a)),
        f"relu_{name}": beyond(x.relu, lambda: np.maximum(a, 0)),
        f"matmul_{name}": beyond(lambda: x @ y, lambda: np.matmul(a, a)),
        f"recorded_matmul_{name}": beyond(lambda: w @ y, lambda: np.matmul(a, a)),
        f"scalar_{name}": beyond(lambda: x + 1.0, lambda: np.add(a, 1.0)),
        f"view_{name}": beyond(lambda: x.reshape(64), lambda: a.reshape(64)),
        f"from_local_{name}": beyond(lambda: pc.from_local(a, mesh), lambda: None),
    }


def new_shapes() -> dict[str, float]:
    shapes = iter(range(9, 10_000))
    mesh = pc.Placement("cpu", [0])

    def new_shape() -> float:
        made = [pc.tensor(np.ones((next(shapes), 3), np.float32), mesh) for _ in range(10)]
        given = iter(made)

        def add() -> None:
            x = next(given)
            x + x

        return per_call(add, len(made))

    return {"new_shape": round(min(new_shape() for _ in range(20)), 1)}


def all_new(command: list[str]) -> dict[str, float]:
    """Ops never seen before; `command`, given a mesh, prints what each took in a new process."""
    figures = {}
    for mesh in ("1d", "2d"):
        runs = [said([*command, mesh]) for _ in range(PROCESSES)]
        cases = {case: min(run[case] for run in runs) for case in runs[0]}
        figures[f"first_op_{mesh}"] = cases.pop("first_op")
        figures[f"all_new_{mesh}"] = round(sum(cases.values()) / len(cases), 1)
    return figures


def models() -> dict[str, float]:
    mesh = pc.Placement("cpu", [0])
    rng = np.random.default_rng(0)
    net = nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)
    ).place(mesh)
    x = pc.tensor(rng.normal(size=(4, 8)).astype(np.float32), mesh)
    weights = [np.ones((8, 8), np.float32) for _ in range(3)]

    def mlp() -> None:
        net(x).sum().backward()

    def bare() -> None:
        held, kept = x.local, []
        for number, w in enumerate(weights):
            kept.append(held)
            held = np.add(np.matmul(held, w.T), w[0])
            if number < 2:
                held = np.maximum(held, 0)
        grad = np.ones_like(held)
        np.sum(held)
        for number, w in reversed(list(enumerate(weights))):
            if number < 2:
                grad = np.multiply(grad, kept[number + 1] > 0)
            np.matmul(grad.T, kept[number])
            grad.sum(0)
            if number:
                grad = np.matmul(grad, w)

    update = pc.optim.AdamW(lr=1e-3)
    mlp()
    parameters = [each.value for each in net.parameters()]
    arrays = [[np.ones(each.shape, np.float32) for _ in range(4)] for each in parameters]

    def adamw() -> None:
        for w, g, m, v in arrays:
            m *= 0.9
            m += 0.1 * g
            v *= 0.999
            v += 0.001 * g * g
            w *= 0.9999
            w -= 1e-3 * m / (np.sqrt(v) + 1e-8)

    return {
        "mlp": beyond(mlp, bare, 3),
        "adamw": beyond(lambda: update.step(parameters), adamw, 5),
    }


def two_ranks() -> dict[str, float]:
    command = [sys.executable, "-m", "plancompiler", "launch", "-n", "2"]
    return said([*command, str(ROOT / "benchmarks" / "eager_ranks.py")])


def torch(python: str) -> dict[str, float]:
    """DTensor's figures."""
    command = [python, str(ROOT / "benchmarks" / "peers" / "torch_dtensor.py")]
    with tempfile.TemporaryDirectory() as folder:
        figures = said([*command, folder])
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen([*command, folder, "1", "2"], stderr=subprocess.DEVNULL) as other,
    ):
        try:
            figures |= said([*command, folder, "0", "2"])
        finally:
            other.kill()
    return figures | all_new([*command, "new"])


def said(command: list[str]) -> dict[str, float]:
    """The JSON line that a command prints last."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-python", help="an interpreter that has PyTorch")
    options = parser.parse_args()
    ours = ops("1d", pc.Placement("cpu", [0])) | ops("2d", pc.Placement("cpu", [[0]]))
    ours |= new_shapes() | models() | two_ranks()
    ours |= all_new([sys.executable, "-m", "benchmarks.eager_new"])
    figures: dict[str, object] = {"unit": "microseconds", "ours": ours}
    if options.torch_python:
        theirs = torch(options.torch_python)
        figures["torch"] = theirs
        figures["ratio"] = {name: round(ours[name] / theirs[name], 3) for name in ours}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
