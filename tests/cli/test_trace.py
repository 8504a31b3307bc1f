"""Recorded timelines from `pc.run` and `plancompiler run`."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import NonFiniteError, UsageError
from plancompiler.running.session import BACKENDS
from tests.cli.conftest import Invoke
from tests.cli.test_session import batches, regression


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """No session may leave a temporary file; workers take the folder from their environment."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    assert list(folder.iterdir()) == []


def actions_of(file: Path) -> list[dict[str, Any]]:
    events = json.loads(file.read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


@pytest.mark.processes
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trace_holds_every_task_of_every_step(backend: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    with pc.run(regression(), backend=backend, trace=file) as session:
        for feeds in batches(4):
            session.step(**feeds)
        assert len(session.timelines()) == 2
        plans = session.plans
    actions = actions_of(file)
    for rank, plan in plans.items():
        mine = Counter(event["name"] for event in actions if event["pid"] == rank)
        expected = Counter(task.name for task in plan.tasks)
        assert mine == {name: 4 * count for name, count in expected.items()}
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in actions:
        rows.setdefault((event["pid"], event["tid"]), []).append(event)
    for row in rows.values():
        for before, after in pairwise(row):
            assert before["ts"] + before["dur"] <= after["ts"] + 5e-4
    matmul = next(event for event in actions if event["args"]["op"] == "matmul")
    assert "test_session.py:" in matmul["args"]["source"]


@pytest.mark.processes
def test_a_trace_of_micro_batches_names_them(tmp_path: Path) -> None:
    mesh = pc.Placement("cpu", [0, 1])
    with pc.job("pieces", seed=1, config=pc.Config(microbatches=3)) as job:
        x = pc.input("x", (12, 5), "float32", mesh, ["S(0)"])
        model = pc.nn.Linear(5, 3).place(mesh)
        loss = (model(x) * model(x)).mean()
        pc.optim.SGD(lr=0.1).minimize(loss)
        pc.output("loss", loss)
    file = tmp_path / "run.json"
    with pc.run(job, trace=file) as session:
        for _ in range(2):
            session.step(x=np.ones((12, 5), np.float32))
    actions = actions_of(file)
    forward = [event for event in actions if event["args"]["op"] == "input"]
    moments = Counter((event["args"]["step"], event["args"]["microbatch"]) for event in forward)
    assert moments == {(step, piece): 2 for step in range(2) for piece in range(3)}
    updates = [event for event in actions if event["args"]["op"] == "sgd_update"]
    assert {event["args"]["microbatch"] for event in updates} == {0}


@pytest.mark.processes
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failed_run_leaves_its_trace(backend: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    good, bad = batches(2)
    bad["x"] = np.full_like(bad["x"], 1e30)  # its square is infinite
    with pc.run(regression(), backend=backend, trace=file, anomaly=True) as session:
        session.step(**good)
        with pytest.raises(NonFiniteError) as caught:
            session.step(**bad)
    actions = actions_of(file)
    assert {event["args"]["step"] for event in actions} == {0, 1}
    unfinished = {event["args"]["op"] for event in actions if "unfinished" in event["args"]}
    assert str(caught.value.report.op).rstrip("_0123456789") in unfinished


@pytest.mark.processes
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_with_an_infinite_loss_leaves_its_trace(backend: str, tmp_path: Path) -> None:
    """Nobody fails inside a step: the value is looked at when the step is over."""
    file = tmp_path / "run.json"
    good, bad = batches(2)
    bad["x"] = np.full_like(bad["x"], 1e30)  # its square is infinite
    with pc.run(regression(), backend=backend, trace=file) as session:
        session.step(**good)
        with pytest.raises(NonFiniteError, match="step 1"):
            session.step(**bad)
    actions = actions_of(file)
    assert {event["args"]["step"] for event in actions} == {0, 1}
    assert not [event for event in actions if "unfinished" in event["args"]]


def test_a_session_that_records_nothing_says_so() -> None:
    with pc.run(regression()) as session, pytest.raises(UsageError, match="records nothing"):
        session.timelines()


@pytest.mark.processes
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_command_writes_a_trace_and_a_profile(
    invoke: Invoke, mlp: str, tmp_path: Path, backend: str
) -> None:
    file = tmp_path / "run.json"
    options = ("--steps", "6", "--backend", backend, "--trace", str(file), "--profile")
    result = invoke("run", mlp, *options, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    # A batch is read ahead of a seventh step, perhaps after the profile was taken.
    reads = [event for event in actions_of(file) if event["args"]["op"] == "arrays_batch"]
    rest = [event for event in actions_of(file) if event["args"]["op"] != "arrays_batch"]
    assert {event["args"]["step"] for event in rest} == set(range(6))
    assert {event["args"]["step"] for event in reads} | {6} == set(range(7))
    ranks, tasks = report["profile"]["ranks"], report["profile"]["tasks"]
    assert [share["rank"] for share in ranks] == [0, 1]
    for share in ranks:
        parts = share["kernels"] + share["communication"] - share["both"] + share["waiting"]
        assert parts == pytest.approx(1)
    seconds = [share["seconds"] for share in tasks]
    assert seconds == sorted(seconds, reverse=True)
    # A trace has three decimals of a microsecond.
    recorded = sum(event["dur"] for event in rest) / 1e6
    spent = sum(share["seconds"] for share in tasks if share["op"] != "arrays_batch")
    assert spent == pytest.approx(recorded, rel=1e-6)
    counts = [share["actions"] for share in tasks if share["op"] != "arrays_batch"]
    assert sum(counts) == len(rest)


@pytest.mark.processes
def test_the_profile_is_a_table(invoke: Invoke, mlp: str) -> None:
    result = invoke("run", mlp, "--steps", "3", "--profile")
    assert result.exit_code == 0, result.output
    assert "communication" in result.stdout
    assert "all_reduce" in result.stdout
    assert "job.py:" in result.stdout


def test_a_trace_that_cannot_be_written_is_refused_first(
    invoke: Invoke, mlp: str, tmp_path: Path
) -> None:
    result = invoke("run", mlp, "--trace", str(tmp_path / "missing" / "run.json"))
    assert result.exit_code == 2
    assert "the trace file cannot be written" in result.stderr
    assert "compiled" not in result.stderr
