"""Calibration: what recorded runs show becomes a machine file that forecasts use."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import plancompiler as pc
from plancompiler.cli.program import cli
from plancompiler.costs import chosen_machine
from plancompiler.costs.choice import FOLDER
from plancompiler.costs.machine import Host
from plancompiler.costs.machine_file import read_machine
from plancompiler.costs.measured_tasks import ALONE, PROCESSES, THREADS, Sizes
from plancompiler.errors import UsageError
from plancompiler.executor.timeline import Timeline, register_labels, task_labels
from plancompiler.forecasting import calibrate
from plancompiler.forecasting.calibrate import (
    QUICKEST,
    Calibration,
    Samples,
    add_timelines,
    check_idle,
    link,
    products_reach,
    slowdown,
    task_tables,
    traffic_reaches,
    typical_steps,
)
from plancompiler.forecasting.calibration_jobs import calibration_jobs, write_data
from plancompiler.forecasting.measured_run import WARM_STEPS
from plancompiler.forecasting.recorded_trace import read_trace
from plancompiler.forecasting.sharing import uses_of
from plancompiler.forecasting.task_time import STEP, TURN, WAKE, Place, TaskTimes, cost_of
from plancompiler.lower.compile import compile_plans
from plancompiler.plan.plan import CollectiveSpec, Plan, Stream, Task
from plancompiler.simulate import Simulation, simulate
from tests.passes.worlds import configured, mesh, tower_job

STEPS = 40


@pytest.mark.processes  # recordings have a process that clears up after them
def test_what_is_measured_is_read_back_and_used(tmp_path: Path) -> None:
    calibration = Calibration(pc.run, tmp_path, True, {ALONE: 1, THREADS: 1})
    for run in calibration.runs():
        run()
    path = tmp_path / "here.toml"
    path.write_text(calibration.text("here"))
    machine = chosen_machine(path)
    assert {"device.flops_per_second.float32", "node.bytes_per_second"} <= set(machine.measured)
    assert machine.device.launch_seconds > 0
    assert {"matmul", "adam_update", "all_reduce", "output", TURN, STEP} <= {
        each.kind for each in machine.tasks
    }
    assert {each.world for each in machine.tasks} == {ALONE, THREADS}
    job = next(calibration_jobs(tmp_path, 2, 1))
    known = {backend: pc.forecast(job, path, backend=backend) for backend in (THREADS, PROCESSES)}
    assert known[THREADS].step_seconds > machine.host.step_seconds
    assert known[PROCESSES].traffic_bytes == known[THREADS].traffic_bytes
    assert len(known[THREADS].measured) == len(machine.measured)


@pytest.mark.processes
def test_calibration_traces_its_jobs_without_the_public_names(tmp_path: Path) -> None:
    """As `plancompiler calibrate` does, which imports none of them."""
    program = (
        "import pathlib, sys\n"
        "from plancompiler.forecasting.calibration_jobs import calibration_jobs, write_data\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "write_data(folder)\n"
        "print(len(list(calibration_jobs(folder, 1, 1))))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "3", done.stderr


# --- what timelines show --------------------------------------------------------------------------


@cache
def two_ranks() -> dict[int, Plan]:
    return dict(compile_plans(tower_job(mesh(2), pc.optim.SGD(0.1), layers=2), 2).plans)


def recorded(plans: dict[int, Plan], seconds: dict[str, float]) -> list[Timeline]:
    """The timelines of a run whose tasks take these seconds by their kind."""

    def cost(rank: int, task: Task) -> float:
        return seconds.get(str(task.kind), 1e-6)

    return timelines_of(simulate(plans, cost, steps=1, wake=lambda rank, stream: 3e-6))


def timelines_of(simulation: Simulation) -> list[Timeline]:
    """What recorders would have written of a run, every fourth step of which takes three times as
    long.
    """
    plans, timelines = simulation.plans, []
    span = simulation.makespan
    for rank, plan in plans.items():
        labels = task_labels(plan)
        column = {task.id: number for number, task in enumerate(plan.tasks)}
        begins, ends = np.zeros((2, STEPS, len(labels)))
        for run in simulation.runs:
            if run.rank == rank:
                for step in range(STEPS):
                    slow = 3.0 if step % 4 == 0 else 1.0
                    begins[step, column[run.task.id]] = 1 + step * 10 * span + slow * run.begin
                    ends[step, column[run.task.id]] = 1 + step * 10 * span + slow * run.end
        times = [(each * 1e9).astype(np.int64) for each in (begins, ends)]
        timelines.append(
            Timeline(plan.job, rank, 0, labels, register_labels(plan), *times, cut_short=False)
        )
    return timelines


def test_typical_steps_are_those_of_the_quickest_windows_with_their_slow_steps() -> None:
    timeline = recorded(two_ranks(), {})[0]
    # Every fifth step waits, and of the second half of the run all are slow.
    took = np.where(np.arange(1000) % 5 == 0, 3e6, 1e6)
    took[500:] = 2e6
    ends = np.repeat(np.cumsum(took).astype(np.int64)[:, None], len(timeline.columns), axis=1)
    steps = typical_steps([replace(timeline, begins=ends, ends=ends)])
    assert WARM_STEPS <= min(steps) < max(steps) < 600
    slow = sum(took[step] == 3e6 for step in steps if step < 500)
    assert slow / sum(step < 500 for step in steps) == pytest.approx(0.2, rel=0.05)


def test_long_steps_are_windows_of_their_own() -> None:
    timelines = recorded(two_ranks(), {"Compute": 1e-2})
    steps = typical_steps(timelines)
    assert min(steps) >= WARM_STEPS
    assert len(steps) == pytest.approx((STEPS - WARM_STEPS - 1) * QUICKEST, abs=1)


def test_turns_of_streams_that_run_ahead_stand_apart() -> None:
    """Of gathers of parameters, whose threads wake others, much more goes by between two tasks."""
    plans = dict(
        compile_plans(configured(tower_job(mesh(2), pc.optim.SGD(0.1), layers=6), zero=3), 2).plans
    )
    times = TaskTimes(chosen_machine("cpu-generic"))

    def cost(rank: int, task: Task) -> float:
        return 1e-5

    timelines = []
    for each in timelines_of(simulate(plans, cost, steps=1)):
        begins = each.begins.copy()
        for column, (position, _) in enumerate(each.columns):
            if plans[each.rank].tasks[position].stream is Stream.PARAMETER:
                begins[:, column] += 4000
        timelines.append(replace(each, begins=begins))
    samples = Samples()
    add_timelines(samples, plans, timelines, THREADS)
    (compute,) = {*samples.tasks[times.beside(TURN, plans[0], Stream.COMPUTE), THREADS]}
    (ahead,) = {*samples.tasks[times.beside(TURN, plans[0], Stream.PARAMETER), THREADS]}
    assert compute < 1e-6
    assert ahead == pytest.approx(4e-6, rel=0.1)


def test_timelines_become_points_by_kind_and_sizes() -> None:
    plans = two_ranks()
    samples = Samples()
    costs = {"Compute": 1e-3, "CollectiveBoxing": 5e-3, "Variable": 0.0}
    add_timelines(samples, plans, recorded(plans, costs), THREADS)
    times = TaskTimes(chosen_machine("cpu-generic"))
    collectives = 0
    for task in plans[0].tasks:
        place = times.place(plans[0], task)
        if place is None:
            continue
        (seconds,) = samples.tasks[place, THREADS]
        collective = isinstance(task.spec, CollectiveSpec)
        collectives += collective
        if collective or str(task.kind) == "Compute":
            # Ticks of steps that are not typical, at most; never the waiting for the other rank.
            assert seconds == pytest.approx(5e-3 if collective else 1e-3, rel=1e-3)
    assert collectives
    streams = {task.stream for task in plans[0].tasks if isinstance(task.spec, CollectiveSpec)}
    for stream in (Stream.COMPUTE, *streams):
        (wake,) = samples.tasks[times.beside(WAKE, plans[0], stream), THREADS]
        assert wake == pytest.approx(3e-6, rel=2e-3)


def test_what_shared_cores_took_is_not_the_time_of_a_task() -> None:
    """A task counts as it would with a core to itself, so that a forecast can let it share."""
    generic = chosen_machine("cpu-generic")
    device = replace(generic.device, memory_bytes_per_second=2e6)
    node = replace(generic.node, latency_seconds=5e-4, bytes_per_second=1e6)
    machine = replace(generic, device=device, node=node, host=Host(cores=2))
    job = configured(tower_job(mesh(2), pc.optim.SGD(0.1), layers=4), zero=3)
    plans, times = dict(compile_plans(job, 2).plans), TaskTimes(machine)
    simulation = simulate(plans, cost_of(plans, times), uses=uses_of(plans, times))
    samples, raw = Samples(), Samples()
    add_timelines(samples, plans, timelines_of(simulation), THREADS, machine)
    add_timelines(raw, plans, timelines_of(simulation), THREADS)
    stretched = 0
    for task in plans[0].tasks:
        place, seconds = times.place(plans[0], task), times.seconds(plans[0], task)
        if place is not None and seconds:
            (known,), (seen,) = samples.tasks[place, THREADS], raw.tasks[place, THREADS]
            assert known == pytest.approx(seconds, rel=0.01)
            stretched += seen > 1.2 * seconds
    assert stretched > 3


def test_the_timeline_of_another_job_is_refused() -> None:
    plans = two_ranks()
    timelines = recorded(plans, {})
    other = compile_plans(tower_job(mesh(2), pc.optim.SGD(0.1), layers=1), 2).plans
    with pytest.raises(UsageError, match="another job"):
        add_timelines(Samples(), other, timelines, THREADS)


def test_a_link_is_that_of_the_model_that_made_its_times() -> None:
    pairs = [(n, 3 * 2e-5 + n / 4e9) for n in (4.0, 1e3, 1e5, 1e6, 1e7)]
    latency, rate = link(pairs)
    assert latency == pytest.approx(2e-5)
    assert rate == pytest.approx(4e9)


def test_a_slowdown_is_of_kernels_that_were_seen_alone_and_together() -> None:
    place = Place("exp", "float32", "", Sizes(1.0, 1.0, 1.0, 8.0, 0.0))
    other = place._replace(kind="log")
    samples = Samples({(place, ALONE): [1.0], (place, THREADS): [1.5], (other, THREADS): [9.0]})
    assert slowdown(samples) == 1.5
    assert slowdown(Samples()) == 1.0


def test_kernels_say_which_part_of_the_rates_they_reach() -> None:
    samples = Samples()

    def add(kind: str, flops: float, nbytes: float, seconds: float, world: str = ALONE) -> None:
        samples.add(Place(kind, "float32", "", Sizes(1.0, 1.0, flops, nbytes, 0.0)), world, seconds)

    add("matmul", 1e9, 1e6, 2.0)
    add("matmul", 2e9, 2e6, 4.0)
    add("matmul", 1e4, 1e3, 9.0)  # too small to say anything
    add("matmul", 1e9, 1e6, 9.0, THREADS)
    for kind, seconds in (("exp", 1.0), ("add", 0.5), ("adam_update", 4.0)):
        add(kind, 1e6, 2e6, seconds)
        add(kind, 1e2, 2e2, 9.0)
    assert products_reach(samples, 1e9) == pytest.approx(0.5)
    assert traffic_reaches(samples, 8e6) == pytest.approx(0.25)
    assert products_reach(Samples(), 1e9) == traffic_reaches(Samples(), 8e6) == 1.0


def test_jobs_read_their_own_data_and_differ(tmp_path: Path) -> None:
    write_data(tmp_path)
    for ranks in (1, 2):
        jobs = list(calibration_jobs(tmp_path, ranks, 7))
        assert {job.world_size for job in jobs} == {ranks}
        assert len({str(job.ops) for job in jobs}) == len(jobs)
        assert not any(job.inputs for job in jobs)


def test_a_busy_machine_is_refused_unless_forced() -> None:
    check_idle(0.2, 2, forced=False)
    check_idle(5.0, 2, forced=True)
    with pytest.raises(UsageError, match="busy") as caught:
        check_idle(5.0, 2, forced=False)
    assert "--force" in str(caught.value)


def test_what_other_programs_do_meanwhile_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = tmp_path / "stat"
    monkeypatch.setattr(calibrate, "_PROCESSOR_TIMES", times)
    ticks = os.sysconf("SC_CLK_TCK")
    line = "cpu  {} 0 0 99999 99999 0 0 0 0 0\ncpu0 1 2 3\n"
    times.write_text(line.format(0))
    monkeypatch.setattr(calibrate.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    calibration = Calibration(pc.run, tmp_path, counts={})
    calibration.check()
    times.write_text(line.format(10_000 * ticks))
    with pytest.raises(UsageError, match="busy"):
        calibration.check()
    forced = Calibration(pc.run, tmp_path, True, {})
    forced.check()
    times.unlink()
    assert calibrate.OthersLoad().cores() == 0.0


def test_the_command_says_where_it_writes(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["calibrate"])
    assert done.exit_code == 2
    assert "--out" in done.output


def test_a_place_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plancompiler.cli.calibrate.calibrate", None)  # it would take minutes
    done = CliRunner().invoke(cli, ["calibrate", "--out", str(tmp_path / "missing" / "here.toml")])
    assert done.exit_code == 2
    assert "the machine file cannot be written" in done.output


# --- a timeline's file ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run whose op no calibration has measured."""
    path = tmp_path_factory.mktemp("run") / "timeline.json"
    mesh = pc.Placement("cpu", [0, 1])
    with pc.job("learnt") as job:
        x = pc.normal((64, 32), placement=mesh).redistribute(sbp="S(0)")
        pc.output("y", pc.erfinv(pc.tanh(x)).sum())
    with pc.run(job, 2, trace=path) as session:
        for _ in session.run(WARM_STEPS + 10):
            pass
    return path


def onto(tmp_path: Path) -> Path:
    """A machine file that has measured one thing and says another."""
    path = tmp_path / "here.toml"
    known = Place("exp", "float32", "", Sizes(1, 2, 3, 4, 5))
    text = (FOLDER / "cpu-generic.toml").read_text()
    path.write_text(text + "\n".join(task_tables(Samples({(known, ALONE): [0.5]}))) + "\n")
    return path


def learnt(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["calibrate", *map(str, arguments), "--json"])


@pytest.mark.processes  # the recording has a process that clears up after it
def test_a_recorded_run_is_learnt_from(trace: Path, tmp_path: Path) -> None:
    path = onto(tmp_path)
    before = chosen_machine(path)
    result = learnt("--from", trace, "--onto", path)
    assert result.exit_code == 0, result.output
    after = read_machine(path)
    assert replace(after, kernels={}).text == replace(before, kernels={}).text
    known = {(each.kind, each.world): each.points for each in after.tasks}
    assert known["exp", ALONE] == before.tasks[0].points
    plans, backend, timelines = read_trace(trace)
    assert backend == THREADS
    (task,) = (each for each in plans[0].tasks if "erfinv" in each.name)
    (column,) = (
        column
        for column, (position, _) in enumerate(timelines[0].columns)
        if timelines[0].tasks[position].id == task.id
    )
    ((sizes, seconds),) = known["erfinv", THREADS]
    assert sizes == TaskTimes(after).place(plans[0], task).sizes
    lasted = [(each.ends - each.begins)[:, column] * 1e-9 for each in timelines]
    assert np.min(lasted) / 2 < seconds < np.max(lasted)
    again = learnt("--from", trace, "--onto", path, "--out", tmp_path / "more.toml")
    assert again.exit_code == 0, again.output
    points = {each.kind: each.points for each in read_machine(tmp_path / "more.toml").tasks}
    assert len(points["erfinv"]) == 1


@pytest.mark.processes
def test_what_cannot_be_learnt_from(trace: Path, tmp_path: Path) -> None:
    machine, text = onto(tmp_path), trace.read_text()
    damaged = tmp_path / "damaged.json"
    for change, wanted in (
        (lambda: text.replace('"job"', '"work"', 1), "which job it is of"),
        (lambda: text.replace('"threads"', '"hosts"', 1), "backend"),
        (lambda: text.replace('"name": "erfinv', '"name": "erfc'), "of another job"),
        # Sizes do not change what tasks are called.
        (lambda: text.replace("(64,32)", "(8,32)").replace("[64,", "[8,"), "of another job"),
        (lambda: text.replace('"process_labels"', '"process_names"'), "of another job"),
        (lambda: text[: len(text) // 2], "JSON"),
        (lambda: text.replace('"pid": 1', '"pid": 7'), "lacks ranks"),
    ):
        damaged.write_text(change())
        result = learnt("--from", damaged, "--onto", machine)
        assert result.exit_code in (1, 2), result.output
        assert wanted in result.output, result.output
    for wrong, wanted in (
        (("--from", trace), "belong together"),
        ((), "--out"),
        (("--from", tmp_path / "none", "--onto", machine), "cannot be read"),
        (("--from", trace, "--onto", tmp_path / "none"), "cannot be read"),
        (("--from", trace, "--onto", FOLDER / "a100-sxm.toml"), "another type"),
    ):
        result = learnt(*wrong)
        assert result.exit_code in (1, 2), result.output
        assert wanted in result.output, result.output
