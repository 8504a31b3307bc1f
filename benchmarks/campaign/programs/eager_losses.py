"""An eager program that ends by itself and prints all its losses: `eager_losses.py STEPS`."""

import json
import sys

import plancompiler as pc


def main() -> int:
    """Train; rank 0 prints the losses."""
    steps = int(sys.argv[1])
    losses = []
    try:
        world = pc.init(deadline=10.0)
        mesh = pc.Placement("cpu", list(range(world.size)))
        model = pc.nn.Linear(6, 2).place(mesh)
        optimizer = pc.optim.Adam(lr=0.01)
        for _ in range(steps):
            x = pc.normal((8, 6), placement=mesh, sbp="S(0)")
            error = model(x) - x.sum(axis=1, keepdims=True)
            loss = (error * error).mean()
            optimizer.minimize(loss)
            losses.append(loss.item())
            if len(losses) == 1:
                print("step 1/", file=sys.stderr, flush=True)
        world.close()
    except pc.PlanCompilerError as error:
        print(f"plancompiler: {error}", file=sys.stderr)
        return error.exit_code
    if world.rank == 0:
        print(json.dumps({"losses": losses}))
    return 0


sys.exit(main())
