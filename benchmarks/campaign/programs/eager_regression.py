"""The same with eager tensors, one process per rank: `eager_regression.py STEPS`."""

import sys

import plancompiler as pc


def main() -> None:
    """Train, and say how it went."""
    steps = int(sys.argv[1])
    world = pc.init()
    mesh = pc.Placement("cpu", list(range(world.size)))
    model = pc.nn.Linear(6, 2).place(mesh)
    optimizer = pc.optim.Adam(lr=0.01)
    for step in range(steps):
        x = pc.normal((8, 6), placement=mesh, sbp="S(0)")
        error = model(x) - x.sum(axis=1, keepdims=True)
        loss = (error * error).mean()
        optimizer.minimize(loss)
        value = loss.item()
        if world.rank == 0 and step == 0:
            print(f"step 1/ loss {value}", flush=True)
    if world.rank == 0:
        print(f"done {value}", flush=True)


main()
