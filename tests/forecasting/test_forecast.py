"""Forecasts: ranks by class, times of the machine, changes for what does not fit, the command."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

import plancompiler as pc
from plancompiler.cli.program import cli
from plancompiler.costs import machine_of
from plancompiler.costs.choice import FOLDER
from plancompiler.errors import UsageError
from plancompiler.forecasting import Forecast
from plancompiler.forecasting.fitting import changes_of
from plancompiler.forecasting.traffic import received_in_step, received_of_task
from plancompiler.ir import Job
from plancompiler.lower.compile import MODES, compile_plans
from plancompiler.passes import config_of
from plancompiler.plan.plan import CollectiveSpec
from plancompiler.simulate import simulate
from tests.examples import EXAMPLES, gpt
from tests.forecasting.test_rank_classes import turned
from tests.passes.worlds import configured, mesh


def halo_job(ranks: int) -> Job:
    """Convolution of an image that is split along its rows: ranks read rows of their neighbours."""
    with pc.job("halo") as job:
        x = pc.input("x", (1, 2, 4 * ranks, 8), "float32", mesh(ranks), "S(2)")
        w = pc.input("w", (3, 2, 3, 3), "float32", mesh(ranks))
        pc.output("y", pc.conv2d(x, w, padding=1).redistribute(sbp="S(2)").sum())
    return job


def resharded() -> Job:
    """A value that goes from two ranks to four others, cut along its other axis."""
    with pc.job("resharded") as job:
        x = pc.input("x", (8, 8), "float32", mesh(2), "S(0)")
        y = x.redistribute(placement=mesh(4, first=2), sbp="S(1)")
        pc.output("y", (y * 2.0).sum())
    return job


CUTS = {
    "dp tp": lambda: gpt(dp=4, tp=2),
    "pipeline": lambda: gpt(dp=2, tp=2, pp=2, microbatches=4),
    "interleaved": lambda: gpt(dp=2, pp=2, layers=4, microbatches=2, schedule="interleaved"),
    "uneven": lambda: gpt(dp=3, tp=2),
    "zero 3": lambda: gpt(dp=4, zero=3),
    "halo": lambda: halo_job(5),
    "other mesh": resharded,
}


@pytest.mark.parametrize("name", CUTS)
def test_a_rank_that_stands_for_others_takes_their_time(name: str) -> None:
    """What is said of classes is what the plans of all ranks say, one by one."""
    job: Job = CUTS[name]()
    known = pc.forecast(job, "h100-sxm")
    assert sum(each.count for each in known.classes) == job.world_size
    plans = compile_plans(known.job, job.world_size, "rank_per_iter").plans
    # Seconds that depend on the task alone, so that ranks of a class agree if their order does.
    simulated = known.rank_classes.plans

    def cost(rank: int, task: object) -> float:
        return 1.0 + len(task.name) % 5  # type: ignore[attr-defined]

    whole = simulate(plans, cost, steps=2)
    by_class = simulate(simulated, cost, steps=2, stands_for=known.rank_classes.stands_for)
    assert by_class.makespan == whole.makespan
    busy = whole.busy()
    for (rank, stream), seconds in by_class.busy().items():
        assert busy[rank, stream] == seconds
    for each, forecasted in zip(known.rank_classes.classes, known.classes, strict=True):
        for rank in each.ranks:
            plan = plans[rank]
            assert plan.arena_bytes == forecasted.memory.activations
            variables = {v.register for v in plan.variables}
            used = sum(register.nbytes for register in plan.registers if register.id in variables)
            assert used >= forecasted.memory.parameters + forecasted.memory.state


@pytest.mark.parametrize("one", ["S(0)", "B"])
@pytest.mark.parametrize("other", ["S(0)", "B"])
def test_a_stand_in_may_be_ahead_of_who_waits_for_it(one: str, other: str) -> None:
    """Ranks of a class read of different classes, so that not all notices are of the same pairs."""
    job = turned(["S(0)", one], ["S(0)", other])
    known = pc.forecast(job, "h100-sxm")
    plans = compile_plans(known.job, job.world_size, "rank_per_iter").plans
    classes = known.rank_classes

    def cost(rank: int, task: object) -> float:
        return 1.0

    whole = simulate(plans, cost, steps=4)
    by_class = simulate(classes.plans, cost, steps=4, stands_for=classes.stands_for)
    assert by_class.makespan == pytest.approx(whole.makespan, rel=0.1)


def test_the_number_of_classes_does_not_grow_with_data_parallelism() -> None:
    small, large = (
        pc.forecast(gpt(dp=dp, tp=2, pp=2, batch=64, microbatches=2), "a100-sxm") for dp in (2, 16)
    )
    assert len(small.classes) == len(large.classes) == 3
    assert (small.ranks, large.ranks) == (8, 64)
    assert large.traffic_by_link.keys() == {"within nodes", "between nodes"}
    assert small.traffic_by_link.keys() == {"within nodes"}


def seconds_on(job: Job, folder: Path, figure: str, value: str) -> float:
    text = (FOLDER / "h100-sxm.toml").read_text()
    lines = [
        f'{figure} = {{ value = {value}, source = "a test" }}'
        if line.startswith(f"{figure} =")
        else line
        for line in text.splitlines()
    ]
    path = folder / "changed.toml"
    path.write_text("\n".join(lines))
    return pc.forecast(job, path).step_seconds


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        ("launch_seconds", "1e-3"),
        ("matrix_efficiency", "1e-4"),
        ("memory_efficiency", "1e-4"),
        ("latency_seconds", "1e-2"),
    ],
)
def test_time_follows_the_machine(figure: str, value: str, tmp_path: Path) -> None:
    job = gpt(dp=2)
    assert seconds_on(job, tmp_path, figure, value) > 2 * pc.forecast(job, "h100-sxm").step_seconds


def test_figures_are_consistent() -> None:
    known = pc.forecast(gpt(dp=2, pp=2, microbatches=4), "a100-sxm")
    assert known.bubble_fraction is not None
    assert 0 < known.bubble_fraction < 1
    assert 0 < known.mfu < 1
    assert known.measured == ()
    for each in known.classes:
        parts = each.compute_seconds + each.exposed_communication_seconds + each.idle_seconds
        assert parts == pytest.approx(known.step_seconds, rel=0.2)
        assert each.exposed_communication_seconds <= each.communication_seconds + 1e-12
    assert known.job.config.machine == "a100-sxm"


def test_more_ranks_than_the_machine_has(tmp_path: Path) -> None:
    text = (FOLDER / "cpu-generic.toml").read_text()
    path = tmp_path / "two.toml"
    path.write_text(text + 'devices = { value = 2, source = "a test" }\n')
    with pytest.raises(UsageError, match="fewer devices"):
        pc.forecast(gpt(dp=3), path)
    with pytest.raises(UsageError, match="fewer devices"):
        pc.forecast(gpt(dp=1), path, ranks=3)
    too_many = replace(gpt(dp=3), config=pc.Config(machine=path))
    for mode in MODES:
        with pytest.raises(UsageError, match="fewer devices"):
            compile_plans(too_many, 3, mode)
    with pytest.raises(UsageError, match="fewer devices"):
        pc.run(too_many)
    for command in ("compile", "run", "forecast"):
        arguments = [command, str(EXAMPLES / "mlp.py"), "--ranks", "3", "--machine", str(path)]
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 2
        assert "fewer devices" in result.output
        assert "What to do: give fewer ranks" in result.output


SPREAD = {
    "rings": lambda: gpt(dp=4, tp=4),
    "stages that begin within a node": lambda: gpt(dp=6, pp=2, batch=12),
    "groups within and across": lambda: gpt(dp=3, tp=2, pp=2, batch=12),
    "shares of parameters": lambda: gpt(dp=6, zero=1, batch=12),
    "neighbours": lambda: halo_job(10),
    "axes exchanged": lambda: turned(["S(0)", "S(0)"], ["S(0)", "S(0)"]),
}


@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.parametrize("shipped", ["h100-sxm", "cpu-generic"])
def test_traffic_by_link_counts_each_rank_of_a_class(
    name: str, shipped: str, tmp_path: Path
) -> None:
    """Some ranks receive from their own node where the first of their class does not, or the other
    way round.
    """
    path = tmp_path / "nodes.toml"
    text = (FOLDER / f"{shipped}.toml").read_text()
    figure = '{{ value = {}, source = "a test" }}'.format
    if shipped == "cpu-generic":
        text += f"devices = {figure(8)}\n[network]\nlatency_seconds = {figure(1e-5)}\n"
        text += f"bytes_per_second = {figure(1e9)}\noversubscription = {figure(1.0)}\n"
    size = 8 if name == "rings" else 4
    path.write_text(text.replace("devices = { value = 8", f"devices = {{ value = {size}"))
    job: Job = SPREAD[name]()
    known = pc.forecast(job, path)
    plans = compile_plans(known.job, job.world_size, "rank_per_iter").plans
    by_link: dict[str, float] = {}
    for plan in plans.values():
        for one in received_in_step(plan, known.machine):
            by_link[one.link] = by_link.get(one.link, 0.0) + one.nbytes
    assert known.traffic_by_link == pytest.approx(by_link, rel=1e-12)
    assert len(by_link) == 2 or name == "axes exchanged"


def slow_links(folder: Path) -> Path:
    """Devices whose links take most of the time, for bytes alone."""
    path = folder / "slow.toml"
    text = (FOLDER / "a100-sxm.toml").read_text()
    for old, new in (("300e9", "3e8"), ("25e9", "1e7"), ("5e-6", "0"), ("10e-6", "0")):
        text = text.replace(f"value = {old}", f"value = {new}")
    path.write_text(text)
    return path


@pytest.mark.parametrize("layout", [{"dp": 4, "zero": 3}, {"dp": 16, "zero": 3}])
def test_streams_share_a_link(layout: dict[str, int], tmp_path: Path) -> None:
    """No link moves bytes faster than it can, whatever streams ask for it at a time."""
    known = pc.forecast(gpt(batch=16, **layout), slow_links(tmp_path))
    between = known.ranks > 8
    rate = 8 * 1e7 if between else 3e8
    for rank, plan in known.simulation.plans.items():
        runs = sorted(
            (run.begin, run.end, run.task)
            for run in known.simulation.runs
            if run.rank == rank and isinstance(run.task.spec, CollectiveSpec)
        )
        assert any(one[1] > other[0] + 1e-9 for one, other in pairwise(runs))
        covered, reached, nbytes = 0.0, 0.0, 0.0
        for begin, end, task in runs:
            covered += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
            nbytes += sum(each for _, each in received_of_task(plan, task, known.machine))
        assert nbytes / rate <= covered * (1 + 1e-9)


def small_machine(folder: Path, nbytes: int) -> Path:
    text = (FOLDER / "cpu-generic.toml").read_text()
    path = folder / "small.toml"
    path.write_text(text.replace("value = 8e9", f"value = {nbytes}"))
    return path


@pytest.mark.parametrize(
    ("share", "settings_needed"), [(0.875, 1), pytest.param(0.75, 2, marks=pytest.mark.slow)]
)
def test_out_of_memory_is_an_answer(share: float, settings_needed: int, tmp_path: Path) -> None:
    job = gpt(dp=2, batch=8)
    whole = pc.forecast(job)
    need = whole.worst.memory.total
    known = pc.forecast(job, small_machine(tmp_path, int(share * need)))
    assert not known.fits
    assert known.at_peak
    assert any("gpt.py" in each.source for each in known.at_peak)
    changes = changes_of(known)
    assert len(changes) >= 3
    assert changes[0].forecast.fits
    assert len(changes[0].settings) == settings_needed
    assert all(each.forecast.worst.memory.total < need for each in changes)
    # Applied, it takes what was said.
    settings = changes[0].settings
    applied: Forecast = pc.forecast(
        replace(job, config=replace(config_of(known.job), **settings)), known.machine
    )
    assert applied.worst.memory == changes[0].forecast.worst.memory
    assert applied.fits


def test_memory_is_that_of_the_job_and_not_of_the_machine() -> None:
    job = configured(gpt(dp=2), machine="mi300x")
    one, other = pc.forecast(job), pc.forecast(job, "mi300x")
    assert one.machine is other.machine is machine_of("mi300x")
    assert one.worst.memory == other.worst.memory


def run(*arguments: str) -> str:
    done = CliRunner().invoke(cli, ["forecast", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


SMALL = ("-D", "layers=2", "-D", "dim=32", "-D", "length=16", "-D", "dp=2")


def test_the_command_prints_a_table_and_json(tmp_path: Path) -> None:
    target = str(EXAMPLES / "gpt.py")
    trace = tmp_path / "trace.json"
    known = json.loads(
        run(target, *SMALL, "--machine", "h100-sxm", "--json", "--trace", str(trace))
    )
    assert known["ranks"] == sum(each["count"] for each in known["classes"]) == 2
    assert known["memory_bytes"]["max"] == sum(known["memory_bytes"]["by_kind"].values())
    assert known["traffic_bytes"]["total"] == sum(known["traffic_bytes"]["by_link"].values())
    assert known["fits"] is True
    events = json.loads(trace.read_text())["traceEvents"]
    assert max(each.get("ts", 0) for each in events) * 1e-6 > known["step_seconds"]
    assert "model FLOPs utilization" in run(target, *SMALL)


@pytest.mark.parametrize("option", ["--trace", "--html"])
def test_a_pipe_is_written_into(option: str, tmp_path: Path) -> None:
    """A device or a pipe stays what it is: it is none of the disk's files, to be replaced."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)
        run(str(EXAMPLES / "gpt.py"), *SMALL, option, str(pipe))
        assert pipe.is_fifo()
        assert b"gpt" in reader.read()


@pytest.mark.slow
def test_the_command_says_what_to_change(tmp_path: Path) -> None:
    target = str(EXAMPLES / "gpt.py")
    machine = str(small_machine(tmp_path, 300_000))
    smallest = (*SMALL, "-D", "layers=1", "--machine", machine, "--recompute", "auto")
    known = json.loads(run(target, *smallest, "--precision", "bfloat16", "--json"))
    assert known["fits"] is False
    assert known["at_peak"][0]["bytes"] >= known["at_peak"][-1]["bytes"] > 0
    assert known["changes"]
    text = run(target, *smallest, "--zero", "2")
    assert "Alive when the fullest rank holds most" in text
    assert "precision=bfloat16" in text


CHECKED = (str(EXAMPLES / "gpt.py"), *SMALL, "--check", "--check-steps", "1")


def test_the_command_compares_with_a_run() -> None:
    known = json.loads(run(*CHECKED, "--json"))
    assert known["error"]["memory"] == known["error"]["traffic"] == 0
    assert known["measured"]["traffic_bytes"] == known["traffic_bytes"]["total"] > 0
    assert known["measured"]["step_seconds"] > 0


@pytest.mark.slow
def test_the_comparison_is_a_table() -> None:
    assert "predicted" in run(*CHECKED)
