"""A peer of benchmarks/gpu_block.py: a GPT block in PyTorch on one GPU, eager or compiled.

    python benchmarks/peers/torch_block.py --how eager --dim 768 --heads 12 --batch 8 --length 1024

All of it in float16, with the loss and optimizer of gpu_block.py. On each line of stdin, a number
of steps, it runs so many and prints one JSON line with the seconds per step, up to the end of the
last on the device. The first line it prints, once it is ready, says what it is. Needs only `torch`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
from torch_ddp import Block


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--how", choices=("eager", "compiled"), required=True)
    for name in ("dim", "heads", "batch", "length"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Block(options.dim, options.heads, 1).to("cuda", torch.float16)
    shape = (options.batch, options.length, options.dim)
    x = torch.randn(shape, device="cuda", dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    forward = torch.compile(model) if options.how == "compiled" else model

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = forward(x).square().mean()
        loss.backward()
        optimizer.step()
        detached: torch.Tensor = loss.detach()
        return detached

    for _ in range(3):
        loss = step()
    torch.cuda.synchronize()
    say({"version": torch.__version__, "loss": float(loss)})
    for line in sys.stdin:
        steps = int(line)
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        say({"seconds": (time.perf_counter() - begin) / steps})


def say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
