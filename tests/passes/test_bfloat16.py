"""bfloat16: no scale, small gradients, and what is said where it is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.cli.doctor import examine
from plancompiler.cluster.chunks import arrays_from_bytes, arrays_to_bytes
from plancompiler.errors import DTypeError, UsageError
from plancompiler.ir import DType, Job
from plancompiler.ir import bfloat16 as package
from plancompiler.passes import Config, run_passes
from plancompiler.plan.job_serde import job_from_bytes, job_to_bytes
from tests.dense import run_dense
from tests.examples import gpt
from tests.ops.sharding import run_dense as run_op
from tests.passes.worlds import (
    collectives,
    compiled,
    configured,
    losses,
    mesh,
    record_of,
)

BRAIN = {"precision": "bfloat16"}


def lowered(job: Job) -> Job:
    """The job after this pass alone."""
    return run_passes(configured(job, passes=("mixed_precision",), **BRAIN))[0]


def test_attention_keeps_its_sums_in_float32() -> None:
    attention = next(op for op in lowered(gpt(layers=1)).ops if op.kind == "attention")
    assert [value.dtype for value in attention.outputs] == [DType.BFLOAT16, DType.FLOAT32]


def test_nothing_is_scaled_or_skipped() -> None:
    job = gpt(dp=2)
    kinds = {op.kind for op in lowered(job).ops}
    assert not {"found_inf", "loss_scale_update"} & kinds
    assert not any(kind.startswith("guarded_") for kind in kinds)
    assert lowered(job).variables.keys() == job.variables.keys()
    assert collectives(compiled(job, **BRAIN)) == collectives(compiled(job))
    assert record_of(job, "mixed_precision", **BRAIN).summary.endswith("no gradient is scaled")


def test_a_scale_is_refused() -> None:
    with pytest.raises(UsageError, match="Expected: precision=float16"):
        Config(loss_scale=1024, precision="bfloat16")


def test_what_works_on_gradients_does_so_in_float32() -> None:
    place = mesh(1)
    with pc.job("clipped") as job:
        weight = pc.nn.Parameter((8, 8), init="ones", name="w").place(place).value
        x = pc.normal((4, 8), placement=place)
        loss = pc.square(pc.matmul(x, weight)).mean()
        (gradient,) = pc.gradients(loss, [weight])
        pc.output("doubled", gradient + gradient)
    ops = {value.name: op for op in lowered(job).ops for value in op.outputs}
    doubled = ops[job.outputs["doubled"].name]
    assert doubled.kind == "add"
    assert {value.dtype for value in doubled.inputs} == {DType.FLOAT32}
    assert {ops[value.name].kind for value in doubled.inputs} == {"cast"}


def test_a_norm_of_activations_leaves_what_follows_in_16_bits() -> None:
    place = mesh(1)
    with pc.job("normed") as job:
        first, second = (
            pc.nn.Parameter((8, 8), init="ones", name=name).place(place).value for name in "ab"
        )
        y = pc.matmul(pc.normal((4, 8), placement=place), first)
        y = pc.matmul(y / pc.norm(y, axis=1, keepdims=True), second)
        pc.optim.SGD(0.1).minimize(y.mean())
        pc.output("y", y)
    products = [op for op in lowered(job).ops if op.kind == "matmul"]
    assert {op.outputs[0].dtype for op in products} == {DType.BFLOAT16}


def test_small_gradients_need_no_scale() -> None:
    """A gradient of 1e-12, which float16 would lose, moves a weight."""
    place = mesh(1)
    with pc.job("small") as job:
        weight = pc.nn.Parameter((8, 8), init="ones", name="w").place(place).value
        x = pc.normal((4, 8), placement=place)
        pc.optim.SGD(1e11).minimize(pc.matmul(x, weight).mean() * 1e-12)
        pc.output("loss", weight.sum())
    actual = losses(job, 3, **BRAIN)
    np.testing.assert_allclose(actual, losses(job, 3), rtol=2e-2)
    assert len(set(actual)) == 3


# --- values of the dtype --------------------------------------------------------------------------


def brain_job(ranks: int = 2) -> Job:
    """A job whose input, variables and output are bfloat16."""
    place = mesh(ranks)
    with pc.job("brain") as job:
        x = pc.input("x", (5, 3), "bfloat16", place, "S(0)")
        weight = pc.nn.Parameter((3, 3), "bfloat16", "normal", (0.0, 1.0), name="w").place(place)
        loss = pc.square(pc.matmul(x, weight.value)).sum()
        pc.optim.SGD(0.01).minimize(loss)
        pc.output("y", pc.matmul(x, weight.value))
        pc.output("loss", loss)
    return job


def test_texts_and_bytes_name_it() -> None:
    job = brain_job()
    assert job_from_bytes(job_to_bytes(job)) == job
    assert "bfloat16[5, 3]" in str(job)
    assert DType.parse("bfloat16") is DType.parse(DType.BFLOAT16.numpy) is DType.BFLOAT16
    assert DType.BFLOAT16.itemsize == DType.BFLOAT16.numpy.itemsize == 2


def test_arrays_of_it_travel() -> None:
    array = np.linspace(-3, 3, 15).reshape(5, 3).astype(DType.BFLOAT16.numpy)
    actual = arrays_from_bytes(arrays_to_bytes({"x": array, "n": np.arange(3)}))
    assert actual["x"].dtype == array.dtype
    np.testing.assert_array_equal(actual["x"], array)
    np.testing.assert_array_equal(actual["n"], np.arange(3))


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_it_is_fed_trained_saved_and_loaded(tmp_path: Path, backend: str) -> None:
    feeds = {"x": np.linspace(-2, 2, 15).reshape(5, 3).astype(DType.BFLOAT16.numpy)}
    dense = run_dense(brain_job(1), 3, feeds)
    with pc.run(brain_job(), 2, backend=backend) as session:
        for expected in dense[:2]:
            outputs = session.step(**feeds)
            assert outputs["y"].dtype == DType.BFLOAT16.numpy
            for name, value in outputs.items():
                pair = (np.asarray(one, np.float64) for one in (value, expected[name]))
                np.testing.assert_allclose(*pair, rtol=2e-2, atol=2e-2)
        kept = session.variables()
        session.save(tmp_path)
    with pc.run(brain_job(3), 3, backend=backend, restore=tmp_path) as session:
        loaded = session.variables()
        assert loaded["w"].dtype == DType.BFLOAT16.numpy
        np.testing.assert_array_equal(loaded["w"], kept["w"])
        loss = float(session.step(**feeds)["loss"])
    np.testing.assert_allclose(loss, float(dense[2]["loss"]), 2e-2)


def test_a_fill_of_it_is_folded_and_scalars_are_not_merged() -> None:
    with pc.job("fold") as job:
        x = pc.input("x", (4,), "bfloat16", mesh(1))
        pc.output("a", x + pc.ones((4,), "bfloat16", mesh(1)) * 3.0)
        pc.output("b", x * 1.1 * 1.3)
        pc.output("c", x.cast("float16").cast("bfloat16"))
    folded, _ = run_passes(configured(job, passes=("fold", "dce")))
    kinds = [op.kind for op in folded.ops]
    assert kinds.count("mul_scalar") == 2
    assert kinds.count("cast") == 2  # float16 has not the exponents of bfloat16
    fills = [op for op in folded.ops if op.kind == "fill"]
    assert [op.attr("value") for op in fills] == [3.0]


def test_its_range_is_that_of_the_dtype() -> None:
    least, most = DType.BFLOAT16.range
    with np.errstate(over="ignore"):
        numbers = np.array([least, most, most * 1.01], np.float64).astype(DType.BFLOAT16.numpy)
    assert [float(number) for number in numbers] == [least, most, np.inf]
    (actual,) = run_op("nan_to_num", [numbers], {})
    assert [float(number) for number in actual] == [least, most, most]


# --- where the package is missing -----------------------------------------------------------------


@pytest.fixture
def without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    package.bfloat16.cache_clear()


@pytest.mark.usefixtures("without_package")
def test_a_missing_package_is_explained() -> None:
    def traced() -> None:
        with pc.job("ones"):
            pc.ones((2,), "bfloat16", mesh(1))

    for use in (
        lambda: losses(gpt(layers=1), 1, **BRAIN),
        traced,
        lambda: DType.BFLOAT16.numpy,
    ):
        with pytest.raises(DTypeError, match="needs the package ml_dtypes") as caught:
            use()
        report = caught.value.report
        assert "ModuleNotFoundError" in str(report.got)
        assert "plancompiler[bfloat16]" in str(report.hint)
    assert len(losses(gpt(layers=1), 1, precision="float16")) == 1


@pytest.mark.processes
def test_the_package_is_imported_only_where_it_is_needed() -> None:
    imports = "import sys, plancompiler.cli.run, plancompiler.cli.worker"
    code = f"{imports}; sys.exit('ml_dtypes' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.usefixtures("without_package")
def test_doctor_says_that_the_package_is_missing() -> None:
    (check,) = (each for each in examine() if each.name == "bfloat16")
    assert check.state == "absent"
    assert "needs the package ml_dtypes" in check.detail
    assert "plancompiler[bfloat16]" in check.detail
