"""PyTorch's DTensor, for benchmarks/eager.py: what a call costs beyond the plain tensors' calls.

    python torch_dtensor.py FOLDER             one process, meshes of one device
    python torch_dtensor.py FOLDER RANK SIZE   SIZE processes, which find each other in FOLDER
    python torch_dtensor.py new 1d|2d          one process, as one of 2 or of 2 x 2 ranks

Rank 0 prints one JSON line, in microseconds. The measurements are those of benchmarks/eager.py,
benchmarks/eager_ranks.py and benchmarks/eager_new.py, on the same shapes.
"""

import json
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)

Call = Callable[..., object]


def per_call(function: Call, number: int) -> float:
    begin = time.perf_counter()
    for _ in range(number):
        function()
    return (time.perf_counter() - begin) / number * 1e6


def beyond(theirs: Call, bare: Call, number: int = 200, rounds: int = 60) -> float:
    theirs()
    bare()
    times = [(per_call(theirs, number), per_call(bare, number)) for _ in range(rounds)]
    return round(min(one for one, _ in times) - min(one for _, one in times), 3)


def ops(name: str, mesh: DeviceMesh, placements: list[Replicate]) -> dict[str, float]:
    a = torch.ones(8, 8)
    x = distribute_tensor(a, mesh, placements)
    w = distribute_tensor(a.clone(), mesh, placements).requires_grad_()
    v = a.clone().requires_grad_()
    return {
        f"add_{name}": beyond(lambda: x + x, lambda: a + a),
        f"mul_{name}": beyond(lambda: x * x, lambda: a * a),
        f"relu_{name}": beyond(x.relu, a.relu),
        f"matmul_{name}": beyond(lambda: x @ x, lambda: a @ a),
        f"recorded_matmul_{name}": beyond(lambda: w @ x, lambda: v @ a),
        f"scalar_{name}": beyond(lambda: x + 1.0, lambda: a + 1.0),
        f"view_{name}": beyond(lambda: x.view(64), lambda: a.view(64)),
        f"from_local_{name}": beyond(lambda: DTensor.from_local(a, mesh, placements), lambda: None),
    }


def new_shape(mesh: DeviceMesh) -> float:
    shapes = iter(range(9, 10_000))

    def new() -> float:
        made = [
            distribute_tensor(torch.ones(next(shapes), 3), mesh, [Replicate()]) for _ in range(10)
        ]
        given = iter(made)

        def add() -> None:
            x = next(given)
            x + x

        return per_call(add, len(made))

    return round(min(new() for _ in range(20)), 1)


def models(mesh: DeviceMesh) -> dict[str, float]:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)
        )

    plain, whole = net(), distribute_module(net(), mesh)
    a = torch.ones(4, 8)
    x = distribute_tensor(a, mesh, [Replicate()])
    times = {"mlp": beyond(lambda: whole(x).sum().backward(), lambda: plain(a).sum().backward(), 5)}
    for name, foreach in (("adamw_one_by_one", False), ("adamw", True)):
        theirs = torch.optim.AdamW(whole.parameters(), foreach=foreach)
        bare = torch.optim.AdamW(plain.parameters(), foreach=foreach)
        times[name] = beyond(theirs.step, bare.step, 5)
    return times


def two_ranks(mesh: DeviceMesh) -> dict[str, float]:
    w1, w2, a = torch.ones(16, 8), torch.ones(8, 16), torch.ones(4, 8)
    x = distribute_tensor(a, mesh, [Replicate()])
    first = distribute_tensor(w1, mesh, [Shard(0)]).requires_grad_()
    second = distribute_tensor(w2, mesh, [Shard(1)]).requires_grad_()
    v1, v2 = (t.to_local().detach().clone().requires_grad_() for t in (first, second))

    def tp_mlp() -> None:
        hidden = nn.functional.linear(x, first).relu()
        nn.functional.linear(hidden, second).redistribute(placements=[Replicate()]).sum().backward()

    def bare() -> None:
        out = nn.functional.linear(nn.functional.linear(a, v1).relu(), v2)
        with torch.no_grad():
            dist.all_reduce(out)
        out.sum().backward()

    split = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    part, whole = split.to_local(), torch.empty(8, 8)
    return {
        "tp_mlp": beyond(tp_mlp, bare, 5),
        "redistribute_split": beyond(
            lambda: split.redistribute(placements=[Replicate()]).to_local(),
            lambda: dist.all_gather_into_tensor(whole, part),
            20,
        ),
        "bare_all_reduce": round(
            min(per_call(lambda: dist.all_reduce(a), 20) for _ in range(40)), 1
        ),
    }


LAYOUTS = {
    "1d": {"rows": [Shard(0)], "columns": [Shard(1)], "whole": [Replicate()]},
    "2d": {
        "rows": [Shard(0), Replicate()],
        "columns": [Shard(1), Shard(1)],
        "whole": [Replicate(), Replicate()],
    },
}
CASES = [
    ("sin", torch.sin, torch.float32, ["rows"]),
    ("add", torch.add, torch.float64, ["columns", "columns"]),
    ("matmul", torch.matmul, torch.float32, ["rows", "whole"]),
    ("sum", lambda x: torch.sum(x, 1), torch.float64, ["rows"]),
    ("softmax", lambda x: torch.softmax(x, -1), torch.float32, ["rows"]),
    ("transpose", torch.t, torch.float64, ["columns"]),
    ("maximum", torch.maximum, torch.float32, ["rows", "rows"]),
    ("concat", lambda x, y: torch.cat([x, y]), torch.float64, ["columns", "columns"]),
    ("cumsum", lambda x: torch.cumsum(x, 0), torch.float32, ["columns"]),
    ("max", torch.amax, torch.float64, ["rows"]),
]


def all_new(name: str) -> dict[str, float]:
    """The cases of benchmarks/eager_new.py, with a backend that exchanges nothing."""
    # Here, as only this mode needs it.
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415  # see above

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = DeviceMesh("cpu", {"1d": [0, 1], "2d": [[0, 1], [2, 3]]}[name])
    layouts = LAYOUTS[name]

    def tensor(extent: int, dtype: torch.dtype, layout: str) -> DTensor:
        shape = [extent, extent]
        for size, placement in zip(mesh.shape, layouts[layout], strict=True):
            if isinstance(placement, Shard):
                shape[placement.dim] //= size
        return DTensor.from_local(torch.ones(shape, dtype=dtype), mesh, layouts[layout])

    def timed(function: Call, *tensors: DTensor) -> float:
        begin = time.perf_counter()
        function(*tensors)
        return round((time.perf_counter() - begin) * 1e6, 1)

    times = {"first_op": timed(torch.neg, tensor(8, torch.float32, "whole"))}
    for number, (kind, function, dtype, chosen) in enumerate(CASES):
        given = [tensor(12 + 4 * number, dtype, each) for each in chosen]
        times[kind] = timed(function, *given)
    return times


def main() -> None:
    """Measure and print."""
    if sys.argv[1] == "new":
        print(json.dumps(all_new(sys.argv[2])))
        return
    folder, *rest = sys.argv[1:]
    rank, size = map(int, rest) if rest else (0, 1)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    if size == 1:
        line = init_device_mesh("cpu", (1,))
        times = ops("1d", line, [Replicate()])
        times |= ops("2d", init_device_mesh("cpu", (1, 1)), [Replicate()] * 2)
        times |= {"new_shape": new_shape(line), **models(line)}
    else:
        times = two_ranks(init_device_mesh("cpu", (size,)))
    if rank == 0:
        print(json.dumps(times))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
