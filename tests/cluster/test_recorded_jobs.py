"""Jobs of a cluster that are recorded, and that bring a deadline of their own."""

from __future__ import annotations

import json
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import plancompiler as pc
from plancompiler.cli.program import cli
from plancompiler.errors import DeadlineError, UsageError, WireFormatError
from plancompiler.executor.trace import recorded_bytes, timelines_from_bytes
from plancompiler.lower.compile import compile_plans
from plancompiler.master.server import MasterServer
from plancompiler.plan.arrays import arrays_from_bytes, arrays_to_bytes
from plancompiler.running.client import Client
from tests.examples import mlp

STEPS = 4
SECONDS = 30.0
JOB = """
from tests.examples import mlp


def build():
    return mlp(ranks=2)
"""


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What workers record is gone with the job."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []


def test_timelines_hold_every_task_of_every_step(cluster: MasterServer) -> None:
    job = mlp(ranks=2)
    with Client(cluster.address) as client:
        handle = client.submit(job, STEPS, record=True)
        with pytest.raises(UsageError, match="no timelines"):
            handle.timelines()
        handle.result()
        timelines = handle.timelines()
        plain = client.submit(job, 1)
        plain.result()
        with pytest.raises(UsageError, match="record=True"):
            plain.timelines()
    assert [each.rank for each in timelines] == [0, 1]
    plans = compile_plans(job, 2, "rank_per_iter").plans
    for timeline, plan in zip(timelines, plans.values(), strict=True):
        assert [label.name for label in timeline.tasks] == [task.name for task in plan.tasks]
        done = Counter(np.count_nonzero(timeline.ends, axis=0).tolist())
        # Data of a step after the last one may have been read ahead.
        assert set(done) <= {STEPS, STEPS + 1}
        assert (timeline.ends >= timeline.begins)[:STEPS].all()
    begins = [int(each.begins[0].min()) for each in timelines]
    assert abs(begins[0] - begins[1]) < 60e9, "one clock, and no rank a minute before the other"


def test_submit_writes_a_trace_and_a_profile(cluster: MasterServer, tmp_path: Path) -> None:
    job, file = tmp_path / "job.py", tmp_path / "run.json"
    job.write_text(JOB)
    command = ["submit", str(job), "--master", cluster.address, "--steps", str(STEPS), "--json"]
    options = ["--trace", str(file), "--profile", "--deadline", "60"]
    result = CliRunner().invoke(cli, [*command, *options])
    assert result.exit_code == 0, result.output
    assert f"wrote the timeline to {file}" in result.stderr
    report = json.loads(result.stdout)
    assert len(report["losses"]) == STEPS
    assert [share["rank"] for share in report["profile"]["ranks"]] == [0, 1]
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}
    refused = CliRunner().invoke(cli, [*command, "--trace", str(tmp_path / "none" / "run.json")])
    assert refused.exit_code == 2
    assert "the trace file cannot be written" in refused.stderr
    assert "queued" not in refused.stderr


def test_a_detached_job_that_is_recorded_has_a_timeline_to_fetch(
    cluster: MasterServer, tmp_path: Path
) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)

    def program(*words: object) -> str:
        result = CliRunner().invoke(cli, [*map(str, words), "--master", cluster.address, "--json"])
        assert result.exit_code == 0, result.output
        return result.stdout

    submitted = program("submit", job, "--steps", STEPS, "--detach", "--record")
    number = json.loads(submitted)["job"]
    program("fetch", number, "--what", "timeline", "--out", tmp_path / "here")
    events = json.loads((tmp_path / "here" / "timeline.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}


def test_outputs_are_in_the_order_of_the_job_whichever_rank_is_first(cluster: MasterServer) -> None:
    with pc.job("two") as job:
        for name, rank in (("last", 1), ("first", 0)):
            x = pc.normal((2,), placement=pc.Placement("cpu", [rank]), sbp=["B"])
            pc.output(name, x.sum())
    with Client(cluster.address) as client:
        orders = {tuple(outputs) for outputs in client.submit(job, 50)}
    assert orders == {("step", "last", "first")}


def test_a_terminal_obeys_nothing_that_a_job_has_in_its_names(cluster: MasterServer) -> None:
    with pc.job("named") as job:
        pc.output("\x1b[31mloss", pc.ones((2,), "float32", pc.Placement("cpu", [0])).sum())
    with Client(cluster.address) as client:
        handle = client.submit(job, 2)
        handle.result()
    shown = CliRunner().invoke(cli, ["attach", str(handle.job_id), "--master", cluster.address])
    assert shown.exit_code == 0
    for text in (shown.stdout, shown.stderr):
        assert "\\x1b[31mloss" in text
        assert "\x1b" not in text


RELEASED = threading.Event()
FIRST = threading.Lock()


@pc.op(rule="n -> n", linear=0)
def held_once(x: np.ndarray) -> np.ndarray:
    """Its first call lasts until it is released; all others end at once."""
    if FIRST.acquire(blocking=False):
        RELEASED.wait(SECONDS)
    return x


def test_a_job_brings_its_own_deadline(cluster: MasterServer) -> None:
    mesh = pc.Placement("cpu", [0, 1])
    with pc.job("held") as job:
        ones = pc.ones((4,), "float32", mesh).redistribute(sbp="S(0)")
        pc.output("loss", held_once(ones).sum())
    with Client(cluster.address) as client:
        for refused in (0, -1.0, float("nan"), float("inf")):
            with pytest.raises(UsageError, match="deadline"):
                client.submit(job, 1, deadline=refused)
        # The workers' own deadline is five minutes.
        handle = client.submit(job, 1, deadline=0.3)
        try:
            with pytest.raises(DeadlineError, match="held_once"):
                handle.result()
        finally:
            RELEASED.set()
        assert len(list(client.submit(mlp(ranks=2), STEPS))) == STEPS


def test_what_is_no_timeline_is_refused(tmp_path: Path, cluster: MasterServer) -> None:
    with pytest.raises(WireFormatError, match="no timeline"):
        timelines_from_bytes([b"none"])
    job = mlp(ranks=1)
    with pc.run(job, record=True) as session:
        list(session.run(1))
        recording = session._recording
        assert recording is not None
        data = recorded_bytes(recording.folder, 0)
    (timeline,) = timelines_from_bytes([data])
    assert timeline.job == job.name
    with pytest.raises(WireFormatError, match="no valid 'first_step'"):
        timelines_from_bytes([data.replace(b"first_step", b"other_name")])
    # What a few bytes say of many actions, with arrays without elements, takes no memory for them.
    for runs, tasks, complaint in (
        (1 << 40, 1, "no valid 'runs'"),
        (1 << 14, 64, "times of other actions than it lists"),
    ):
        arrays = arrays_from_bytes(data)
        header = json.loads(arrays["header"].tobytes())
        task = header["tasks"][0] | {"runs": runs}
        header |= {"tasks": [task | {"id": each} for each in range(tasks)], "registers": []}
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
        arrays["begins"] = arrays["ends"] = np.empty((0, runs * tasks), np.int64)
        with pytest.raises(WireFormatError, match=complaint):
            timelines_from_bytes([arrays_to_bytes(arrays)])
