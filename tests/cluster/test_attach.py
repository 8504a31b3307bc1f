"""Jobs without their client: found again by id, read again from any step, kept for a while."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from plancompiler.cli.program import cli
from plancompiler.cluster.messages import JobPhase, JobRequest
from plancompiler.errors import ClusterError, JobCancelledError, UsageError
from plancompiler.master.job_channel import Retention
from plancompiler.master.server import MasterServer
from plancompiler.running.client import Client
from tests.cluster.conftest import Workers, eventually
from tests.examples import EXAMPLES, mlp

STEPS = 6
SMALL = ("-D", "hidden=30", "-D", "batch=30")


@pytest.fixture
def client(cluster: MasterServer) -> Iterator[Client]:
    with Client(cluster.address) as client:
        yield client


def test_a_job_outlives_its_client_and_is_read_again_from_any_step(
    client: Client, cluster: MasterServer
) -> None:
    with Client(cluster.address) as first:
        handle = first.submit(mlp(ranks=2), STEPS, name="night")
        job_id, seen = handle.job_id, [next(handle)]
    again = client.job(job_id)
    steps = list(again)
    assert [each["step"] for each in steps] == list(range(STEPS))
    assert steps[0] == seen[0]
    assert again.result() == steps[-1]
    assert again.digest is not None
    for since in (0, 2, STEPS - 1, STEPS, STEPS + 5):
        assert list(again.outputs(since)) == steps[since:]
        assert list(client.job(job_id, since=since)) == steps[since:]
    assert again.dropped_steps == 0
    status = again.status()
    assert client.jobs() == (status,)
    assert (status.name, status.steps, status.done_steps, status.open) == (
        *("night", STEPS, STEPS),
        False,
    )
    assert status.outputs == tuple(mlp(ranks=2).outputs)
    assert not again.cancel()


def test_jobs_that_ended_otherwise_say_how(client: Client) -> None:
    handle = client.submit(mlp(ranks=2), 1 << 20)
    assert client.job(handle.job_id).cancel()
    with pytest.raises(JobCancelledError):
        client.job(handle.job_id).result()
    assert client.job(handle.job_id).status().phase is JobPhase.CANCELLED
    for wrong, error in ((0, ClusterError), (99, ClusterError), (1 << 70, ClusterError)):
        with pytest.raises(error, match="job"):
            client.job(wrong)
    wrong_steps: tuple[Any, ...] = (-1, 1 << 40, 1.5)
    for since in wrong_steps:
        with pytest.raises(UsageError, match="first step to read"):
            client.job(handle.job_id, since=since)
    with pytest.raises(UsageError, match="printable"):
        client.submit(mlp(ranks=2), 1, name="two\nlines")


def test_a_look_at_an_open_job_does_not_end_it(client: Client, cluster: MasterServer) -> None:
    with client.open(mlp(ranks=2)) as session:
        first = list(session.run(2))
        with Client(cluster.address) as other:
            beside = other.job(session.job_id)
            assert next(beside)["loss"] == first[0]["loss"]
            assert beside.status().open
            beside.close()
        assert len(list(session.run(2))) == 2
        job_id = session.job_id
    assert len(list(client.job(job_id))) == 4


def test_who_comes_too_late_is_told_how_many_steps_are_gone(workers: Workers) -> None:
    with (
        MasterServer(ranks=1, retention=Retention(job_bytes=1500, jobs=1)) as server,
        Client(server.address) as client,
    ):
        workers(server.address)
        first = client.submit(mlp(ranks=1), STEPS)
        first.close()
        second = client.submit(mlp(ranks=1), STEPS)
        second.close()
        client.job(second.job_id, since=STEPS).result()
        kept = client.job(second.job_id, since=1)
        steps = [each["step"] for each in kept]
        assert steps == list(range(STEPS - len(steps), STEPS))
        assert 0 < len(steps) < STEPS - 1
        assert kept.dropped_steps == STEPS - 1 - len(steps)
        third = client.submit(mlp(ranks=1), 1)
        third.result()
        fourth = client.submit(mlp(ranks=1), 1)  # then only the third is kept
        gone = client.job(second.job_id)
        assert gone.result() == {}
        assert gone.dropped_steps == STEPS
        fourth.result()
        for worker in workers.started:
            worker.stop()


def test_outputs_wait_for_the_client_that_submitted_and_has_not_yet_listened(
    workers: Workers,
) -> None:
    with (
        MasterServer(ranks=1, retention=Retention(jobs=1)) as server,
        Client(server.address) as client,
    ):
        workers(server.address)
        ids = []
        for _ in range(3):
            with client._submitted(mlp(ranks=1), JobRequest(STEPS)) as job_id:
                ids.append(job_id)
            eventually(lambda: all(job.phase.is_end for job in client.jobs()))
        for job_id in ids:
            assert len(list(client.job(job_id))) == STEPS
        client.submit(mlp(ranks=1), 1).result()
        late = client.job(ids[0])
        assert late.result() == {}
        assert late.dropped_steps == STEPS
        for worker in workers.started:
            worker.stop()


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def test_the_commands(cluster: MasterServer) -> None:
    master = ("--master", cluster.address)
    file = str(EXAMPLES / "mlp.py")

    def asked(*arguments: str) -> dict[str, Any]:
        result = invoke(*arguments, *master, "--json")
        assert result.exit_code == 0, result.stderr
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer

    submitted = asked("submit", file, *SMALL, "--steps", f"{STEPS}", "--detach", "--name", "night")
    job = str(submitted["job"])
    followed = asked("attach", job)
    assert len(followed["losses"]) == STEPS
    assert (followed["name"], followed["phase"]) == ("night", "finished")
    late = asked("attach", job, "--since", "4")
    assert (late["first_step"], late["last_step"], late["dropped_steps"]) == (4, STEPS - 1, 0)
    assert late["losses"] == followed["losses"][4:]
    assert "night" in invoke("attach", job, *master).stdout
    plain = invoke("submit", file, *SMALL, "--steps", "100000000", "--detach", *master).stdout
    assert asked("cancel", plain.strip())["cancelled"]
    assert "already ended" in invoke("cancel", job, *master).stdout
    listed = asked("jobs")["jobs"]
    assert [(each["job"], each["phase"]) for each in listed] == [
        (int(job), "finished"),
        (int(plain), "cancelled"),
    ]
    assert asked("status", job) == listed[0]
    assert listed[1]["error"]["code"] == JobCancelledError.code
    assert f"{STEPS} of {STEPS}" in invoke("jobs", *master).stdout
    assert "was cancelled" in invoke("status", plain.strip(), *master).stdout
    ended = invoke("attach", plain.strip(), *master)
    assert ended.exit_code == 1
    assert "was cancelled" in ended.stderr
    for command in ("attach", "status", "cancel"):
        refused = invoke(command, "99", *master)
        assert refused.exit_code == 1
        assert "knows no such job" in refused.stderr
        assert "`plancompiler jobs` lists" in refused.stderr
    for wrong in (("--detach", "--profile"), ("--ranks", "3", "--detach"), ("--name", "\t")):
        assert invoke("submit", file, *SMALL, *wrong, *master).exit_code == 2


@pytest.mark.processes
def test_a_client_that_is_killed_loses_nothing(cluster: MasterServer) -> None:
    command = [sys.executable, "-m", "plancompiler", "submit", str(EXAMPLES / "mlp.py"), *SMALL]
    steps = 50
    with subprocess.Popen(
        [*command, "--master", cluster.address, "--steps", f"{steps}"],
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if line.startswith("step"):
                break
        child.kill()
    with Client(cluster.address) as client:
        (job,) = client.jobs()
        handle = client.job(job.job_id)
        assert [each["step"] for each in handle] == list(range(steps))
        assert handle.phase is JobPhase.FINISHED
