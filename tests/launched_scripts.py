"""Scripts whose ranks a launcher starts: the README's, and one that gets into trouble."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def line_script() -> str:
    """The README's `line.py`."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    (text,) = (each for each in blocks if "pc.init()" in each)
    return str(text)


TROUBLED = """
import os, signal, sys, threading
import numpy as np
import plancompiler as pc

over = threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: over.set())
world = pc.init()
mesh = pc.Placement("cpu", range(world.size))
step = 0
while True:
    # A collective, so that all ranks end after the same step.
    if pc.tensor(np.float32([over.is_set()] * world.size), mesh, "S(0)").sum().item() == world.size:
        break
    step += 1
    if step == 10:
        sys.stdout.write(f"\\nprocess {os.getpid()} runs\\n")
        sys.stdout.flush()
        if world.rank == 1 and sys.argv[1:]:
            os.kill(os.getpid(), signal.Signals[sys.argv[1]])
sys.stdout.write(f"rank {world.rank} has saved\\n")
"""
"""Computes without end, but for what rank 1 does to itself, and for SIGUSR1."""
RUNS = re.compile(r"^process (\d+) runs$", re.M)


def await_ranks(started: subprocess.Popen[str], count: int) -> list[int]:
    """The processes of all ranks of `TROUBLED`, which compute."""
    assert started.stdout is not None
    assert started.stderr is not None
    pids: list[int] = []
    while len(pids) < count:
        text = started.stdout.readline()
        assert text, started.stderr.read()
        pids += map(int, RUNS.findall(text))
    return pids
