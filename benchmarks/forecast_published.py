"""Forecasts beside published step times of GPT models on A100s, under one fit for all rows.

    python benchmarks/forecast_published.py [--only PATTERN] [--whole] [--given]

The rows are table 1 of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM" (2021, arXiv 2104.04473, section 5.1), and tables 3 and 5 of Korthikanti
et al., "Reducing Activation Recomputation in Large Transformer Models" (2022, arXiv 2205.05198,
section 6). Table 1 does not give micro-batches and interleaving: they are those of the script that
its authors publish with it (NVIDIA/Megatron-LM, `examples/sc21/run_table_1.sh`). It gives FLOP/s
per GPU; seconds follow by the paper's equation 3.

Each row is a job of `examples/gpt.py`, changed where those papers run the model in another way:
scores of attention are written to memory (there was no fused kernel for attention), and what goes
from stage to stage goes in float16, a piece from each rank of a tensor-parallel group ("scatter and
gather", section 4.1 of the first). Dropout is left out.

Few efficiencies are fitted to all rows together by least squares of the logarithms of the ratios.
Pipelines are forecast from shorter ones with the same layers per stage and with fewer
micro-batches, as a step's time grows along straight lines with either; `--whole` does without.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import plancompiler as pc
from plancompiler.costs import Machine, chosen_machine, link_between, primitive_cost
from plancompiler.forecasting.job_forecast import simulated_step
from plancompiler.forecasting.rank_classes import RankClasses, rank_classes
from plancompiler.forecasting.task_time import TaskTimes
from plancompiler.ir.task import Primitive
from plancompiler.lower.compile import build_graph
from plancompiler.passes import config_of

LENGTH, VOCABULARY = 2048, 51200
FITTED = ("matrix_efficiency", "memory_efficiency", "link_efficiency")
ROUNDS = 1
"""How often the fit is made, each time around forecasts with the efficiencies of the last."""


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
    )
    for row, full, present in (
        (Row("22B", 64, 6144, 48, 8, 1, 8, 4, 4, 1), 1.42, 1.10),
        (Row("175B", 96, 12288, 96, 8, 8, 64, 64, 1, 3), 18.13, 13.75),
        (Row("530B", 128, 20480, 105, 8, 35, 280, 280, 1, 3), 49.05, 37.83),
        (Row("1T", 160, 25600, 128, 8, 64, 512, 512, 1, 1), 94.42, 71.49),
    )
    for selective, seconds in ((False, full), (True, present))
)


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
            for block in self.blocks:
                block.attention.forward = written_attention(block.attention, self.selective)

        def forward(self, tokens: pc.Value) -> pc.Value:
            x = self.token(tokens) + self.position.value
            before = self.stages[0]
            for block, stage in zip(self.blocks, self.stages, strict=True):
                if stage is not before:
                    pieces = x.cast("float16").redistribute(sbp=["S(0)", "S(1)"])
                    x = pieces.redistribute(placement=stage).redistribute(sbp=["S(0)", "B"])
                    x = x.cast("float32")
                    before = stage
                x = block(x)
            logits: pc.Value = self.head(self.norm(x))
            return logits

    example.GPT = PublishedGPT
    return example


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


def job_of(example: Any, row: Row, machine: Machine, stages: int, microbatches: int) -> pc.Job:
    """A row's job, with as many layers per stage, on so many stages."""
    example.GPT.selective = row.selective
    job: pc.Job = example.build(
        layers=row.layers // row.pp * stages,
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
        precision="float16",
    )
    return replace(job, config=replace(config_of(job), machine=machine.name))


# --- forecasts ------------------------------------------------------------------------------------


class RowForecast:
    """The plans of a row, or of pipelines from whose forecasts its own follows."""

    def __init__(self, example: Any, row: Row, machine: Machine, whole: bool) -> None:
        self.row = row
        stages, microbatches = row.pp, row.microbatches
        near = [(stages, microbatches)]
        if not whole and microbatches > 1:
            low = min(stages, 2)
            few = max(2, low)
            near = [(low, few), (low, 2 * few)]
            if stages > low:
                near = [(low, 2 * low), (low, 4 * low), (2 * low, 4 * low)]
        self.shapes = near
        self.classes = [
            rank_classes(build_graph(job, job.world_size))
            for job in (job_of(example, row, machine, *shape) for shape in near)
        ]

    def seconds(self, machine: Machine) -> float:
        """A step of the row on a machine."""
        times = [_first_step(each, machine) for each in self.classes]
        seconds = times[0]
        if len(times) > 1:
            (stages, few), (_, more) = self.shapes[:2]
            slope = (times[1] - times[0]) / (more - few)
            seconds += slope * (self.row.microbatches - few)
            if len(times) > 2:
                longer = (times[2] - times[1]) / (self.shapes[2][0] - stages)
                seconds += longer * (self.row.pp - stages)
        return seconds + self.reduction(machine)

    def reduction(self, machine: Machine) -> float:
        """Seconds in which the gradients of a stage, in float16, are summed over data-parallel
        ranks.
        """
        row = self.row
        if row.dp == 1:
            return 0.0
        link = link_between(machine, range(0, row.dp * row.tp, row.tp))
        parameters = 12 * row.layers // row.pp * row.dim**2 + VOCABULARY * row.dim
        cost = primitive_cost(Primitive.ALL_REDUCE, row.dp, link)
        return cost.seconds(2 * parameters / row.tp)

    def busy(self, machine: Machine) -> float:
        """Seconds in which the busiest rank of the longest pipeline works or communicates."""
        times = TaskTimes(machine)
        return max(_busy(each.plan, times) for each in self.classes[-1].classes)


def _first_step(classes: RankClasses, machine: Machine) -> float:
    simulation, _ = simulated_step(classes.plans, machine, len(classes.of_rank), classes.stands_for)
    return max(run.end for run in simulation.runs if run.step == 0)


def _busy(plan: Any, times: TaskTimes) -> float:
    return sum(
        times.seconds(plan, task)
        * (plan.microbatches if plan.segments[task.segment].kind.per_microbatch else 1)
        for task in plan.tasks
    )


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
    """The efficiencies that bring the forecasts nearest to all rows: descent along each in turn.

    Around the forecasts of `start` a step is taken to be as many times longer as its busiest rank
    is busy for longer.
    """
    machine = with_efficiencies(given, start)
    ratios = [row.seconds(machine) / row.busy(machine) / row.row.seconds for row in rows]

    def loss(values: Sequence[float]) -> float:
        tried = with_efficiencies(given, values)
        return sum(
            math.log(ratio * row.busy(tried)) ** 2 for ratio, row in zip(ratios, rows, strict=True)
        )

    best, step = list(start), 0.1
    least = loss(best)
    while step > 0.005:
        better = False
        for place in range(len(best)):
            for factor in (1 + step, 1 / (1 + step)):
                values = list(best)
                values[place] = min(1.0, values[place] * factor)
                tried = loss(values)
                if tried < least - 1e-9:
                    best, least, better = values, tried, True
        if not better:
            step /= 2
    return best


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
    for row in (*NARAYANAN, *KORTHIKANTI):
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


def _rate(row: Row) -> float:
    return row.flops / (row.gpus * row.seconds)


def _print(**fields: Any) -> None:
    rounded = {
        key: round(value, 4) if isinstance(value, float) else value for key, value in fields.items()
    }
    print(json.dumps({"benchmark": "forecast_published"} | rounded), flush=True)


if __name__ == "__main__":
    main()
