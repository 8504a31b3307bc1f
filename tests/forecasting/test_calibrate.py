"""Calibration: what recorded runs show becomes a machine file that forecasts use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import plancompiler as pc
from plancompiler.cli.program import cli
from plancompiler.costs import chosen_machine, op_seconds
from plancompiler.errors import UsageError
from plancompiler.executor.local_run import LocalWorld
from plancompiler.executor.trace import Recording
from plancompiler.forecasting import calibrate as calibration
from plancompiler.forecasting.calibrate import (
    Kernel,
    Samples,
    add_timeline,
    check_idle,
    curves,
    link,
    slowdown,
)
from plancompiler.ir import DType, Job
from plancompiler.lower.compile import compile_plans
from tests.passes.worlds import mesh, tower_job


def jobs(ranks: int) -> Iterator[Job]:
    for dim in (8, 24):
        yield tower_job(mesh(ranks), pc.optim.SGD(0.1), layers=1, dim=dim)


@pytest.mark.processes  # recordings have a process that clears up after them
def test_what_is_measured_is_read_back_and_used(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    path.write_text(calibration.calibrate("here", True, jobs))
    machine = chosen_machine(path)
    assert {"device.flops_per_second.float32", "node.bytes_per_second"} <= set(machine.measured)
    assert "device.launch_seconds" not in machine.measured
    kinds = {curve.kind: curve for curve in machine.device.kernels}
    assert {"tanh", "square"} <= kinds.keys()
    size, seconds = kinds["tanh"].points[0]
    assert op_seconds(machine, 0, size, DType.FLOAT32, "tanh") == seconds
    (job,) = (job for job in jobs(1) if "24" in str(job.ops[0].output_types))
    known = pc.forecast(job, path)
    assert known.step_seconds > machine.host.step_seconds
    assert len(known.measured) == len(machine.measured)


def test_a_curve_has_the_mean_of_each_size() -> None:
    kernels = {
        Kernel("exp", "float32", 10, 80): [1.0, 3.0],
        Kernel("exp", "float32", 20, 160): [5.0],
        Kernel("matmul", "float32", 8000, 100): [7.0],
    }
    exp, matmul = curves(kernels)
    assert exp == ("exp", "float32", "bytes", ((80, 2.0), (160, 5.0)))
    assert matmul == ("matmul", "float32", "flops", ((8000, 7.0),))


def test_a_link_is_that_of_the_model_that_made_its_times() -> None:
    pairs = [(n, 3 * 2e-5 + n / 4e9) for n in (4.0, 1e3, 1e5, 1e6, 1e7)]
    latency, rate = link(pairs)
    assert latency == pytest.approx(2e-5)
    assert rate == pytest.approx(4e9)


def test_a_slowdown_is_of_kernels_that_were_seen_alone_and_together() -> None:
    one, other = Kernel("exp", "float32", 1, 8), Kernel("log", "float32", 1, 8)
    samples = Samples({one: [1.0], other: [1.0]}, {one: [1.5], Kernel("a", "b", 1, 1): [9.0]})
    assert slowdown(samples) == 1.5
    assert slowdown(Samples()) == 1.0


def test_a_busy_machine_is_refused_unless_forced() -> None:
    check_idle(0.2, 2, forced=False)
    check_idle(5.0, 2, forced=True)
    with pytest.raises(UsageError, match="busy") as caught:
        check_idle(5.0, 2, forced=False)
    assert "--force" in str(caught.value)


@pytest.mark.processes  # recordings have a process that clears up after them
def test_the_timeline_of_another_job_is_refused() -> None:
    one, other = (compile_plans(tower_job(mesh(1), layers=layers), 1).plans[0] for layers in (1, 2))
    with Recording() as recording:
        with LocalWorld({0: one}, record=recording.folder) as world:
            world.run(1)
        (timeline,) = recording.timelines()
    with pytest.raises(UsageError, match="another job"):
        add_timeline(Samples(), other, timeline)


def test_the_command_says_where_it_writes(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["calibrate"])
    assert done.exit_code == 2
    assert "--out" in done.output
