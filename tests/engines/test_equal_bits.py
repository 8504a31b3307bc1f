"""One program gives equal bits under every engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.installed import HERE, OTHERS, WAIT, Engine, both, free_port, local

pytestmark = pytest.mark.processes


@pytest.fixture(scope="session")
def printed(line: Path) -> str:
    """Those of local processes, as text that has all their digits."""
    done = local().run("launch", "-n", 2, line)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("engine", both(*HERE[1:], *OTHERS))
def test_an_eager_program(engine: Engine, line: Path, printed: str) -> None:
    done = engine().run("launch", "-n", 2, line)
    assert done.returncode == 0, done.stderr
    assert len(printed.splitlines()) == 50
    assert done.stdout == printed


@pytest.mark.engines
@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "{}", "LOCAL_RANK": "{}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        {"JOB_COMPLETION_INDEX": "{}", "WORLD_SIZE": "2"},
    ],
    ids=["torchrun", "indexed_job"],
)
def test_ranks_that_others_start(line: Path, printed: str, variables: dict[str, str]) -> None:
    """By the variables alone, as torchrun and the manifests of Indexed Jobs set them."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(line)],
            stdout=subprocess.PIPE,
            text=True,
            env=local().variables()
            | rendezvous
            | {name: text.format(rank) for name, text in variables.items()},
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=WAIT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert "".join(said) == printed
