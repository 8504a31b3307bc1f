"""Llamas of 8 and 70 billion parameters, imported from their configurations and compiled.

    python -m benchmarks.import_llama [--models 8b,70b] [--runs 3] [--ranks-of-world 512]

Prints one JSON line per model. The model is made on PyTorch's meta device, so that no weight
exists. `export_seconds` is what `torch.export.export` took within `pc.from_torch`,
`import_seconds` all the rest of it, both medians; `peak_rss_mib` the most memory that the process
held until then, of which `torch_rss_mib` was held before the model was made. Then the model is
placed with the tensor-parallel plan of transformers (tp 8) in 8 stages, and the rest of the ranks
share the batch: `ours` has what the compiler says of a training step with AdamW, for the first, a
middle and the last rank; `gpt` the same for `examples/gpt.py` with as many layers of these sizes.

It needs PyTorch and transformers, as `scripts/test --importers` installs them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import plancompiler as pc
from plancompiler.cli.compile import summarize
from plancompiler.cli.job_file import load_job
from plancompiler.lower.compile import compile_plans

ROOT = Path(__file__).resolve().parent.parent
GPT = ROOT / "examples" / "gpt.py"
TP, PP = 8, 8
LENGTH = 2048

MODELS: dict[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
"""The published sizes of Llama 3."""


def imported(name: str, batch: int, **changes: Any) -> tuple[pc.nn.Module, Any, dict[str, Any]]:
    """An imported model, its configuration with these changes, and what the import took."""
    import torch  # noqa: PLC0415  # the parent process does without
    import transformers  # noqa: PLC0415  # likewise

    config = transformers.LlamaConfig(**MODELS[name] | changes)
    before = rss_mib()
    made_by: Any = transformers.AutoModelForCausalLM  # the class alone ignores the dtype
    with torch.device("meta"):
        module = made_by.from_config(config).eval()
        example = {
            "input_ids": torch.zeros(batch, LENGTH, dtype=torch.long),
            "labels": torch.zeros(batch, LENGTH, dtype=torch.long),
            "use_cache": False,
        }
    export, spent = torch.export.export, [0.0]

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        program = export(*args, **kwargs)
        spent.append(time.perf_counter() - begin)
        return program

    torch.export.export = timed
    begin = time.perf_counter()
    model = pc.from_torch(module, example)
    seconds = time.perf_counter() - begin
    return (
        model,
        config,
        {
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "operations": len(model.graph.nodes),
            "export_seconds": sum(spent),
            "import_seconds": seconds - sum(spent),
            "torch_rss_mib": before,
            "peak_rss_mib": rss_mib(),
        },
    )


def rss_mib() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def training_job(model: pc.nn.Module, config: Any, ranks: int, batch: int) -> pc.Job:
    """A step of AdamW on `ranks` ranks, in stages."""
    mesh = pc.Placement(
        "cpu", np.arange(ranks).reshape(PP, ranks // (PP * TP), TP), ("pp", "dp", "tp")
    )
    tensor_parallel = pc.layouts.tensor_parallel(config, axis="tp")
    model.place(mesh, pc.layouts.stages(model, "model.layers.*", "pp", inner=tensor_parallel))
    first, *_, last = pc.layouts.stage_meshes(mesh, "pp")
    with pc.job("llama") as job:
        ids, labels = (
            pc.input(name, (batch, LENGTH), "int64", stage, ["S(0)", "B"])
            for name, stage in (("input_ids", first), ("labels", last))
        )
        loss = model(input_ids=ids, labels=labels).loss
        pc.optim.AdamW(1e-4).minimize(loss)
        pc.output("loss", loss)
    return job


def compiled(make: Any, ranks: int) -> dict[str, Any]:
    """What the compiler says of a job."""
    begin = time.perf_counter()
    job = make()
    traced = time.perf_counter() - begin
    some = (0, ranks // 2 - 1, ranks - 1)
    compilation = compile_plans(job, ranks, "rank_per_process", some)
    said = summarize(compilation, traced)
    kinds = [task.kind.name for task in compilation.plans[0].tasks]
    return {
        "trace_seconds": traced,
        "master_seconds": said["master_seconds"]["total"] - traced,
        "worker_seconds": said["rank_seconds"]["max"],
        "logical_ops": said["logical_ops"],
        "boxing_families": said["boxing_families"],
        "boxing_graph_bytes": said["boxing_graph_bytes"],
        "slice_bytes": said["slice_bytes"]["max"],
        "tasks": said["tasks_per_rank"]["max"],
        "collectives_of_rank_0": sum("COLLECTIVE" in kind for kind in kinds),
        "arena_gib": said["arena_bytes"]["max"] / 2**30,
    }


def measured(name: str, ranks: int) -> dict[str, Any]:
    """One run."""
    dp = ranks // (TP * PP)
    model, config, row = imported(name, dp)
    row["ours"] = compiled(lambda: training_job(model, config, ranks, dp), ranks)
    sizes = {
        "preset": "gpt2",
        "layers": config.num_hidden_layers,
        "dim": config.hidden_size,
        "heads": config.num_attention_heads,
        "length": LENGTH,
        "vocabulary": config.vocab_size,
        "batch": dp,
        "dp": dp,
        "tp": TP,
        "pp": PP,
    }
    row["gpt"] = compiled(lambda: load_job(str(GPT), sizes), ranks)
    return row


def median_row(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of numbers, and of those in nested rows."""
    made: dict[str, Any] = {}
    for name, value in rows[0].items():
        several = [row[name] for row in rows]
        made[name] = (
            median_row(several) if isinstance(value, dict) else round(statistics.median(several), 3)
        )
    return made


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ranks-of-world", type=int, default=512)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured(options.child, options.ranks_of_world)))
        return
    for name in options.models.split(","):
        rows = []
        for _ in range(options.runs):
            command = [sys.executable, "-m", "benchmarks.import_llama", "--child", name]
            command += ["--ranks-of-world", str(options.ranks_of_world)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, cwd=ROOT)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
        row = median_row(rows)
        head = {"benchmark": "import_llama", "model": name, "ranks": options.ranks_of_world}
        ratio = round(row["import_seconds"] / row["export_seconds"], 3)
        load = round(os.getloadavg()[0], 1)
        print(json.dumps({**head, "import_to_export": ratio, **row, "load_average": load}))


if __name__ == "__main__":
    main()
