"""Common subexpressions and constants: values stay; what goes and stays is in tests/filecheck."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import JobError
from plancompiler.ir import Job
from plancompiler.lower.compile import MODES, compile_plans
from plancompiler.ops import apply
from plancompiler.passes import run_passes
from tests.dense import run_dense
from tests.examples import gpt, mlp
from tests.passes.worlds import collectives, compiled, configured, losses, mesh, record_of

Body = Callable[[pc.Value], pc.Value | None]


def job_of(body: Body, shape: tuple[int, ...] = (4, 6), dtype: str = "float32") -> Job:
    """A job that feeds `x`, and reports what the body makes of it as `y`."""
    with pc.job("small") as job:
        x = pc.input("x", shape, dtype, mesh(1))
        made = body(x)
        if made is not None:
            pc.output("y", made)
    return job


def after(job: Job, *passes: str) -> Job:
    rewritten, _ = run_passes(configured(job, passes=passes))
    return rewritten


def kinds(job: Job) -> list[str]:
    """Kinds of the job's ops besides inputs and outputs."""
    return [op.kind for op in job.ops if op.kind not in ("input", "output")]


def values(job: Job) -> np.ndarray:
    x = job.inputs["x"]
    fed = np.random.default_rng(0).uniform(-2, 2, x.shape).astype(x.dtype.numpy)
    with np.errstate(all="ignore"):
        (values,) = run_dense(job, 1, {"x": fed})
    return values["y"]


def test_a_job_that_no_pass_changes_is_neither_copied_nor_verified_again() -> None:
    job = configured(job_of(lambda x: x.tanh()))
    assert run_passes(job)[0] is job


# --- common subexpressions ------------------------------------------------------------------------


def test_equal_ops_are_done_once() -> None:
    job = job_of(lambda x: (x * 2.0).tanh() + (x * 2.0).tanh())
    assert kinds(after(job, "cse")) == ["mul_scalar", "tanh", "add"]
    assert record_of(job, "cse", passes=("cse",)).summary == "merged 2 ops into equal earlier ones"
    np.testing.assert_array_equal(values(after(job, "cse")), values(job))


# --- constants ------------------------------------------------------------------------------------

UNCHANGED: dict[str, Body] = {
    "mul by 1": lambda x: x * 1.0,
    "div by 1": lambda x: x / 1.0,
    "power of 1": lambda x: x**1.0,
    "add 0": lambda x: x + 0.0,
    "sub 0": lambda x: x - 0.0,
    "mul by ones": lambda x: pc.full_like(x, 1.0) * x,
    "add zeros": lambda x: x + pc.zeros((6,), "float32", mesh(1)),
    "same dtype": lambda x: x.cast("float32"),
    "same shape": lambda x: x.reshape(4, 6),
    "same order": lambda x: x.transpose((0, 1)),
    "same extents": lambda x: pc.expand(x, (4, 6)),
    "two negations": lambda x: pc.neg(pc.neg(x)),
    "no gradient": lambda x: apply("stop_gradient", x),
    "there and back": lambda x: x.T.T,
    "reshaped back": lambda x: x.reshape(24).reshape(4, 6),
    "wider and back": lambda x: x.cast("float64").cast("float32"),
    "longer": lambda x: (pc.neg(pc.neg(x * 1.0)).T + 0.0).T,
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_changes_nothing_is_left_out(name: str) -> None:
    job = job_of(lambda x: UNCHANGED[name](x).exp())
    folded = after(job, "fold", "dce")
    assert kinds(folded) == ["exp"]
    np.testing.assert_array_equal(values(folded), values(job))


SIMPLER: dict[str, tuple[Body, list[str]]] = {
    "reshapes": (lambda x: x.reshape(2, 12).reshape(3, 8), ["reshape"]),
    "transposes": (lambda x: x.reshape(2, 2, 6).T.transpose(1, 0, 2), ["reshape", "transpose"]),
    "casts": (lambda x: x.cast("float64").cast("float16"), ["cast"]),
    "factors": (lambda x: x * 3.0 * 0.25 * 5.0, ["mul_scalar"]),
    "mul by a fill": (lambda x: x * pc.full((6,), 3.0, "float32", mesh(1)), ["mul_scalar"]),
    "div by a fill": (lambda x: x / pc.full((), 3.0, "float32", mesh(1)), ["div_scalar"]),
    "fills": (lambda x: x + ((pc.full_like(x, 2.0) * 3.0).sqrt() + 1.0), ["fill", "add"]),
    "moved fills": (
        lambda x: x + pc.expand(pc.full((2, 3), 2.0, "float32", mesh(1)).reshape(6), (4, 6)),
        ["fill", "add"],
    ),
}


@pytest.mark.parametrize("name", SIMPLER)
def test_chains_become_one_op(name: str) -> None:
    body, expected = SIMPLER[name]
    job = job_of(body)
    folded = after(job, "fold", "dce")
    assert kinds(folded) == expected
    np.testing.assert_allclose(values(folded), values(job), rtol=1e-6)


STAYS: dict[str, Body] = {
    "swapped": lambda x: 1.0 / (1.0 - x),
    "narrower and back": lambda x: x.cast("float16").cast("float32"),
    "through whole numbers": lambda x: x.cast("int64").cast("float32"),
    "times zero": lambda x: x * 0.0,
    "a factor in use": lambda x: (y := x * 3.0) * 2.0 + y,
    "a larger shape": lambda x: x + pc.zeros((2, 4, 6), "float32", mesh(1)),
    "factors that overflow": lambda x: x * 1e30 * 1e30,
    "factors that vanish": lambda x: x * 1e-30 * 1e-30,
    "a demanded layout": lambda x: pc.full((4, 6), 1.0, "float32", mesh(1), "S(0)").T + x.T,
}


@pytest.mark.parametrize("name", STAYS)
def test_what_would_change_values_stays(name: str) -> None:
    job = job_of(STAYS[name])
    folded = after(job, "fold", "dce")
    assert folded.ops == job.ops
    np.testing.assert_array_equal(values(folded), values(job))


def test_whole_numbers_fold_too() -> None:
    job = job_of(lambda x: (x * 1 + 0) * pc.full((), 3, "int32", mesh(1)), dtype="int32")
    assert kinds(after(job, "fold", "dce")) == ["mul_scalar"]
    np.testing.assert_array_equal(values(after(job, "fold", "dce")), values(job))


def test_an_update_does_not_read_its_own_variable_as_gradient() -> None:
    with pc.job("shrink") as job:
        weight = pc.nn.Parameter((3,), "float32", "ones")
        weight.name = "w"
        weight.place(mesh(1))
        pc.output("sum", weight.value.sum())
        pc.optim.SGD(0.5).apply([weight], [weight.value * 1.0])
    assert [op.kind for op in after(job, "fold").ops] == [op.kind for op in job.ops]
    (note,) = record_of(job, "fold", passes=("fold",)).notes
    assert "overwrites its input" in note
    with pc.run(configured(job)) as session:
        assert [session.step()["sum"] for _ in range(3)] == [3.0, 1.5, 0.75]


def test_a_job_is_verified_before_passes_run() -> None:
    job = job_of(lambda x: x + 1.0)
    broken = replace(job, ops=tuple(reversed(job.ops)))
    with pytest.raises(JobError):
        run_passes(broken)


# --- whole models ---------------------------------------------------------------------------------

MODELS = {
    "mlp dp": lambda: mlp(layout="dp", ranks=2),
    "mlp tp": lambda: mlp(layout="tp", ranks=2),
    "gpt dp": lambda: gpt(dp=2),
    "gpt tp": lambda: gpt(tp=2, dropout=0.1),
}
ALL = ("fold", "cse", "prune_scaling", "fuse_elementwise", "dce")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_losses_of_models_are_those_without_passes(name: str) -> None:
    job = MODELS[name]()
    plain = losses(job, 5, passes=())
    np.testing.assert_allclose(losses(job, 5, passes=ALL), plain, rtol=1e-5)
    dense = [each["loss"] for each in run_dense(after(job, *ALL), 5)]
    np.testing.assert_allclose(dense, plain, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_passes_do_not_add_transport(name: str) -> None:
    job = MODELS[name]()
    before, after_passes = collectives(compiled(job, passes=())), collectives(compiled(job))
    assert after_passes <= before


def test_a_model_that_reads_its_data_twice_reads_it_once() -> None:
    job = gpt(dp=2)
    assert len(after(job, "fold", "cse", "dce").ops) < len(job.ops)


@pytest.mark.processes
def test_all_modes_give_the_same_plans_with_passes() -> None:
    job = configured(gpt(dp=2, tp=2), passes=ALL)
    reference = compile_plans(job, job.world_size, "naive").texts
    for mode in MODES:
        assert compile_plans(job, job.world_size, mode).texts == reference, mode


def test_apply_checks_its_gradients() -> None:
    def wrong(_: pc.Value) -> None:
        weight = pc.nn.Parameter((3,), "float32", "ones").place(mesh(1))
        pc.optim.SGD(0.5).apply([weight], [weight.value.sum()])

    with pytest.raises(pc.UsageError, match="a gradient of its shape"):
        job_of(wrong)
