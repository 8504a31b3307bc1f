"""The examples with `-D device=cuda`, where there is no device."""

from __future__ import annotations

import sys

import pytest

from plancompiler.cli.job_file import load_job
from plancompiler.errors import DeviceError, PlacementError
from plancompiler.executor.local_run import LocalWorld
from plancompiler.lower.compile import compile_plans
from tests.cli.conftest import Invoke, invoke  # noqa: F401  (a fixture)
from tests.examples import EXAMPLES, gpt, mlp

JOBS = {"mlp": ("-D", "hidden=16"), "gpt": ("-D", "layers=1", "-D", "dim=32", "-D", "length=16")}


@pytest.fixture(params=JOBS)
def command(request):
    """A job file and settings that put it on devices."""
    return str(EXAMPLES / f"{request.param}.py"), "-D", "device=cuda", *JOBS[request.param]


@pytest.fixture
def without_cupy(monkeypatch):
    """As if CuPy were not installed, whether it is or not."""
    monkeypatch.setitem(sys.modules, "cupy", None)


def test_plans_for_devices_are_compiled_without_one(command, invoke, without_cupy):  # noqa: F811
    result = invoke("compile", *command)
    assert result.exit_code == 0, result.output


def test_a_run_says_what_is_missing(command, invoke, without_cupy):  # noqa: F811
    result = invoke("run", *command, "--no-cache", "--steps", "1", "--ranks", "1")
    assert result.exit_code == DeviceError.exit_code
    assert DeviceError.code in result.output
    assert "pip install 'plancompiler[cuda12]'" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("make", [mlp, gpt])
def test_all_of_a_job_is_on_the_devices(make):
    job = make(device="cuda", ranks=2)
    assert {op.placement.device_type for op in job.ops} == {"cuda"}
    plans = compile_plans(job, 2).plans
    for plan in plans.values():
        assert plan.device == "cuda"
        assert {block.device for block in plan.blocks} == {"cuda"}


def test_an_old_cupy_is_refused(monkeypatch):
    old = type(sys)("cupy")
    old.__version__ = "13.6.0"
    monkeypatch.setitem(sys.modules, "cupy", old)
    plans = compile_plans(gpt(device="cuda"), 1).plans
    with pytest.raises(DeviceError, match=r"too old[\s\S]*13\.6\.0"):
        LocalWorld(plans)


def test_an_unknown_device_is_refused():
    with pytest.raises(PlacementError, match="unknown device type"):
        load_job(str(EXAMPLES / "mlp.py"), {"device": "tpu"})
