"""The `mpi` transport between processes that mpiexec starts."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from plancompiler.executor.local_run import LocalWorld
from plancompiler.lower.compile import compile_plans
from plancompiler.master.events import Limits
from plancompiler.master.server import MasterServer
from plancompiler.running.client import Client
from tests.examples import gpt
from tests.executor.mpi_ranks import CASES

WAIT = 120
STEPS = 3
RANKS = {
    "collectives": (2, 3),
    "pipelines": (2, 3),
    "microbatches": (2,),
    "damaged": (2,),
    "failure": (3,),
    "late": (3,),
    "blocked": (3,),
}
"""World sizes of the cases: what everybody hears of is heard by one who has no part in it, too."""


@pytest.fixture(scope="module")
def mpiexec() -> str:
    """The command; it comes with mpi4py's MPI."""
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if importlib.util.find_spec("mpi4py") is None or mpiexec is None:
        pytest.skip("mpi4py or mpiexec is not installed: the extra `mpi`")
    return mpiexec


@pytest.mark.processes
@pytest.mark.parametrize(("case", "ranks"), [(case, n) for case in CASES for n in RANKS[case]])
def test_ranks(case: str, ranks: int, mpiexec: str) -> None:
    command = [mpiexec, "-n", str(ranks), sys.executable, "-m", "tests.executor.mpi_ranks", case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)
    assert done.returncode == 0, done.stderr
    said = [f"rank {rank} of {ranks} is done" for rank in range(ranks)]
    assert sorted(re.findall(r"rank \d+ of \d+ is done", done.stdout)) == said


@pytest.mark.processes
def test_workers_of_a_master(mpiexec: str) -> None:
    """Jobs one after another on four workers, with the losses of one process."""
    ranks = 4
    limits = Limits(workers=60.0)
    with MasterServer(ranks=ranks, limits=limits) as server, Client(server.address) as client:
        worker = [sys.executable, "-m", "plancompiler", "worker", "--transport", "mpi"]
        children = subprocess.Popen(
            [mpiexec, "-n", str(ranks), *worker, "--master", server.address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            for settings in (
                {"dp": 2, "tp": 2},
                {"dp": 2, "pp": 2, "microbatches": 4, "schedule": "1f1b"},
            ):
                results = [each["loss"] for each in client.submit(gpt(**settings), STEPS)]
                with LocalWorld(compile_plans(gpt(**settings), ranks).plans) as world:
                    wanted = [float(world.step({})["loss"]) for _ in range(STEPS)]
                # Not to the bit: this process may use another BLAS kernel than the workers.
                assert results == pytest.approx(wanted, rel=1e-5)
        finally:
            children.terminate()
            children.wait(WAIT)
