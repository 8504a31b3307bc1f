"""The part of benchmarks/eager.py that takes two ranks: `plancompiler launch -n 2` runs it.

Rank 0 prints one JSON line, in microseconds beyond the same NumPy calls and collectives.
"""

from __future__ import annotations

import json

import numpy as np

import plancompiler as pc
from benchmarks.eager import beyond, per_call

ROUNDS = 60


def main() -> None:
    """Measure on all ranks, in step."""
    world = pc.init()
    ranks = list(range(world.size))
    mesh = pc.Placement("cpu", ranks)
    comm = world.comm.context(ranks)
    ones = np.ones
    x = pc.tensor(ones((4, 8), np.float32), mesh)
    first = pc.tensor(ones((16, 8), np.float32), mesh, "S(0)", requires_grad=True)
    second = pc.tensor(ones((8, 16), np.float32), mesh, "S(1)", requires_grad=True)
    a, v1, v2 = x.numpy(), first.to_local(), second.to_local()

    def tp_mlp() -> None:
        hidden = pc.matmul(x, first, transpose_b=True).relu()
        out = pc.matmul(hidden, second, transpose_b=True)
        out.redistribute(sbp="B").sum().backward()
        first.grad = second.grad = None

    def bare() -> None:
        hidden = np.maximum(np.matmul(a, v1.T), 0)
        out = comm.all_reduce(np.matmul(hidden, v2.T))
        np.sum(out)
        grad = np.ones_like(out)
        np.matmul(grad.T, hidden)
        np.matmul(np.multiply(np.matmul(grad, v2), hidden > 0).T, a)

    split = pc.tensor(ones((8, 8), np.float32), mesh, "S(0)")
    part = split.to_local()
    times = {
        "tp_mlp": beyond(tp_mlp, bare, 5, ROUNDS),
        "redistribute_split": beyond(
            lambda: split.redistribute(sbp="B"), lambda: comm.all_gather(part), 20, ROUNDS
        ),
        "bare_all_reduce": round(
            min(per_call(lambda: comm.all_reduce(a), 20) for _ in range(ROUNDS)), 1
        ),
    }
    if world.rank == 0:
        print(json.dumps(times))


if __name__ == "__main__":
    main()
