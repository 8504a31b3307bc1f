"""Forecasts beside published step times of GPTs and Llamas on A100s, under one fit for all rows.

    python benchmarks/forecast_published.py [--only PATTERN] [--whole] [--given]

The rows are table 1 of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM" (2021, arXiv 2104.04473, section 5.1), and tables 3 and 5 of Korthikanti
et al., "Reducing Activation Recomputation in Large Transformer Models" (2022, arXiv 2205.05198,
section 6). Table 1 does not give micro-batches and interleaving: they are those of the script that
its authors publish with it (NVIDIA/Megatron-LM, `examples/sc21/run_table_1.sh`). It gives FLOP/s
per GPU; seconds follow by the paper's equation 3. Llamas on 64 A100s with fully sharded parameters
are those of TorchTitan's page on performance (pytorch/torchtitan, `docs/performance.md` of May
2024), in words per second and GPU. Of its activation checkpointing, "selective layer" computes
every second layer again; rows with "selective op" are left out, as what that keeps is not said.

The rows of the papers are jobs of `examples/gpt.py`, changed where those run the model in another
way: weights of layers, residual sums and scores of attention are in 16 bits, the scores are written
to memory (there was no fused kernel for attention), and what goes from stage to stage is a piece
from each rank of a tensor-parallel group ("scatter and gather", section 4.1 of the first). Dropout
is left out. A Llama is what its configuration of May 2024 runs, without a compiler: residual sums
and norms' results in 16 bits, norms op by op in float32 (in one kernel for 13B), rotary embedding
in float32, a gate that is its own kernel, and heads of keys and values written for each head of
queries (pytorch/torchtitan, commit c48ae39f4: `torchtitan/models/llama/model.py`,
`torchtitan/models/norms.py`, `train_configs`). For the rows of the second paper a product adds the
gradient of a weight to that of the micro-batches before, as its authors' code does since February
2022 (NVIDIA/Megatron-LM, commit 83b1e42f30), so that such a sum takes no time of its own.

Few efficiencies are fitted to all rows together by least squares of the logarithms of the ratios.
Jobs are forecast from ones with fewer layers, stages and micro-batches, as a step's time grows
along straight lines with each; `--whole` does without.
Data parallelism adds what the sum of the gradients takes by the cost model, after backward: these
runs did not overlap the two (section 6.3 of the second).
`--given` prints what the shipped machine file says, without a fit. Prints a JSON line per row, and
one with the efficiencies and the mean errors: of the forecasts, and of the FLOP/s per GPU that fits
the same rows best.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import plancompiler as pc
from plancompiler.costs import Machine, chosen_machine, link_between, primitive_cost
from plancompiler.forecasting.rank_classes import RankClasses, rank_classes
from plancompiler.forecasting.sharing import uses_of
from plancompiler.forecasting.task_time import TaskTimes, cost_of
from plancompiler.ir.task import Primitive
from plancompiler.lower.compile import build_graph
from plancompiler.passes import config_of
from plancompiler.plan.plan import Plan, Task
from plancompiler.simulate import simulate

LENGTH, VOCABULARY = 2048, 51200
HALF, BRAIN = "float16", "bfloat16"
FITTED = ("matrix_efficiency", "memory_efficiency", "link_efficiency")
PRODUCTS = ("matmul", "contract_leading")
ROUNDS = 2
"""How often the fit is made, each time around forecasts with the efficiencies of the last."""
STEP = 0.95
"""Times an efficiency, to see how forecasts follow it."""
Vector = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Row:
    """One published measurement."""

    name: str
    heads: int
    dim: int
    layers: int
    tp: int
    pp: int
    gpus: int
    batch: int
    micro: int
    """Sequences of a micro-batch."""
    chunks: int
    teraflops: float = 0.0
    """Per GPU, as table 1 counts them."""
    iteration: float = 0.0
    """Seconds, as table 5 has them."""
    selective: bool = False
    """Sequence parallelism, and only attention is computed again; otherwise all of a layer is."""
    fused_sums: bool = False
    """Whether products add up the gradients of weights."""

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp)

    @property
    def microbatches(self) -> int:
        return self.batch // (self.dp * self.micro)

    @property
    def flops(self) -> float:
        """What is computed in a step: equation 3 of the first paper, or, where less is computed
        again, appendix A of the second.
        """
        attention = LENGTH / self.dim
        size = self.batch * LENGTH * self.layers * self.dim**2
        if self.selective:
            output = VOCABULARY / (12 * self.layers * self.dim)
            return 72 * size * (1 + attention / 3 + output)
        return 96 * size * (1 + attention / 6 + VOCABULARY / (16 * self.layers * self.dim))

    @property
    def seconds(self) -> float:
        return self.iteration or self.flops / (self.gpus * self.teraflops * 1e12)


NARAYANAN = (
    Row("1.7B", 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137),
    Row("3.6B", 32, 3072, 30, 2, 1, 64, 512, 16, 1, 138),
    Row("7.5B", 32, 4096, 36, 4, 1, 128, 512, 16, 1, 142),
    Row("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 8, 1, 135),
    Row("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 4, 1, 138),
    Row("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 2, 3, 140),
    Row("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 2, 2, 148),
    Row("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 1, 2, 155),
    Row("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 1, 3, 163),
    Row("1008B", 160, 25600, 128, 8, 64, 3072, 3072, 1, 1, 163),
)
KORTHIKANTI = tuple(
    replace(
        row,
        name=f"{row.name} {'selective' if selective else 'full'}",
        iteration=seconds,
        selective=selective,
        fused_sums=True,
    )
    for row, full, present in (
        (Row("22B", 64, 6144, 48, 8, 1, 8, 4, 4, 1), 1.42, 1.10),
        (Row("175B", 96, 12288, 96, 8, 8, 64, 64, 1, 3), 18.13, 13.75),
        (Row("530B", 128, 20480, 105, 8, 35, 280, 280, 1, 3), 49.05, 37.83),
        (Row("1T", 160, 25600, 128, 8, 64, 512, 512, 1, 1), 94.42, 71.49),
    )
    for selective, seconds in ((False, full), (True, present))
)


@dataclass(frozen=True)
class LlamaRow:
    """A Llama that TorchTitan trained on 64 A100s, its parameters split over all of them."""

    name: str
    layers: int
    dim: int
    heads: int
    groups: int
    """Heads of keys and values."""
    hidden: int
    vocabulary: int
    length: int
    micro: int
    """Sequences of a device."""
    again: float
    """The part of the layers that are computed again."""
    tokens: float
    """That a device does in a second."""
    fused_norms: bool = False
    gpus: int = 64
    fused_sums: bool = False
    dp: int = 64
    pp: int = 1
    tp: int = 1
    microbatches: int = 1

    @property
    def flops(self) -> float:
        """What is computed in a step, counted as in the other tables: attention whole."""
        features = self.dim * (2 + 2 * self.groups / self.heads) + 3 * self.hidden
        of_layers = 6 * self.layers * (features * self.dim + 2 * self.length * self.dim)
        of_output = 6 * self.vocabulary * self.dim
        tokens = self.gpus * self.micro * self.length
        return tokens * (of_layers * (1 + self.again / 3) + of_output)

    @property
    def seconds(self) -> float:
        return self.micro * self.length / self.tokens


TORCHTITAN = (
    LlamaRow("Llama 2 13B", 40, 5120, 40, 40, 13824, 32000, 4096, 2, 0.0, 2162, True),
    LlamaRow("Llama 2 13B half", 40, 5120, 40, 40, 13824, 32000, 4096, 2, 0.5, 1914, True),
    LlamaRow("Llama 2 70B full", 80, 8192, 64, 8, 28672, 32000, 4096, 2, 1.0, 353),
    LlamaRow("Llama 3 8B half", 32, 4096, 32, 8, 14336, 128256, 8192, 1, 0.5, 2904),
    LlamaRow("Llama 3 70B full", 80, 8192, 64, 8, 28672, 128256, 8192, 1, 1.0, 331),
)
FEW_LAYERS = (2, 4)
"""Llamas are forecast from such with so many layers."""
AnyRow = Row | LlamaRow
ROWS: tuple[AnyRow, ...] = (*NARAYANAN, *KORTHIKANTI, *TORCHTITAN)


# --- the jobs -------------------------------------------------------------------------------------


def load_example() -> Any:
    """`examples/gpt.py`, with the model as the papers run it."""
    path = Path(__file__).resolve().parent.parent / "examples" / "gpt.py"
    spec = importlib.util.spec_from_file_location("published_gpt", path)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example
    spec.loader.exec_module(example)

    class PublishedGPT(example.GPT):  # type: ignore[misc]  # a class that is known when it runs
        selective = False

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            for block, stage in zip(self.blocks, self.stages, strict=True):
                for layer in linear_layers(block):
                    for name, given in list(vars(layer).items()):
                        if isinstance(given, pc.nn.Parameter):
                            setattr(layer, name, pc.nn.Parameter(given.shape, HALF, "zeros"))
                block.place(stage, example.on_mesh(stage, example.TENSOR_PARALLEL))
                block.forward = half_block(block)
                block.attention.forward = written_attention(block.attention, self.selective)

        def forward(self, tokens: pc.Value) -> pc.Value:
            x = (self.token(tokens) + self.position.value).cast(HALF)
            before = self.stages[0]
            for block, stage in zip(self.blocks, self.stages, strict=True):
                if stage is not before:
                    pieces = x.redistribute(sbp=["S(0)", "S(1)"])
                    x = pieces.redistribute(placement=stage).redistribute(sbp=["S(0)", "B"])
                    before = stage
                x = block(x)
            logits: pc.Value = self.head(self.norm(x.cast("float32")))
            return logits

    example.GPT = PublishedGPT
    return example


def linear_layers(block: Any) -> tuple[Any, ...]:
    """Those whose weights are kept in 16 bits."""
    attention = block.attention
    of_attention = (attention.query, attention.key, attention.value, attention.projection)
    return (*of_attention, block.mlp.fc1, block.mlp.fc2)


def half_block(block: Any) -> Callable[[pc.Value], pc.Value]:
    """The forward of a transformer block whose residual sums are in 16 bits."""

    def forward(x: pc.Value) -> pc.Value:
        x = x + block.attention(block.norm1(x.cast("float32")).cast(HALF))
        output: pc.Value = x + block.mlp(block.norm2(x.cast("float32")).cast(HALF))
        return output

    return forward


def written_attention(attention: Any, again: bool) -> Callable[[pc.Value], pc.Value]:
    """The forward of an attention whose scores are written to memory, and computed `again` for
    backward.
    """
    core = pc.checkpoint(pc.causal_attention) if again else pc.causal_attention

    def forward(x: pc.Value) -> pc.Value:
        batch, length, dim = x.shape
        heads = attention.heads
        query, key, value = (
            layer(x).reshape(batch, length, heads, dim // heads).transpose(0, 2, 1, 3)
            for layer in (attention.query, attention.key, attention.value)
        )
        joined = core(query, key, value).transpose(0, 2, 1, 3).reshape(batch, length, dim)
        output: pc.Value = attention.projection(joined)
        return output

    return forward


def job_of(
    example: Any, row: Row, machine: Machine, stages: int, microbatches: int, layers: int
) -> pc.Job:
    """A row's job on so many stages, with so many layers in each run of layers of a stage."""
    example.GPT.selective = row.selective
    job: pc.Job = example.build(
        layers=layers * row.chunks * stages,
        dim=row.dim,
        heads=row.heads,
        length=LENGTH,
        vocabulary=VOCABULARY,
        split_vocabulary=row.tp > 1,
        batch=row.micro * microbatches,
        dp=1,
        tp=row.tp,
        pp=stages,
        microbatches=microbatches,
        schedule="interleaved" if row.chunks > 1 else "1f1b" if stages > 1 else "gpipe",
        chunks=row.chunks,
        recompute="none" if row.selective else "auto",
        sequence_parallel=row.selective,
        precision=HALF,
    )
    return replace(job, config=replace(config_of(job), machine=machine.name))


class PublishedRMSNorm(pc.nn.Module):
    """Root mean square norm, op by op in float32 or in one."""

    def __init__(self, dim: int, fused: bool) -> None:
        self.weight = pc.nn.Parameter((dim,), "float32", "ones")
        self.fused = fused

    def forward(self, x: pc.Value) -> pc.Value:
        weight = self.weight.value.cast(BRAIN)
        result: pc.Value
        if self.fused:
            result = pc.rms_norm(x, weight)
        else:
            wide = x.cast("float32")
            rate = pc.rsqrt(pc.mean(wide**2.0, axis=-1, keepdims=True) + 1e-5)
            result = (wide * rate).cast(BRAIN) * weight
        return result


class LlamaBlock(pc.nn.Module):
    """A layer of a Llama (H. Touvron et al., 2023), with what its authors' PyTorch modules do."""

    def __init__(self, row: LlamaRow) -> None:
        self.heads, self.groups = row.heads, row.groups
        narrow = row.dim // row.heads * row.groups
        self.before = PublishedRMSNorm(row.dim, row.fused_norms)
        self.query = pc.nn.Linear(row.dim, row.dim, bias=False)
        self.key = pc.nn.Linear(row.dim, narrow, bias=False)
        self.value = pc.nn.Linear(row.dim, narrow, bias=False)
        self.projection = pc.nn.Linear(row.dim, row.dim, bias=False)
        self.between = PublishedRMSNorm(row.dim, row.fused_norms)
        self.gate = pc.nn.Linear(row.dim, row.hidden, bias=False)
        self.up = pc.nn.Linear(row.dim, row.hidden, bias=False)
        self.down = pc.nn.Linear(row.hidden, row.dim, bias=False)

    def forward(self, x: pc.Value) -> pc.Value:
        batch, length, dim = x.shape
        seen = self.before(x)
        query, key, value = (
            brain_linear(layer, seen).reshape(batch, length, heads, dim // self.heads)
            for layer, heads in (
                (self.query, self.heads),
                (self.key, self.groups),
                (self.value, self.groups),
            )
        )
        # Heads of keys and values are written for each head of queries.
        again = self.heads // self.groups
        query, key, value = (
            pc.repeat_interleave(each, times, 2).transpose(0, 2, 1, 3)
            if times > 1
            else each.transpose(0, 2, 1, 3)
            for each, times in ((turned(query), 1), (turned(key), again), (value, again))
        )
        joined = pc.scaled_dot_product_attention(query, key, value, causal=True)
        joined = joined.transpose(0, 2, 1, 3).reshape(batch, length, dim)
        x = x + brain_linear(self.projection, joined)
        seen = self.between(x)
        gated = pc.silu(brain_linear(self.gate, seen)) * brain_linear(self.up, seen)
        result: pc.Value = x + brain_linear(self.down, gated)
        return result


def brain_linear(layer: Any, x: pc.Value) -> pc.Value:
    """A linear layer of bfloat16, as mixed precision makes it: no cast is left of those here."""
    result: pc.Value = layer(x.cast("float32")).cast(BRAIN)
    return result


def turned(x: pc.Value) -> pc.Value:
    """Rotary embedding of [batch, length, heads, width] in float32."""
    wide = x.cast("float32").transpose(0, 2, 1, 3)
    result: pc.Value = pc.rotary_embedding(wide).transpose(0, 2, 1, 3).cast(BRAIN)
    return result


def llama_job(row: LlamaRow, machine: Machine, layers: int) -> pc.Job:
    """A row's job with so many layers."""
    mesh = pc.Placement("cuda", list(range(row.dp)), ("dp",))
    config = pc.Config(zero=3, precision="bfloat16", machine=machine.name)
    again = round(1 / row.again) if row.again else layers + 1
    with pc.job("llama", config=config) as job:
        shape = (row.dp * row.micro, row.length)
        tokens, targets = (
            pc.input(name, shape, "int64", mesh, "S(0)") for name in ("tokens", "targets")
        )
        embedding = pc.nn.Embedding(row.vocabulary, row.dim).place(mesh)
        blocks = pc.nn.ModuleList(LlamaBlock(row) for _ in range(layers)).place(mesh)
        norm = PublishedRMSNorm(row.dim, row.fused_norms).place(mesh)
        head = pc.nn.Linear(row.dim, row.vocabulary, bias=False).place(mesh)
        x = embedding(tokens).cast(BRAIN)
        for number, block in enumerate(blocks, start=1):
            if number % again == 0:
                pc.checkpoint(block)
            x = block(x)
        logits = brain_linear(head, norm(x)).cast("float32")
        loss = pc.cross_entropy(logits, targets, ignore_index=None)
        parameters = [
            each for part in (embedding, blocks, norm, head) for each in part.parameters()
        ]
        pc.optim.AdamW(parameters, lr=3e-4).minimize(loss)
        pc.output("loss", loss)
    return job


# --- forecasts ------------------------------------------------------------------------------------


def gpt_jobs(
    example: Any, row: Row, machine: Machine, whole: bool
) -> Iterator[tuple[float, pc.Job]]:
    """(weight, job): those of a row, or of shorter pipelines whose forecasts add up to its own."""
    stages, microbatches = row.pp, row.microbatches
    depth = row.layers // (stages * row.chunks)
    shapes, depths = {(stages, microbatches): 1.0}, {depth: 1.0}
    if not whole and microbatches > 1:
        low = min(stages, 2)
        few, many = (2 * low, 4 * low) if stages > low else (2, 4)
        steep = (microbatches - few) / (many - few)
        long = (stages - low) / low
        shapes = {(low, few): 1.0 - steep, (low, many): steep - long, (2 * low, many): long}
    if not whole and depth > 2:
        depths = {1: 2.0 - depth, 2: depth - 1.0}
    for (pipeline, count), weight in shapes.items():
        for layers, share in depths.items():
            if weight * share:
                yield weight * share, job_of(example, row, machine, pipeline, count, layers)


def llama_jobs(row: LlamaRow, machine: Machine, whole: bool) -> Iterator[tuple[float, pc.Job]]:
    """(weight, job): those of a row, or of ones with fewer layers."""
    few, many = FEW_LAYERS
    part = (row.layers - few) / (many - few)
    for layers, weight in ((row.layers, 1.0),) if whole else ((few, 1 - part), (many, part)):
        yield weight, llama_job(row, machine, layers)


class RowForecast:
    """The plans of jobs from whose forecasts a row's own follows, along straight lines."""

    def __init__(self, example: Any, row: AnyRow, machine: Machine, whole: bool) -> None:
        self.row = row
        jobs = (
            llama_jobs(row, machine, whole)
            if isinstance(row, LlamaRow)
            else gpt_jobs(example, row, machine, whole)
        )
        self.weights, self.classes = [], []
        """Of each job: how its seconds count."""
        for weight, job in jobs:
            self.weights.append(weight)
            self.classes.append(rank_classes(build_graph(job, job.world_size)))

    def seconds(self, machine: Machine) -> float:
        """A step of the row on a machine."""
        times = _Times(machine, self.row.fused_sums)
        return self.reduction(machine) + sum(
            weight * _first_step(each, times)
            for weight, each in zip(self.weights, self.classes, strict=True)
        )

    def reduction(self, machine: Machine) -> float:
        """Seconds in which the gradients of a stage, in float16, are summed over data-parallel
        ranks, where the job has one of each.
        """
        row = self.row
        if isinstance(row, LlamaRow) or row.dp == 1:
            return 0.0
        link = link_between(machine, range(0, row.dp * row.tp, row.tp))
        parameters = 12 * row.layers // row.pp * row.dim**2 + VOCABULARY * row.dim
        cost = primitive_cost(Primitive.ALL_REDUCE, row.dp, link)
        return cost.seconds(2 * parameters / row.tp)


class _Times(TaskTimes):
    """Seconds of tasks, where products may add up the gradients of weights."""

    def __init__(self, machine: Machine, fused_sums: bool) -> None:
        super().__init__(machine)
        self._fused_sums = fused_sums

    def seconds(self, plan: Plan, task: Task) -> float:
        if self._fused_sums and self._is_of_product(plan, task):
            return 0.0
        return super().seconds(plan, task)

    def _is_of_product(self, plan: Plan, task: Task) -> bool:
        """Whether a task adds up products, or makes them wide for that."""
        kind = _kind(task)
        if kind not in ("accumulate", "cast"):
            return False
        made = plan.task_by_id[plan.register_by_id[task.inputs[0]].producer]
        if kind == "accumulate":
            return _kind(made) in PRODUCTS or self._is_of_product(plan, made)
        (wide,) = (plan.register_by_id[each] for each in task.outputs)
        readers = [plan.task_by_id.get(each) for each in wide.consumers]
        return _kind(made) in PRODUCTS and all(
            each is not None and _kind(each) == "accumulate" for each in readers
        )


def _kind(task: Task) -> str:
    return str(getattr(task.spec, "kind", ""))


def _first_step(classes: RankClasses, times: TaskTimes) -> float:
    plans = classes.plans
    simulation = simulate(
        plans,
        cost_of(plans, times),
        uses=uses_of(plans, times, classes.stands_for),
        stands_for=classes.stands_for,
    )
    return simulation.makespan


def with_efficiencies(machine: Machine, values: Sequence[float]) -> Machine:
    """A machine with other efficiencies: of products, of memory, and of all links."""
    products, memory, links = values
    assert machine.network is not None
    device = replace(machine.device, matrix_efficiency=products, memory_efficiency=memory)
    node = replace(machine.node, bytes_per_second=links * machine.node.bytes_per_second)
    rate = links * machine.network.bytes_per_second
    return replace(
        machine, device=device, node=node, network=replace(machine.network, bytes_per_second=rate)
    )


def fitted(rows: Sequence[RowForecast], given: Machine, start: Sequence[float]) -> list[float]:
    """The efficiencies, at most 1, that bring the forecasts nearest to all rows, as far as their
    logarithms go along straight lines around `start` (a step of Gauss and Newton).
    """

    def errors(values: Sequence[float]) -> Vector:
        machine = with_efficiencies(given, values)
        return np.array([math.log(each.seconds(machine) / each.row.seconds) for each in rows])

    left = errors(start)
    print(f"around {list(start)} off by {np.abs(left).mean():.4f}", file=sys.stderr, flush=True)
    slopes = np.empty((len(rows), len(start)))
    for place in range(len(start)):
        lower = list(start)
        lower[place] *= STEP
        slopes[:, place] = (errors(lower) - left) / math.log(STEP)
    changes, most = np.zeros(len(start)), -np.log(np.array(start))
    free = list(range(len(start)))
    while free:
        changes[free] = 0.0
        rest = -(left + slopes @ changes)
        changes[free], *_ = np.linalg.lstsq(slopes[:, free], rest, rcond=None)
        above = [each for each in free if changes[each] > most[each]]
        if not above:
            break
        changes[above] = most[above]  # they stay at 1
        free = [each for each in free if each not in above]
    return [float(each) for each in np.array(start) * np.exp(changes)]


def main() -> None:
    """Forecast, fit, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--given", action="store_true")
    asked = parser.parse_args()
    given = chosen_machine("a100-sxm")
    example = load_example()
    rows = []
    for row in ROWS:
        if re.search(asked.only, row.name):
            rows.append(RowForecast(example, row, given, asked.whole))
            print(f"{row.name}: compiled", file=sys.stderr, flush=True)
    values = [given.device.matrix_efficiency, given.device.memory_efficiency, 1.0]
    for _ in range(0 if asked.given else ROUNDS):
        print(f"fitting around {values}", file=sys.stderr, flush=True)
        values = fitted(rows, given, values)
    machine = with_efficiencies(given, values)
    rate = math.exp(statistics.fmean(math.log(_rate(each.row)) for each in rows))
    errors, constants = [], []
    for each in rows:
        row, seconds = each.row, each.seconds(machine)
        errors.append(seconds / row.seconds - 1.0)
        constants.append(_rate(row) / rate - 1.0)
        _print(
            name=row.name,
            published_seconds=row.seconds,
            forecast_seconds=seconds,
            error=errors[-1],
            error_of_constant=constants[-1],
        )
    _print(
        rows=len(rows),
        **dict(zip(FITTED, values, strict=True)),
        mean_error=statistics.fmean(map(abs, errors)),
        worst_error=max(map(abs, errors)),
        constant_teraflops=rate / 1e12,
        mean_error_of_constant=statistics.fmean(map(abs, constants)),
    )


def _rate(row: AnyRow) -> float:
    return row.flops / (row.gpus * row.seconds)


def _print(**fields: Any) -> None:
    rounded = {
        key: round(value, 4) if isinstance(value, float) else value for key, value in fields.items()
    }
    print(json.dumps({"benchmark": "forecast_published"} | rounded), flush=True)


if __name__ == "__main__":
    main()
