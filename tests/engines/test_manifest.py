"""What clusters are told to start a run: by what a cluster takes, and by running it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from plancompiler.cli.manifest import manifest_command
from plancompiler.engines.manifest import checked_run
from plancompiler.errors import UsageError
from tests.engines.installed import ROOT, WAIT, local, python_of, ray, slurm

PAGE = (ROOT / "docs/engines.md").read_text()


def printed(*words: object) -> str:
    done = CliRunner().invoke(manifest_command, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_pages_script_is_the_one_that_is_written() -> None:
    (command,) = re.findall(r"^ {4}plancompiler manifest (.* slurm .*)$", PAGE, re.M)
    (script,) = re.findall(r"```bash\n(#!/bin/bash.*?)```", PAGE, re.S)
    assert printed(*command.split()) == script


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("a", ()), "got: nothing|Got: nothing"),
        (("a", ("compile", "x.py")), "launch SCRIPT"),
        (("A job", ("run", "x.py")), "cannot have this name"),
    ],
)
def test_what_makes_no_sense(words, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        checked_run(*words, 1, 1)
    assert re.search(complaint, str(caught.value))


def test_pods_meet_where_the_first_one_is() -> None:
    text = printed("-n", 4, "--nnodes", 2, "kubernetes", "launch", "train.py", "--epochs", 3)
    service, job = json.loads(text)["items"]
    name = job["metadata"]["name"]
    pod = job["spec"]["template"]["spec"]
    assert (name, service["metadata"]["name"], pod["subdomain"]) == ("train",) * 3
    assert (
        service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    )
    command = pod["containers"][0]["command"]
    assert command[command.index("--rdzv-endpoint") + 1] == "train-0.train:29400"
    assert command[-3:] == ["train.py", "--epochs", "3"]


@pytest.mark.processes
@pytest.mark.engines
def test_the_published_schema_takes_the_manifest() -> None:
    """That of Kubernetes as the package kubernetes-validate has it."""
    items = json.loads(printed("-n", 4, "--nnodes", 2, "kubernetes", "launch", "a.py"))["items"]
    program = (
        "import json, sys, kubernetes_validate as k\n"
        "for item in json.load(sys.stdin):\n"
        "    k.validate(item, k.latest_version(), strict=True)\n"
    )
    subprocess.run(
        [python_of("kubernetes"), "-W", "ignore", "-c", program],
        input=json.dumps(items),
        text=True,
        check=True,
    )


@pytest.mark.processes
@pytest.mark.engines
@pytest.mark.xdist_group("slurm")
@pytest.mark.parametrize("command", ["launch", "run"])
def test_the_script_runs(command: str, line: Path, tmp_path: Path) -> None:
    engine = slurm()
    job = ("run", ROOT / "examples/mlp.py", "--steps", 3, "--save", tmp_path / "saved")
    words = ("launch", line) if command == "launch" else job
    script, output = tmp_path / "job.sh", tmp_path / "output"
    script.write_text(printed("-n", 2, "slurm", *words))
    own = str(Path(sys.executable).parent)
    done = subprocess.run(
        ["sbatch", "--wait", "-o", str(output), str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT,
        env=engine.variables() | {"PATH": f"{own}{os.pathsep}{os.environ['PATH']}"},
    )
    said = output.read_text()
    assert done.returncode == 0, said + done.stderr
    if command == "launch":
        assert said == local().run("launch", "-n", 2, line).stdout
    else:
        assert "step 3/3" in said
        assert json.loads((tmp_path / "saved/index.json").read_text())["step"] == 3


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
