"""How `plancompiler launch` ends when a rank is killed or hangs: real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, threading
import numpy as np
import plancompiler as pc

world = pc.init()
group = world.comm.context(range(world.size))
group.barrier()
if world.rank == 1:
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "leave":
        sys.exit()
    threading.Event().wait()
world.comm.deadline = 0.5 if sys.argv[1] == "hang" else 60.0
group.all_reduce(np.zeros(4))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def launch(script: Path, how: str, records: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "plancompiler", "launch", "-n", "2", str(script), how]
    environment = {"PLANCOMPILER_FLIGHT_RECORDER": str(records), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=100, env=environment
    )


def test_a_rank_that_is_killed_is_named(script, tmp_path):
    done = launch(script, "kill", tmp_path / "records")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "E190" in last
    assert "on rank 1" in last
    assert "killed by SIGKILL" in last
    # The other rank says what it was doing, and why it ended.
    held = done.stderr[done.stderr.index("rank 0:") :]
    assert "rank 1 went away" in held
    assert "group.all_reduce(np.zeros(4))" in held
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["rank-0.json"]


def test_a_rank_that_hangs_is_named_within_the_deadline(script, tmp_path):
    done = launch(script, "hang", tmp_path / "records")
    assert done.returncode == 1
    assert "on rank 0" in done.stderr.splitlines()[-1]
    assert "DeadlineError" in done.stderr
    assert "all_reduce sum of 32 bytes (operation 1 of ranks [0, 1])" in done.stderr
    assert "entered: [0]; not entered: [1]" in done.stderr
    found = json.loads((tmp_path / "records" / "rank-0.json").read_text())
    assert [each["state"] for each in found["operations"]] == ["done", "failed"]


def test_a_rank_that_leaves_early_is_named(script, tmp_path):
    done = launch(script, "leave", tmp_path / "records")
    assert done.returncode == 1
    assert "on rank 0" in done.stderr.splitlines()[-1]
    assert "(operation 1 of ranks [0, 1]): rank 1 has closed its run" in done.stderr
