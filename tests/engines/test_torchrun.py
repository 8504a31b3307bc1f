"""Jobs under torchrun itself, where PyTorch is installed: `scripts/test --importers` runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.test_processes import await_end
from tests.eager.test_launchers import torchrun
from tests.engines.installed import WAIT, free_port, local, our_processes
from tests.engines.jobs import MLP, STEPS, await_steps, losses_of, worker_of

pytestmark = [pytest.mark.processes, pytest.mark.engines]


@contextmanager
def under_torchrun(*words: object) -> Iterator[subprocess.Popen[str]]:
    """`plancompiler run` on two ranks, as docs/engines.md says: torchrun has the port of its own
    rendezvous, so the processes of the job are told another one.
    """
    rendezvous = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    python = [*torchrun(2), "--no-python", sys.executable]
    started = subprocess.Popen(
        [*python, "-m", "plancompiler", "run", *map(str, (*MLP, *rendezvous, *words))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=local().variables(),
        start_new_session=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def end_of(started: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    said = started.communicate(timeout=WAIT)
    await_end(our_processes())
    return subprocess.CompletedProcess(started.args, started.returncode, *said)


def test_equal_bits(losses: list[float]) -> None:
    with under_torchrun("--steps", STEPS) as started:
        assert losses_of(end_of(started)) == losses


def test_a_killed_rank_is_named_and_all_end() -> None:
    with under_torchrun("--steps", 1_000_000) as started:
        await_steps(started, 1)
        os.kill(worker_of(1), signal.SIGKILL)
        done = end_of(started)
    assert done.returncode == 1
    assert "on rank 1" in done.stderr


def test_sigterm_saves(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    with under_torchrun("--steps", 1_000_000, "--save", folder) as started:
        await_steps(started, 1)
        started.send_signal(signal.SIGTERM)
        done = end_of(started)
    assert done.returncode != 0
    assert "stopped after step" in done.stderr
    assert json.loads((folder / "index.json").read_text())["step"] > 0
