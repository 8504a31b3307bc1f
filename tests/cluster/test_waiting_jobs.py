"""Jobs that wait for workers: what is said of that, and how it is timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from plancompiler.cli import waiting
from plancompiler.cli.program import cli
from plancompiler.master.server import MasterServer
from plancompiler.running.client import Client
from tests.cluster.conftest import Workers
from tests.examples import mlp

STEPS = 4
JOB = """
from tests.examples import mlp


def build():
    return mlp(ranks=2)
"""


def test_submit_says_which_ranks_are_missing_and_times_steps_only(
    server: MasterServer, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    said: list[str] = []
    note = waiting.print_note

    def listen(line: str) -> None:
        """As a user who starts the missing worker when the command says that it is missing."""
        note(line)
        said.append(line)
        if line.startswith("waiting") and len(workers.started) == 1:
            workers(server.address, rank=0)

    monkeypatch.setattr(waiting, "print_note", listen)
    workers(server.address, rank=1)
    with Client(server.address) as client:
        command = ["submit", str(job), "--master", server.address, "--steps", str(STEPS), "--json"]
        result = CliRunner().invoke(cli, command)
        assert result.exit_code == 0, result.output
        assert any(line.startswith("waiting for a worker of rank 0") for line in said)
        report = json.loads(result.stdout)
        (status,) = client.status().jobs
        assert 0 < report["queued_seconds"] == status.queued_seconds
        assert status.queued_seconds + report["compile_seconds"] <= status.seconds
        handle = client.submit(mlp(ranks=2), 1)
        handle.result()
        assert handle.missing_ranks == ()
        assert handle.queued_seconds is not None
