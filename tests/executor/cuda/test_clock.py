"""Timelines of devices: when the device ran what was launched, not when it was launched."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from plancompiler.executor.local_run import LocalWorld
from plancompiler.executor.timeline import chrome_events
from plancompiler.executor.trace import Recording, write_trace
from plancompiler.ir.task import TaskKind
from plancompiler.lower.compile import compile_plans
from tests.examples import gpt
from tests.executor.cuda.devices import WORK_NANOSECONDS, LateDevice, ThreadedDevice, World
from tests.executor.cuda.jobs import moved

STEPS = 7
"""More than events are kept for."""


def recorded(job, devices, calls=(STEPS,), first=0):
    """Timelines by rank, and the plans."""
    plans = compile_plans(job, job.world_size).plans
    with Recording() as recording:
        with LocalWorld(
            plans, devices=devices, deadline=60, record=recording.folder, first_step=first
        ) as world:
            for steps in calls:
                world.run(steps)
        return recording.timelines(), plans


def rows_of(timeline):
    """Begins and ends by stream, in the order of the begins."""
    rows = {}
    for column, (position, _) in enumerate(timeline.columns):
        spans = rows.setdefault(timeline.tasks[position].stream, [])
        spans += zip(timeline.begins[:, column], timeline.ends[:, column], strict=True)
    return {stream: sorted(spans) for stream, spans in rows.items()}


@pytest.mark.processes
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("seed", range(2))
def test_times_are_the_devices(seed, microbatches):
    job = moved(gpt(microbatches=microbatches))
    (timeline,), plans = recorded(job, {0: LateDevice(seed)}, calls=(3, 1, 3), first=5)
    assert timeline.first_step == 5
    assert timeline.begins.shape[0] == STEPS
    assert timeline.begins.all()
    lasted = timeline.ends - timeline.begins
    # On the simulated device every launched work lasts as long, one after another in an order drawn
    # by chance, and nothing else takes time.
    assert not (lasted % WORK_NANOSECONDS).any()
    for column, (position, _) in enumerate(timeline.columns):
        task = timeline.tasks[position]
        if task.op == "matmul":
            assert lasted[:, column].min() == WORK_NANOSECONDS
        if task.kind == str(TaskKind.STEP_END):
            assert lasted[:, column].min() == 0
    rows = rows_of(timeline)
    assert rows.keys() == {str(task.stream) for task in plans[0].tasks}
    for spans in rows.values():
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    columns = {task.id: timeline.first_column[at] for at, task in enumerate(timeline.tasks)}
    if microbatches == 1:
        for register in plans[0].registers:
            for reader in register.consumers:
                made = timeline.ends[:, columns[register.producer]]
                variable = register.producer in {v.id for v in _variables(plans[0])}
                assert variable or (made <= timeline.begins[:, columns[reader]]).all()


def _variables(plan):
    return [task for task in plan.tasks if task.kind is TaskKind.VARIABLE]


@pytest.mark.processes
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_each_stream_of_a_device_has_a_row(layout, tmp_path):
    job = moved(gpt(**layout))
    world = World()
    devices = {rank: ThreadedDevice(world) for rank in range(2)}
    timelines, plans = recorded(job, devices, calls=(3,))
    for device in devices.values():
        device.close()
    file = tmp_path / "run.json"
    write_trace(file, timelines)
    events = json.loads(file.read_text())["traceEvents"]
    assert events == list(chrome_events(timelines))
    for timeline in timelines:
        rows = rows_of(timeline)
        named = {
            event["args"]["name"]: event["tid"]
            for event in events
            if event["name"] == "thread_name" and event["pid"] == timeline.rank
        }
        assert named.keys() == rows.keys()
        assert len(set(named.values())) == len(named)
        sends = {task.name for task in timeline.tasks if ":send to rank" in task.name}
        assert bool(sends) == ("pp" in layout)
        for name in sends:
            results = [event for event in events if event["name"] == name]
            assert len(results) == 3
            assert {event["tid"] for event in results} == {named[_stream_of(timeline, name)]}
    if "tp" in layout:
        check_collectives(timelines)
    assert len(plans) == 2


def _stream_of(timeline, name):
    return next(task.stream for task in timeline.tasks if task.name == name)


def check_collectives(timelines):
    """A collective ends nowhere before it began everywhere. Clocks are read to some 10 µs."""
    slack = 5_000_000
    for column, (position, _) in enumerate(timelines[0].columns):
        if timelines[0].tasks[position].kind == str(TaskKind.COLLECTIVE_BOXING):
            first, second = timelines
            assert (first.ends[:, column] + slack > second.begins[:, column]).all()
            assert (second.ends[:, column] + slack > first.begins[:, column]).all()


@pytest.mark.processes
def test_recording_changes_no_result():
    job = moved(gpt())
    plans = compile_plans(job, 1).plans
    results = []
    for record in (False, True):
        with Recording() as recording:
            folder = recording.folder if record else None
            with LocalWorld(plans, devices={0: LateDevice(1)}, record=folder) as world:
                results.append([float(each["loss"]) for each in world.run(STEPS)])
    np.testing.assert_array_equal(*results)
