"""Job files to run commands on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from plancompiler.cli.program import cli

MLP = """
from pathlib import Path

import plancompiler as pc

DATA = Path(__file__).with_name("rows.npz")


def build(ranks=None, hidden=8, rate=0.1):
    mesh = pc.Placement("cpu", list(range(ranks or 2)))
    with pc.job("small", seed=3) as job:
        model = pc.nn.Sequential(
            pc.nn.Linear(4, hidden), pc.nn.ReLU(), pc.nn.Linear(hidden, 3)
        ).place(mesh)
        x, y = pc.data.Arrays(DATA, ("x", "y"), batch=8, placement=mesh, sbp=["S(0)"])
        loss = pc.cross_entropy(model(x), y)
        pc.optim.SGD(lr=rate).minimize(loss)
        pc.output("loss", loss)
    return job
"""

FED = """
import plancompiler as pc


def build(width=4, placement=(0, 1)):
    mesh = pc.Placement("cpu", list(placement))
    with pc.job("fed") as job:
        x = pc.input("x", (4, width), "float32", mesh, ["S(0)"])
        pc.output("total", x.sum())
    return job
"""

Write = Callable[..., str]
Invoke = Callable[..., Result]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a job file and returns its path."""

    def write_file(text: str, name: str = "job.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write_file


@pytest.fixture
def mlp(write: Write, tmp_path: Path) -> str:
    """A job that trains a small network on 32 random rows."""
    random = np.random.default_rng(0)
    np.savez(
        tmp_path / "rows.npz",
        x=random.normal(size=(32, 4)).astype(np.float32),
        y=random.integers(0, 3, 32),
    )
    return write(MLP)


@pytest.fixture
def fed(write: Write) -> str:
    """A job that sums what the caller feeds."""
    return write(FED, "fed.py")


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Runs a command in this process; stdout and stderr are kept apart."""
    for name in ("PLANCOMPILER_LOG", "PLANCOMPILER_COMPILE_MODE", "PLANCOMPILER_DUMP"):
        monkeypatch.delenv(name, raising=False)

    def invoke_command(*arguments: str) -> Result:
        return CliRunner().invoke(cli, list(arguments))

    return invoke_command
