"""Custom ops in worker processes: refused without leave, imported with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import AttributeValueError, UnknownOpError, UsageError
from plancompiler.running.worker_processes import worker_environment
from tests.cli.conftest import Write

WAIT = 60
PROGRAM = [sys.executable, "-m", "plancompiler"]
OPS = """
import plancompiler as pc


@pc.op(rule="n -> n", linear=0{kind})
def halved(x):
    return x / 2
"""
JOB = """
import plancompiler as pc
{imports}

def build(ranks=2):
    mesh = pc.Placement("cpu", range(ranks or 2))
    with pc.job("halves") as job:
        ones = pc.ones((6,), "float32", mesh).redistribute(sbp="S(0)")
        pc.output("loss", halved(ones).sum())
    return job
"""


def run_command(file: str, *options: str) -> subprocess.CompletedProcess[str]:
    """`plancompiler run` in a worker process, far from the job file's folder."""
    command = [*PROGRAM, "run", file, "--ranks", "1", "--steps", "2", "--json"]
    return subprocess.run(
        [*command, "--backend", "processes", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT,
    )


@pytest.mark.processes
def test_a_module_beside_the_job_file(write: Write) -> None:
    write(OPS.format(kind=""), "halving_ops.py")
    file = write(JOB.format(imports="from halving_ops import halved"))
    refused = run_command(file)
    assert refused.returncode != 0
    assert "UnknownOpError" in refused.stderr
    assert "'halving_ops:halved'" in refused.stderr
    assert "--allow-ops halving_ops" in refused.stderr
    allowed = run_command(file, "--allow-ops", "halving_ops")
    assert allowed.returncode == 0, allowed.stderr
    assert json.loads(allowed.stdout)["losses"] == [3.0, 3.0]


@pytest.mark.processes
def test_an_op_in_the_job_file_itself(write: Write) -> None:
    text = OPS.format(kind=', kind="halving_job:halved"') + JOB.format(imports="")
    done = run_command(write(text, "halving_job.py"), "--allow-ops", "halving_job")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["losses"] == [3.0, 3.0]


@pytest.mark.processes
def test_a_master_and_its_workers_need_leave_alike(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(OPS.format(kind=""), "halving_ops.py")
    file = write(JOB.format(imports="from halving_ops import halved"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with cluster_of_one() as address:
        refused = submit(file, address)
    assert refused.returncode == 1
    assert "UnknownOpError" in refused.stderr
    assert "start the master and its workers with --allow-ops halving_ops" in refused.stderr
    with cluster_of_one("--allow-ops", "halving_ops") as address:
        done = submit(file, address)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["losses"] == [3.0, 3.0]


@contextmanager
def cluster_of_one(*allow: str) -> Iterator[str]:
    """A master and its only worker, ended afterwards; the master's address."""
    serve = ["master", "--listen", "127.0.0.1:0", "--ranks", "1", "--json"]
    with ExitStack() as ended:

        def start(*arguments: str) -> subprocess.Popen[str]:
            child = subprocess.Popen(
                [*PROGRAM, *arguments, *allow],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            ended.callback(child.communicate, timeout=WAIT)
            ended.callback(child.terminate)
            return child

        master = start(*serve)
        assert master.stdout is not None
        address = json.loads(master.stdout.readline())["address"]
        start("worker", "--master", address)
        yield address


def submit(file: str, address: str) -> subprocess.CompletedProcess[str]:
    """`plancompiler submit` of two steps."""
    command = [*PROGRAM, "submit", file, "--master", address, "--steps", "2", "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path with a module and a package of ops, forgotten afterwards."""
    (tmp_path / "thirding_ops.py").write_text(OPS.format(kind=""))
    (tmp_path / "packed_ops").mkdir()
    (tmp_path / "packed_ops" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("thirding_ops", None)


@pytest.mark.processes
def test_a_session_with_leave_and_without(folder: Path) -> None:
    import thirding_ops  # type: ignore[import-not-found]

    mesh = pc.Placement("cpu", [0])
    with pc.job("halves") as job:
        x = pc.input("x", (4,), "float32", mesh)
        pc.output("y", thirding_ops.halved(x))
    array = np.arange(4, dtype=np.float32)
    with pc.run(job, backend="processes", allow_ops=("thirding_ops",)) as session:
        np.testing.assert_array_equal(session.step(x=array)["y"], array / 2)
    for others, leave in (((), "no custom ops"), (("packed_ops",), "one of packed_ops")):
        with pytest.raises(UnknownOpError, match="may not import") as caught:
            pc.run(job, backend="processes", allow_ops=others)
        assert caught.value.report.expected == leave
    with pc.run(job) as session:
        np.testing.assert_array_equal(session.step(x=array)["y"], array / 2)


def test_only_allowed_modules_bring_their_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "before")
    assert worker_environment()["PYTHONPATH"] == "before"
    # What is installed is found anyway, and must not come before the standard library.
    assert worker_environment(["numpy", "json", "sys"])["PYTHONPATH"] == "before"
    expected = f"{folder}{os.pathsep}before"
    assert worker_environment(["packed_ops"])["PYTHONPATH"] == expected
    assert worker_environment(["thirding_ops", "packed_ops"])["PYTHONPATH"] == expected
    monkeypatch.delenv("PYTHONPATH")
    assert "PYTHONPATH" not in worker_environment()
    assert worker_environment(["thirding_ops"])["PYTHONPATH"] == str(folder)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(AttributeValueError, match="top-level"):
        worker_environment(["package.module"])
    for name in ("no_such_ops", "__main__"):
        with pytest.raises(UsageError, match=f"cannot be found.*'{name}'"):
            worker_environment([name])
