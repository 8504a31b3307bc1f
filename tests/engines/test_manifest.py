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
from plancompiler.engines.joined import place_of
from plancompiler.engines.manifest import checked_run
from plancompiler.errors import UsageError
from tests.engines.installed import ROOT, WAIT, local, python_of, slurm


def printed(*words: object) -> str:
    done = CliRunner().invoke(manifest_command, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


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


def test_pods_of_a_job_know_their_world() -> None:
    """A pod for each rank; Kubernetes itself says which one it is."""
    text = printed("-n", 2, "--nnodes", 3, "kubernetes", "run", "mlp.py", "--steps", 3)
    _, job = json.loads(text)["items"]
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (6, 6)
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["plancompiler", "run", "mlp.py", "--steps", "3"]
    told = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    place = place_of(told | {"JOB_COMPLETION_INDEX": "5"}, None, "the token")
    assert place is not None
    assert (place.rank, place.maximum, place.endpoint) == (5, 6, "mlp-0.mlp:29400")


def test_pods_of_a_jobset_meet_where_the_first_one_is() -> None:
    """Its controller calls a pod after the set, the Job, the Job's number and the pod's."""
    jobset = json.loads(printed("-n", 4, "--nnodes", 2, "jobset", "launch", "train.py"))
    (jobs,) = jobset["spec"]["replicatedJobs"]
    command = jobs["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    endpoint = command[command.index("--rdzv-endpoint") + 1]
    assert endpoint == f"train-{jobs['name']}-0-0.train:29400"


def test_names_of_pods_are_not_too_long() -> None:
    words = ("-n", 1, "--nnodes", 11, "--name", "a" * 47)
    printed(*words, "kubernetes", "launch", "a.py")
    done = CliRunner().invoke(manifest_command, [*map(str, words), "jobset", "launch", "a.py"])
    assert isinstance(done.exception, UsageError)
    assert "a pod of the run cannot have its name" in str(done.exception)


VALIDATE = """
import json, sys
import kubernetes_validate
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet as JobSet

for item in json.load(sys.stdin):
    jobs = [item]
    if item["kind"] == "JobSet":
        # Fields that the schema does not know are left out.
        assert JobSet.model_validate(item).model_dump(
            mode="json", by_alias=True, exclude_unset=True
        ) == item
        jobs = [
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": item["metadata"]}
            | each["template"]
            for each in item["spec"]["replicatedJobs"]
        ]
    for each in jobs:
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
"""


def validate(items: list[object]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python_of("kubernetes"), "-W", "ignore", "-c", VALIDATE],
        input=json.dumps(items),
        text=True,
        check=False,
        capture_output=True,
    )


@pytest.mark.processes
@pytest.mark.engines
@pytest.mark.parametrize("command", ["launch", "run"])
def test_the_published_schemas_take_the_manifests(command: str) -> None:
    """That of Kubernetes as the package kubernetes-validate has it, that of JobSet as
    kubeflow-trainer-api does.
    """
    words = ("-n", 4, "--nnodes", 2)
    items = json.loads(printed(*words, "kubernetes", command, "a.py"))["items"]
    jobset = json.loads(printed(*words, "jobset", command, "a.py"))
    done = validate([*items, jobset])
    assert done.returncode == 0, done.stderr
    jobset["spec"]["network"]["enableHostnames"] = True
    assert validate([jobset]).returncode == 1
    jobset["spec"]["network"].pop("enableHostnames")
    jobset["spec"]["replicatedJobs"][0].pop("template")
    assert validate([jobset]).returncode == 1


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
@pytest.mark.xdist_group("slurm")
def test_slurms_signal_means_to_save(tmp_path: Path) -> None:
    """What the script asks Slurm for before the job's time is over, here by scancel."""
    engine = slurm()
    script, output, folder = (tmp_path / name for name in ("job.sh", "output", "saved"))
    os.mkfifo(output)
    job = (ROOT / "examples/mlp.py", "--steps", 1_000_000, "--save", folder)
    script.write_text(printed("-n", 2, "slurm", "run", *job))
    own = str(Path(sys.executable).parent)
    variables = engine.variables() | {"PATH": f"{own}{os.pathsep}{os.environ['PATH']}"}
    started = subprocess.Popen(
        ["sbatch", "--parsable", "--wait", "-o", str(output), str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=variables,
    )
    try:
        assert started.stdout is not None
        number = started.stdout.readline().strip()
        with output.open() as lines:
            said = []
            for text in lines:
                said.append(text)
                if text.startswith("step 1/"):
                    command = ["scancel", "--batch", "--signal=USR1", number]
                    subprocess.run(command, check=True, env=variables)
        started.communicate(timeout=WAIT)
    finally:
        started.kill()
        started.communicate()
    (done,) = re.findall(r"stopped after step (\d+) of 1000000", "".join(said))
    assert json.loads((folder / "index.json").read_text())["step"] == int(done)
