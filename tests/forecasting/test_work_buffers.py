"""The arrays that kernels are said to make are those that NumPy takes while they run."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from click.testing import CliRunner

import plancompiler as pc
from plancompiler.blas.numba_choice import numba_version
from plancompiler.cli.program import cli
from plancompiler.forecasting.measured_run import held_arrays
from plancompiler.forecasting.memory import WorkBuffers, work_buffers
from plancompiler.ir import Job, TensorType
from plancompiler.ir.task import TaskKind
from plancompiler.lower.compile import compile_plans
from plancompiler.ops.kernel import kernel_for, scratch_of
from plancompiler.ops.registry import KernelContext, Scratch, op_def
from plancompiler.plan.plan import ComputeSpec, Plan
from tests.examples import EXAMPLES, gpt, mlp

NUMPYS_OWN = 1 << 16
"""Bytes that NumPy's functions may take for buffers of their iterators, and Python for objects."""
NUMBERS = 64
"""Bytes of arrays without axes, for the numbers that a kernel computes with."""
LARGE = {"dim": 64, "length": 96, "batch": 24, "vocabulary": 300}
JOBS = {
    "mlp": lambda: mlp(layout="dp", ranks=1, hidden=300, batch=400),
    "gpt": lambda: gpt(dp=1, **LARGE),
    "gpt float16": lambda: gpt(dp=1, precision="float16", **LARGE),
    "gpt bfloat16": lambda: gpt(dp=1, precision="bfloat16", microbatches=2, **LARGE),
}
UNKNOWN = {
    "argmax",
    "arrays_batch",
    "attention",
    "attention_grad",
    "cross_entropy",
    "cross_entropy_grad",
    "embedding",
    "embedding_grad",
    "loss_scale_update",
    "token_batch",
}
"""Kinds of ops in these jobs whose kernels do not say what they make."""


@pytest.fixture
def few_objects_to_collect() -> Iterator[None]:
    """Collections look at the objects of a test only: what the process has loaded is many more."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def plan_of(job: Job) -> Plan:
    return compile_plans(job, 1, "rank_per_iter").plans[0]


def measured(spec: ComputeSpec, inputs: list[TensorType], outputs: list[TensorType]) -> Scratch:
    """What an op's kernel keeps of a first run, and makes beside that in a second one."""
    # Numbers are 0: so no update is skipped.
    given = [(np.ones if each.shape else np.zeros)(each.shape, each.dtype.numpy) for each in inputs]
    made = [np.ones(each.shape, each.dtype.numpy) for each in outputs]
    context = KernelContext(
        op_def(spec.kind).complete(dict(spec.attrs)),
        spec.input_shapes,
        spec.output_shapes,
        spec.input_regions,
        spec.output_regions,
    )
    kernel = kernel_for(op_def(spec.kind), (each.dtype for each in (*given, *made)))
    tracemalloc.start()
    try:
        with np.errstate(all="ignore"):
            before = held_arrays()
            kernel(context, given, made)
            kept = held_arrays() - before
            gc.collect()
            tracemalloc.reset_peak()
            held, _ = tracemalloc.get_traced_memory()
            kernel(context, given, made)
            _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return Scratch(kept, peak - held)


@pytest.mark.skipif(numba_version() is not None, reason="compiled loops make other arrays")
@pytest.mark.usefixtures("few_objects_to_collect")
@pytest.mark.parametrize("name", JOBS)
def test_kernels_make_the_arrays_that_they_say(name: str) -> None:
    plan = plan_of(JOBS[name]())
    known = work_buffers(plan)
    assert set(known.not_counted) <= UNKNOWN
    seen: dict[object, Scratch] = {}
    kept = 0
    for task in plan.tasks:
        spec = task.spec
        if not isinstance(spec, ComputeSpec) or task.kind is not TaskKind.COMPUTE:
            continue
        if op_def(spec.kind).view or spec.kind in known.not_counted:
            continue
        inputs, outputs = (
            [TensorType(r.shape, r.dtype) for r in map(plan.register_by_id.__getitem__, each)]
            for each in (task.inputs, task.outputs)
        )
        told = scratch_of(spec.kind, tuple(inputs), tuple(outputs), dict(spec.attrs))
        assert told is not None
        key = spec.kind, *inputs, *outputs, spec.attrs
        if key not in seen:
            seen[key] = measured(spec, inputs, outputs)
            assert told.kept <= seen[key].kept < told.kept + NUMBERS, spec.kind
            assert told.passing <= seen[key].passing <= told.passing + NUMPYS_OWN, spec.kind
        kept += told.kept
    assert known.kept == kept > 0


def test_the_forecast_says_which_kinds_it_does_not_count() -> None:
    arguments = ["forecast", str(EXAMPLES / "gpt.py"), "-D", "dim=32"]
    shown = CliRunner().invoke(cli, arguments)
    assert "work buffers" in shown.output
    assert "without attention, attention_grad" in shown.output
    plain = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).output)
    (row,) = plain["classes"]
    assert "attention" in row["work_bytes"]["not_counted"]
    assert plain["memory_bytes"]["max"] == row["memory_bytes"]["total"]


def test_what_kernels_of_devices_make_is_not_known() -> None:
    assert pc.forecast(gpt(dp=1), "a100-sxm").worst.work is None
    assert isinstance(pc.forecast(gpt(dp=1)).worst.work, WorkBuffers)
