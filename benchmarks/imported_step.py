"""Training steps of an imported GPT-2 beside `examples/gpt.py` and beside PyTorch.

    python -m benchmarks.imported_step [--rounds 30] [--layers 4]

The three have the sizes of the preset `tiny`. Prints one JSON line per layout with the number of
collectives of rank 0 in a step, and how many of them each further layer adds. Then
it trains all three on one rank with one thread, a step of each in turns, and prints medians in
seconds: `to_gpt` and `to_pytorch` are medians of the ratios of neighbouring steps.

It needs PyTorch and transformers, as `scripts/test --importers` installs them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import plancompiler as pc
from plancompiler.cli.job_file import load_job
from plancompiler.ir.task import TaskKind
from plancompiler.lower.compile import compile_plans

GPT = str(Path(__file__).resolve().parent.parent / "examples" / "gpt.py")
BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 8, 128, 256, 4, 256
LAYOUT = {
    "*.attn.c_attn.weight": ["B", "S(2)"],
    "*.attn.c_attn.bias": ["B", "S(1)"],
    "*.attn.c_proj.weight": ["B", "S(0)"],
    "*.mlp.c_fc.weight": ["B", "S(1)"],
    "*.mlp.c_fc.bias": ["B", "S(0)"],
    "*.mlp.c_proj.weight": ["B", "S(0)"],
}
"""As `examples/gpt.py` splits its blocks; query, key and value are the axis before the last."""


def module_of(layers: int) -> Any:
    """GPT-2 with the sizes of `examples/gpt.py`, without dropout."""
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=WIDTH,
        n_head=HEADS,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def example() -> dict[str, Any]:
    """A batch."""
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def imported_job(module: Any, dp: int, tp: int) -> pc.Job:
    """A training step of the imported module."""
    mesh = pc.Placement("cpu", np.arange(dp * tp).reshape(dp, tp), ("dp", "tp"))
    model = pc.from_torch(module, example(), parts=tp > 1).place(mesh, LAYOUT if tp > 1 else {})
    with pc.job("imported") as job:
        given = {
            name: pc.input(name, (BATCH, LENGTH), "int64", mesh, ["S(0)", "B"])
            for name in ("input_ids", "labels")
        }
        loss = model(**given).loss
        pc.optim.AdamW(1e-3, betas=(0.9, 0.95), weight_decay=0.01).minimize(loss)
        pc.output("loss", loss)
    return job


def own_job(layers: int, dp: int, tp: int) -> pc.Job:
    """A training step of `examples/gpt.py`."""
    return load_job(GPT, {"layers": layers, "dp": dp, "tp": tp})


def collectives(job: pc.Job, ranks: int) -> int:
    """Of rank 0 in a step."""
    plan = compile_plans(job, ranks, only_ranks=(0,)).plans[0]
    return sum(task.kind is TaskKind.COLLECTIVE_BOXING for task in plan.tasks)


def collective_row(dp: int, tp: int, layers: int) -> dict[str, Any]:
    """Collectives in one layout."""
    row: dict[str, Any] = {"benchmark": "imported_step", "section": "collectives"}
    row |= {"dp": dp, "tp": tp}
    makers: dict[str, Callable[[int], pc.Job]] = {
        "imported": lambda count: imported_job(module_of(count), dp, tp),
        "gpt": lambda count: own_job(count, dp, tp),
    }
    for name, make in makers.items():
        few, many = (collectives(make(count), dp * tp) for count in (layers, 2 * layers))
        row |= {name: few, f"{name}_per_layer": (many - few) / layers}
    return row


def step_row(rounds: int, layers: int) -> dict[str, Any]:
    """Seconds of steps, in turns."""
    torch.set_num_threads(1)
    module, batch = module_of(layers), example()
    job = imported_job(module, 1, 1)
    feeds = {name: batch[name].numpy() for name in ("input_ids", "labels")}
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.01)

    def pytorch() -> float:
        optimizer.zero_grad()
        loss = module(**batch).loss
        loss.backward()
        optimizer.step()
        return float(loss)

    with (
        pc.run(job, ranks=1, cache=False) as imported,
        pc.run(own_job(layers, 1, 1), ranks=1, cache=False) as own,
    ):
        steps: dict[str, Callable[[], Any]] = {
            "imported": lambda: imported.step(**feeds),
            "gpt": own.step,
            "pytorch": pytorch,
        }
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(rounds + 3):
            for name, step in steps.items():
                begin = time.perf_counter()
                step()
                if number >= 3:  # the first steps touch their memory
                    seconds[name].append(time.perf_counter() - begin)
    row: dict[str, Any] = {"benchmark": "imported_step", "section": "steps", "layers": layers}
    row |= {name: round(statistics.median(each), 4) for name, each in seconds.items()}
    for other in ("gpt", "pytorch"):
        ratios = [a / b for a, b in zip(seconds["imported"], seconds[other], strict=True)]
        row[f"to_{other}"] = round(statistics.median(ratios), 3)
    return {**row, "load_average": round(os.getloadavg()[0], 1)}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    for dp, tp in ((2, 1), (1, 2), (2, 2)):
        print(json.dumps(collective_row(dp, tp, options.layers)), flush=True)
    print(json.dumps(step_row(options.rounds, options.layers)))


if __name__ == "__main__":
    main()
