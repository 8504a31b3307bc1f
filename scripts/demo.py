"""Train the digits MLP on 2 ranks, compiled in each of the four modes, and compare.

Ends with code 1 where the modes disagree about a plan or the model did not learn.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import plancompiler as pc
from plancompiler.cli.job_file import load_job
from plancompiler.cli.output import print_table, progress
from plancompiler.lower.compile import MODES

JOB_FILE = Path(__file__).resolve().parents[1] / "examples" / "mlp.py"
RANKS = 2
STEPS = 300
WANTED_ACCURACY = 0.97


@dataclass(frozen=True, slots=True)
class Trained:
    """What one mode's run came to."""

    mode: str
    compile_seconds: float
    digest: str
    first_loss: float
    last_loss: float
    accuracy: float
    run_seconds: float


def train(job: pc.Job, mode: str, steps: int) -> Trained:
    """Run the job's steps with plans compiled in `mode`."""
    losses = []
    accuracy = 0.0
    with (
        pc.run(job, RANKS, mode=mode, cache=False) as session,
        progress(f"{mode}: step", steps) as advance,
    ):
        begin = time.perf_counter()
        for outputs in session.run(steps):
            losses.append(float(outputs["loss"]))
            accuracy = float(outputs["accuracy"])
            advance(f"loss {losses[-1]:.4f}")
        return Trained(
            mode=mode,
            compile_seconds=session.compile_seconds,
            digest=session.digest,
            first_loss=losses[0],
            last_loss=losses[-1],
            accuracy=accuracy,
            run_seconds=time.perf_counter() - begin,
        )


def main() -> int:
    """Exit code: 0 where all digests are equal and every accuracy is good."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps per mode")
    steps = parser.parse_args().steps
    job = load_job(str(JOB_FILE), {"total": steps}, RANKS)
    results = [train(job, mode, steps) for mode in MODES]

    print(f"Digits MLP on {RANKS} ranks, {steps} steps\n", flush=True)
    print_table(
        ("mode", "digest", ">compile", ">run", ">first loss", ">last loss", ">test accuracy"),
        (
            (
                result.mode,
                result.digest[:16],
                f"{result.compile_seconds * 1e3:.0f} ms",
                f"{result.run_seconds:.2f} s",
                f"{result.first_loss:.4f}",
                f"{result.last_loss:.4f}",
                f"{result.accuracy:.1%}",
            )
            for result in results
        ),
    )

    equal = len({result.digest for result in results}) == 1
    learned = all(result.accuracy >= WANTED_ACCURACY for result in results)
    print("\nThe four modes made the same plans." if equal else "\nThe modes made different plans.")
    if not learned:
        print(f"The test accuracy is below {WANTED_ACCURACY:.0%}.")
    return 0 if equal and learned else 1


if __name__ == "__main__":
    sys.exit(main())
