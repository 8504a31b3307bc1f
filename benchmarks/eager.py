"""Eager overhead: what an op on DistTensors costs beyond the NumPy kernel alone, in microseconds.

    python benchmarks/eager.py [--torch-python PYTHON]

Goals rows 3 and 4. One process, one rank, tiny arrays, so that only the overhead is seen. Each
figure is the difference between an eager call and the same NumPy calls, timed in turn, each by its
quickest round: others who use the machine only ever add time. With `--torch-python` that
interpreter, which must have PyTorch, times DTensor on a one-rank mesh. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable

import numpy as np

import plancompiler as pc
from plancompiler import nn

ROUNDS = 300


def per_call(function: Callable[[], object], number: int) -> float:
    begin = time.perf_counter()
    for _ in range(number):
        function()
    return (time.perf_counter() - begin) / number * 1e6


def beyond(ours: Callable[[], object], bare: Callable[[], object], number: int = 200) -> float:
    """Microseconds that `ours` takes beyond `bare`."""
    ours()
    rounds = [(per_call(ours, number), per_call(bare, number)) for _ in range(ROUNDS)]
    return round(min(one for one, _ in rounds) - min(one for _, one in rounds), 3)


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

    def new_shape() -> None:
        x = pc.tensor(np.ones((next(shapes), 3), np.float32), mesh)
        x + x

    return {"new_shape": round(min(per_call(new_shape, 10) for _ in range(20)), 1)}


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


TORCH = """
import json, os, time
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1")
torch.set_num_threads(1)
dist.init_process_group("gloo")
def per_call(function, number):
    begin = time.perf_counter()
    for _ in range(number):
        function()
    return (time.perf_counter() - begin) / number * 1e6
def beyond(ours, bare, number=500):
    ours()
    rounds = [(per_call(ours, number), per_call(bare, number)) for _ in range(40)]
    return round(min(one for one, _ in rounds) - min(one for _, one in rounds), 3)
found = {}
for name, mesh, sbp in (("1d", init_device_mesh("cpu", (1,)), [Replicate()]),
                        ("2d", init_device_mesh("cpu", (1, 1)), [Replicate()] * 2)):
    a = torch.ones(8, 8)
    x = distribute_tensor(a, mesh, sbp)
    w = distribute_tensor(a.clone().requires_grad_(), mesh, sbp)
    found.update({
        f"add_{name}": beyond(lambda: x + x, lambda: a + a),
        f"mul_{name}": beyond(lambda: x * x, lambda: a * a),
        f"relu_{name}": beyond(lambda: x.relu(), lambda: a.relu()),
        f"matmul_{name}": beyond(lambda: x @ x, lambda: a @ a),
        f"scalar_{name}": beyond(lambda: x + 1.0, lambda: a + 1.0),
        f"view_{name}": beyond(lambda: x.view(64), lambda: a.view(64)),
        f"from_local_{name}": beyond(lambda: DTensor.from_local(a, mesh, sbp), lambda: None),
    })
print(json.dumps(found))
dist.destroy_process_group()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-python", help="an interpreter that has PyTorch")
    options = parser.parse_args()
    ours = ops("1d", pc.Placement("cpu", [0])) | ops("2d", pc.Placement("cpu", [[0]]))
    ours |= new_shapes() | models()
    found: dict[str, object] = {"unit": "microseconds", "ours": ours}
    if options.torch_python:
        done = subprocess.run(
            [options.torch_python, "-c", TORCH], capture_output=True, text=True, check=True
        )
        theirs = json.loads(done.stdout.splitlines()[-1])
        found["torch"] = theirs
        found["ratio"] = {name: round(ours[name] / theirs[name], 3) for name in theirs}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
