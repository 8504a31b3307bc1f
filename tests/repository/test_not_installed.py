"""A source tree works beside its dependencies alone, without being installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from sysconfig import get_path

import pytest

from plancompiler.version import VERSION

ROOT = Path(__file__).resolve().parents[2]

Python = Callable[..., str]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Python:
    """Runs an interpreter that finds the tree and all that is installed here but the package."""
    if sys.prefix == sys.base_prefix:
        pytest.skip("the interpreter of the tests may have the package installed")
    folder = tmp_path_factory.mktemp("paths")
    for entry in Path(get_path("purelib")).iterdir():
        if "plancompiler" not in entry.name and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    (folder / "plancompiler").symlink_to(ROOT / "plancompiler")
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")

    def run(*arguments: str | Path) -> str:
        done = subprocess.run(
            [base, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.processes
def test_the_version_is_known(python: Python) -> None:
    sought = "from importlib.metadata import distributions as all; import plancompiler as pc; "
    sought += "print('plancompiler' in {each.name for each in all()}, pc.__version__)"
    assert python("-c", sought) == f"False {VERSION}\n"
    assert python("-m", "plancompiler", "--version") == f"plancompiler {VERSION}\n"
    assert f"plancompiler {VERSION}, numpy" in python("-m", "plancompiler", "doctor")


@pytest.mark.processes
def test_ranks_are_processes_and_plans_are_written(python: Python, tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "import plancompiler as pc\n"
        "def build(ranks=2):\n"
        "    with pc.job('sum') as job:\n"
        "        x = pc.arange(6.0, placement=pc.Placement('cpu', list(range(ranks))))\n"
        "        pc.output('total', x.redistribute(sbp='S(0)').sum())\n"
        "    return job\n"
    )
    plans = tmp_path / "plans"
    python("-m", "plancompiler", "compile", job, "--ranks", "2", "--out", plans)
    told = python("-m", "plancompiler", "run", plans, "--backend", "processes", "--steps", "1")
    assert "(processes)" in told
    assert "15" in told
