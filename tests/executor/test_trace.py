"""Timelines: what is recorded, what is made of it, and what is left when a run fails."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from plancompiler.errors import ExecutionError, PlanCompilerError, UsageError
from plancompiler.executor import trace
from plancompiler.executor.local_run import LocalWorld
from plancompiler.executor.timeline import (
    TaskLabel,
    Timeline,
    chrome_events,
    common,
    length,
    merged,
    rank_shares,
    task_shares,
)
from plancompiler.executor.trace import Recorder, Recording
from plancompiler.ir.pipeline import Segment, SegmentKind, Slot
from plancompiler.plan.digest import plan_digest
from tests.executor.host_world import HostWorld
from tests.executor.plans import chain, data_parallel, failing, pipeline

FEEDS = {"x": np.ones((6, 4), np.float32)}


def spans(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, np.int64).reshape(-1, 2)


def check_complete(timelines: tuple[Timeline, ...], plans: dict, first: int, steps: int) -> None:
    """Every task of every plan ran `steps` times, and no stream did two things at once."""
    assert [timeline.rank for timeline in timelines] == sorted(plans)
    events = list(chrome_events(timelines))
    actions = [event for event in events if event["ph"] == "X"]
    for rank, plan in plans.items():
        mine = [event for event in actions if event["pid"] == rank]
        names = Counter(task.name for task in plan.tasks)
        assert Counter(event["name"] for event in mine) == Counter(
            {name: count * steps for name, count in names.items()}
        )
        assert {event["args"]["step"] for event in mine} == set(range(first, first + steps))
        rows: dict[int, list[dict]] = {}
        for event in mine:
            rows.setdefault(event["tid"], []).append(event)
        assert len(rows) == len({task.stream for task in plan.tasks})
        for row in rows.values():
            for before, after in pairwise(row):
                # To half a nanosecond: times are floats in microseconds.
                assert before["ts"] + before["dur"] <= after["ts"] + 5e-4
    assert not any("unfinished" in event["args"] for event in actions)
    assert min(event["ts"] for event in actions) == 0


@pytest.mark.processes
@pytest.mark.parametrize("first", [0, 7])
def test_ranks_as_threads_record_every_action(tmp_path: Path, first: int) -> None:
    plans = data_parallel()
    with Recording() as recording:
        with LocalWorld(plans, first_step=first, record=recording.folder) as world:
            for _ in range(3):
                world.step(FEEDS)
            while_open = recording.timelines()
        check_complete(while_open, plans, first, 3)
        check_complete(recording.timelines(), plans, first, 3)
        folder = recording.folder
        assert folder.is_dir()
    assert not folder.exists()


def test_ranks_as_processes_record_on_one_clock(host_world: HostWorld) -> None:
    plans = data_parallel()
    with Recording() as recording:
        host_world.open(data_parallel, ranks=[0, 1], record=recording.folder)
        host_world.step([FEEDS] * 4, [0, 1])
        host_world.close_run([0, 1])
        timelines = recording.timelines()
    check_complete(timelines, plans, 0, 4)
    # A collective ends nowhere before it began everywhere.
    (column,) = [
        timelines[0].first_column[position]
        for position, task in enumerate(plans[0].tasks)
        if task.kind.value == "CollectiveBoxing"
    ]
    assert (timelines[0].ends[:, column] > timelines[1].begins[:, column]).all()
    assert (timelines[1].ends[:, column] > timelines[0].begins[:, column]).all()


@pytest.mark.processes
def test_events_say_what_ran(tmp_path: Path) -> None:
    with Recording() as recording:
        with LocalWorld(chain(), record=recording.folder) as world:
            world.step({"x": np.ones((3, 4), np.float32)})
        events = list(chrome_events(recording.timelines()))
    (event,) = [event for event in events if event["ph"] == "X" and event["args"]["op"] == "matmul"]
    assert event["name"] == "compute_2"
    assert event["cat"] == "Compute"
    assert event["dur"] > 0
    assert event["args"] == {
        "kind": "Compute",
        "op": "matmul",
        "step": 0,
        "microbatch": 0,
        "input_bytes": (3 * 4 + 4 * 2) * 4,
        "output_bytes": 3 * 2 * 4,
        "source": "sketch.py:3",
    }
    names = {(event["name"], event["tid"]): event["args"] for event in events if event["ph"] == "M"}
    assert names["process_name", 0] == {"name": "sketch rank 0"}
    assert names["process_labels", 0] == {"labels": plan_digest(chain()[0])}
    assert names["thread_name", event["tid"]] == {"name": "compute"}


@pytest.mark.processes
def test_a_copy_counts_the_part_of_the_remote_register_that_it_reads() -> None:
    plans = pipeline()
    with Recording() as recording:
        for rank, plan in plans.items():
            Recorder(plan, recording.folder, 0).close()
            assert recording.timelines()[rank].tasks
        timelines = recording.timelines()
    copies = [
        task for timeline in timelines for task in timeline.tasks if task.kind == "CopyCommNet"
    ]
    assert copies
    assert all(task.input_bytes == task.output_bytes > 0 for task in copies)


@pytest.mark.processes
def test_counters_follow_the_free_slots() -> None:
    with Recording() as recording:
        with LocalWorld(chain(count=3), record=recording.folder) as world:
            for _ in range(5):
                world.step({"x": np.ones((3, 4), np.float32)})
        events = list(chrome_events(recording.timelines()))
    counts = [event for event in events if event["ph"] == "C"]
    assert {event["name"] for event in counts} == {"free slots of r0.0.0.0"}
    free = [event["args"]["free"] for event in counts]
    assert len(free) == 10
    assert min(free) >= 0
    assert max(free) == free[-1] == 3


@pytest.mark.processes
def test_every_micro_batch_has_an_action_of_its_own() -> None:
    plan = chain()[0]
    last = len(plan.tasks) - 1
    plan = replace(
        plan,
        microbatches=2,
        segments=(Segment(SegmentKind.FORWARD, 0), Segment(SegmentKind.EPILOGUE)),
        slots=(Slot(0, 0), Slot(0, 1), Slot(1, 0)),
        tasks=tuple(
            replace(task, segment=int(position == last)) for position, task in enumerate(plan.tasks)
        ),
    )
    ran: list[int] = []
    with Recording() as recording:
        recorder = Recorder(plan, recording.folder, 3)
        runs = [recorder.wrap(task, ran.append) for task in plan.tasks]
        for version in (6, 7, 8, 9):
            for run in runs[:-1]:
                run(version)
        for version in (3, 4):
            runs[-1](version)
        recorder.close()
        (timeline,) = recording.timelines()
    assert ran == [each for version in (6, 7, 8, 9) for each in [version] * last] + [3, 4]
    actions = [event for event in chrome_events([timeline]) if event["ph"] == "X"]
    assert timeline.begins.shape == (2, 2 * last + 1)
    assert (timeline.ends >= timeline.begins).all()
    moments = Counter((event["args"]["step"], event["args"]["microbatch"]) for event in actions)
    assert moments == {(3, 0): last + 1, (3, 1): last, (4, 0): last + 1, (4, 1): last}


@pytest.mark.processes
def test_recording_stops_at_its_bound_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plans = data_parallel()
    monkeypatch.setattr(trace, "EVENTS", 2 * 2 * max(len(plan.tasks) for plan in plans.values()))
    file = tmp_path / "run.json"
    with caplog.at_level(logging.WARNING, "plancompiler"), Recording(file) as recording:
        with LocalWorld(plans, record=recording.folder) as world:
            for _ in range(5):
                outputs = world.step(FEEDS)
        timelines = recording.timelines()
    assert outputs
    check_complete(timelines, plans, 0, 2)
    assert all(timeline.cut_short for timeline in timelines)
    (record,) = caplog.records
    assert "first 2 steps only" in record.getMessage()
    assert json.loads(file.read_text())["traceEvents"]


@pytest.mark.processes
@pytest.mark.usefixtures("test_ops")
def test_a_failing_run_leaves_what_was_recorded(tmp_path: Path) -> None:
    plans = failing(step=2)
    file = tmp_path / "run.json"
    feeds = {"x": np.ones(3, np.float32)}
    with Recording(file) as recording, LocalWorld(plans, record=recording.folder) as world:
        world.step(feeds)
        world.step(feeds)
        with pytest.raises(ExecutionError, match="boom"):
            world.step(feeds)
    events = json.loads(file.read_text())["traceEvents"]
    actions = [event for event in events if event["ph"] == "X"]
    assert {event["args"]["step"] for event in actions} == {0, 1, 2}
    stopped = [event for event in actions if event["args"].get("unfinished")]
    assert "test_fail" in {event["args"]["op"] for event in stopped}
    assert all(event["args"]["step"] == 2 and event["dur"] >= 0 for event in stopped)


@pytest.mark.processes
def test_a_killed_rank_leaves_what_it_recorded() -> None:
    world = HostWorld(2)
    try:
        with Recording() as recording:
            world.open(data_parallel, ranks=[0, 1], record=recording.folder)
            world.step([FEEDS] * 3, [0, 1])
            world.kill(1)
            check_complete(recording.timelines(), data_parallel(), 0, 3)
    finally:
        world.shut_down()


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "run.json"):
        with pytest.raises(UsageError, match="cannot be written"):
            Recording(path)
    with pytest.raises(PlanCompilerError, match="cannot record"):
        Recorder(chain()[0], tmp_path / "missing", 0)


@pytest.mark.processes
def test_nothing_recorded_is_a_trace_without_events(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    recording = Recording(file)
    recording.close()
    recording.close()
    assert json.loads(file.read_text()) == {"displayTimeUnit": "ms", "traceEvents": []}
    with pytest.raises(UsageError, match="closed"):
        recording.timelines()


def test_spans_are_merged_and_measured() -> None:
    left = merged(spans((0, 4), (2, 3), (4, 6), (10, 12)))
    assert left.tolist() == [[0, 6], [10, 12]]
    right = merged(spans((5, 11), (20, 21)))
    assert length(left) == 8
    assert common(left, right) == 2
    assert common(left, merged(spans())) == 0
    assert length(merged(spans())) == 0


def test_shares_add_up() -> None:
    tasks = tuple(
        TaskLabel(number, name, kind, op, stream, "", 1, 0, 0)
        for number, (name, kind, op, stream) in enumerate(
            [
                ("a", "Compute", "matmul", "compute"),
                ("b", "CollectiveBoxing", "all_reduce", "collective"),
                ("a", "Compute", "matmul", "compute"),
            ]
        )
    )
    begins = np.array([[100, 120, 160], [300, 0, 380]])
    ends = np.array([[140, 180, 180], [340, 0, 0]])
    timeline = Timeline("job", 4, 0, tasks, (), begins, ends)
    (share,) = rank_shares([timeline])
    assert (share.rank, share.seconds) == (4, 240e-9)
    assert share.kernels == pytest.approx(100 / 240)
    assert share.communication == pytest.approx(60 / 240)
    assert share.both == pytest.approx(40 / 240)
    assert share.waiting == pytest.approx(120 / 240)
    first, second = task_shares([timeline])
    assert (first.name, first.actions, first.share) == ("a", 3, pytest.approx(100 / 240))
    assert (second.name, second.actions, second.seconds) == ("b", 1, pytest.approx(60e-9))
    nothing = replace(timeline, begins=begins[:0], ends=ends[:0])
    assert rank_shares([nothing]) == ()
    assert task_shares([nothing]) == ()


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_the_folder_goes_with_a_process_that_is_killed(backend, tmp_path) -> None:
    program = (
        "import sys, plancompiler as pc; from tests.integration.tiny_jobs import regression; "
        "session = pc.run(regression(2), backend=sys.argv[1], record=True); session.step(); "
        "print('recording', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, backend],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"recording\n"
        (folder,) = tmp_path.glob("plancompiler-trace-*")
        assert list(folder.iterdir())
        children = [
            os.pidfd_open(int(pid))
            for task in Path(f"/proc/{process.pid}/task").iterdir()
            for pid in (task / "children").read_text().split()
        ]
    finally:
        process.kill()
        process.communicate()
    for child in children:
        ended, _, _ = select.select([child], [], [], 60.0)
        os.close(child)
        assert ended, "what the process has started stays"
    assert not folder.exists()
