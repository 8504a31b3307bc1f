"""Job files to run commands on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from plancompiler.cli.main import cli

MLP = """
import numpy as np

import plancompiler as pc
from plancompiler import nn


def build(ranks=None, hidden=8, layout="dp"):
    mesh = pc.Placement("cpu", list(range(ranks or 2)))
    with pc.job("small", seed=3) as job:
        x, y = pc.data.Arrays({data!r}, batch=8, placement=mesh, sbp=["S(0)"])
        model = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3)).place(mesh)
        loss = pc.cross_entropy(model(x), y)
        pc.optim.SGD(lr=0.1).minimize(loss)
        pc.output("loss", loss)
    return job
"""

FED = """
import plancompiler as pc


def build(width=4):
    mesh = pc.Placement("cpu", [0, 1])
    with pc.job("fed") as job:
        x = pc.input("x", (4, width), "float32", mesh, ["S(0)"])
        pc.output("total", x.sum())
    return job
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    """Writes a job file and returns its path."""

    def write_file(text: str, name: str = "job.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write_file


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """Runs a command in this process; stdout and stderr are kept apart."""
    for name in ("PLANCOMPILER_LOG", "PLANCOMPILER_COMPILE_MODE", "PLANCOMPILER_DUMP"):
        monkeypatch.delenv(name, raising=False)

    def invoke_command(*arguments: str) -> Result:
        return CliRunner().invoke(cli, list(arguments))

    yield invoke_command
