"""Every command and program on docs/engines.md, run as it stands there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.cli.test_processes import await_end
from tests.engines.hosts import two_hosts
from tests.engines.installed import (
    ROOT,
    WAIT,
    Engine,
    both,
    dask,
    local,
    mpich,
    open_mpi,
    our_processes,
    ray,
    slurm,
)
from tests.engines.test_manifest import validate

PAGE = (ROOT / "docs/engines.md").read_text()
BLOCKS = [
    textwrap.dedent(each).strip()
    for each in re.findall(
        r"(?:^ {4}\S.*\n|^\n(?= {4}\S))+", re.sub("```.*?```", "", PAGE, flags=re.S), re.M
    )
]
PLACES = ("--engine ray", "--nnodes 2 -n 1", "sbatch", "kubectl", "RANK=1")
"""What tells the blocks apart, each of which a test below runs."""


def block(place: str) -> str:
    (text,) = (each for each in BLOCKS if place in each)
    return text


@pytest.fixture
def folder(tmp_path: Path, line: Path) -> Path:
    """Where the user is: the scripts and the examples are there."""
    for name in ("line.py", "train.py"):
        shutil.copy(line, tmp_path / name)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def shell(
    text: str,
    folder: Path,
    engine: Engine = local,
    before: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """The text in a shell, in which the commands of the engine's environment come first."""
    installed = engine()
    path = os.pathsep.join((str(Path(installed.python).parent), os.environ["PATH"]))
    return subprocess.Popen(
        [*before, "bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=installed.variables() | {"PATH": path} | (variables or {}),
        start_new_session=True,
    )


def output_of(started: subprocess.Popen[str]) -> str:
    try:
        said, errors = started.communicate(timeout=WAIT)
    finally:
        started.kill()
    assert started.returncode == 0, errors
    return said + errors


def test_each_block_is_run_by_a_test() -> None:
    assert [[place for place in PLACES if place in each] for each in BLOCKS] == [
        [place] for place in PLACES
    ]


def commands() -> list[object]:
    """Those of the first block, each with the engine that it names."""
    parameters = []
    for command in block("--engine ray").splitlines():
        named = re.findall(r"--engine (\w+)", command)
        engine: Engine = local
        if named:
            engine = {"mpi": mpich, "slurm": slurm, "ray": ray, "dask": dask}[named[0]]
        if "--oversubscribe" in command:
            engine = open_mpi
        (parameter,) = both(engine)
        parameters.append(pytest.param(command, *parameter.values, marks=parameter.marks))
    return parameters


@pytest.mark.processes
@pytest.mark.engines
@pytest.mark.parametrize(("command", "engine"), commands())
def test_a_command_with_an_engine(command: str, engine: Engine, folder: Path) -> None:
    said = output_of(shell(command, folder, engine))
    assert re.search(r"^49 \d" if "line.py" in command else "step 100/100", said, re.M)


@pytest.mark.processes
@pytest.mark.engines
def test_a_job_whose_ranks_others_start(folder: Path) -> None:
    """In a network of its own, as the page names a port."""
    with two_hosts() as hosts:
        said = output_of(shell(block("RANK=1"), folder, before=hosts.on(0, [])))
    assert "step 20/20" in said
    await_end(our_processes())


@pytest.mark.processes
@pytest.mark.engines
def test_two_hosts(folder: Path) -> None:
    before, _, each_host = block("--nnodes 2 -n 1").partition("\n\n")
    output_of(shell(before, folder))
    with two_hosts() as hosts:
        names = folder / "hosts"
        names.write_text(f"127.0.0.1 localhost\n{hosts.addresses[0]} node0\n")
        own_names = f"mount --bind {names} /etc/hosts\n"
        started = [
            shell(own_names + each_host, folder, before=[*hosts.on(host, []), "unshare", "--mount"])
            for host in (0, 1)
        ]
        said = [output_of(each) for each in started]
    assert len(re.findall(r"^49 \d", "".join(said), re.M)) == 1


@pytest.mark.processes
@pytest.mark.engines
@pytest.mark.xdist_group("slurm")
def test_a_batch_script(folder: Path) -> None:
    (script,) = re.findall(r"```bash\n(#!/bin/bash.*?)```", PAGE, re.S)
    output_of(shell(block("sbatch"), folder, slurm))
    assert (folder / "job.sh").read_text() == script
    (output,) = folder.glob("slurm-*.out")
    assert "step 100/100" in output.read_text()
    assert (folder / "model/index.json").exists()


@pytest.mark.processes
@pytest.mark.engines
def test_manifests(folder: Path) -> None:
    """No Kubernetes is here: in the place of kubectl is a command that notes its words."""
    kubectl = folder / "bin/kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text('#!/bin/sh\necho "kubectl $*"\n')
    kubectl.chmod(0o755)
    path = os.pathsep.join((str(kubectl.parent), str(Path(sys.executable).parent)))
    variables = {"PATH": os.pathsep.join((path, os.environ["PATH"]))}
    said = output_of(shell(block("kubectl"), folder, variables=variables)).splitlines()
    assert re.fullmatch(r".* plancompiler --from-literal=token=[0-9a-f]{64}", said[0])
    assert said[1:] == ["kubectl apply -f job.json", "kubectl apply -f jobset.json"]
    text = (folder / "job.json").read_text(), (folder / "jobset.json").read_text()
    job, jobset = map(json.loads, text)
    done = validate([*job["items"], jobset])
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
@pytest.mark.engines
@pytest.mark.xdist_group("ray")
def test_the_pages_program_for_ray(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    path = tmp_path / "program.py"
    path.write_text(program)
    engine = ray()
    done = subprocess.run(
        [engine.python, str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT,
        env=engine.variables(),
    )
    assert (done.returncode, done.stdout) == (0, "6.0\n"), done.stderr
