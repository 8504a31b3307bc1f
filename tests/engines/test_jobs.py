"""Jobs whose ranks an engine starts: equal bits, restarts, and signals that mean to save."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from plancompiler.executor.process_status import process_arguments
from tests.cli.test_processes import await_end
from tests.engines.conftest import ROOT
from tests.engines.installed import (
    HERE,
    OTHERS,
    WAIT,
    Engine,
    Installed,
    both,
    local,
    mpich,
    our_processes,
)

pytestmark = [pytest.mark.processes, pytest.mark.engines]
MLP = (ROOT / "examples/mlp.py", "--ranks", 2, "--no-cache", "--json")


def losses_of(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stderr
    losses: list[float] = json.loads(done.stdout)["losses"]
    return losses


@pytest.fixture(scope="module")
def losses() -> list[float]:
    """Those of 40 steps on threads."""
    command = [*local().command("run")[:4], *map(str, MLP), "--steps", "40"]
    return losses_of(subprocess.run(command, capture_output=True, text=True, check=False))


@pytest.mark.parametrize("engine", both(*HERE, *OTHERS))
def test_a_job(engine: Engine, losses: list[float]) -> None:
    assert losses_of(engine().run("run", *MLP, "--steps", 40)) == losses


def await_steps(started: subprocess.Popen[str], count: int) -> None:
    """So many steps have been made; about ten lines say of a run how far it is."""
    assert started.stderr is not None
    for line in started.stderr:
        if (step := re.match(r"step (\d+)/", line)) and int(step[1]) >= count:
            return
    raise AssertionError("no step was made")


def worker_of(rank: int) -> int:
    """The process of a rank among those that the tests have started."""
    words = ["worker", "--rank", str(rank)]
    (pid,) = (
        pid
        for pid in our_processes(served=True)
        if {"worker", "--rank"} <= {*(arguments := process_arguments(pid))}
        and arguments[arguments.index("--rank") + 1] == words[2]
    )
    return pid


def start_and_kill(
    engine: Installed, steps: int, after: int, *options: object
) -> tuple[int, str, str]:
    """A job of which rank 1 is killed after some steps; how it ended."""
    started = engine.start("run", *MLP, "--steps", steps, *options)
    try:
        await_steps(started, after)
        os.kill(worker_of(1), signal.SIGKILL)
        said, errors = started.communicate(timeout=WAIT)
    finally:
        started.kill()
        started.communicate()
    return started.returncode, said, errors


@pytest.mark.parametrize("engine", both(*HERE, *OTHERS))
def test_a_lost_rank_is_named(engine: Engine) -> None:
    code, _, errors = start_and_kill(engine(), 1_000_000, 1)
    assert code == 1
    assert "WorkerLostError" in errors.splitlines()[-1]
    assert "on rank 1" in errors.splitlines()[-1]
    await_end(our_processes())


def test_a_restarted_job_goes_on_as_a_quiet_one(tmp_path: Path, losses: list[float]) -> None:
    steps = 500
    options = ("--save", tmp_path / "saved", "--save-every", 10, "--max-restarts", 2)
    code, said, errors = start_and_kill(mpich(), steps, 50, *options)
    assert code == 0, errors
    assert re.search(r"restart 1 of 2 after step \d+: .*rank 1", errors)
    restarted = json.loads(said)["losses"]
    assert restarted[:40] == losses
    quiet = [*local().command("run")[:4], *map(str, MLP), f"--steps={steps}"]
    done = subprocess.run(quiet, capture_output=True, text=True, check=False)
    assert restarted == losses_of(done)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_means_to_save(tmp_path: Path, losses: list[float], number: int) -> None:
    folder = tmp_path / "saved"
    started = local().start("run", *MLP, "--steps", 1_000_000, "--save", folder)
    try:
        await_steps(started, 1)
        started.send_signal(number)
        _, errors = started.communicate(timeout=WAIT)
    finally:
        started.kill()
        started.communicate()
    assert started.returncode == 128 + number, errors
    (done,) = re.findall(r"stopped after step (\d+) of 1000000", errors)
    assert json.loads((folder / "index.json").read_text())["step"] == int(done)
    await_end(our_processes())
