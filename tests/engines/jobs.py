"""A job that the tests of engines run, and how far it is."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence

from plancompiler.executor.process_status import process_arguments
from tests.engines.installed import ROOT, our_processes

MLP = (ROOT / "examples/mlp.py", "--no-cache", "--json")
STEPS = 40
"""Of a quiet run."""


def losses_of(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stderr
    losses: list[float] = json.loads(done.stdout)["losses"]
    return losses


def await_steps(started: subprocess.Popen[str], count: int) -> list[str]:
    """What it has said until so many steps were made; about ten lines say how far a run is."""
    assert started.stderr is not None
    said = []
    for line in started.stderr:
        said.append(line)
        if (step := re.match(r"step (\d+)/", line)) and int(step[1]) >= count:
            return said
    raise AssertionError("".join(said))


def worker_of(rank: int) -> int:
    """The process of a rank among those that the tests have started."""
    (pid,) = (pid for pid in our_processes(served=True) if is_worker(process_arguments(pid), rank))
    return pid


def is_worker(words: Sequence[str], rank: int) -> bool:
    """Whether these are the words of a worker's command."""
    return {"worker", "--rank"} <= {*words} and words[words.index("--rank") + 1] == str(rank)
