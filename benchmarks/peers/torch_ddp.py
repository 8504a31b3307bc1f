"""A peer of benchmarks/step.py: a training step in PyTorch, data-parallel over processes with gloo.

    python benchmarks/peers/torch_ddp.py --model mlp --rank 0 --ranks 2 --meet FILE

Every rank is a process with one thread. On each line of stdin, a number of steps, rank 0 runs so
many with the others and prints one JSON line with the seconds per step. The first line it prints,
once it is ready, says what it is: version, number of parameters, loss before any step. Models,
batches and optimizers are those of step.py. Needs only `torch`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

STD = 0.02


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.projection = nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        for linear in (self.query, self.key, self.value, self.projection, self.fc1, self.fc2):
            writes = linear in (self.projection, self.fc2)
            nn.init.normal_(linear.weight, std=STD / math.sqrt(2 * layers) if writes else STD)
            nn.init.zeros_(linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        normed = self.norm1(x)
        query, key, value = (
            layer(normed).view(batch, length, self.heads, dim // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, dim))
        hidden = functional.gelu(self.fc1(self.norm2(x)), approximate="tanh")
        return x + self.fc2(hidden)


class GPT(nn.Module):
    """The preset tiny of examples/gpt.py."""

    def __init__(self, layers: int = 4, dim: int = 256, heads: int = 4, length: int = 128) -> None:
        super().__init__()
        self.token = nn.Embedding(256, dim)
        self.position = nn.Parameter(torch.randn(length, dim) * STD)
        self.blocks = nn.Sequential(*(Block(dim, heads, layers) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 256, bias=False)
        nn.init.normal_(self.token.weight, std=STD)
        nn.init.normal_(self.head.weight, std=STD)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits.flatten(0, 1)


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )


def main() -> None:
    """Serve one rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("mlp", "gpt"), required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--meet", required=True, help="a file by which the ranks find each other")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options.meet}",
        rank=options.rank,
        world_size=options.ranks,
        timeout=timedelta(seconds=120),
    )
    torch.manual_seed(options.rank)
    if options.model == "mlp":
        model, rows = perceptron(), 512 // options.ranks
        x, y = torch.randn(rows, 784), torch.randint(0, 10, (rows,))
    else:
        model = GPT()
        x, y = torch.randint(0, 256, (8, 128)), torch.randint(0, 256, (8 * 128,))
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer: torch.optim.Optimizer
    if options.model == "mlp":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    else:
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(parallel(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    first = step()
    if options.rank == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        say({"version": torch.__version__, "parameters": count, "loss": first})
    order = torch.zeros(1, dtype=torch.int64)
    while True:
        if options.rank == 0:
            # The end of stdin is the number 0: all ranks end.
            order[0] = int(sys.stdin.readline() or 0)
        dist.broadcast(order, 0)
        steps = int(order[0])
        if not steps:
            break
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        if options.rank == 0:
            say({"seconds": (time.perf_counter() - begin) / steps})
    dist.destroy_process_group()


def say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
