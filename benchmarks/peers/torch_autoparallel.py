"""A peer of benchmarks/search_autoparallel.py: PyTorch's AutoParallel places a Llama on a mesh.

    python benchmarks/peers/torch_autoparallel.py --config '{"num_hidden_layers": 4, …}' \
        --batch 8 --length 2048 --mesh 8

Prints one JSON line: seconds from the module on to the solution, and of these the parts that
AutoParallel logs; the variables and rows of its integer program; its objective, which is in
microseconds; and the collectives of the solution, counted along each axis of the mesh.

It follows AutoParallel's own example for transformers (`examples/example_hf.py`), with the loss in
the model, weights of one dtype, and what makes it run without a GPU:

- The mesh and the inputs are on `cpu`: without CUDA, PyTorch differentiates no tensors of `cuda`.
- Attention is traced as CUDA's fused operation, as it is on a GPU. For the CPU's own operation
  AutoParallel has no placements other than whole tensors.
- Costs are those of an H100: its name is given to the cost model, and its nodes of 8.

No tensor has storage, and the process group is a fake one. Needs PyTorch, transformers and
AutoParallel, which has no releases: `pip install torch==2.13.0 transformers==5.23.0`, and `pip
install` of a checkout of its repository, meta-pytorch/autoparallel (measured: a54c252 of June
2026), in an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import operator
import resource
import time
from collections import Counter
from typing import Any

import torch
import transformers
from autoparallel.api import AutoParallel
from autoparallel.cost_models.nccl_cost_model import h100_topo_config
from autoparallel.graph_passes.graph_utils import all_input_nodes
from torch.distributed.tensor import Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

DEVICES_PER_NODE = 8
SECONDS = {
    "Graph tracing took": "trace",
    "Placement options took": "options",
    "ILP construction took": "program",
    "ILP solve took": "solve",
}
"""Parts by how the messages that tell of them begin; the seconds are their first argument."""


class Log(logging.Handler):
    """What AutoParallel says of its work."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}
        self.sizes: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        for begin, part in SECONDS.items():
            if record.msg.startswith(begin):
                self.seconds[part] = record.args[0]
        if record.msg.startswith("ILP problem size"):
            self.sizes = {"variables": record.args[0], "rows": record.args[2]}


class WithLoss(torch.nn.Module):
    """A model whose output is its loss."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=labels).loss


def fused(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: None,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention as one operation, as transformers calls it."""
    key, value = (each.repeat_interleave(module.num_key_value_groups, 1) for each in (key, value))
    attention = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001  # has no other name
    out = attention(query, key, value, 0.0, True, scale=scaling)[0]
    return out.transpose(1, 2).contiguous(), None


def collectives(solution: dict[Any, Any]) -> dict[str, int]:
    """How many of each kind; operations that read a tensor in the same placements share one."""
    changes = {}
    for node, chosen in solution.items():
        producers = [each for each in all_input_nodes(node) if each in solution]
        for producer, wanted in zip(producers, chosen.input_specs, strict=False):
            made, index = solution[producer].output_specs, None
            if node.target is operator.getitem:
                index = node.args[1]
                made = made[index]
            if wanted is not None:
                changes[producer, index, wanted.placements] = made.placements
    return Counter(
        kind
        for (_, _, wanted), made in changes.items()
        for before, after in zip(made, wanted, strict=True)
        if (kind := collective(before, after))
    )


def collective(before: Any, after: Any) -> str | None:
    """What takes a tensor from one placement along an axis to another."""
    if before == after or before.is_replicate():
        return None
    if before.is_partial():
        return "all_reduce" if after.is_replicate() else "reduce_scatter"
    return "all_gather" if after.is_replicate() else "all_to_all"


def main() -> None:
    """Search and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=json.loads, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--mesh", required=True, help="such as 4x8")
    options = parser.parse_args()
    shape = tuple(map(int, options.mesh.split("x")))
    ranks = math.prod(shape)
    log = Log()
    logger = logging.getLogger("autoparallel")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(log)
    logger.propagate = False
    torch.cpu.get_device_name = lambda device=None: "H100"
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    machine = h100_topo_config(ranks // DEVICES_PER_NODE, DEVICES_PER_NODE)
    transformers.AttentionInterface.register("fused", fused)
    config = transformers.LlamaConfig(
        **options.config, use_cache=False, attn_implementation="fused"
    )
    with torch.device("meta"):
        model = WithLoss(transformers.AutoModelForCausalLM.from_config(config))

    def inputs() -> tuple[torch.Tensor, ...]:
        rows = (options.batch, options.length)
        return tuple(torch.randint(0, config.vocab_size, rows) for _ in ("ids", "labels"))

    begin = time.perf_counter()
    with AutoParallel(model, inputs, mesh, cost_model=machine) as search:
        search.add_parameter_memory_constraint(low=None, high=None)
        split = (Shard(0), *[Replicate()] * (len(shape) - 1))
        search.add_input_constraints([split, split])
        solution = search.optimize_placement()
        seconds = time.perf_counter() - begin
        objective = search.sharding_optimizer.prob.objective.value()
    print(
        json.dumps(
            {
                "seconds": seconds,
                "parts": log.seconds,
                **log.sizes,
                "objective_seconds": objective * 1e-6,
                "collectives": collectives(solution),
                "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
