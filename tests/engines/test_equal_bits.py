"""One program gives equal bits under every engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.installed import HERE, OTHERS, Engine, both, local

pytestmark = pytest.mark.processes


@pytest.fixture(scope="session")
def losses(line: Path) -> str:
    """Those of local processes, as text that has all their digits."""
    done = local().run("launch", "-n", 2, line)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("engine", both(*HERE[1:], *OTHERS))
def test_an_eager_program(engine: Engine, line: Path, losses: str) -> None:
    done = engine().run("launch", "-n", 2, line)
    assert done.returncode == 0, done.stderr
    assert len(losses.splitlines()) == 50
    assert done.stdout == losses
