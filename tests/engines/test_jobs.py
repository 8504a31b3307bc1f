"""Jobs whose ranks an engine starts: equal bits, restarts, and signals that mean to save."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
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
    python_of,
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
    """Twice; the second failure is that of the other rank."""
    steps = 2000
    options = ("--save", tmp_path / "saved", "--save-every", 10, "--max-restarts", 2)
    started = mpich().start("run", *TWO, "--steps", steps, *options)
    noted = []
    try:
        for after, rank in ((200, 1), (1000, 0)):
            noted += await_steps(started, after)
            os.kill(worker_of(rank), signal.SIGKILL)
        said, errors = started.communicate(timeout=WAIT)
    finally:
        started.kill()
        started.communicate()
    assert started.returncode == 0, errors
    errors = "".join(noted) + errors
    assert re.search(r"restart 1 of 2 after step \d+: .*rank 1", errors)
    assert re.search(r"restart 2 of 2 after step \d+: .*rank 0", errors)
    restarted = json.loads(said)["losses"]
    assert restarted[:STEPS] == losses
    quiet = [*local().command("run")[:4], *map(str, TWO), f"--steps={steps}"]
    done = subprocess.run(quiet, capture_output=True, text=True, check=False)
    assert restarted == losses_of(done)


@pytest.mark.parametrize("engine", both(*HERE, *OTHERS))
def test_a_stopped_rank_is_named(engine: Engine, record_property) -> None:
    started = engine().start("run", *TWO, "--steps", 1_000_000)
    try:
        await_steps(started, 1)
        os.kill(worker_of(1), signal.SIGSTOP)
        begin = time.monotonic()
        _, errors = started.communicate(timeout=WAIT)
        await_end(our_processes())
        name = f"seconds_from_SIGSTOP_of_a_worker_to_the_end_{engine.__name__}"
        record_property(name, time.monotonic() - begin)
    finally:
        started.kill()
        started.communicate()
    assert started.returncode == 1
    last = errors.splitlines()[-1]
    assert "on rank 1" in last
    assert "stopped by a signal" in last


@pytest.mark.parametrize("engine", both(*HERE, *OTHERS))
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_command_ends(
    engine: Engine, interruptible: None, number: signal.Signals, record_property
) -> None:
    """Ctrl-C, and an end of which the command does not know; one of its workers is stopped."""
    started = engine().start("run", *TWO, "--steps", 1_000_000)
    try:
        await_steps(started, 1)
        if number == signal.SIGKILL:
            os.kill(worker_of(1), signal.SIGSTOP)
        begin = time.monotonic()
        os.killpg(started.pid, number)
        started.communicate(timeout=WAIT)
        await_end(our_processes())
        name = f"seconds_from_{number.name}_of_a_job_to_its_end_{engine.__name__}"
        record_property(name, time.monotonic() - begin)
    finally:
        started.kill()
        started.communicate()
    assert started.returncode == (130 if number == signal.SIGINT else -9)


@pytest.mark.parametrize("engine", both(*HERE, *OTHERS))
def test_a_second_ctrl_c_cuts_nothing_short(engine: Engine, interruptible: None) -> None:
    """It comes while the command ends its ranks."""
    started = engine().start("run", *TWO, "--steps", 1_000_000)
    try:
        await_steps(started, 1)
        for _ in range(2):
            os.killpg(started.pid, signal.SIGINT)
            time.sleep(0.05)  # as fast as one can press; both presses at once would count as one
        _, errors = started.communicate(timeout=WAIT)
        await_end(our_processes())
    finally:
        started.kill()
        started.communicate()
    # By the signal itself where Python has given up its handlers, in its last moments.
    assert started.returncode in (130, -signal.SIGINT), errors
    assert "Traceback" not in errors


def test_ctrl_c_is_not_for_a_cluster_of_the_runs_own(interruptible: None, tmp_path: Path) -> None:
    """At a terminal the processes of Dask's, which this run has started, are sent it too."""
    engine = Installed("dask", "dask", python_of("dask"), {"TMPDIR": str(tmp_path)})
    started = engine.start("run", *TWO, "--steps", 1_000_000)
    try:
        await_steps(started, 1)
        os.killpg(started.pid, signal.SIGINT)
        _, errors = started.communicate(timeout=WAIT)
        await_end(our_processes())
    finally:
        started.kill()
        started.communicate()
    assert started.returncode == 130
    assert "Traceback" not in errors


def saves() -> list[object]:
    """Engines and signals: all engines with SIGUSR1, which some of them treat as their own."""
    parameters = both(*HERE, *OTHERS)
    return [
        *(
            pytest.param(*each.values, signal.SIGUSR1, id=each.id, marks=each.marks)
            for each in parameters
        ),
        pytest.param(local, signal.SIGTERM, id="local-SIGTERM"),
    ]


@pytest.mark.parametrize(("engine", "number"), saves())
def test_a_signal_means_to_save(engine: Engine, tmp_path: Path, number: int) -> None:
    folder = tmp_path / "saved"
    started = engine().start("run", *TWO, "--steps", 1_000_000, "--save", folder)
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
