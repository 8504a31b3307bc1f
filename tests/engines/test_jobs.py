"""Jobs whose ranks an engine starts: equal bits, restarts, and signals that mean to save."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.test_processes import await_end
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
from tests.engines.jobs import MLP, STEPS, await_steps, losses_of, worker_of

pytestmark = [pytest.mark.processes, pytest.mark.engines]
TWO = (*MLP, "--ranks", 2)


@pytest.mark.parametrize("engine", both(*HERE, *OTHERS))
def test_a_job(engine: Engine, losses: list[float]) -> None:
    assert losses_of(engine().run("run", *TWO, "--steps", STEPS)) == losses


def start_and_kill(
    engine: Installed, steps: int, after: int, *options: object
) -> tuple[int, str, str]:
    """A job of which rank 1 is killed after some steps; how it ended."""
    started = engine.start("run", *TWO, "--steps", steps, *options)
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
    assert restarted[:STEPS] == losses
    quiet = [*local().command("run")[:4], *map(str, TWO), f"--steps={steps}"]
    done = subprocess.run(quiet, capture_output=True, text=True, check=False)
    assert restarted == losses_of(done)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_means_to_save(tmp_path: Path, losses: list[float], number: int) -> None:
    folder = tmp_path / "saved"
    started = local().start("run", *TWO, "--steps", 1_000_000, "--save", folder)
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
