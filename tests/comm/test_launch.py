"""How `plancompiler launch` ends when a rank is killed or hangs: real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from plancompiler.errors import TransportError
from plancompiler.executor.comm.host import HostLink
from plancompiler.executor.comm.link import Publication

SCRIPT = """
import os, signal, sys, threading
rank = os.environ.get("PMI_RANK", os.environ.get("PLANCOMPILER_RANK"))
if sys.argv[1] == "stop early" and rank == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
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
    if sys.argv[1] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        sys.exit()
    threading.Event().wait()
world.comm.deadline = 0.5 if sys.argv[1] == "hang" else 60.0
group.all_reduce(np.zeros(4))
"""


@pytest.fixture
def mpiexec() -> str:
    beside = Path(sys.executable).parent / "mpiexec"
    if not beside.exists():
        pytest.skip("mpiexec is not installed: the extra `mpi`")
    return str(beside)


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


@pytest.mark.processes
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


@pytest.mark.processes
def test_a_rank_that_hangs_is_named_within_the_deadline(script, tmp_path):
    done = launch(script, "hang", tmp_path / "records")
    assert done.returncode == 1
    assert "on rank 0" in done.stderr.splitlines()[-1]
    assert "DeadlineError" in done.stderr
    assert "all_reduce sum of 32 bytes (operation 1 of ranks [0, 1])" in done.stderr
    assert "entered: [0]; not entered: [1]" in done.stderr
    report = json.loads((tmp_path / "records" / "rank-0.json").read_text())
    assert [each["state"] for each in report["operations"]] == ["done", "failed"]


@pytest.mark.processes
def test_a_rank_that_leaves_early_is_named(script, tmp_path):
    done = launch(script, "leave", tmp_path / "records")
    assert done.returncode == 1
    assert "on rank 0" in done.stderr.splitlines()[-1]
    assert "(operation 1 of ranks [0, 1]): rank 1 has closed its run" in done.stderr


@pytest.mark.processes
@pytest.mark.parametrize("how", ["stop early", "stop"])
def test_a_rank_that_is_stopped_is_named(script, tmp_path, how):
    """Before it registers or later. The others would wait for 60 s, and for 300 s at the start."""
    done = launch(script, how, tmp_path / "records")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "the process of a rank does not run" in last
    assert "on rank 1" in last
    assert "in state T, stopped by a signal" in last
    assert [line for line in done.stderr.splitlines() if line.startswith("rank 1: process")]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("stop early", "connecting to the other ranks: the process of rank 1 does not run"),
        ("stop", "all_reduce sum of 32 bytes (operation 1 of ranks [0, 1]): the process of rank 1"),
    ],
)
def test_ranks_of_another_launcher_name_each_other(script, how, said, mpiexec):
    """Under mpiexec nobody of ours watches over the ranks but they themselves."""
    command = [mpiexec, "-n", "2", sys.executable, str(script), how]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert said in done.stderr


@pytest.mark.processes
def test_a_rank_that_ends_before_it_comes_is_named():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def find(rank):
        """The process at first, and nothing from then on."""
        if process.returncode is not None:
            return []
        process.communicate()
        return [process.pid]

    transport = HostLink("a run of this test", 0, find)
    try:
        with pytest.raises(TransportError, match="the process of rank 1 ended before it came"):
            transport.connect(Publication(0, (), (), (1,)), None, 60.0)
    finally:
        transport.close()
