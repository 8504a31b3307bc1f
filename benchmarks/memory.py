"""Arena size over its lower bound: the digits network, gpt tiny, and stages of GPT-3 175B.

    python benchmarks/memory.py

Prints one JSON line per job: the worst ratio over the compiled ranks, with the bytes.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from plancompiler.cli.job_file import load_job
from plancompiler.lower.compile import compile_plans

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

JOBS: tuple[tuple[str, str, dict[str, object], tuple[int, ...] | None], ...] = (
    ("mlp, dp 2", "mlp.py", {"layout": "dp", "ranks": 2}, None),
    ("mlp, tp 2", "mlp.py", {"layout": "tp", "ranks": 2}, None),
    ("gpt tiny, 1 rank", "gpt.py", {"preset": "tiny"}, None),
    ("gpt tiny, dp 2", "gpt.py", {"preset": "tiny", "dp": 2}, None),
    ("gpt tiny, dp 2 tp 2 pp 2", "gpt.py", {"preset": "tiny", "dp": 2, "tp": 2, "pp": 2}, None),
    (
        "gpt3-175b, tp 8 pp 16, first, middle and last stage",
        "gpt.py",
        {"preset": "gpt3-175b", "dp": 1, "tp": 8, "pp": 16},
        (0, 64, 127),
    ),
)


def measure(file: str, config: dict[str, object], ranks: Iterable[int] | None) -> dict[str, object]:
    """Worst ratio over the compiled ranks."""
    job = load_job(str(EXAMPLES / file), config)
    plans = compile_plans(job, job.world_size, "rank_per_iter", only_ranks=ranks).plans
    worst = max(plans.values(), key=lambda plan: plan.arena_bytes / plan.peak_live_bytes)
    return {
        "arena_bytes": worst.arena_bytes,
        "peak_live_bytes": worst.peak_live_bytes,
        "ratio": round(worst.arena_bytes / worst.peak_live_bytes, 5),
        "ranks": len(plans),
    }


def main() -> None:
    for name, file, config, ranks in JOBS:
        print(json.dumps({"job": name, **measure(file, config, ranks)}))


if __name__ == "__main__":
    main()
