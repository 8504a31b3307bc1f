"""What the tests of engines compare with."""

from __future__ import annotations

import subprocess

import pytest

from tests.engines.installed import local
from tests.engines.jobs import MLP, STEPS, losses_of


@pytest.fixture(scope="session")
def losses() -> list[float]:
    """Those of a job on threads."""
    command = [*local().command("run")[:4], *map(str, MLP), "--ranks", "2", f"--steps={STEPS}"]
    variables = local().variables()
    return losses_of(
        subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    )
