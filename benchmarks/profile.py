"""What `pc.profile` costs an eager training step of gpt tiny.

    python -m benchmarks.profile [--rounds 20]

Prints one JSON line: medians of the CPU milliseconds of one step without and with a profile, and
the median of the ratios within a round. A round is a few steps of each, in another order each time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext

import plancompiler as pc
from examples import gpt

# Later than plancompiler, which chooses the kernels that NumPy loads.
import numpy as np  # isort: skip

STEPS = 3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    config, mesh = gpt.PRESETS["tiny"], pc.Placement("cpu", [[0]], axes=("dp", "tp"))
    model = gpt.GPT(config, [mesh])
    optimizer = pc.optim.AdamW(model.parameters(), lr=1e-3)
    rows = np.random.default_rng(0).integers(0, 256, (config.batch, config.length + 1))
    tokens, targets = (pc.tensor(each, mesh) for each in (rows[:, :-1], rows[:, 1:]))

    def cpu_ms() -> float:
        begin = time.process_time()
        for _ in range(STEPS):
            optimizer.minimize(pc.cross_entropy(model(tokens), targets))
        return (time.process_time() - begin) / STEPS * 1e3

    plain: list[float] = []
    profiled: list[float] = []
    for number in range(-1, rounds):
        for with_profile in (False, True) if number % 2 else (True, False):
            with pc.profile() if with_profile else nullcontext():
                cpu_ms()  # ops are prepared anew in each block
                spent = cpu_ms()
            if number >= 0:
                (profiled if with_profile else plain).append(spent)
    ratios = [with_one / without for with_one, without in zip(profiled, plain, strict=True)]
    report = {
        "plain_ms": round(statistics.median(plain), 3),
        "profiled_ms": round(statistics.median(profiled), 3),
        "ratio": round(statistics.median(ratios), 4),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
