"""Ranks that compute with other kernels are named before they run, in clusters and in worlds."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from plancompiler import Client
from plancompiler.cluster.messages import JobPhase, JobRequest
from plancompiler.errors import MixedKernelsError
from plancompiler.master.server import MasterServer
from plancompiler.plan.digest import ALLOW_MIXED_KERNELS, check_kernels
from tests.cluster.simulated import cluster_of
from tests.integration.tiny_jobs import regression

VARIABLE = "OPENBLAS_CORETYPE"
OTHER = "Nehalem"
"""Among the sets of every x86-64 build; it runs on all of these CPUs, and none chooses it."""
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def choice() -> None:
    """Skips where BLAS has no kernels to choose from."""
    code = "from plancompiler.blas import loaded_library; print(loaded_library.numeric_kernels())"
    asked = [sys.executable, "-c", code]
    results = {
        subprocess.run(
            asked,
            env={**os.environ, VARIABLE: kernels},
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        ).stdout
        for kernels in (OTHER, "")
    }
    if len(results) == 1:
        pytest.skip("NumPy's BLAS has one kernel set here")


def test_ranks_with_other_kernels_do_not_start() -> None:
    cluster, workers = cluster_of(3)
    workers[1].kernels = "NumPy 9"
    job = cluster.submit(JobRequest(1), needs=3)
    cluster.run()
    error = cluster.error(job)
    assert error is not None
    assert error.code == MixedKernelsError.code
    assert error.got == "ranks 0, 2: kernels; rank 1: NumPy 9"
    assert JobPhase.PREPARING not in cluster.phases(job)
    workers[1].kernels = ""  # it has nothing to compute
    job = cluster.submit(JobRequest(1), needs=3)
    cluster.run()
    assert cluster.error(job) is None


def test_a_difference_that_is_allowed_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = {rank: "NumPy 9" if rank == 40 else "NumPy 8" for rank in range(64)}
    monkeypatch.delenv(ALLOW_MIXED_KERNELS, raising=False)
    for allowed in (None, False):
        with pytest.raises(
            MixedKernelsError, match=r"ranks 0, 1, .* and 55 more: NumPy 8; rank 40"
        ):
            check_kernels(kernels, allowed)
    with caplog.at_level(logging.WARNING, "plancompiler"):
        check_kernels(kernels, allowed=True)
        monkeypatch.setenv(ALLOW_MIXED_KERNELS, "1")
        check_kernels(kernels)
        assert len(caplog.records) == 2
        assert "rank 40: NumPy 9" in caplog.text
        check_kernels(dict.fromkeys(range(64), "NumPy 8"))
        check_kernels({})
    assert len(caplog.records) == 2
    with pytest.raises(MixedKernelsError):
        check_kernels(kernels, allowed=False)


@contextmanager
def worker(address: str, rank: int, kernels: str) -> Iterator[None]:
    """A worker process with these kernels, for as long as the block runs."""
    command = [sys.executable, "-m", "plancompiler", "worker"]
    child = subprocess.Popen(
        [*command, "--master", address, "--rank", str(rank)],
        env={**os.environ, VARIABLE: kernels},
        cwd=ROOT,
    )
    try:
        yield
    finally:
        child.terminate()
        child.wait(60)


@pytest.mark.processes
@pytest.mark.usefixtures("choice")
def test_workers_with_other_kernels_are_told_before_they_run() -> None:
    with (
        MasterServer(ranks=2) as server,
        worker(server.address, 0, OTHER),
        worker(server.address, 1, ""),
        Client(server.address) as client,
    ):
        handle = client.submit(regression(2), 2)
        with pytest.raises(MixedKernelsError, match=r"rank 0: NumPy .* rank 1: NumPy ") as caught:
            handle.result()
        assert f"with {OTHER} kernels" in str(caught.value)
        assert "--allow-mixed-kernels" in str(caught.value)
        # Ranks without work do not count.
        assert len(list(client.submit(regression(1), 2))) == 2


SCRIPT = f"""
import os, sys
if os.environ["PLANCOMPILER_RANK"] == "1":
    os.environ["{VARIABLE}"] = "{OTHER}"
import numpy as np
import plancompiler as pc
world = pc.init()
mesh = pc.Placement("cpu", [0, 1])
# One write, as print's two mix with another rank's where Python does not buffer.
sys.stdout.write(f"{{pc.tensor(np.ones(4), mesh, 'S(0)').sum().item()}}\\n")
"""


@pytest.mark.processes
@pytest.mark.usefixtures("choice")
@pytest.mark.parametrize("allowed", [False, True])
def test_ranks_of_a_world_are_told_where_they_meet(allowed: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = ["--allow-mixed-kernels"] if allowed else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop(VARIABLE, None)
    done = subprocess.run(
        [sys.executable, "-m", "plancompiler", "launch", "-n", "2", *options, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=ROOT,
        timeout=100,
    )
    assert "rank 0: NumPy" in done.stderr
    assert f"with {OTHER} kernels" in done.stderr
    assert (done.returncode == 0) is allowed, done.stderr
    assert done.stdout == ("4.0\n4.0\n" if allowed else "")
