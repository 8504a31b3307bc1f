"""Programs that the tests of engines run."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.installed import ROOT, local
from tests.engines.jobs import MLP, STEPS, losses_of

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
        sys.stdout.write(f"process {os.getpid()} runs\\n")
        sys.stdout.flush()
        if world.rank == 1 and sys.argv[1:]:
            os.kill(os.getpid(), signal.Signals[sys.argv[1]])
sys.stdout.write(f"rank {world.rank} has saved\\n")
"""
"""Computes without end, but for what rank 1 does to itself, and for SIGUSR1."""


@pytest.fixture(scope="session")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The README's `line.py`."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (text,) = (each for each in blocks if "pc.init()" in each)
    path = tmp_path_factory.mktemp("engines") / "line.py"
    path.write_text(text)
    return path


@pytest.fixture(scope="session")
def losses() -> list[float]:
    """Those of a job on threads."""
    command = [*local().command("run")[:4], *map(str, MLP), "--ranks", "2", f"--steps={STEPS}"]
    variables = local().variables()
    return losses_of(
        subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    )


@pytest.fixture(scope="session")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "troubled.py"
    path.write_text(TROUBLED)
    return path


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Programs can be interrupted even where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
