"""Compilation by a master and its workers without execution, and plans that come back from jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import plancompiler as pc
from plancompiler.cli.program import cli
from plancompiler.cluster import chunks
from plancompiler.cluster.messages import JobPhase, JobRequest, PhaseChanged
from plancompiler.errors import ClusterError, JobCancelledError, RankError, UsageError
from plancompiler.lower.compile import MODES, compile_plans
from plancompiler.master.job_channel import JobChannel, Retention
from plancompiler.master.server import MasterServer
from plancompiler.plan.compiled_plans import CompiledPlans
from plancompiler.running.client import Client
from tests.cluster.conftest import Workers
from tests.examples import EXAMPLES, mlp

FILE = str(EXAMPLES / "mlp.py")
SMALL = ("-D", "hidden=30", "-D", "batch=30")


@pytest.fixture
def client(cluster: MasterServer) -> Iterator[Client]:
    with Client(cluster.address) as client:
        yield client


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def asked(*arguments: str) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_plans_of_the_cluster_are_those_of_compile_in_every_mode(
    cluster: MasterServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1000)  # all that crosses comes in many
    here = asked("compile", FILE, *SMALL, "--ranks", "2", "--out", str(tmp_path / "here"))
    expected = contents(tmp_path / "here")
    del expected["summary.json"]  # what compiling here took
    assert {"plans.json", "rank_0.plan", "rank_1.txt", "boxing_task_graph.bin"} <= expected.keys()
    for mode in MODES:
        out = tmp_path / mode
        made = asked(
            *("submit", FILE, *SMALL, "--master", cluster.address),
            *("--compile-only", "--out", str(out), "--mode", mode),
        )
        assert made["digest"] == here["digest"]
        assert contents(out) == expected
    with Client(cluster.address) as client:
        assert all(job.done_steps == 0 for job in client.jobs())
    ran = asked("run", str(tmp_path / MODES[0]), "--steps", "3")
    assert ran["losses"] == asked("run", FILE, *SMALL, "--ranks", "2", "--steps", "3")["losses"]
    assert ran["digest"] == here["digest"]


def test_a_job_with_inputs_is_compiled_and_run_here(client: Client, tmp_path: Path) -> None:
    mesh = pc.Placement("cpu", [0, 1])
    with pc.job("fed") as job:
        x = pc.input("x", (4, 3), "float32", mesh, ["S(0)"])
        pc.output("total", x.sum())
    phases: list[JobPhase] = []
    plans = client.compile(job, on_phase=lambda phase, _: phases.append(phase))
    assert JobPhase.PREPARING not in phases
    assert phases[-1] is JobPhase.FINISHED
    with pc.run(plans) as session:
        assert session.cached
        assert session.step(x=np.ones((4, 3), np.float32))["total"] == 12.0
    wishes: tuple[dict[str, Any], ...] = ({"ranks": 3}, {"mode": "naive"})
    for wrong in wishes:
        with pytest.raises((RankError, UsageError), match="compiled"):
            pc.run(plans, **wrong)


@pytest.mark.processes
def test_compiled_plans_are_run_by_processes_as_they_are() -> None:
    # Compiling this job again would not give these.
    others = compile_plans(mlp(ranks=1, hidden=31), 1).plans
    plans = CompiledPlans(mlp(ranks=1), 1, others)
    with pc.run(plans, backend="processes") as session:
        assert session.digest == plans.digest
        assert session.plans == plans.plans
        assert session.cached
        losses = [outputs["loss"] for outputs in session.run(2)]
    with pc.run(plans) as session:
        assert [outputs["loss"] for outputs in session.run(2)] == losses


@pytest.mark.parametrize("mode", ["rank_per_process", "naive"])
def test_plans_of_a_job_that_runs_and_of_one_that_has_ended(client: Client, mode: str) -> None:
    job = mlp(ranks=2)
    handle = client.submit(job, 1 << 20, mode=mode)
    plans = handle.plans()
    assert str(plans.job) == str(job)
    assert sorted(plans.plans) == [0, 1]
    assert plans.graph is None
    assert handle.cancel()
    with pytest.raises(JobCancelledError):
        handle.result()
    assert handle.digest == plans.digest
    again = client.job(handle.job_id).plans()
    assert again.plans == plans.plans


def test_plans_that_never_come_and_plans_that_are_no_longer_kept(workers: Workers) -> None:
    with (
        MasterServer(ranks=1, retention=Retention(jobs=1)) as server,
        Client(server.address) as client,
    ):
        waiting = client.submit_compilation(mlp(ranks=1))
        waiting.cancel()
        with pytest.raises(JobCancelledError):
            waiting.plans()
        workers(server.address)
        first = client.submit_compilation(mlp(ranks=1), name="first")
        assert first.plans().world_size == 1
        client.compile(mlp(ranks=1))
        last = client.submit_compilation(mlp(ranks=1))
        with pytest.raises(ClusterError, match="no longer kept"):
            first.plans()
        last.result()
        for worker in workers.started:
            worker.stop()


def test_what_has_no_meaning_for_a_job_that_is_compiled_only(
    cluster: MasterServer, client: Client, tmp_path: Path
) -> None:
    submit = ("submit", FILE, *SMALL, "--master", cluster.address, "--compile-only")
    out = ("--out", str(tmp_path / "plans"))
    for wrong in (
        (*out, "--steps", "100"),
        (*out, "--save", "model"),
        (*out, "--anomaly"),
        (*out, "--no-cache"),
        (*out, "--detach"),
        (),
    ):
        result = invoke(*submit, *wrong)
        assert result.exit_code == 2, result.output
        assert "compile" in result.stderr or "--detach" in result.stderr
    assert invoke(*submit[:-1], *out).exit_code == 2
    assert client.jobs() == ()
    with pytest.raises(UsageError, match="compiled only"):
        client._submit(mlp(ranks=2), JobRequest(3, compile_only=True), "key")
    with pytest.raises(RankError, match="more ranks"):
        client.compile(mlp(ranks=2), ranks=9)
    job = asked(*submit, "--detach")["job"]
    assert client.job(job).plans().world_size == 2


@pytest.mark.parametrize("kept", [True, False])
def test_plans_after_a_master_was_started_again(
    workers: Workers, tmp_path: Path, kept: bool
) -> None:
    retention = Retention() if kept else Retention(job_bytes=1000)
    options: dict[str, Any] = {"ranks": 2, "journal": tmp_path / "journal", "retention": retention}
    with MasterServer(**options) as server, Client(server.address) as client:
        workers(server.address, 2)
        client.compile(mlp(ranks=2)).save(tmp_path / "before")
        ran = client.submit(mlp(ranks=2), 1)
        ran.result()
        plans = ran.plans()
        for worker in workers.started:
            worker.stop()
    with MasterServer(**options) as server, Client(server.address) as client:
        compiled, ran = client.job(1), client.job(2)
        if kept:
            assert ran.plans().plans == plans.plans
            compiled.plans().save(tmp_path / "after")
            assert contents(tmp_path / "after") == contents(tmp_path / "before")
        else:
            for handle in (compiled, ran):
                with pytest.raises(ClusterError, match="no longer kept"):
                    handle.plans()


def test_a_plan_that_comes_after_the_end_of_its_job_is_not_kept() -> None:
    channel = JobChannel(b"a job", JobRequest(0, compile_only=True))
    budget = chunks.UploadBudget(100)
    reservation = chunks.Reservation(budget)
    reservation.take(10)
    channel.publish(PhaseChanged(JobPhase.CANCELLED, 0.0))
    channel.release()
    with pytest.raises(ClusterError, match="nobody waits for this plan"):
        channel.keep_plan(0, chunks.pack(b"a plan"), reservation)
    assert channel.plans == {}
