"""`plancompiler launch` and what `pc.init()` reads: real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plancompiler.engines.launch_variables import read_launcher
from plancompiler.errors import UsageError

SCRIPT = """
import sys
import numpy as np
import plancompiler as pc

world = pc.init()
mesh = pc.Placement("cpu", list(range(world.size)))
x = pc.tensor(np.arange(10.0), mesh, "S(0)", requires_grad=True)
(x * x).sum().backward()
if "fail" in sys.argv and world.rank == 1:
    raise ValueError("broken on purpose")
# One write, so that lines of ranks do not mix.
sys.stdout.write(f"rank {world.rank} {x.sum().item()} {x.grad.numpy().sum()}\\n")
sys.stdout.flush()
if "wait" in sys.argv:
    import threading
    threading.Event().wait()
"""

RAISING = """
import signal, sys, threading
from plancompiler.errors import AbortedError


def end(*_):
    raise AbortedError("rank 0 went away")


signal.signal(signal.SIGTERM, end)
# One write, so that lines of ranks do not mix.
sys.stdout.write("ready\\n")
sys.stdout.flush()
threading.Event().wait()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "plancompiler", "launch", *map(str, words)]


def launch(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.processes
def test_ranks_are_one_world(script):
    done = launch("-n", 2, script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 45.0 90.0", "rank 1 45.0 90.0"]


@pytest.mark.processes
def test_json_is_one_object(script):
    done = launch("--json", "-n", 1, script)
    report = json.loads(done.stdout)
    assert (report["ranks"], report["exit_codes"]) == (1, [0])
    assert "rank 0 45.0" in done.stderr


@pytest.mark.processes
def test_the_first_failure_is_shown_first(script):
    done = launch("-n", 2, script, "fail")
    assert done.returncode == 1
    held = done.stderr[done.stderr.index("Traceback") :]
    assert held.index("ValueError: broken on purpose") < held.index("AbortedError")
    assert done.stderr.index("rank 1:") < done.stderr.index("rank 0:")
    assert "E190" in done.stderr.splitlines()[-1]


@pytest.mark.processes
def test_a_program_without_init_is_told_to_call_it(tmp_path):
    path = tmp_path / "alone.py"
    path.write_text(
        "import numpy as np, plancompiler as pc\n"
        "mesh = pc.Placement('cpu', [0, 1])\n"
        "print(pc.tensor(np.ones((4, 2), 'f4'), mesh, 'S(0)').sum().item())\n"
    )
    done = launch("-n", 2, path)
    assert done.returncode == 1
    assert "call pc.init() at the start of the program" in done.stderr
    assert "rank 1 of 2" in done.stderr
    assert "start more ranks" not in done.stderr


DAEMON = """
import subprocess, sys
import plancompiler as pc

world = pc.init()
daemon = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, start_new_session=True)
sys.stdout.write(f"{daemon.pid}\\n")
sys.stderr.write("the last words\\n")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.processes
@pytest.mark.parametrize("code", [0, 3])
def test_nobody_waits_for_a_daemon_that_holds_standard_error(tmp_path, code):
    path = tmp_path / "daemon.py"
    path.write_text(DAEMON)
    done = launch("-n", 1, path, code)
    pid = int(done.stdout)
    assert Path(f"/proc/{pid}").exists()
    os.kill(pid, signal.SIGKILL)
    assert "the last words" in done.stderr
    assert done.returncode == (1 if code else 0)


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_behind(script, number):
    process = subprocess.Popen(
        command("-n", 2, script, "wait"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline() for _ in range(2)]
    finally:
        os.kill(process.pid, number)
        # The ranks have the same standard output: it ends when the last of them has.
        rest, _ = process.communicate(timeout=60)
    assert all(line.startswith(b"rank") for line in lines)
    assert rest == b""
    assert process.returncode == (130 if number == signal.SIGINT else -9)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"PLANCOMPILER_RANK": "1", "PLANCOMPILER_WORLD_SIZE": "2", "RANK": "7"}, (1, 2)),
        ({"RANK": "3", "WORLD_SIZE": "4", "MASTER_PORT": "1"}, (3, 4)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, (0, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, (1, 3)),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}, (5, 8)),
        ({"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "3"}, (2, 3)),
        ({"JOB_COMPLETION_INDEX": "2"}, (0, 1)),
        ({"JOB_COMPLETION_INDEX": "1", "RANK": "3", "WORLD_SIZE": "4"}, (3, 4)),
    ],
)
def test_variables_of_launchers(environment, expected):
    launched = read_launcher(environment)
    assert (launched.rank, launched.size) == expected


def test_runs_of_one_launcher_are_told_apart():
    names = {
        read_launcher({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": job}).run
        for job in ("1", "2")
    }
    assert len(names) == 2


@pytest.mark.processes
def test_an_interrupt_shows_no_consequences(tmp_path):
    """Ranks that are ended may raise what they like: the user knows why they end."""
    script = tmp_path / "raising.py"
    script.write_text(RAISING)
    process = subprocess.Popen(
        command("-n", 2, script), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    finally:
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "plancompiler: interrupted; everything it started has been stopped.\n"


@pytest.mark.parametrize(
    "environment", [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}]
)
def test_senseless_variables(environment):
    with pytest.raises(UsageError, match="torchrun"):
        read_launcher(environment)
