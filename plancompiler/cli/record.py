"""What a run's steps came to, as the line, the table and the JSON of `run` and `submit`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from plancompiler.cli.output import print_json, print_result, print_table
from plancompiler.errors import FeedError
from plancompiler.executor.timeline import Timeline, rank_shares, task_shares
from plancompiler.ir import Job

LOSS = "loss"
"""The output that is reported as the loss, where a job has several."""
LONGEST_TASKS = 12
"""How many tasks a profile lists."""


class Record:
    """Collects outputs step by step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.steps = 0
        self.last: Mapping[str, Any] = {}

    def add(self, outputs: Mapping[str, Any]) -> str:
        """Take a step's outputs; a short line about them: `loss 0.1234  accuracy 0.98`."""
        self.last = outputs
        self.steps += 1
        scalars = {name: value for name, value in outputs.items() if isinstance(value, float)}
        if scalars:
            self.losses.append(scalars.get(LOSS, next(iter(scalars.values()))))
        return "  ".join(f"{name} {value:.5g}" for name, value in scalars.items())

    def rows(self) -> list[tuple[str, str]]:
        """The loss and the last step's outputs, for a table."""
        rows = []
        if self.losses:
            rows.append((LOSS, f"{self.losses[0]:.6g} first, {self.losses[-1]:.6g} last"))
        rows += [
            (name, f"{value:.6g}" if isinstance(value, float) else f"array of shape {value.shape}")
            for name, value in self.last.items()
            if name != LOSS
        ]
        return rows

    def report(
        self,
        *,
        ranks: int,
        backend: str,
        mode: str | None,
        steps: int,
        step_seconds: list[float],
        compile_seconds: float,
        cached: bool,
        queued_seconds: float | None = None,
        digest: str,
        timelines: Sequence[Timeline] | None = None,
        as_json: bool,
    ) -> None:
        """Print the whole run on stdout; with `timelines`, also where the time of ranks went.

        `queued_seconds` are those before a job's turn came, where it had to wait for one.
        """
        median = statistics.median(step_seconds)
        p90 = float(np.percentile(step_seconds, 90))
        if as_json:
            value: dict[str, Any] = {
                "ranks": ranks,
                "backend": backend,
                "mode": mode,
                "steps": steps,
                "losses": self.losses,
                "step_seconds": {"median": median, "p90": p90},
                "compile_seconds": compile_seconds,
                "digest": digest,
                "cached": cached,
            }
            if queued_seconds is not None:
                value["queued_seconds"] = queued_seconds
            if timelines is not None:
                value["profile"] = {
                    "ranks": [asdict(share) for share in rank_shares(timelines)],
                    "tasks": [asdict(share) for share in task_shares(timelines)],
                }
            print_json(value)
            return
        rows = [
            ("ranks", f"{ranks} ({backend})"),
            ("mode", mode or "the master's default"),
            *([("queued", f"{queued_seconds:.3f} s")] if queued_seconds is not None else []),
            ("compile", f"{compile_seconds:.3f} s{', cached' if cached else ''}"),
            ("digest", digest),
            ("steps", str(steps)),
            ("step time", f"median {median * 1e3:.2f} ms, p90 {p90 * 1e3:.2f} ms"),
        ]
        print_table(("what", "value"), [*rows, *self.rows()])
        if timelines is not None:
            _print_profile(timelines)


def _print_profile(timelines: Sequence[Timeline]) -> None:
    print_result()
    print_table(
        (">rank", ">seconds", ">kernels", ">communication", ">both", ">waiting"),
        (
            (
                share.rank,
                f"{share.seconds:.3f}",
                *(
                    f"{part:.1%}"
                    for part in (share.kernels, share.communication, share.both, share.waiting)
                ),
            )
            for share in rank_shares(timelines)
        ),
    )
    print_result()
    print_table(
        (">share", ">seconds", ">actions", "task", "what", "source"),
        (
            (
                f"{share.share:.1%}",
                f"{share.seconds:.3f}",
                share.actions,
                share.name,
                share.op or share.kind,
                share.source,
            )
            for share in task_shares(timelines)[:LONGEST_TASKS]
        ),
    )


def require_own_data(job: Job) -> None:
    """A job run from the command line must read its own data; a FeedError names its inputs."""
    if job.inputs:
        raise FeedError(
            "this job wants to be fed each step, which a command cannot do",
            got=f"inputs {', '.join(job.inputs)}",
            hint="read data inside the job (pc.data.Arrays, pc.data.TokenFile), or use pc.run "
            "and session.step(...) from Python",
        )
